//! The FUSE door: takes requests apart, hands them to worker threads, and puts answers into FUSE's words. It decides nothing.

use super::answers::{
    GENERATION, answer_empty, answer_entry, answer_held, answer_held_entry, answer_xattr, caller, errno,
    file_attr, open_flags, timestamp,
};
use super::attr::FileKind;
use super::files::Files;
use super::killed::Watch;
use super::passthrough::{Passthrough, backing};
use super::pool::Pool;
use super::staging::{SetAttr, SetTime, for_client};
use crate::error::Result;
use crate::store::Timestamp;
use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, INodeNo,
    InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier,
    RenameFlags, ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The largest read or write request, in bytes.
const REQUEST: u32 = 1 << 20;
/// Requests of the kernel's readahead and writeback that may be under way.
const BACKGROUND: u16 = 64;
/// At how many of them the kernel starts none of its own accord.
const CONGESTION: u16 = 48;

/// Threads of a pool at most, where a request may wait for the disk or for another request.
const MOST: usize = 64;

/// The file system that fuser serves.
pub(super) struct DoorFs {
    files: Arc<Files>,
    /// Names and attributes: never behind a rebuild.
    names: Pool,
    /// Bytes read, which may have to be rebuilt.
    data: Pool,
    /// Changes in `staging/`, which may wait for the disk.
    changes: Pool,
    through: Passthrough,
    /// Clients that may have to wait long.
    clients: Watch,
}

impl DoorFs {
    /// The door to these files, with `threads` workers for bytes; with `passthrough` where the kernel has it and lets us.
    pub(super) fn new(files: Arc<Files>, threads: usize, passthrough: bool) -> Result<Self> {
        Ok(DoorFs {
            files,
            through: Passthrough::new(passthrough),
            names: Pool::new("zspace-names", 4, MOST)?,
            data: Pool::new("zspace-data", threads.max(4), threads.max(4))?,
            changes: Pool::new("zspace-changes", 4, MOST)?,
            clients: Watch::new()?,
        })
    }

    fn name(&self, job: impl FnOnce(&Files) + Send + 'static) {
        let files = self.files.clone();
        self.names.run(move || job(&files));
    }

    fn bytes(&self, job: impl FnOnce(&Files) + Send + 'static) {
        let files = self.files.clone();
        self.data.run(move || job(&files));
    }

    fn change(&self, req: &Request, job: impl FnOnce(&Files) + Send + 'static) {
        let (files, client) = (self.files.clone(), req.pid());
        self.changes.run(move || for_client(client, || job(&files)));
    }
}

impl Filesystem for DoorFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        ];
        for flag in wanted {
            if config.add_capabilities(flag).is_err() {
                log::debug!("this kernel does not have {flag:?}");
            }
        }
        self.through.ask_for(config);
        // The nearest value that the kernel takes is as good.
        let _ = config.set_max_write(REQUEST);
        let _ = config.set_max_background(BACKGROUND);
        let _ = config.set_congestion_threshold(CONGESTION);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.as_bytes().to_vec();
        self.name(move |files| match files.look_up(parent.0, &name) {
            Ok(Err(ttl)) if !ttl.is_zero() => {
                // Inode 0: the kernel may remember that there is nothing.
                let none = files.space.plain(FileKind::File, 0, 0, Timestamp::default());
                reply.entry(&ttl, &file_attr(0, &none), GENERATION);
            }
            Ok(Err(_)) => reply.error(Errno::ENOENT),
            Ok(Ok(found)) => answer_entry(reply, Ok(found)),
            Err(e) => answer_entry(reply, Err(e)),
        });
    }

    fn forget(&self, _req: &Request, ino: INodeNo, count: u64) {
        self.files.inodes.forget(ino.0, count);
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) {
        self.name(move |files| match files.attr(ino.0, fh.map(|f| f.0)) {
            Ok((attr, ttl)) => reply.attr(&ttl, &file_attr(ino.0, &attr)),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn setattr(
        &self,
        req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let time = |t| match t {
            TimeOrNow::Now => SetTime::Now,
            TimeOrNow::SpecificTime(t) => SetTime::At(timestamp(t)),
        };
        let change = SetAttr {
            mode: mode.map(|m| m & 0o7777),
            uid,
            gid,
            size,
            atime: atime.map(time),
            mtime: mtime.map(time),
        };
        let held = self.clients.hold(req.pid(), reply);
        self.change(req, move |files| {
            let changed = files.set_attr(ino.0, fh.map(|f| f.0), &change);
            match (held.take(), changed) {
                (Some(reply), Ok(attr)) => reply.attr(&Duration::ZERO, &file_attr(ino.0, &attr)),
                (Some(reply), Err(e)) => reply.error(errno(&e)),
                (None, _) => {}
            }
        });
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        self.name(move |files| match files.target(ino.0) {
            Ok(target) => reply.data(&target),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        let (name, by) = (name.as_bytes().to_vec(), caller(req, umask));
        let held = self.clients.hold(req.pid(), reply);
        self.change(req, move |files| {
            answer_held_entry(held, files, files.make_node(parent.0, &name, mode, by))
        });
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry) {
        let (name, by) = (name.as_bytes().to_vec(), caller(req, umask));
        let held = self.clients.hold(req.pid(), reply);
        self.change(req, move |files| {
            answer_held_entry(held, files, files.make_dir(parent.0, &name, mode, by))
        });
    }

    fn unlink(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        let held = self.clients.hold(req.pid(), reply);
        self.change(req, move |files| {
            answer_held(held, files.remove(parent.0, &name, false))
        });
    }

    fn rmdir(&self, req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        let held = self.clients.hold(req.pid(), reply);
        self.change(req, move |files| {
            answer_held(held, files.remove(parent.0, &name, true))
        });
    }

    fn symlink(&self, req: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let (name, by) = (name.as_bytes().to_vec(), caller(req, 0));
        let target = target.as_os_str().as_bytes().to_vec();
        let held = self.clients.hold(req.pid(), reply);
        self.change(req, move |files| {
            answer_held_entry(held, files, files.make_link(parent.0, &name, &target, by))
        });
    }

    fn rename(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = (name.as_bytes().to_vec(), new_name.as_bytes().to_vec());
        let held = self.clients.hold(req.pid(), reply);
        self.change(req, move |files| {
            let result = files.rename((parent.0, &from), (new_parent.0, &to), flags.bits());
            answer_held(held, result);
        });
    }

    fn link(&self, req: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.as_bytes().to_vec();
        let held = self.clients.hold(req.pid(), reply);
        self.change(req, move |files| {
            answer_held_entry(held, files, files.link(ino.0, parent.0, &name))
        });
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let held = self.clients.hold(req.pid(), reply);
        let through = self.through.clone();
        self.change(req, move |files| {
            let register = |file: &File| through.register(|| held.with(|reply| reply.open_backing(file)));
            let opened = files.open(ino.0, flags.0, &register);
            match (held.take(), opened) {
                (Some(reply), Ok(opened)) => match backing(&opened) {
                    Some(id) => reply.opened_passthrough(FileHandle(opened.fh), open_flags(&opened), id),
                    None => reply.opened(FileHandle(opened.fh), open_flags(&opened)),
                },
                (Some(reply), Err(e)) => reply.error(errno(&e)),
                // Its client was interrupted: nobody else will close it.
                (None, Ok(opened)) => files.release(ino.0, opened.fh),
                (None, Err(_)) => {}
            }
        });
    }

    fn read(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.bytes(move |files| {
            // The reply is used up by one of the two: by the bytes where they lie, or by the error.
            let mut reply = Some(reply);
            let result = files.read(fh.0, offset, size as usize, |bytes| {
                if let Some(reply) = reply.take() {
                    reply.data(bytes);
                }
            });
            if let (Err(e), Some(reply)) = (result, reply) {
                reply.error(errno(&e));
            }
        });
    }

    fn write(
        &self,
        req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        flags: WriteFlags,
        _open_flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let data = data.to_vec();
        let strip = flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        self.change(req, move |files| match files.write(fh.0, offset, &data, strip) {
            Ok(n) => reply.written(u32::try_from(n).unwrap_or(u32::MAX)),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn flush(&self, req: &Request, _ino: INodeNo, fh: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        let pid = req.pid();
        self.change(req, move |files| answer_empty(reply, files.flush(fh.0, pid)));
    }

    fn release(
        &self,
        req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.change(req, move |files| {
            files.release(ino.0, fh.0);
            reply.ok();
        });
    }

    fn fsync(&self, req: &Request, _ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        let held = self.clients.hold(req.pid(), reply);
        self.change(req, move |files| answer_held(held, files.sync(fh.0, datasync)));
    }

    fn opendir(&self, _req: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        self.name(move |files| match files.open_dir(ino.0) {
            Ok((fh, true)) => {
                let flags = FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE;
                reply.opened(FileHandle(fh), flags);
            }
            Ok((fh, false)) => reply.opened(FileHandle(fh), FopenFlags::empty()),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn readdir(&self, _req: &Request, ino: INodeNo, fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        self.name(move |files| {
            let result = files.list(ino.0, fh.0, offset, false, |l| {
                let kind = file_attr(l.found.ino, &l.found.attr).kind;
                reply.add(INodeNo(l.found.ino), l.next, kind, OsStr::from_bytes(l.name))
            });
            match result {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        self.name(move |files| {
            let result = files.list(ino.0, fh.0, offset, true, |l| {
                let f = l.found;
                // One time for both: the shorter.
                let ttl = f.entry_ttl.min(f.attr_ttl);
                let attr = file_attr(f.ino, &f.attr);
                reply.add(
                    INodeNo(f.ino),
                    l.next,
                    OsStr::from_bytes(l.name),
                    &ttl,
                    &attr,
                    GENERATION,
                )
            });
            match result {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(errno(&e)),
            }
        });
    }

    fn releasedir(&self, _req: &Request, ino: INodeNo, fh: FileHandle, _flags: OpenFlags, reply: ReplyEmpty) {
        self.files.release(ino.0, fh.0);
        reply.ok();
    }

    fn fsyncdir(&self, req: &Request, ino: INodeNo, _fh: FileHandle, datasync: bool, reply: ReplyEmpty) {
        self.change(req, move |files| {
            answer_empty(reply, files.sync_dir(ino.0, datasync))
        });
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        self.name(move |files| match files.room() {
            Ok(s) => {
                let (size, name) = (s.f_bsize as u32, 255);
                reply.statfs(
                    s.f_blocks,
                    s.f_bfree,
                    s.f_bavail,
                    s.f_files,
                    s.f_ffree,
                    size,
                    name,
                    s.f_frsize as u32,
                );
            }
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn setxattr(
        &self,
        req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let (name, value) = (name.as_bytes().to_vec(), value.to_vec());
        let held = self.clients.hold(req.pid(), reply);
        self.change(req, move |files| {
            answer_held(held, files.set_xattr(ino.0, &name, &value, flags))
        });
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        let name = name.as_bytes();
        // Asked for at every turn by ls, cp and the kernel, and never there: answered at once.
        if !name.starts_with(b"user.") {
            return reply.error(Errno::ENODATA);
        }
        let name = name.to_vec();
        self.name(move |files| match files.xattr(ino.0, &name) {
            Ok(Some(value)) => answer_xattr(reply, size, &value),
            Ok(None) => reply.error(Errno::ENODATA),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn listxattr(&self, _req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.name(move |files| match files.xattr_list(ino.0) {
            Ok(names) => answer_xattr(reply, size, &names),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn removexattr(&self, req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let name = name.as_bytes().to_vec();
        let held = self.clients.hold(req.pid(), reply);
        self.change(req, move |files| {
            answer_held(held, files.remove_xattr(ino.0, &name))
        });
    }

    fn access(&self, _req: &Request, _ino: INodeNo, _mask: AccessFlags, reply: ReplyEmpty) {
        // The kernel checks permissions itself (default_permissions).
        reply.ok();
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let (name, by) = (name.as_bytes().to_vec(), caller(req, umask));
        let held = self.clients.hold(req.pid(), reply);
        let through = self.through.clone();
        self.change(req, move |files| {
            let register = |file: &File| through.register(|| held.with(|reply| reply.open_backing(file)));
            let made = files.create(parent.0, &name, mode, flags, by, &register);
            match (held.take(), made) {
                (Some(reply), Ok((found, opened))) => {
                    let attr = file_attr(found.ino, &found.attr);
                    let (ttl, fh, flags) = (&Duration::ZERO, FileHandle(opened.fh), open_flags(&opened));
                    match backing(&opened) {
                        Some(id) => reply.created_passthrough(ttl, &attr, GENERATION, fh, flags, id),
                        None => reply.created(ttl, &attr, GENERATION, fh, flags),
                    }
                }
                (Some(reply), Err(e)) => reply.error(errno(&e)),
                // Its client was interrupted: nobody else will close or forget it.
                (None, Ok((found, opened))) => {
                    files.release(found.ino, opened.fh);
                    files.inodes.forget(found.ino, 1);
                }
                (None, Err(_)) => {}
            }
        });
    }

    fn bmap(&self, _req: &Request, _ino: INodeNo, _size: u32, _index: u64, reply: ReplyBmap) {
        reply.error(Errno::ENOSYS);
    }

    fn ioctl(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _data: &[u8],
        _size: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    fn poll(
        &self,
        _req: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _notifier: PollNotifier,
        _events: PollEvents,
        _flags: PollFlags,
        reply: ReplyPoll,
    ) {
        // The kernel then answers by itself: always ready.
        reply.error(Errno::ENOSYS);
    }

    fn fallocate(
        &self,
        req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        self.change(req, move |files| {
            answer_empty(reply, files.allocate(fh.0, mode, offset, length))
        });
    }

    fn lseek(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        self.bytes(move |files| match files.seek(fh.0, offset, whence) {
            Ok(at) => reply.offset(i64::try_from(at).unwrap_or(i64::MAX)),
            Err(e) => reply.error(errno(&e)),
        });
    }

    fn copy_file_range(
        &self,
        _req: &Request,
        _ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        _ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        self.bytes(
            move |files| match files.copy((fh_in.0, offset_in), (fh_out.0, offset_out), len) {
                Ok(n) => reply.written(u32::try_from(n).unwrap_or(u32::MAX)),
                Err(e) => reply.error(errno(&e)),
            },
        );
    }
}

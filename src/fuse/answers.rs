//! What files answer, in FUSE's words.

use super::attr::{Attr, FileKind};
use super::changes::Caller;
use super::files::{Files, Found};
use super::io::Opened;
use super::killed::Held;
use crate::error::{Error, Result};
use crate::store::Timestamp;
use fuser::{
    Errno, FileAttr, FileType, FopenFlags, Generation, INodeNo, ReplyEmpty, ReplyEntry, ReplyXattr, Request,
};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Numbers are never used twice, so all are of one generation.
pub(super) const GENERATION: Generation = Generation(0);

pub(super) fn errno(e: &Error) -> Errno {
    match e.errno() {
        libc::EIO => log::error!("{e}"),
        libc::ENOSPC | libc::EDQUOT => log::warn!("{e}"),
        _ => log::debug!("{e}"),
    }
    Errno::from_i32(e.errno())
}

pub(super) fn system_time(t: Timestamp) -> SystemTime {
    let whole = Duration::from_secs(t.seconds.unsigned_abs());
    let base = if t.seconds >= 0 {
        UNIX_EPOCH.checked_add(whole)
    } else {
        UNIX_EPOCH.checked_sub(whole)
    };
    let exact = base.and_then(|b| b.checked_add(Duration::from_nanos(u64::from(t.nanos))));
    exact.unwrap_or(UNIX_EPOCH)
}

/// The time a request asks for. fuser gives times before 1970 as 1970 less the whole seconds and less the nanoseconds too, which
/// the kernel meant to be added.
pub(super) fn timestamp(t: SystemTime) -> Timestamp {
    match t.duration_since(UNIX_EPOCH) {
        Ok(d) => Timestamp {
            seconds: i64::try_from(d.as_secs()).unwrap_or(i64::MAX),
            nanos: d.subsec_nanos(),
        },
        Err(e) => Timestamp {
            seconds: i64::try_from(e.duration().as_secs()).map_or(i64::MIN, |s| -s),
            nanos: e.duration().subsec_nanos(),
        },
    }
}

pub(super) fn file_attr(ino: u64, attr: &Attr) -> FileAttr {
    let kind = match attr.kind {
        FileKind::File => FileType::RegularFile,
        FileKind::Dir => FileType::Directory,
        FileKind::Symlink => FileType::Symlink,
        FileKind::Fifo => FileType::NamedPipe,
        FileKind::Socket => FileType::Socket,
        FileKind::Char => FileType::CharDevice,
        FileKind::Block => FileType::BlockDevice,
    };
    FileAttr {
        ino: INodeNo(ino),
        size: attr.size,
        blocks: attr.blocks,
        atime: system_time(attr.atime),
        mtime: system_time(attr.mtime),
        ctime: system_time(attr.ctime),
        crtime: UNIX_EPOCH,
        kind,
        perm: (attr.mode & 0o7777) as u16,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: 4096,
        flags: 0,
    }
}

pub(super) fn answer_entry(reply: ReplyEntry, found: Result<Found>) {
    match found {
        Ok(f) => reply.entry_with_ttls(&f.attr_ttl, &f.entry_ttl, &file_attr(f.ino, &f.attr), GENERATION),
        Err(e) => reply.error(errno(&e)),
    }
}

pub(super) fn answer_empty(reply: ReplyEmpty, result: Result<()>) {
    match result {
        Ok(()) => reply.ok(),
        Err(e) => reply.error(errno(&e)),
    }
}

/// Answers whoever still waits for it.
pub(super) fn answer_held(held: Held<ReplyEmpty>, result: Result<()>) {
    if let Some(reply) = held.take() {
        answer_empty(reply, result);
    }
}

/// The same of a name that was made.
pub(super) fn answer_held_entry(held: Held<ReplyEntry>, files: &Files, found: Result<Found>) {
    match (held.take(), found) {
        (Some(reply), found) => answer_entry(reply, found),
        // The kernel does not know of it.
        (None, Ok(found)) => files.inodes.forget(found.ino, 1),
        (None, Err(_)) => {}
    }
}

pub(super) fn answer_xattr(reply: ReplyXattr, size: u32, value: &[u8]) {
    match u32::try_from(value.len()) {
        Ok(len) if size == 0 => reply.size(len),
        Ok(len) if len <= size => reply.data(value),
        _ => reply.error(Errno::ERANGE),
    }
}

pub(super) fn open_flags(opened: &Opened) -> FopenFlags {
    match (opened.fixed, opened.writes) {
        // Where the kernel goes to the backing file, there is no cache to keep.
        (true, _) if opened.through.is_some() => FopenFlags::FOPEN_NOFLUSH,
        (true, _) => FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH,
        (false, true) => FopenFlags::empty(),
        (false, false) => FopenFlags::FOPEN_NOFLUSH,
    }
}

pub(super) fn caller(req: &Request, umask: u32) -> Caller {
    Caller {
        uid: req.uid(),
        gid: req.gid(),
        umask,
    }
}

//! Changing names and attributes: each call takes care of marks, copies up what is committed, and then does to the backing
//! files what was asked.

use super::backing::{Backing, attr_of, committed_meanwhile, kind_of};
use super::handle::Handle;
use super::marks::Mark;
use super::names::{self, errno};
use super::repo::{absent, find, timespec};
use super::state::{Entry, Key, Open, key_of};
use super::{Guard, Located, Staging, copyup, version_attr};
use crate::error::{Error, IoContext, Kind, Result};
use crate::fuse::attr::{Attr, FileKind};
use crate::store::{EntryKind, Timestamp};
use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, Timespec, Timestamps, Uid};
use std::fs::{File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The present.
    Now,
    /// This one.
    At(Timestamp),
}

/// Attributes to change; what is `None` stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits (07777).
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes.
    pub size: Option<u64>,
    /// Time of last access.
    pub atime: Option<SetTime>,
    /// Time of last modification.
    pub mtime: Option<SetTime>,
}

impl SetAttr {
    fn times(&self) -> Option<Timestamps> {
        let spec = |t: Option<SetTime>| match t {
            None => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_OMIT },
            Some(SetTime::Now) => Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW },
            Some(SetTime::At(t)) => timespec(t),
        };
        let times = Timestamps { last_access: spec(self.atime), last_modification: spec(self.mtime) };
        (self.atime.is_some() || self.mtime.is_some()).then_some(times)
    }

    fn owner(&self) -> Option<(Option<Uid>, Option<Gid>)> {
        let (uid, gid) = (self.uid.map(Uid::from_raw), self.gid.map(Gid::from_raw));
        (uid.is_some() || gid.is_some()).then_some((uid, gid))
    }
}

/// Sets owner, mode and times of an open file.
pub(super) fn apply_to_fd(file: &File, change: &SetAttr) -> Result<()> {
    let what = || "set the attributes of a staged file".to_owned();
    if let Some((uid, gid)) = change.owner() {
        rustix::fs::fchown(file, uid, gid).doing(what)?;
    }
    if let Some(mode) = change.mode {
        file.set_permissions(Permissions::from_mode(mode & 0o7777)).doing(what)?;
    }
    if let Some(times) = change.times() {
        rustix::fs::futimens(file, &times).doing(what)?;
    }
    Ok(())
}

/// How much of a committed entry a change needs on disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    /// All of it.
    Whole,
    /// Nothing: the change puts something else in its place.
    Nothing,
}

/// What an entry was before a change that may fail.
type Before = Option<(Key, Option<Mark>)>;

impl Staging {
    fn check_writable(&self, g: &Guard<'_>) -> Result<()> {
        if !self.is_owner() {
            return Err(Error::new(Kind::ReadOnly, "another mount owns the staging area of this store"));
        }
        if g.frozen {
            return Err(Error::new(Kind::ReadOnly, "the mount is ending: nothing new is taken in"));
        }
        Ok(())
    }

    fn wait_idle(&self, g: &mut Guard<'_>, path: &names::Path) {
        let Some(key) = key_of(path) else { return };
        while g.entries.get(&key).is_some_and(|e| e.busy) {
            self.shared.wake.wait(g);
        }
    }

    /// Gets the entry of `path` ready for a change: the durable mark first, then, if it is committed, its files.
    fn begin(&self, g: &mut Guard<'_>, path: &names::Path, need: Need) -> Result<Before> {
        self.check_writable(g)?;
        self.wait_idle(g, path);
        let branch = self.branch(&path[0]).ok_or_else(|| absent(path))?;
        self.branch_dir(&branch)?;
        let Some(key) = key_of(path) else { return Ok(None) };
        let before = g.entries.get(&key).map(|e| e.mark.clone());
        let mark = match &before {
            None if names::unfinished(&key.1) => return Ok(None),
            Some(Mark::Dirty { .. }) => return Ok(Some((key, before))),
            Some(Mark::Committed { .. }) if need == Need::Whole => {
                self.copy_up(g, &key)?;
                return Ok(Some((key, g.entries.get(&path_key(path)).map(|e| e.mark.clone()))));
            }
            Some(Mark::Committed { origin }) => Mark::Dirty { base: Some(origin.clone()) },
            None => Mark::NEW,
        };
        self.marks.write(&key.0, &key.1, &mark)?;
        g.entries.insert(key.clone(), Entry::new(mark, self.clock.now()));
        Ok(Some((key, before)))
    }

    /// Ends a change: notes it, or, if it failed and left nothing, makes the entry what it was.
    fn end<T>(&self, g: &mut Guard<'_>, path: &names::Path, before: Before, done: Result<T>) -> Result<T> {
        if done.is_ok() {
            g.touch(path, self.clock.now());
            self.wake(g);
            return done;
        }
        if let Some((key, before)) = before
            && self.backing()?.stat(&path[..2]).is_ok_and(|s| s.is_none())
        {
            match before {
                Some(mark @ Mark::Committed { .. }) => {
                    self.marks.write(&key.0, &key.1, &mark)?;
                    g.entries.insert(key, Entry::new(mark, self.clock.now()));
                }
                _ => self.forget(g, &key),
            }
        }
        done
    }

    /// A change of what `path` names or holds, its entry being on disk as far as needed.
    fn change<T>(
        &self,
        g: &mut Guard<'_>,
        path: &names::Path,
        need: Need,
        work: impl FnOnce(&Backing, &mut Guard<'_>) -> Result<T>,
    ) -> Result<T> {
        let before = self.begin(g, path, need)?;
        let done = self.backing().and_then(|b| work(b, g));
        self.end(g, path, before, done)
    }

    /// Makes something new at `path`, which must be free.
    fn make(&self, path: &names::Path, work: impl FnOnce(&Backing) -> Result<()>) -> Result<Attr> {
        names::check(path)?;
        if path.len() < 2 {
            return Err(errno(libc::EPERM, "only branches lie directly in staging"));
        }
        let mut g = self.lock();
        self.check_writable(&g)?;
        self.free(&mut g, path)?;
        let need = if path.len() == 2 { Need::Nothing } else { Need::Whole };
        self.change(&mut g, path, need, |b, g| {
            work(b)?;
            g.clear(path);
            Ok(attr_of(&b.stat(path)?.ok_or_else(|| absent(path))?))
        })
    }

    /// Fails unless `path` is free and its directory is there.
    fn free(&self, g: &mut Guard<'_>, path: &names::Path) -> Result<()> {
        self.wait_idle(g, path);
        self.locate_in(g, &path[..path.len() - 1])?;
        match self.locate_in(g, path) {
            Ok(_) => Err(Error::new(Kind::Exists, format!("{} exists", names::show(path)))),
            Err(e) if e.kind() == Kind::NotFound => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// The branch's directory on disk, made when it is first needed; then the branch is no longer put away.
    fn branch_dir(&self, branch: &str) -> Result<()> {
        let dir = self.dir.join("tree").join(branch);
        match std::fs::create_dir(&dir) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
            r => r.doing(|| format!("make {}", dir.display())),
        }
    }

    /// Forgets an entry: nothing is staged under its name.
    pub(super) fn forget(&self, g: &mut Guard<'_>, key: &Key) {
        g.entries.remove(key);
        g.clear(&super::state::path_of(key));
        g.touch(&super::state::path_of(key), self.clock.now());
        if let Err(e) = self.marks.remove(&key.0, &key.1) {
            log::warn!("{e}");
        }
        self.wake(g);
    }

    fn handle(self: &Arc<Self>, g: &mut Guard<'_>, file: File, writer: Option<&names::Path>, fresh: bool) -> Handle {
        let tick = Arc::new(AtomicU64::new(self.clock.now().as_millis() as u64));
        let writer = writer.map(|path| {
            let id = g.number();
            g.opens.insert(id, Open { path: Some(path.to_vec()), tick: tick.clone() });
            id
        });
        let staging = self.clone();
        let (wrote, killed, quiet) = (AtomicBool::new(fresh), Mutex::new(None), AtomicBool::new(false));
        Handle { staging, file, writer, tick, wrote, killed, quiet }
    }

    /// Opens a staged file with the flags of open(2). Opening a committed file for writing brings its entry back to disk,
    /// unless O_TRUNC makes that needless.
    pub fn open_file(self: &Arc<Self>, path: &[Vec<u8>], flags: i32) -> Result<Handle> {
        names::check(path)?;
        let mut g = self.lock();
        self.wait_idle(&mut g, path);
        let at = self.locate_in(&g, path)?;
        let truncate = flags & libc::O_TRUNC != 0;
        let write = flags & libc::O_ACCMODE != libc::O_RDONLY || truncate;
        let oflags = open_flags(flags);
        if !write {
            return match at {
                Located::Disk(_) => {
                    let file = open_regular(self.backing()?, path, oflags)?;
                    Ok(self.handle(&mut g, file, None, false))
                }
                Located::Version { .. } => Err(committed_meanwhile()),
                Located::Branch(_) | Located::Root => Err(errno(libc::EISDIR, "a directory")),
            };
        }
        let file = match at {
            Located::Branch(_) | Located::Root => return Err(errno(libc::EISDIR, "a directory")),
            Located::Version { version, path: inside } if truncate && path.len() == 2 => {
                let entry = find(self.repo.as_ref(), &version, &inside)?;
                if !matches!(entry.kind, EntryKind::File { .. }) {
                    return Err(errno(libc::EISDIR, "no regular file"));
                }
                self.change(&mut g, path, Need::Nothing, |b, _| {
                    copyup::empty_like(&b.path(path), &entry)?;
                    open_regular(b, path, oflags)
                })?
            }
            _ => self.change(&mut g, path, Need::Whole, |b, _| open_regular(b, path, oflags))?,
        };
        if truncate {
            g.clear(path);
        }
        Ok(self.handle(&mut g, file, Some(path), truncate))
    }

    /// Makes and opens a regular file. The caller becomes its owner where this process may give files away.
    #[allow(clippy::too_many_arguments)]
    pub fn create(
        self: &Arc<Self>,
        path: &[Vec<u8>],
        mode: u32,
        flags: i32,
        umask: u32,
        uid: u32,
        gid: u32,
    ) -> Result<(Handle, Attr)> {
        names::check(path)?;
        let there = self.locate(path);
        if there.is_ok() && flags & libc::O_EXCL == 0 {
            let handle = self.open_file(path, flags & !libc::O_CREAT)?;
            let attr = handle.attr()?;
            return Ok((handle, attr));
        }
        let mut file = None;
        let attr = self.make(path, |b| {
            let access = open_flags(flags & libc::O_ACCMODE | flags & (libc::O_SYNC | libc::O_DSYNC));
            let fd = b.open_at(path, access | OFlags::CREATE | OFlags::EXCL, Mode::RUSR | Mode::WUSR)?;
            let new = File::from(fd);
            own(b, path, uid, gid)?;
            new.set_permissions(Permissions::from_mode(mode & !umask & 0o7777)).doing(|| "set the mode".into())?;
            file = Some(new);
            Ok(())
        })?;
        let file = file.ok_or_else(|| absent(path))?;
        let write = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let mut g = self.lock();
        Ok((self.handle(&mut g, file, write.then_some(path), true), attr))
    }

    /// Makes a directory; directly in staging/, a branch.
    pub fn mkdir(&self, path: &[Vec<u8>], mode: u32, umask: u32, uid: u32, gid: u32) -> Result<Attr> {
        names::check(path)?;
        if let [branch] = path {
            return self.make_branch(branch);
        }
        self.make(path, |b| {
            let (dir, name) = b.parent(path)?;
            rustix::fs::mkdirat(&dir, name, Mode::RWXU).doing(|| format!("make {}", names::show(path)))?;
            own(b, path, uid, gid)?;
            let inherited = b.stat(path)?.map_or(0, |s| s.st_mode & libc::S_ISGID);
            set_mode(b, path, mode & !umask | inherited)
        })
    }

    fn make_branch(&self, name: &[u8]) -> Result<Attr> {
        let g = self.lock();
        self.check_writable(&g)?;
        let text = std::str::from_utf8(name).map_err(|_| errno(libc::EINVAL, "a branch is named in ASCII"))?;
        if self.branch(name).is_some() {
            return Err(Error::new(Kind::Exists, format!("there is a branch {text:?} already")));
        }
        if !self.repo.branches().iter().any(|b| b == text) {
            self.repo.make_branch(text)?;
        }
        self.branch_dir(text)?;
        let _ = std::fs::remove_file(self.hidden(text));
        self.stat_or_root(&[name.to_vec()])
    }

    /// Makes a regular file, a FIFO or a socket; devices are EPERM.
    pub fn mknod(&self, path: &[Vec<u8>], kind: FileKind, mode: u32, umask: u32, uid: u32, gid: u32) -> Result<Attr> {
        let file_type = match kind {
            FileKind::File => FileType::RegularFile,
            FileKind::Fifo => FileType::Fifo,
            FileKind::Socket => FileType::Socket,
            _ => return Err(errno(libc::EPERM, "no devices in staging")),
        };
        self.make(path, |b| {
            let (dir, name) = b.parent(path)?;
            rustix::fs::mknodat(&dir, name, file_type, Mode::RUSR | Mode::WUSR, 0)
                .doing(|| format!("make {}", names::show(path)))?;
            own(b, path, uid, gid)?;
            set_mode(b, path, mode & !umask)
        })
    }

    /// Makes a symbolic link.
    pub fn symlink(&self, path: &[Vec<u8>], target: &[u8], uid: u32, gid: u32) -> Result<Attr> {
        self.make(path, |b| {
            let (dir, name) = b.parent(path)?;
            rustix::fs::symlinkat(target, &dir, name).doing(|| format!("make {}", names::show(path)))?;
            own(b, path, uid, gid)
        })
    }

    /// Makes a hard link `to` to the file `from`.
    pub fn link(&self, from: &[Vec<u8>], to: &[Vec<u8>]) -> Result<Attr> {
        names::check(from)?;
        names::check(to)?;
        {
            let mut g = self.lock();
            self.check_writable(&g)?;
            self.wait_idle(&mut g, from);
            if to.len() >= 2 {
                self.free(&mut g, to)?;
            }
            match self.locate_in(&g, from)? {
                Located::Version { .. } => drop(self.begin(&mut g, from, Need::Whole)?),
                Located::Disk(_) => {}
                Located::Branch(_) | Located::Root => return Err(errno(libc::EPERM, "a directory")),
            }
        }
        self.make(to, |b| {
            let ((from_dir, from_name), (dir, name)) = (b.parent(from)?, b.parent(to)?);
            rustix::fs::linkat(&from_dir, from_name, &dir, name, AtFlags::empty())
                .doing(|| format!("link {}", names::show(to)))
        })
    }

    /// Where a symbolic link points.
    pub fn readlink(&self, path: &[Vec<u8>]) -> Result<Vec<u8>> {
        names::check(path)?;
        match self.locate(path)? {
            Located::Version { version, path } => match find(self.repo.as_ref(), &version, &path)?.kind {
                EntryKind::Symlink(target) => Ok(target),
                _ => Err(errno(libc::EINVAL, "no symbolic link")),
            },
            Located::Disk(_) => {
                let (dir, name) = self.backing()?.parent(path)?;
                let target = rustix::fs::readlinkat(&dir, name, Vec::new());
                Ok(target.doing(|| format!("read link {}", names::show(path)))?.into_bytes())
            }
            Located::Branch(_) | Located::Root => Err(errno(libc::EINVAL, "no symbolic link")),
        }
    }

    /// Removes a name that is no directory. From a committed entry this removes nothing but the name in staging.
    pub fn unlink(&self, path: &[Vec<u8>]) -> Result<()> {
        self.remove(path, false)
    }

    /// Removes an empty directory. A branch is only put away until it is used again.
    pub fn rmdir(&self, path: &[Vec<u8>]) -> Result<()> {
        self.remove(path, true)
    }

    fn remove(&self, path: &names::Path, dir: bool) -> Result<()> {
        names::check(path)?;
        let mut g = self.lock();
        self.check_writable(&g)?;
        self.wait_idle(&mut g, path);
        match self.locate_in(&g, path)? {
            Located::Root => Err(errno(libc::EBUSY, "staging itself")),
            Located::Branch(_) if !dir => Err(errno(libc::EISDIR, "a branch")),
            Located::Branch(branch) => self.put_away(&g, &branch),
            Located::Version { version, path: inside } => {
                let entry = find(self.repo.as_ref(), &version, &inside)?;
                match (dir, matches!(entry.kind, EntryKind::Dir { .. })) {
                    (true, false) => return Err(errno(libc::ENOTDIR, "not a directory")),
                    (false, true) => return Err(errno(libc::EISDIR, "a directory")),
                    _ => {}
                }
                if dir && !self.list_in(&g, path)?.is_empty() {
                    return Err(errno(libc::ENOTEMPTY, "directory not empty"));
                }
                self.remove_committed(&mut g, path)
            }
            Located::Disk(_) => {
                let key = key_of(path).filter(|_| path.len() == 2);
                self.change(&mut g, path, Need::Whole, |b, g| {
                    let (parent, name) = b.parent(path)?;
                    let flags = if dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                    rustix::fs::unlinkat(&parent, name, flags).doing(|| format!("remove {}", names::show(path)))?;
                    g.orphan(path);
                    g.clear(path);
                    Ok(())
                })?;
                if let Some(key) = key {
                    self.forget(&mut g, &key);
                }
                Ok(())
            }
        }
    }

    /// Removes a name from a committed entry without bringing its files back: for `rm -r` of a whole checkpoint.
    fn remove_committed(&self, g: &mut Guard<'_>, path: &names::Path) -> Result<()> {
        let key = path_key(path);
        if path.len() == 2 {
            self.forget(g, &key);
            return Ok(());
        }
        let rel = &path[2..];
        let now = self.clock.now();
        match g.entries.get_mut(&key) {
            Some(e) => match &mut e.mark {
                Mark::Committed { origin } => {
                    self.marks.append_gone(&key.0, &key.1, rel)?;
                    // Of a directory only its own name is kept.
                    origin.gone.retain(|p| !p.starts_with(rel));
                    origin.gone.insert(rel.to_vec());
                }
                Mark::Dirty { .. } => return Err(committed_meanwhile()),
            },
            None => return Err(absent(path)),
        }
        g.touch(path, now);
        self.wake(g);
        Ok(())
    }

    fn put_away(&self, g: &Guard<'_>, branch: &str) -> Result<()> {
        if !self.list_branch(g, branch)?.is_empty() {
            return Err(errno(libc::ENOTEMPTY, "the branch has entries"));
        }
        if branch == "main" {
            return Err(errno(libc::EBUSY, "main always exists"));
        }
        let mark = self.hidden(branch);
        std::fs::write(&mark, b"").doing(|| format!("write {}", mark.display()))?;
        let dir = self.dir.join("tree").join(branch);
        match std::fs::remove_dir(&dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(format!("remove {}", dir.display()), e)),
            _ => Ok(()),
        }
    }

    /// Renames with the flags of renameat2(2): RENAME_NOREPLACE, RENAME_EXCHANGE.
    pub fn rename(&self, from: &[Vec<u8>], to: &[Vec<u8>], flags: u32) -> Result<()> {
        names::check(from)?;
        names::check(to)?;
        let known = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE;
        let flags = RenameFlags::from_bits(flags).filter(|f| known.contains(*f));
        let flags = flags.ok_or_else(|| errno(libc::EINVAL, "rename flags"))?;
        if from.len() < 2 || to.len() < 2 {
            return Err(errno(libc::EPERM, "branches are not renamed, and only branches lie directly in staging"));
        }
        let mut g = self.lock();
        self.check_writable(&g)?;
        self.wait_idle(&mut g, from);
        self.wait_idle(&mut g, to);
        self.locate_in(&g, from)?;
        self.locate_in(&g, &to[..to.len() - 1])?;
        let target = match self.locate_in(&g, to) {
            Ok(at) => Some(at),
            Err(e) if e.kind() == Kind::NotFound => None,
            Err(e) => return Err(e),
        };
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        match &target {
            Some(_) if flags.contains(RenameFlags::NOREPLACE) => {
                return Err(Error::new(Kind::Exists, format!("{} exists", names::show(to))));
            }
            None if exchange => return Err(absent(to)),
            Some(Located::Version { .. }) if !exchange => self.check_replace(&g, from, to)?,
            _ => {}
        }
        if from == to {
            return Ok(());
        }
        let need = if to.len() == 2 && !exchange { Need::Nothing } else { Need::Whole };
        let source_before = self.begin(&mut g, from, Need::Whole)?;
        let done = self.change(&mut g, to, need, |b, _| {
            let ((from_dir, from_name), (to_dir, to_name)) = (b.parent(from)?, b.parent(to)?);
            rustix::fs::renameat_with(&from_dir, from_name, &to_dir, to_name, flags)
                .doing(|| format!("rename {} to {}", names::show(from), names::show(to)))
        });
        self.end(&mut g, from, source_before, done)?;
        self.renamed(&mut g, from, to, exchange);
        Ok(())
    }

    /// What a rename over a committed file or directory must not do.
    fn check_replace(&self, g: &Guard<'_>, from: &names::Path, to: &names::Path) -> Result<()> {
        let is_dir = |path: &names::Path| Ok::<_, Error>(self.attr_in(g, path)?.kind == FileKind::Dir);
        match (is_dir(from)?, is_dir(to)?) {
            (true, false) => Err(errno(libc::ENOTDIR, "not a directory")),
            (false, true) => Err(errno(libc::EISDIR, "a directory")),
            (true, true) if !self.list_in(g, to)?.is_empty() => Err(errno(libc::ENOTEMPTY, "directory not empty")),
            _ => Ok(()),
        }
    }

    fn renamed(&self, g: &mut Guard<'_>, from: &names::Path, to: &names::Path, exchange: bool) {
        // Renaming one hard link of a file over another does nothing at all.
        if !exchange && self.backing().and_then(|b| b.stat(from)).is_ok_and(|s| s.is_some()) {
            return;
        }
        if !exchange {
            g.orphan(to);
            g.clear(to);
        }
        g.moved(from, to, exchange);
        if from.len() == 2 && !exchange {
            self.forget_name(g, &path_key(from));
        }
        let is_dir = self.backing().and_then(|b| b.stat(to)).is_ok_and(|s| {
            s.is_some_and(|s| kind_of(s.st_mode) == FileKind::Dir)
        });
        let whole = from.len() == 2 && names::unfinished(&from[1]) || from[0] != to[0];
        let closed = g.number();
        if let Some(e) = g.entries.get_mut(&path_key(to)).filter(|_| to.len() == 2) {
            (e.at_once, e.closed) = (is_dir && whole, closed);
        }
        self.wake(g);
    }

    /// Forgets the entry of a name that was moved away, and only that.
    fn forget_name(&self, g: &mut Guard<'_>, key: &Key) {
        if g.entries.remove(key).is_some()
            && let Err(e) = self.marks.remove(&key.0, &key.1)
        {
            log::warn!("{e}");
        }
    }

    /// Changes attributes. What would change nothing of a committed file brings nothing back to disk.
    pub fn setattr(&self, path: &[Vec<u8>], change: &SetAttr) -> Result<Attr> {
        names::check(path)?;
        let mut g = self.lock();
        self.check_writable(&g)?;
        self.wait_idle(&mut g, path);
        let apply = |b: &Backing| {
            apply(b, path, change)?;
            Ok(attr_of(&b.stat(path)?.ok_or_else(|| absent(path))?))
        };
        match self.locate_in(&g, path)? {
            Located::Root => Err(errno(libc::EPERM, "staging itself")),
            Located::Branch(branch) => {
                self.branch_dir(&branch)?;
                apply(self.backing()?)
            }
            Located::Version { version, path: inside } => {
                let entry = find(self.repo.as_ref(), &version, &inside)?;
                // Owner and access time are not kept by a version.
                let mtime = |t| matches!(t, SetTime::At(t) if t == entry.mtime);
                let same = change.mode.is_none_or(|m| m & 0o7777 == entry.mode)
                    && change.size.is_none_or(|s| s == entry.len() && s != 0)
                    && change.mtime.is_none_or(mtime);
                if same {
                    return Ok(version_attr(&entry, version.version.time));
                }
                let file = matches!(entry.kind, EntryKind::File { .. });
                if change.size == Some(0) && path.len() == 2 && file {
                    return self.change(&mut g, path, Need::Nothing, |b, _| {
                        copyup::empty_like(&b.path(path), &entry)?;
                        apply(b)
                    });
                }
                self.change(&mut g, path, Need::Whole, |b, _| apply(b))
            }
            Located::Disk(_) => self.change(&mut g, path, Need::Whole, |b, g| {
                let attr = apply(b)?;
                if change.size == Some(0) {
                    g.clear(path);
                }
                Ok(attr)
            }),
        }
    }

    /// The value of an extended attribute of a staged file.
    pub fn getxattr(&self, path: &[Vec<u8>], name: &[u8]) -> Result<Vec<u8>> {
        names::check(path)?;
        let at = self.on_disk(path)?;
        let what = || format!("read an attribute of {}", names::show(path));
        let mut value = vec![0; 64 << 10];
        let n = rustix::fs::lgetxattr(at.1, name, &mut value).doing(what)?;
        value.truncate(n);
        Ok(value)
    }

    /// The names of the extended attributes of a staged file.
    pub fn listxattr(&self, path: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
        names::check(path)?;
        let at = match self.on_disk(path) {
            Err(e) if e.errno() == libc::EPERM => return Ok(Vec::new()),
            at => at?,
        };
        let mut list = vec![0; 64 << 10];
        let n = rustix::fs::llistxattr(at.1, &mut list).doing(|| format!("list attributes of {}", names::show(path)))?;
        let all = list[..n].split(|b| *b == 0).filter(|n| n.starts_with(b"user."));
        Ok(all.map(<[u8]>::to_vec).collect())
    }

    /// The directory that holds a staged file, and a path by which calls that follow no last link reach it.
    fn on_disk(&self, path: &names::Path) -> Result<(std::os::fd::OwnedFd, std::path::PathBuf)> {
        match self.locate(path)? {
            Located::Disk(_) => {
                let (dir, name) = self.backing()?.parent(path)?;
                let at = Backing::proc_path(&dir, name);
                Ok((dir, at))
            }
            Located::Version { .. } => Err(committed_meanwhile()),
            Located::Branch(_) | Located::Root => Err(errno(libc::EPERM, "no attributes here")),
        }
    }

    /// Sets an extended attribute: `user.*` only. `user.zspace.*` is what the mount itself tells of a version: copied along by
    /// `cp -a`, it is taken without effect.
    pub fn setxattr(&self, path: &[Vec<u8>], name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        self.change_xattr(path, name, |at| {
            let flags = rustix::fs::XattrFlags::from_bits_truncate(flags as u32);
            rustix::fs::lsetxattr(at, name, value, flags)
        })
    }

    /// Removes an extended attribute.
    pub fn removexattr(&self, path: &[Vec<u8>], name: &[u8]) -> Result<()> {
        self.change_xattr(path, name, |at| rustix::fs::lremovexattr(at, name))
    }

    fn change_xattr(
        &self,
        path: &names::Path,
        name: &[u8],
        work: impl FnOnce(&std::path::Path) -> rustix::io::Result<()>,
    ) -> Result<()> {
        names::check(path)?;
        if !name.starts_with(b"user.") {
            return Err(errno(libc::ENOTSUP, "only user.* attributes"));
        }
        let mut g = self.lock();
        self.check_writable(&g)?;
        self.wait_idle(&mut g, path);
        if matches!(self.locate_in(&g, path)?, Located::Branch(_) | Located::Root) {
            return Err(errno(libc::EPERM, "no attributes here"));
        }
        if name.starts_with(b"user.zspace.") {
            return Ok(());
        }
        self.change(&mut g, path, Need::Whole, |b, _| {
            let (dir, last) = b.parent(path)?;
            work(&Backing::proc_path(&dir, last)).doing(|| format!("set an attribute of {}", names::show(path)))
        })
    }

    /// fsync of a directory.
    pub fn sync_dir(&self, path: &[Vec<u8>], datasync: bool) -> Result<()> {
        names::check(path)?;
        let open = match self.locate(path)? {
            Located::Version { .. } => return Ok(()),
            Located::Branch(_) if self.backing()?.stat(path)?.is_none() => return Ok(()),
            _ => self.backing()?.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?,
        };
        let done = if datasync { rustix::fs::fdatasync(&open) } else { rustix::fs::fsync(&open) };
        done.doing(|| format!("fsync {}", names::show(path)))
    }
}

/// The entry of a path known to lie in one.
fn path_key(path: &names::Path) -> Key {
    key_of(path).unwrap_or_default()
}

/// The flags for the backing file: appending is the kernel's work, and O_DIRECT's alignment is not passed on.
fn open_flags(flags: i32) -> OFlags {
    let keep = libc::O_ACCMODE | libc::O_TRUNC | libc::O_SYNC | libc::O_DSYNC;
    OFlags::from_bits_truncate((flags & keep) as u32) | OFlags::NONBLOCK
}

fn open_regular(b: &Backing, path: &names::Path, flags: OFlags) -> Result<File> {
    let stat = b.stat(path)?.ok_or_else(|| absent(path))?;
    match kind_of(stat.st_mode) {
        FileKind::File => Ok(File::from(b.open_at(path, flags, Mode::empty())?)),
        FileKind::Dir => Err(errno(libc::EISDIR, "a directory")),
        _ => Err(errno(libc::ENXIO, "no regular file")),
    }
}

/// Gives a new file to who made it, where this process may. A set-group-id directory decides over the group itself.
fn own(b: &Backing, path: &names::Path, uid: u32, gid: u32) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let (dir, name) = b.parent(path)?;
    let inherits = rustix::fs::fstat(&dir).is_ok_and(|s| s.st_mode & libc::S_ISGID != 0);
    let group = (!inherits).then(|| Gid::from_raw(gid));
    rustix::fs::chownat(&dir, name, Some(Uid::from_raw(uid)), group, AtFlags::SYMLINK_NOFOLLOW)
        .doing(|| format!("set the owner of {}", names::show(path)))
}

fn set_mode(b: &Backing, path: &names::Path, mode: u32) -> Result<()> {
    let fd = b.open_at(path, OFlags::PATH, Mode::empty())?;
    let at = format!("/proc/self/fd/{}", fd.as_raw_fd());
    std::fs::set_permissions(&at, Permissions::from_mode(mode & 0o7777))
        .doing(|| format!("set the mode of {}", names::show(path)))
}

fn apply(b: &Backing, path: &names::Path, change: &SetAttr) -> Result<()> {
    let what = || format!("set the attributes of {}", names::show(path));
    let (dir, name) = b.parent(path)?;
    if let Some((uid, gid)) = change.owner() {
        rustix::fs::chownat(&dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW).doing(what)?;
    }
    if let Some(size) = change.size {
        // A file that its owner may not write can still be cut through a handle opened before.
        let file = open_regular(b, path, OFlags::WRONLY | OFlags::NONBLOCK)?;
        file.set_len(size).doing(what)?;
    }
    if let Some(mode) = change.mode {
        set_mode(b, path, mode)?;
    }
    if let Some(times) = change.times() {
        let name = std::ffi::OsStr::from_bytes(name);
        rustix::fs::utimensat(&dir, name, &times, AtFlags::SYMLINK_NOFOLLOW).doing(what)?;
    }
    Ok(())
}

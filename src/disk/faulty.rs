//! A disk in memory that fails on demand and can be cut at any operation: the adversary of the crash tests.
//!
//! It keeps a log of everything that changes it. [`FaultyDisk::after_crash`] replays a prefix of the log as a power loss would
//! leave it: contents are certain once their file was synced, names once their directory was, and of the rest the caller
//! chooses what survives, operation by operation. The log keeps all bytes ever written, so it is for tests.

use super::{Disk, DiskFile};
use crate::error::{Error, Kind, Result};
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A kind of operation that changes a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Op {
    /// A file was made.
    Create,
    /// Bytes were written.
    Write,
    /// A file was cut or extended.
    Truncate,
    /// A file was renamed.
    Rename,
    /// A file was removed.
    Remove,
    /// A directory was made.
    Mkdir,
    /// A file's contents were made durable.
    Sync,
    /// A directory's names were made durable.
    SyncDir,
}

/// An operation as the log keeps it. A failed sync is kept too: what it should have made durable never becomes so.
#[derive(Clone)]
enum Entry {
    Create { path: PathBuf, file: u64 },
    Write { file: u64, offset: u64, data: Arc<[u8]> },
    Truncate { file: u64, len: u64 },
    Rename { from: PathBuf, to: PathBuf },
    Remove { path: PathBuf },
    Mkdir { path: PathBuf },
    Sync { file: u64, worked: bool },
    SyncDir { path: PathBuf, worked: bool },
}

impl Entry {
    fn op(&self) -> Op {
        match self {
            Entry::Create { .. } => Op::Create,
            Entry::Write { .. } => Op::Write,
            Entry::Truncate { .. } => Op::Truncate,
            Entry::Rename { .. } => Op::Rename,
            Entry::Remove { .. } => Op::Remove,
            Entry::Mkdir { .. } => Op::Mkdir,
            Entry::Sync { .. } => Op::Sync,
            Entry::SyncDir { .. } => Op::SyncDir,
        }
    }

    /// Whether this is a sync, tried or done, of what `change` changed.
    fn syncs(&self, change: &Entry) -> Option<bool> {
        match (self, change) {
            (
                Entry::Sync { file, worked },
                Entry::Write { file: f, .. } | Entry::Truncate { file: f, .. },
            ) => (file == f).then_some(*worked),
            (
                Entry::SyncDir { path: dir, worked },
                Entry::Create { path, .. }
                | Entry::Remove { path }
                | Entry::Mkdir { path }
                | Entry::Rename { to: path, .. },
            ) => (path.parent() == Some(dir)).then_some(*worked),
            _ => None,
        }
    }
}

/// Names and contents.
#[derive(Clone, Default)]
struct Image {
    names: BTreeMap<PathBuf, u64>,
    dirs: BTreeSet<PathBuf>,
    files: BTreeMap<u64, Vec<u8>>,
}

impl Image {
    fn apply(&mut self, entry: &Entry) {
        match entry {
            Entry::Create { path, file } => {
                self.names.insert(path.clone(), *file);
                self.files.entry(*file).or_default();
            }
            Entry::Write { file, offset, data } => {
                let bytes = self.files.entry(*file).or_default();
                let end = *offset as usize + data.len();
                if bytes.len() < end {
                    bytes.resize(end, 0);
                }
                bytes[*offset as usize..end].copy_from_slice(data);
            }
            Entry::Truncate { file, len } => self.files.entry(*file).or_default().resize(*len as usize, 0),
            Entry::Rename { from, to } => {
                if let Some(file) = self.names.remove(from) {
                    self.names.insert(to.clone(), file);
                }
            }
            Entry::Remove { path } => {
                self.names.remove(path);
            }
            Entry::Mkdir { path } => {
                self.dirs.insert(path.clone());
            }
            Entry::Sync { .. } | Entry::SyncDir { .. } => {}
        }
    }
}

#[derive(Default)]
struct State {
    /// What was there when the log began.
    base: Image,
    now: Image,
    log: Vec<Entry>,
    next_file: u64,
    /// Operations that will fail: kind, how many of that kind go before, errno.
    faults: Vec<(Op, usize, i32)>,
    /// Bytes that files may still grow by.
    space: Option<u64>,
    read_only: bool,
    locked: BTreeSet<PathBuf>,
}

impl State {
    /// Carries out and logs an operation, unless it is to fail.
    fn run(&mut self, entry: Entry) -> Result<()> {
        let op = entry.op();
        if self.read_only && !matches!(op, Op::Sync | Op::SyncDir) {
            return Err(failed(op, libc::EROFS));
        }
        let mut errno = None;
        self.faults
            .retain_mut(|(kind, before, e)| match (*kind == op, *before) {
                (true, 0) if errno.is_none() => {
                    errno = Some(*e);
                    false
                }
                (true, n) => {
                    *before = n.saturating_sub(1);
                    true
                }
                (false, _) => true,
            });
        if let Some(errno) = errno {
            match entry {
                Entry::Sync { file, .. } => self.log.push(Entry::Sync { file, worked: false }),
                Entry::SyncDir { path, .. } => self.log.push(Entry::SyncDir { path, worked: false }),
                _ => {}
            }
            return Err(failed(op, errno));
        }
        self.now.apply(&entry);
        self.log.push(entry);
        Ok(())
    }

    fn len(&self, file: u64) -> u64 {
        self.now.files.get(&file).map_or(0, |b| b.len() as u64)
    }
}

fn failed(op: Op, errno: i32) -> Error {
    Error::io(
        format!("{op:?} on the faulty disk"),
        io::Error::from_raw_os_error(errno),
    )
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    unlocked: Condvar,
}

/// The disk; clones are the same disk.
#[derive(Clone, Default)]
pub struct FaultyDisk(Arc<Shared>);

impl FaultyDisk {
    /// An empty disk with a root directory.
    pub fn new() -> Self {
        let disk = Self::default();
        disk.0.state.lock().now.dirs.insert(PathBuf::from("/"));
        disk.0.state.lock().base.dirs.insert(PathBuf::from("/"));
        disk
    }

    /// Makes the operation of this kind after the next `before` ones fail, once.
    pub fn fail(&self, op: Op, before: usize, errno: i32) {
        self.0.state.lock().faults.push((op, before, errno));
    }

    /// Forgets faults that have not struck yet.
    pub fn clear_faults(&self) {
        self.0.state.lock().faults.clear();
    }

    /// Lets files grow by this many more bytes before ENOSPC (a write that does not fit is done in part); none: no bound.
    /// Cutting files gives space back.
    pub fn set_space(&self, bytes: Option<u64>) {
        self.0.state.lock().space = bytes;
    }

    /// Makes every change fail with EROFS, or no longer.
    pub fn set_read_only(&self, read_only: bool) {
        self.0.state.lock().read_only = read_only;
    }

    /// How many operations the log holds.
    pub fn log_len(&self) -> usize {
        self.0.state.lock().log.len()
    }

    /// The kind of a logged operation and, for a write, its length.
    pub fn logged(&self, index: usize) -> Option<(Op, usize)> {
        let state = self.0.state.lock();
        state.log.get(index).map(|e| {
            (
                e.op(),
                if let Entry::Write { data, .. } = e {
                    data.len()
                } else {
                    0
                },
            )
        })
    }

    /// How many operations of a kind the log holds.
    pub fn count(&self, op: Op) -> usize {
        self.0.state.lock().log.iter().filter(|e| e.op() == op).count()
    }

    /// All files.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.0.state.lock().now.names.keys().cloned().collect()
    }

    /// Changes a file's bytes behind everyone's back, as bit rot does; false if there is no such file.
    pub fn edit(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) -> bool {
        let mut state = self.0.state.lock();
        let file = state.now.names.get(path).copied();
        file.and_then(|f| state.now.files.get_mut(&f))
            .map(change)
            .is_some()
    }

    /// The same bytes on a disk of its own, with an empty log, no faults and no locks.
    pub fn copy(&self) -> FaultyDisk {
        let state = self.0.state.lock();
        Self::from_image(state.now.clone(), state.next_file)
    }

    fn from_image(image: Image, next_file: u64) -> FaultyDisk {
        let state = State {
            base: image.clone(),
            now: image,
            next_file,
            ..State::default()
        };
        FaultyDisk(Arc::new(Shared {
            state: Mutex::new(state),
            unlocked: Condvar::new(),
        }))
    }

    /// The disk as it is found after power is lost when the log was `prefix` long.
    ///
    /// What was synced is there. Of what was not, the operations for which `survive` says so (by their index in the log) are
    /// there too; lost bytes before others that survived read as zeros. With `torn`, of the last operation, if it is a
    /// write, exactly that many bytes reached the disk.
    pub fn after_crash(
        &self,
        prefix: usize,
        torn: Option<usize>,
        survive: impl Fn(usize) -> bool,
    ) -> FaultyDisk {
        let state = self.0.state.lock();
        let log = &state.log[..prefix.min(state.log.len())];
        let mut image = state.base.clone();
        for (i, entry) in log.iter().enumerate() {
            let certain = log[i + 1..].iter().find_map(|later| later.syncs(entry)) == Some(true);
            match (entry, torn) {
                (Entry::Write { file, offset, data }, Some(n)) if i + 1 == log.len() => {
                    let data = data[..n.min(data.len())].into();
                    image.apply(&Entry::Write {
                        file: *file,
                        offset: *offset,
                        data,
                    });
                }
                _ if certain || survive(i) => image.apply(entry),
                _ => {}
            }
        }
        Self::from_image(image, state.next_file)
    }
}

struct FaultyFile {
    disk: FaultyDisk,
    file: u64,
}

struct Guard {
    disk: FaultyDisk,
    path: PathBuf,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.disk.0.state.lock().locked.remove(&self.path);
        self.disk.0.unlocked.notify_all();
    }
}

impl FaultyDisk {
    fn file(&self, file: u64) -> Arc<dyn DiskFile> {
        Arc::new(FaultyFile {
            disk: self.clone(),
            file,
        })
    }

    fn make(&self, state: &mut State, path: &Path) -> Result<u64> {
        if !path.parent().is_some_and(|dir| state.now.dirs.contains(dir)) {
            return Err(failed(Op::Create, libc::ENOENT));
        }
        let file = state.next_file;
        state.run(Entry::Create {
            path: path.to_owned(),
            file,
        })?;
        state.next_file += 1;
        Ok(file)
    }
}

impl Disk for FaultyDisk {
    fn open(&self, path: &Path, write: bool) -> Result<Arc<dyn DiskFile>> {
        let state = self.0.state.lock();
        match state.now.names.get(path) {
            Some(_) if write && state.read_only => Err(failed(Op::Write, libc::EROFS)),
            Some(file) => Ok(self.file(*file)),
            None => Err(Error::io(
                format!("open {}", path.display()),
                io::Error::from_raw_os_error(libc::ENOENT),
            )),
        }
    }

    fn create_new(&self, path: &Path) -> Result<Arc<dyn DiskFile>> {
        let mut state = self.0.state.lock();
        if state.now.names.contains_key(path) {
            return Err(failed(Op::Create, libc::EEXIST));
        }
        Ok(self.file(self.make(&mut state, path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let mut state = self.0.state.lock();
        if !state.now.names.contains_key(from) {
            return Err(failed(Op::Rename, libc::ENOENT));
        }
        state.run(Entry::Rename {
            from: from.to_owned(),
            to: to.to_owned(),
        })
    }

    fn remove(&self, path: &Path) -> Result<()> {
        let mut state = self.0.state.lock();
        if !state.now.names.contains_key(path) {
            return Err(failed(Op::Remove, libc::ENOENT));
        }
        state.run(Entry::Remove {
            path: path.to_owned(),
        })
    }

    fn list(&self, dir: &Path) -> Result<Vec<String>> {
        let state = self.0.state.lock();
        if !state.now.dirs.contains(dir) {
            return Err(Error::io(
                format!("list {}", dir.display()),
                io::Error::from_raw_os_error(libc::ENOENT),
            ));
        }
        let all = state
            .now
            .names
            .keys()
            .chain(&state.now.dirs)
            .filter(|p| p.parent() == Some(dir));
        Ok(all
            .filter_map(|p| Some(p.file_name()?.to_str()?.to_owned()))
            .collect())
    }

    fn create_dir_all(&self, dir: &Path) -> Result<()> {
        let mut state = self.0.state.lock();
        let missing: Vec<_> = dir
            .ancestors()
            .take_while(|d| !state.now.dirs.contains(*d))
            .collect();
        missing
            .into_iter()
            .rev()
            .try_for_each(|d| state.run(Entry::Mkdir { path: d.to_owned() }))
    }

    fn sync_dir(&self, dir: &Path) -> Result<()> {
        self.0.state.lock().run(Entry::SyncDir {
            path: dir.to_owned(),
            worked: true,
        })
    }

    fn lock(&self, path: &Path, wait: bool) -> Result<Box<dyn Send + Sync>> {
        let mut state = self.0.state.lock();
        if state.read_only {
            return Err(failed(Op::Create, libc::EROFS));
        }
        if !state.now.names.contains_key(path) {
            self.make(&mut state, path)?;
        }
        while !state.locked.insert(path.to_owned()) {
            if !wait {
                return Err(Error::new(Kind::Busy, format!("{} is held", path.display())));
            }
            self.0.unlocked.wait(&mut state);
        }
        Ok(Box::new(Guard {
            disk: self.clone(),
            path: path.to_owned(),
        }))
    }
}

impl DiskFile for FaultyFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let state = self.disk.0.state.lock();
        let bytes = state.now.files.get(&self.file).map_or(&[][..], Vec::as_slice);
        let rest = bytes
            .get(usize::try_from(offset).unwrap_or(usize::MAX)..)
            .unwrap_or_default();
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut state = self.disk.0.state.lock();
        let growth = (offset + data.len() as u64).saturating_sub(state.len(self.file));
        let over = state.space.map_or(0, |space| growth.saturating_sub(space));
        let fits = data.len() - (over as usize).min(data.len());
        let entry = Entry::Write {
            file: self.file,
            offset,
            data: data[..fits].into(),
        };
        state.run(entry)?;
        if let Some(space) = &mut state.space {
            *space -= growth.min(*space);
        }
        if over > 0 {
            Err(failed(Op::Write, libc::ENOSPC))
        } else {
            Ok(())
        }
    }

    fn len(&self) -> Result<u64> {
        Ok(self.disk.0.state.lock().len(self.file))
    }

    fn truncate(&self, len: u64) -> Result<()> {
        let mut state = self.disk.0.state.lock();
        let before = state.len(self.file);
        state.run(Entry::Truncate { file: self.file, len })?;
        if let Some(space) = &mut state.space {
            *space += before.saturating_sub(len);
        }
        Ok(())
    }

    fn sync(&self) -> Result<()> {
        self.disk.0.state.lock().run(Entry::Sync {
            file: self.file,
            worked: true,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(disk: &FaultyDisk, path: &str) -> Option<Vec<u8>> {
        let file = disk.open(Path::new(path), false).ok()?;
        let mut buf = vec![0; file.len().unwrap() as usize];
        file.read_at(0, &mut buf).unwrap();
        Some(buf)
    }

    #[test]
    fn only_what_was_synced_is_certain() {
        let disk = FaultyDisk::new();
        let file = disk.create_new(Path::new("/a")).unwrap();
        file.write_at(0, b"one").unwrap();
        file.sync().unwrap();
        assert_eq!(
            text(&disk.after_crash(3, None, |_| false), "/a"),
            None,
            "the name was not synced"
        );
        disk.sync_dir(Path::new("/")).unwrap();
        file.write_at(3, b"two").unwrap();
        file.write_at(6, b"three").unwrap();
        let all = disk.log_len();
        assert_eq!(
            text(&disk.after_crash(all, None, |_| false), "/a").unwrap(),
            b"one"
        );
        assert_eq!(
            text(&disk.after_crash(all, None, |i| i == all - 1), "/a").unwrap(),
            b"one\0\0\0three"
        );
        assert_eq!(
            text(&disk.after_crash(all, Some(2), |_| true), "/a").unwrap(),
            b"onetwoth"
        );
    }

    #[test]
    fn what_a_failed_sync_lost_no_later_one_brings_back() {
        let disk = FaultyDisk::new();
        let file = disk.create_new(Path::new("/a")).unwrap();
        disk.sync_dir(Path::new("/")).unwrap();
        file.write_at(0, b"x").unwrap();
        disk.fail(Op::Sync, 0, libc::EIO);
        assert_eq!(file.sync().unwrap_err().errno(), libc::EIO);
        file.sync().unwrap();
        assert_eq!(
            text(&disk.after_crash(disk.log_len(), None, |_| false), "/a").unwrap(),
            b""
        );
    }

    #[test]
    fn a_full_disk_writes_what_fits_and_cutting_makes_room() {
        let disk = FaultyDisk::new();
        let file = disk.create_new(Path::new("/a")).unwrap();
        disk.set_space(Some(4));
        assert_eq!(file.write_at(0, b"sixsix").unwrap_err().kind(), Kind::NoSpace);
        assert_eq!(text(&disk, "/a").unwrap(), b"sixs");
        file.truncate(1).unwrap();
        file.write_at(1, b"abc").unwrap();
        assert!(file.write_at(4, b"d").is_err());
    }
}

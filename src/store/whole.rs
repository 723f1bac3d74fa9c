//! Whole files of versions, kept in STORE/cache: what reads them need not be rebuilt, and the kernel can read them by itself.
//!
//! All of it is safe to delete at any time. A file here is only given out once its bytes were seen to be what its name says, in
//! this process: what an earlier one left is hashed first, for a power loss may have eaten it.

use super::{EntryKind, FileView, Store};
use crate::disk::take_dir;
use crate::error::{Error, IoContext, Kind, Result};
use crate::id::{FileHash, FileHasher};
use parking_lot::Mutex;
use serde::Serialize;
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Files smaller than this are rebuilt as fast as they are found here.
const SMALLEST: u64 = 1 << 20;
/// Of the file system, one part in so many is left free, at most [`RESERVE_LIMIT`] bytes.
const RESERVE_SHARE: u64 = 50;
const RESERVE_LIMIT: u64 = 2 << 30;
/// The disk counts as full when one part in so many is left of it, within these bounds in bytes: as much as may be written and
/// freed again between a write that fails and a look at the disk.
const FULL_SHARE: u64 = 512;
const FULL_AT_LEAST: u64 = 1 << 20;
const FULL_AT_MOST: u64 = 128 << 20;
/// Bytes hashed at a time.
const STEP: usize = 1 << 20;

/// A file by its contents: hash and length.
pub type FileKey = (FileHash, u64);

/// The directory of whole files, of which one process is in charge.
pub struct WholeFiles {
    dir: PathBuf,
    quota: u64,
    kept: Arc<Mutex<Kept>>,
    /// Files that were dropped because the disk was full.
    rescues: AtomicU64,
    _lock: File,
}

#[derive(Default)]
struct Kept {
    files: HashMap<FileKey, One>,
    bytes: u64,
    next: u64,
}

struct One {
    /// When it was last used, in uses of any.
    used: u64,
    /// Who has it open, each with where it reads it.
    users: Vec<(u64, Option<Home>)>,
    /// What it looked like when its bytes were known to be right; nothing while they are not.
    proven: Option<Stamp>,
    /// The only place that may take it away to change it: nobody else ever had the file.
    home: Option<Home>,
    /// It was read as a version: a mapping may have outlived the reader that made it.
    lent: bool,
}

/// Where in `staging/` a file is read.
pub type Home = Arc<[u8]>;

/// What changes when a file is written to; the second part also when its time is set back, or it is renamed or removed.
type Stamp = ((u64, u64, i64, i64), (i64, i64));

fn stamp(m: &fs::Metadata) -> Stamp {
    let written = (m.ino(), m.len(), m.mtime(), m.mtime_nsec());
    (written, (m.ctime(), m.ctime_nsec()))
}

/// A whole file being used: until it is dropped, nobody changes it.
pub struct Whole {
    /// Open for reading.
    pub file: File,
    key: FileKey,
    user: u64,
    /// What it looked like, if nobody but a stranger changes it meanwhile.
    proven: Option<Stamp>,
    kept: Arc<Mutex<Kept>>,
}

impl Whole {
    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.key.1
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.key.1 == 0
    }

    /// Up to `len` bytes at `offset`, fewer only at the end.
    ///
    /// Errors: `Damage` if a version is read and its file was written to past us.
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let left = usize::try_from(self.key.1.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut buf = vec![0; len.min(left)];
        let what = || format!("read {} in the cache", self.key.0);
        self.file.read_exact_at(&mut buf, offset).doing(what)?;
        let now = stamp(&self.file.metadata().doing(what)?);
        if self.proven.is_some_and(|p| p.0 != now.0) {
            let why = format!("{} was changed in the cache while it was open", self.key.0);
            return Err(Error::damage(why));
        }
        Ok(buf)
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        if let Some(one) = self.kept.lock().files.get_mut(&self.key) {
            one.users.retain(|(user, _)| *user != self.user);
        }
    }
}

/// What became of a wish to keep files whole.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Warmed {
    /// Files that were named.
    pub files: u64,
    /// Of them, those that lie whole in the cache.
    pub kept: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// Too small to be worth it.
    pub small: u64,
}

impl Store {
    /// Keeps the files that REV or REV:PATH names whole, as far as there is room and as long as `go_on` says so.
    ///
    /// Errors: `Unsupported` if this process keeps no whole files.
    pub fn warm(&self, what: &str, go_on: &dyn Fn() -> bool) -> Result<Warmed> {
        let none = || {
            Error::new(
                Kind::Unsupported,
                "the mount keeps no files whole (`zspace mount --cache 0`?)",
            )
        };
        let whole = self.whole_files().ok_or_else(none)?;
        self.refresh()?;
        let mut done = Warmed::default();
        for (_, entry) in self.select(what)? {
            let EntryKind::File { hash, len, .. } = entry.kind else {
                continue;
            };
            done.files += 1;
            if len < SMALLEST {
                done.small += 1;
                continue;
            }
            let view = self.file(&hash, len)?;
            if whole.build(&(hash, len), &view, go_on)? {
                done.kept += 1;
                done.bytes += len;
            }
        }
        Ok(done)
    }
}

impl WholeFiles {
    /// The files in `dir`, made if absent, to hold up to `quota` bytes. None if another process is in charge of it.
    pub(super) fn open(dir: PathBuf, quota: u64) -> Result<Option<Self>> {
        let Some(lock) = take_dir(&dir)? else {
            return Ok(None);
        };
        let whole = WholeFiles {
            dir,
            quota,
            kept: Arc::default(),
            rescues: AtomicU64::new(0),
            _lock: lock,
        };
        whole.take_stock()?;
        Ok(Some(whole))
    }

    /// Finds what an earlier process left. What was half-built goes.
    fn take_stock(&self) -> Result<()> {
        let what = || format!("list {}", self.dir.display());
        let mut found = Vec::new();
        for e in fs::read_dir(&self.dir).doing(what)? {
            let e = e.doing(what)?;
            let name = e.file_name();
            if name == "lock" {
                continue;
            }
            let hash = name.to_str().and_then(|n| n.parse::<FileHash>().ok());
            match (hash, e.metadata()) {
                (Some(hash), Ok(m)) if m.is_file() => found.push((m.ctime(), (hash, m.len()))),
                // Half-built, or half removed.
                _ if name.as_encoded_bytes().starts_with(b"new-") => remove(&e.path()),
                _ => log::warn!("{} does not belong there", e.path().display()),
            }
        }
        // A file's last change is when it was put here, which is the best that is known of its use.
        found.sort_unstable();
        let mut kept = self.kept.lock();
        for (_, key) in found {
            kept.add(key, None, None);
        }
        drop(kept);
        self.make_room(0, None);
        Ok(())
    }

    /// Bytes kept.
    pub fn bytes(&self) -> u64 {
        self.kept.lock().bytes
    }

    /// The most bytes that are kept.
    pub fn quota(&self) -> u64 {
        self.quota
    }

    /// Whether a file of this length is worth keeping at all, and may be.
    pub fn worth(&self, len: u64) -> bool {
        (SMALLEST..=self.quota).contains(&len)
    }

    /// The file, if it is here and was proven right; counts as a use. `home` is where in `staging/` it is going to be read.
    pub fn get(&self, key: &FileKey, home: Option<&Home>) -> Option<Whole> {
        let mut kept = self.kept.lock();
        let (next, path) = (kept.number(), self.path(key));
        let one = kept.files.get_mut(key)?;
        let proven = one.proven?;
        let opened = open_read(&path).and_then(|f| Ok((stamp(&f.metadata()?), f)));
        match opened {
            Ok((now, file)) if now == proven => {
                one.used = next;
                one.lent |= home.is_none();
                one.users.push((next, home.cloned()));
                Some(Whole {
                    proven: home.is_none().then_some(proven),
                    file,
                    key: *key,
                    user: next,
                    kept: self.kept.clone(),
                })
            }
            // Somebody removed it, or changed it past us.
            Ok(_) => {
                one.proven = None;
                None
            }
            Err(_) => {
                kept.forget(key);
                None
            }
        }
    }

    /// Whether the file is here, proven or not.
    pub fn has(&self, key: &FileKey) -> bool {
        self.kept.lock().files.contains_key(key)
    }

    /// Keeps the file at `path` by moving it here, if there is room; it must hold just these bytes, and nobody may have it open
    /// for writing. Only `home` may [`take`](Self::take) it back. Whether it was moved.
    pub fn adopt(&self, key: &FileKey, path: &Path, home: Home) -> bool {
        if let Some(one) = self.kept.lock().files.get_mut(key)
            && one.proven.is_some()
        {
            // Who has the file that is here open is no longer known by its home.
            one.home = None;
            return false;
        }
        let alone = |m: &fs::Metadata| m.is_file() && m.nlink() == 1 && m.len() == key.1;
        if key.1 > self.quota
            || !fs::symlink_metadata(path).is_ok_and(|m| alone(&m))
            || !self.make_room(key.1, Some(key))
        {
            return false;
        }
        self.put(key, path, Some(home))
    }

    fn put(&self, key: &FileKey, path: &Path, home: Option<Home>) -> bool {
        let to = self.path(key);
        let mut kept = self.kept.lock();
        let done = fs::rename(path, &to).and_then(|()| fs::symlink_metadata(&to));
        match done {
            Ok(m) => kept.add(*key, Some(stamp(&m)), home),
            Err(e) => log::warn!("{}: not kept: {e}", path.display()),
        }
        kept.files.contains_key(key)
    }

    /// Moves the file away to `to`, to be changed there, if it came from `home` and nobody reads it elsewhere; `in_use` tells whether
    /// anybody has a file open or mapped. Whether it was moved.
    pub fn take(&self, key: &FileKey, home: &[u8], to: &Path, in_use: &dyn Fn(&Path) -> bool) -> bool {
        let mut kept = self.kept.lock();
        let own = |h: &Option<Home>| h.as_deref() == Some(home);
        let Some(one) = kept.files.get(key) else {
            return false;
        };
        let path = self.path(key);
        let whole =
            one.proven.is_some() && fs::symlink_metadata(&path).ok().as_ref().map(stamp) == one.proven;
        if !whole || !own(&one.home) || !one.users.iter().all(|(_, h)| own(h)) || to.exists() {
            return false;
        }
        if one.lent && in_use(&path) {
            return false;
        }
        match fs::rename(&path, to) {
            Ok(()) => {
                kept.forget(key);
                true
            }
            Err(e) => {
                log::warn!("{}: not taken back: {e}", path.display());
                false
            }
        }
    }

    /// Writes the file here, rebuilt from its version and checked against its hash, or proves the one that is here already.
    /// `go_on` is asked now and then. Whether it is here now; it is not if there is no room.
    pub fn build(&self, key: &FileKey, view: &FileView, go_on: &dyn Fn() -> bool) -> Result<bool> {
        let stopped = || Error::new(Kind::Stopped, "the mount is ending");
        let here = self.kept.lock().files.get(key).map(|one| one.proven.is_some());
        match here {
            Some(true) => return Ok(true),
            Some(false) => {}
            None if !self.worth(key.1) || !self.make_room(key.1, Some(key)) => return Ok(false),
            None => {}
        }
        if self.has(key) && self.prove(key, go_on)? {
            return Ok(true);
        }
        let new = self.new_path(self.kept.lock().number());
        let done = (|| {
            let file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&new);
            let mut out = Hashing {
                to: file.doing(|| format!("create {}", new.display()))?,
                hasher: FileHasher::default(),
            };
            view.copy_to(0..key.1, &mut out, &mut |_| {
                if go_on() { Ok(()) } else { Err(stopped()) }
            })?;
            match out.hasher.finish() == key.0 {
                true => Ok(()),
                false => Err(Error::damage(format!(
                    "file {} is rebuilt with another hash",
                    key.0
                ))),
            }
        })();
        if let Err(e) = done {
            remove(&new);
            return Err(e);
        }
        Ok(self.put(key, &new, None))
    }

    /// Hashes a file that was here before.
    fn prove(&self, key: &FileKey, go_on: &dyn Fn() -> bool) -> Result<bool> {
        let path = self.path(key);
        let hashed = (|| {
            let mut file = open_read(&path)?;
            let before = stamp(&file.metadata()?);
            let hashed = hash_file(&mut file, go_on)?;
            let same = before == stamp(&file.metadata()?);
            std::io::Result::Ok((hashed.filter(|_| same), before))
        })();
        let mut kept = self.kept.lock();
        match (hashed, kept.files.get_mut(key)) {
            (Ok((Some(hashed), stamp)), Some(one)) if hashed == *key => {
                one.proven = Some(stamp);
                return Ok(true);
            }
            _ if !go_on() => return Err(Error::new(Kind::Stopped, "the mount is ending")),
            (Ok(_), Some(one)) if !one.users.is_empty() => return Ok(false),
            _ => {}
        }
        log::info!("{} did not survive and is made anew", path.display());
        remove(&path);
        kept.forget(key);
        Ok(false)
    }

    /// Drops files until the quota and the disk have room for `len` more bytes. What is being read would free nothing, so it stays.
    fn make_room(&self, len: u64, but: Option<&FileKey>) -> bool {
        let (mut gone, mut freed) = (Vec::new(), 0);
        let mut kept = self.kept.lock();
        let enough = loop {
            let bytes = kept.bytes.saturating_add(len);
            if bytes <= self.quota && self.disk_has(bytes, len, freed) {
                break true;
            }
            let idle = kept
                .files
                .iter()
                .filter(|(k, one)| one.users.is_empty() && Some(*k) != but);
            let Some(oldest) = idle.min_by_key(|(_, one)| one.used).map(|(k, _)| *k) else {
                break false;
            };
            if disk_is_full(&self.dir) {
                self.rescues.fetch_add(1, Ordering::Relaxed);
            }
            let aside = self.new_path(kept.number());
            if fs::rename(self.path(&oldest), &aside).is_ok() {
                gone.push(aside);
                freed += oldest.1;
            }
            kept.forget(&oldest);
        };
        // Removing a large file takes a while, in which others may want theirs.
        drop(kept);
        gone.iter().for_each(|path| remove(path));
        enough
    }

    /// How many files were dropped because the disk was full, so that it is no longer.
    pub fn rescues(&self) -> u64 {
        self.rescues.load(Ordering::Relaxed)
    }

    /// Gives space back if the disk is filling up.
    pub fn yield_space(&self) {
        self.make_room(0, None);
    }

    /// Whether so many more bytes leave enough of the disk free, once `freed` are: the reserve, and as much as the cache itself takes,
    /// so that who writes finds half of what could be had at once, and the rest after the next look.
    fn disk_has(&self, cache: u64, len: u64, freed: u64) -> bool {
        let Ok(s) = rustix::fs::statvfs(&self.dir) else {
            return false;
        };
        let reserve = (s.f_blocks * s.f_frsize / RESERVE_SHARE).min(RESERVE_LIMIT);
        let free = (s.f_bavail * s.f_frsize).saturating_add(freed);
        free >= reserve.saturating_add(len) && free >= cache
    }

    /// A name for what is not whole yet, or not wanted any more.
    fn new_path(&self, number: u64) -> PathBuf {
        self.dir.join(format!("new-{number}"))
    }

    fn path(&self, key: &FileKey) -> PathBuf {
        self.dir.join(key.0.to_string())
    }
}

impl Kept {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn add(&mut self, key: FileKey, proven: Option<Stamp>, home: Option<Home>) {
        let used = self.number();
        let users = Vec::new();
        let one = One {
            used,
            users,
            proven,
            home,
            lent: false,
        };
        if self.files.insert(key, one).is_none() {
            self.bytes += key.1;
        }
    }

    fn forget(&mut self, key: &FileKey) {
        if self.files.remove(key).is_some() {
            self.bytes -= key.1;
        }
    }
}

/// Hashes what is written.
pub(super) struct Hashing<W> {
    pub(super) to: W,
    pub(super) hasher: FileHasher,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        let n = self.to.write(buf)?;
        self.hasher.update(&buf[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

/// Whether the disk that `dir` is on has next to nothing left: what was written of late may be less than was meant to be.
pub fn disk_is_full(dir: &Path) -> bool {
    rustix::fs::statvfs(dir).is_ok_and(|s| {
        let full = (s.f_blocks * s.f_frsize / FULL_SHARE).clamp(FULL_AT_LEAST, FULL_AT_MOST);
        s.f_bavail * s.f_frsize < full
    })
}

/// The SHA-256 and length of an open file; nothing if `go_on` says that it is not worth going on.
pub fn hash_file(file: &mut File, go_on: &dyn Fn() -> bool) -> std::io::Result<Option<FileKey>> {
    let (mut hasher, mut len, mut buf) = (FileHasher::default(), 0, vec![0; STEP]);
    loop {
        match file.read(&mut buf)? {
            _ if !go_on() => return Ok(None),
            0 => return Ok(Some((hasher.finish(), len))),
            n => {
                hasher.update(&buf[..n]);
                len += n as u64;
            }
        }
    }
}

fn open_read(path: &Path) -> std::io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

fn remove(path: &Path) {
    match fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => log::warn!("remove {}: {e}", path.display()),
        _ => {}
    }
}

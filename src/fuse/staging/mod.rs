//! SIGNATURES ONLY, for the door to be written against; bodies follow.
#![allow(clippy::unimplemented, unused_variables, missing_docs)]

use super::attr::{Attr, FileKind};
use crate::error::Result;
use crate::store::{Committed, Numbered, Store, Timestamp};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How long an entry must be left alone before it is committed.
#[derive(Clone, Copy, Debug)]
pub struct Settle {
    pub files: Duration,
    pub dirs: Duration,
}

/// Where a path below staging/ is served from.
pub enum Located {
    Disk(PathBuf),
    /// `path`: components below the version's root.
    Version { version: Arc<Numbered>, path: Vec<Vec<u8>> },
    Branch(String),
    Root,
}

pub enum SetTime {
    Now,
    At(Timestamp),
}

#[derive(Default)]
pub struct SetAttr {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
}

/// State of one entry, for people and for JSON.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Status {
    pub entries: Vec<EntryStatus>,
}
#[derive(Clone, Debug, serde::Serialize)]
pub struct EntryStatus {
    pub branch: String,
    pub name: String,
    #[serde(flatten)]
    pub state: State,
    pub bytes: u64,
    pub writers: usize,
}
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum State {
    Writing,
    Settling,
    Waiting { reason: String },
    Committing,
    Committed { version: String },
    Failed { reason: String },
}

pub struct Staging;
pub struct Handle;

/// Any call on a path that `locate` answers with `Located::Version` and that only reads gives `Kind::Changed`
/// (EAGAIN): the entry was committed in between, locate it again and serve it from the version.
impl Staging {
    pub fn open(store: Store, settle: Settle, read_only: bool) -> Result<Arc<Staging>> { unimplemented!() }
    /// Whether this process owns the staging area (else everything in it is read-only: EROFS).
    pub fn is_owner(&self) -> bool { unimplemented!() }
    pub fn locate(&self, path: &[Vec<u8>]) -> Result<Located> { unimplemented!() }
    pub fn attr(&self, path: &[Vec<u8>]) -> Result<Attr> { unimplemented!() }
    /// Also right for directories that are served from a version (what was removed from them is left out).
    pub fn list(&self, path: &[Vec<u8>]) -> Result<Vec<(Vec<u8>, FileKind)>> { unimplemented!() }
    pub fn open_file(self: &Arc<Self>, path: &[Vec<u8>], flags: i32) -> Result<Handle> { unimplemented!() }
    #[allow(clippy::too_many_arguments)]
    pub fn create(self: &Arc<Self>, path: &[Vec<u8>], mode: u32, flags: i32, umask: u32, uid: u32, gid: u32) -> Result<(Handle, Attr)> { unimplemented!() }
    pub fn mkdir(&self, path: &[Vec<u8>], mode: u32, umask: u32, uid: u32, gid: u32) -> Result<Attr> { unimplemented!() }
    /// Regular files, FIFOs and sockets; anything else EPERM.
    pub fn mknod(&self, path: &[Vec<u8>], kind: FileKind, mode: u32, umask: u32, uid: u32, gid: u32) -> Result<Attr> { unimplemented!() }
    pub fn symlink(&self, path: &[Vec<u8>], target: &[u8], uid: u32, gid: u32) -> Result<Attr> { unimplemented!() }
    pub fn link(&self, from: &[Vec<u8>], to: &[Vec<u8>]) -> Result<Attr> { unimplemented!() }
    pub fn readlink(&self, path: &[Vec<u8>]) -> Result<Vec<u8>> { unimplemented!() }
    pub fn rmdir(&self, path: &[Vec<u8>]) -> Result<()> { unimplemented!() }
    pub fn unlink(&self, path: &[Vec<u8>]) -> Result<()> { unimplemented!() }
    /// `flags` of renameat2: RENAME_NOREPLACE, RENAME_EXCHANGE.
    pub fn rename(&self, from: &[Vec<u8>], to: &[Vec<u8>], flags: u32) -> Result<()> { unimplemented!() }
    pub fn setattr(&self, path: &[Vec<u8>], change: &SetAttr) -> Result<Attr> { unimplemented!() }
    pub fn getxattr(&self, path: &[Vec<u8>], name: &[u8]) -> Result<Vec<u8>> { unimplemented!() }
    pub fn setxattr(&self, path: &[Vec<u8>], name: &[u8], value: &[u8], flags: i32) -> Result<()> { unimplemented!() }
    pub fn listxattr(&self, path: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> { unimplemented!() }
    pub fn removexattr(&self, path: &[Vec<u8>], name: &[u8]) -> Result<()> { unimplemented!() }
    pub fn statfs(&self) -> Result<rustix::fs::StatVfs> { unimplemented!() }
    /// fsync of a directory.
    pub fn sync_dir(&self, path: &[Vec<u8>], datasync: bool) -> Result<()> { unimplemented!() }
    pub fn status(&self) -> Result<Status> { unimplemented!() }
    /// `path`: BRANCH, ENTRY (anything below is ignored).
    pub fn commit_now(&self, path: &[Vec<u8>], message: &str) -> Result<Committed> { unimplemented!() }
    /// From now on nothing new may be opened for writing or changed (EROFS); open writers may finish.
    pub fn freeze(&self) { unimplemented!() }
    /// Commits all that settles within `limit`; returns what stays, with why.
    pub fn drain(&self, limit: Duration) -> Result<Vec<EntryStatus>> { unimplemented!() }
    /// Ends the committer thread (after the commit it is at).
    pub fn stop(&self) { unimplemented!() }
}

/// Dropping a handle is its RELEASE.
impl Handle {
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>> { unimplemented!() }
    /// All of `data`.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<usize> { unimplemented!() }
    /// `pid` of the FLUSH request: notices writers that are dying by a signal.
    pub fn flush(&self, pid: u32) -> Result<()> { unimplemented!() }
    pub fn fsync(&self, datasync: bool) -> Result<()> { unimplemented!() }
    pub fn attr(&self) -> Result<Attr> { unimplemented!() }
    pub fn setattr(&self, change: &SetAttr) -> Result<Attr> { unimplemented!() }
    pub fn truncate(&self, len: u64) -> Result<()> { unimplemented!() }
    pub fn fallocate(&self, mode: i32, offset: u64, len: u64) -> Result<()> { unimplemented!() }
    /// SEEK_DATA and SEEK_HOLE.
    pub fn lseek(&self, offset: i64, whence: i32) -> Result<u64> { unimplemented!() }
    pub fn copy_to(&self, offset: u64, to: &Handle, to_offset: u64, len: u64) -> Result<u64> { unimplemented!() }
}

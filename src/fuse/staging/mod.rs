//! The staging directory of the mount: ordinary files on disk that become versions once they are left alone.
//!
//! The rules are written down in docs/SEMANTICS.md. Bytes being written lie in STORE/staging/tree/BRANCH/…, durable
//! marks in STORE/staging/state; one process owns both by a lock, all others only look.

mod attributes;
mod backing;
mod clock;
mod commit;
mod copyup;
mod create;
mod handle;
mod lease;
mod marks;
mod names;
mod ops;
mod plan;
mod process;
mod remove;
mod rename;
mod repo;
mod rotated;
mod settled;
mod start;
mod state;
mod status;
mod torn;
mod whole;

#[cfg(test)]
mod tests;

pub use attributes::{SetAttr, SetTime};
pub use handle::Handle;
pub use names::unfinished;
pub(super) use names::{path_text, text_path};
pub(super) use process::for_client;
pub use status::{EntryStatus, State, Status};
pub(super) use whole::home_of;

use super::attr::{Attr, FileKind};
use crate::error::{Error, Kind, Result};
use crate::store::{Entry, EntryKind, Numbered, Store, WholeFiles};
use backing::{Backing, attr_of};
use clock::{Clock, SystemClock};
use marks::{Mark, Marks};
use names::errno;
use parking_lot::{Condvar, Mutex, MutexGuard};
use repo::{Repo, absent, find};
use rustix::fs::Stat;
use state::{Inner, Key, key_of};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// How long an entry must be left alone before it is committed.
#[derive(Clone, Copy, Debug)]
pub struct Settle {
    /// Loose files.
    pub files: Duration,
    /// Directories.
    pub dirs: Duration,
}

impl Default for Settle {
    fn default() -> Self {
        Settle {
            files: Duration::from_secs(2),
            dirs: Duration::from_secs(10),
        }
    }
}

/// Where a path below staging/ is served from.
#[derive(Clone, Debug)]
pub enum Located {
    /// A file on disk.
    Disk(PathBuf),
    /// A version that has it.
    Version {
        /// The version.
        version: Arc<Numbered>,
        /// Components below the version's root.
        path: Vec<Vec<u8>>,
    },
    /// The directory of a branch.
    Branch(String),
    /// staging/ itself.
    Root,
}

/// The staging area of a store. Paths are components below staging/: branch, entry, names inside the entry.
///
/// Calls that only read answer `Changed` (EAGAIN) when the path turns out to have been committed since it was located:
/// locate it again and serve it from the version.
pub struct Staging {
    repo: Arc<dyn Repo>,
    settle: Settle,
    /// STORE/staging
    dir: PathBuf,
    backing: Option<Backing>,
    marks: Marks,
    clock: Arc<dyn Clock>,
    shared: Arc<Shared>,
    /// The lock on STORE/staging; without it everything is read-only.
    lock: Option<File>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    inner: Mutex<Inner>,
    /// Told whenever an entry is no longer busy or committing, and when the committer has something to look at.
    wake: Condvar,
}

type Guard<'a> = MutexGuard<'a, Inner>;

impl Staging {
    /// Opens the staging area of a store and, if this process gets to own it, finishes what a crash interrupted and starts the
    /// committer. With `read_only`, or while another process owns it, it can only be looked at.
    pub fn open(store: Store, settle: Settle, read_only: bool) -> Result<Arc<Staging>> {
        let staging = Self::start(Arc::new(store), settle, read_only, Arc::new(SystemClock::new()))?;
        staging.run_committer()?;
        Ok(staging)
    }

    /// Whether this process owns the staging area; else everything in it is read-only (EROFS).
    pub fn is_owner(&self) -> bool {
        self.lock.is_some()
    }

    /// STORE/staging.
    pub fn dir(&self) -> &std::path::Path {
        &self.dir
    }

    fn lock(&self) -> Guard<'_> {
        self.shared.inner.lock()
    }

    fn backing(&self) -> Result<&Backing> {
        self.backing
            .as_ref()
            .ok_or_else(|| Error::new(Kind::NotFound, "the store has no staging area yet"))
    }

    /// Where `path` is served from; `NotFound` if there is nothing.
    pub fn locate(&self, path: &[Vec<u8>]) -> Result<Located> {
        names::check(path)?;
        self.locate_in(&self.lock(), path)
    }

    fn locate_in(&self, g: &Inner, path: &names::Path) -> Result<Located> {
        Ok(self.found_in(g, path)?.0)
    }

    /// Where `path` is served from and, if that is the disk, what stat said of it: asked once, as each answer has to open the
    /// directory first.
    fn found_in(&self, g: &Inner, path: &names::Path) -> Result<(Located, Option<Stat>)> {
        let branch = match path {
            [] => return Ok((Located::Root, None)),
            [branch, ..] => self.branch(branch).ok_or_else(|| absent(path))?,
        };
        if path.len() == 1 {
            return Ok((Located::Branch(branch), None));
        }
        let key = (branch, path[1].clone());
        match self.mark_of(g, &key)?.as_deref() {
            Some(Mark::Committed { origin }) => Ok((self.in_version(origin, &path[2..])?, None)),
            Some(Mark::Dirty { base: Some(base) }) if self.backing()?.stat(&path[..2])?.is_none() => {
                Ok((self.in_version(base, &path[2..])?, None))
            }
            _ => match self.backing()?.stat(path)? {
                Some(stat) => Ok((Located::Disk(self.backing()?.path(path)), Some(stat))),
                None => Err(absent(path)),
            },
        }
    }

    fn mark_of<'a>(&self, g: &'a Inner, key: &Key) -> Result<Option<Cow<'a, Mark>>> {
        match self.is_owner() {
            true => Ok(g.entries.get(key).map(|e| Cow::Borrowed(&e.mark))),
            false => Ok(self.marks.load(&key.0, &key.1)?.map(Cow::Owned)),
        }
    }

    /// To which user and group a committed entry belongs.
    pub(crate) fn owner(&self, path: &[Vec<u8>]) -> (u32, u32) {
        self.owner_of(&self.lock(), path)
    }

    fn owner_of(&self, g: &Inner, path: &names::Path) -> marks::Owner {
        let mark = key_of(path).and_then(|key| self.mark_of(g, &key).ok().flatten());
        let owner = mark.and_then(|m| m.origin()?.owner);
        owner.unwrap_or_else(mounter)
    }

    /// How many of these paths of a version were removed from the entry at `path`, which is served from it.
    pub fn removed(&self, path: &names::Path, names: &[Vec<Vec<u8>>]) -> u32 {
        let g = self.lock();
        let mark = key_of(path).and_then(|key| self.mark_of(&g, &key).ok().flatten());
        let Some(origin) = mark.as_deref().and_then(Mark::origin) else {
            return 0;
        };
        let inside = |n: &&Vec<Vec<u8>>| n.first() == Some(&origin.name) && origin.lacks(&n[1..]);
        names.iter().filter(inside).count() as u32
    }

    fn in_version(&self, origin: &marks::Origin, rel: &names::Path) -> Result<Located> {
        let path = [std::slice::from_ref(&origin.name), rel].concat();
        if origin.lacks(rel) {
            return Err(absent(&path));
        }
        let version = self.version(origin).ok_or_else(|| absent(&path))?;
        find(self.repo.as_ref(), &version, &path)?;
        Ok(Located::Version { version, path })
    }

    fn version(&self, origin: &marks::Origin) -> Option<Arc<Numbered>> {
        self.repo.version(&origin.version).or_else(|| {
            self.repo.refresh().ok()?;
            self.repo.version(&origin.version)
        })
    }

    /// The branch of this name, if staging shows it: one with a directory here, or one of the store that was not put away.
    fn branch(&self, name: &[u8]) -> Option<String> {
        let name = String::from_utf8(name.to_vec()).ok()?;
        let path = [name.clone().into_bytes()];
        let here = self.backing.as_ref().and_then(|b| b.stat(&path).ok().flatten());
        let shown = match here {
            Some(stat) => backing::kind_of(stat.st_mode) == FileKind::Dir,
            None => self.repo.branches().contains(&name) && !self.hidden(&name).exists(),
        };
        shown.then_some(name)
    }

    /// The file that says that a branch was put away.
    fn hidden(&self, branch: &str) -> PathBuf {
        self.dir.join("hidden").join(names::encode(branch.as_bytes()))
    }

    /// The attributes of whatever is at `path`. What is served from a version shows the mounter as its owner.
    pub fn attr(&self, path: &[Vec<u8>]) -> Result<Attr> {
        names::check(path)?;
        self.attr_in(&self.lock(), path)
    }

    fn attr_in(&self, g: &Inner, path: &names::Path) -> Result<Attr> {
        let (at, stat) = self.found_in(g, path)?;
        match at {
            Located::Version {
                version,
                path: inside,
            } => {
                let entry = find(self.repo.as_ref(), &version, &inside)?;
                Ok(version_attr(&entry, version.version.time, self.owner_of(g, path)))
            }
            Located::Root if self.backing.is_none() => {
                let kind = EntryKind::Dir {
                    tree: crate::id::NodeId([0; 32]),
                    len: 0,
                };
                let time = crate::store::Timestamp::default();
                let root = Entry {
                    name: Vec::new(),
                    mode: 0o555,
                    mtime: time,
                    xattrs: Vec::new(),
                    kind,
                };
                Ok(version_attr(&root, time, mounter()))
            }
            Located::Root => self.stat_or_root(&[]),
            Located::Branch(_) => self.stat_or_root(path),
            Located::Disk(_) => Ok(attr_of(&stat.ok_or_else(|| absent(path))?)),
        }
    }

    // A branch that nothing was ever put into has no directory yet.
    fn stat_or_root(&self, path: &names::Path) -> Result<Attr> {
        let b = self.backing()?;
        let stat = match b.stat(path)? {
            None => b.stat(&[])?,
            found => found,
        };
        Ok(attr_of(&stat.ok_or_else(|| absent(path))?))
    }

    /// The names in a directory, sorted, whether it lies on disk or is served from a version.
    pub fn list(&self, path: &[Vec<u8>]) -> Result<Vec<(Vec<u8>, FileKind)>> {
        names::check(path)?;
        self.list_in(&self.lock(), path)
    }

    fn list_in(&self, g: &Inner, path: &names::Path) -> Result<Vec<(Vec<u8>, FileKind)>> {
        match self.locate_in(g, path)? {
            Located::Root => {
                self.repo.refresh()?;
                let mut all: Vec<Vec<u8>> =
                    self.repo.branches().into_iter().map(String::into_bytes).collect();
                if let Some(b) = &self.backing {
                    all.extend(b.list(&[])?.into_iter().map(|(name, _)| name));
                }
                all.sort();
                all.dedup();
                Ok(all
                    .into_iter()
                    .filter(|n| self.branch(n).is_some())
                    .map(|n| (n, FileKind::Dir))
                    .collect())
            }
            Located::Branch(branch) => self.list_branch(g, &branch),
            Located::Disk(_) => self.backing()?.list(path),
            Located::Version {
                version,
                path: inside,
            } => {
                let EntryKind::Dir { tree, .. } = find(self.repo.as_ref(), &version, &inside)?.kind else {
                    return Err(errno(libc::ENOTDIR, "not a directory"));
                };
                let tree = self.repo.tree(&tree)?;
                let mark = key_of(path).map_or(Ok(None), |key| self.mark_of(g, &key))?;
                let gone = mark.as_deref().and_then(Mark::origin).map(|o| &o.gone);
                let shown = tree.entries().iter().filter(|e| {
                    gone.is_none_or(|g| {
                        g.is_empty() || !g.contains(&[&path[2..], std::slice::from_ref(&e.name)].concat())
                    })
                });
                Ok(shown.map(|e| (e.name.clone(), kind_of_entry(e))).collect())
            }
        }
    }

    fn list_branch(&self, g: &Inner, branch: &str) -> Result<Vec<(Vec<u8>, FileKind)>> {
        let path = [branch.as_bytes().to_vec()];
        let mut all: BTreeMap<Vec<u8>, FileKind> = match self.backing()?.stat(&path)? {
            Some(_) => self.backing()?.list(&path)?.into_iter().collect(),
            None => BTreeMap::new(),
        };
        let marks: Vec<(Vec<u8>, Cow<'_, Mark>)> = match self.is_owner() {
            true => {
                let of = g.entries.iter().filter(|(key, _)| key.0 == branch);
                of.map(|(key, e)| (key.1.clone(), Cow::Borrowed(&e.mark)))
                    .collect()
            }
            false => {
                let all = self.marks.of_branch(branch)?.into_iter();
                all.map(|(name, mark)| (name, Cow::Owned(mark))).collect()
            }
        };
        for (name, mark) in marks {
            let Some(origin) = mark.origin() else { continue };
            if matches!(*mark, Mark::Dirty { .. }) && all.contains_key(&name) {
                continue;
            }
            let entry = self
                .version(origin)
                .map(|v| find(self.repo.as_ref(), &v, std::slice::from_ref(&origin.name)));
            match entry {
                Some(Ok(e)) => all.insert(name, kind_of_entry(&e)),
                _ => all.remove(&name),
            };
        }
        Ok(all.into_iter().collect())
    }

    /// How often the cache of whole files made room on a full disk.
    fn rescues(&self) -> u64 {
        self.repo.whole_files().map_or(0, WholeFiles::rescues)
    }

    /// Space and inodes of the file system that staging is on.
    pub fn statfs(&self) -> Result<rustix::fs::StatVfs> {
        use crate::error::IoContext;
        rustix::fs::fstatvfs(self.backing()?.root()).doing(|| "statfs of staging".into())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        self.stop();
    }
}

fn kind_of_entry(e: &Entry) -> FileKind {
    match e.kind {
        EntryKind::File { .. } => FileKind::File,
        EntryKind::Dir { .. } => FileKind::Dir,
        EntryKind::Symlink(_) => FileKind::Symlink,
    }
}

/// The user and group for whom the mount works.
fn mounter() -> marks::Owner {
    (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    )
}

/// The attributes of what a version holds, committed at `time`.
fn version_attr(e: &Entry, time: crate::store::Timestamp, (uid, gid): marks::Owner) -> Attr {
    let kind = kind_of_entry(e);
    Attr {
        kind,
        mode: e.mode,
        size: e.len(),
        blocks: e.len().div_ceil(512),
        nlink: if kind == FileKind::Dir { 2 } else { 1 },
        uid,
        gid,
        rdev: 0,
        atime: e.mtime,
        mtime: e.mtime,
        ctime: time,
    }
}

//! What the door calls: look-ups, attributes and directories of the whole mount, by inode number.

use super::attr::{Attr, FileKind};
use super::errno::os;
use super::handles::{Backing, Handles, Names, Open};
use super::inodes::{Identity, Inodes};
use super::namespace::{Listed, Namespace};
use super::place::Place;
use super::staging::{Located, Staging};
use super::warm::Warm;
use crate::error::{IoContext, Kind, Result};
use crate::store::{Store, Timestamp};
use parking_lot::RwLock;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::Duration;

/// How long the kernel keeps what never changes.
pub(super) const FOREVER: Duration = Duration::from_secs(30 * 86_400);
/// How long the kernel keeps what it is told of staged files, and the attributes of branches. What is changed through this mount
/// it knows at once; only what other processes change can be seen so much later.
const BRIEF: Duration = Duration::from_secs(1);
/// The longest name of a file.
const NAME_MAX: usize = 255;
/// How often an entry may be committed or changed between being located and being served.
const RETRIES: usize = 4;

/// A path below `staging/`, by its names.
pub(super) type StagedPath = Vec<Vec<u8>>;

/// What a look-up finds.
pub(super) struct Found {
    pub(super) ino: u64,
    pub(super) attr: Attr,
    pub(super) entry_ttl: Duration,
    pub(super) attr_ttl: Duration,
}

/// One name of a directory listing.
pub(super) struct Listing<'a> {
    pub(super) name: &'a [u8],
    /// Where the next listing goes on.
    pub(super) next: u64,
    pub(super) found: &'a Found,
}

/// The mount as a file system, by inode numbers and handles.
pub(super) struct Files {
    pub(super) space: Namespace,
    pub(super) staging: Arc<Staging>,
    pub(super) inodes: Inodes,
    pub(super) handles: Handles,
    pub(super) warm: Warm,
    /// Held while names in `staging/` are used as a path; exclusively while one is moved.
    pub(super) names: RwLock<()>,
}

impl Files {
    /// The file system of a store, shown as owned by this user and group.
    pub(super) fn new(store: Store, staging: Arc<Staging>, uid: u32, gid: u32, now: Timestamp) -> Self {
        Files {
            // Half the cache: the rest is for what was read and for the bases of deltas.
            handles: Handles::new(store.cache_limit() / 2),
            warm: Warm::new(store.clone()),
            space: Namespace::new(store, uid, gid, now),
            staging,
            inodes: Inodes::new(),
            names: RwLock::new(()),
        }
    }

    /// What the inode stands for.
    pub(super) fn place(&self, ino: u64) -> Result<Place> {
        self.inodes
            .place(ino)
            .ok_or_else(|| os(libc::ESTALE, "the file is gone"))
    }

    /// The path of an inode below `staging/`.
    pub(super) fn staged_path(&self, ino: u64) -> Result<StagedPath> {
        let gone = || os(libc::ENOENT, "the file was removed");
        let mut path = self.inodes.path(ino).ok_or_else(gone)?;
        if path.first().is_none_or(|n| n != b"staging") {
            return Err(gone());
        }
        path.remove(0);
        Ok(path)
    }

    /// Finds a name in a directory. `Err` with a time: it is absent, and stays so that long.
    pub(super) fn look_up(&self, parent: u64, name: &[u8]) -> Result<std::result::Result<Found, Duration>> {
        if name.len() > NAME_MAX {
            return Err(os(libc::ENAMETOOLONG, "a name has at most 255 bytes"));
        }
        let dir = self.place(parent)?;
        if let Place::Staged(_) = dir {
            let _names = self.names.read();
            let mut path = self.staged_path(parent)?;
            path.push(name.to_vec());
            return match self.found_staged(parent, &path) {
                Err(e) if e.kind() == Kind::NotFound => Ok(Err(Duration::ZERO)),
                found => found.map(Ok),
            };
        }
        match self.space.find(&dir, name)? {
            Some(place) => self.found(parent, name, place).map(Ok),
            None if dir.is_fixed() => Ok(Err(FOREVER)),
            None => Ok(Err(Duration::ZERO)),
        }
    }

    fn found(&self, parent: u64, name: &[u8], place: Place) -> Result<Found> {
        let attr = match &place {
            Place::Staged(_) => self.staged_attr(&[])?.0,
            _ => self.space.attr(&place)?,
        };
        Ok(self.told(parent, name, place, attr))
    }

    /// The kernel is told of a place outside `staging/` (or of `staging/` itself).
    fn told(&self, parent: u64, name: &[u8], place: Place, attr: Attr) -> Found {
        let identity = place
            .link()
            .map(|(c, link)| Identity::Version(c.numbered.id.0, link));
        let (entry_ttl, attr_ttl) = match &place {
            Place::Link(..) => (Duration::ZERO, Duration::ZERO),
            other => (FOREVER, attr_ttl(other)),
        };
        let ino = self.inodes.look_up(parent, name, place, identity);
        Found {
            ino,
            attr,
            entry_ttl,
            attr_ttl,
        }
    }

    /// The kernel is told of a path in `staging/`.
    pub(super) fn found_staged(&self, parent: u64, path: &[Vec<u8>]) -> Result<Found> {
        let (attr, identity) = self.staged_attr(path)?;
        if let Some(known) = identity.and_then(|i| self.inodes.identified(i)) {
            // The number of a backing file may belong to another file by now.
            let still = self
                .staged_path(known)
                .ok()
                .and_then(|p| self.staged_attr(&p).ok());
            if still.is_none_or(|(_, i)| i != identity) {
                self.inodes.unidentify(known);
            }
        }
        let name = path.last().map(Vec::as_slice).unwrap_or_default();
        // A commit takes hard links between entries apart: each name is a file of its own then.
        for (dir, other) in self.inodes.others(parent, name, identity) {
            let path = self.staged_path(dir).map(|p| [p, vec![other.to_vec()]].concat());
            let theirs = path.and_then(|p| self.staged_attr(&p)).ok().and_then(|(_, i)| i);
            if theirs.is_none() || theirs != identity {
                self.inodes.remove(dir, &other);
            }
        }
        let ino = self
            .inodes
            .look_up(parent, name, Place::Staged(attr.kind), identity);
        // A file's name is asked for anew each time: a commit may make another file of it than of its other names.
        let sure = self.staging.is_owner() && attr.kind == FileKind::Dir;
        Ok(Found {
            ino,
            attr,
            entry_ttl: if sure { BRIEF } else { Duration::ZERO },
            attr_ttl: BRIEF,
        })
    }

    /// The attributes of a path in `staging/`, and what it has in common with its other names if it has some.
    pub(super) fn staged_attr(&self, path: &[Vec<u8>]) -> Result<(Attr, Option<Identity>)> {
        self.settled(|| match self.staging.locate(path)? {
            Located::Version {
                version,
                path: inside,
            } => {
                let place = self.space.walk(&version, &inside)?;
                let mut attr = self.space.attr(&place)?;
                (attr.uid, attr.gid) = self.staging.owner(path);
                if inside.is_empty() {
                    // The entry itself is below the version's root, so this is none: show it as a directory all the same.
                    attr.kind = FileKind::Dir;
                }
                let Some((commit, link)) = place.link() else {
                    return Ok((attr, None));
                };
                let removed = self.staging.removed(path, self.space.names_of(&commit, link)?);
                attr.nlink = attr.nlink.saturating_sub(removed).max(1);
                Ok((attr, Some(Identity::Committed(commit.numbered.id.0, link))))
            }
            Located::Disk(disk) => {
                let attr = self.staging.attr(path)?;
                let linked = attr.kind != FileKind::Dir && attr.nlink > 1;
                let meta = linked.then(|| std::fs::symlink_metadata(disk).ok()).flatten();
                Ok((attr, meta.map(|m| Identity::Disk(m.dev(), m.ino()))))
            }
            Located::Branch(_) | Located::Root => Ok((self.staging.attr(path)?, None)),
        })
    }

    /// Does something that starts with locating a staged path, again if the path was committed meanwhile.
    pub(super) fn settled<T>(&self, mut act: impl FnMut() -> Result<T>) -> Result<T> {
        let mut result = act();
        for _ in 0..RETRIES {
            match &result {
                Err(e) if e.kind() == Kind::Changed => result = act(),
                _ => break,
            }
        }
        result
    }

    /// The attributes of an inode and how long they hold.
    pub(super) fn attr(&self, ino: u64, fh: Option<u64>) -> Result<(Attr, Duration)> {
        let place = self.place(ino)?;
        let attr = match &place {
            Place::Staged(_) => self.staged_inode_attr(ino, fh)?,
            other => self.space.attr(other)?,
        };
        Ok((attr, attr_ttl(&place)))
    }

    /// The attributes of a staged inode, which may have lost its name but still be open.
    fn staged_inode_attr(&self, ino: u64, fh: Option<u64>) -> Result<Attr> {
        let named = {
            let _names = self.names.read();
            self.staged_path(ino).and_then(|path| self.staged_attr(&path))
        };
        let missing = match named {
            Ok((attr, _)) => return Ok(attr),
            Err(e) if e.kind() == Kind::NotFound => e,
            Err(e) => return Err(e),
        };
        let own = fh.and_then(|fh| self.handles.get(fh));
        for open in own.into_iter().chain(self.handles.of(ino)) {
            if let Open::Staged(staged) = &*open {
                match staged.backing() {
                    Backing::Disk(handle) => return handle.attr(),
                    Backing::Version(_, attr) => return Ok(Attr { nlink: 0, ..attr }),
                }
            }
        }
        Err(missing)
    }

    /// Space and inodes of the file system that the store is on.
    pub(super) fn room(&self) -> Result<rustix::fs::StatVfs> {
        rustix::fs::statvfs(self.space.store.dir()).doing(|| "statfs of the store".to_owned())
    }

    /// Where a link points.
    pub(super) fn target(&self, ino: u64) -> Result<Vec<u8>> {
        let place = self.place(ino)?;
        if !matches!(place, Place::Staged(_)) {
            return self.space.target(&place);
        }
        let _names = self.names.read();
        let path = self.staged_path(ino)?;
        self.settled(|| match self.staging.locate(&path)? {
            Located::Version { version, path } => self.space.target(&self.space.walk(&version, &path)?),
            _ => self.staging.readlink(&path),
        })
    }

    /// Opens a directory; the answer is the handle and whether its names never change.
    pub(super) fn open_dir(&self, ino: u64) -> Result<(u64, bool)> {
        let place = self.place(ino)?;
        if place.kind() != FileKind::Dir {
            return Err(os(libc::ENOTDIR, "not a directory"));
        }
        // Read when it is listed from its start, which comes next.
        let none = Names::Fixed(Vec::new());
        let fh = self.handles.add(Open::Dir(RwLock::new(Arc::new(none))));
        Ok((fh, place.is_fixed()))
    }

    fn dir_names(&self, ino: u64, place: &Place) -> Result<Names> {
        if !matches!(place, Place::Staged(_)) {
            return Ok(Names::Fixed(self.space.list(place)?));
        }
        let _names = self.names.read();
        let path = self.staged_path(ino)?;
        let names = self.staging.list(&path)?;
        Ok(Names::Staged(names.into_iter().map(|(n, _)| n).collect()))
    }

    /// Lists a directory from `offset` on until `add` answers that it is full. Every name given to `add` that it takes counts as
    /// looked up if `count` says so.
    pub(super) fn list(
        &self,
        ino: u64,
        fh: u64,
        offset: u64,
        count: bool,
        mut add: impl FnMut(&Listing<'_>) -> bool,
    ) -> Result<()> {
        let open = self.handles.get(fh).ok_or_else(|| os(libc::EBADF, "not open"))?;
        let Open::Dir(names) = &*open else {
            return Err(os(libc::ENOTDIR, "not a directory"));
        };
        if offset == 0 {
            // From the start: what is there now.
            *names.write() = Arc::new(self.dir_names(ino, &self.place(ino)?)?);
        }
        let names = names.read().clone();
        let parent = self.inodes.parent(ino);
        for (at, name, number) in [(0, &b"."[..], ino), (1, b"..", parent)] {
            if offset <= at {
                let (attr, attr_ttl) = self.attr(ino, None)?;
                let found = Found {
                    ino: number,
                    attr,
                    entry_ttl: Duration::ZERO,
                    attr_ttl,
                };
                let next = at + 1;
                if add(&Listing {
                    name,
                    next,
                    found: &found,
                }) {
                    return Ok(());
                }
            }
        }
        let len = match &*names {
            Names::Fixed(list) => list.len(),
            Names::Staged(list) => list.len(),
        };
        let start = usize::try_from(offset.saturating_sub(2)).unwrap_or(usize::MAX);
        for index in start..len {
            let Some((name, found)) = self.listed(ino, &names, index) else {
                continue;
            };
            let next = index as u64 + 3;
            let full = add(&Listing {
                name,
                next,
                found: &found,
            });
            if full || !count {
                self.inodes.forget(found.ino, 1);
            }
            if full {
                break;
            }
        }
        Ok(())
    }

    /// The name at a place of a listing, if it is still there.
    fn listed<'a>(&self, parent: u64, names: &'a Names, index: usize) -> Option<(&'a [u8], Found)> {
        match names {
            Names::Fixed(list) => {
                let (name, place): &Listed = list.get(index)?;
                let found = self.found(parent, name, place.clone()).unwrap_or_else(|e| {
                    // Damage to one file must not hide the others, nor itself.
                    log::warn!(
                        "attributes of {} cannot be read: {e}",
                        String::from_utf8_lossy(name)
                    );
                    let attr = self.space.plain(place.kind(), 0, 0, Timestamp::default());
                    self.told(parent, name, place.clone(), attr)
                });
                Some((name, found))
            }
            Names::Staged(list) => {
                let name = list.get(index)?;
                let _names = self.names.read();
                let mut path = self.staged_path(parent).ok()?;
                path.push(name.clone());
                Some((name, self.found_staged(parent, &path).ok()?))
            }
        }
    }
}

/// How long the kernel may keep the attributes of a place.
fn attr_ttl(place: &Place) -> Duration {
    match place {
        Place::Branch(..) | Place::Staged(_) => BRIEF,
        Place::Link(..) => Duration::ZERO,
        Place::Root
        | Place::Door(_)
        | Place::Version(..)
        | Place::Entry(..)
        | Place::Group(..)
        | Place::Tensor(..)
        | Place::Whole(_) => FOREVER,
    }
}

//! The read-only part of the mount: what names there are, what they stand for, and how they read.
//!
//! Here a request is told apart by its place; `versions` knows branches, versions and the files in them, `views` what the other
//! doors make of those files. Nothing here rebuilds a chunk: a look-up reads trees and manifests at most.

use super::attr::{Attr, FileKind};
use super::errno::os;
use super::place::{At, Commit, Door, Place};
use crate::error::Result;
use crate::store::{Entry, EntryKind, FileKey, FileView, Numbered, Store, Timestamp};
use lru::LruCache;
use parking_lot::Mutex;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Versions whose hard links stay known.
const COMMITS: NonZeroUsize = NonZeroUsize::MIN.saturating_add(63);

/// A name of a directory and what it stands for.
pub(super) type Listed = (Vec<u8>, Place);

/// The versions of a store, as directories.
pub(super) struct Namespace {
    pub(super) store: Store,
    uid: u32,
    gid: u32,
    started: Timestamp,
    commits: Mutex<LruCache<crate::id::VersionId, Arc<Commit>>>,
    stale: AtomicBool,
}

impl Namespace {
    /// The namespace of a store, owned by this user and group.
    pub(super) fn new(store: Store, uid: u32, gid: u32, started: Timestamp) -> Self {
        Namespace {
            store,
            uid,
            gid,
            started,
            commits: Mutex::new(LruCache::new(COMMITS)),
            stale: AtomicBool::new(false),
        }
    }

    /// What a name in a directory stands for.
    pub(super) fn find(&self, dir: &Place, name: &[u8]) -> Result<Option<Place>> {
        match dir {
            Place::Root => {
                let door = Door::ALL.into_iter().find(|d| d.name().as_bytes() == name);
                Ok(door
                    .map(Place::Door)
                    .or((name == b"staging").then_some(Place::Staged(FileKind::Dir))))
            }
            Place::Door(door) => self.find_branch(*door, name),
            Place::Branch(door, branch) => self.find_version(*door, branch, name),
            Place::Version(door, commit) => self.find_below(*door, self.root_of(commit)?, commit, name),
            Place::Entry(door, at) => match self.below(at)? {
                Some(dirs) => self.find_below(*door, dirs, &at.commit, name),
                None => Err(os(libc::ENOTDIR, "not a directory")),
            },
            Place::Group(door, at, group) => self.find_tensor(*door, at, *group, name),
            Place::Link(..) | Place::Tensor(..) | Place::Whole(_) | Place::Staged(_) => {
                Err(os(libc::ENOTDIR, "not a directory"))
            }
        }
    }

    /// The names of a directory, sorted as they are stored, with what they stand for.
    pub(super) fn list(&self, dir: &Place) -> Result<Vec<Listed>> {
        match dir {
            Place::Root => {
                let doors = Door::ALL.into_iter().map(|d| (d.name().into(), Place::Door(d)));
                Ok(doors
                    .chain([(b"staging".to_vec(), Place::Staged(FileKind::Dir))])
                    .collect())
            }
            Place::Door(door) => Ok(self.list_branches(*door)),
            Place::Branch(door, branch) => self.list_versions(*door, branch),
            Place::Version(door, commit) => self.list_below(*door, self.root_of(commit)?, commit),
            Place::Entry(door, at) => match self.below(at)? {
                Some(dirs) => self.list_below(*door, dirs, &at.commit),
                None => Err(os(libc::ENOTDIR, "not a directory")),
            },
            Place::Group(door, at, group) => self.list_tensors(*door, at, *group),
            Place::Link(..) | Place::Tensor(..) | Place::Whole(_) | Place::Staged(_) => {
                Err(os(libc::ENOTDIR, "not a directory"))
            }
        }
    }

    /// The attributes of a place.
    pub(super) fn attr(&self, place: &Place) -> Result<Attr> {
        match place {
            Place::Root | Place::Door(_) | Place::Staged(_) => {
                Ok(self.plain(FileKind::Dir, 0o755, 0, self.started))
            }
            Place::Branch(_, branch) => Ok(self.branch_attr(branch)),
            Place::Link(branch, name) => {
                let (target, time) = self.link_target(branch.as_deref(), name)?;
                Ok(self.plain(FileKind::Symlink, 0o777, target.len() as u64, time))
            }
            Place::Version(_, commit) => {
                let v = &commit.numbered.version;
                Ok(self.plain(FileKind::Dir, 0o755, v.len, v.time))
            }
            Place::Entry(door, at) => {
                let entry = entry_of(at)?;
                let mut attr = self.entry_attr(at, entry)?;
                if attr.kind == FileKind::Symlink && *door == Door::Safetensors {
                    attr.size = self.view_target(*door, at)?.len() as u64;
                }
                Ok(attr)
            }
            Place::Group(_, at, _) => {
                let mut attr = self.entry_attr(at, entry_of(at)?)?;
                (attr.kind, attr.mode, attr.nlink) = (FileKind::Dir, 0o755, 1);
                Ok(attr)
            }
            Place::Tensor(..) | Place::Whole(_) => {
                let at = place_at(place)?;
                // A refused view has no bytes; the reason is in its attribute.
                let size = match self.view(place) {
                    Ok(view) => view.len(),
                    Err(e) if e.kind() == crate::error::Kind::Refused => 0,
                    Err(e) => return Err(e),
                };
                let mut attr = self.entry_attr(at, entry_of(at)?)?;
                (attr.mode, attr.nlink) = (attr.mode & 0o666, 1);
                (attr.size, attr.blocks) = (size, size.div_ceil(512));
                Ok(attr)
            }
        }
    }

    /// Where a link points.
    pub(super) fn target(&self, place: &Place) -> Result<Vec<u8>> {
        match place {
            Place::Link(branch, name) => Ok(self.link_target(branch.as_deref(), name)?.0),
            Place::Entry(door, at) => self.view_target(*door, at),
            _ => Err(os(libc::EINVAL, "not a symbolic link")),
        }
    }

    /// The bytes of a file. A view that is refused fails with the reason.
    pub(super) fn view(&self, place: &Place) -> Result<Arc<FileView>> {
        match place {
            Place::Entry(_, at) => self.source(at),
            Place::Tensor(door, at, index) => self.tensor_view(*door, at, *index),
            Place::Whole(at) => self.source(at)?.safetensors_view(),
            _ => Err(os(libc::EISDIR, "not a file")),
        }
    }

    /// What a file in `versions/` is by its contents.
    pub(super) fn file_key(&self, place: &Place) -> Option<FileKey> {
        match place {
            Place::Entry(Door::Versions, at) => match at.entry()?.kind {
                EntryKind::File { hash, len, .. } => Some((hash, len)),
                _ => None,
            },
            _ => None,
        }
    }

    /// The committed file an entry is.
    pub(super) fn source(&self, at: &At) -> Result<Arc<FileView>> {
        match &entry_of(at)?.kind {
            EntryKind::File { hash, len, .. } => self.store.file(hash, *len),
            EntryKind::Dir { .. } => Err(os(libc::EISDIR, "is a directory")),
            EntryKind::Symlink(_) => Err(os(libc::ELOOP, "is a symbolic link")),
        }
    }

    /// Picks up what other processes committed. What is known stays visible when that fails.
    pub(super) fn refresh(&self) {
        match self.store.refresh() {
            Ok(_) => self.stale.store(false, Ordering::Relaxed),
            Err(e) => {
                if !self.stale.swap(true, Ordering::Relaxed) {
                    log::warn!("new versions cannot be read, showing those known: {e}");
                }
            }
        }
    }

    /// The one shared record of a version.
    pub(super) fn commit(&self, numbered: &Arc<Numbered>) -> Arc<Commit> {
        let mut commits = self.commits.lock();
        let new = || {
            Arc::new(Commit {
                numbered: numbered.clone(),
                links: OnceLock::new(),
            })
        };
        commits.get_or_insert(numbered.id, new).clone()
    }

    /// Attributes of something that is the mounter's own and has one name.
    pub(super) fn plain(&self, kind: FileKind, mode: u32, size: u64, time: Timestamp) -> Attr {
        Attr {
            kind,
            mode,
            size,
            blocks: size.div_ceil(512),
            nlink: 1,
            uid: self.uid,
            gid: self.gid,
            rdev: 0,
            atime: time,
            mtime: time,
            ctime: time,
        }
    }

    /// Attributes of an entry as it was committed; it changed its attributes last when it was committed.
    pub(super) fn entry_attr(&self, at: &At, entry: &Entry) -> Result<Attr> {
        let kind = match &entry.kind {
            EntryKind::File { .. } => FileKind::File,
            EntryKind::Dir { .. } => FileKind::Dir,
            EntryKind::Symlink(_) => FileKind::Symlink,
        };
        let mut attr = self.plain(kind, entry.mode & 0o7777, entry.len(), entry.mtime);
        attr.ctime = at.commit.numbered.version.time;
        if let EntryKind::File { link, .. } = entry.kind
            && link > 0
        {
            attr.nlink = (self.names_of(&at.commit, link)?.len() as u32).max(1);
        }
        Ok(attr)
    }
}

/// The entry at a place in a version.
pub(super) fn entry_of(at: &At) -> Result<&Entry> {
    at.entry().ok_or_else(|| os(libc::ESTALE, "no such entry"))
}

/// The entry of a version that a place was made from.
pub(super) fn place_at(place: &Place) -> Result<&At> {
    match place {
        Place::Entry(_, at) | Place::Group(_, at, _) | Place::Tensor(_, at, _) | Place::Whole(at) => Ok(at),
        _ => Err(os(libc::ESTALE, "no such entry")),
    }
}

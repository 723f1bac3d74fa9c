//! Open files and directories.

use super::attr::Attr;
use super::modes::Modes;
use super::namespace::Listed;
use super::staging::Handle;
use super::stream::{Share, Streams};
use crate::error::Result;
use crate::store::{FileView, Slice, Whole};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A version's file, or a view of one, being read by one or more handles.
pub(super) enum Reader {
    /// Chunk by chunk, as it is read.
    Rebuilt {
        view: Arc<FileView>,
        streams: Mutex<Streams>,
        share: Arc<Share>,
        /// Bytes read.
        served: AtomicU64,
    },
    /// From where the file lies whole.
    Whole(Whole),
}

impl Reader {
    /// Length in bytes.
    pub(super) fn len(&self) -> u64 {
        match self {
            Reader::Rebuilt { view, .. } => view.len(),
            Reader::Whole(whole) => whole.len(),
        }
    }

    /// The file in which it lies whole.
    pub(super) fn file(&self) -> Option<&File> {
        match self {
            Reader::Rebuilt { .. } => None,
            Reader::Whole(whole) => Some(&whole.file),
        }
    }

    /// Reads, and has what a sequential reader wants next rebuilt ahead. Fewer bytes than asked for: the end of the file.
    pub(super) fn read(&self, offset: u64, len: usize) -> Result<Slice> {
        let (view, streams, share, served) = match self {
            Reader::Rebuilt {
                view,
                streams,
                share,
                served,
            } => (view, streams, share, served),
            Reader::Whole(whole) => return whole.read(offset, len).map(Slice::Owned),
        };
        served.fetch_add(len as u64, Ordering::Relaxed);
        let tensor = |at| view.tensor_around(at);
        let ahead = streams.lock().read(offset, len as u64, view.len(), share, tensor);
        if let Some((from, len)) = ahead {
            view.read_ahead(from, usize::try_from(len).unwrap_or(usize::MAX));
        }
        view.read(offset, len)
    }
}

/// A staged file that is open: bytes on disk, or those of the version it was committed as until somebody changes it.
pub(super) struct Staged {
    pub(super) ino: u64,
    pub(super) writes: bool,
    now: RwLock<Backing>,
}

/// What a staged file is read from.
#[derive(Clone)]
pub(super) enum Backing {
    Disk(Arc<Handle>),
    /// With what `stat` showed when it was opened, for when it has no name any more.
    Version(Arc<Reader>, Attr),
}

impl Staged {
    pub(super) fn new(ino: u64, writes: bool, backing: Backing) -> Self {
        Staged {
            ino,
            writes,
            now: RwLock::new(backing),
        }
    }

    pub(super) fn backing(&self) -> Backing {
        self.now.read().clone()
    }

    /// The backing file, if there is one.
    pub(super) fn disk(&self) -> Option<Arc<Handle>> {
        match &*self.now.read() {
            Backing::Disk(handle) => Some(handle.clone()),
            Backing::Version(..) => None,
        }
    }

    /// From now on reads come from the backing file: the entry is being changed.
    pub(super) fn move_to(&self, handle: Arc<Handle>) {
        *self.now.write() = Backing::Disk(handle);
    }
}

/// A name in an open directory.
pub(super) enum Names {
    /// Names outside `staging/`, with what they stand for.
    Fixed(Vec<Listed>),
    /// Names in `staging/`.
    Staged(Vec<Vec<u8>>),
}

/// Something open.
pub(super) enum Open {
    Version(Arc<Reader>),
    Staged(Staged),
    /// What a directory held when it was last read from its start.
    Dir(RwLock<Arc<Names>>),
}

/// The open files and directories by their handle.
pub(super) struct Handles {
    next: AtomicU64,
    open: RwLock<HashMap<u64, Arc<Open>>>,
    /// Readers of versions by inode, so that all handles of a file share its streams.
    readers: Mutex<HashMap<u64, (Arc<Reader>, usize)>>,
    pub(super) modes: Modes,
    share: Arc<Share>,
}

impl Handles {
    /// No handles. What is read may have `ahead` bytes rebuilt ahead of it in all.
    pub(super) fn new(ahead: u64) -> Self {
        Handles {
            next: AtomicU64::new(0),
            open: RwLock::default(),
            readers: Mutex::default(),
            modes: Modes::default(),
            share: Arc::new(Share::new(ahead)),
        }
    }

    /// A new reader of a version's file, which no handle has yet.
    pub(super) fn new_reader(&self, view: Arc<FileView>) -> Reader {
        Reader::Rebuilt {
            view,
            streams: Mutex::default(),
            share: self.share.clone(),
            served: AtomicU64::new(0),
        }
    }

    /// A handle for something open.
    pub(super) fn add(&self, open: Open) -> u64 {
        let fh = self.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.open.write().insert(fh, Arc::new(open));
        fh
    }

    /// What the handle stands for.
    pub(super) fn get(&self, fh: u64) -> Option<Arc<Open>> {
        self.open.read().get(&fh).cloned()
    }

    /// Closes a handle. The last user of what it stood for drops that.
    pub(super) fn close(&self, fh: u64) -> Option<Arc<Open>> {
        self.open.write().remove(&fh)
    }

    /// The reader of a version's file, made by `view` if no handle has one.
    pub(super) fn reader(
        &self,
        ino: u64,
        view: impl FnOnce() -> Result<Arc<FileView>>,
    ) -> Result<Arc<Reader>> {
        if let Some((reader, users)) = self.readers.lock().get_mut(&ino) {
            *users += 1;
            return Ok(reader.clone());
        }
        let new = Arc::new(self.new_reader(view()?));
        let mut readers = self.readers.lock();
        let (reader, users) = readers.entry(ino).or_insert((new, 0));
        *users += 1;
        Ok(reader.clone())
    }

    /// One handle less uses the reader of this inode. The bytes that were read, if it was the last.
    pub(super) fn close_reader(&self, ino: u64) -> Option<u64> {
        let mut readers = self.readers.lock();
        let (reader, users) = readers.get_mut(&ino)?;
        *users -= 1;
        if *users > 0 {
            return None;
        }
        let read = match &**reader {
            Reader::Rebuilt { served, .. } => served.load(Ordering::Relaxed),
            Reader::Whole(_) => 0,
        };
        readers.remove(&ino);
        Some(read)
    }

    /// The open handles of a staged inode.
    pub(super) fn of(&self, ino: u64) -> Vec<Arc<Open>> {
        let same = |o: &&Arc<Open>| matches!(&***o, Open::Staged(s) if s.ino == ino);
        self.open.read().values().filter(same).cloned().collect()
    }
}

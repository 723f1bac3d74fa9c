//! Commit: a tree of files becomes a version. Reading, hashing, encoding and writing overlap; memory stays bounded whatever
//! the size of the files.
//!
//! One buffer feeds the file's hash and the encoder, and every encoded chunk is decoded again and compared before its node
//! is kept. Once the chunks are stored, the file is parsed a second time *from its stored form*, and both parses must agree;
//! so a manifest that is published rebuilds the bytes that were hashed, and its tensors are where it says, even if the source
//! changed meanwhile (docs/FORMAT.md, "What a commit proves").

mod base;
mod broken;
mod chain;
mod encode;
mod file;
mod import;
mod index;
mod known;
mod listing;
mod object;
mod patch;
mod relative;
mod repack;
mod sample;
mod similar;
mod stamp;
mod walk;

pub use broken::{Broken, broken, quarantine, replaced};
pub use import::{Added, Adopt, Import, ImportedFile, ProvenObject, RawNode};
pub use object::{PutObject, put_object, store_object};
pub use patch::{Old, Patched, put_patched};
pub use repack::{RepackProgress, RepackRequest, Repacked, repack};

use crate::error::{Error, Kind, Result};
use crate::graph::{Change, Entry, History, LiveHistory, Record, Tree, Version, check_name, now};
use crate::id::VersionId;
use crate::pack::{PackRange, Packs};
use crate::rebuild::Rebuilder;
use base::Bases;
use encode::{Encoder, Job};
use parking_lot::Mutex;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What a commit says of its progress, in bytes read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes read so far.
    pub done: u64,
    /// Bytes there are to read.
    pub total: u64,
}

/// Called from the committing thread as it goes.
pub type OnProgress = Arc<dyn Fn(Progress) + Send + Sync>;

/// What to commit.
#[derive(Clone, Default)]
pub struct CommitRequest {
    /// The branch, made if absent.
    pub branch: String,
    /// Names in the version's root, and what to read for each.
    pub entries: Vec<(Vec<u8>, PathBuf)>,
    /// A message; may be empty.
    pub message: String,
    /// Store what symbolic links point at, in place of the links.
    pub follow_links: bool,
    /// Store an entry that is itself a symbolic link as a link; otherwise what it points at is stored, as `cp` does.
    pub keep_links: bool,
    /// Nobody waits for it: it takes fewer threads.
    pub background: bool,
    /// Told how far it is.
    pub progress: Option<OnProgress>,
    /// Asked whether to stop: nothing is committed then.
    pub stop: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

/// A version that is durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Committed {
    /// Its id.
    pub id: VersionId,
    /// Its branch.
    pub branch: String,
    /// Its number there.
    pub number: u64,
    /// Bytes of its files.
    pub bytes: u64,
    /// Bytes it added to the packs.
    pub stored: u64,
    /// Symbolic links that point outside of what was committed: their targets are not in the version.
    pub links_outside: u64,
}

/// The parts of a store that a commit works on.
pub struct Parts {
    /// Where nodes go.
    pub packs: Arc<Packs>,
    /// Reads bases.
    pub rebuilder: Arc<Rebuilder>,
    /// What was committed before.
    pub history: Arc<LiveHistory>,
    /// The store's directory.
    pub dir: PathBuf,
    /// Encoder threads, and those of commits in the background.
    pub threads: usize,
    #[allow(missing_docs)]
    pub background_threads: usize,
}

/// The most bytes of a message: a version goes from peer to peer in one frame.
const MAX_MESSAGE: usize = 64 << 10;

/// One commit under way.
struct Commit<'a> {
    request: &'a CommitRequest,
    encoder: &'a Encoder,
    jobs: crossbeam_channel::Sender<Job>,
    bases: Mutex<Bases>,
    total: u64,
    done: AtomicU64,
    /// Device and inode of the store's directory, which must not be committed into itself.
    store: Option<(u64, u64)>,
}

impl Commit<'_> {
    /// Tells of bytes that were read, and asks whether to go on.
    fn advance(&self, bytes: u64) -> Result<()> {
        let done = self.done.fetch_add(bytes, Relaxed) + bytes;
        if let Some(tell) = &self.request.progress {
            tell(Progress {
                done,
                total: self.total.max(done),
            });
        }
        match &self.request.stop {
            Some(stop) if stop() => Err(Error::new(Kind::Stopped, "stopped: nothing was committed")),
            _ => Ok(()),
        }
    }
}

/// Says, once everything was read, whether what was read is what should be published.
pub type Confirm<'a> = &'a (dyn Fn() -> Result<()> + Sync);

/// Commits the request as the branch's next version. Returns once it is durable. An error of `confirm`, asked when everything has
/// been read, gives it up.
pub fn commit(parts: &Parts, request: &CommitRequest, confirm: Confirm<'_>) -> Result<Committed> {
    check_name("branch", &request.branch)?;
    let first = request
        .entries
        .first()
        .ok_or_else(|| Error::new(Kind::Usage, "nothing to commit"))?;
    if request.message.len() > MAX_MESSAGE {
        let why = format!(
            "a message of {} bytes: at most {MAX_MESSAGE} are kept",
            request.message.len()
        );
        return Err(Error::new(Kind::Usage, why));
    }
    parts.packs.refresh()?;
    // Refuses a tag's name before any work is done.
    if parts.history.read().tags().contains_key(&request.branch) {
        return Err(Error::new(
            Kind::Exists,
            format!("{:?} is a tag, not a branch", request.branch),
        ));
    }
    let (found, stored) = store(parts, request, |commit| {
        let found = walk::walk(commit)?;
        let tree = Tree::new(found.entries)?;
        let (len, bytes) = (tree.len(), tree.encode());
        let id = Tree::id(&bytes);
        commit
            .encoder
            .node(crate::graph::NodeKind::Tree, id, &bytes, None)?;
        confirm()?;
        Ok(((id, len), (found.files, found.links_outside)))
    })?;
    let ((tree, len), (files, links_outside)) = found;
    let version = Version {
        parents: Vec::new(),
        entry: first.0.clone(),
        time: now(),
        message: request.message.clone(),
        tree,
        len,
    };
    let branch = request.branch.clone();
    let ((id, number), stored) = stored.publish(parts, move |history, stored| {
        let (change, id, number) = history.next(&branch, version.clone(), files, stored)?;
        Ok((vec![change], (id, number)))
    })?;
    Ok(Committed {
        id,
        branch: request.branch.clone(),
        number,
        bytes: len,
        stored,
        links_outside,
    })
}

/// Has `work` read what the request names and store it, with encoders on all cores.
fn store<T>(
    parts: &Parts,
    request: &CommitRequest,
    work: impl FnOnce(&Commit<'_>) -> Result<T>,
) -> Result<(T, Stored)> {
    let (versions, repacks) = {
        let history = parts.history.read();
        let head = history.branch(&request.branch).ok().and_then(|b| b.head());
        (base::versions(&history, head), history.repacks())
    };
    let since = parts.packs.seq();
    let total = match request.progress {
        Some(_) => walk::total_len(request),
        None => 0,
    };
    // None for a store that is on no real disk.
    let store = std::fs::metadata(&parts.dir).ok().map(|m| (m.dev(), m.ino()));
    let encoder = Encoder::new(parts)?;
    let done = std::thread::scope(|scope| {
        let threads = match request.background {
            true => parts.background_threads,
            false => parts.threads,
        };
        let jobs = encode::start_workers(scope, &encoder, threads);
        let bases = Mutex::new(Bases::new(parts, encoder.source.clone(), versions));
        work(&Commit {
            request,
            encoder: &encoder,
            jobs,
            bases,
            total,
            done: AtomicU64::new(0),
            store,
        })
    })?;
    let ranges = vec![encoder.finish()?];
    Ok((
        done,
        Stored {
            ranges,
            repacks,
            since,
        },
    ))
}

/// Nodes that are durable and not published.
pub struct Stored {
    ranges: Vec<PackRange>,
    /// Repacks, and the last journal record, that the encoder knew of.
    repacks: u64,
    since: u64,
}

impl Stored {
    /// Bytes in the packs.
    fn len(&self) -> u64 {
        self.ranges.iter().map(|r| r.to - r.from).sum()
    }

    /// Publishes the nodes with what `make` makes of the history and of their bytes in the packs. If others published some of the
    /// same nodes meanwhile, or encoded chains anew that these are built on, they are looked at again first.
    fn publish<T: Send + 'static>(
        mut self,
        parts: &Parts,
        make: impl Fn(&History, u64) -> Result<(Vec<Change>, T)> + Send + Sync + 'static,
    ) -> Result<(T, u64)> {
        let make = Arc::new(make);
        loop {
            match self.once(parts, make.clone()) {
                Err(e) if e.kind() == Kind::Changed => {}
                done => return Ok((done?, self.len())),
            }
            parts.packs.refresh()?;
            let known = std::mem::replace(&mut self.since, parts.packs.seq());
            self.repacks = parts.history.read().repacks();
            self.ranges.extend(stamp::recheck(parts, &self.ranges, known)?);
        }
    }

    fn once<T: Send + 'static>(
        &self,
        parts: &Parts,
        make: Arc<impl Fn(&History, u64) -> Result<(Vec<Change>, T)> + Send + Sync + 'static>,
    ) -> Result<T> {
        let made = Arc::new(Mutex::new(None));
        let (history, slot) = (parts.history.clone(), made.clone());
        let (stored, repacks) = (self.len(), self.repacks);
        let build = move |pending: &[Vec<u8>]| {
            history.with_pending(pending, |h| {
                if h.repacks() != repacks {
                    return Err(Error::new(Kind::Changed, "the store was repacked meanwhile"));
                }
                let (changes, result) = make(h, stored)?;
                *slot.lock() = Some(result);
                Ok(Record { changes }.encode())
            })
        };
        parts
            .packs
            .publish_new(self.ranges.clone(), self.since, Box::new(build))?;
        let made = made.lock().take();
        made.ok_or_else(|| Error::new(Kind::Io, "the journal published a record without building it"))
    }
}

/// What a walk found: the root's entries and what a user should know.
struct Found {
    entries: Vec<Entry>,
    files: u64,
    links_outside: u64,
}

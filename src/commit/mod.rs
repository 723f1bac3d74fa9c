//! Commit: a tree of files becomes a version. Reading, hashing, encoding and writing overlap; memory stays bounded whatever
//! the size of the files.
//!
//! One buffer feeds the file's hash and the encoder, and every encoded chunk is decoded again and compared before its node
//! is kept. Once the chunks are stored, the file is parsed a second time *from its stored form*, and both parses must agree;
//! so a manifest that is published rebuilds the bytes that were hashed, and its tensors are where it says, even if the source
//! changed meanwhile (docs/FORMAT.md, "What a commit proves").

mod base;
mod chain;
mod encode;
mod file;
mod index;
mod known;
mod listing;
mod relative;
mod repack;
mod sample;
mod similar;
mod stamp;
mod walk;

pub use repack::{RepackProgress, RepackRequest, Repacked, repack};

use crate::error::{Error, Kind, Result};
use crate::graph::{Entry, LiveHistory, Record, Tree, Version, check_name, now};
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
    /// Encoder threads.
    pub threads: usize,
}

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
    parts.packs.refresh()?;
    let (versions, repacks) = {
        let history = parts.history.read();
        // Refuses a tag's name before any work is done.
        let head = history.branch(&request.branch).ok().and_then(|b| b.head());
        if history.tags().contains_key(&request.branch) {
            return Err(Error::new(
                Kind::Exists,
                format!("{:?} is a tag, not a branch", request.branch),
            ));
        }
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
    let found = std::thread::scope(|scope| {
        let jobs = encode::start_workers(scope, &encoder, parts.threads);
        let bases = Mutex::new(Bases::new(parts, encoder.source.clone(), versions));
        let commit = Commit {
            request,
            encoder: &encoder,
            jobs,
            bases,
            total,
            done: AtomicU64::new(0),
            store,
        };
        walk::walk(&commit)
    })?;
    let tree = Tree::new(found.entries)?;
    let (len, bytes) = (tree.len(), tree.encode());
    let tree_id = Tree::id(&bytes);
    encoder.node(crate::graph::NodeKind::Tree, tree_id, &bytes, None)?;
    confirm()?;
    let range = encoder.finish()?;
    let version = Version {
        parents: Vec::new(),
        entry: first.0.clone(),
        time: now(),
        message: request.message.clone(),
        tree: tree_id,
        len,
    };
    let mut publish = Publish {
        branch: request.branch.clone(),
        version,
        files: found.files,
        ranges: vec![range],
        repacks,
        since,
    };
    let (id, number) = publish.until_done(parts)?;
    let stored = publish.stored();
    Ok(Committed {
        id,
        branch: request.branch.clone(),
        number,
        bytes: len,
        stored,
        links_outside: found.links_outside,
    })
}

/// A version that is ready to be published.
struct Publish {
    branch: String,
    version: Version,
    files: u64,
    ranges: Vec<PackRange>,
    /// Repacks, and the last journal record, that the encoder knew of.
    repacks: u64,
    since: u64,
}

impl Publish {
    fn stored(&self) -> u64 {
        self.ranges.iter().map(|r| r.to - r.from).sum()
    }

    /// Publishes the version. If others published some of the same nodes meanwhile, or encoded chains anew that its own are
    /// built on, it is looked at again first.
    fn until_done(&mut self, parts: &Parts) -> Result<(VersionId, u64)> {
        loop {
            match self.once(parts) {
                Err(e) if e.kind() == Kind::Changed => {}
                done => return done,
            }
            parts.packs.refresh()?;
            let known = std::mem::replace(&mut self.since, parts.packs.seq());
            self.repacks = parts.history.read().repacks();
            self.ranges.extend(stamp::recheck(parts, &self.ranges, known)?);
        }
    }

    fn once(&self, parts: &Parts) -> Result<(VersionId, u64)> {
        let placed = Arc::new(Mutex::new(None));
        let (history, slot) = (parts.history.clone(), placed.clone());
        let (branch, version) = (self.branch.clone(), self.version.clone());
        let (files, stored, repacks) = (self.files, self.stored(), self.repacks);
        let build = move |pending: &[Vec<u8>]| {
            history.with_pending(pending, |h| {
                if h.repacks() != repacks {
                    return Err(Error::new(Kind::Changed, "the store was repacked meanwhile"));
                }
                let (change, id, number) = h.next(&branch, version, files, stored)?;
                *slot.lock() = Some((id, number));
                Ok(Record {
                    changes: vec![change],
                }
                .encode())
            })
        };
        parts
            .packs
            .publish_new(self.ranges.clone(), self.since, Box::new(build))?;
        let placed = placed.lock().take();
        placed.ok_or_else(|| Error::new(Kind::Io, "the journal published a version without building it"))
    }
}

/// What a walk found: the root's entries and what a user should know.
struct Found {
    entries: Vec<Entry>,
    files: u64,
    links_outside: u64,
}

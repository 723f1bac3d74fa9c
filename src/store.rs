//! The one façade of a store. Doors (command line, mount) see this and plain types, nothing below.

mod diff;
mod export;
mod facts;
mod file;
mod object;
mod peer;
mod stats;
mod whole;

pub use crate::commit::{Added, Adopt, Broken, Import, ImportedFile, ProvenObject, RawNode, Stored};
pub use crate::commit::{CommitRequest, Committed, Confirm, OnProgress, Patched, Progress, PutObject};
pub use crate::commit::{RepackProgress, RepackRequest, Repacked};
pub use crate::disk::take_dir;
pub use crate::format::is_distributed_part;
pub use crate::graph::{
    Entry, EntryKind, Follow, MAIN, NodeKind, Numbered, Object, Timestamp, Tree, Version, check_name, is_name,
};
pub use crate::id::{FileHash, NodeId, ObjectId, VersionId};
pub use crate::object::{Block, Fold, ObjectManifest, Place, Proof, Width};
pub use crate::object::{Record as ObjectRecord, Records as ObjectRecords, Source as ObjectSource};
pub use crate::rebuild::{Counters, Slice};
pub use crate::verify::{Damage, Report};
pub use diff::{Blame, Diff, TensorDiff};
pub use facts::Facts;
pub use file::{FileView, TensorInfo, TensorPaths, View};
pub use object::ObjectFile;
pub use peer::{manifest_id, tree_id};
pub use stats::{BranchStats, CodecStats, Stats};
pub use whole::{FileKey, Home, Warmed, Whole, WholeFiles, disk_is_full, hash_file};

use crate::cache::ByteLru;
use crate::commit::{self, Parts};
use crate::disk::{Disk, RealDisk};
use crate::error::{Error, Interrupt, Kind, Result, never};
use crate::format;
use crate::graph::{Change, LiveHistory, Record};
use crate::pack::Packs;
use crate::rebuild::{NodeSource, Rebuilder, StoredFile};
use crate::verify::Verifier;
use parking_lot::Mutex;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Settings of an open store.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the cache of rebuilt chunks.
    pub memory: u64,
    /// Threads that encode and rebuild.
    pub threads: usize,
    /// Threads that encode what is committed in the background.
    pub background_threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        Options {
            memory: 256 << 20,
            threads,
            background_threads: (threads / 2).max(1),
        }
    }
}

/// Bytes of open files (manifests, layouts), and of directories, that are kept. One that is larger is kept alone: to load it
/// anew for every look-up of one of its tensors would never end.
const OPEN_BYTES: u64 = 64 << 20;

/// An open store; clones share it.
#[derive(Clone)]
pub struct Store(Arc<Inner>);

struct Inner {
    dir: PathBuf,
    parts: Parts,
    files: Mutex<ByteLru<(FileHash, u64), FileView>>,
    trees: Mutex<ByteLru<NodeId, Tree>>,
    whole: OnceLock<WholeFiles>,
}

impl Store {
    /// Makes a store in a directory that is empty or absent.
    pub fn init(dir: &Path) -> Result<()> {
        Packs::create(Arc::new(RealDisk), dir)
    }

    /// Opens the store in `dir`.
    pub fn open(dir: &Path, options: &Options) -> Result<Store> {
        Self::open_on(Arc::new(RealDisk), dir, options)
    }

    /// Opens the store in `dir`, which is made if absent.
    pub fn open_or_init(dir: &Path, options: &Options) -> Result<Store> {
        match Self::init(dir) {
            Err(e) if e.kind() != Kind::Exists => Err(e),
            _ => Self::open(dir, options),
        }
    }

    /// Opens a store on any disk.
    pub fn open_on(disk: Arc<dyn Disk>, dir: &Path, options: &Options) -> Result<Store> {
        let history: Arc<LiveHistory> = Arc::default();
        let packs = Packs::open(disk, dir, history.clone())?;
        let rebuilder = Rebuilder::new(options.memory, options.threads);
        Ok(Store(Arc::new(Inner {
            dir: dir.to_owned(),
            parts: Parts {
                packs,
                rebuilder,
                history,
                threads: options.threads,
                background_threads: options.background_threads,
                dir: dir.to_owned(),
            },
            files: Mutex::new(ByteLru::new(OPEN_BYTES)),
            trees: Mutex::new(ByteLru::new(OPEN_BYTES)),
            whole: OnceLock::new(),
        })))
    }

    /// The store's directory.
    pub fn dir(&self) -> &Path {
        &self.0.dir
    }

    /// Picks up what other processes committed; cheap when nothing changed.
    pub fn refresh(&self) -> Result<bool> {
        self.0.parts.packs.refresh()
    }

    /// Writes what a next opening would have to find out again.
    pub fn close(&self) -> Result<()> {
        self.0.parts.packs.close()
    }

    /// All branches, sorted; `main` is always among them.
    pub fn branches(&self) -> Vec<String> {
        self.0.parts.history.read().branches().keys().cloned().collect()
    }

    /// A branch's own versions, oldest first.
    pub fn versions(&self, branch: &str) -> Result<Vec<Arc<Numbered>>> {
        Ok(self.0.parts.history.read().branch(branch)?.versions.clone())
    }

    /// Whether there is a branch of this name.
    pub fn has_branch(&self, name: &str) -> bool {
        self.0.parts.history.read().branches().contains_key(name)
    }

    /// Bytes of all files of a branch's own versions.
    pub fn branch_len(&self, name: &str) -> u64 {
        let history = self.0.parts.history.read();
        history.branches().get(name).map_or(0, |b| b.len)
    }

    /// A version by its place.
    pub fn numbered(&self, branch: &str, number: u64) -> Option<Arc<Numbered>> {
        self.0.parts.history.read().numbered(branch, number).cloned()
    }

    /// A branch's newest version, or the one it was forked off.
    pub fn latest(&self, branch: &str) -> Option<Arc<Numbered>> {
        self.0.parts.history.read().latest(branch).ok()
    }

    /// All tags and what they name, sorted.
    pub fn tags(&self) -> Vec<(String, Arc<Numbered>)> {
        let history = self.0.parts.history.read();
        let tags = history.tags().iter();
        tags.filter_map(|(name, id)| Some((name.clone(), history.version(id)?.clone())))
            .collect()
    }

    /// What a tag names.
    pub fn tag_target(&self, name: &str) -> Option<Arc<Numbered>> {
        let history = self.0.parts.history.read();
        history.version(history.tags().get(name)?).cloned()
    }

    /// The one version whose id starts with 8 or more hex digits.
    pub fn by_prefix(&self, prefix: &str) -> Option<Arc<Numbered>> {
        self.0.parts.history.read().by_prefix(prefix).ok()?.cloned()
    }

    /// The version with this id.
    pub fn version(&self, id: &VersionId) -> Option<Arc<Numbered>> {
        self.0.parts.history.read().version(id).cloned()
    }

    /// The version that a REV names.
    pub fn resolve(&self, rev: &str) -> Result<Arc<Numbered>> {
        self.0.parts.history.read().resolve(rev)
    }

    /// Makes a branch, empty or forked off a REV.
    pub fn make_branch(&self, name: &str, from: Option<&str>) -> Result<()> {
        let (name, from) = (name.to_owned(), from.map(str::to_owned));
        self.change(move |h| {
            let from = from.as_deref().map(|rev| h.resolve(rev)).transpose()?;
            h.new_branch(&name, from.map(|v| v.id))
        })
    }

    /// Sets a tag; `force` moves one that exists.
    pub fn set_tag(&self, name: &str, rev: &str, force: bool) -> Result<()> {
        let (name, rev) = (name.to_owned(), rev.to_owned());
        self.change(move |h| h.new_tag(&name, h.resolve(&rev)?.id, force))
    }

    fn change(
        &self,
        make: impl FnOnce(&crate::graph::History) -> Result<Change> + Send + 'static,
    ) -> Result<()> {
        let history = self.0.parts.history.clone();
        let build = move |pending: &[Vec<u8>]| {
            history.with_pending(pending, |h| {
                Ok(Record {
                    changes: vec![make(h)?],
                }
                .encode())
            })
        };
        self.0
            .parts
            .packs
            .publish(Vec::new(), Box::new(build))
            .map(|_| ())
    }

    /// One directory of a version.
    pub fn tree(&self, id: &NodeId) -> Result<Arc<Tree>> {
        if let Some(hit) = self.0.trees.lock().get(id) {
            return Ok(hit);
        }
        let parts = &self.0.parts;
        let bytes = parts.rebuilder.node(&*parts.packs, NodeKind::Tree, id)?;
        let tree = Arc::new(Tree::decode(&bytes)?);
        // Decoded, a tree takes a few times its bytes.
        self.0
            .trees
            .lock()
            .put(*id, tree.clone(), (bytes.len() as u64 * 3).min(OPEN_BYTES));
        Ok(tree)
    }

    /// A file of a version.
    pub fn file(&self, hash: &FileHash, len: u64) -> Result<Arc<FileView>> {
        let key = (*hash, len);
        if let Some(hit) = self.0.files.lock().get(&key) {
            return Ok(hit);
        }
        let parts = &self.0.parts;
        let source: Arc<dyn NodeSource> = parts.packs.clone();
        let stored = StoredFile::load(&parts.rebuilder, source, hash, len)?;
        let view = Arc::new(FileView::stored(Arc::new(stored)));
        self.0
            .files
            .lock()
            .put(key, view.clone(), view.weight().min(OPEN_BYTES));
        Ok(view)
    }

    /// The entry at a path of a version: components below its root. The root itself has none.
    pub fn entry(&self, version: &Numbered, path: &[u8]) -> Result<Entry> {
        let missing = || {
            let text = String::from_utf8_lossy(path);
            Error::new(
                Kind::NotFound,
                format!(
                    "{} has no {text:?} (`zspace ls {}` lists it)",
                    version.name(),
                    version.name()
                ),
            )
        };
        let mut tree = self.tree(&version.version.tree)?;
        let mut parts = path.split(|b| *b == b'/').filter(|p| !p.is_empty()).peekable();
        while let Some(name) = parts.next() {
            let entry = tree.find(name).ok_or_else(missing)?;
            match (&entry.kind, parts.peek()) {
                (_, None) => return Ok(entry.clone()),
                (EntryKind::Dir { tree: id, .. }, Some(_)) => tree = self.tree(&id.clone())?,
                _ => return Err(missing()),
            }
        }
        Err(Error::new(Kind::Usage, "name a file of the version"))
    }

    /// Everything in a version: paths below its root and their entries, directories before what is in them.
    pub fn walk(&self, version: &Numbered) -> Result<Vec<(Vec<u8>, Entry)>> {
        self.walk_tree(&version.version.tree, b"")
    }

    /// Everything below a directory, with `prefix` in front of each path.
    pub fn walk_tree(&self, root: &NodeId, prefix: &[u8]) -> Result<Vec<(Vec<u8>, Entry)>> {
        let below = |prefix: &[u8], id: &NodeId| -> Result<Vec<(Vec<u8>, Entry)>> {
            let tree = self.tree(id)?;
            let path = |e: &Entry| [prefix, &e.name].concat();
            Ok(tree
                .entries()
                .iter()
                .rev()
                .map(|e| (path(e), e.clone()))
                .collect())
        };
        let mut out = Vec::new();
        let mut todo = below(prefix, root)?;
        while let Some((path, entry)) = todo.pop() {
            if let EntryKind::Dir { tree, .. } = &entry.kind {
                todo.extend(below(&[&path[..], b"/"].concat(), tree)?);
            }
            out.push((path, entry));
        }
        Ok(out)
    }

    /// What REV or REV:PATH names: everything in the version or directory, or the one file; paths are from the version's root.
    pub fn select(&self, text: &str) -> Result<Vec<(Vec<u8>, Entry)>> {
        let (rev, path) = text.split_once(':').unwrap_or((text, ""));
        let version = self.resolve(rev)?;
        let path = path.trim_matches('/');
        if path.is_empty() {
            return self.walk(&version);
        }
        let entry = self.entry(&version, path.as_bytes())?;
        match &entry.kind {
            EntryKind::Dir { tree, .. } => self.walk_tree(tree, format!("{path}/").as_bytes()),
            _ => Ok(vec![(path.as_bytes().to_vec(), entry)]),
        }
    }

    /// Commits the request as its branch's next version. Returns once it is durable.
    pub fn commit(&self, request: &CommitRequest) -> Result<Committed> {
        self.commit_if(request, &|| Ok(()))
    }

    /// As [`Store::commit`], but asks `confirm` when everything has been read; its error gives the commit up.
    pub fn commit_if(&self, request: &CommitRequest, confirm: Confirm<'_>) -> Result<Committed> {
        commit::commit(&self.0.parts, request, confirm)
    }

    /// Encodes old versions anew where that is smaller, and gives up packs that hold little any more. Other processes may commit
    /// and read meanwhile; `Busy` if another repacks.
    pub fn repack(&self, request: &RepackRequest) -> Result<Repacked> {
        commit::repack(&self.0.parts, request)
    }

    /// What a file on disk looks like, without reading more than its headers.
    pub fn probe(&self, path: &Path) -> Result<Probe> {
        probe(path)
    }

    /// Checks versions, each file back to its SHA-256. `told` hears of the bytes checked.
    pub fn verify(&self, versions: &[Arc<Numbered>], told: &mut dyn FnMut(u64)) -> Report {
        let mut v = self.verifier(&never);
        // Nothing ends it.
        let _ = versions.iter().try_for_each(|version| v.version(version, told));
        v.report
    }

    /// Checks objects, their bytes and their records, and adds what is damaged. `told` hears of the bytes checked.
    pub fn verify_objects(&self, objects: &[Arc<Object>], report: &mut Report, told: &mut dyn FnMut(u64)) {
        let mut v = self.verifier(&never);
        v.report = std::mem::take(report);
        // Nothing ends it.
        let _ = objects.iter().try_for_each(|object| v.object(object, told));
        *report = v.report;
    }

    /// Checks versions and objects as somebody wants it who may end it.
    pub fn verifier<'a>(&self, interrupt: Interrupt<'a>) -> Verifier<'a> {
        Verifier::new(
            self.0.parts.packs.clone(),
            self.0.parts.rebuilder.clone(),
            interrupt,
        )
    }

    /// Checks every record in the packs against its checksums, whatever version it belongs to, and adds what is damaged. What a repair
    /// has replaced is not.
    pub fn verify_packs(&self, report: &mut Report) {
        let replaced = commit::replaced(&self.0.parts);
        let mut tell = |e: Error| {
            report.damage.push(Damage {
                why: e.to_string(),
                ..Damage::default()
            });
        };
        for range in self.0.parts.history.ranges() {
            let checked = self.0.parts.packs.check(&range, &replaced, &mut |damaged| {
                tell(damaged.why);
                Ok(())
            });
            checked.unwrap_or_else(&mut tell);
        }
    }

    /// Keeps up to `quota` bytes of whole files in STORE/cache from now on, unless another process does.
    pub fn keep_whole_files(&self, quota: u64) -> Result<()> {
        if let Some(whole) = WholeFiles::open(self.0.dir.join("cache"), quota)? {
            let _ = self.0.whole.set(whole);
        }
        Ok(())
    }

    /// The whole files in STORE/cache, if this process keeps them.
    pub fn whole_files(&self) -> Option<&WholeFiles> {
        self.0.whole.get()
    }

    /// What was read and rebuilt since the store was opened.
    pub fn counters(&self) -> Counters {
        self.0.parts.rebuilder.counters()
    }

    /// Bytes of rebuilt chunks in the cache.
    pub fn cached_bytes(&self) -> u64 {
        self.0.parts.rebuilder.cached_bytes()
    }

    /// The most bytes that the cache holds.
    pub fn cache_limit(&self) -> u64 {
        self.0.parts.rebuilder.cache_limit()
    }
}

/// What a file on disk looks like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Probe {
    /// Whether it holds tensors.
    pub tensors: bool,
    /// The files that a `*.index.json` or the `.metadata` of a distributed checkpoint names as shards.
    pub shards: Option<Vec<String>>,
    /// Why it is torn, if its own structure says so.
    pub torn: Option<String>,
}

struct OnDisk(std::fs::File, u64);

impl format::Source for OnDisk {
    fn len(&self) -> u64 {
        self.1
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.0
            .read_exact_at(buf, offset)
            .map_err(|e| Error::io("read", e))
    }
}

/// The largest index of shards that is read.
const MAX_INDEX: u64 = 64 << 20;

/// Whether an index was left behind by a save in shards: the whole file that it is called after is there, and no shard is.
/// `save_pretrained` over an older save removes the shards that it does not write anew, but not their index.
fn outlived(index: &Path, name: &str, shards: &[String]) -> bool {
    let whole = index.with_file_name(name.strip_suffix(".index.json").unwrap_or_default());
    !shards.is_empty() && whole.is_file() && !shards.iter().any(|s| index.with_file_name(s).exists())
}

fn probe(path: &Path) -> Result<Probe> {
    let at = |e| Error::io(path.display().to_string(), e);
    let file = std::fs::File::open(path).map_err(at)?;
    let len = file.metadata().map_err(at)?.len();
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let source = OnDisk(file, len);
    let mut out = Probe::default();
    if name.ends_with(".index.json") && len <= MAX_INDEX {
        let mut json = vec![0; len as usize];
        format::Source::read_at(&source, 0, &mut json)?;
        out.shards = format::index_shards(&json).filter(|shards| !outlived(path, &name, shards));
    } else if name.ends_with(".metadata") && len <= MAX_INDEX {
        let mut pickle = vec![0; len as usize];
        format::Source::read_at(&source, 0, &mut pickle)?;
        out.shards = Some(format::distributed_parts(&pickle)).filter(|parts| !parts.is_empty());
    }
    if let format::Completeness::Torn(why) = format::completeness(&source, &name)? {
        out.torn = Some(why);
    } else if let format::Split::Parsed(layout) = format::split(&source)? {
        out.tensors = !layout.tensors.is_empty();
    }
    Ok(out)
}

#[cfg(test)]
pub(crate) mod tests;

//! Staging over a store made of maps, with a clock that tests turn.

mod changes;
mod crash;
mod model;
mod settling;
mod writers;

use super::clock::Clock;
use super::repo::Repo;
use super::{EntryStatus, Handle, Located, Settle, Staging, State};
use crate::error::{Error, Kind, Result};
use crate::id::{FileHash, FileHasher, NodeId, VersionId};
use crate::store::{
    Committed, Confirm, Entry, EntryKind, Numbered, Options, Probe, Store, Timestamp, Tree, Warmed,
};
use parking_lot::Mutex;
use std::collections::{BTreeSet, HashMap};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Stands still until it is turned.
#[derive(Default)]
pub(super) struct TestClock(AtomicU64);

impl Clock for TestClock {
    fn now(&self) -> Duration {
        Duration::from_millis(self.0.load(Ordering::Relaxed))
    }

    fn wall(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + self.now()
    }
}

type Hook = Box<dyn FnMut() -> Result<()> + Send>;

#[derive(Default)]
struct Data {
    branches: BTreeSet<String>,
    versions: Vec<Arc<Numbered>>,
    trees: HashMap<NodeId, Arc<Tree>>,
    files: HashMap<FileHash, Vec<u8>>,
    /// Runs after the sources were read.
    hook: Option<Hook>,
}

/// Files are what their first bytes say: `T` holds tensors, `X` is torn, `I a b` is an index that names a and b.
pub(super) struct FakeRepo {
    dir: PathBuf,
    data: Mutex<Data>,
}

impl FakeRepo {
    fn put(&self, path: &Path) -> Result<Entry> {
        let meta = std::fs::symlink_metadata(path).map_err(|e| Error::io("stat", e))?;
        let kind = if meta.is_dir() {
            let mut names: Vec<_> = std::fs::read_dir(path)
                .unwrap()
                .map(|e| e.unwrap().path())
                .collect();
            names.sort();
            let tree = Tree::new(names.iter().map(|p| self.put(p)).collect::<Result<_>>()?)?;
            let (id, len) = (Tree::id(&tree.encode()), tree.len());
            self.data.lock().trees.insert(id, Arc::new(tree));
            EntryKind::Dir { tree: id, len }
        } else if meta.is_symlink() {
            EntryKind::Symlink(std::fs::read_link(path).unwrap().into_os_string().into_vec())
        } else {
            let bytes = std::fs::read(path).map_err(|e| Error::io("read", e))?;
            let mut h = FileHasher::default();
            h.update(&bytes);
            let (hash, len) = (h.finish(), bytes.len() as u64);
            self.data.lock().files.insert(hash, bytes);
            let link = if meta.nlink() > 1 { meta.ino() as u32 } else { 0 };
            EntryKind::File { hash, len, link }
        };
        Ok(Entry {
            name: path.file_name().unwrap().as_bytes().to_vec(),
            mode: meta.permissions().mode() & 0o7777,
            mtime: Timestamp {
                seconds: meta.mtime(),
                nanos: meta.mtime_nsec() as u32,
            },
            xattrs: Vec::new(),
            kind,
        })
    }
}

impl Repo for FakeRepo {
    fn dir(&self) -> &Path {
        &self.dir
    }

    fn refresh(&self) -> Result<()> {
        Ok(())
    }

    fn cached_bytes(&self) -> u64 {
        0
    }

    fn warm(&self, _what: &str, _go_on: &dyn Fn() -> bool) -> Result<Warmed> {
        Ok(Warmed::default())
    }

    fn cache_limit(&self) -> u64 {
        0
    }

    fn branches(&self) -> Vec<String> {
        self.data.lock().branches.iter().cloned().collect()
    }

    fn make_branch(&self, name: &str) -> Result<()> {
        crate::store::check_name("branch", name)?;
        self.data.lock().branches.insert(name.to_owned());
        Ok(())
    }

    fn version(&self, id: &VersionId) -> Option<Arc<Numbered>> {
        self.data.lock().versions.iter().find(|v| v.id == *id).cloned()
    }

    fn tree(&self, id: &NodeId) -> Result<Arc<Tree>> {
        self.data
            .lock()
            .trees
            .get(id)
            .cloned()
            .ok_or_else(|| Error::new(Kind::NotFound, "tree"))
    }

    fn export(&self, hash: &FileHash, _len: u64, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let bytes = self
            .data
            .lock()
            .files
            .get(hash)
            .cloned()
            .ok_or_else(|| Error::new(Kind::NotFound, "file"))?;
        bytes.chunks(3).try_for_each(sink)
    }

    fn probe(&self, path: &Path) -> Result<Probe> {
        let bytes = std::fs::read(path).map_err(|e| Error::io("probe", e))?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        let shards = text
            .strip_prefix("I ")
            .map(|t| t.split(' ').map(str::to_owned).collect());
        let torn = text.starts_with('X').then(|| "is cut short".to_owned());
        Ok(Probe {
            tensors: text.starts_with('T'),
            shards,
            torn,
        })
    }

    fn commit(
        &self,
        branch: &str,
        entries: Vec<(Vec<u8>, PathBuf)>,
        message: &str,
        _: bool,
        confirm: Confirm<'_>,
    ) -> Result<Committed> {
        let tree = Tree::new(
            entries
                .iter()
                .map(|(_, path)| self.put(path))
                .collect::<Result<_>>()?,
        )?;
        let hook = self.data.lock().hook.take();
        if let Some(mut hook) = hook {
            hook()?;
        }
        confirm()?;
        let mut data = self.data.lock();
        let (id, len) = (Tree::id(&tree.encode()), tree.len());
        data.trees.insert(id, Arc::new(tree));
        let number = 1 + data.versions.iter().filter(|v| v.branch == branch).count() as u64;
        let mut version = template().version.clone();
        version.parents = data.versions.last().map(|v| v.id).into_iter().collect();
        version.entry = entries[0].0.clone();
        version.time = Timestamp {
            seconds: number as i64,
            nanos: 0,
        };
        version.message = message.to_owned();
        (version.tree, version.len) = (id, len);
        let id = version.id();
        let files = entries.len() as u64;
        data.versions.push(Arc::new(Numbered {
            id,
            branch: branch.into(),
            number,
            version,
            files,
            stored: len,
        }));
        Ok(Committed {
            id,
            branch: branch.into(),
            number,
            bytes: len,
            stored: len,
            links_outside: 0,
        })
    }
}

pub(super) struct Fixture {
    _dir: tempfile::TempDir,
    pub(super) repo: Arc<FakeRepo>,
    pub(super) clock: Arc<TestClock>,
    pub(super) staging: Arc<Staging>,
}

impl Fixture {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let data = Data {
            branches: ["main".to_owned()].into(),
            ..Data::default()
        };
        let repo = Arc::new(FakeRepo {
            dir: dir.path().to_owned(),
            data: Mutex::new(data),
        });
        let clock = Arc::new(TestClock::default());
        let staging = start(&repo, &clock, false);
        Fixture {
            _dir: dir,
            repo,
            clock,
            staging,
        }
    }

    /// The mount dies and comes back.
    pub(super) fn restart(&mut self) {
        let nothing = Arc::new(FakeRepo {
            dir: self._dir.path().join("none"),
            data: Mutex::default(),
        });
        // A process that another test is just starting may have the lock for a moment: its own files are closed only once it runs.
        for _ in 0..100 {
            self.staging = start(&nothing, &self.clock, true);
            self.staging = start(&self.repo, &self.clock, false);
            if self.staging.is_owner() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        panic!("the lock is never free");
    }

    /// A second mount beside the owner.
    pub(super) fn second(&self) -> Arc<Staging> {
        start(&self.repo, &self.clock, false)
    }

    pub(super) fn pass(&self, seconds: f64) {
        self.clock
            .0
            .fetch_add((seconds * 1000.0) as u64, Ordering::Relaxed);
        // What one pass commits or copies up may make another due.
        for _ in 0..3 {
            self.staging.step();
        }
    }

    pub(super) fn create(&self, at: &str) -> Handle {
        self.staging
            .create(&path(at), 0o644, libc::O_RDWR, 0o022, 0, 0)
            .unwrap()
            .0
    }

    pub(super) fn open(&self, at: &str, flags: i32) -> Handle {
        self.staging.open_file(&path(at), flags).unwrap()
    }

    /// Writes a file as cp does.
    pub(super) fn put(&self, at: &str, text: &str) {
        let file = match self.staging.locate(&path(at)) {
            Ok(_) => self.open(at, libc::O_WRONLY | libc::O_TRUNC),
            Err(_) => self.create(at),
        };
        file.write(0, text.as_bytes()).unwrap();
        file.flush(std::process::id()).unwrap();
    }

    pub(super) fn mkdir(&self, at: &str) {
        self.staging.mkdir(&path(at), 0o755, 0o022, 0, 0).unwrap();
    }

    pub(super) fn rename(&self, from: &str, to: &str) {
        self.staging.rename(&path(from), &path(to), 0).unwrap();
    }

    /// What was committed, as `BRANCH: names`.
    pub(super) fn log(&self) -> Vec<String> {
        let data = self.repo.data.lock();
        let names = |v: &Numbered| {
            let tree = &data.trees[&v.version.tree];
            let names: Vec<_> = tree
                .entries()
                .iter()
                .map(|e| String::from_utf8_lossy(&e.name).into_owned())
                .collect();
            format!("{}: {}", v.branch, names.join(" "))
        };
        data.versions.iter().map(|v| names(v)).collect()
    }

    pub(super) fn fail_next(&self, hook: impl FnMut() -> Result<()> + Send + 'static) {
        self.repo.data.lock().hook = Some(Box::new(hook));
    }

    pub(super) fn status(&self, at: &str) -> Option<EntryStatus> {
        let all = self.staging.status().unwrap().entries;
        all.into_iter().find(|e| format!("{}/{}", e.branch, e.name) == at)
    }

    pub(super) fn state(&self, at: &str) -> State {
        self.status(at).unwrap_or_else(|| panic!("no {at}")).state
    }

    /// Why the entry waits.
    pub(super) fn waits(&self, at: &str) -> String {
        match self.state(at) {
            State::Waiting { reason } => reason,
            other => panic!("{at} is {other:?}"),
        }
    }

    pub(super) fn committed(&self, at: &str) -> bool {
        matches!(self.state(at), State::Committed { .. })
            && matches!(self.staging.locate(&path(at)).unwrap(), Located::Version { .. })
            && !self.backing(at).exists()
    }

    pub(super) fn names(&self, at: &str) -> Vec<String> {
        let all = self.staging.list(&path(at)).unwrap();
        all.into_iter()
            .map(|(n, _)| String::from_utf8(n).unwrap())
            .collect()
    }

    pub(super) fn backing(&self, at: &str) -> PathBuf {
        self.staging.dir().join("tree").join(at)
    }

    /// The content, wherever it is served from.
    pub(super) fn read(&self, at: &str) -> String {
        let bytes = match self.staging.locate(&path(at)).unwrap() {
            Located::Version { version, path } => {
                let entry = super::repo::find(self.repo.as_ref(), &version, &path).unwrap();
                let EntryKind::File { hash, .. } = entry.kind else {
                    panic!("no file")
                };
                self.repo.data.lock().files[&hash].clone()
            }
            _ => self.open(at, libc::O_RDONLY).read(0, 1 << 20).unwrap(),
        };
        String::from_utf8(bytes).unwrap()
    }

    pub(super) fn errno<T>(&self, result: Result<T>) -> i32 {
        result.map(|_| ()).unwrap_err().errno()
    }
}

fn start(repo: &Arc<FakeRepo>, clock: &Arc<TestClock>, read_only: bool) -> Arc<Staging> {
    Staging::start(repo.clone(), Settle::default(), read_only, clock.clone()).unwrap()
}

pub(super) fn path(at: &str) -> Vec<Vec<u8>> {
    at.split('/')
        .filter(|c| !c.is_empty())
        .map(|c| c.as_bytes().to_vec())
        .collect()
}

/// Some version, to make others after.
fn template() -> Arc<Numbered> {
    static MADE: std::sync::OnceLock<Arc<Numbered>> = std::sync::OnceLock::new();
    MADE.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("f"), "x").unwrap();
        let store = Store::open_or_init(&dir.path().join("store"), &Options::default()).unwrap();
        Repo::commit(
            &store,
            "main",
            vec![(b"f".to_vec(), dir.path().join("f"))],
            "",
            false,
            &|| Ok(()),
        )
        .unwrap();
        store.latest("main").unwrap()
    })
    .clone()
}

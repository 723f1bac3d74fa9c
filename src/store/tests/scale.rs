//! What is done to open a store, to read and to commit does not grow with the versions there are. Counted, not timed.

use super::*;
use crate::disk::DiskFile;
use crate::disk::faulty::FaultyDisk;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A disk in memory that counts what is asked of it.
#[derive(Clone)]
struct Counting {
    disk: FaultyDisk,
    asked: Arc<AtomicUsize>,
}

struct CountingFile {
    file: Arc<dyn DiskFile>,
    asked: Arc<AtomicUsize>,
}

impl Counting {
    fn one<T>(&self, value: T) -> T {
        self.asked.fetch_add(1, Relaxed);
        value
    }

    fn counted(&self, file: Result<Arc<dyn DiskFile>>) -> Result<Arc<dyn DiskFile>> {
        let asked = self.asked.clone();
        self.one(file)
            .map(|file| Arc::new(CountingFile { file, asked }) as Arc<dyn DiskFile>)
    }

    /// How much `work` asks of the disk.
    fn count(&self, work: impl FnOnce()) -> usize {
        let before = self.asked.load(Relaxed);
        work();
        self.asked.load(Relaxed) - before
    }
}

impl Disk for Counting {
    fn open(&self, path: &Path, write: bool) -> Result<Arc<dyn DiskFile>> {
        self.counted(self.disk.open(path, write))
    }

    fn create_new(&self, path: &Path) -> Result<Arc<dyn DiskFile>> {
        self.counted(self.disk.create_new(path))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        self.one(self.disk.rename(from, to))
    }

    fn remove(&self, path: &Path) -> Result<()> {
        self.one(self.disk.remove(path))
    }

    fn list(&self, dir: &Path) -> Result<Vec<String>> {
        self.one(self.disk.list(dir))
    }

    fn create_dir_all(&self, dir: &Path) -> Result<()> {
        self.one(self.disk.create_dir_all(dir))
    }

    fn sync_dir(&self, dir: &Path) -> Result<()> {
        self.one(self.disk.sync_dir(dir))
    }

    fn lock(&self, path: &Path, wait: bool) -> Result<Box<dyn Send + Sync>> {
        self.one(self.disk.lock(path, wait))
    }
}

impl CountingFile {
    fn one<T>(&self, value: T) -> T {
        self.asked.fetch_add(1, Relaxed);
        value
    }
}

impl DiskFile for CountingFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        self.one(self.file.read_at(offset, buf))
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.one(self.file.write_at(offset, data))
    }

    fn len(&self) -> Result<u64> {
        self.one(self.file.len())
    }

    fn truncate(&self, len: u64) -> Result<()> {
        self.one(self.file.truncate(len))
    }

    fn sync(&self) -> Result<()> {
        self.one(self.file.sync())
    }
}

/// What opening, the first read of the oldest and of the newest version, and one more commit ask of the disk once there are so
/// many versions, each committed by a process of its own.
fn asked_with(versions: u32) -> [usize; 4] {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    let disk = Counting {
        disk: FaultyDisk::new(),
        asked: Arc::default(),
    };
    let root = Path::new("/store");
    Packs::create(Arc::new(disk.clone()), root).unwrap();
    let open = || Store::open_on(Arc::new(disk.clone()), root, &options()).unwrap();
    let mut model = Model::new(&[3000, 1000]);
    let mut commit = |step| {
        model.step();
        fs::write(&path, model.safetensors(step)).unwrap();
        let store = open();
        store.commit(&request(&path)).unwrap();
        store.close().unwrap();
    };
    for step in 1..=versions {
        commit(step);
    }
    let opening = disk.count(|| drop(open()));
    let first_read = |rev: &str| {
        let store = open();
        disk.count(|| assert!(!read(&store, rev, "model.safetensors").unwrap().is_empty()))
    };
    let (oldest, newest) = (first_read("main/1"), first_read("main"));
    let one_more = disk.count(|| commit(versions + 1));
    [opening, oldest, newest, one_more]
}

#[test]
fn nothing_is_asked_for_each_version() {
    let (few, many) = (asked_with(16), asked_with(256));
    for (few, many) in few.into_iter().zip(many) {
        // Runs of the index and chains of deltas grow with the logarithm; 240 versions more would show.
        assert!(
            many <= few + 60,
            "{few} operations with 16 versions, {many} with 256"
        );
    }
}

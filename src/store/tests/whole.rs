//! Whole files in STORE/cache: what is kept, what goes, who gets what.

use super::*;
use crate::id::FileHasher;
use crate::store::whole::WholeFiles;
use std::path::PathBuf;

const MIB: usize = 1 << 20;

fn key(bytes: &[u8]) -> FileKey {
    let mut h = FileHasher::default();
    h.update(bytes);
    (h.finish(), bytes.len() as u64)
}

struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Self {
        Dir(tempfile::tempdir().unwrap())
    }

    fn open(&self, quota: usize) -> WholeFiles {
        WholeFiles::open(self.0.path().join("cache"), quota as u64)
            .unwrap()
            .unwrap()
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.0.path().join(name);
        fs::write(&path, bytes).unwrap();
        path
    }

    fn adopt(&self, files: &WholeFiles, bytes: &[u8], home: &str) -> bool {
        let path = self.file("staged", bytes);
        files.adopt(&key(bytes), &path, home.as_bytes().into())
    }
}

/// `n` MiB that no other call gives.
fn data(n: usize, seed: u8) -> Vec<u8> {
    let mut bytes = vec![seed; n * MIB];
    bytes[0] = !seed;
    bytes
}

#[test]
fn the_quota_is_never_exceeded_and_what_was_used_last_stays() {
    let dir = Dir::new();
    let files = dir.open(5 * MIB);
    for seed in 0..2 {
        assert!(dir.adopt(&files, &data(2, seed), "main/a"));
    }
    drop(files.get(&key(&data(2, 0)), None).unwrap());
    assert!(dir.adopt(&files, &data(2, 2), "main/a"));
    assert!(files.bytes() <= 5 * MIB as u64);
    let here = |seed| files.get(&key(&data(2, seed)), None).is_some();
    assert!(here(0) && !here(1) && here(2));
    assert!(
        !dir.adopt(&files, &data(6, 3), "main/a"),
        "larger than everything"
    );
    // What is being read would free nothing.
    let held: Vec<_> = [0, 2].map(|s| files.get(&key(&data(2, s)), None)).into();
    assert!(!dir.adopt(&files, &data(2, 4), "main/a"));
    assert!(held.iter().all(Option::is_some));
}

#[test]
fn only_where_it_came_from_may_take_a_file_back_and_only_if_nobody_else_reads_it() {
    let dir = Dir::new();
    let files = dir.open(9 * MIB);
    let (bytes, to) = (data(1, 1), dir.0.path().join("back"));
    let (key, home): (_, Home) = (key(&bytes), b"main/a"[..].into());
    assert!(dir.adopt(&files, &bytes, "main/a"));
    assert!(!files.take(&key, b"main/b", &to, &|_| false));
    let version = files.get(&key, None).unwrap();
    assert!(!files.take(&key, b"main/a", &to, &|_| false));
    drop(version);
    let own = files.get(&key, Some(&home)).unwrap();
    let other = files.get(&key, Some(&b"main/b"[..].into())).unwrap();
    assert!(!files.take(&key, b"main/a", &to, &|_| false));
    drop(other);
    assert!(
        !files.take(&key, b"main/a", &to, &|_| true),
        "mapped by a reader that is gone"
    );
    assert!(files.take(&key, b"main/a", &to, &|_| false));
    assert_eq!(fs::read(&to).unwrap(), bytes);
    assert_eq!(own.read(0, 10).unwrap(), bytes[..10]);
    assert!(files.get(&key, None).is_none() && files.bytes() == 0);
    // A second file of the same bytes: who has the first one open is not known by its home any more.
    assert!(dir.adopt(&files, &bytes, "main/a") && !dir.adopt(&files, &bytes, "main/a"));
    assert!(!files.take(&key, b"main/a", &dir.0.path().join("again"), &|_| false));
}

#[test]
fn nothing_is_believed_that_was_there_before_or_was_changed() {
    let dir = Dir::new();
    let f = Fixture::new();
    let bytes = data(2, 7);
    let source = dir.file("model.bin", &bytes);
    f.commit(&source);
    let (k, cache) = (key(&bytes), dir.0.path().join("cache"));
    let file = cache.join(k.0.to_string());
    let view = f.store.file(&k.0, k.1).unwrap();
    {
        let files = dir.open(9 * MIB);
        assert!(files.build(&k, &view, &|| true).unwrap());
        assert_eq!(fs::read(&file).unwrap(), bytes);
        assert!(
            WholeFiles::open(cache.clone(), 1).unwrap().is_none(),
            "one process at a time"
        );
        let (held, time) = (
            files.get(&k, None).unwrap(),
            fs::metadata(&file).unwrap().modified(),
        );
        fs::write(&file, data(2, 8)).unwrap();
        assert_eq!(held.read(0, 10).unwrap_err().kind(), Kind::Damage);
        drop(held);
        // Setting the time back does not help.
        let other = fs::OpenOptions::new().write(true).open(&file).unwrap();
        other.set_modified(time.unwrap()).unwrap();
        assert!(files.get(&k, None).is_none());
        assert!(files.build(&k, &view, &|| true).unwrap());
        assert_eq!(files.get(&k, None).unwrap().read(0, MIB).unwrap(), bytes[..MIB]);
    }
    fs::write(cache.join("new-3"), "half").unwrap();
    let files = dir.open(9 * MIB);
    assert!(!cache.join("new-3").exists());
    assert!(files.has(&k) && files.get(&k, None).is_none());
    assert!(files.build(&k, &view, &|| true).unwrap());
    assert!(files.get(&k, None).is_some());
    drop(files);
    // A smaller quota the next time.
    let files = dir.open(MIB);
    assert!(!files.has(&k) && !file.exists());
    assert!(!files.build(&k, &view, &|| true).unwrap());
    drop(files);
    let stopped = dir.open(9 * MIB).build(&k, &view, &|| false).unwrap_err();
    assert_eq!(stopped.kind(), Kind::Stopped);
}

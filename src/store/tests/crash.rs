//! Power is lost after every operation of three commits, with what was not synced gone, there, or anything between.

use super::*;
use crate::disk::faulty::{FaultyDisk, Op};
use std::collections::HashSet;

const DIR: &str = "/store";
/// Of the un-synced operations, as many random subsets are tried beside none and all.
const SUBSETS: u64 = 6;

/// Commits, one after another, and for each the length of the disk's log when it was acknowledged.
struct Recorded {
    disk: FaultyDisk,
    files: Vec<Vec<u8>>,
    acknowledged: Vec<usize>,
    /// Log length once the empty store was made.
    made: usize,
}

fn record(dir: &Path) -> Recorded {
    let disk = FaultyDisk::new();
    Packs::create(Arc::new(disk.clone()), Path::new(DIR)).unwrap();
    let store = Store::open_on(Arc::new(disk.clone()), Path::new(DIR), &options()).unwrap();
    let made = disk.log_len();
    let mut model = Model::new(&[3000, 100]);
    let mut r = Recorded {
        disk,
        files: vec![],
        acknowledged: vec![],
        made,
    };
    for step in 0..3 {
        let bytes = model.safetensors(step);
        let path = dir.join(format!("step-{step}.safetensors"));
        fs::write(&path, &bytes).unwrap();
        store.commit(&request(&path)).unwrap();
        r.acknowledged.push(r.disk.log_len());
        r.files.push(bytes);
        model.step();
    }
    r
}

/// Opens what the crash left and checks it; the number of versions that are there.
fn survivors(disk: FaultyDisk, r: &Recorded, acknowledged: usize, what: &str) -> usize {
    let store = Store::open_on(Arc::new(disk), Path::new(DIR), &options());
    let store = store.unwrap_or_else(|e| panic!("{what}: {e}"));
    let versions = store.versions("main").unwrap();
    assert!(
        versions.len() >= acknowledged,
        "{what}: {} of {acknowledged} are there",
        versions.len()
    );
    // The one that was about to be acknowledged may be there, whole; nothing beyond.
    assert!(
        versions.len() <= (acknowledged + 1).min(3),
        "{what}: {} versions",
        versions.len()
    );
    for (i, v) in versions.iter().enumerate() {
        assert_eq!(v.number, i as u64 + 1, "{what}");
        let bytes = read(&store, &v.name(), &format!("step-{i}.safetensors"))
            .unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(bytes == r.files[i], "{what}: version {i} differs");
    }
    versions.len()
}

#[test]
fn every_crash_leaves_whole_versions_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let r = record(dir.path());
    let mut seen = HashSet::new();
    for prefix in r.made..=r.disk.log_len() {
        let acknowledged = r.acknowledged.iter().filter(|n| **n <= prefix).count();
        // A write may be torn at every sector; other operations happen or do not.
        let torn: Vec<Option<usize>> = match r.disk.logged(prefix - 1) {
            Some((Op::Write, len)) => [None]
                .into_iter()
                .chain((0..len).step_by(512).map(Some))
                .collect(),
            _ => vec![None],
        };
        for torn in torn {
            for policy in 0..2 + SUBSETS {
                let survive = |i: usize| match policy {
                    0 => false,
                    1 => true,
                    seed => Noise((seed << 32) + (prefix * 1000 + i) as u64 * 2 + 1).next() >> 63 == 1,
                };
                let what = format!("after {prefix} operations, torn {torn:?}, policy {policy}");
                let disk = r.disk.after_crash(prefix, torn, survive);
                seen.insert((acknowledged, survivors(disk, &r, acknowledged, &what)));
            }
        }
    }
    // Every commit was seen both lost and kept in the instant before it was acknowledged.
    for n in 0..3 {
        assert!(seen.contains(&(n, n)), "{seen:?}");
    }
    assert!(seen.contains(&(3, 3)));
}

#[test]
fn a_crashed_store_takes_new_commits() {
    let dir = tempfile::tempdir().unwrap();
    let r = record(dir.path());
    for prefix in r.made..=r.disk.log_len() {
        let disk = r.disk.after_crash(prefix, None, |i| i % 2 == 0);
        let store = Store::open_on(Arc::new(disk.clone()), Path::new(DIR), &options()).unwrap();
        let before = store.versions("main").unwrap().len();
        let path = dir.path().join("next.bin");
        fs::write(&path, Noise(9).bytes(5000)).unwrap();
        let done = store
            .commit(&request(&path))
            .unwrap_or_else(|e| panic!("{prefix}: {e}"));
        assert_eq!(done.number, before as u64 + 1);
        let again = Store::open_on(Arc::new(disk), Path::new(DIR), &options()).unwrap();
        assert_eq!(again.versions("main").unwrap().len(), before + 1);
        assert_eq!(read(&again, "main", "next.bin").unwrap(), Noise(9).bytes(5000));
    }
}

#[test]
fn a_full_disk_fails_the_commit_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    Packs::create(Arc::new(disk.clone()), Path::new(DIR)).unwrap();
    let store = Store::open_on(Arc::new(disk.clone()), Path::new(DIR), &options()).unwrap();
    let path = dir.path().join("a.bin");
    fs::write(&path, Noise(1).bytes(100_000)).unwrap();
    store.commit(&request(&path)).unwrap();
    let large = dir.path().join("b.bin");
    fs::write(&large, Noise(2).bytes(400_000)).unwrap();
    for space in (0..420_000).step_by(30_000) {
        disk.set_space(Some(space));
        let done = store.commit(&request(&large));
        if space < 400_000 {
            assert_eq!(done.unwrap_err().kind(), Kind::NoSpace, "{space}");
        }
        assert_eq!(read(&store, "main/1", "a.bin").unwrap(), Noise(1).bytes(100_000));
    }
    disk.set_space(None);
    let before = store.versions("main").unwrap().len();
    store.commit(&request(&large)).unwrap();
    let again = Store::open_on(Arc::new(disk), Path::new(DIR), &options()).unwrap();
    assert_eq!(again.versions("main").unwrap().len(), before + 1);
    assert!(
        again
            .verify(&again.versions("main").unwrap(), &mut |_| {})
            .damage
            .is_empty()
    );
}

#[test]
fn a_failed_fsync_fails_the_commit_and_is_never_retried() {
    for op in [Op::Sync, Op::SyncDir] {
        for nth in 0..4 {
            let dir = tempfile::tempdir().unwrap();
            let disk = FaultyDisk::new();
            Packs::create(Arc::new(disk.clone()), Path::new(DIR)).unwrap();
            let store = Store::open_on(Arc::new(disk.clone()), Path::new(DIR), &options()).unwrap();
            let path = dir.path().join("a.bin");
            fs::write(&path, Noise(1).bytes(10_000)).unwrap();
            disk.fail(op, nth, libc::EIO);
            let first = store.commit(&request(&path));
            disk.clear_faults();
            // Another process is not held up, and sees the version only if it was acknowledged.
            let other = Store::open_on(Arc::new(disk.clone()), Path::new(DIR), &options()).unwrap();
            assert_eq!(
                other.versions("main").unwrap().len(),
                usize::from(first.is_ok()),
                "{op:?} {nth}"
            );
            other.commit(&request(&path)).unwrap();
            let again = Store::open_on(Arc::new(disk), Path::new(DIR), &options()).unwrap();
            let versions = again.versions("main").unwrap();
            assert!(again.verify(&versions, &mut |_| {}).damage.is_empty());
            assert_eq!(versions.len(), 1 + usize::from(first.is_ok()));
        }
    }
}

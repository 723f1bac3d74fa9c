//! Power loss at every operation, and errors of the disk at every kind of operation.

use super::tests::{Memory, Opened, check, commit, fresh, id_of, open, root, try_open};
use super::*;
use crate::disk::faulty::{FaultyDisk, Op};

/// Whether an operation that was not synced survives, by its index.
type Policy = Box<dyn Fn(usize) -> bool>;

/// Nothing, everything, and seeded random subsets.
fn policies() -> Vec<Policy> {
    let mut all: Vec<Policy> = vec![Box::new(|_| false), Box::new(|_| true)];
    for seed in 0..20u64 {
        // SplitMix64 of seed and index.
        all.push(Box::new(move |i| {
            let mut z = (seed << 32)
                .wrapping_add(i as u64)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (z ^ (z >> 31)) & 1 == 1
        }));
    }
    all
}

/// What was acknowledged, each with the length of the log when it was.
type Acknowledged = Vec<(String, usize, usize)>;

/// Cuts the power at every operation in every way, and hands `judge` what is found.
fn every_crash(disk: &FaultyDisk, from: usize, mut judge: impl FnMut(&FaultyDisk, usize, &str)) {
    let policies = policies();
    for prefix in from..=disk.log_len() {
        for (p, policy) in policies.iter().enumerate() {
            judge(
                &disk.after_crash(prefix, None, policy),
                prefix,
                &format!("power lost at {prefix}, policy {p}"),
            );
        }
        if let Some((Op::Write, len)) = prefix.checked_sub(1).and_then(|i| disk.logged(i)) {
            for torn in (0..len).step_by(512) {
                let what = format!("power lost at {prefix}, {torn} bytes of the last write there");
                judge(&disk.after_crash(prefix, Some(torn), |_| true), prefix, &what);
            }
        }
    }
}

fn survives(disk: &FaultyDisk, limits: Limits, acknowledged: &Acknowledged, from: usize) {
    every_crash(disk, from, |found, prefix, what| {
        let (packs, ledger) = try_open(found, limits).unwrap_or_else(|e| panic!("{what}: {e}"));
        let bodies = ledger.bodies();
        let certain = acknowledged.iter().filter(|a| a.2 <= prefix).count();
        let seen: Vec<_> = acknowledged
            .iter()
            .map(|a| a.0.clone())
            .take(bodies.len())
            .collect();
        assert_eq!(bodies, seen, "{what}");
        assert!(
            bodies.len() >= certain && bodies.len() <= certain + 1,
            "{what}: {bodies:?}, {certain} acknowledged"
        );
        acknowledged[..bodies.len()]
            .iter()
            .for_each(|(name, n, _)| check(&packs, name, *n));
        // And it goes on from there.
        commit(&packs, "next", 3).unwrap_or_else(|e| panic!("{what}: {e}"));
        packs.close().unwrap();
        let (packs, ledger) = try_open(found, limits).unwrap_or_else(|e| panic!("{what}, then closed: {e}"));
        assert_eq!(ledger.bodies().len(), bodies.len() + 1, "{what}");
        acknowledged[..bodies.len()]
            .iter()
            .for_each(|(name, n, _)| check(&packs, name, *n));
        check(&packs, "next", 3);
    });
}

#[test]
fn acknowledged_commits_survive_power_loss_at_any_operation() {
    let disk = fresh();
    let from = disk.log_len();
    let (packs, _) = open(&disk);
    let mut acknowledged = Vec::new();
    for (name, n) in [("one", 12), ("two", 30), ("three", 3)] {
        commit(&packs, name, n).unwrap();
        acknowledged.push((name.to_owned(), n, disk.log_len()));
    }
    packs.close().unwrap();
    survives(&disk, LIMITS, &acknowledged, from);
}

#[test]
fn so_they_do_when_runs_are_merged_and_segments_change() {
    let disk = fresh();
    let from = disk.log_len();
    let limits = Limits {
        table: 4,
        pack: 300,
        segment: 150,
    };
    let (packs, _) = try_open(&disk, limits).unwrap();
    let mut acknowledged = Vec::new();
    for i in 0..7 {
        let name = format!("c{i}");
        // The commit is acknowledged when its record is durable; the index may be written after that.
        commit(&packs, &name, 3).unwrap();
        acknowledged.push((name, 3, disk.log_len()));
    }
    survives(&disk, limits, &acknowledged, from);
}

#[test]
fn a_power_loss_while_recovering_loses_nothing_either() {
    let disk = fresh();
    let (packs, _) = open(&disk);
    commit(&packs, "one", 3).unwrap();
    let acknowledged = vec![("one".to_owned(), 3, 0)];
    commit(&packs, "two", 3).unwrap();
    // Found with the mark at the beginning and a torn record at the end.
    let found = disk.copy();
    let id = packs.store_id();
    found.edit(Path::new("/s/journal/durable"), |b| {
        *b = Pos::START.encode_mark(&id)
    });
    found.edit(Path::new("/s/journal/00000001"), |b| b.truncate(b.len() - 5));
    found.edit(Path::new("/s/journal/00000001.copy"), |b| {
        b.truncate(b.len() - 40)
    });
    let found = found.copy();
    let (_, ledger) = open(&found);
    assert_eq!(ledger.bodies(), ["one"]);
    survives(&found, LIMITS, &acknowledged, 0);
}

#[test]
fn power_loss_while_a_store_is_made_leaves_what_can_be_made_or_opened() {
    let disk = fresh();
    every_crash(&disk, 0, |found, _, what| {
        let shared: Arc<dyn Disk> = Arc::new(found.clone());
        match Packs::create(shared, root()) {
            Ok(()) => {}
            Err(e) => assert_eq!(e.kind(), Kind::Exists, "{what}: {e}"),
        }
        let (packs, ledger) = try_open(found, LIMITS).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert!(ledger.bodies().is_empty());
        commit(&packs, "one", 2).unwrap();
        check(&open(found).0, "one", 2);
    });
}

#[test]
fn a_record_torn_at_any_byte_is_cut_off() {
    let disk = fresh();
    let (packs, _) = open(&disk);
    commit(&packs, "one", 2).unwrap();
    let size = |disk: &FaultyDisk| {
        disk.open(Path::new("/s/journal/00000001"), false)
            .unwrap()
            .len()
            .unwrap()
    };
    let (before, crash) = (size(&disk), disk.copy());
    commit(&packs, "two", 2).unwrap();
    let mut whole = Vec::new();
    disk.edit(Path::new("/s/journal/00000001"), |b| whole = b.clone());
    drop(packs);
    for len in before..=size(&disk) {
        for zeros in [false, true] {
            let found = crash.copy();
            found.edit(Path::new("/s/journal/00000001"), |b| {
                *b = whole[..len as usize].to_vec();
                if zeros {
                    b.resize(whole.len(), 0);
                }
            });
            found.edit(Path::new("/s/packs/00000001.pack"), |b| {
                disk.edit(Path::new("/s/packs/00000001.pack"), |d| *b = d.clone())
                    .then_some(())
                    .unwrap()
            });
            let (packs, ledger) = open(&found);
            let want: &[&str] = if len == size(&disk) {
                &["one", "two"]
            } else {
                &["one"]
            };
            assert_eq!(ledger.bodies(), want, "cut at {len}");
            assert!(
                packs.journal.ends_at(packs.journal.read_mark().unwrap()).unwrap(),
                "nothing torn is left"
            );
            assert_eq!(commit(&packs, "next", 2).unwrap(), want.len() as u64 + 1);
            assert_eq!(open(&found).1.bodies().len(), want.len() + 1);
        }
    }
}

#[test]
fn a_failed_fsync_of_a_pack_ends_its_writer() {
    let disk = fresh();
    let (packs, _) = open(&disk);
    for (op, nth) in [(Op::Sync, 0), (Op::SyncDir, 0)] {
        disk.fail(op, nth, libc::EIO);
        let mut w = packs.writer().unwrap();
        w.append(1, &id_of(b"x"), b"", b"x").unwrap();
        assert_eq!(w.finish().unwrap_err().kind(), Kind::Poisoned);
    }
    commit(&packs, "later", 2).unwrap();
    check(&packs, "later", 2);
    assert!(!packs.contains(&id_of(b"x")).unwrap());
}

fn failed_journal_fsync(also: &[Op]) -> (FaultyDisk, Opened) {
    let disk = fresh();
    let (a, seen_by_a) = open(&disk);
    let (b, seen_by_b) = open(&disk);
    commit(&a, "one", 2).unwrap();
    disk.fail(Op::Sync, 2, libc::EIO); // after the pack's and the copy's
    also.iter().for_each(|op| disk.fail(*op, 0, libc::EIO));
    assert_eq!(commit(&a, "lost", 2).unwrap_err().kind(), Kind::Poisoned);
    disk.clear_faults();
    assert_eq!(commit(&a, "refused", 2).unwrap_err().kind(), Kind::Poisoned);
    a.refresh().unwrap();
    assert_eq!(seen_by_a.bodies(), ["one"]);
    b.refresh().unwrap();
    assert_eq!(seen_by_b.bodies(), ["one"]);
    assert_eq!(commit(&b, "two", 2).unwrap(), 2);
    assert!(a.refresh().unwrap());
    check(&a, "two", 2);
    for seen in [&seen_by_a, &seen_by_b, &open(&disk).1] {
        assert_eq!(seen.bodies(), ["one", "two"]);
    }
    (disk, (b, seen_by_b))
}

#[test]
fn a_failed_fsync_of_the_journal_closes_the_segment_for_everyone() {
    let (disk, (b, _)) = failed_journal_fsync(&[]);
    assert!(disk.paths().iter().any(|p| p.ends_with("journal/00000002")));
    b.close().unwrap();
    let acknowledged = vec![("one".to_owned(), 2, 0), ("two".to_owned(), 2, 0)];
    survives(&disk, LIMITS, &acknowledged, disk.log_len());
}

#[test]
fn so_it_does_when_no_new_segment_can_be_made() {
    let disk = fresh();
    let (a, _) = open(&disk);
    commit(&a, "one", 2).unwrap();
    // The next creation is the new segment: the pack is used again.
    let (disk, _) = failed_journal_fsync(&[Op::Create]);
    assert!(!disk.paths().iter().any(|p| p.ends_with("journal/00000002")));
}

#[test]
fn a_full_disk_fails_the_commit_and_nothing_else() {
    let disk = fresh();
    let (packs, ledger) = open(&disk);
    commit(&packs, "one", 20).unwrap();
    let mut failures = 0;
    for room in (0..40_000).step_by(97) {
        disk.set_space(Some(room));
        let before = ledger.bodies().len();
        match commit(&packs, &format!("full{room}"), 20) {
            Ok(_) => break,
            Err(e) => assert_eq!(e.kind(), Kind::NoSpace, "{e}"),
        }
        failures += 1;
        assert_eq!(ledger.bodies().len(), before);
        check(&packs, "one", 20);
        if failures % 16 == 0 {
            disk.set_space(None);
            assert_eq!(open(&disk).1.bodies(), ledger.bodies());
            commit(&packs, &format!("room{room}"), 20).unwrap();
        }
    }
    assert!(failures > 50, "{failures}");
    disk.set_space(None);
    commit(&packs, "two", 20).unwrap();
    let (again, seen) = open(&disk);
    assert_eq!(seen.bodies(), ledger.bodies());
    check(&again, "two", 20);
    // Next to what was published, at most a few ranges take up space that were finished before their publishing failed.
    let ranges = seen.ranges();
    let published: u64 = ranges.iter().map(|r| r.to - r.from).sum();
    let largest = ranges.iter().map(|r| r.to - r.from).max().unwrap();
    let left = packs.sizes().unwrap().packs - published;
    assert!(
        left <= 3 * largest,
        "{left} bytes of {failures} failures are left, a commit has {largest}"
    );
}

#[test]
fn a_journal_write_that_does_not_fit_is_cut_off() {
    let disk = fresh();
    let (packs, ledger) = open(&disk);
    commit(&packs, "one", 1).unwrap();
    for room in 0..40 {
        disk.set_space(Some(room));
        let e = packs.publish(vec![], Box::new(|_| Ok(vec![1; 60]))).unwrap_err();
        assert_eq!(e.kind(), Kind::NoSpace);
        disk.set_space(None);
        assert!(packs.journal.ends_at(packs.journal.read_mark().unwrap()).unwrap());
    }
    packs.publish(vec![], Box::new(|_| Ok(vec![1; 60]))).unwrap();
    assert_eq!(open(&disk).1.bodies(), ledger.bodies());
}

/// Fails once, at the record it is told to.
struct Failing(Memory, Mutex<Option<u64>>);

impl Ledger for Failing {
    fn apply(&self, seq: u64, ranges: &[PackRange], body: &[u8]) -> Result<()> {
        let mut at = self.1.lock();
        if *at == Some(seq) {
            *at = None;
            return Err(Error::damage("no"));
        }
        self.0.apply(seq, ranges, body)
    }
}

#[test]
fn a_record_the_ledger_refused_comes_again() {
    let disk = fresh();
    let ledger = Arc::new(Failing(Memory::default(), Mutex::new(Some(2))));
    let packs = Packs::open(Arc::new(disk), root(), ledger.clone()).unwrap();
    commit(&packs, "one", 1).unwrap();
    assert_eq!(commit(&packs, "two", 1).unwrap_err().kind(), Kind::Damage);
    assert_eq!(ledger.0.bodies(), ["one"]);
    assert!(packs.refresh().unwrap());
    commit(&packs, "three", 1).unwrap();
    assert_eq!(ledger.0.bodies(), ["one", "two", "three"]);
}

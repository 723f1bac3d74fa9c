//! Packs that are given up: what is in them is served from elsewhere, to everyone, whatever happens meanwhile.

use super::tests::{Memory, check, commit, fresh, id_of, open, payload, root, try_open};
use super::*;
use crate::disk::faulty::FaultyDisk;

/// Writes all nodes of these commits again, with a meta that says so, and retires the packs that nobody has.
fn rewrite(packs: &Arc<Packs>, commits: &[(&str, usize)], old: &[u32]) -> Result<u64> {
    let held = packs.hold(old)?;
    let mut w = packs.writer()?;
    for (name, n) in commits {
        for i in 0..*n {
            let p = payload(name, i);
            w.append(1, &id_of(&p), b"again", &p)?;
        }
    }
    let range = w.finish()?;
    packs.retire(vec![range], &held, Box::new(|_| Ok(b"rewrite".to_vec())))
}

fn readable(packs: &Packs, name: &str, n: usize, what: &str) {
    for i in 0..n {
        let p = payload(name, i);
        let node = packs
            .get(&id_of(&p))
            .unwrap_or_else(|e| panic!("{what}: {name} {i}: {e}"));
        assert_eq!(node.payload, p, "{what}");
    }
}

fn rewritten(packs: &Packs, name: &str, n: usize, what: &str) {
    readable(packs, name, n, what);
    for i in 0..n {
        assert_eq!(
            packs.meta(&id_of(&payload(name, i))).unwrap().meta,
            b"again",
            "{what}"
        );
    }
}

fn files(disk: &FaultyDisk) -> Vec<String> {
    let packs = disk
        .paths()
        .into_iter()
        .filter(|p| p.extension().is_some_and(|e| e == "pack"));
    packs
        .map(|p| p.file_name().unwrap().to_string_lossy().into_owned())
        .collect()
}

/// Two commits by processes of their own, as the command line makes them.
fn two_packs() -> FaultyDisk {
    let disk = fresh();
    for name in ["one", "two"] {
        let (packs, _) = open(&disk);
        commit(&packs, name, 6).unwrap();
        packs.close().unwrap();
    }
    disk
}

#[test]
fn readers_with_an_old_view_find_what_was_moved() {
    for flushed in [false, true] {
        let disk = two_packs();
        let (old, seen) = open(&disk);
        let (packs, _) = open(&disk);
        rewrite(&packs, &[("one", 6), ("two", 6)], &[1, 2]).unwrap();
        assert_eq!(files(&disk), ["00000003.pack"]);
        if flushed {
            packs.close().unwrap();
        }
        rewritten(&packs, "one", 6, "here");
        rewritten(&old, "two", 6, "with an old view");
        assert_eq!(seen.bodies(), ["one", "two", "rewrite"]);
        let (new, _) = open(&disk);
        rewritten(&new, "one", 6, "opened anew");
        for f in disk.paths().iter().filter(|p| p.starts_with("/s/index")) {
            disk.remove(f).unwrap();
        }
        for limits in [LIMITS, Limits { table: 2, ..LIMITS }] {
            let (new, _) = try_open(&disk, limits).unwrap();
            rewritten(&new, "two", 6, "without its index");
            new.rebuild_index().unwrap();
            rewritten(&new, "one", 6, "with a new index");
            new.close().unwrap();
        }
        assert_eq!(open(&disk).0.index.pending(), 0, "runs cover what is gone, too");
        commit(&old, "three", 3).unwrap();
        check(&old, "three", 3);
    }
}

#[test]
fn an_old_view_that_never_saw_a_pack_finds_its_nodes() {
    let disk = two_packs();
    for f in disk.paths().iter().filter(|p| p.starts_with("/s/index")) {
        disk.remove(f).unwrap();
    }
    // Opened by a mark that is behind, while the packs go.
    let mut mark = Vec::new();
    disk.edit(Path::new("/s/journal/durable"), |b| mark = b.clone());
    let (packs, _) = open(&disk);
    rewrite(&packs, &[("one", 6), ("two", 6)], &[1, 2]).unwrap();
    let mut now = Vec::new();
    disk.edit(Path::new("/s/journal/durable"), |b| {
        now = std::mem::replace(b, mark.clone());
    });
    let held = disk.lock(&store::lock_path(root()), true).unwrap();
    let (behind, seen) = open(&disk);
    assert_eq!(seen.bodies(), ["one", "two"]);
    drop(held);
    disk.edit(Path::new("/s/journal/durable"), |b| *b = now.clone());
    rewritten(&behind, "one", 6, "behind");
    assert_eq!(seen.bodies().len(), 3);
}

#[test]
fn a_pack_that_is_written_to_stays() {
    let disk = two_packs();
    let (a, _) = open(&disk);
    commit(&a, "three", 2).unwrap();
    let mut w = a.writer().unwrap();
    let p = payload("four", 0);
    w.append(1, &id_of(&p), b"", &p).unwrap();
    let (b, _) = open(&disk);
    rewrite(&b, &[("one", 6), ("two", 6), ("three", 2)], &[1, 2, 3]).unwrap();
    assert_eq!(files(&disk), ["00000003.pack", "00000004.pack"]);
    let range = w.finish().unwrap();
    assert_eq!(range.pack, 3);
    a.publish(vec![range], Box::new(|_| Ok(b"four".to_vec())))
        .unwrap();
    for packs in [&a, &b, &open(&disk).0] {
        packs.refresh().unwrap();
        readable(packs, "four", 1, "appended meanwhile");
        rewritten(packs, "three", 2, "moved meanwhile");
    }
}

#[test]
fn a_pack_with_something_finished_that_is_not_published_stays() {
    let disk = two_packs();
    let (a, _) = open(&disk);
    let finish = |name: &str| {
        let mut w = a.writer().unwrap();
        let p = payload(name, 0);
        w.append(1, &id_of(&p), b"", &p).unwrap();
        w.finish().unwrap()
    };
    let (three, four) = (finish("three"), finish("four"));
    assert_eq!((three.pack, four.pack), (3, 3));
    let (b, _) = open(&disk);
    for (i, range) in [three, four].into_iter().enumerate() {
        assert_eq!(
            b.hold(&[1, 2, 3]).unwrap().packs(),
            [1, 2],
            "{i} of two are published"
        );
        a.publish(vec![range], Box::new(|_| Ok(b"x".to_vec()))).unwrap();
    }
    assert_eq!(b.hold(&[3]).unwrap().packs(), [3]);
    check(&a, "three", 0);
}

#[test]
fn an_idle_pack_that_was_retired_is_not_appended_to() {
    let disk = fresh();
    let (a, _) = open(&disk);
    commit(&a, "one", 4).unwrap();
    let (b, _) = open(&disk);
    rewrite(&b, &[("one", 4)], &[1]).unwrap();
    commit(&a, "two", 4).unwrap();
    assert_eq!(files(&disk), ["00000002.pack", "00000003.pack"]);
    for packs in [&a, &b, &open(&disk).0] {
        packs.refresh().unwrap();
        check(packs, "two", 4);
        rewritten(packs, "one", 4, "moved");
    }
}

#[test]
fn the_record_published_last_counts_wherever_it_is_found() {
    let disk = fresh();
    let limits = Limits { table: 4, ..LIMITS };
    let (packs, _) = try_open(&disk, limits).unwrap();
    commit(&packs, "one", 5).unwrap(); // written as a run
    for (i, meta) in [b"second", b"third."].iter().enumerate() {
        let mut w = packs.writer().unwrap();
        let p = payload("one", 0);
        w.append(1, &id_of(&p), *meta, &p).unwrap();
        let range = w.finish().unwrap();
        packs
            .retire(vec![range], &Retiring::default(), Box::new(|_| Ok(vec![])))
            .unwrap();
        assert_eq!(packs.meta(&id_of(&p)).unwrap().meta, *meta);
        if i == 0 {
            packs.flush_index().unwrap();
        }
    }
    // A run in the middle goes bad: what is found again of it must not hide what is newer.
    let id = id_of(&payload("one", 0));
    packs.close().unwrap();
    for path in disk
        .paths()
        .iter()
        .filter(|p| p.extension().is_some_and(|e| e == "run"))
    {
        let found = disk.copy();
        found.edit(path, |b| b[70] ^= 1);
        let (packs, _) = try_open(&found, limits).unwrap();
        readable(&packs, "one", 5, "with a bad run");
        assert_eq!(packs.meta(&id).unwrap().meta, b"third.", "{}", path.display());
        packs.rebuild_index().unwrap();
        assert_eq!(packs.meta(&id).unwrap().meta, b"third.");
    }
}

#[test]
fn a_power_loss_at_any_operation_leaves_every_node() {
    let disk = two_packs();
    let from = disk.log_len();
    let (packs, _) = open(&disk);
    commit(&packs, "three", 2).unwrap();
    let third = disk.log_len();
    rewrite(&packs, &[("one", 6), ("two", 6)], &[1, 2]).unwrap();
    packs.close().unwrap();
    let mut gone = 0;
    for prefix in from..=disk.log_len() {
        for seed in 0..12u64 {
            let survive = |i: usize| match seed {
                0 => false,
                1 => true,
                _ => ((seed << 32) + i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63 == 1,
            };
            let what = format!("power lost at {prefix}, policy {seed}");
            let found = disk.after_crash(prefix, None, survive);
            let (packs, ledger) = try_open(&found, LIMITS).unwrap_or_else(|e| panic!("{what}: {e}"));
            readable(&packs, "one", 6, &what);
            readable(&packs, "two", 6, &what);
            if prefix >= third {
                readable(&packs, "three", 2, &what);
            }
            packs.clean_retired();
            let done = ledger.bodies().last().is_some_and(|b| b == "rewrite");
            gone += usize::from(done);
            assert_eq!(
                files(&found).iter().any(|f| f == "00000001.pack"),
                !done,
                "{what}"
            );
            commit(&packs, "next", 2).unwrap_or_else(|e| panic!("{what}: {e}"));
            packs.rebuild_index().unwrap();
            for packs in [&packs, &open(&found).0] {
                readable(packs, "one", 6, &what);
                readable(packs, "next", 2, &what);
            }
        }
    }
    assert!(gone > 50, "{gone}");
}

#[test]
fn errors_while_retiring_lose_nothing() {
    use crate::disk::faulty::Op;
    for op in [
        Op::Create,
        Op::Write,
        Op::Sync,
        Op::SyncDir,
        Op::Remove,
        Op::Truncate,
    ] {
        for nth in 0..8 {
            let disk = two_packs();
            let (packs, _) = open(&disk);
            disk.fail(op, nth, libc::EIO);
            let _ = rewrite(&packs, &[("one", 6), ("two", 6)], &[1, 2]);
            disk.clear_faults();
            let what = format!("{op:?} {nth}");
            readable(&packs, "one", 6, &what);
            let ledger = Arc::new(Memory::default());
            let again = Packs::open(Arc::new(disk.clone()), root(), ledger).unwrap();
            readable(&again, "two", 6, &what);
            again.clean_retired();
            commit(&again, "next", 2).unwrap();
            readable(&again, "one", 6, &what);
        }
    }
}

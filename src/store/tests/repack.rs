//! Repack: smaller, never different, whatever else goes on.

use super::*;
use crate::codec::Codec;
use crate::disk::faulty::{FaultyDisk, Op};
use crate::graph::NodeMeta;
use crate::pack::Retiring;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Versions of a drifting model on main, each committed by a process of its own, and the bytes of each.
pub(super) fn series(f: &Fixture, sizes: &[usize], n: u32) -> Vec<Vec<u8>> {
    let mut model = Model::new(sizes);
    (0..n)
        .map(|step| {
            let bytes = model.safetensors(step);
            let path = f.write("model.safetensors", &bytes);
            let store = again(f);
            store.commit(&request(&path)).unwrap();
            store.close().unwrap();
            model.step();
            bytes
        })
        .collect()
}

pub(super) fn again(f: &Fixture) -> Store {
    Store::open(f.store.dir(), &options()).unwrap()
}

/// Publishes every chunk again as `how` says, as if a repack had done so.
fn publish_again(store: &Store, how: impl Fn(NodeMeta, &NodeId) -> Option<(NodeMeta, Vec<u8>)>) {
    let parts = &store.0.parts;
    parts.packs.refresh().unwrap();
    let mut writer = parts.packs.writer().unwrap();
    for (id, (meta, _)) in chunks(store) {
        if let Some((meta, payload)) = how(meta, &id) {
            let kind = NodeKind::Chunk as u8;
            writer.append(kind, &id, &meta.encode(), &payload).unwrap();
        }
    }
    let range = writer.finish().unwrap();
    let body = Record {
        changes: vec![Change::Repack],
    };
    parts
        .packs
        .retire(
            vec![range],
            &Retiring::default(),
            Box::new(move |_| Ok(body.encode())),
        )
        .unwrap();
}

/// Stores every chunk as it is, without codec or base, as a bad old version would have.
pub(super) fn spoil(store: &Store) {
    publish_again(store, |meta, id| {
        let parts = &store.0.parts;
        let raw = parts.rebuilder.chunk(&*parts.packs, id).unwrap();
        let meta = NodeMeta {
            codec: Codec::Raw,
            delta: None,
            ..meta
        };
        Some((meta, raw.to_vec()))
    });
}

/// Makes every delta say that its chain is as long as can be.
pub(super) fn stretch(store: &Store) {
    publish_again(store, |mut meta, id| {
        meta.delta.as_mut()?.depth = 32;
        Some((meta, store.0.parts.packs.get(id).unwrap().payload.into()))
    });
}

pub(super) fn all_read(store: &Store, files: &[Vec<u8>], what: &str) {
    for (i, bytes) in files.iter().enumerate() {
        let found = read(store, &format!("main/{}", i + 1), "model.safetensors");
        let found = found.unwrap_or_else(|e| panic!("{what}: version {}: {e}", i + 1));
        assert!(found == *bytes, "{what}: version {} differs", i + 1);
    }
}

pub(super) fn all_good(store: &Store) {
    let mut versions = Vec::new();
    for b in store.branches() {
        versions.extend(store.versions(&b).unwrap());
    }
    let mut report = store.verify(&versions, &mut |_| {});
    store.verify_packs(&mut report);
    assert_eq!(report.damage, []);
}

fn pack_files(dir: &Path) -> Vec<PathBuf> {
    let packs = fs::read_dir(dir.join("packs")).unwrap();
    let mut packs: Vec<_> = packs.map(|e| e.unwrap().path()).collect();
    packs.sort();
    packs
}

pub(super) fn bytes_of(dir: &Path) -> u64 {
    pack_files(dir).iter().map(|p| p.metadata().unwrap().len()).sum()
}

#[test]
fn what_was_stored_badly_becomes_small_and_stays_the_same() {
    let f = Fixture::new();
    let files = series(&f, &[200_000, 3000, 100], 12);
    let good = bytes_of(f.store.dir());
    let old = again(&f);
    all_read(&old, &files[..3], "before");
    spoil(&again(&f));
    let before = bytes_of(f.store.dir());
    assert!(before > 12 * 400_000);
    let store = again(&f);
    let dry = store
        .repack(&RepackRequest {
            dry_run: true,
            ..RepackRequest::default()
        })
        .unwrap();
    assert_eq!((bytes_of(f.store.dir()), dry.before), (before, before));
    let done = store.repack(&RepackRequest::default()).unwrap();
    assert_eq!((done.rewritten, done.looked), (dry.rewritten, dry.looked));
    assert_eq!(done.rewritten_after, dry.rewritten_after);
    assert_eq!((done.damage.len(), done.busy, done.stopped), (0, 0, false));
    let after = bytes_of(f.store.dir());
    assert_eq!((done.before, done.after), (before, after));
    assert!(
        after < good + good / 50 && after > good / 2,
        "{good} {before} {after}"
    );
    assert_eq!(pack_files(f.store.dir()).len(), 1, "{done:?}");
    assert!((2..=11).contains(&chains_hold(&store)));
    all_read(&store, &files, "here");
    all_read(&old, &files, "with an old view");
    all_good(&old);
    store.close().unwrap();
    let new = again(&f);
    all_read(&new, &files, "opened anew");
    all_good(&new);
    assert_eq!(new.stats().unwrap().superseded, 0);
    let none = new.repack(&RepackRequest::default()).unwrap();
    assert_eq!((none.rewritten, none.moved, none.after), (0, 0, after));
    // And it goes on: the next version finds its base.
    let path = f.write("model.safetensors", &files[5]);
    assert!(old.commit(&request(&path)).unwrap().stored < 4000);
    fs::remove_dir_all(f.store.dir().join("index")).unwrap();
    all_good(&again(&f));
}

#[test]
fn small_packs_become_one() {
    let f = Fixture::new();
    let files = series(&f, &[3000], 9);
    assert_eq!(pack_files(f.store.dir()).len(), 9);
    let done = again(&f).repack(&RepackRequest::default()).unwrap();
    assert_eq!((done.packs_before, done.packs_after), (9, 1));
    assert!(done.moved > 9);
    f.store.refresh().unwrap();
    all_read(&f.store, &files, "gathered");
    assert_eq!(again(&f).repack(&RepackRequest::default()).unwrap().moved, 0);
}

#[test]
fn only_one_repacks_at_a_time() {
    let f = Fixture::new();
    series(&f, &[3000], 2);
    let held = f.store.0.parts.packs.lock_for_rewriting().unwrap();
    let refused = again(&f).repack(&RepackRequest::default());
    assert_eq!(refused.unwrap_err().kind(), Kind::Busy);
    drop(held);
    again(&f).repack(&RepackRequest::default()).unwrap();
}

#[test]
fn one_branch_alone() {
    let f = Fixture::new();
    let files = series(&f, &[30_000], 4);
    f.store.refresh().unwrap();
    f.store.make_branch("side", Some("main/3")).unwrap();
    let mut model = Model::new(&[30_000]);
    let mut side = Vec::new();
    for step in 10..14 {
        model.step();
        side.push(model.safetensors(step));
        let path = f.write("model.safetensors", side.last().unwrap());
        let mut r = request(&path);
        r.branch = "side".into();
        f.store.commit(&r).unwrap();
    }
    spoil(&f.store);
    let store = again(&f);
    let only = RepackRequest {
        branch: Some("side".into()),
        ..RepackRequest::default()
    };
    let done = store.repack(&only).unwrap();
    assert!(done.looked <= 12 && done.rewritten >= 4, "{done:?}");
    chains_hold(&store);
    all_read(&store, &files, "main");
    store.repack(&RepackRequest::default()).unwrap();
    chains_hold(&store);
    all_read(&store, &files, "main again");
    for (i, bytes) in side.iter().enumerate() {
        assert!(read(&store, &format!("side/{}", i + 1), "model.safetensors").unwrap() == *bytes);
    }
    let missing = RepackRequest {
        branch: Some("none".into()),
        ..RepackRequest::default()
    };
    assert_eq!(store.repack(&missing).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn a_commit_under_way_looks_at_its_chains_again() {
    let f = Fixture::new();
    let mut files = series(&f, &[50_000], 6);
    spoil(&f.store);
    let committing = again(&f);
    let mut model = Model::new(&[50_000]);
    (0..6).for_each(|_| model.step());
    files.push(model.safetensors(6));
    let path = f.write("model.safetensors", &files[6]);
    let repacked = AtomicUsize::new(0);
    let done = committing.commit_if(&request(&path), &|| {
        // Its deltas are against chunks that are stored alone so far.
        repacked.fetch_add(
            again(&f).repack(&RepackRequest::default())?.rewritten as usize,
            Relaxed,
        );
        Ok(())
    });
    assert_eq!(done.unwrap().number, 7);
    assert!(repacked.load(Relaxed) >= 5);
    for store in [&committing, &again(&f)] {
        assert!(chains_hold(store) >= 3);
        all_read(store, &files, "after both");
    }
}

#[test]
fn what_has_no_room_for_its_chain_is_stored_without_a_base() {
    let f = Fixture::new();
    let mut files = series(&f, &[50_000], 6);
    let mut r = request(&f.write("x", b"x"));
    r.branch = "side".into();
    f.store.commit(&r).unwrap();
    // None of these is looked at by a repack of the other branch, but all must hold.
    stretch(&f.store);
    let store = again(&f);
    store
        .repack(&RepackRequest {
            branch: Some("side".into()),
            ..RepackRequest::default()
        })
        .unwrap();
    assert_eq!(chains_hold(&store), 32);
    all_read(&store, &files, "repacked");
    // And so for a commit that was under way.
    let mut model = Model::new(&[50_000]);
    (0..6).for_each(|_| model.step());
    files.push(model.safetensors(6));
    let path = f.write("model.safetensors", &files[6]);
    let other = again(&f);
    let done = store.commit_if(&request(&path), &|| {
        other.repack(&RepackRequest::default())?;
        stretch(&other);
        other.repack(&RepackRequest {
            branch: Some("side".into()),
            ..RepackRequest::default()
        })?;
        Ok(())
    });
    assert_eq!(done.unwrap().number, 7);
    chains_hold(&store);
    all_read(&again(&f), &files, "committed");
    all_good(&store);
}

#[test]
fn what_was_copied_before_it_was_mended_does_not_stay() {
    let f = Fixture::new();
    let files = series(&f, &[3000], 20);
    let mut r = request(&f.write("x", b"x"));
    r.branch = "side".into();
    f.store.commit(&r).unwrap();
    // Every delta says that its base has none: true of the first only.
    publish_again(&f.store, |mut meta, id| {
        meta.delta.as_mut()?.depth = 1;
        Some((meta, f.store.0.parts.packs.get(id).unwrap().payload.into()))
    });
    let store = again(&f);
    let side = RepackRequest {
        branch: Some("side".into()),
        ..RepackRequest::default()
    };
    store.repack(&side).unwrap();
    chains_hold(&store);
    all_read(&store, &files, "repacked");
    let stats = store.stats().unwrap();
    assert!(stats.superseded * 8 < stats.packs, "{stats:?}");
    assert_eq!(store.repack(&side).unwrap().moved, 0);
}

#[test]
fn of_two_commits_of_the_same_the_chains_fit() {
    let f = Fixture::new();
    let files = series(&f, &[50_000], 4);
    let mut model = Model::new(&[50_000]);
    (0..4).for_each(|_| model.step());
    let fifth = f.write("model.safetensors", &model.safetensors(4));
    let fifth_bytes = model.safetensors(4);
    model.step();
    let sixth = f.write("6/model.safetensors", &model.safetensors(5));
    let (slow, quick) = (again(&f), again(&f));
    let done = slow.commit_if(&request(&fifth), &|| {
        for path in [&fifth, &sixth] {
            let mut r = request(path);
            r.branch = "other".into();
            quick.commit(&r)?;
        }
        Ok(())
    });
    assert_eq!(done.unwrap().number, 5);
    for store in [&slow, &again(&f)] {
        chains_hold(store);
        all_read(store, &files, "before");
        for (rev, bytes) in [
            ("main/5", &fifth_bytes),
            ("other/1", &fifth_bytes),
            ("other/2", &model.safetensors(5)),
        ] {
            assert!(read(store, rev, "model.safetensors").unwrap() == *bytes, "{rev}");
        }
    }
}

#[test]
fn a_repack_under_way_takes_in_what_is_committed() {
    let f = Fixture::new();
    let mut files = series(&f, &[50_000], 6);
    spoil(&f.store);
    let mut model = Model::new(&[50_000]);
    (0..6).for_each(|_| model.step());
    files.push(model.safetensors(6));
    let path = f.write("model.safetensors", &files[6]);
    let (dir, once) = (f.store.dir().to_owned(), AtomicBool::new(false));
    let progress = move |_| {
        if !once.swap(true, Relaxed) {
            let other = Store::open(&dir, &options()).unwrap();
            other.commit(&request(&path)).unwrap();
        }
    };
    let store = again(&f);
    let done = store.repack(&RepackRequest {
        progress: Some(Arc::new(progress)),
        ..RepackRequest::default()
    });
    assert!(done.unwrap().rewritten >= 5);
    for store in [&store, &again(&f)] {
        assert!(chains_hold(store) >= 3);
        all_read(store, &files, "after both");
    }
}

#[test]
fn commits_readers_and_repacks_at_once() {
    let f = Fixture::new();
    let files = series(&f, &[20_000], 5);
    let ended = AtomicBool::new(false);
    let written: Vec<(String, Vec<u8>)> = std::thread::scope(|s| {
        let writers: Vec<_> = (0..3u64)
            .map(|t| {
                let f = &f;
                s.spawn(move || {
                    let (store, mut model) = (again(f), Model::new(&[20_000]));
                    let mut out = Vec::new();
                    for step in 0..8 {
                        (0..=t).for_each(|_| model.step());
                        let bytes = model.safetensors(step);
                        let path = f.write(&format!("{t}/model.safetensors"), &bytes);
                        let mut r = request(&path);
                        r.branch = format!("b{t}");
                        let done = store.commit(&r).unwrap();
                        assert!(read(&store, &done.id.to_string(), "model.safetensors").unwrap() == bytes);
                        out.push((done.id.to_string(), bytes));
                    }
                    out
                })
            })
            .collect();
        for _ in 0..2 {
            s.spawn(|| {
                let store = again(&f);
                while !ended.load(Relaxed) {
                    all_read(&store, &files, "meanwhile");
                    all_read(&again(&f), &files, "meanwhile, opened anew");
                }
            });
        }
        let store = again(&f);
        while !writers.iter().all(|w| w.is_finished()) {
            spoil(&store);
            let done = store.repack(&RepackRequest::default()).unwrap();
            assert_eq!(done.damage, [""; 0]);
            chains_hold(&store);
        }
        ended.store(true, Relaxed);
        writers.into_iter().flat_map(|w| w.join().unwrap()).collect()
    });
    let store = again(&f);
    store.repack(&RepackRequest::default()).unwrap();
    chains_hold(&store);
    all_read(&store, &files, "at the end");
    for (id, bytes) in written {
        assert!(read(&store, &id, "model.safetensors").unwrap() == bytes);
    }
    all_good(&store);
}

#[test]
fn what_is_damaged_is_told_and_left_in_place() {
    let f = Fixture::new();
    let files = series(&f, &[30_000, 30_000], 3);
    // A byte in the middle of the second pack: of a chunk's payload.
    let path = pack_files(f.store.dir()).remove(1);
    let good = fs::read(&path).unwrap();
    let mut bad = good.clone();
    bad[good.len() / 3] ^= 0x10;
    fs::write(&path, &bad).unwrap();
    let store = again(&f);
    let done = store.repack(&RepackRequest::default()).unwrap();
    assert!(!done.damage.is_empty());
    assert!(path.exists());
    assert!(read(&store, "main/1", "model.safetensors").unwrap() == files[0]);
    assert!(read(&store, "main/2", "model.safetensors").is_err());
    fs::write(&path, &good).unwrap();
    all_read(&again(&f), &files, "mended");
    again(&f).repack(&RepackRequest::default()).unwrap();
    assert!(!path.exists());
    all_read(&again(&f), &files, "mended and repacked");
}

#[test]
fn it_stops_when_told_and_keeps_what_it_did() {
    let f = Fixture::new();
    let files = series(&f, &[100_000; 6], 4);
    spoil(&f.store);
    let before = bytes_of(f.store.dir());
    let (seen, asked) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (count, look) = (seen.clone(), seen.clone());
    let store = again(&f);
    let done = store
        .repack(&RepackRequest {
            progress: Some(Arc::new(move |p| {
                count.store(p.done as usize, Relaxed);
            })),
            stop: Some(Arc::new(move || {
                asked.fetch_add(1, Relaxed);
                look.load(Relaxed) >= 9
            })),
            ..RepackRequest::default()
        })
        .unwrap();
    assert!(done.stopped && done.rewritten > 0 && done.looked < 20, "{done:?}");
    chains_hold(&store);
    all_read(&store, &files, "stopped");
    assert!(again(&f).repack(&RepackRequest::default()).unwrap().rewritten > 0);
    assert!(bytes_of(f.store.dir()) < before / 2);
    all_read(&store, &files, "done");
}

const DIR: &str = "/store";

#[test]
fn a_power_loss_at_any_operation_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let disk = FaultyDisk::new();
    Packs::create(Arc::new(disk.clone()), Path::new(DIR)).unwrap();
    let open = |disk: &FaultyDisk| Store::open_on(Arc::new(disk.clone()), Path::new(DIR), &options());
    let mut model = Model::new(&[3000, 100]);
    let mut files = Vec::new();
    for step in 0..4 {
        files.push(model.safetensors(step));
        let path = dir.path().join("model.safetensors");
        fs::write(&path, files.last().unwrap()).unwrap();
        open(&disk).unwrap().commit(&request(&path)).unwrap();
        model.step();
    }
    spoil(&open(&disk).unwrap());
    let from = disk.log_len();
    let store = open(&disk).unwrap();
    let done = store.repack(&RepackRequest::default()).unwrap();
    assert!(done.rewritten >= 4 && done.after < done.before / 2);
    store.close().unwrap();
    let mut sizes = BTreeMap::new();
    for prefix in from..=disk.log_len() {
        let torn: Vec<Option<usize>> = match disk.logged(prefix - 1) {
            Some((Op::Write, len)) => [None]
                .into_iter()
                .chain((0..len).step_by(512).map(Some))
                .collect(),
            _ => vec![None],
        };
        for torn in torn {
            for policy in 0..8u64 {
                let survive = |i: usize| match policy {
                    0 => false,
                    1 => true,
                    seed => Noise((seed << 32) + (prefix * 1000 + i) as u64 * 2 + 1).next() >> 63 == 1,
                };
                let what = format!("after {prefix} operations, torn {torn:?}, policy {policy}");
                let found = disk.after_crash(prefix, torn, survive);
                let store = open(&found).unwrap_or_else(|e| panic!("{what}: {e}"));
                all_read(&store, &files, &what);
                chains_hold(&store);
                if torn.is_none() && policy < 3 {
                    store
                        .repack(&RepackRequest::default())
                        .unwrap_or_else(|e| panic!("{what}: {e}"));
                    all_read(&store, &files, &what);
                    let again = open(&found).unwrap();
                    all_read(&again, &files, &what);
                    let stats = again.stats().unwrap();
                    *sizes.entry(stats.packs - stats.unused).or_insert(0) += 1;
                }
            }
        }
    }
    // Whatever happened before, the next repack makes the same of it.
    let (least, most) = (sizes.keys().next().unwrap(), sizes.keys().last().unwrap());
    assert!(most - least < least / 10, "{sizes:?}");
}

#[test]
fn a_full_disk_or_a_failing_one_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let fresh = FaultyDisk::new();
    Packs::create(Arc::new(fresh.clone()), Path::new(DIR)).unwrap();
    let open =
        |disk: &FaultyDisk| Store::open_on(Arc::new(disk.clone()), Path::new(DIR), &options()).unwrap();
    let mut model = Model::new(&[30_000]);
    let mut files = Vec::new();
    for step in 0..4 {
        files.push(model.safetensors(step));
        let path = dir.path().join("model.safetensors");
        fs::write(&path, files.last().unwrap()).unwrap();
        open(&fresh).commit(&request(&path)).unwrap();
        model.step();
    }
    spoil(&open(&fresh));
    let look = |disk: &FaultyDisk, what: &str| {
        disk.clear_faults();
        disk.set_space(None);
        let store = open(disk);
        all_read(&store, &files, what);
        store.repack(&RepackRequest::default()).unwrap();
        all_read(&store, &files, what);
        chains_hold(&store);
    };
    for room in (0..150_000).step_by(10_000) {
        let disk = fresh.copy();
        let store = open(&disk);
        disk.set_space(Some(room));
        if let Err(e) = store.repack(&RepackRequest::default()) {
            assert_eq!(e.kind(), Kind::NoSpace, "{e}");
        }
        all_read(&store, &files, "full");
        look(&disk, &format!("room for {room}"));
    }
    for op in [
        Op::Create,
        Op::Write,
        Op::Sync,
        Op::SyncDir,
        Op::Remove,
        Op::Rename,
    ] {
        for nth in 0..6 {
            let disk = fresh.copy();
            let store = open(&disk);
            disk.fail(op, nth, libc::EIO);
            let _ = store.repack(&RepackRequest::default());
            look(&disk, &format!("{op:?} {nth}"));
        }
    }
}

//! Tests of packs, journal and index as a whole, and what the other test files share.

use super::*;
use crate::disk::RealDisk;
use crate::disk::faulty::{FaultyDisk, Op};
use crate::id::Domain;
use proptest::prelude::*;

/// Remembers what it was given.
#[derive(Default)]
pub(super) struct Memory(Mutex<Vec<(Vec<u8>, Vec<PackRange>)>>);

impl Ledger for Memory {
    fn apply(&self, seq: u64, ranges: &[PackRange], body: &[u8]) -> Result<()> {
        let mut all = self.0.lock();
        assert_eq!(seq, all.len() as u64 + 1, "in order, and once");
        all.push((body.to_vec(), ranges.to_vec()));
        Ok(())
    }
}

impl Memory {
    pub(super) fn bodies(&self) -> Vec<String> {
        self.0
            .lock()
            .iter()
            .map(|(b, _)| String::from_utf8_lossy(b).into_owned())
            .collect()
    }

    pub(super) fn ranges(&self) -> Vec<PackRange> {
        self.0.lock().iter().flat_map(|(_, r)| r.clone()).collect()
    }
}

pub(super) fn root() -> &'static Path {
    Path::new("/s")
}

pub(super) fn id_of(payload: &[u8]) -> NodeId {
    NodeId(Domain::Chunk.hash(payload))
}

/// A faulty disk with an empty store.
pub(super) fn fresh() -> FaultyDisk {
    let disk = FaultyDisk::new();
    Packs::create(Arc::new(disk.clone()), root()).unwrap();
    disk
}

pub(super) type Opened = (Arc<Packs>, Arc<Memory>);

pub(super) fn try_open(disk: &FaultyDisk, limits: Limits) -> Result<Opened> {
    let ledger = Arc::new(Memory::default());
    Ok((
        store::open(Arc::new(disk.clone()), root(), ledger.clone(), limits)?,
        ledger,
    ))
}

pub(super) fn open(disk: &FaultyDisk) -> Opened {
    try_open(disk, LIMITS).unwrap()
}

pub(super) fn payload(name: &str, i: usize) -> Vec<u8> {
    format!("{name} {i} ").repeat(i * 7 + 1).into_bytes()
}

/// Publishes `n` nodes of its own with `name` as the body.
pub(super) fn commit(packs: &Arc<Packs>, name: &str, n: usize) -> Result<u64> {
    let mut w = packs.writer()?;
    for i in 0..n {
        let p = payload(name, i);
        w.append(1, &id_of(&p), &p[..p.len().min(9)], &p)?;
    }
    let range = w.finish()?;
    let body = name.as_bytes().to_vec();
    packs.publish(vec![range], Box::new(move |_| Ok(body)))
}

/// Checks that the nodes of a commit can be read.
pub(super) fn check(packs: &Packs, name: &str, n: usize) {
    for i in 0..n {
        let p = payload(name, i);
        let node = packs
            .get(&id_of(&p))
            .unwrap_or_else(|e| panic!("{name} {i}: {e}"));
        assert_eq!(
            node,
            Node {
                kind: 1,
                meta: p[..p.len().min(9)].to_vec(),
                payload: p.clone().into()
            }
        );
        let meta = packs.meta(&id_of(&p)).unwrap();
        assert_eq!((meta.payload_len as usize, meta.meta), (p.len(), node.meta));
    }
}

#[test]
fn what_is_published_is_read_back_here_and_after_opening_again() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    Packs::create(disk.clone(), &root).unwrap();
    assert_eq!(
        Packs::create(disk.clone(), &root).unwrap_err().kind(),
        Kind::Exists
    );
    let ledger = Arc::new(Memory::default());
    let packs = Packs::open(disk.clone(), &root, ledger.clone()).unwrap();
    assert_eq!(commit(&packs, "one", 600).unwrap(), 1); // more than one write buffer
    assert_eq!(
        packs.publish(vec![], Box::new(|_| Ok(b"two".to_vec()))).unwrap(),
        2
    );
    assert_eq!(ledger.bodies(), ["one", "two"]);
    check(&packs, "one", 600);
    let id = packs.store_id();
    for _ in 0..2 {
        let ledger = Arc::new(Memory::default());
        let packs = Packs::open(disk.clone(), &root, ledger.clone()).unwrap();
        assert_eq!(packs.store_id(), id);
        assert_eq!(ledger.bodies(), ["one", "two"]);
        check(&packs, "one", 600);
        assert_eq!(packs.get(&id_of(b"absent")).unwrap_err().kind(), Kind::NotFound);
        assert_eq!(packs.sizes().unwrap().nodes, 600);
        packs.close().unwrap();
    }
    let foreign = dir.path().join("foreign");
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("thesis.tex"), b"x").unwrap();
    assert_eq!(
        Packs::create(disk.clone(), &foreign).unwrap_err().kind(),
        Kind::Refused
    );
    let absent = Packs::open(disk, &dir.path().join("absent"), ledger)
        .err()
        .unwrap();
    assert_eq!(absent.kind(), Kind::NotFound);
}

#[test]
fn a_writer_reads_back_what_it_appended_and_leaves_nothing_when_dropped() {
    let disk = fresh();
    let (packs, _) = open(&disk);
    let packs_dir = || {
        disk.paths()
            .into_iter()
            .filter(|p| p.starts_with("/s/packs"))
            .count()
    };
    let mut w = packs.writer().unwrap();
    w.append(3, &id_of(b"a"), b"meta", b"payload").unwrap();
    assert!(w.contains(&id_of(b"a")) && !packs.contains(&id_of(b"a")).unwrap());
    assert_eq!(
        w.get(&id_of(b"a")).unwrap(),
        Node {
            kind: 3,
            meta: b"meta".to_vec(),
            payload: Bytes::from_static(b"payload")
        }
    );
    assert_eq!(w.meta(&id_of(b"a")).unwrap().stored_len, 48 + 4 + 7);
    assert_eq!(w.get(&id_of(b"b")).unwrap_err().kind(), Kind::NotFound);
    assert_eq!(
        w.append(0, &id_of(b"b"), &[0; 256], b"").unwrap_err().kind(),
        Kind::Limit
    );
    assert_eq!(packs_dir(), 1);
    drop(w);
    assert_eq!(packs_dir(), 0);
    commit(&packs, "kept", 3).unwrap();
    let size = packs.sizes().unwrap().packs;
    let mut w = packs.writer().unwrap();
    w.append(0, &id_of(b"b"), b"", &[1; 2 << 20]).unwrap();
    assert!(packs.sizes().unwrap().packs > size);
    drop(w);
    assert_eq!(
        (packs_dir(), packs.sizes().unwrap().packs),
        (1, size),
        "cut off; the pack is used again"
    );
    let empty = packs.writer().unwrap().finish().unwrap();
    assert_eq!(packs.publish(vec![empty], Box::new(|_| Ok(vec![]))).unwrap(), 2);
    check(&packs, "kept", 3);
}

#[test]
fn waiting_publishers_share_one_fsync_and_number_themselves() {
    let disk = fresh();
    let (packs, ledger) = open(&disk);
    for round in 1..=3u64 {
        let held = disk.lock(&store::lock_path(root()), true).unwrap();
        let syncs = disk.count(Op::Sync);
        std::thread::scope(|s| {
            let mut threads = Vec::new();
            for t in 0..8 {
                let (packs, ledger) = (packs.clone(), ledger.clone());
                threads.push(s.spawn(move || {
                    let build = move |earlier: &[Vec<u8>]| match t {
                        7 => Err(Error::new(Kind::Refused, "this one fails alone")),
                        _ => Ok((ledger.bodies().len() + earlier.len() + 1)
                            .to_string()
                            .into_bytes()),
                    };
                    packs.publish(vec![], Box::new(build))
                }));
            }
            while packs.queue.lock().waiting.len() < 8 {
                std::thread::yield_now();
            }
            drop(held);
            let results: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
            assert_eq!(results[7].as_ref().unwrap_err().kind(), Kind::Refused);
            let mut seqs: Vec<u64> = results.into_iter().filter_map(|r| r.ok()).collect();
            seqs.sort_unstable();
            assert_eq!(seqs, ((round - 1) * 7 + 1..=round * 7).collect::<Vec<_>>());
        });
        let copies = u64::from(round > 1); // the copy of what the round before published
        assert_eq!((disk.count(Op::Sync) - syncs) as u64, 1 + copies);
    }
    let numbers: Vec<String> = (1..=21).map(|n| n.to_string()).collect();
    assert_eq!(ledger.bodies(), numbers);
}

#[test]
fn many_threads_commit_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    let root = dir.path();
    Packs::create(disk.clone(), root).unwrap();
    let ledger = Arc::new(Memory::default());
    let packs = Packs::open(disk, root, ledger.clone()).unwrap();
    std::thread::scope(|s| {
        for t in 0..8 {
            let packs = &packs;
            s.spawn(move || {
                for i in 0..5 {
                    commit(packs, &format!("t{t}.{i}"), 10).unwrap();
                    check(packs, &format!("t{t}.{i}"), 10);
                    packs.refresh().unwrap();
                }
            });
        }
    });
    let mut bodies = ledger.bodies();
    bodies.iter().for_each(|b| check(&packs, b, 10));
    bodies.sort_unstable();
    bodies.dedup();
    assert_eq!(bodies.len(), 40);
}

#[test]
fn a_panic_in_build_reaches_only_its_own_thread() {
    let (packs, ledger) = open(&fresh());
    let packs2 = packs.clone();
    let panicked =
        std::thread::spawn(move || packs2.publish(vec![], Box::new(|_| panic!("in build")))).join();
    assert!(panicked.is_err());
    commit(&packs, "after", 1).unwrap();
    assert_eq!(ledger.bodies(), ["after"]);
}

#[test]
fn two_processes_see_each_other() {
    let disk = fresh();
    let (a, seen_by_a) = open(&disk);
    let (b, seen_by_b) = open(&disk);
    for i in 0..6 {
        commit(&a, &format!("a{i}"), 4).unwrap();
        if i % 2 == 0 {
            assert!(b.refresh().unwrap());
            check(&b, &format!("a{i}"), 4);
        }
        assert_eq!(commit(&b, &format!("b{i}"), 4).unwrap(), 2 * i + 2);
        check(&b, &format!("a{i}"), 4);
        assert!(a.refresh().unwrap() && !a.refresh().unwrap());
        check(&a, &format!("b{i}"), 4);
    }
    assert_eq!(seen_by_a.bodies(), seen_by_b.bodies());
    assert_eq!(open(&disk).1.bodies(), seen_by_b.bodies());
}

#[test]
fn runs_stay_few_and_find_everything() {
    let disk = fresh();
    let limits = Limits {
        table: 8,
        pack: 4096,
        segment: 1000,
    };
    let (a, _) = try_open(&disk, limits).unwrap();
    let (b, _) = try_open(&disk, limits).unwrap();
    for i in 0..60 {
        commit(if i % 3 == 0 { &b } else { &a }, &format!("c{i}"), 5).unwrap();
    }
    let runs = || {
        disk.paths()
            .iter()
            .filter(|p| p.extension().is_some_and(|e| e == "run"))
            .count()
    };
    assert!((1..=9).contains(&runs()), "{} runs", runs());
    a.refresh().unwrap();
    b.refresh().unwrap();
    b.flush_index().unwrap();
    for packs in [&a, &b, &try_open(&disk, limits).unwrap().0] {
        (0..60).for_each(|i| check(packs, &format!("c{i}"), 5));
        assert!(!packs.contains(&id_of(b"absent")).unwrap());
    }
    a.close().unwrap();
    assert_eq!(
        open(&disk).0.index.pending(),
        0,
        "opening scans nothing that a run covers"
    );
    assert!(
        disk.paths().iter().any(|p| p.ends_with("journal/00000003")),
        "the journal went on in new segments"
    );
    assert!(
        disk.paths().iter().any(|p| p.ends_with("packs/00000003.pack")),
        "packs are bounded"
    );
    a.rebuild_index().unwrap();
    (0..60).for_each(|i| check(&a, &format!("c{i}"), 5));
}

#[test]
fn a_range_is_scanned_in_order() {
    let (packs, ledger) = open(&fresh());
    commit(&packs, "x", 40).unwrap();
    let range = ledger.ranges()[0];
    let (mut n, mut at) = (0, range.from);
    packs
        .scan(&range, &mut |id, place, meta| {
            assert_eq!((id, place.offset), (id_of(&payload("x", n)), at));
            assert_eq!(meta.payload_len as usize, payload("x", n).len());
            n += 1;
            at += u64::from(place.len);
            Ok(())
        })
        .unwrap();
    assert_eq!((n, at), (40, range.to));
    let wrong = PackRange { count: 39, ..range };
    assert_eq!(
        packs.scan(&wrong, &mut |_, _, _| Ok(())).unwrap_err().kind(),
        Kind::Damage
    );
    let refused = packs.publish(vec![wrong], Box::new(|_| Ok(vec![])));
    assert_eq!(refused.unwrap_err().kind(), Kind::Damage);
}

#[test]
fn a_read_only_store_opens_for_reading() {
    let disk = fresh();
    commit(&open(&disk).0, "one", 3).unwrap();
    for stale in [false, true] {
        let disk = disk.copy();
        if stale {
            let id = open(&disk).0.store_id();
            disk.edit(Path::new("/s/journal/durable"), |b| {
                *b = Pos::START.encode_mark(&id)
            });
        }
        disk.set_read_only(true);
        let (packs, ledger) = open(&disk);
        assert_eq!(ledger.bodies(), ["one"]);
        check(&packs, "one", 3);
        packs.close().unwrap();
        assert_eq!(commit(&packs, "two", 1).unwrap_err().kind(), Kind::ReadOnly);
        assert_eq!(
            packs
                .publish(vec![], Box::new(|_| Ok(vec![])))
                .unwrap_err()
                .kind(),
            Kind::ReadOnly
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn any_sequence_of_commits_reads_back(
        commits in proptest::collection::vec(
            (proptest::collection::vec((any::<u8>(), proptest::collection::vec(any::<u8>(), 0..300)), 0..12), any::<bool>()),
            1..12,
        ),
    ) {
        let disk = fresh();
        let limits = Limits { table: 5, pack: 2000, segment: 400 };
        let mut packs = try_open(&disk, limits).unwrap().0;
        let mut want = std::collections::HashMap::new();
        for (i, (nodes, reopen)) in commits.iter().enumerate() {
            let mut w = packs.writer().unwrap();
            for (kind, p) in nodes {
                w.append(*kind, &id_of(p), &p[..p.len().min(255)], p).unwrap();
                want.insert(id_of(p), p.clone());
            }
            let range = w.finish().unwrap();
            let seq = packs.publish(vec![range], Box::new(|_| Ok(vec![]))).unwrap();
            prop_assert_eq!(seq, i as u64 + 1);
            if *reopen {
                packs = try_open(&disk, limits).unwrap().0;
            }
        }
        for (id, p) in want {
            let node = packs.get(&id).unwrap();
            prop_assert_eq!(&node.payload, &p);
            prop_assert_eq!(&node.meta, &p[..p.len().min(255)]);
        }
    }

    #[test]
    fn parsers_take_any_bytes(bytes: Vec<u8>, flip: (proptest::sample::Index, u8), seq: u64) {
        let store = [9; 16];
        let mut record = Vec::new();
        parse::write_record(&mut record, 1, &id_of(&bytes), &bytes[..bytes.len().min(255)], &bytes).unwrap();
        let mut journal = Vec::new();
        let range = PackRange { pack: 1, from: 40, to: 99, count: 2 };
        parse::write_journal(&mut journal, seq.max(1), 1, &[range], &bytes).unwrap();
        let run = parse::RunHeader { store, first: 1, last: 9, count: 3, bits: 0, table_crc: 7 };
        let segment = parse::SegmentHeader { store, segment: 3, previous_len: 70, previous_seq: seq };
        let mark = Pos { segment: 3, offset: 70, seq };
        prop_assert_eq!(parse::record(record.clone()).unwrap().1.payload, bytes.clone());
        prop_assert_eq!(parse::journal_record(&journal).unwrap().body, bytes.clone());
        prop_assert_eq!(parse::RunHeader::decode(&run.encode()).unwrap(), run);
        prop_assert_eq!(parse::SegmentHeader::decode(&segment.encode()).unwrap(), segment);
        prop_assert_eq!(Pos::decode_mark(&mark.encode_mark(&store)).unwrap(), (store, mark));
        let good = [record, journal, run.encode(), segment.encode(), mark.encode_mark(&store), bytes];
        for (i, mut b) in good.into_iter().enumerate() {
            if i < 5 {
                let at = flip.0.index(b.len());
                b[at] ^= flip.1.max(1);
            }
            let n = b.len() as u64;
            prop_assert!(parse::record(b.clone()).is_err());
            prop_assert!(parse::journal_record(&b).is_err());
            prop_assert!(parse::RunHeader::decode(&b).is_err());
            prop_assert!(parse::SegmentHeader::decode(&b).is_err());
            prop_assert!(Pos::decode_mark(&b).is_err());
            prop_assert!(parse::read_pack_header(&b).is_err());
            let _ = (parse::record_header(&b), parse::later_batch(&b, seq), parse::run_entries(&b, n as u32));
            let _ = parse::bucket_table(&b, &run);
        }
    }
}

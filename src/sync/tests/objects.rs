//! Exact byte objects between peers.

use super::*;
use crate::store::{Fold, ObjectRecord, Width};

/// Puts bytes as an object.
fn put(f: &Fixture, bytes: &[u8]) -> crate::store::PutObject {
    f.store.put_object(&request(&f.write("object", bytes))).unwrap()
}

/// Pulls the new object into a store that has the old one.
fn warm(old: &[u8], new: &[u8]) -> (Fixture, Pulled) {
    let (there, here) = (Fixture::new(), Fixture::new());
    put(&here, old);
    let put = put(&there, new);
    let request = PullRequest {
        objects: vec![put.id],
        ..PullRequest::default()
    };
    let pulled = pull_with(&here.store, &there.store, &request, Fault::None).unwrap();
    let mut out = Vec::new();
    let object = here.store.object(&put.id.to_string()).unwrap();
    object.copy_to(&mut out, &mut |_| Ok(())).unwrap();
    assert!(out == new);
    sound(&here.store);
    (here, pulled)
}

#[test]
fn a_warm_object_costs_its_changed_records() {
    let old = Noise(7).bytes(1 << 20);
    let edited = |atoms: &mut dyn Iterator<Item = usize>| {
        let mut new = old.clone();
        atoms.for_each(|at| new[at * 32] ^= 1);
        new
    };
    let all = old.len() / 32;
    // The known figures.
    let (_, last) = warm(&old, &edited(&mut (all - 16..all)));
    assert_eq!((last.records, last.record_bytes, last.nodes), (22, 1014, 0));
    assert!(last.received < 1014 + 400 && last.stored < 3000, "{last:?}");
    let (_, first) = warm(&old, &edited(&mut (0..16)));
    assert_eq!(first.records, 31);
    let (_, strewn) = warm(&old, &edited(&mut (0..all).step_by(2048)));
    assert_eq!(strewn.records, 131);
    // The same bytes, and more or fewer of them, also where the last atom is not whole.
    for (from, to) in [
        (&old[..], &old[..]),
        (&old[..500_001], &old[..500_020]),
        (&old[..500_020], &old[..500_001]),
        (&old[..700_000], &old[..]),
        (&old[..], &old[..700_007]),
        (&old[..5000], &old[..4999]),
    ] {
        let (_, pulled) = warm(from, to);
        let more = to.len().saturating_sub(from.len());
        assert_eq!(pulled.nodes, 0);
        assert!(pulled.received < (more + more / 8) as u64 + 3000, "{pulled:?}");
    }
    // A tenth of it is new, in one piece: its bytes are asked for, not all of its records.
    let mut new = old.clone();
    new[300_000..400_000].copy_from_slice(&Noise(8).bytes(100_000));
    let (_, piece) = warm(&old, &new);
    assert!(piece.nodes == 0 && piece.received < 120_000, "{piece:?}");
    // All of it is.
    let (_, cold) = warm(&old, &Noise(9).bytes(1 << 20));
    assert!(cold.nodes > 0 && cold.received < 1_070_000, "{cold:?}");
}

#[test]
fn an_object_whose_records_lie_is_not_taken() {
    let old = Noise(7).bytes(300_000);
    let mut new = old.clone();
    new[150_000..150_100].fill(0);
    let (there, here) = (Fixture::new(), Fixture::new());
    put(&here, &old);
    let id = put(&there, &new).id;
    let request = PullRequest {
        objects: vec![id],
        ..PullRequest::default()
    };
    let whole = {
        let fresh = Fixture::new();
        put(&fresh, &old);
        pull_with(&fresh.store, &there.store, &request, Fault::None)
            .unwrap()
            .received
    };
    for at in 60..whole {
        match pull_with(&here.store, &there.store, &request, Fault::Flip(at)) {
            Ok(_) => panic!("byte {at} was flipped, and nobody noticed"),
            Err(e) => assert_ne!(e.kind(), Kind::Refused, "{e}"),
        }
        assert_eq!(here.store.objects().len(), 1);
    }
    sound(&here.store);
    pull_with(&here.store, &there.store, &request, Fault::None).unwrap();
    sound(&here.store);
}

#[test]
fn records_with_one_id_are_found_out_by_the_whole() {
    let width = Width::narrow(9);
    let old = Noise(7).bytes(20_000);
    let id = |atom: &[u8]| ObjectRecord::Leaf(atom.try_into().unwrap()).id(width);
    // Another atom that has the id of the one in its place, and two new ones with one id.
    let mut noise = Noise(11);
    let mut like = |other: &[u8]| loop {
        let atom = noise.bytes(32);
        if id(&atom) == id(other) && atom != other {
            return atom;
        }
    };
    let mut here_and_there = old.clone();
    let atom = like(&old[3200..3232]);
    here_and_there[3200..3232].copy_from_slice(&atom);
    let mut twice = old.clone();
    let first = Noise(12).bytes(32);
    let second = like(&first);
    twice[6400..6432].copy_from_slice(&first);
    twice[9600..9632].copy_from_slice(&second);
    for new in [here_and_there, twice] {
        let here = Fixture::new();
        put(&here, &old);
        let fold = Fold::of(&new[..], width, 1).unwrap();
        let mut hasher = crate::id::FileHasher::default();
        hasher.update(&new);
        let manifest = fold.manifest(hasher.finish());
        let (a, b) = pair();
        let found = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut link = over(b);
                crate::sync::ask::hello(&mut link, here.store.id()).unwrap();
                while let Some(frame) = link.next().unwrap() {
                    let Some(Request::Records { places, .. }) = Request::decode(&frame).unwrap() else {
                        panic!("only records were to be asked for");
                    };
                    let (mut block, mut out) = (None, crate::bytes::Writer::new());
                    for place in places {
                        let record = fold.record(&new[..], &mut block, place).unwrap();
                        record.encode(width, &mut out);
                    }
                    crate::sync::answer::say(&mut link, &Answer::Records(out.finish())).unwrap();
                }
            });
            let mut link = over(a);
            crate::sync::ask::hello(&mut link, here.store.id()).unwrap();
            crate::sync::object::pull(
                &here.store,
                &mut crate::sync::ask::Asker::new(&mut link, None),
                &manifest,
                &[],
                width,
            )
        });
        assert!(matches!(found.unwrap(), crate::sync::object::Warmth::Collision));
        assert_eq!(here.store.objects().len(), 1);
    }
}

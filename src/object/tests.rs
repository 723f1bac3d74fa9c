//! The known figures, and that everything that is folded comes back.

use super::*;
use crate::error::{Kind, Result};
use crate::id::{FileHasher, RecordId};
use proptest::prelude::*;
use std::collections::HashSet;

/// Bytes that do not repeat.
fn unique(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(next).flatten().take(len).collect()
}

fn manifest(bytes: &[u8], fold: &Fold) -> ObjectManifest {
    let mut hasher = FileHasher::default();
    hasher.update(bytes);
    fold.manifest(hasher.finish())
}

fn folded(bytes: &[u8]) -> (ObjectManifest, Fold) {
    let fold = Fold::of(bytes, Width::FULL, 2).unwrap();
    (manifest(bytes, &fold), fold)
}

fn all(bytes: &[u8]) -> (ObjectManifest, Records) {
    let (manifest, fold) = folded(bytes);
    (manifest, Records::of(&fold, bytes).unwrap())
}

/// Ids of all records of an object.
fn ids(bytes: &[u8]) -> HashSet<RecordId> {
    let (_, fold) = folded(bytes);
    let mut block = None;
    let shape = fold.shape();
    shape
        .path(0..shape.len())
        .map(|p| fold.id(bytes, &mut block, p).unwrap())
        .collect()
}

/// Records of `new` that a receiver who has `old` lacks, and their bytes.
fn lacks(old: &[u8], new: &[u8]) -> (u64, u64) {
    let have = ids(old);
    let (_, mut records) = all(new);
    for id in &have {
        records.remove(id);
    }
    (records.counts().records, records.counts().bytes)
}

#[test]
fn unique_bytes_take_two_records_for_three_atoms() {
    let (_, records) = all(&unique(32_768, 1));
    let counts = records.counts();
    assert_eq!((counts.leaves, counts.bytes), (1024, 70_972));
}

#[test]
fn what_repeats_is_one_record() {
    let bytes: Vec<u8> = unique(96, 2).into_iter().cycle().take(7776).collect();
    let (manifest, records) = all(&bytes);
    assert_eq!(
        records.counts(),
        Counts {
            leaves: 3,
            records: 8,
            bytes: 380
        }
    );
    assert_eq!(manifest.shape().count(0), 243);
    assert_eq!(records.rebuild(&manifest).unwrap(), bytes);
}

#[test]
fn nothing_is_no_record() {
    let (manifest, records) = all(&[]);
    assert_eq!((records.counts(), manifest.roots.len()), (Counts::default(), 0));
    assert_eq!(records.rebuild(&manifest).unwrap(), b"");
}

#[test]
fn a_short_read_is_proved_by_its_path() {
    let bytes = unique(32_768, 3);
    let (manifest, fold) = folded(&bytes);
    let proof = Proof::of(&manifest, &fold, &bytes[..], 50..73).unwrap();
    assert_eq!(
        proof.records.counts(),
        Counts {
            leaves: 2,
            records: 8,
            bytes: 384
        }
    );
    let read = Proof::decode(Width::FULL, &proof.encode()).unwrap();
    assert_eq!(read.manifest.id(), manifest.id());
    assert_eq!(read.records.range(&read.manifest, 50..73).unwrap(), bytes[50..73]);
    assert_eq!(
        read.records.range(&read.manifest, 50..97).unwrap_err().kind(),
        Kind::NotFound
    );
    assert_eq!(
        read.records.rebuild(&read.manifest).unwrap_err().kind(),
        Kind::NotFound
    );
    let outside = Proof::of(&manifest, &fold, &bytes[..], 5..32_769);
    assert_eq!(outside.unwrap_err().kind(), Kind::Usage);
}

#[test]
fn a_receiver_behind_lacks_what_changed_and_what_is_above_it() {
    let old = unique(1 << 20, 4);
    let changed = |atoms: &mut dyn Iterator<Item = usize>| {
        let mut new = old.clone();
        for atom in atoms {
            new[atom * 32..atom * 32 + 32].copy_from_slice(&unique(32, 1000 + 2 * atom as u64));
        }
        lacks(&old, &new)
    };
    assert_eq!(changed(&mut (32_752..32_768)), (22, 1014));
    assert_eq!(changed(&mut (0..16)).0, 31);
    assert_eq!(changed(&mut (0..16).map(|n| n * 2048)).0, 131);
}

#[test]
fn a_missing_leaf_elsewhere_blocks_a_rebuild_but_no_range() {
    let bytes = unique(100_000, 5);
    let (manifest, mut records) = all(&bytes);
    let (_, fold) = folded(&bytes);
    let leaf = fold
        .id(
            &bytes[..],
            &mut None,
            Place {
                scale: 0,
                index: 2000,
            },
        )
        .unwrap();
    records.remove(&leaf).unwrap();
    assert_eq!(records.range(&manifest, 1000..5000).unwrap(), bytes[1000..5000]);
    assert_eq!(
        records.range(&manifest, 63_990..64_001).unwrap_err().kind(),
        Kind::NotFound
    );
    assert_eq!(records.rebuild(&manifest).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn records_of_one_id_and_different_content_are_told() {
    let bytes = unique(32_768, 6);
    let fold = Fold::of(&bytes[..], Width::narrow(8), 1).unwrap();
    let error = Records::of(&fold, &bytes[..]).unwrap_err();
    assert_eq!(error.kind(), Kind::Damage);
    assert!(error.to_string().contains("collision"), "{error}");
}

#[test]
fn the_hash_decides_where_records_collide() {
    // Of many objects of two atoms, two that differ have the same roots in four bits.
    let width = Width::narrow(4);
    let object = |n: u64| {
        let bytes = unique(64, n);
        let fold = Fold::of(&bytes[..], width, 1).unwrap();
        (
            bytes.clone(),
            manifest(&bytes, &fold),
            Records::of(&fold, &bytes[..]),
        )
    };
    let objects: Vec<_> = (7..2000).map(object).filter(|o| o.2.is_ok()).collect();
    let first = &objects[0];
    let same = objects[1..].iter().find(|o| o.1.roots == first.1.roots).unwrap();
    let error = same.2.as_ref().unwrap().rebuild(&first.1).unwrap_err();
    assert_eq!(error.kind(), Kind::Damage);
}

#[test]
fn the_last_atom_is_filled_up_with_zeros_and_nothing_else() {
    let (mut pinned, _) = folded(&unique(64, 8));
    let (_, records) = all(&unique(64, 8));
    assert!(records.range(&pinned, 0..64).is_ok());
    // The same roots under a length that leaves a part of the last atom out.
    pinned.len = 60;
    assert_eq!(records.range(&pinned, 40..60).unwrap_err().kind(), Kind::Damage);
}

/// Bytes that are made when they are read: byte n is a function of n.
struct Made(u64);

impl Source for Made {
    fn len(&self) -> u64 {
        self.0
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        for (n, eight) in buf.chunks_mut(8).enumerate() {
            let at = (offset + 8 * n as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            eight.copy_from_slice(&(at ^ at >> 29).to_le_bytes()[..eight.len()]);
        }
        Ok(())
    }
}

#[test]
fn an_object_beyond_four_gib_is_folded_in_little_memory_and_read_in_places() {
    let source = Made((4 << 30) + 800_040);
    let fold = Fold::of(&source, Width::FULL, 2).unwrap();
    let manifest = fold.manifest(crate::id::FileHash([0; 32]));
    let shape = fold.shape();
    assert_eq!(manifest.roots.len(), shape.roots().count());
    for at in [0, (1 << 32) - 64, (4 << 30) + 799_968] {
        let range = at..at + 72;
        let mut want = vec![0; 72];
        source.read_at(at, &mut want).unwrap();
        let proof = Proof::of(&manifest, &fold, &source, range.clone()).unwrap();
        assert_eq!(proof.records.range(&manifest, range).unwrap(), want, "{at}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn whatever_is_folded_is_rebuilt(len in 0usize..90_000, seed: u64, from: u64, to: u64) {
        let bytes = unique(len, seed);
        let (manifest, records) = all(&bytes);
        prop_assert_eq!(&records.rebuild(&manifest).unwrap(), &bytes);
        let (from, to) = (from % (len as u64 + 1), to % (len as u64 + 1));
        let range = from.min(to)..from.max(to);
        let want = &bytes[range.start as usize..range.end as usize];
        prop_assert_eq!(records.range(&manifest, range).unwrap(), want);
    }

    #[test]
    fn a_patched_fold_is_that_of_the_new_bytes(
        old in 0usize..120_000, new in 0usize..120_000, seed: u64,
        mut cuts in proptest::collection::vec(0u64..120_000, 0..8)
    ) {
        let before = unique(old, seed);
        let mut after = before.clone();
        after.resize(new, 7);
        cuts.sort_unstable();
        let changed: Vec<_> = cuts.chunks_exact(2).map(|c| c[0].min(new as u64)..c[1].min(new as u64)).collect();
        for range in &changed {
            after[range.start as usize..range.end as usize].fill(9);
        }
        let patched = folded(&before).1.patched(&after[..], &changed).unwrap();
        prop_assert_eq!(patched, folded(&after).1);
    }

    #[test]
    fn proofs_that_are_accepted_have_one_encoding(bytes: Vec<u8>) {
        if let Ok(proof) = Proof::decode(Width::FULL, &bytes) {
            prop_assert_eq!(proof.encode(), bytes);
        }
    }
}

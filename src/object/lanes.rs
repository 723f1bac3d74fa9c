//! BLAKE2b-96 of many records at once, one in each lane of a vector.
//!
//! A record's message is one byte and 32 or 36 bytes after it: one block, of which eleven words of sixteen are zero and need not
//! be added. So a kernel of its own folds four times as fast as a library that hashes messages of any length (AVX-512; twice with
//! AVX2). Elsewhere, records are hashed by the `blake2` crate, one by one.

#[cfg(target_arch = "x86_64")]
mod x86;

use super::record::hash;

/// Bytes of a record's id.
pub(super) const ID: usize = 12;

/// Hashes messages that all begin with the byte `scale` and go on with `SIZE` bytes of `payloads` each.
type Hash = fn(scale: u8, payloads: &[u8], ids: &mut [[u8; ID]]);

/// The two lengths of payloads that there are, each hashed in the best way this processor has.
#[derive(Clone, Copy)]
pub(super) struct Lanes {
    leaves: Hash,
    inner: Hash,
}

impl Lanes {
    /// What this processor has.
    pub(super) fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if let Some(lanes) = x86::avx512().or_else(x86::avx2) {
            return lanes;
        }
        Self::ONE_BY_ONE
    }

    const ONE_BY_ONE: Self = Lanes {
        leaves: one_by_one::<32>,
        inner: one_by_one::<36>,
    };

    /// The ids of leaves, each of 32 bytes of `atoms`.
    pub(super) fn leaves(self, atoms: &[u8]) -> Vec<[u8; ID]> {
        let mut ids = vec![[0; ID]; atoms.len() / 32];
        (self.leaves)(0, atoms, &mut ids);
        ids
    }

    /// The ids of records of a scale, each of three of `children`; what is left over has no parent.
    pub(super) fn parents(self, scale: u8, children: &[[u8; ID]]) -> Vec<[u8; ID]> {
        let mut ids = vec![[0; ID]; children.len() / 3];
        let (whole, _) = children.split_at(ids.len() * 3);
        (self.inner)(scale, whole.as_flattened(), &mut ids);
        ids
    }
}

fn one_by_one<const SIZE: usize>(scale: u8, payloads: &[u8], ids: &mut [[u8; ID]]) {
    for (payload, id) in payloads.chunks_exact(SIZE).zip(ids) {
        *id = hash(scale, payload);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all() -> Vec<Lanes> {
        #[cfg(target_arch = "x86_64")]
        return x86::avx512()
            .into_iter()
            .chain(x86::avx2())
            .chain([Lanes::ONE_BY_ONE])
            .collect();
        #[cfg(not(target_arch = "x86_64"))]
        vec![Lanes::ONE_BY_ONE]
    }

    proptest! {
        #[test]
        fn all_ways_give_the_same(scale in 1u8..38, bytes in proptest::collection::vec(any::<u8>(), 0..3000)) {
            let atoms = &bytes[..bytes.len() / 32 * 32];
            let leaves = Lanes::ONE_BY_ONE.leaves(atoms);
            let parents = Lanes::ONE_BY_ONE.parents(scale, &leaves);
            for lanes in all() {
                prop_assert_eq!(&lanes.leaves(atoms), &leaves);
                prop_assert_eq!(&lanes.parents(scale, &leaves), &parents);
            }
        }
    }
}

//! The chain policy: which earlier revision of a chunk a new one is a delta against, within the bounds on a rebuild's work.

use super::encode::Encoder;
use crate::codec::Codec;
use crate::error::Result;
use crate::graph::{MANY_DEPTH, NodeKind};
use crate::id::NodeId;
use crate::rebuild::NodeSource;

/// Deltas that a rebuild may have to apply.
const MAX_DEPTH: u8 = 32;
/// A rebuild reads at most this many times the chunk's raw size.
const MAX_COST: u64 = 3;
/// A chain that has no more room for a delta goes on from its root, with a revision that is a multiple of this: then the next ones
/// follow each other.
const HEAD: u32 = 8;

/// Whether a chain that ends in a node of this codec and of `raw_len` bytes may have such a depth and read so many payload bytes. One
/// that takes many bases may follow a chain that is as long as there may be, and bases that are twice as long.
pub(super) fn within_bounds(codec: Codec, depth: u8, cost: u64, raw_len: u32) -> bool {
    let (depth_over, cost_over) = if codec.takes_many() {
        (MANY_DEPTH, 2)
    } else {
        (0, 1)
    };
    depth <= MAX_DEPTH + depth_over && cost <= MAX_COST * cost_over * u64::from(raw_len)
}

/// What a new revision is a delta against.
pub(super) struct Base {
    pub(super) id: NodeId,
    pub(super) depth: u8,
    /// Of the new node.
    pub(super) revision: u32,
    /// Payload bytes that its rebuild reads.
    pub(super) cost: u64,
    /// What the delta before took, in bytes.
    step: u64,
    /// Whether it is the chain's root because the chain had no more room.
    pub(super) head: bool,
}

impl Base {
    /// The mean size of a node of `size` bytes and of all deltas like the one before that can follow it one by one, if its rebuild
    /// reads `cost`.
    pub(super) fn mean(&self, size: u64, cost: u64, raw_len: u32) -> u64 {
        let step = self.step.max(1);
        let more = (MAX_COST * u64::from(raw_len)).saturating_sub(cost) / step;
        (size + more * step) / (1 + more)
    }
}

impl<S: NodeSource> Encoder<S> {
    /// The base for the revision that follows `previous`, found by walking down its chain: what the skip-delta rule says. If that has
    /// no room for a delta such as the previous one, or if `head` says so, it is the chain's root: deltas to it grow with the
    /// distance, but as many as possible can follow.
    pub(super) fn base(&self, kind: NodeKind, previous: NodeId, mut head: bool) -> Result<Option<Base>> {
        let Some(meta) = self.meta_of(kind, &previous)? else {
            return Ok(None);
        };
        let step = if meta.0.delta.is_some() {
            u64::from(meta.1)
        } else {
            0
        };
        let mut revision = meta.0.revision().saturating_add(1);
        let target = base_revision(revision);
        let (mut at, mut meta) = (previous, meta);
        while let Some(delta) = meta.0.delta {
            if !head && meta.0.revision() <= target && delta.depth < MAX_DEPTH {
                if delta.cost + step <= MAX_COST * u64::from(meta.0.raw_len) {
                    break;
                }
                head = true;
            }
            // Below a relative the chain goes on with chunks of other numbers.
            if meta.0.codec.takes_many() {
                if head {
                    break;
                }
                return Ok(None);
            }
            at = delta.base;
            match self.meta_of(kind, &at)? {
                // A chain that does not end is damage.
                Some(m) if m.0.depth() < delta.depth => meta = m,
                _ => return Ok(None),
            }
        }
        if head {
            revision = revision.checked_next_multiple_of(HEAD).unwrap_or(u32::MAX);
        }
        let (depth, cost) = (meta.0.depth(), meta.0.cost(meta.1));
        Ok(Some(Base {
            id: at,
            depth,
            revision,
            cost,
            step,
            head,
        }))
    }
}

/// The revision that revision `n` (1 or more) is a delta against: the lowest digit that is not 0 goes down by one, in a
/// number system whose digits count to 8, 4, 2, 2, 2, … So neighbours are mostly one revision apart, and a chain of up to 64
/// revisions is at most 11 deep. After the skip-deltas of Subversion's FSFS, which count in twos throughout.
fn base_revision(n: u32) -> u32 {
    let mut unit = 1u32;
    for radix in [8, 4].into_iter().chain(std::iter::repeat(2)) {
        if !(n / unit).is_multiple_of(radix) || n < unit {
            break;
        }
        match unit.checked_mul(radix) {
            Some(u) => unit = u,
            None => break,
        }
    }
    n.saturating_sub(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(mut n: u32) -> Vec<u32> {
        let mut out = vec![n];
        while n > 0 {
            n = base_revision(n);
            out.push(n);
        }
        out
    }

    #[test]
    fn chains_stay_short_and_share_their_ends() {
        assert_eq!(chain(10), [10, 9, 8, 0]);
        assert_eq!(chain(21), [21, 20, 19, 18, 17, 16, 8, 0]);
        for n in 1..64 {
            assert!(chain(n).len() - 1 <= 11, "{n}: {:?}", chain(n));
        }
        // The base of n is always on the chain of n - 1, which is how it is found.
        for n in 1..5000 {
            assert!(chain(n - 1).contains(&base_revision(n)), "{n}");
        }
    }
}

//! The chain policy: which earlier revision of a chunk a new one is a delta against, within the bounds on a rebuild's work.

use super::encode::Encoder;
use crate::codec::Codec;
use crate::error::Result;
use crate::graph::{MANY_DEPTH, NodeKind, NodeMeta};
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

/// Where the delta before took more than one part in so many of the chunk, each revision follows the one before: such chains have no
/// room for many deltas, so that skipping over some would only make them larger.
const DENSE: u64 = 4;
/// Without room for one part in so many of what the delta before took, a delta is not tried.
const LITTLE: u64 = 2;

/// What a new revision is a delta against.
pub(super) struct Base {
    pub(super) id: NodeId,
    pub(super) depth: u8,
    /// Of the new node.
    pub(super) revision: u32,
    /// Payload bytes that its rebuild reads.
    pub(super) cost: u64,
    /// What the delta before took, in bytes.
    pub(super) step: u64,
}

/// The mean size of a node of `size` bytes and of all deltas of `step` bytes that can follow it one by one, if its rebuild reads `cost`.
pub(super) fn mean(size: u64, cost: u64, step: u64, raw_len: u32) -> u64 {
    let step = step.max(1);
    let more = (MAX_COST * u64::from(raw_len)).saturating_sub(cost) / step;
    (size + more * step) / (1 + more)
}

impl<S: NodeSource> Encoder<S> {
    /// The base for the revision that follows `previous`, found by walking down its chain: what the skip-delta rule says, or the
    /// previous node where deltas are dense. None if there is none, or no room for a delta such as the previous one.
    pub(super) fn base(&self, kind: NodeKind, previous: NodeId) -> Result<Option<Base>> {
        let Some((first, len)) = self.meta_of(kind, &previous)? else {
            return Ok(None);
        };
        let step = first.delta.map_or(0, |_| u64::from(len));
        let revision = first.revision().saturating_add(1);
        let raw_len = u64::from(first.raw_len);
        let target = if step * DENSE > raw_len {
            first.revision()
        } else {
            base_revision(revision)
        };
        let (mut id, mut meta, mut len) = (previous, first, len);
        while let Some(delta) = meta.delta {
            if meta.revision() <= target && delta.depth < MAX_DEPTH {
                if delta.cost.saturating_add(step / LITTLE) > MAX_COST * raw_len {
                    return Ok(None);
                }
                break;
            }
            let Some(next) = self.below(kind, &meta)? else {
                return Ok(None);
            };
            (id, meta, len) = next;
        }
        Ok(Some(Base {
            id,
            depth: meta.depth(),
            revision,
            cost: meta.cost(len),
            step,
        }))
    }

    /// What the revision that follows `previous` may be a delta against when its chain has no more room: the chain's root and the node
    /// above it. Deltas to them are larger, but others can follow.
    pub(super) fn heads(&self, kind: NodeKind, previous: NodeId) -> Result<Vec<Base>> {
        let mut heads: Vec<Base> = Vec::new();
        let Some((mut meta, mut len)) = self.meta_of(kind, &previous)? else {
            return Ok(heads);
        };
        let step = meta.delta.map_or(0, |_| u64::from(len));
        let revision = meta.revision().saturating_add(1);
        let revision = revision.checked_next_multiple_of(HEAD).unwrap_or(u32::MAX);
        let mut id = previous;
        loop {
            heads.truncate(1);
            heads.insert(
                0,
                Base {
                    id,
                    depth: meta.depth(),
                    revision,
                    cost: meta.cost(len),
                    step,
                },
            );
            match self.below(kind, &meta)? {
                Some(next) => (id, meta, len) = next,
                None => return Ok(heads),
            }
        }
    }

    /// The node that a delta is against, with its payload length; none at the end of a chain, which also is where it goes on with
    /// chunks of other numbers, below a relative.
    fn below(&self, kind: NodeKind, meta: &NodeMeta) -> Result<Option<(NodeId, NodeMeta, u32)>> {
        let Some(delta) = meta.delta.filter(|_| !meta.codec.takes_many()) else {
            return Ok(None);
        };
        let below = self.meta_of(kind, &delta.base)?;
        // A chain that does not end is damage.
        let below = below.filter(|(m, _)| m.depth() < delta.depth);
        Ok(below.map(|(meta, len)| (delta.base, meta, len)))
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

//! Which part of which region each chunk holds: how a base for a delta is found (docs/FORMAT.md, "Places").

use super::layout::Layout;
use sha2::{Digest, Sha256};

/// A stretch of a chunk: a part of a region, or structural bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index into [`Layout::chunks`].
    pub chunk: u32,
    /// Where the stretch starts in the chunk, in bytes.
    pub at: u32,
    /// Bytes, at least 1.
    pub len: u32,
    /// Index into [`Layout::regions`], and where the stretch starts in the region, in bytes; none for structural bytes.
    pub region: Option<(u32, u64)>,
}

impl Layout {
    /// What the chunks are made of, in file order.
    pub fn places(&self) -> Vec<Place> {
        let mut places = Vec::with_capacity(self.extents.len());
        let (mut at, mut next) = (0u64, 0usize);
        for e in &self.extents {
            let (start, end) = (at, at + u64::from(e.len));
            while at < end {
                // Empty regions, and those that end here, have nothing more to say.
                while self.regions.get(next).is_some_and(|r| r.offset + r.len <= at) {
                    next += 1;
                }
                let (stop, region) = match self.regions.get(next) {
                    Some(r) if r.offset <= at => {
                        (end.min(r.offset + r.len), Some((next as u32, at - r.offset)))
                    }
                    other => (other.map_or(end, |r| end.min(r.offset)), None),
                };
                places.push(Place {
                    chunk: e.chunk,
                    at: e.offset + (at - start) as u32,
                    len: (stop - at) as u32,
                    region,
                });
                at = stop;
            }
        }
        places
    }

    /// For each chunk, the key of its place: equal for the chunks that hold the same part of the same tensor in
    /// different files or versions, whatever their paths and file offsets. The first 16 bytes of a SHA-256 over the parts
    /// the chunk is made of.
    pub fn chunk_keys(&self) -> Vec<[u8; 16]> {
        let mut hashers = vec![Sha256::new_with_prefix(b"zspace.place.1\0"); self.chunks.len()];
        let mut structural = vec![false; self.chunks.len()];
        for p in self.places() {
            let Some((region, offset)) = p.region else {
                structural[p.chunk as usize] = true;
                continue;
            };
            let (r, h) = (&self.regions[region as usize], &mut hashers[p.chunk as usize]);
            h.update([1, r.dtype as u8]);
            for field in [r.name.len() as u64, offset, u64::from(p.len)] {
                h.update(field.to_le_bytes());
            }
            h.update(&r.name);
        }
        let mut ordinal = 0u64;
        let mut keys = Vec::with_capacity(hashers.len());
        for (mut h, structural) in hashers.into_iter().zip(structural) {
            if structural {
                h.update([0]);
                h.update(ordinal.to_le_bytes());
                ordinal += 1;
            }
            let digest: [u8; 32] = h.finalize().into();
            let mut key = [0; 16];
            key.copy_from_slice(&digest[..16]);
            keys.push(key);
        }
        keys
    }
}

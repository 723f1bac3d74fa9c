//! Stored files as the search for bases sees them: which part of which region lies in which chunk.

use super::base::ChunkKey;
use crate::error::Result;
use crate::format::{Layout, Place, Region};
use crate::graph::{Manifest, NodeKind, Shape};
use crate::id::NodeId;
use crate::rebuild::{NodeSource, Rebuilder};
use std::collections::HashMap;

/// A file's regions and where they lie in its chunks.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) regions: Vec<Region>,
    /// In file order, so those of one region follow one another.
    pub(super) places: Vec<Place>,
    /// For each region, how many places lie before it.
    firsts: Vec<usize>,
    /// Bytes of each chunk.
    pub(super) lens: Vec<u32>,
}

/// A stretch of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) chunk: u32,
    pub(super) at: u32,
    pub(super) len: u32,
}

impl Plan {
    pub(super) fn new(layout: &Layout) -> Self {
        let places = layout.places();
        let mut firsts = vec![places.len(); layout.regions.len()];
        for (i, p) in places.iter().enumerate().rev() {
            if let Some((region, _)) = p.region {
                firsts[region as usize] = i;
            }
        }
        Plan {
            regions: layout.regions.clone(),
            places,
            firsts,
            lens: layout.chunks.iter().map(|c| c.len).collect(),
        }
    }

    /// The chunks' stretches that make up `len` bytes from `offset` on of a region, in order.
    pub(super) fn stretches(&self, region: usize, offset: u64, len: u64) -> impl Iterator<Item = Stretch> {
        let first = self.firsts.get(region).copied().unwrap_or(self.places.len());
        let end = offset.saturating_add(len);
        self.places[first..]
            .iter()
            .map_while(move |p| match p.region {
                Some((r, at)) if r as usize == region && at < end => Some((p, at)),
                _ => None,
            })
            .filter_map(move |(p, at)| {
                let (from, to) = (offset.max(at), end.min(at + u64::from(p.len)));
                (from < to).then(|| Stretch {
                    chunk: p.chunk,
                    at: p.at + (from - at) as u32,
                    len: (to - from) as u32,
                })
            })
    }
}

/// What a stored file has to offer.
#[derive(Default)]
pub(super) struct Known {
    pub(super) plan: Plan,
    pub(super) chunks: Vec<NodeId>,
    pub(super) layout: Option<NodeId>,
    keys: HashMap<ChunkKey, u32>,
}

impl Known {
    /// Loads the file whose manifest has this id.
    pub(super) fn load(rebuilder: &Rebuilder, source: &dyn NodeSource, manifest: &NodeId) -> Result<Self> {
        let manifest = Manifest::decode(&rebuilder.node(source, NodeKind::Manifest, manifest)?)?;
        let mut known = Known {
            chunks: manifest.chunks,
            ..Known::default()
        };
        if let Shape::Layout(id) = manifest.shape {
            let layout = Layout::decode(&rebuilder.node(source, NodeKind::Layout, &id)?)?;
            if layout.chunks.len() != known.chunks.len() {
                return Ok(Known::default());
            }
            known.keys = layout.chunk_keys().into_iter().zip(0..).collect();
            known.plan = Plan::new(&layout);
            known.layout = Some(id);
        }
        Ok(known)
    }

    /// The chunk with this key.
    pub(super) fn chunk(&self, key: &ChunkKey) -> Option<NodeId> {
        self.keys
            .get(key)
            .and_then(|c| self.chunks.get(*c as usize))
            .copied()
    }

    /// The chunk of a file that is one chunk without structure.
    pub(super) fn whole(&self) -> Option<NodeId> {
        match self.chunks[..] {
            [only] if self.layout.is_none() => Some(only),
            _ => None,
        }
    }

    /// How much is held of it, in regions and chunks.
    pub(super) fn weight(&self) -> usize {
        1 + self.chunks.len() + self.plan.regions.len()
    }
}

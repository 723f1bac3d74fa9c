//! What a store holds and what that costs.

use super::Store;
use crate::error::Result;
use crate::graph::{NodeKind, NodeMeta};
use crate::rebuild::deltas;
use std::collections::BTreeMap;

/// Sizes of a store.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Stats {
    /// Versions.
    pub versions: u64,
    /// Bytes of all files of all versions.
    pub raw: u64,
    /// Bytes of the store on disk but for staging and cache: packs, journal and index.
    pub stored: u64,
    /// Of these, packs.
    pub packs: u64,
    /// Of the packs, what no version has: left by commits that were interrupted or given up.
    pub unused: u64,
    /// Of the packs, records whose nodes were written again since: `repack` gives their space back.
    pub superseded: u64,
    /// Of these, the journal.
    pub journal: u64,
    /// Of these, the index, which can be made again.
    pub index: u64,
    /// `stored / raw`.
    pub ratio: f64,
    /// Per branch.
    pub branches: Vec<BranchStats>,
    /// Per kind of node and codec.
    pub codecs: Vec<CodecStats>,
    /// Chunks by the number of deltas to apply.
    pub depths: BTreeMap<u8, u64>,
}

/// Sizes of a branch.
#[derive(Clone, Debug, serde::Serialize)]
pub struct BranchStats {
    /// Its name.
    pub branch: String,
    /// Its own versions.
    pub versions: u64,
    /// Bytes of their files.
    pub raw: u64,
    /// Bytes their commits added to the packs.
    pub stored: u64,
}

/// Sizes by kind of node and codec.
#[derive(Clone, Debug, serde::Serialize)]
pub struct CodecStats {
    /// `chunk`, `layout`, `manifest` or `tree`.
    pub kind: &'static str,
    /// The codec's name.
    pub codec: &'static str,
    /// Nodes.
    pub nodes: u64,
    /// Their raw bytes.
    pub raw: u64,
    /// Their bytes in packs, records' heads included.
    pub stored: u64,
}

impl Store {
    /// Adds up what the store holds. Reads the head of every record, and looks up whether it counts.
    pub fn stats(&self) -> Result<Stats> {
        let parts = &self.0.parts;
        let mut s = Stats::default();
        {
            let history = parts.history.read();
            for (name, b) in history.branches() {
                let sum = |f: fn(&super::Numbered) -> u64| b.versions.iter().map(|v| f(v)).sum();
                let raw = sum(|v| v.version.len);
                let branch = BranchStats {
                    branch: name.clone(),
                    versions: b.versions.len() as u64,
                    raw,
                    stored: sum(|v| v.stored),
                };
                s.versions += branch.versions;
                s.raw += raw;
                s.branches.push(branch);
            }
        }
        let mut codecs: BTreeMap<(u8, u8), CodecStats> = BTreeMap::new();
        for range in parts.history.ranges() {
            parts.packs.scan(&range, &mut |id, place, m| {
                let Some(kind) = NodeKind::from_tag(m.kind) else {
                    return Ok(());
                };
                if !parts.packs.counts(&id, &place)? {
                    s.superseded += u64::from(m.stored_len);
                    return Ok(());
                }
                let meta = NodeMeta::decode(kind, &m.meta)?;
                let c = codecs
                    .entry((m.kind, meta.codec.tag()))
                    .or_insert_with(|| CodecStats {
                        kind: kind.name(),
                        codec: meta.codec.name(),
                        nodes: 0,
                        raw: 0,
                        stored: 0,
                    });
                c.nodes += 1;
                c.raw += u64::from(meta.raw_len);
                c.stored += u64::from(m.stored_len);
                if kind == NodeKind::Chunk {
                    // Of a damaged chain, what its record says.
                    let deltas = deltas(&*parts.packs, &meta).unwrap_or(meta.depth());
                    *s.depths.entry(deltas).or_default() += 1;
                }
                Ok(())
            })?;
        }
        s.codecs = codecs.into_values().collect();
        let sizes = parts.packs.sizes()?;
        (s.packs, s.journal, s.index) = (sizes.packs, sizes.journal, sizes.index);
        let published: u64 = parts.history.ranges().iter().map(|r| r.to - r.from).sum();
        s.unused = s.packs.saturating_sub(published + sizes.pack_headers);
        s.stored = s.packs + s.journal + s.index;
        s.ratio = if s.raw == 0 {
            0.0
        } else {
            s.stored as f64 / s.raw as f64
        };
        Ok(s)
    }
}

//! Puts an object that is another one with some of its bytes changed: only what changed is encoded.

use super::encode::{Against, Encoder};
use super::import::ProvenObject;
use super::{Parts, Stored};
use crate::error::{Error, Interrupt, Result};
use crate::format::{Cutter, Layout};
use crate::graph::{Manifest, NodeKind, Shape};
use crate::id::{Domain, FileHash, NodeId};
use crate::object::{Fold, ObjectManifest, Source, touches};
use crate::rebuild::StoredFile;
use crate::tensor::Number;
use std::ops::Range;
use std::sync::Arc;

/// Bytes read at a time.
const STEP: u64 = 1 << 20;
/// Chunks encoded at a time.
const BATCH: usize = 32;
/// In the place of a chunk that no old one is at.
const NONE: NodeId = NodeId([0; 32]);

/// What became of an object that is another one with some of its bytes changed.
pub enum Patched {
    /// It is stored, and not published yet; its fold.
    Stored(ProvenObject, Stored, Fold),
    /// The other's bytes are not stored in a way that lends itself to it.
    Unfit,
    /// The bytes have not the SHA-256 that is pinned.
    Wrong,
}

/// An object of which this one is a changed copy: its SHA-256, its length and its fold.
pub struct Old<'a> {
    /// Its SHA-256.
    pub hash: FileHash,
    /// Its length.
    pub len: u64,
    /// Its fold.
    pub fold: &'a Fold,
}

/// Stores the object of this manifest, whose bytes are those of another but for what is in `changed` (sorted ranges) and beyond its end.
/// Only the chunks that these touch are encoded, against the other's; all of it is read back and hashed.
///
/// # Errors
/// Damage, if the bytes have other roots than the manifest; what the packs report.
pub fn put_patched(
    parts: &Parts,
    old: &Old<'_>,
    manifest: &ObjectManifest,
    new: &dyn Source,
    changed: &[Range<u64>],
    interrupt: Interrupt<'_>,
) -> Result<Patched> {
    parts.packs.refresh()?;
    let (repacks, since) = (parts.history.read().repacks(), parts.packs.seq());
    let before = Manifest::id(&old.hash, old.len);
    let before = parts.rebuilder.node(&*parts.packs, NodeKind::Manifest, &before)?;
    let before = Manifest::decode(&before)?;
    let Shape::Opaque(lens) = &before.shape else {
        return Ok(Patched::Unfit);
    };
    let encoder = Encoder::new(parts)?;
    let file = |lens: &[u32], ids: &[NodeId]| {
        let layout = Arc::new(Layout::opaque(lens)?);
        StoredFile::new(
            &parts.rebuilder,
            encoder.source.clone(),
            layout,
            ids.to_vec(),
            Vec::new(),
        )
    };
    let mut chunks = Chunks {
        encoder: &encoder,
        lens: Vec::new(),
        ids: Vec::new(),
        waiting: Vec::new(),
    };
    let mut at = 0;
    let mut touched = Vec::new();
    for (len, id) in lens.iter().zip(&before.chunks) {
        let range = at..at + u64::from(*len);
        at = range.end;
        let end = range.end.min(manifest.len);
        if range.start >= end {
            break;
        }
        if end < range.end || touches(changed, &range) {
            touched.push((chunks.lens.len(), range.start..end));
        }
        chunks.lens.push((end - range.start) as u32);
        chunks.ids.push(*id);
    }
    let old_file = file(lens, &before.chunks)?;
    for some in touched.chunks(BATCH) {
        for (_, range) in some {
            old_file.read_ahead(range.start, range.end - range.start);
        }
        interrupt()?;
        for (place, range) in some {
            chunks.put(*place, read(new, range.clone())?)?;
        }
    }
    let mut cutter = Cutter::new();
    while at < manifest.len {
        let end = manifest.len.min(at + STEP);
        interrupt()?;
        cutter.push(&read(new, at..end)?, &mut |raw| chunks.add(raw))?;
        at = end;
    }
    cutter.finish(&mut |raw| chunks.add(raw))?;
    chunks.encode()?;
    let Chunks { lens, ids, .. } = chunks;
    let stored = file(&lens, &ids)?;
    if !stored.has_digest(&manifest.hash, interrupt)? {
        return Ok(Patched::Wrong);
    }
    let fold = old.fold.patched(new, changed)?;
    if fold.manifest(manifest.hash) != *manifest {
        return Err(Error::damage("the object has other roots than its manifest"));
    }
    let raw = Manifest {
        shape: Shape::Opaque(lens),
        chunks: ids,
        crcs: Vec::new(),
    }
    .encode();
    encoder.node(
        NodeKind::Manifest,
        Manifest::id(&manifest.hash, manifest.len),
        &raw,
        None,
    )?;
    let stored = Stored {
        ranges: vec![encoder.finish()?],
        repacks,
        since,
    };
    Ok(Patched::Stored(ProvenObject(manifest.clone()), stored, fold))
}

/// The chunks of the new object; those of the old one at first, in the places of those that wait to be encoded.
struct Chunks<'a> {
    encoder: &'a Encoder,
    lens: Vec<u32>,
    ids: Vec<NodeId>,
    waiting: Vec<(usize, Vec<u8>)>,
}

impl Chunks<'_> {
    /// A changed chunk.
    fn put(&mut self, place: usize, raw: Vec<u8>) -> Result<()> {
        self.waiting.push((place, raw));
        if self.waiting.len() == BATCH {
            self.encode()?;
        }
        Ok(())
    }

    /// A chunk beyond the old one's end.
    fn add(&mut self, raw: &[u8]) -> Result<()> {
        self.lens.push(raw.len() as u32);
        self.ids.push(NONE);
        self.put(self.ids.len() - 1, raw.to_vec())
    }

    /// Hashes what waits together, which costs a third, and encodes it.
    fn encode(&mut self) -> Result<()> {
        let raws: Vec<&[u8]> = self.waiting.iter().map(|(_, raw)| raw.as_slice()).collect();
        let hashes = Domain::Chunk.hash_many(&raws);
        for ((place, raw), hash) in self.waiting.drain(..).zip(hashes) {
            let Some(id) = self.ids.get_mut(place) else {
                continue;
            };
            let previous = std::mem::replace(id, NodeId(hash));
            let against = Against {
                previous: (previous != NONE).then_some(previous),
                relative: None,
            };
            self.encoder.chunk(*id, &raw, Number::Bytes, &against)?;
        }
        Ok(())
    }
}

fn read(from: &dyn Source, range: Range<u64>) -> Result<Vec<u8>> {
    let mut raw = vec![0; (range.end - range.start) as usize];
    from.read_at(range.start, &mut raw)?;
    Ok(raw)
}

//! A file of a version: random access over its chunks.

use super::{AHEAD, NodeSource, Rebuilder, deltas};
use crate::error::{Error, Interrupt, Result};
use crate::format::{Layout, Source};
use crate::graph::{Manifest, NodeKind, NodeMeta, Shape};
use crate::id::{FileHash, FileHasher, NodeId};
use crate::object;
use crossbeam_channel::bounded;
use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// Bytes of a whole file after which more of it is rebuilt ahead.
const STEP: u64 = 1 << 20;

/// Bytes read: a part of a shared chunk, or a copy.
#[derive(Clone, Debug)]
pub enum Slice {
    /// A range of a cached chunk.
    Shared(Arc<Vec<u8>>, Range<usize>),
    /// Put together from several chunks.
    Owned(Vec<u8>),
}

impl Deref for Slice {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match self {
            Slice::Shared(chunk, range) => chunk.get(range.clone()).unwrap_or_default(),
            Slice::Owned(bytes) => bytes,
        }
    }
}

/// A file as its manifest describes it.
pub struct StoredFile {
    rebuilder: Arc<Rebuilder>,
    source: Arc<dyn NodeSource>,
    layout: Arc<Layout>,
    chunks: Vec<NodeId>,
    crcs: Vec<u32>,
    /// File offset at which each extent starts.
    starts: Vec<u64>,
}

/// Bytes of one chunk that a range of the file touches.
struct Part {
    len: usize,
    chunk: usize,
    at: usize,
}

impl StoredFile {
    /// Loads the manifest and layout of the file with this hash and length.
    pub fn load(
        rebuilder: &Arc<Rebuilder>,
        source: Arc<dyn NodeSource>,
        hash: &FileHash,
        len: u64,
    ) -> Result<Self> {
        let id = Manifest::id(hash, len);
        let manifest = Manifest::decode(&rebuilder.node(&*source, NodeKind::Manifest, &id)?)?;
        let layout = match &manifest.shape {
            Shape::Opaque(lens) => Layout::opaque(lens)?,
            Shape::Layout(id) => Layout::decode(&rebuilder.node(&*source, NodeKind::Layout, id)?)?,
        };
        if layout.len != len {
            return Err(Error::damage(format!(
                "manifest of file {} is for {} bytes, not {len}",
                hash.short(),
                layout.len
            )));
        }
        Self::new(
            rebuilder,
            source,
            Arc::new(layout),
            manifest.chunks,
            manifest.crcs,
        )
    }

    /// A file of these chunks, which must fit the layout.
    pub fn new(
        rebuilder: &Arc<Rebuilder>,
        source: Arc<dyn NodeSource>,
        layout: Arc<Layout>,
        chunks: Vec<NodeId>,
        crcs: Vec<u32>,
    ) -> Result<Self> {
        if chunks.len() != layout.chunks.len() || !crcs.is_empty() && crcs.len() != layout.tensors.len() {
            return Err(Error::damage("manifest does not fit its layout"));
        }
        let mut at = 0;
        let mut starts = Vec::with_capacity(layout.extents.len());
        for e in &layout.extents {
            starts.push(at);
            at += u64::from(e.len);
        }
        Ok(StoredFile {
            rebuilder: rebuilder.clone(),
            source,
            layout,
            chunks,
            crcs,
            starts,
        })
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.layout.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.layout.len == 0
    }

    /// How it is cut, and its tensors.
    pub fn layout(&self) -> &Arc<Layout> {
        &self.layout
    }

    /// Its chunks, in the layout's order.
    pub fn chunks(&self) -> &[NodeId] {
        &self.chunks
    }

    /// CRC-32 of the span of each tensor.
    pub fn crcs(&self) -> &[u32] {
        &self.crcs
    }

    /// The parts of the file's range, in order; what lies past the end is left out.
    fn parts(&self, offset: u64, len: u64) -> impl Iterator<Item = Part> {
        let end = offset.saturating_add(len).min(self.len());
        let first = self.starts.partition_point(|s| *s <= offset).saturating_sub(1);
        let extents = self.starts.iter().zip(&self.layout.extents).skip(first);
        extents
            .take_while(move |(start, _)| **start < end)
            .filter_map(move |(start, e)| {
                let from = offset.max(*start);
                let to = end.min(start + u64::from(e.len));
                let at = e.offset as usize + (from - start) as usize;
                (from < to).then(|| Part {
                    len: (to - from) as usize,
                    chunk: e.chunk as usize,
                    at,
                })
            })
    }

    fn chunk(&self, i: usize) -> Result<Arc<Vec<u8>>> {
        let id = self
            .chunks
            .get(i)
            .ok_or_else(|| Error::damage("layout names a chunk that the manifest lacks"))?;
        let raw = self.rebuilder.chunk(&*self.source, id)?;
        match self.layout.chunks.get(i) {
            Some(plan) if plan.len as usize == raw.len() => Ok(raw),
            _ => Err(Error::damage(format!(
                "chunk {} is not as long as its layout says",
                id.short()
            ))),
        }
    }

    /// Up to `len` bytes at `offset` that lie together in one chunk: at least one before the end of the file.
    pub fn read_part(&self, offset: u64, len: usize) -> Result<Slice> {
        match self.parts(offset, len as u64).next() {
            Some(p) => Ok(Slice::Shared(self.chunk(p.chunk)?, p.at..p.at + p.len)),
            None => Ok(Slice::Owned(Vec::new())),
        }
    }

    /// Up to `len` bytes at `offset`, fewer only at the end of the file. What lies in one chunk is not copied.
    pub fn read(&self, offset: u64, len: usize) -> Result<Slice> {
        let mut parts = self.parts(offset, len as u64).peekable();
        let Some(first) = parts.next() else {
            return Ok(Slice::Owned(Vec::new()));
        };
        if parts.peek().is_some() {
            // Side by side with the first.
            self.read_ahead(offset + first.len as u64, (len - first.len) as u64);
        }
        let raw = self.chunk(first.chunk)?;
        if parts.peek().is_none() {
            return Ok(Slice::Shared(raw, first.at..first.at + first.len));
        }
        let mut out = Vec::with_capacity(len.min((self.len() - offset) as usize));
        let mut held = (first.chunk, raw);
        for p in std::iter::once(first).chain(parts) {
            if p.chunk != held.0 {
                held = (p.chunk, self.chunk(p.chunk)?);
            }
            let bytes = held.1.get(p.at..p.at + p.len);
            out.extend_from_slice(
                bytes.ok_or_else(|| Error::damage("layout reaches past the end of a chunk"))?,
            );
        }
        Ok(Slice::Owned(out))
    }

    /// Hands `take` all bytes in their order, in parts, and has what comes next rebuilt meanwhile.
    ///
    /// # Errors
    /// Damage, and what `take` reports.
    pub fn stream(&self, take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (mut at, mut ahead) = (0, 0);
        while at < self.len() {
            if at >= ahead {
                self.read_ahead(at, AHEAD as u64);
                ahead = at + STEP;
            }
            // What lies together, so that nothing is copied.
            let bytes = self.read_part(at, AHEAD)?;
            if bytes.is_empty() {
                return Err(Error::damage("the file ends early"));
            }
            take(&bytes)?;
            at += bytes.len() as u64;
        }
        Ok(())
    }

    /// The SHA-256 of all bytes.
    ///
    /// # Errors
    /// Damage; what `interrupt` gives.
    pub fn digest(&self, interrupt: Interrupt<'_>) -> Result<FileHash> {
        let mut hasher = FileHasher::default();
        self.stream(&mut |bytes| {
            hasher.update(bytes);
            interrupt()
        })?;
        Ok(hasher.finish())
    }

    /// Whether this is the SHA-256 of all bytes. It vouches for the chunks as well, whose own hashes are only looked at where they have
    /// to tell what is damaged.
    ///
    /// # Errors
    /// Damage; what `interrupt` gives.
    pub fn has_digest(&self, hash: &FileHash, interrupt: Interrupt<'_>) -> Result<bool> {
        let in_order = self.layout.extents.len() == self.chunks.len();
        if in_order
            && self
                .unverified_digest(interrupt)
                .is_ok_and(|found| found == *hash)
        {
            return Ok(true);
        }
        Ok(self.digest(interrupt)? == *hash)
    }

    /// The SHA-256 of the chunks one after the other as their chains give them. A few are decoded ahead, side by side, and not kept.
    fn unverified_digest(&self, interrupt: Interrupt<'_>) -> Result<FileHash> {
        let lanes = self.rebuilder.threads();
        std::thread::scope(|scope| {
            let lane = |lane: usize| {
                let (send, receive) = bounded(1);
                let mine = self.chunks.iter().skip(lane).step_by(lanes);
                let decode = move || {
                    // Nobody listens any more when one failed.
                    mine.map(|id| self.rebuilder.unverified(&*self.source, NodeKind::Chunk, id))
                        .all(|raw| send.send(raw).is_ok())
                };
                (scope.spawn(decode), receive)
            };
            let lanes: Vec<_> = (0..lanes).map(lane).collect();
            let mut hasher = FileHasher::default();
            let planned = self.layout.chunks.iter().map(|plan| plan.len as usize);
            let hashed = planned
                .zip(lanes.iter().cycle())
                .try_for_each(|(len, (_, receive))| {
                    let raw = receive
                        .recv()
                        .map_err(|_| Error::damage("a chunk was not decoded"))??;
                    if raw.len() != len {
                        return Err(Error::damage("a chunk is not as long as its layout says"));
                    }
                    hasher.update(&raw);
                    interrupt()
                });
            for (thread, receive) in lanes {
                drop(receive);
                // If it panicked, its chunk is missing.
                let _ = thread.join();
            }
            hashed.map(|()| hasher.finish())
        })
    }

    /// Starts rebuilding the chunks of a range in the background; no more than a part of the cache can hold.
    pub fn read_ahead(&self, offset: u64, len: u64) {
        let len = len.min(self.rebuilder.cache_limit() / 4);
        let mut last = None;
        for p in self.parts(offset, len) {
            if last.replace(p.chunk) == Some(p.chunk) {
                continue;
            }
            let Some(id) = self.chunks.get(p.chunk).copied() else {
                return;
            };
            if !self.rebuilder.ahead(&self.source, &id) {
                return;
            }
        }
    }

    /// The tensors that have bytes in chunk `i`.
    pub fn tensors_of_chunk(&self, i: usize) -> Vec<String> {
        let extents = self
            .starts
            .iter()
            .zip(&self.layout.extents)
            .filter(|(_, e)| e.chunk as usize == i);
        let ranges: Vec<_> = extents.map(|(s, e)| (*s, s + u64::from(e.len))).collect();
        let touched = |t: &&crate::format::Tensor| {
            let (from, len) = self.layout.tensor_span(t);
            ranges.iter().any(|(a, b)| from < *b && *a < from + len)
        };
        self.layout
            .tensors
            .iter()
            .filter(touched)
            .map(|t| t.name.clone())
            .collect()
    }

    /// Bytes of the file's chunks in the packs, bases not counted.
    pub fn stored(&self) -> Result<u64> {
        self.chunks
            .iter()
            .try_fold(0, |n, id| Ok(n + u64::from(self.source.meta(id)?.stored_len)))
    }

    /// For the chunks that a range touches: its share of their bytes in the packs (bases not counted), and the largest number
    /// of deltas to apply.
    pub fn stored_range(&self, offset: u64, len: u64) -> Result<(u64, u8)> {
        let mut shares: HashMap<usize, u64> = HashMap::new();
        for p in self.parts(offset, len) {
            *shares.entry(p.chunk).or_default() += p.len as u64;
        }
        let (mut stored, mut depth) = (0, 0);
        for (chunk, bytes) in shares {
            let id = self
                .chunks
                .get(chunk)
                .ok_or_else(|| Error::damage("layout names a chunk that the manifest lacks"))?;
            let record = self.source.meta(id)?;
            let meta = NodeMeta::decode(NodeKind::Chunk, &record.meta)?;
            stored += u64::from(record.stored_len) * bytes / u64::from(meta.raw_len).max(1);
            depth = depth.max(deltas(&*self.source, &meta)?);
        }
        Ok((stored, depth))
    }
}

impl Source for StoredFile {
    fn len(&self) -> u64 {
        self.layout.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let got = self.read(offset, buf.len())?;
        if got.len() != buf.len() {
            return Err(Error::damage("read past the end of a file"));
        }
        buf.copy_from_slice(&got);
        Ok(())
    }
}

impl object::Source for StoredFile {
    fn len(&self) -> u64 {
        self.layout.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        Source::read_at(self, offset, buf)
    }
}

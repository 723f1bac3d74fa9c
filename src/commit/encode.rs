//! Encodes nodes on all cores: chooses a base, encodes, decodes again and compares, appends.

use super::Parts;
use super::chain::{Base, mean, within_bounds};
use super::relative::Relative;
use crate::codec::{self, Codec};
use crate::error::{Error, Kind, Result};
use crate::graph::{Delta, Further, Manifest, NodeKind, NodeMeta};
use crate::id::{Domain, NodeId};
use crate::pack::{Meta, Node, PackRange, PackWriter, Packs};
use crate::rebuild::{NodeSource, Rebuilder};
use crate::tensor::Number;
use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::Scope;

/// Chunks that a thread takes at once, if there are as many: hashed together they cost a third.
const BATCH: usize = 16;
/// Chunks that wait, at most: as one thread reads and hashes, more encoders than it can feed get smaller batches.
const QUEUE: usize = 4 * BATCH;

/// What a chunk may be encoded against.
#[derive(Default)]
pub(super) struct Against {
    /// The chunk at its place in an earlier version.
    pub(super) previous: Option<NodeId>,
    /// The tensor that it is the rounding of, or that is the rounding of it.
    pub(super) relative: Option<Relative>,
}

/// A chunk to encode; its id, or why there is none, is sent back with its place.
pub(super) struct Job {
    pub(super) raw: Vec<u8>,
    pub(super) number: Number,
    pub(super) against: Against,
    pub(super) place: usize,
    pub(super) reply: Sender<(usize, Result<NodeId>)>,
}

/// Encodes against the nodes of a source; by default those of one commit: what it appends, and all that was there before.
pub(super) struct Encoder<S: NodeSource = Pending> {
    pub(super) rebuilder: Arc<Rebuilder>,
    pub(super) source: Arc<S>,
}

/// Nodes that are published, or that this commit has appended.
pub(super) struct Pending {
    packs: Arc<Packs>,
    /// Gone once the commit is finished.
    writer: Mutex<Option<PackWriter>>,
}

impl NodeSource for Pending {
    fn get(&self, id: &NodeId) -> Result<Node> {
        match &*self.writer.lock() {
            Some(w) if w.contains(id) => w.get(id),
            _ => self.packs.get(id),
        }
    }

    fn meta(&self, id: &NodeId) -> Result<Meta> {
        match &*self.writer.lock() {
            Some(w) if w.contains(id) => w.meta(id),
            _ => self.packs.meta(id),
        }
    }
}

impl Pending {
    pub(super) fn contains(&self, id: &NodeId) -> Result<bool> {
        if self.writer.lock().as_ref().is_some_and(|w| w.contains(id)) {
            return Ok(true);
        }
        self.packs.contains(id)
    }

    /// Appends a node unless it is there; the bytes that its record takes.
    pub(super) fn append(&self, kind: NodeKind, id: &NodeId, meta: &NodeMeta, payload: &[u8]) -> Result<u32> {
        let mut writer = self.writer.lock();
        let writer = writer
            .as_mut()
            .ok_or_else(|| Error::new(Kind::Io, "the commit is over"))?;
        match writer.contains(id) {
            true => Ok(0),
            false => writer.append(kind as u8, id, &meta.encode(), payload),
        }
    }
}

/// Starts the encoder threads; they end when the sender is dropped.
pub(super) fn start_workers<'s>(
    scope: &'s Scope<'s, '_>,
    encoder: &'s Encoder,
    threads: usize,
) -> Sender<Job> {
    let threads = threads.max(1);
    let (send, receive) = bounded::<Job>((threads * BATCH).min(QUEUE));
    for _ in 0..threads {
        let receive = receive.clone();
        scope.spawn(move || {
            while let Ok(first) = receive.recv() {
                // The other threads get their share.
                let more = (receive.len() / threads).min(BATCH - 1);
                let jobs: Vec<Job> = std::iter::once(first)
                    .chain(receive.try_iter().take(more))
                    .collect();
                let raws: Vec<&[u8]> = jobs.iter().map(|j| j.raw.as_slice()).collect();
                let hashes = Domain::Chunk.hash_many(&raws);
                for (job, hash) in jobs.into_iter().zip(hashes) {
                    let work = || encoder.chunk(NodeId(hash), &job.raw, job.number, &job.against);
                    let result = catch_unwind(AssertUnwindSafe(work));
                    let result = result.unwrap_or_else(|_| Err(Error::new(Kind::Io, "an encoder failed")));
                    // Nobody listens any more when the file was given up.
                    let _ = job.reply.send((job.place, result.map(|()| NodeId(hash))));
                }
            }
        });
    }
    send
}

impl Encoder {
    pub(super) fn new(parts: &Parts) -> Result<Self> {
        let writer = Mutex::new(Some(parts.packs.writer()?));
        let source = Arc::new(Pending {
            packs: parts.packs.clone(),
            writer,
        });
        Ok(Encoder {
            rebuilder: parts.rebuilder.clone(),
            source,
        })
    }

    pub(super) fn rebuilder(&self) -> &Arc<Rebuilder> {
        &self.rebuilder
    }

    /// Makes what was appended durable.
    pub(super) fn finish(&self) -> Result<PackRange> {
        let writer = self.source.writer.lock().take();
        writer
            .ok_or_else(|| Error::new(Kind::Io, "the commit is over"))?
            .finish()
    }

    /// Stores a chunk, whose id was made of its bytes, unless it is there.
    pub(super) fn chunk(&self, id: NodeId, raw: &[u8], number: Number, against: &Against) -> Result<()> {
        // What follows a relative needs no previous chunk, unless all else fails.
        let previous = against.previous.filter(|_| against.relative.is_none());
        let at_hand = previous.map(|p| self.at_hand(p)).transpose()?.flatten();
        if at_hand
            .as_ref()
            .is_some_and(|a| a.fresh && a.base.id == id && *a.raw == raw)
        {
            return Ok(());
        }
        self.store(NodeKind::Chunk, id, raw, number, against, at_hand)
    }

    /// The base that follows from the previous chunk, with its bytes, if they can be had.
    fn at_hand(&self, previous: NodeId) -> Result<Option<AtHand>> {
        let Some(base) = self.base(NodeKind::Chunk, previous)? else {
            return Ok(None);
        };
        let raw = self.rebuilder.base(&*self.source, &base.id);
        usable(raw.map(|(raw, fresh)| Some(AtHand { base, raw, fresh })))
    }

    /// Stores another node unless it is there.
    pub(super) fn node(
        &self,
        kind: NodeKind,
        id: NodeId,
        raw: &[u8],
        previous: Option<NodeId>,
    ) -> Result<()> {
        let against = Against {
            previous,
            relative: None,
        };
        self.store(kind, id, raw, Number::Bytes, &against, None)
    }

    fn store(
        &self,
        kind: NodeKind,
        id: NodeId,
        raw: &[u8],
        number: Number,
        against: &Against,
        at_hand: Option<AtHand>,
    ) -> Result<()> {
        let known = self.source.contains(&id)?;
        if known && self.reads_back(kind, id, raw)? {
            return Ok(());
        }
        // What replaces a damaged copy stands alone: its own chain may lead through the damage, or back to itself.
        let alone = Against::default();
        let (against, at_hand) = if known { (&alone, None) } else { (against, at_hand) };
        let (meta, payload) = self.best_with(kind, raw, number, against, at_hand)?;
        self.source.append(kind, &id, &meta, &payload).map(|_| ())
    }

    /// Whether a node that is there reads back as these bytes. One that does not is appended again: a commit must not be
    /// acknowledged on top of damage, and the new copy serves the older versions too.
    fn reads_back(&self, kind: NodeKind, id: NodeId, raw: &[u8]) -> Result<bool> {
        match self.rebuilder.node(&*self.source, kind, &id) {
            // A manifest of another encoding is as good, if its chunks are there.
            Ok(there) if kind == NodeKind::Manifest && there != raw => {
                let chunks = Manifest::decode(&there)?.chunks;
                chunks
                    .iter()
                    .try_fold(true, |all, c| Ok(all && self.source.contains(c)?))
            }
            Ok(there) => Ok(there == raw),
            Err(e) if matches!(e.kind(), Kind::NotFound | Kind::Damage) => {
                log::warn!("stored again: {e}");
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }
}

impl<S: NodeSource> Encoder<S> {
    /// How a node is stored: against its relative, or a base on the chain of the previous node, as the chain policy says, or alone where
    /// that is smaller or where there is neither. It was decoded again, and compared.
    pub(super) fn best(
        &self,
        kind: NodeKind,
        raw: &[u8],
        number: Number,
        against: &Against,
    ) -> Result<(NodeMeta, Vec<u8>)> {
        self.best_with(kind, raw, number, against, None)
    }

    /// The same, with the base if it was found already.
    fn best_with(
        &self,
        kind: NodeKind,
        raw: &[u8],
        number: Number,
        against: &Against,
        at_hand: Option<AtHand>,
    ) -> Result<(NodeMeta, Vec<u8>)> {
        let too_long = || {
            Error::new(
                Kind::Limit,
                format!("a {} of {} bytes is too large to store", kind.name(), raw.len()),
            )
        };
        let raw_len = u32::try_from(raw.len())
            .ok()
            .filter(|n| *n <= kind.max_len())
            .ok_or_else(too_long)?;
        let mut found = match &against.relative {
            Some(relative) => usable(self.against_relative(relative, raw, number, raw_len))?,
            None => None,
        };
        // Of the very rounding next to nothing is left: nothing else is as small.
        if found.as_ref().is_none_or(|f| f.1.len() > raw.len() / 64)
            && let Some(previous) = against.previous
        {
            let chunk = Chunk {
                kind,
                raw,
                number,
                raw_len,
            };
            let delta = usable(self.against_chain(&chunk, previous, at_hand))?;
            found = found.into_iter().chain(delta).min_by_key(|f| f.1.len());
        }
        Ok(found.unwrap_or_else(|| self.alone(raw, number, raw_len)))
    }

    /// The bytes without a base.
    fn alone(&self, raw: &[u8], number: Number, raw_len: u32) -> (NodeMeta, Vec<u8>) {
        let encoded = codec::encode(raw, number, None);
        let mut meta = NodeMeta {
            codec: encoded.codec,
            number,
            raw_len,
            delta: None,
        };
        if self.proves(&meta, &encoded.payload, raw, None) {
            return (meta, encoded.payload);
        }
        meta.codec = Codec::Raw;
        (meta, raw.to_vec())
    }

    /// A delta against the base that follows from the previous node, if there is one and room for it.
    fn against_chain(
        &self,
        chunk: &Chunk<'_>,
        previous: NodeId,
        at_hand: Option<AtHand>,
    ) -> Result<Option<(NodeMeta, Vec<u8>)>> {
        let at_hand = match at_hand {
            Some(at_hand) => Some(at_hand),
            None => self.fetch(chunk.kind, self.base(chunk.kind, previous)?)?,
        };
        let step = match at_hand {
            Some(AtHand { base, raw, .. }) => {
                let (meta, payload) = chunk.against(&base, &raw);
                if chunk.has_room(&meta, &payload) {
                    return Ok(self.proven(chunk, meta, payload, raw));
                }
                Some(payload.len() as u64)
            }
            None => None,
        };
        self.against_heads(chunk, previous, step)
    }

    /// A delta against the lower end of the previous node's chain, or alone: what makes the mean of this node and of those like the one
    /// before that can follow it the smallest. `step` is what they take, if that is known.
    fn against_heads(
        &self,
        chunk: &Chunk<'_>,
        previous: NodeId,
        step: Option<u64>,
    ) -> Result<Option<(NodeMeta, Vec<u8>)>> {
        let heads = self.heads(chunk.kind, previous)?;
        let Some(step) = step.or(heads.first().map(|b| b.step)) else {
            return Ok(None);
        };
        let (meta, payload) = self.alone(chunk.raw, chunk.number, chunk.raw_len);
        let mean_of = |meta: &NodeMeta, payload: &[u8]| {
            let len = payload.len() as u32;
            mean(u64::from(len), meta.cost(len), step, chunk.raw_len)
        };
        let mut best = (mean_of(&meta, &payload), meta, payload, None);
        for head in heads {
            let Some(AtHand { base, raw, .. }) = usable(self.fetch(chunk.kind, Some(head)))? else {
                continue;
            };
            let (meta, payload) = chunk.against(&base, &raw);
            let mean = mean_of(&meta, &payload);
            if mean < best.0 && chunk.has_room(&meta, &payload) {
                best = (mean, meta, payload, Some(raw));
            }
        }
        let (_, meta, payload, raw) = best;
        Ok(match raw {
            Some(raw) => self.proven(chunk, meta, payload, raw),
            None => Some((meta, payload)),
        })
    }

    /// A base with its bytes.
    fn fetch(&self, kind: NodeKind, base: Option<Base>) -> Result<Option<AtHand>> {
        let Some(base) = base else { return Ok(None) };
        let raw = match kind {
            NodeKind::Chunk => self.rebuilder.chunk(&*self.source, &base.id)?,
            _ => Arc::new(self.rebuilder.node(&*self.source, kind, &base.id)?),
        };
        let fresh = false;
        Ok(Some(AtHand { base, raw, fresh }))
    }

    /// What was encoded, if it decodes to the chunk again.
    fn proven(
        &self,
        chunk: &Chunk<'_>,
        meta: NodeMeta,
        payload: Vec<u8>,
        base: Arc<Vec<u8>>,
    ) -> Option<(NodeMeta, Vec<u8>)> {
        self.proves(&meta, &payload, chunk.raw, Some(Arc::unwrap_or_clone(base)))
            .then_some((meta, payload))
    }

    /// Whether the payload decodes to the raw bytes. If not, a codec is at fault: the bytes are stored another way.
    pub(super) fn proves(&self, meta: &NodeMeta, payload: &[u8], raw: &[u8], base: Option<Vec<u8>>) -> bool {
        let mut buf = base.unwrap_or_default();
        let done = codec::decode(meta.codec, meta.number, payload, raw.len(), &mut buf);
        let ok = done.is_ok() && buf == raw;
        if !ok {
            log::error!(
                "codec {} does not give back what it was given; stored another way",
                meta.codec.name()
            );
        }
        ok
    }

    /// A node's meta and payload length; none for what is not there or of another kind.
    pub(super) fn meta_of(&self, kind: NodeKind, id: &NodeId) -> Result<Option<(NodeMeta, u32)>> {
        match self.source.meta(id) {
            Ok(m) if m.kind == kind as u8 => Ok(Some((NodeMeta::decode(kind, &m.meta)?, m.payload_len))),
            Ok(_) => Ok(None),
            // A base that is gone or damaged costs space, not the commit.
            Err(e) if matches!(e.kind(), Kind::NotFound | Kind::Damage) => {
                log::info!("cannot use a base: {e}");
                Ok(None)
            }
            Err(e) => Err(e),
        }
    }
}

/// What was encoded, if its base can be had: one that is gone or damaged costs space, not the commit.
fn usable<T>(encoded: Result<Option<T>>) -> Result<Option<T>> {
    match encoded {
        Err(e) if matches!(e.kind(), Kind::NotFound | Kind::Damage) => {
            log::info!("cannot use a base: {e}");
            Ok(None)
        }
        done => done,
    }
}

/// A base and its bytes.
struct AtHand {
    base: Base,
    raw: Arc<Vec<u8>>,
    /// Read from the packs just now. What was in memory already says nothing of the copy there, which may have been damaged since.
    fresh: bool,
}

/// What is encoded.
struct Chunk<'a> {
    kind: NodeKind,
    raw: &'a [u8],
    number: Number,
    raw_len: u32,
}

impl Chunk<'_> {
    /// As a delta against a base, or alone where that is smaller; not proven yet.
    fn against(&self, base: &Base, base_raw: &[u8]) -> (NodeMeta, Vec<u8>) {
        let encoded = codec::encode(self.raw, self.number, Some(base_raw));
        let delta = Delta {
            base: base.id,
            further: Further::default(),
            depth: base.depth.saturating_add(1),
            revision: base.revision,
            cost: base.cost.saturating_add(encoded.payload.len() as u64),
        };
        let meta = NodeMeta {
            codec: encoded.codec,
            number: self.number,
            raw_len: self.raw_len,
            delta: encoded.codec.needs_base().then_some(delta),
        };
        (meta, encoded.payload)
    }

    /// Whether a rebuild's work is within its bounds.
    fn has_room(&self, meta: &NodeMeta, payload: &[u8]) -> bool {
        let cost = meta.cost(payload.len() as u32);
        meta.delta.is_none() || within_bounds(meta.codec, meta.depth(), cost, self.raw_len)
    }
}

//! Encodes nodes on all cores: chooses a base, encodes, decodes again and compares, appends.

use super::Parts;
use super::relative::Relative;
use crate::codec::{self, Codec};
use crate::error::{Error, Kind, Result};
use crate::graph::{Delta, Further, MANY_DEPTH, Manifest, NodeKind, NodeMeta};
use crate::id::NodeId;
use crate::pack::{Meta, Node, PackRange, PackWriter, Packs};
use crate::rebuild::{NodeSource, Rebuilder};
use crate::tensor::Number;
use crossbeam_channel::{Sender, bounded};
use parking_lot::Mutex;
use std::sync::Arc;
use std::thread::Scope;

/// Deltas that a rebuild may have to apply.
const MAX_DEPTH: u8 = 32;
/// A rebuild reads at most this many times the chunk's raw size …
const MAX_COST: u64 = 3;
/// … and a base leaves this share of it (a quarter) to what builds on it.
const LEFT: u64 = 4;

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

    fn append(&self, kind: NodeKind, id: &NodeId, meta: &NodeMeta, payload: &[u8]) -> Result<()> {
        let mut writer = self.writer.lock();
        let writer = writer
            .as_mut()
            .ok_or_else(|| Error::new(Kind::Io, "the commit is over"))?;
        if !writer.contains(id) {
            writer.append(kind as u8, id, &meta.encode(), payload)?;
        }
        Ok(())
    }
}

/// Starts the encoder threads; they end when the sender is dropped.
pub(super) fn start_workers<'s>(
    scope: &'s Scope<'s, '_>,
    encoder: &'s Encoder,
    threads: usize,
) -> Sender<Job> {
    let (send, receive) = bounded::<Job>(threads.max(1) * 2);
    for _ in 0..threads.max(1) {
        let receive = receive.clone();
        scope.spawn(move || {
            for job in receive {
                let Job {
                    raw,
                    number,
                    against,
                    place,
                    reply,
                } = job;
                let work = || encoder.chunk(&raw, number, &against);
                let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                let result = result.unwrap_or_else(|_| Err(Error::new(Kind::Io, "an encoder failed")));
                // Nobody listens any more when the file was given up.
                let _ = reply.send((place, result));
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

    /// Stores a chunk unless it is there.
    pub(super) fn chunk(&self, raw: &[u8], number: Number, against: &Against) -> Result<NodeId> {
        // What follows a relative needs no previous chunk, unless all else fails.
        let previous = against.previous.filter(|_| against.relative.is_none());
        let at_hand = previous.map(|p| self.at_hand(p)).transpose()?.flatten();
        let id = NodeId(crate::id::Domain::Chunk.hash(raw));
        if at_hand
            .as_ref()
            .is_some_and(|a| a.fresh && a.base.id == id && *a.raw == raw)
        {
            return Ok(id);
        }
        self.store(NodeKind::Chunk, id, raw, number, against, at_hand)?;
        Ok(id)
    }

    /// The base that follows from the previous chunk, with its bytes, if they can be had.
    fn at_hand(&self, previous: NodeId) -> Result<Option<AtHand>> {
        let Some(base) = self.base(NodeKind::Chunk, previous)? else {
            return Ok(None);
        };
        let fresh = !self.rebuilder.expects(&base.id);
        let raw = self.rebuilder.base(&*self.source, &base.id);
        usable(raw.map(|raw| Some(AtHand { base, raw, fresh })))
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
        self.source.append(kind, &id, &meta, &payload)
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
        if found.as_ref().is_none_or(|f| f.1.len() > raw.len() / 64) {
            let delta = match (at_hand, against.previous) {
                (Some(at_hand), _) => self.against(&at_hand.base, at_hand.raw, raw, number, raw_len),
                (None, Some(previous)) => self.against_previous(kind, previous, raw, number, raw_len),
                (None, None) => Ok(None),
            };
            found = found.into_iter().chain(usable(delta)?).min_by_key(|f| f.1.len());
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

    /// The bytes as a delta against the base that follows from the previous node, if there is one.
    fn against_previous(
        &self,
        kind: NodeKind,
        previous: NodeId,
        raw: &[u8],
        number: Number,
        raw_len: u32,
    ) -> Result<Option<(NodeMeta, Vec<u8>)>> {
        let Some(base) = self.base(kind, previous)? else {
            return Ok(None);
        };
        let base_raw = match kind {
            NodeKind::Chunk => self.rebuilder.chunk(&*self.source, &base.id)?,
            _ => Arc::new(self.rebuilder.node(&*self.source, kind, &base.id)?),
        };
        self.against(&base, base_raw, raw, number, raw_len)
    }

    /// The bytes as a delta against a base, or alone where that is smaller; none if a rebuild's work would exceed its bound.
    fn against(
        &self,
        base: &Base,
        base_raw: Arc<Vec<u8>>,
        raw: &[u8],
        number: Number,
        raw_len: u32,
    ) -> Result<Option<(NodeMeta, Vec<u8>)>> {
        let encoded = codec::encode(raw, number, Some(&base_raw));
        let cost = base.cost + encoded.payload.len() as u64;
        if encoded.codec.needs_base() && !within_bounds(encoded.codec, base.depth + 1, cost, raw_len) {
            return Ok(None);
        }
        let delta = Delta {
            base: base.id,
            further: Further::default(),
            depth: base.depth + 1,
            revision: base.revision,
            cost,
        };
        let delta = encoded.codec.needs_base().then_some(delta);
        let meta = NodeMeta {
            codec: encoded.codec,
            number,
            raw_len,
            delta,
        };
        Ok(self
            .proves(&meta, &encoded.payload, raw, Some(Arc::unwrap_or_clone(base_raw)))
            .then_some((meta, encoded.payload)))
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

    /// The base for the revision that follows `previous`, found by walking down its chain: what the skip-delta rule says, or the next
    /// below it that leaves enough of the bounds.
    fn base(&self, kind: NodeKind, previous: NodeId) -> Result<Option<Base>> {
        let Some(meta) = self.meta_of(kind, &previous)? else {
            return Ok(None);
        };
        let revision = meta.0.revision().saturating_add(1);
        let target = base_revision(revision);
        let (mut at, mut meta) = (previous, meta);
        while let Some(delta) = meta.0.delta {
            let most = MAX_COST * u64::from(meta.0.raw_len);
            if meta.0.revision() <= target && delta.depth < MAX_DEPTH && delta.cost <= most - most / LEFT {
                break;
            }
            // Below a relative the chain goes on with chunks of other numbers.
            if meta.0.codec.takes_many() {
                return Ok(None);
            }
            at = delta.base;
            match self.meta_of(kind, &at)? {
                // A chain that does not end is damage.
                Some(m) if m.0.depth() < delta.depth => meta = m,
                _ => return Ok(None),
            }
        }
        let (depth, cost) = (meta.0.depth(), meta.0.cost(meta.1));
        Ok(Some(Base {
            id: at,
            depth,
            revision,
            cost,
        }))
    }

    /// A node's meta and payload length; none for what is not there or of another kind.
    pub(super) fn meta_of(&self, kind: NodeKind, id: &NodeId) -> Result<Option<(NodeMeta, u32)>> {
        match self.source.meta(id) {
            Ok(m) if m.kind == kind as u8 => Ok(Some((NodeMeta::decode(kind, &m.meta)?, m.payload_len))),
            Ok(_) => Ok(None),
            // A base that is gone or damaged costs space, not the commit.
            Err(e) if matches!(e.kind(), Kind::NotFound | Kind::Damage) => {
                log::warn!("cannot use a base: {e}");
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
            log::warn!("cannot use a base: {e}");
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

struct Base {
    id: NodeId,
    depth: u8,
    /// Of the new node.
    revision: u32,
    cost: u64,
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

//! Version + path + range → bytes: nodes are decoded chain by chain, verified, and kept in a byte-weighted LRU.

mod ahead;
mod file;
mod view;

pub use file::{Slice, StoredFile};
pub use view::VirtualFile;

use crate::cache::ByteLru;
use crate::codec;
use crate::error::{Error, Result};
use crate::graph::{MANY_DEPTH, NodeKind, NodeMeta};
use crate::id::{Domain, NodeId};
use crate::pack::{Meta, Node, Packs};
use ::bytes::Bytes;
use ahead::{Ahead, Pool};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Where encoded nodes come from: the packs, or a commit that is not published yet.
pub trait NodeSource: Send + Sync {
    /// The whole record of a node.
    fn get(&self, id: &NodeId) -> Result<Node>;
    /// A node's kind and meta, without its payload.
    fn meta(&self, id: &NodeId) -> Result<Meta>;
}

impl NodeSource for Packs {
    fn get(&self, id: &NodeId) -> Result<Node> {
        Packs::get(self, id)
    }

    fn meta(&self, id: &NodeId) -> Result<Meta> {
        Packs::meta(self, id)
    }
}

/// How many deltas are applied on the longest way from a node to a root. Only where its depth leaves that open are others read.
pub fn deltas(source: &dyn NodeSource, meta: &NodeMeta) -> Result<u8> {
    longest(source, meta, &mut { MAX_NODES })
}

fn longest(source: &dyn NodeSource, meta: &NodeMeta, left: &mut usize) -> Result<u8> {
    let Some(delta) = meta.delta.filter(|d| d.depth >= MANY_DEPTH) else {
        return Ok(meta.depth());
    };
    let mut most = 0;
    for base in delta.bases() {
        let base = NodeMeta::decode(NodeKind::Chunk, &source.meta(&base)?.meta)?;
        // Depths fall along a chain, unless it is damaged.
        if base.depth() >= delta.depth || *left == 0 {
            return Err(Error::damage("chain of deltas does not end"));
        }
        *left -= 1;
        most = most.max(longest(source, &base, left)?);
    }
    Ok(most.saturating_add(1))
}

/// A chain longer than this is damage: no version of zspace writes one.
pub const MAX_CHAIN: usize = 64;
/// A node whose base is made of several chunks is the root of its chain, and each of them has a chain of its own. So often may
/// that be so one within the other …
const MAX_NESTED: usize = 3;
/// … and so many nodes may be read in all. The depths that commit and repack allow keep well within both.
pub const MAX_NODES: usize = 1024;

/// Bytes to rebuild ahead of a reader who wants all: a batch for each of a few threads, and the next ones waiting.
pub const AHEAD: usize = 64 << 20;

/// What was done since the store was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Nodes asked of the cache or rebuilt, bases not counted.
    pub asked: u64,
    /// Encoded nodes read from packs, bases included.
    pub read: u64,
    /// Payload bytes read from packs.
    pub read_bytes: u64,
    /// Raw bytes rebuilt.
    pub rebuilt_bytes: u64,
}

/// Rebuilds nodes through one shared cache.
pub struct Rebuilder {
    cache: Mutex<ByteLru<NodeId, Vec<u8>>>,
    /// What is being decoded, and, with nothing, what waits to be.
    flights: Mutex<HashMap<NodeId, Option<Arc<Flight>>>>,
    pool: Pool,
    asked: AtomicU64,
    read: AtomicU64,
    read_bytes: AtomicU64,
    rebuilt_bytes: AtomicU64,
}

/// One decode that several readers wait for.
#[derive(Default)]
struct Flight {
    done: Mutex<Option<Result<Arc<Vec<u8>>>>>,
    landed: Condvar,
}

impl Rebuilder {
    /// A rebuilder whose cache holds at most `memory` bytes and that reads ahead on `threads` threads.
    pub fn new(memory: u64, threads: usize) -> Arc<Self> {
        Arc::new(Rebuilder {
            cache: Mutex::new(ByteLru::new(memory)),
            flights: Mutex::default(),
            pool: Pool::new(threads),
            asked: AtomicU64::new(0),
            read: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            rebuilt_bytes: AtomicU64::new(0),
        })
    }

    /// The raw bytes of a chunk, verified against its id. However many readers ask at once, it is decoded once.
    pub fn chunk(&self, source: &dyn NodeSource, id: &NodeId) -> Result<Arc<Vec<u8>>> {
        self.asked.fetch_add(1, Relaxed);
        if let Some(hit) = self.cache.lock().get(id) {
            return Ok(hit);
        }
        let flight = match self.take_off(id) {
            Ok(landing) => return landing.land(self.node(source, NodeKind::Chunk, id)),
            Err(flight) => flight,
        };
        let mut done = flight.done.lock();
        loop {
            match &*done {
                Some(Ok(raw)) => return Ok(raw.clone()),
                Some(Err(e)) => return Err(e.share()),
                None => flight.landed.wait(&mut done),
            }
        }
    }

    /// Begins a flight, unless there is one. One that waits in the queue for its turn need not be waited for.
    fn take_off(&self, id: &NodeId) -> std::result::Result<Landing<'_>, Arc<Flight>> {
        let mut flights = self.flights.lock();
        if let Some(Some(flight)) = flights.get(id) {
            return Err(flight.clone());
        }
        let flight = Arc::<Flight>::default();
        flights.insert(*id, Some(flight.clone()));
        Ok(Landing {
            rebuilder: self,
            id: *id,
            flight,
        })
    }

    /// How many threads rebuild ahead.
    fn threads(&self) -> usize {
        self.pool.threads
    }

    /// Has a chunk rebuilt in the background, unless it is in the cache or on its way there. Gives `false` when there is no room in
    /// the queue.
    fn ahead(self: &Arc<Self>, source: &Arc<dyn NodeSource>, id: &NodeId) -> bool {
        if self.cache.lock().contains(id) {
            return true;
        }
        match self.flights.lock().entry(*id) {
            Entry::Occupied(_) => return true,
            Entry::Vacant(e) => drop(e.insert(None)),
        }
        let queued = self.pool.try_run(Ahead {
            rebuilder: self.clone(),
            source: source.clone(),
            id: *id,
        });
        if !queued {
            self.turn_of(id);
        }
        queued
    }

    /// Takes a chunk out of the queue, unless somebody who needed it did.
    fn turn_of(&self, id: &NodeId) -> bool {
        let mut flights = self.flights.lock();
        let waits = matches!(flights.get(id), Some(None));
        if waits {
            flights.remove(id);
        }
        waits
    }

    /// Rebuilds what waited in the queue. The hashes are computed side by side.
    fn rebuild_ahead(&self, queued: &[Ahead]) {
        let mut raws = Vec::with_capacity(queued.len());
        // All take off first: who needs one of them soon should wait for it rather than rebuild it alone.
        let flights: Vec<_> = queued
            .iter()
            .filter(|a| self.turn_of(&a.id))
            .filter_map(|a| Some((a, self.take_off(&a.id).ok()?)))
            .collect();
        for (ahead, landing) in flights {
            // What goes wrong with one is not told of the others.
            let decode = || self.unverified(&*ahead.source, NodeKind::Chunk, &ahead.id);
            match catch_unwind(AssertUnwindSafe(decode)) {
                Ok(Ok(raw)) => raws.push((landing, raw)),
                Ok(Err(e)) => drop(landing.land(Err(e))),
                Err(_) => drop(landing),
            }
        }
        let bytes: Vec<&[u8]> = raws.iter().map(|(_, raw)| raw.as_slice()).collect();
        let hashes = Domain::Chunk.hash_many(&bytes);
        for ((landing, raw), hash) in raws.into_iter().zip(hashes) {
            let id = landing.id;
            drop(landing.land(verified(NodeKind::Chunk, &id, Some(NodeId(hash)), raw)));
        }
    }

    /// The raw bytes of a node of any kind: its chain is collected down to its root or a cached base, then applied in one
    /// buffer. All but manifests (which their file's hash verifies) are verified against their id.
    pub fn node(&self, source: &dyn NodeSource, kind: NodeKind, id: &NodeId) -> Result<Vec<u8>> {
        let raw = self.unverified(source, kind, id)?;
        let real = kind.id_of(&raw);
        verified(kind, id, real, raw)
    }

    /// The bytes that the chain gives, whatever their hash.
    fn unverified(&self, source: &dyn NodeSource, kind: NodeKind, id: &NodeId) -> Result<Vec<u8>> {
        let raw = self
            .apply(source, kind, id, 0, &mut { MAX_NODES })
            .map_err(|e| told(kind, id, e))?;
        self.rebuilt_bytes.fetch_add(raw.len() as u64, Relaxed);
        Ok(raw)
    }

    /// Applies a chain, unverified; one that is `nested` in another may be in the cache. `left` is how many nodes may be read.
    fn apply(
        &self,
        source: &dyn NodeSource,
        kind: NodeKind,
        id: &NodeId,
        nested: usize,
        left: &mut usize,
    ) -> Result<Vec<u8>> {
        let mut chain: Vec<(NodeMeta, Bytes)> = Vec::new();
        let mut buf = Vec::new();
        let mut next = Some(*id);
        while let Some(at) = next {
            if (nested > 0 || !chain.is_empty())
                && let Some(hit) = self.cache.lock().get(&at)
            {
                buf.extend_from_slice(&hit);
                break;
            }
            if chain.len() == MAX_CHAIN || *left == 0 {
                return Err(Error::damage("chain of deltas does not end"));
            }
            *left -= 1;
            let node = source.get(&at)?;
            if node.kind != kind as u8 {
                return Err(Error::damage(format!("is a record of kind {}", node.kind)));
            }
            let meta = NodeMeta::decode(kind, &node.meta)?;
            self.read.fetch_add(1, Relaxed);
            self.read_bytes.fetch_add(node.payload.len() as u64, Relaxed);
            next = match meta.delta {
                Some(delta) if meta.codec.takes_many() => {
                    if nested == MAX_NESTED {
                        return Err(Error::damage("related tensors are nested too deep"));
                    }
                    for base in delta.bases() {
                        buf.append(&mut self.apply(source, kind, &base, nested + 1, left)?);
                    }
                    None
                }
                delta => delta.map(|d| d.base),
            };
            chain.push((meta, node.payload));
        }
        for (meta, payload) in chain.iter().rev() {
            codec::decode(meta.codec, meta.number, payload, meta.raw_len as usize, &mut buf)?;
        }
        Ok(buf)
    }

    /// A chunk for a delta to be made against: its records' checksums are right, but it is neither hashed nor kept. Were it wrong all
    /// the same, whoever reads what was made of it would find out by that one's hash. Also tells whether it was read just now.
    pub fn base(&self, source: &dyn NodeSource, id: &NodeId) -> Result<(Arc<Vec<u8>>, bool)> {
        if let Some(hit) = self.cache.lock().get(id) {
            return Ok((hit, false));
        }
        let raw = self.unverified(source, NodeKind::Chunk, id)?;
        Ok((Arc::new(raw), true))
    }

    /// Puts a chunk into the cache whose bytes were found to be right.
    pub fn keep(&self, id: NodeId, raw: Vec<u8>) {
        let len = raw.len() as u64;
        self.cache.lock().put(id, Arc::new(raw), len);
    }

    /// Bytes in the cache.
    pub fn cached_bytes(&self) -> u64 {
        self.cache.lock().used()
    }

    /// The most bytes that the cache holds.
    pub fn cache_limit(&self) -> u64 {
        self.cache.lock().capacity()
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        Counters {
            asked: self.asked.load(Relaxed),
            read: self.read.load(Relaxed),
            read_bytes: self.read_bytes.load(Relaxed),
            rebuilt_bytes: self.rebuilt_bytes.load(Relaxed),
        }
    }
}

/// The bytes, if `real`, the id that they have, is the one asked for; those of a manifest have none.
fn verified(kind: NodeKind, id: &NodeId, real: Option<NodeId>, raw: Vec<u8>) -> Result<Vec<u8>> {
    match real {
        Some(real) if real != *id => {
            let e = Error::damage("rebuilt bytes do not have the hash that names them");
            Err(told(kind, id, e))
        }
        _ => Ok(raw),
    }
}

/// The error with what it is about.
fn told(kind: NodeKind, id: &NodeId, e: Error) -> Error {
    e.context(format_args!("{} {}", kind.name(), id.short()))
}

/// Ends a flight: removes it and wakes the waiters, with an error if the leader did not get to an answer.
struct Landing<'a> {
    rebuilder: &'a Rebuilder,
    id: NodeId,
    flight: Arc<Flight>,
}

impl Landing<'_> {
    /// Gives the bytes to the waiters and to the cache.
    fn land(self, result: Result<Vec<u8>>) -> Result<Arc<Vec<u8>>> {
        let result = result.map(Arc::new);
        if let Ok(raw) = &result {
            let mut cache = self.rebuilder.cache.lock();
            cache.put(self.id, raw.clone(), raw.len() as u64);
        }
        *self.flight.done.lock() = Some(match &result {
            Ok(raw) => Ok(raw.clone()),
            Err(e) => Err(e.share()),
        });
        result
    }
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        self.rebuilder.flights.lock().remove(&self.id);
        self.flight
            .done
            .lock()
            .get_or_insert_with(|| Err(Error::damage("the decoder failed")));
        self.flight.landed.notify_all();
    }
}

#[cfg(test)]
mod tests;

//! Version + path + range → bytes: nodes are decoded chain by chain, verified, and kept in a byte-weighted LRU.

mod ahead;
mod file;
mod view;

pub use file::{Slice, StoredFile};
pub use view::VirtualFile;

use crate::cache::ByteLru;
use crate::codec;
use crate::error::{Error, Result};
use crate::graph::{NodeKind, NodeMeta};
use crate::id::NodeId;
use crate::pack::{Meta, Node, Packs};
use ::bytes::Bytes;
use ahead::Pool;
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
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

/// A chain longer than this is damage: no version of zspace writes one.
pub const MAX_CHAIN: usize = 64;
/// A node whose base is made of several chunks is the root of its chain, and each of them has a chain of its own. So often may
/// that be so one within the other …
const MAX_NESTED: usize = 3;
/// … and so many nodes may be read in all. The depths that commit and repack allow keep well within both.
pub const MAX_NODES: usize = 1024;

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
    flights: Mutex<HashMap<NodeId, Arc<Flight>>>,
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
        let (flight, leads) = match self.flights.lock().entry(*id) {
            Entry::Occupied(e) => (e.get().clone(), false),
            Entry::Vacant(e) => (e.insert(Arc::default()).clone(), true),
        };
        if !leads {
            let mut done = flight.done.lock();
            loop {
                match &*done {
                    Some(Ok(raw)) => return Ok(raw.clone()),
                    Some(Err(e)) => return Err(e.share()),
                    None => flight.landed.wait(&mut done),
                }
            }
        }
        // The waiters are woken whatever happens here, a panic of a decoder included.
        let guard = Landing {
            rebuilder: self,
            id,
            flight: &flight,
        };
        let result = self.node(source, NodeKind::Chunk, id).map(Arc::new);
        if let Ok(raw) = &result {
            self.cache.lock().put(*id, raw.clone(), raw.len() as u64);
        }
        guard.land(match &result {
            Ok(raw) => Ok(raw.clone()),
            Err(e) => Err(e.share()),
        });
        result
    }

    /// Whether the chunk is in the cache or on its way there: asking for it need not read the pack then.
    pub fn expects(&self, id: &NodeId) -> bool {
        self.cache.lock().contains(id) || self.flights.lock().contains_key(id)
    }

    /// The raw bytes of a node of any kind: its chain is collected down to its root or a cached base, then applied in one
    /// buffer. All but manifests (which their file's hash verifies) are verified against their id.
    pub fn node(&self, source: &dyn NodeSource, kind: NodeKind, id: &NodeId) -> Result<Vec<u8>> {
        self.decode(source, kind, id)
            .map_err(|e| e.context(format_args!("{} {}", kind.name(), id.short())))
    }

    fn decode(&self, source: &dyn NodeSource, kind: NodeKind, id: &NodeId) -> Result<Vec<u8>> {
        let mut left = MAX_NODES;
        let buf = self.apply(source, kind, id, 0, &mut left)?;
        self.rebuilt_bytes.fetch_add(buf.len() as u64, Relaxed);
        match kind.id_of(&buf) {
            Some(real) if real != *id => Err(Error::damage(
                "rebuilt bytes do not have the hash that names them",
            )),
            _ => Ok(buf),
        }
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
        let raw = self.apply(source, NodeKind::Chunk, id, 0, &mut { MAX_NODES })?;
        self.rebuilt_bytes.fetch_add(raw.len() as u64, Relaxed);
        Ok((Arc::new(raw), true))
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

    /// Runs `work` on a read-ahead thread, or not at all when they are busy enough.
    fn spawn(&self, work: Box<dyn FnOnce() + Send>) -> bool {
        self.pool.try_run(work)
    }
}

/// Ends a flight: removes it and wakes the waiters, with an error if the leader did not get to an answer.
struct Landing<'a> {
    rebuilder: &'a Rebuilder,
    id: &'a NodeId,
    flight: &'a Flight,
}

impl Landing<'_> {
    fn land(self, result: Result<Arc<Vec<u8>>>) {
        *self.flight.done.lock() = Some(result);
    }
}

impl Drop for Landing<'_> {
    fn drop(&mut self) {
        self.rebuilder.flights.lock().remove(self.id);
        self.flight
            .done
            .lock()
            .get_or_insert_with(|| Err(Error::damage("the decoder failed")));
        self.flight.landed.notify_all();
    }
}

#[cfg(test)]
mod tests;

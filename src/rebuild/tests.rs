use super::*;
use crate::codec::Codec;
use crate::error::{Kind, never};
use crate::graph::{Delta, Further};
use crate::tensor::Number;
use std::sync::Barrier;
use std::sync::atomic::AtomicUsize;

/// Nodes in memory, counting what is read.
#[derive(Default)]
struct Nodes {
    map: Mutex<HashMap<NodeId, (NodeMeta, Vec<u8>)>>,
    reads: AtomicUsize,
    slow: bool,
}

impl NodeSource for Nodes {
    fn get(&self, id: &NodeId) -> Result<Node> {
        self.reads.fetch_add(1, Relaxed);
        if self.slow {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        let map = self.map.lock();
        let (meta, payload) = map
            .get(id)
            .ok_or_else(|| Error::new(crate::error::Kind::NotFound, "gone"))?;
        Ok(Node {
            kind: NodeKind::Chunk as u8,
            meta: meta.encode(),
            payload: payload.clone().into(),
        })
    }

    fn meta(&self, id: &NodeId) -> Result<Meta> {
        let n = self.get(id)?;
        Ok(Meta {
            kind: n.kind,
            payload_len: n.payload.len() as u32,
            stored_len: 0,
            meta: n.meta,
        })
    }
}

impl Nodes {
    fn put(&self, raw: &[u8], base: Option<(NodeId, &[u8])>) -> NodeId {
        let id = NodeKind::Chunk.id_of(raw).unwrap();
        let e = match base {
            Some((_, base)) => codec::encode_as(Codec::XorPlanes, raw, Number::F32, Some(base)).unwrap(),
            None => codec::encode(raw, Number::F32, None),
        };
        let delta = base.map(|(base, _)| Delta {
            base,
            further: Further::default(),
            depth: 1,
            revision: 1,
            cost: 1,
        });
        let meta = NodeMeta {
            codec: e.codec,
            number: Number::F32,
            raw_len: raw.len() as u32,
            delta,
        };
        self.map.lock().insert(id, (meta, e.payload));
        id
    }
}

fn chain(n: u8) -> (Nodes, Vec<NodeId>) {
    let nodes = Nodes::default();
    let raw = |i: u8| {
        (0..4096u32)
            .map(|x| if x % 7 == 0 { i } else { x as u8 })
            .collect::<Vec<_>>()
    };
    let mut ids = vec![nodes.put(&raw(0), None)];
    for i in 1..n {
        ids.push(nodes.put(&raw(i), Some((ids[usize::from(i) - 1], &raw(i - 1)))));
    }
    (nodes, ids)
}

#[test]
fn a_chain_is_applied_from_its_root() {
    let (nodes, ids) = chain(10);
    let r = Rebuilder::new(1 << 20, 1);
    let raw = r.chunk(&nodes, &ids[9]).unwrap();
    assert_eq!(raw[7], 9);
    assert_eq!(nodes.reads.load(Relaxed), 10);
    // A base that is cached ends the walk.
    r.chunk(&nodes, &ids[9]).unwrap();
    assert_eq!(nodes.reads.load(Relaxed), 10);
    assert_eq!(r.counters().asked, 2);
}

#[test]
fn a_cached_base_is_where_the_chain_starts() {
    let (nodes, ids) = chain(10);
    let r = Rebuilder::new(1 << 20, 1);
    r.chunk(&nodes, &ids[8]).unwrap();
    let before = nodes.reads.load(Relaxed);
    r.chunk(&nodes, &ids[9]).unwrap();
    assert_eq!(nodes.reads.load(Relaxed), before + 1);
}

#[test]
fn what_does_not_hash_to_its_id_is_never_served() {
    let (nodes, ids) = chain(3);
    let other = nodes.map.lock().get(&ids[0]).cloned().unwrap();
    nodes.map.lock().insert(ids[2], other);
    let r = Rebuilder::new(1 << 20, 1);
    assert_eq!(
        r.chunk(&nodes, &ids[2]).unwrap_err().kind(),
        crate::error::Kind::Damage
    );
    assert_eq!(r.cached_bytes(), 0);
}

#[test]
fn a_chain_that_bites_its_tail_is_damage() {
    let (nodes, ids) = chain(3);
    let mut map = nodes.map.lock();
    let (mut meta, payload) = map.get(&ids[1]).cloned().unwrap();
    meta.delta = meta.delta.map(|d| Delta { base: ids[2], ..d });
    map.insert(ids[1], (meta, payload));
    drop(map);
    let r = Rebuilder::new(1 << 20, 1);
    assert_eq!(
        r.chunk(&nodes, &ids[2]).unwrap_err().kind(),
        crate::error::Kind::Damage
    );
}

#[test]
fn many_readers_share_one_decode() {
    let (mut nodes, ids) = chain(1);
    nodes.slow = true;
    let r = Rebuilder::new(1 << 20, 1);
    let start = Barrier::new(8);
    std::thread::scope(|s| {
        for _ in 0..8 {
            s.spawn(|| {
                start.wait();
                assert_eq!(r.chunk(&nodes, &ids[0]).unwrap().len(), 4096);
            });
        }
    });
    assert_eq!(nodes.reads.load(Relaxed), 1);
}

#[test]
fn a_failure_reaches_every_waiter_and_is_not_remembered() {
    let (mut nodes, ids) = chain(1);
    nodes.slow = true;
    let (missing, good) = (NodeId([1; 32]), ids[0]);
    let r = Rebuilder::new(1 << 20, 1);
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                assert_eq!(
                    r.chunk(&nodes, &missing).unwrap_err().kind(),
                    crate::error::Kind::NotFound
                )
            });
        }
    });
    assert!(r.chunk(&nodes, &good).is_ok());
    assert!(r.flights.lock().is_empty());
}

#[test]
fn the_cache_keeps_to_its_size() {
    let (nodes, ids) = chain(20);
    let r = Rebuilder::new(10_000, 1);
    for id in &ids {
        r.chunk(&nodes, id).unwrap();
        assert!(r.cached_bytes() <= 10_000);
    }
}

/// A bf16 node that is the rounding of these, one after the other.
fn rounded(nodes: &Nodes, raw: &[u8], bases: &[NodeId]) -> NodeId {
    let id = NodeKind::Chunk.id_of(raw).unwrap();
    let delta = Delta {
        base: bases[0],
        further: Further::new(&bases[1..]).unwrap(),
        depth: 1,
        revision: 0,
        cost: 1,
    };
    let meta = NodeMeta {
        codec: Codec::Rounded,
        number: Number::BF16,
        raw_len: raw.len() as u32,
        delta: Some(delta),
    };
    let len = (raw.len() * 2) as u32;
    let mut payload = crate::bytes::Writer::new();
    payload
        .u8(Number::F32.tag())
        .varint(1)
        .varint(0)
        .varint(u64::from(len))
        .u8(Codec::Same.tag());
    nodes.map.lock().insert(id, (meta, payload.finish()));
    id
}

#[test]
fn a_base_can_be_made_of_several_chains() {
    let (nodes, ids) = chain(5);
    let r = Rebuilder::new(1 << 20, 1);
    let wide = [
        r.chunk(&nodes, &ids[2]).unwrap(),
        r.chunk(&nodes, &ids[4]).unwrap(),
    ]
    .map(|c| c.to_vec());
    let mut raw = Vec::new();
    codec::convert(Number::F32, &wide.concat(), Number::BF16, &mut raw);
    let id = rounded(&nodes, &raw, &[ids[2], ids[4]]);
    for r in [r, Rebuilder::new(0, 1)] {
        assert!(*r.chunk(&nodes, &id).unwrap() == raw);
    }
    // A delta goes on from there.
    let mut next = raw.clone();
    next[0] ^= 1;
    let next_id = nodes.put(&next, Some((id, &raw)));
    let r = Rebuilder::new(0, 1);
    assert!(*r.chunk(&nodes, &next_id).unwrap() == next);
    assert_eq!(r.counters().read, 10);
}

#[test]
fn bases_within_bases_come_to_an_end() {
    let (nodes, ids) = chain(1);
    let r = Rebuilder::new(0, 1);
    // Six of itself, and so on for ever.
    let id = rounded(&nodes, &[1; 2048], &[ids[0]]);
    let (mut meta, payload) = nodes.map.lock().get(&id).cloned().unwrap();
    meta.delta = meta.delta.map(|d| Delta {
        base: id,
        further: Further::new(&[id; 5]).unwrap(),
        ..d
    });
    nodes.map.lock().insert(id, (meta, payload));
    let e = r.chunk(&nodes, &id).unwrap_err();
    assert_eq!(e.kind(), crate::error::Kind::Damage);
    assert!(nodes.reads.load(Relaxed) <= MAX_NODES);
}

/// Chunks as [`chain`] makes them, but for one whose reading panics.
struct Broken {
    nodes: Nodes,
    broken: NodeId,
}

impl NodeSource for Broken {
    fn get(&self, id: &NodeId) -> Result<Node> {
        assert!(*id != self.broken, "a decoder that fails");
        self.nodes.get(id)
    }

    fn meta(&self, id: &NodeId) -> Result<Meta> {
        self.nodes.meta(id)
    }
}

#[test]
fn what_is_rebuilt_ahead_together_fails_alone() {
    let nodes = Nodes::default();
    let raw = |i: u32| (0..5000u32).map(|x| ((x * i) >> 3) as u8).collect::<Vec<_>>();
    let ids: Vec<NodeId> = (0..20).map(|i| nodes.put(&raw(i), None)).collect();
    // One has other bytes than its id says, and one cannot be read at all.
    let other = nodes.map.lock().get(&ids[0]).cloned().unwrap();
    nodes.map.lock().insert(ids[7], other);
    let r = Rebuilder::new(1 << 20, 1);
    let source: Arc<dyn NodeSource> = Arc::new(Broken {
        nodes,
        broken: ids[5],
    });
    let ahead = |id: &NodeId| {
        // As if each was taken out of the queue.
        r.flights.lock().insert(*id, None);
        Ahead {
            rebuilder: r.clone(),
            source: source.clone(),
            id: *id,
        }
    };
    let queued: Vec<Ahead> = ids.iter().map(ahead).collect();
    r.rebuild_ahead(&queued);
    assert!(r.flights.lock().is_empty());
    for (i, id) in ids.iter().enumerate() {
        assert_eq!(r.cache.lock().contains(id), i != 5 && i != 7, "{i}");
        if i != 5 && i != 7 {
            assert!(*r.chunk(&*source, id).unwrap() == raw(i as u32));
        }
    }
}

#[test]
fn counting_deltas_ends_whatever_records_say() {
    let nodes = Nodes::default();
    let put = |id: u8, codec: Codec, depth: u8, bases: &[NodeId]| {
        let delta = bases.first().map(|base| Delta {
            base: *base,
            further: Further::new(&bases[1..]).unwrap(),
            depth,
            revision: 0,
            cost: 1,
        });
        let meta = NodeMeta {
            codec,
            number: Number::BF16,
            raw_len: 8,
            delta,
        };
        nodes.map.lock().insert(NodeId([id; 32]), (meta, Vec::new()));
        meta
    };
    let root = NodeId([200; 32]);
    put(200, Codec::Raw, 0, &[]);
    // A rounding of six tensors, and a delta onto that: two to apply.
    put(201, Codec::Rounded, MANY_DEPTH, &[root; 6]);
    let two = put(202, Codec::XorPlanes, MANY_DEPTH + 1, &[NodeId([201; 32])]);
    assert_eq!(deltas(&nodes, &two).unwrap(), 2);
    // As many ways as no computer ends: each node has six bases, each a little less deep.
    put(0, Codec::Rounded, MANY_DEPTH, &[root; 6]);
    let mut last = two;
    for i in 1..100 {
        last = put(i, Codec::Rounded, MANY_DEPTH + i, &[NodeId([i - 1; 32]); 6]);
    }
    let before = nodes.reads.load(Relaxed);
    assert_eq!(
        deltas(&nodes, &last).unwrap_err().kind(),
        crate::error::Kind::Damage
    );
    assert!(nodes.reads.load(Relaxed) - before <= MAX_NODES + 1);
}

#[test]
fn a_files_digest_vouches_for_its_chunks_and_its_chunks_tell_what_is_damaged() {
    let (nodes, ids) = chain(20);
    let r = Rebuilder::new(1 << 20, 2);
    let whole: Vec<u8> = ids
        .iter()
        .flat_map(|id| r.chunk(&nodes, id).unwrap().to_vec())
        .collect();
    let layout = Arc::new(crate::format::Layout::opaque(&[4096; 20]).unwrap());
    // Each with another cache: what is in one is not read again.
    let file = |nodes: Nodes| {
        let r = Rebuilder::new(1 << 20, 2);
        let file = StoredFile::new(&r, Arc::new(nodes), layout.clone(), ids.clone(), Vec::new()).unwrap();
        (file, r)
    };
    let mut hasher = crate::id::FileHasher::default();
    hasher.update(&whole);
    let hash = hasher.finish();
    let (right, its) = file(nodes);
    assert!(right.has_digest(&hash, &never).unwrap());
    assert_eq!(its.counters().asked, 0, "its chunks were verified one by one");
    assert!(!right.has_digest(&crate::id::FileHash([1; 32]), &never).unwrap());
    let ended = right.has_digest(&hash, &|| Err(Error::new(Kind::Stopped, "ended")));
    assert_eq!(ended.unwrap_err().kind(), Kind::Stopped);
    let (nodes, _) = chain(20);
    let other = nodes.map.lock().get(&ids[0]).cloned().unwrap();
    nodes.map.lock().insert(ids[7], other);
    let error = file(nodes).0.has_digest(&hash, &never).unwrap_err();
    assert!(error.to_string().contains(&ids[7].short()), "{error}");
    let (nodes, _) = chain(20);
    nodes.map.lock().remove(&ids[19]);
    assert!(file(nodes).0.has_digest(&hash, &never).is_err());
}

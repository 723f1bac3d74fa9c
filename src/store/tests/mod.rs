//! The store as a whole, on a real disk and on a faulty one.

mod bases;
mod crash;
mod damage;
mod dense;
mod golden;
mod history;
mod inputs;
mod leftovers;
mod relatives;
mod repack;
mod roundtrip;
mod scale;
mod whole;

use super::*;
use crate::graph::NodeMeta;
use std::collections::HashMap;
use std::fs;

/// A store of its own in a directory that goes with it.
pub(crate) struct Fixture {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) store: Store,
}

impl Fixture {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open_or_init(&dir.path().join("store"), &options()).unwrap();
        Fixture { dir, store }
    }

    /// A path beside the store.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    pub(crate) fn commit(&self, path: &Path) -> Committed {
        self.store.commit(&request(path)).unwrap()
    }

    /// The whole of a committed file.
    pub(crate) fn read(&self, rev: &str, path: &str) -> Vec<u8> {
        read(&self.store, rev, path).unwrap()
    }
}

pub(crate) fn options() -> Options {
    Options {
        memory: 8 << 20,
        threads: 2,
        background_threads: 1,
    }
}

pub(crate) fn request(path: &Path) -> CommitRequest {
    let name = std::os::unix::ffi::OsStrExt::as_bytes(path.file_name().unwrap()).to_vec();
    CommitRequest {
        branch: "main".into(),
        entries: vec![(name, path.to_owned())],
        ..CommitRequest::default()
    }
}

pub(crate) fn read(store: &Store, rev: &str, path: &str) -> Result<Vec<u8>> {
    let version = store.resolve(rev)?;
    let EntryKind::File { hash, len, .. } = store.entry(&version, path.as_bytes())?.kind else {
        panic!("no file")
    };
    let file = store.file(&hash, len)?;
    let mut out = Vec::new();
    while (out.len() as u64) < len {
        let part = file.read(out.len() as u64, 300_000)?;
        assert!(!part.is_empty());
        out.extend_from_slice(&part);
    }
    Ok(out)
}

/// Pseudo-random numbers, the same each time (xorshift64*, Vigna 2016).
pub(crate) struct Noise(pub(crate) u64);

impl Noise {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// A model that drifts: bf16 weights of which some move by one ulp a step.
pub(crate) struct Model {
    noise: Noise,
    tensors: Vec<(String, Vec<u16>)>,
}

impl Model {
    pub(crate) fn new(sizes: &[usize]) -> Self {
        let mut noise = Noise(0x9e37_79b9_7f4a_7c15);
        let mut weight = |_| 0x3c00 + (noise.next() % 0x200) as u16 + ((noise.next() & 1) as u16) * 0x8000;
        let tensors = sizes
            .iter()
            .enumerate()
            .map(|(i, n)| (format!("layers.{i}.weight"), (0..*n).map(&mut weight).collect()));
        let tensors = tensors.collect();
        Model { noise, tensors }
    }

    pub(crate) fn step(&mut self) {
        for (_, t) in &mut self.tensors {
            for w in t {
                if self.noise.next().is_multiple_of(20) {
                    *w = w.wrapping_add(1);
                }
            }
        }
    }

    /// The model as a safetensors file.
    pub(crate) fn safetensors(&self, step: u32) -> Vec<u8> {
        let mut header = format!("{{\"__metadata__\":{{\"step\":\"{step:06}\"}}");
        let (mut data, mut at) = (Vec::new(), 0);
        for (name, t) in &self.tensors {
            let end = at + t.len() * 2;
            header += &format!(
                ",\"{name}\":{{\"dtype\":\"BF16\",\"shape\":[{}],\"data_offsets\":[{at},{end}]}}",
                t.len()
            );
            data.extend(t.iter().flat_map(|w| w.to_le_bytes()));
            at = end;
        }
        header += "}";
        while header.len() % 8 != 0 {
            header.push(' ');
        }
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
    }
}

/// The metas of all chunks, as a reader finds them.
pub(super) fn chunks(store: &Store) -> HashMap<NodeId, (NodeMeta, u32)> {
    let parts = &store.0.parts;
    let mut all = HashMap::new();
    for range in parts.history.ranges() {
        let ids = &mut |id: NodeId, _, m: crate::pack::Meta| {
            if m.kind == NodeKind::Chunk as u8 {
                let m = parts.packs.meta(&id)?;
                all.insert(id, (NodeMeta::decode(NodeKind::Chunk, &m.meta)?, m.payload_len));
            }
            Ok(())
        };
        parts.packs.scan(&range, ids).unwrap();
    }
    all
}

/// Every record says what its chain takes, or more; the greatest depth.
pub(crate) fn chains_hold(store: &Store) -> u8 {
    let all = chunks(store);
    let mut deepest = 0;
    for (id, (meta, len)) in &all {
        if let Some(d) = meta.delta {
            let mut cost = u64::from(*len);
            for (base, base_len) in d.bases().map(|b| all[&b]) {
                let least = base.depth() + meta.step();
                assert!(d.depth >= least, "{id}: {} on {}", d.depth, base.depth());
                cost += base.cost(base_len);
            }
            assert!(d.cost >= cost, "{id}");
            deepest = deepest.max(d.depth);
        }
    }
    deepest
}

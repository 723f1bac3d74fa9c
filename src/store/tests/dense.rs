//! Series whose deltas are large: chains run out of room, start over, and stay exact and within bounds whatever else happens.

use super::repack::{again, all_good, all_read, spoil};
use super::*;

/// Random walks of one tensor each: of so many in 1000 weights a step moves each by up to so many ulps.
const WALKS: [(usize, u64, u64); 6] = [
    (70_000, 1000, 40_000), // as good as noise
    (70_001, 1000, 9),      // dense: a quarter and more of the bytes
    (70_000, 1000, 2),
    (70_000, 300, 4),
    (70_000, 60, 3),
    (16_500, 5, 1),
];

struct Walk {
    noise: Noise,
    tensors: Vec<Vec<u16>>,
}

impl Walk {
    fn new() -> Self {
        let mut noise = Noise(77);
        let mut weight = || 0x3c00 + (noise.next() % 0x200) as u16 + ((noise.next() & 1) as u16) * 0x8000;
        let tensors = WALKS.map(|(n, ..)| (0..n).map(|_| weight()).collect());
        Walk {
            noise,
            tensors: tensors.to_vec(),
        }
    }

    fn step(&mut self) {
        for (tensor, (_, share, most)) in self.tensors.iter_mut().zip(WALKS) {
            for w in tensor {
                if self.noise.next() % 1000 < share {
                    let by = self.noise.next() % (2 * most + 1);
                    *w = w.wrapping_add(by as u16).wrapping_sub(most as u16);
                }
            }
        }
    }

    fn safetensors(&self) -> Vec<u8> {
        let tensors = self.tensors.iter().enumerate();
        let tensors = tensors
            .map(|(i, t)| (format!("layers.{i}.weight"), t.clone()))
            .collect();
        let model = Model {
            noise: Noise(1),
            tensors,
        };
        model.safetensors(0)
    }
}

/// A rebuild applies at most 32 deltas, and reads at most three times what it makes.
fn within_bounds(store: &Store) {
    chains_hold(store);
    for (id, (meta, len)) in chunks(store) {
        assert!(meta.depth() <= 32, "{id}: {} deltas", meta.depth());
        assert!(meta.cost(len) <= 3 * u64::from(meta.raw_len), "{id}");
        assert!(len <= meta.raw_len, "{id}: larger than its bytes");
    }
}

#[test]
fn walks_of_all_densities_stay_exact_and_within_bounds() {
    let f = Fixture::new();
    let mut walk = Walk::new();
    let mut files = Vec::new();
    let mut alone = 0;
    for n in 0..60 {
        files.push(walk.safetensors());
        let path = f.write("model.safetensors", &files[n]);
        let store = again(&f);
        let stored = store.commit(&request(&path)).unwrap().stored;
        // Never worse than without a base, but for what records say of their chains.
        if n == 0 {
            alone = stored;
        }
        assert!(
            stored <= alone + alone / 50,
            "version {n}: {stored}, alone {alone}"
        );
        // Every few versions the old ones are encoded anew, once from chunks without any base.
        match n {
            20 => {
                spoil(&store);
                store.repack(&RepackRequest::default()).unwrap();
            }
            40 => drop(store.repack(&RepackRequest::default()).unwrap()),
            _ => {}
        }
        store.close().unwrap();
        walk.step();
    }
    let store = again(&f);
    within_bounds(&store);
    all_read(&store, &files, "in the end");
    all_good(&store);
    let s = store.stats().unwrap();
    assert!(
        s.depths.len() > 4 && s.depths.keys().all(|d| *d <= 32),
        "{:?}",
        s.depths
    );
}

#[test]
fn damage_anywhere_in_a_dense_chain_costs_space_only() {
    for at in 1..12u64 {
        let f = Fixture::new();
        let mut walk = Walk::new();
        for _ in 0..8 {
            f.commit(&f.write("model.safetensors", &walk.safetensors()));
            walk.step();
        }
        f.store.close().unwrap();
        let packs = fs::read_dir(f.store.dir().join("packs")).unwrap();
        for pack in packs.map(|e| e.unwrap().path()) {
            let mut bytes = fs::read(&pack).unwrap();
            let n = bytes.len() as u64;
            bytes[(n * at / 12) as usize] ^= 0x10;
            fs::write(&pack, bytes).unwrap();
        }
        let store = again(&f);
        let mut after = Vec::new();
        for n in 0..8 {
            after.push(walk.safetensors());
            store
                .commit(&request(&f.write("model.safetensors", &after[n])))
                .unwrap();
            walk.step();
        }
        for (n, bytes) in after.iter().enumerate() {
            let found = read(&store, &format!("main/{}", n + 9), "model.safetensors");
            assert!(found.unwrap() == *bytes, "damaged at {at}/12, version {}", n + 9);
        }
        within_bounds(&store);
    }
}

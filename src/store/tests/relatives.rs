//! Weights beside their f32 copy: one follows from the other.

use super::bases::Tensors;
use super::repack::{again, all_good, all_read, bytes_of, spoil, stretch};
use super::*;
use half::{bf16, f16};

/// f32 weights of a small transformer.
fn master(seed: u64, layers: usize) -> Tensors {
    let mut noise = Noise(seed);
    let mut wide = |bytes: &[u8]| -> Vec<u8> {
        let words = bytes.as_chunks().0.iter();
        words
            .flat_map(|w| {
                (u32::from(u16::from_le_bytes(*w)) << 16 | noise.next() as u32 & 0xffff).to_le_bytes()
            })
            .collect()
    };
    let all = Tensors::transformer(seed + 100, layers).0.into_iter();
    Tensors(all.map(|(n, _, b)| (n, "F32", wide(&b))).collect())
}

fn step(model: &mut Tensors, seed: u64) {
    let mut noise = Noise(seed);
    for (_, _, bytes) in &mut model.0 {
        for w in bytes.as_chunks_mut().0 {
            let moved = (noise.next() % 0x8000) as u32;
            *w = u32::from_le_bytes(*w)
                .wrapping_add(moved)
                .wrapping_sub(0x4000)
                .to_le_bytes();
        }
    }
}

fn rounded(model: &Tensors, dtype: &'static str) -> Tensors {
    let round = |w: &[u8; 4]| match dtype {
        "F16" => f16::from_f32(f32::from_le_bytes(*w)).to_le_bytes(),
        _ => bf16::from_f32(f32::from_le_bytes(*w)).to_le_bytes(),
    };
    let all = model.0.iter();
    Tensors(
        all.map(|(n, _, b)| (n.clone(), dtype, b.as_chunks().0.iter().flat_map(round).collect()))
            .collect(),
    )
}

fn widened(model: &Tensors) -> Tensors {
    let wide = |w: &[u8; 2], dtype| match dtype {
        "F16" => f16::from_le_bytes(*w).to_f32().to_le_bytes(),
        _ => bf16::from_le_bytes(*w).to_f32().to_le_bytes(),
    };
    let all = model.0.iter();
    Tensors(
        all.map(|(n, d, b)| {
            (
                n.clone(),
                "F32",
                b.as_chunks().0.iter().flat_map(|w| wide(w, *d)).collect(),
            )
        })
        .collect(),
    )
}

fn prefixed(model: &Tensors) -> Tensors {
    model.renamed(|n| format!("module.{n}"))
}

/// Nothing but headers, trees, manifests and references.
fn next_to_nothing(done: &Committed) -> bool {
    done.stored < 20_000 && done.stored * 40 < done.bytes
}

#[test]
fn the_rounding_of_what_is_stored_costs_next_to_nothing() {
    for dtype in ["BF16", "F16"] {
        let f = Fixture::new();
        let model = master(1, 4);
        f.commit_file("main", "m.safetensors", &model.file());
        for (branch, narrow) in [
            ("main", rounded(&model, dtype)),
            ("other", prefixed(&rounded(&model, dtype))),
        ] {
            let done = f.commit_file(branch, "n.safetensors", &narrow.file());
            assert!(next_to_nothing(&done), "{dtype} on {branch}: {done:?}");
        }
        f.verify();
    }
}

#[test]
fn the_other_way_round_only_what_was_lost_is_stored() {
    for dtype in ["BF16", "F16"] {
        let f = Fixture::new();
        let model = master(2, 4);
        let narrow = rounded(&model, dtype);
        f.commit_file("main", "n.safetensors", &narrow.file());
        let done = f.commit_file("wide", "w.safetensors", &prefixed(&widened(&narrow)).file());
        assert!(next_to_nothing(&done), "{dtype}: {done:?}");
        let done = f.commit_file("main", "w.safetensors", &model.file());
        assert!(done.stored < done.bytes * 52 / 100, "{dtype}: {done:?}");
        f.verify();
    }
}

#[test]
fn odd_values_survive_both_ways() {
    let odd: Vec<u8> = (0..1u32 << 9)
        .flat_map(|top| {
            (0..128u32).map(move |i| top << 23 | i.wrapping_mul(0x9e37_79b9) >> 9 & !(i % 3 * 0x7fff))
        })
        .flat_map(u32::to_le_bytes)
        .collect();
    for dtype in ["BF16", "F16"] {
        let f = Fixture::new();
        let model = Tensors(vec![("odd".into(), "F32", odd.clone())]);
        let narrow = rounded(&model, dtype);
        f.commit_file("main", "m.safetensors", &model.file());
        let done = f.commit_file("main", "n.safetensors", &narrow.file());
        assert!(done.stored < 1000, "{dtype}: {done:?}");
        let done = f.commit_file("main", "w.safetensors", &widened(&narrow).file());
        // NaNs are made quiet in more than one way.
        assert!(done.stored < 4000, "{dtype}: {done:?}");
        f.verify();
    }
}

#[test]
fn weights_follow_their_f32_copy_step_by_step() {
    // By name the weights come before the copy, or after it; in the same directory, or in others.
    for (narrow, wide) in [("bf16", "fp32"), ("model", "master"), ("b/weights", "a/master")] {
        let f = Fixture::new();
        let mut model = master(3, 3);
        for i in 0..12 {
            step(&mut model, i + 1);
            let files = [
                (narrow, rounded(&model, "BF16").file()),
                (wide, prefixed(&model).file()),
            ]
            .map(|(name, bytes)| (format!("run/{name}.safetensors"), bytes));
            for (name, bytes) in &files {
                f.write(name, bytes);
            }
            f.commit(&f.path("run"));
            for (name, bytes) in &files {
                assert!(f.read("main", name) == *bytes);
            }
        }
        f.verify();
        let s = f.store.stats().unwrap();
        let of = |name: &str| s.codecs.iter().find(|c| c.codec == name).map_or(0, |c| c.nodes);
        assert!(of("rounded") >= 12 * 3, "{narrow}: {:?}", s.codecs);
        // What is applied is counted, not what its depth reserves.
        assert_eq!(s.depths.keys().find(|d| **d > 33), None, "{:?}", s.depths);
    }
}

#[test]
fn weights_that_are_no_rounding_cost_no_more_than_without() {
    let stored = |with: bool| {
        let f = Fixture::new();
        if with {
            f.commit_file("main", "m.safetensors", &master(5, 3).file());
        }
        f.commit_file("other", "n.safetensors", &rounded(&master(6, 3), "BF16").file())
            .stored
    };
    let (with, without) = (stored(true), stored(false));
    assert!(with <= without + 100, "{with} {without}");
}

#[test]
fn a_damaged_f32_copy_costs_only_space() {
    let f = Fixture::new();
    let model = master(7, 3);
    f.commit_file("main", "m.safetensors", &model.file());
    f.store.close().unwrap();
    for pack in fs::read_dir(f.store.dir().join("packs")).unwrap() {
        let path = pack.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        let n = bytes.len();
        bytes[n / 2] ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    let store = Store::open(f.store.dir(), &options()).unwrap();
    let bytes = rounded(&model, "BF16").file();
    let path = f.write("n.safetensors", &bytes);
    let done = store.commit(&request(&path)).unwrap();
    assert!(read(&store, "main", "n.safetensors").unwrap() == bytes);
    assert!(
        done.stored < done.bytes / 2,
        "the other tensors still follow: {done:?}"
    );
}

/// Each model is made from the one before: what is nested too deep for a reader is stored another way.
#[test]
fn roundings_of_roundings_can_all_be_read() {
    let f = Fixture::new();
    let mut narrow = rounded(&master(8, 3), "BF16");
    f.commit_file("b0", "m.safetensors", &narrow.file());
    for i in 1..8 {
        let mut wide = widened(&narrow);
        step(&mut wide, i);
        f.commit_file(&format!("w{i}"), "m.safetensors", &wide.file());
        narrow = rounded(&wide, if i % 2 == 0 { "BF16" } else { "F16" });
        let done = f.commit_file(&format!("b{i}"), "m.safetensors", &narrow.file());
        assert!(next_to_nothing(&done) || i > 1, "{done:?}");
    }
    f.store.close().unwrap();
    let store = Store::open(f.store.dir(), &options()).unwrap();
    for branch in store.branches() {
        let versions = store.versions(&branch).unwrap();
        assert_eq!(store.verify(&versions, &mut |_| {}).damage, []);
    }
}

/// Weights that are the rounding of f32 tensors follow these through whatever happens to their chains.
#[test]
fn weights_keep_following_their_f32_copy() {
    let f = Fixture::new();
    let mut wide = master(1, 3);
    let mut files = Vec::new();
    let (mut models, mut store) = (Vec::new(), again(&f));
    for i in 0..4 {
        let bytes = wide.file();
        store
            .commit(&request(&f.write("model.safetensors", &bytes)))
            .unwrap();
        files.push(bytes);
        models.push(wide.clone());
        step(&mut wide, i + 1);
    }
    spoil(&store);
    for i in [3, 1, 0, 2] {
        let bytes = rounded(&models[i], "BF16").file();
        let done = store
            .commit(&request(&f.write("model.safetensors", &bytes)))
            .unwrap();
        assert!(done.stored * 10 < done.bytes, "{i}: {done:?}");
        files.push(bytes);
    }
    let many = |store: &Store| {
        let all = chunks(store).into_values();
        all.filter(|(m, _)| m.codec.takes_many())
            .map(|(m, _)| m.depth())
            .max()
    };
    assert_eq!(many(&store), Some(16));
    store.close().unwrap();
    for round in 0..3 {
        store = again(&f);
        let before = bytes_of(f.store.dir());
        store.repack(&RepackRequest::default()).unwrap();
        assert!(round > 0 || bytes_of(f.store.dir()) < before * 3 / 4);
        chains_hold(&store);
        all_read(&store, &files, &format!("round {round}"));
        all_good(&store);
        assert!(many(&store) > Some(16), "{:?}", many(&store));
        if round == 0 {
            stretch(&store);
        }
        store.close().unwrap();
    }
}

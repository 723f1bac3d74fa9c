//! Which base a chunk is encoded against, seen from outside: what is stored, and that all comes back.

use super::*;

/// Tensors by name, dtype and bytes, that become a safetensors file.
#[derive(Clone, Default)]
pub(super) struct Tensors(pub(super) Vec<(String, &'static str, Vec<u8>)>);

impl Tensors {
    /// A small transformer of bf16: `layers` layers whose weights are noise around 0, as training leaves it.
    pub(super) fn transformer(seed: u64, layers: usize) -> Self {
        let mut noise = Noise(seed);
        let mut all = Vec::new();
        let mut tensor = |name: String, n: usize| {
            let weight = |_| 0x3c00 + (noise.next() % 0x200) as u16 + ((noise.next() & 1) as u16) * 0x8000;
            let bytes = (0..n).map(weight).flat_map(u16::to_le_bytes).collect();
            all.push((name, "BF16", bytes));
        };
        tensor("embed.weight".into(), 100_000);
        for i in 0..layers {
            tensor(format!("layers.{i}.attn.weight"), 60_000);
            tensor(format!("layers.{i}.mlp.weight"), 60_000);
            tensor(format!("layers.{i}.norm.weight"), 256);
        }
        Tensors(all)
    }

    /// Some weights move by one ulp.
    pub(super) fn step(&mut self, seed: u64) {
        let mut noise = Noise(seed);
        for (_, _, bytes) in &mut self.0 {
            for w in bytes.as_chunks_mut().0 {
                if noise.next().is_multiple_of(20) {
                    *w = u16::from_le_bytes(*w).wrapping_add(1).to_le_bytes();
                }
            }
        }
    }

    pub(super) fn renamed(&self, rename: impl Fn(&str) -> String) -> Self {
        let all = self.0.iter();
        Tensors(all.map(|(n, d, b)| (rename(n), *d, b.clone())).collect())
    }

    pub(super) fn part(&self, range: std::ops::Range<usize>) -> Self {
        Tensors(self.0[range].to_vec())
    }

    pub(super) fn file(&self) -> Vec<u8> {
        let (mut header, mut at) = (String::from("{\"__metadata__\":{\"format\":\"pt\"}"), 0);
        for (name, dtype, bytes) in &self.0 {
            let (end, n) = (
                at + bytes.len(),
                bytes.len() / if *dtype == "F32" { 4 } else { 2 },
            );
            header += &format!(
                ",\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":[{n}],\"data_offsets\":[{at},{end}]}}"
            );
            at = end;
        }
        header += "}";
        while header.len() % 8 != 0 {
            header.push(' ');
        }
        let data: Vec<u8> = self.0.iter().flat_map(|t| t.2.clone()).collect();
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
    }
}

impl Fixture {
    /// Commits a file to a branch and checks that it comes back.
    pub(super) fn commit_file(&self, branch: &str, name: &str, bytes: &[u8]) -> Committed {
        let request = CommitRequest {
            branch: branch.into(),
            ..request(&self.write(name, bytes))
        };
        let done = self.store.commit(&request).unwrap();
        let path = Path::new(name).file_name().unwrap().to_str().unwrap();
        assert!(self.read(branch, path) == bytes);
        done
    }

    pub(super) fn verify(&self) {
        let all = self.store.branches();
        for branch in all {
            let versions = self.store.versions(&branch).unwrap();
            assert_eq!(self.store.verify(&versions, &mut |_| {}).damage, []);
        }
    }
}

/// Whether a commit stored next to nothing, as of a model that moved by a step.
fn small(done: &Committed) -> bool {
    done.stored * 8 < done.bytes
}

#[test]
fn what_has_not_changed_is_read_back_even_if_it_is_in_memory() {
    let f = Fixture::new();
    let model = Tensors::transformer(1, 2).file();
    f.commit_file("main", "m.safetensors", &model);
    let again = f.commit_file("main", "m.safetensors", &model);
    // A tree, whose file has another time.
    assert!(again.stored < 200, "{again:?}");
    // All of it is in the cache now. What is in the packs rots.
    for pack in fs::read_dir(f.store.dir().join("packs")).unwrap() {
        let path = pack.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        for at in (2000..bytes.len()).step_by(50_000) {
            bytes[at] ^= 1;
        }
        fs::write(&path, bytes).unwrap();
    }
    let third = f.commit_file("main", "m.safetensors", &model);
    assert!(third.stored > third.bytes / 2, "{third:?}");
    f.store.close().unwrap();
    let store = Store::open(f.store.dir(), &options()).unwrap();
    for rev in ["main/1", "main/2", "main/3"] {
        assert!(read(&store, rev, "m.safetensors").unwrap() == model, "{rev}");
    }
}

#[test]
fn renamed_tensors_are_found() {
    type Rename = fn(&str) -> String;
    let renamings: [(&str, Rename); 7] = [
        ("a prefix", |n| format!("model.{n}")),
        ("torch.compile", |n| format!("_orig_mod.{n}")),
        ("DDP", |n| format!("module.{n}")),
        ("in between", |n| n.replace("layers.", "layers._orig_mod.")),
        ("other words", |n| n.replace("layers", "h").replace("mlp", "ffn")),
        ("the same end", |n| {
            n.replace('.', "_").replace("_weight", ".weight")
        }),
        ("no name in common", |n| format!("p{}", n.replace('.', "_"))),
    ];
    for (what, rename) in renamings {
        for back in [false, true] {
            let f = Fixture::new();
            let mut model = Tensors::transformer(3, 12);
            let (from, to): (Rename, Rename) = if back {
                (rename, str::to_owned)
            } else {
                (str::to_owned, rename)
            };
            f.commit_file("main", "m.safetensors", &model.renamed(from).file());
            model.step(4);
            let done = f.commit_file("main", "m.safetensors", &model.renamed(to).file());
            assert!(small(&done), "{what}, back: {back}: {done:?}");
            f.verify();
        }
    }
}

#[test]
fn tensors_that_moved_to_other_files_are_found() {
    let f = Fixture::new();
    let mut model = Tensors::transformer(5, 20);
    let n = model.0.len();
    let write = |model: &Tensors, shards: usize| {
        let _ = fs::remove_dir_all(f.path("ck"));
        for i in 0..shards {
            let part = model.part(i * n / shards..(i + 1) * n / shards);
            f.write(
                &format!("ck/model-{:05}-of-{shards:05}.safetensors", i + 1),
                &part.file(),
            );
        }
        f.commit(&f.path("ck"))
    };
    write(&model, 2);
    for shards in [3, 1, 7] {
        model.step(shards as u64);
        let done = write(&model, shards);
        assert!(small(&done), "{shards} shards: {done:?}");
    }
    // Other names, another directory, and one file each.
    model.step(9);
    for (i, t) in model.renamed(|n| format!("model.{n}")).0.into_iter().enumerate() {
        f.write(
            &format!("out/{}{i}/weights.bin", (b'a' + i as u8) as char),
            &Tensors(vec![t]).file(),
        );
    }
    let done = f.commit(&f.path("out"));
    assert!(done.stored * 5 < done.bytes, "{done:?}");
    f.verify();
}

#[test]
fn a_fine_tune_of_another_branch_is_found() {
    let f = Fixture::new();
    let mut model = Tensors::transformer(6, 4);
    for i in 0..5 {
        f.commit_file(
            &format!("other-{i}"),
            "m.safetensors",
            &Tensors::transformer(10 + i, 4).file(),
        );
    }
    f.commit_file("main", "m.safetensors", &model.file());
    for i in 5..10 {
        f.commit_file(
            &format!("other-{i}"),
            "m.safetensors",
            &Tensors::transformer(10 + i, 4).file(),
        );
    }
    model.step(7);
    // A branch of its own, without a fork; other names; then a step on it, from its own version.
    let done = f.commit_file("tune", "tuned.safetensors", &model.file());
    assert!(small(&done), "{done:?}");
    model.step(8);
    let done = f.commit_file(
        "peft",
        "t.safetensors",
        &model.renamed(|n| format!("base_model.model.{n}")).file(),
    );
    assert!(small(&done), "{done:?}");
    model.step(9);
    let done = f.commit_file("tune", "tuned.safetensors", &model.file());
    assert!(small(&done), "{done:?}");
    // A branch that is forked later.
    f.store.make_branch("late", Some("tune/1")).unwrap();
    let done = f.commit_file("late", "tuned.safetensors", &model.file());
    assert!(small(&done), "{done:?}");
    f.verify();
}

/// Tensors that share chunks: 96 of 16 KiB.
fn adapters(seed: u64) -> Tensors {
    let mut all = Tensors::transformer(seed, 0).renamed(|_| "one".into());
    let (_, dtype, bytes) = all.0.remove(0);
    let parts = bytes.chunks_exact(2048).cycle().zip(0..8 * 96u64);
    let mut noise = Noise(seed);
    for (part, i) in parts {
        if i % 8 == 0 {
            all.0.push((
                format!("layers.{}.{}.lora.weight", i / 32, i / 8 % 4),
                dtype,
                Vec::new(),
            ));
        }
        let (_, _, tensor) = all.0.last_mut().unwrap();
        let weights = part.as_chunks().0.iter();
        tensor.extend(
            weights.flat_map(|w| (u16::from_le_bytes(*w) ^ (noise.next() % 64) as u16).to_le_bytes()),
        );
    }
    all
}

#[test]
fn small_tensors_may_come_go_and_be_renamed() {
    let before = adapters(21);
    let mut after = before.clone();
    after.step(22);
    let stored = |after: &Tensors| {
        let f = Fixture::new();
        f.commit_file("main", "m.safetensors", &before.file());
        let done = f.commit_file("main", "m.safetensors", &after.file());
        f.verify();
        done.stored
    };
    let step = stored(&after);
    assert!(step < 200_000, "{step}");
    // At most two chunks more, each of at most 256 KiB, where one tensor changes.
    let few = step + 400_000;
    let new = || ("layers.3.new.weight".to_owned(), "BF16", after.0[0].2.clone());
    for at in [0, 13, 40, 95] {
        let (mut more, mut fewer) = (after.clone(), after.clone());
        more.0.insert(at, new());
        fewer.0.remove(at);
        for changed in [more, fewer] {
            let n = stored(&changed);
            assert!(n < few, "{n} at {at}, where a step takes {step}");
        }
    }
    let n = stored(&after.renamed(|n| format!("base_model.model.{n}")));
    assert!(n < few, "{n} where a step takes {step}");
    let n = stored(&after.part(7..70));
    assert!(n < few, "{n} where a step takes {step}");
}

#[test]
fn tensors_whose_names_tell_nothing_are_found_by_their_bytes() {
    let f = Fixture::new();
    let mut model = Tensors::transformer(31, 8);
    f.commit_file("main", "m.safetensors", &model.file());
    model.step(32);
    // Other names, in another order.
    let mut other = model.renamed(|n| {
        format!(
            "{:x}",
            n.bytes().fold(7u64, |h, b| h.wrapping_mul(31) ^ u64::from(b))
        )
    });
    other.0.reverse();
    let done = f.commit_file("main", "n.safetensors", &other.file());
    assert!(small(&done), "{done:?}");
    f.verify();
}

/// The search by bytes must not use up what the search by names and places would have found.
#[test]
fn new_tensors_do_not_hide_old_ones() {
    let noise = |seed: u64, name: String, n: usize| {
        let (_, dtype, bytes) = Tensors::transformer(seed, 0).0.remove(0);
        (name, dtype, bytes[..n].to_vec())
    };
    let name = |i: u64| format!("{:016x}", i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let large = |i: u64| noise(100 + i, format!("a{i}"), 160_000);
    let small = |i: u64| noise(200 + i, format!("b{i}"), 80_000);
    let before = Tensors((0..20).map(large).chain((0..20).map(small)).collect());
    // One that is known, many new ones of the same length, and the others in their order; all with other names.
    let known = std::iter::once(large(0)).chain((20..40).map(large));
    let mut after = Tensors(known.chain((0..20).map(small)).collect());
    for (i, t) in after.0.iter_mut().enumerate() {
        t.0 = name(i as u64 + 1);
    }
    after.step(9);
    let f = Fixture::new();
    f.commit_file("main", "m.safetensors", &before.file());
    let done = f.commit_file("main", "m.safetensors", &after.file());
    // The new ones, at seven tenths of themselves, and next to nothing for the others.
    assert!(done.stored < 20 * 160_000 * 7 / 10 + 300_000, "{done:?}");
    f.verify();
}

#[test]
fn a_run_committed_at_once_is_a_series() {
    let f = Fixture::new();
    let mut model = Tensors::transformer(8, 4);
    for step in [90, 100, 110, 120] {
        f.write(&format!("run/checkpoint-{step}/model.safetensors"), &model.file());
        model.step(step);
    }
    let done = f.commit(&f.path("run"));
    assert!(done.stored * 3 < done.bytes, "{done:?}");
    f.verify();
}

/// Models of the same shapes and names that have nothing to do with each other.
#[test]
fn what_is_not_close_costs_nothing() {
    let stored = |before: &[u64]| {
        let f = Fixture::new();
        for (i, seed) in before.iter().enumerate() {
            f.commit_file(
                &format!("b{i}"),
                "m.safetensors",
                &Tensors::transformer(*seed, 6).file(),
            );
        }
        f.commit_file("new", "n.safetensors", &Tensors::transformer(99, 6).file())
            .stored
    };
    let alone = stored(&[]);
    // The header may be copied; nothing else is alike.
    assert!((alone - 2000..=alone).contains(&stored(&[1, 2, 3])), "{alone}");
}

#[test]
fn a_damaged_base_of_another_branch_costs_only_space() {
    let f = Fixture::new();
    let mut model = Tensors::transformer(11, 3);
    f.commit_file("main", "m.safetensors", &model.file());
    f.store.close().unwrap();
    for pack in fs::read_dir(f.store.dir().join("packs")).unwrap() {
        let path = pack.unwrap().path();
        let mut bytes = fs::read(&path).unwrap();
        for at in (0..bytes.len()).step_by(40_000) {
            bytes[at + 39] ^= 1;
        }
        fs::write(&path, bytes).unwrap();
    }
    let store = Store::open(f.store.dir(), &options()).unwrap();
    model.step(12);
    let bytes = model.renamed(|n| format!("model.{n}")).file();
    let path = f.write("t.safetensors", &bytes);
    let request = CommitRequest {
        branch: "tune".into(),
        ..request(&path)
    };
    store.commit(&request).unwrap();
    assert!(read(&store, "tune", "t.safetensors").unwrap() == bytes);
}

//! Bytes that rot are reported by version, file and tensor, and never served.

use super::*;
use crate::error::Kind;

fn pack_files(f: &Fixture) -> Vec<PathBuf> {
    let mut all: Vec<_> = fs::read_dir(f.store.dir().join("packs"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    all.sort();
    all
}

#[test]
fn a_flipped_byte_is_named_and_the_rest_stays_readable() {
    let f = Fixture::new();
    let model = Model::new(&[600_000, 600_000]);
    let (good, bad) = (Noise(5).bytes(100_000), model.safetensors(1));
    f.write("run/good.bin", &good);
    f.write("run/model.safetensors", &bad);
    f.commit(&f.path("run"));
    f.store.close().unwrap();
    // The packs hold two chunks a tensor; damage the middle of the largest pack.
    let path = pack_files(&f)
        .into_iter()
        .max_by_key(|p| fs::metadata(p).unwrap().len())
        .unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 0x10;
    fs::write(&path, bytes).unwrap();

    let store = Store::open(f.store.dir(), &options()).unwrap();
    let mut report = store.verify(&store.versions("main").unwrap(), &mut |_| {});
    assert_eq!(report.damage.len(), 1, "{report:?}");
    let d = report.damage[0].clone();
    assert_eq!(
        (d.version.as_str(), d.file.as_str()),
        ("main/000001", "run/model.safetensors")
    );
    assert_eq!(d.tensors.len(), 1, "{d:?}");
    store.verify_packs(&mut report);
    assert_eq!(report.damage.len(), 2, "{report:?}");
    assert_eq!(read(&store, "main", "run/good.bin").unwrap(), good);
    assert_eq!(
        read(&store, "main", "run/model.safetensors").unwrap_err().kind(),
        Kind::Damage
    );

    // The other tensor's range is still there.
    let version = store.resolve("main").unwrap();
    let EntryKind::File { hash, len, .. } = store.entry(&version, b"run/model.safetensors").unwrap().kind
    else {
        panic!()
    };
    let file = store.file(&hash, len).unwrap();
    let whole = file
        .tensors()
        .into_iter()
        .find(|t| !d.tensors.contains(&t.name))
        .unwrap();
    let (from, n) = (whole.span.0 as usize, whole.span.1 as usize);
    assert!(file.read(whole.span.0, n).unwrap()[..] == bad[from..from + n]);
}

#[test]
fn a_damaged_base_costs_the_next_commit_only_space() {
    let f = Fixture::new();
    let mut model = Model::new(&[200_000]);
    f.commit(&f.write("m.safetensors", &model.safetensors(1)));
    f.store.close().unwrap();
    for path in pack_files(&f) {
        let mut bytes = fs::read(&path).unwrap();
        let n = bytes.len();
        bytes[n / 2] ^= 1;
        fs::write(&path, bytes).unwrap();
    }
    let store = Store::open(f.store.dir(), &options()).unwrap();
    model.step();
    let bytes = model.safetensors(2);
    store.commit(&request(&f.write("m.safetensors", &bytes))).unwrap();
    assert!(read(&store, "main/2", "m.safetensors").unwrap() == bytes);
}

/// A commit must not be acknowledged on top of damage: what is there already counts only if it reads back.
#[test]
fn committing_the_good_bytes_again_repairs_what_was_damaged() {
    for at in [2, 3, 5, 10] {
        let f = Fixture::new();
        let bytes = Noise(6).bytes(200_000);
        f.commit(&f.write("a.bin", &bytes));
        f.store.close().unwrap();
        let pack = pack_files(&f).remove(0);
        let mut damaged = fs::read(&pack).unwrap();
        let n = damaged.len();
        damaged[n / at] ^= 1;
        fs::write(&pack, damaged).unwrap();
        let store = Store::open(f.store.dir(), &options()).unwrap();
        store.commit(&request(&f.path("a.bin"))).unwrap();
        for rev in ["main/1", "main/2"] {
            assert!(
                read(&store, rev, "a.bin").unwrap() == bytes,
                "{rev}, damaged at {n}/{at}"
            );
        }
    }
}

#[test]
fn a_missing_pack_keeps_its_number_and_is_replaced_by_the_good_bytes() {
    let f = Fixture::new();
    let bytes = Noise(7).bytes(50_000);
    f.commit(&f.write("a.bin", &bytes));
    f.store.close().unwrap();
    let pack = pack_files(&f).remove(0);
    let saved = fs::read(&pack).unwrap();
    fs::remove_file(&pack).unwrap();
    let store = Store::open(f.store.dir(), &options()).unwrap();
    assert!(read(&store, "main/1", "a.bin").is_err());
    store.commit(&request(&f.path("a.bin"))).unwrap();
    assert!(
        !pack.exists(),
        "the number of a published pack is not given again"
    );
    assert!(read(&store, "main/2", "a.bin").unwrap() == bytes);
    // Should it come back, nothing is lost by that.
    fs::write(&pack, saved).unwrap();
    let store = Store::open(f.store.dir(), &options()).unwrap();
    let report = store.verify(&store.versions("main").unwrap(), &mut |_| {});
    assert_eq!((report.versions, report.damage), (2, vec![]));
}

/// The ninth revision's base is the first, not the one before it: what is in the cache of that says nothing of the packs either.
#[test]
fn a_return_to_a_damaged_revision_that_is_still_in_memory_repairs_it() {
    let f = Fixture::new();
    let mut model = Model::new(&[100_000]);
    let first = model.safetensors(0);
    for _ in 0..8 {
        f.commit(&f.write("m.safetensors", &model.safetensors(0)));
        model.step();
    }
    assert!(f.read("main/1", "m.safetensors") == first);
    let pack = pack_files(&f).remove(0);
    let mut damaged = fs::read(&pack).unwrap();
    let n = damaged.len();
    damaged[n / 2] ^= 1;
    fs::write(&pack, damaged).unwrap();
    f.commit(&f.write("m.safetensors", &first));
    f.store.close().unwrap();
    let store = Store::open(f.store.dir(), &options()).unwrap();
    for rev in ["main/1", "main/9"] {
        assert!(read(&store, rev, "m.safetensors").unwrap() == first, "{rev}");
    }
}

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

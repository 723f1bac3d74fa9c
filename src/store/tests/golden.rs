//! Stores that format version 1 wrote, kept beside the code: what is in them comes out for ever.

use super::*;

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for e in fs::read_dir(from).unwrap().map(|e| e.unwrap()) {
        let (from, to) = (e.path(), to.join(e.file_name()));
        if from.is_dir() {
            copy(&from, &to);
        } else {
            fs::copy(&from, &to).unwrap();
        }
    }
}

const VERSIONS: [(&str, &str, u64); 4] = [
    (
        "main/1",
        "0e2314bd483b4fab3f3d7830cec658f4f80739edad2ab6fe0e17c2f243052625",
        1,
    ),
    (
        "main/2",
        "a2df65025c1613c6443defcee718612829a8dadc08c631fccca5eee2d7b5d233",
        1,
    ),
    (
        "main/3",
        "85a856854d07a1bdfb13ae0465ecb6b35c65ee599878fdb36768ec7f03a424d9",
        1,
    ),
    (
        "exp/1",
        "3ab341b5f0799763d0548c344a2848bf16804dc3e73cbf8046f17a6510eb3445",
        4,
    ),
];

#[test]
fn version_1_is_read_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store/golden/v1");
    copy(&golden, dir.path());
    // With its index, and from packs and journal alone.
    for round in 0..2 {
        let store = Store::open(dir.path(), &options()).unwrap();
        let mut all = Vec::new();
        for (rev, id, files) in VERSIONS {
            let v = store.resolve(rev).unwrap();
            assert_eq!((v.id.to_string().as_str(), v.files), (id, files), "{rev}");
            all.push(v);
        }
        assert_eq!(store.tag_target("best").unwrap().id, all[1].id);
        assert_eq!(all[3].version.parents, [all[1].id]);
        let mut report = store.verify(&all, &mut |_| {});
        store.verify_packs(&mut report);
        assert_eq!(
            (report.versions, report.files, report.damage),
            (4, 6, vec![]),
            "round {round}"
        );
        assert_eq!(
            read(&store, "exp", "run/notes.txt").unwrap(),
            "hello\n".repeat(50).as_bytes()
        );
        let link = store.entry(&all[3], b"run/link").unwrap();
        assert_eq!(link.kind, EntryKind::Symlink(b"notes.txt".to_vec()));
        let stats = store.stats().unwrap();
        assert!(
            stats.depths.keys().any(|d| *d > 0),
            "the golden store holds deltas: {:?}",
            stats.depths
        );
        if round == 0 {
            fs::remove_dir_all(dir.path().join("index")).unwrap();
        }
    }
}

/// One that pulled branches (two with the same versions) and an object that is another one with an atom changed, put an object
/// whose fold is kept, and was repaired: what was damaged lies in its quarantine.
#[test]
fn what_peers_left_is_read_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/store/golden");
    copy(&golden.join("v1-peers"), dir.path());
    let store = Store::open(dir.path(), &options()).unwrap();
    for (rev, id) in [
        ("exp/1", "881d4e51"),
        ("exp/2", "981e05e3913dc961"),
        ("main/1", "d3f7ba7e3e0ba2a2"),
        ("second", "d3f7ba7e3e0ba2a2"),
    ] {
        let v = store.resolve(rev).unwrap();
        assert!(v.id.to_string().starts_with(id), "{rev}: {}", v.id);
    }
    let head = store.latest("main").unwrap();
    assert!(store.signature("main", &head.id).is_some());
    assert_eq!(read(&store, "exp", "model").unwrap(), b"three\n".repeat(9));
    let versions: Vec<_> = ["main", "exp"]
        .iter()
        .flat_map(|b| store.versions(b).unwrap())
        .collect();
    let mut report = store.verify(&versions, &mut |_| {});
    store.verify_packs(&mut report);
    assert_eq!((report.damage, report.versions), (vec![], 3));
    let objects =
        ["ecf3567112519ce3", "bf40cbe40f7ea67e", "2c829a90a5601dff"].map(|id| store.object(id).unwrap());
    for object in &objects {
        object.copy_to(&mut std::io::sink(), &mut |_| Ok(())).unwrap();
    }
    let proof = store.prove(&objects[1], 3072..4096).unwrap().encode();
    assert!(proof == fs::read(golden.join("v1-peers.proof")).unwrap());
    // A fold that would not be taken would be made again.
    let fold = fs::read_dir(dir.path().join("folds"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let before = fs::metadata(&fold).unwrap().modified().unwrap();
    store.prove(&objects[2], 0..32).unwrap();
    assert_eq!(fs::metadata(&fold).unwrap().modified().unwrap(), before);
    fs::remove_file(&fold).unwrap();
    store
        .object("2c829a90")
        .and_then(|object| store.prove(&object, 0..32))
        .unwrap();
    let kept = golden.join("v1-peers/folds").join(fold.file_name().unwrap());
    assert!(fs::read(&fold).unwrap() == fs::read(kept).unwrap());
}

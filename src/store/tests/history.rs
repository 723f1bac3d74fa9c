//! Versions, branches and tags, from several processes at once.

use super::*;
use crate::error::Kind;

#[test]
fn two_stores_on_one_directory_number_without_gaps() {
    let f = Fixture::new();
    let each = 12;
    let writers: Vec<_> = (0..3)
        .map(|_| Store::open(f.store.dir(), &options()).unwrap())
        .collect();
    std::thread::scope(|s| {
        for (w, store) in writers.iter().enumerate() {
            let f = &f;
            s.spawn(move || {
                for i in 0..each {
                    let path = f.write(
                        &format!("w{w}/{i}.bin"),
                        &Noise((w * 100 + i + 1) as u64).bytes(50_000),
                    );
                    store.commit(&request(&path)).unwrap();
                }
            });
        }
    });
    f.store.refresh().unwrap();
    let versions = f.store.versions("main").unwrap();
    assert_eq!(
        versions.iter().map(|v| v.number).collect::<Vec<_>>(),
        (1..=3 * each as u64).collect::<Vec<_>>()
    );
    for pair in versions.windows(2) {
        assert_eq!(pair[1].version.parents, [pair[0].id]);
    }
    assert!(f.store.verify(&versions, &mut |_| {}).damage.is_empty());
}

#[test]
fn threads_of_one_store_commit_at_once() {
    let f = Fixture::new();
    std::thread::scope(|s| {
        for w in 0..4 {
            let f = &f;
            s.spawn(move || {
                for i in 0..5 {
                    f.commit(&f.write(&format!("t{w}/{i}.bin"), &Noise(w * 100 + i + 1).bytes(20_000)));
                }
            });
        }
    });
    assert_eq!(f.store.versions("main").unwrap().len(), 20);
    assert!(
        f.store
            .verify(&f.store.versions("main").unwrap(), &mut |_| {})
            .damage
            .is_empty()
    );
}

#[test]
fn branches_and_tags_reach_other_processes() {
    let f = Fixture::new();
    let other = Store::open(f.store.dir(), &options()).unwrap();
    let first = f.commit(&f.write("a", b"1"));
    f.store.set_tag("best", "main", false).unwrap();
    f.store.make_branch("exp", Some("best")).unwrap();
    let path = f.write("a", b"2");
    let done = f
        .store
        .commit(&CommitRequest {
            branch: "exp".into(),
            ..request(&path)
        })
        .unwrap();
    assert_eq!((done.branch.as_str(), done.number), ("exp", 1));
    assert!(other.refresh().unwrap());
    assert_eq!(other.branches(), ["exp", "main"]);
    assert_eq!(other.resolve("best").unwrap().id, first.id);
    assert_eq!(other.version(&done.id).unwrap().version.parents, [first.id]);
    assert_eq!(other.tags().len(), 1);
    assert!(!other.refresh().unwrap());
    let bad = CommitRequest {
        branch: "best".into(),
        ..request(&path)
    };
    assert_eq!(f.store.commit(&bad).unwrap_err().kind(), Kind::Exists);
    let bad = CommitRequest {
        branch: "../x".into(),
        ..request(&path)
    };
    assert_eq!(f.store.commit(&bad).unwrap_err().kind(), Kind::Usage);
}

#[test]
fn several_loose_files_can_be_one_version() {
    let f = Fixture::new();
    let (a, b) = (f.write("model.bin", b"m"), f.write("config.json", b"{}"));
    let entries = vec![(b"model.bin".to_vec(), a), (b"config.json".to_vec(), b)];
    f.store
        .commit(&CommitRequest {
            entries,
            ..request(Path::new("x"))
        })
        .unwrap();
    let v = f.store.resolve("main").unwrap();
    assert_eq!(
        (v.files, v.version.entry.as_slice(), v.version.len),
        (2, &b"model.bin"[..], 3)
    );
    assert_eq!(f.read("main", "config.json"), b"{}");
}

#[test]
fn diff_tells_what_moved() {
    let f = Fixture::new();
    let mut model = Model::new(&[50_000]);
    f.write("ck/model.safetensors", &model.safetensors(0));
    f.write("ck/config.json", b"{}");
    f.commit(&f.path("ck"));
    model.step();
    f.write("ck/model.safetensors", &model.safetensors(1));
    f.write("ck/config.json", b"{ }");
    f.write("ck/new.txt", b"");
    f.commit(&f.path("ck"));
    let d = f
        .store
        .diff(
            &f.store.resolve("main/1").unwrap(),
            &f.store.resolve("main/2").unwrap(),
        )
        .unwrap();
    assert_eq!(d.tensors.len(), 1);
    assert!((0.04..0.06).contains(&d.tensors[0].changed), "{:?}", d.tensors[0]);
    let norm = d.tensors[0].relative_norm.unwrap();
    assert!(norm > 1e-4 && norm < 1e-2, "{norm}");
    assert_eq!(
        (d.files_changed, d.files_added),
        (vec!["ck/config.json".to_owned()], vec!["ck/new.txt".to_owned()])
    );
}

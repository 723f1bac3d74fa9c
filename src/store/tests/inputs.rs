//! Input that is odd, hostile, or changes under the reader.

use super::*;
use crate::error::Kind;
use std::os::unix::fs::symlink;

#[test]
fn hostile_files_are_stored_as_what_they_are() {
    let f = Fixture::new();
    let whole = Model::new(&[5000]).safetensors(1);
    let mut huge = whole.clone();
    huge[..8].copy_from_slice(&(1u64 << 63).to_le_bytes());
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("truncated.safetensors", whole[..whole.len() - 100].to_vec()),
        ("huge.safetensors", huge),
        ("trailing.safetensors", [&whole[..], &[0; 1024]].concat()),
        ("empty.safetensors", vec![]),
        ("short.safetensors", vec![8, 0, 0]),
        ("cut.pt", b"PK\x03\x04 and then nothing".to_vec()),
        (
            "pickle.pt",
            b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00touch\x85R.".to_vec(),
        ),
    ];
    for (name, bytes) in cases {
        let path = f.write(name, &bytes);
        f.commit(&path);
        assert!(f.read("main", name) == bytes, "{name}");
        let torn = f.store.probe(&path).unwrap().torn;
        assert_eq!(
            torn.is_some(),
            [
                "truncated.safetensors",
                "huge.safetensors",
                "short.safetensors",
                "cut.pt"
            ]
            .contains(&name),
            "{name}: {torn:?}"
        );
    }
}

#[test]
fn what_cannot_be_stored_is_named() {
    let f = Fixture::new();
    f.write("run/model.bin", b"x");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        f.path("run/pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from(0o600),
        0,
    )
    .unwrap();
    let e = f.store.commit(&request(&f.path("run"))).unwrap_err();
    assert_eq!(e.kind(), Kind::Refused);
    assert!(e.to_string().contains("pipe"), "{e}");
    assert!(f.store.versions("main").unwrap().is_empty());
    let e = f.store.commit(&request(&f.path("nothing"))).unwrap_err();
    assert_eq!(e.kind(), Kind::NotFound);
}

/// The cache of huggingface_hub: blobs, and snapshots that link to them.
#[test]
fn links_are_kept_or_followed_as_asked() {
    let f = Fixture::new();
    f.write("hub/blobs/abc", b"weights");
    fs::create_dir_all(f.path("hub/snapshots/1")).unwrap();
    symlink("../../blobs/abc", f.path("hub/snapshots/1/model.bin")).unwrap();
    let done = f.commit(&f.path("hub"));
    assert_eq!(done.links_outside, 0);
    let done = f.commit(&f.path("hub/snapshots/1"));
    assert_eq!(done.links_outside, 1);
    let link = CommitRequest {
        keep_links: true,
        ..request(&f.path("hub/snapshots/1/model.bin"))
    };
    let done = f.store.commit(&link).unwrap();
    assert_eq!((done.links_outside, done.bytes), (1, 0));
    let follow = |name: &str| CommitRequest {
        follow_links: true,
        ..request(&f.path(name))
    };
    f.store.commit(&follow("hub/snapshots/1")).unwrap();
    assert_eq!(f.read("main", "1/model.bin"), b"weights");
    symlink("nowhere", f.path("hub/snapshots/1/dangling")).unwrap();
    assert_eq!(f.store.commit(&follow("hub")).unwrap_err().kind(), Kind::NotFound);
    fs::remove_file(f.path("hub/snapshots/1/dangling")).unwrap();
    symlink("..", f.path("hub/snapshots/back")).unwrap();
    let e = f.store.commit(&follow("hub")).unwrap_err();
    assert_eq!(e.kind(), Kind::Refused);
    symlink("self", f.path("hub/self")).unwrap();
    assert!(f.store.commit(&follow("hub")).is_err());
}

#[test]
fn a_file_that_never_rests_is_not_committed_torn() {
    let f = Fixture::new();
    let path = f.write("busy.bin", &Noise(3).bytes(4_000_000));
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        let writer = s.spawn(|| {
            use std::io::Write;
            let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                file.write_all(b"more").unwrap();
                std::thread::sleep(std::time::Duration::from_micros(200));
            }
        });
        let result = f.store.commit(&request(&path));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        writer.join().unwrap();
        assert_eq!(result.unwrap_err().kind(), Kind::Changed);
    });
    assert!(f.store.versions("main").unwrap().is_empty());
    f.commit(&path);
    assert!(f.read("main", "busy.bin") == fs::read(&path).unwrap());
}

#[test]
fn a_store_is_not_committed_into_itself() {
    let f = Fixture::new();
    f.commit(&f.write("a.bin", &Noise(1).bytes(1000)));
    let e = f.store.commit(&request(f.dir.path())).unwrap_err();
    assert_eq!(e.kind(), Kind::Refused, "{e}");
    assert_eq!(f.store.versions("main").unwrap().len(), 1);
}

#[test]
fn a_commit_that_is_not_confirmed_is_not_published() {
    let f = Fixture::new();
    let path = f.write("a.bin", b"x");
    let e = f
        .store
        .commit_if(&request(&path), &|| Err(Error::new(Kind::Changed, "moved")))
        .unwrap_err();
    assert_eq!(e.kind(), Kind::Changed);
    assert!(f.store.versions("main").unwrap().is_empty());
    assert_eq!(
        f.store.stats().unwrap().unused,
        0,
        "what was written for it is taken back"
    );
}

/// What `save_pretrained` leaves that saves one file over several shards.
#[test]
fn an_index_left_behind_by_shards_names_none() {
    let f = Fixture::new();
    let index = f.write(
        "model.safetensors.index.json",
        br#"{"weight_map":{"a":"model-1.safetensors","b":"model-2.safetensors"}}"#,
    );
    let named = || f.store.probe(&index).unwrap().shards.map(|s| s.len());
    assert_eq!(named(), Some(2));
    f.write("model.safetensors", b"whole");
    assert_eq!(named(), None);
    // With one of the shards there, the other is missing.
    f.write("model-2.safetensors", b"half");
    assert_eq!(named(), Some(2));
}

#[test]
fn a_message_fits_into_a_frame_between_peers() {
    let f = Fixture::new();
    let mut request = request(&f.write("a", b"some bytes"));
    request.message = "x".repeat((64 << 10) + 1);
    assert_eq!(f.store.commit(&request).unwrap_err().kind(), Kind::Usage);
    request.message.pop();
    f.store.commit(&request).unwrap();
    assert_eq!(f.store.latest("main").unwrap().version.message, request.message);
}

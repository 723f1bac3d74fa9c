//! What commits leave that died.

use super::repack::{again, all_read, series};
use super::*;

#[test]
fn what_writers_left_that_died_is_given_back() {
    let f = Fixture::new();
    let files = series(&f, &[3000], 3);
    let dir = f.store.dir().join("packs");
    let one = fs::read(dir.join("00000001.pack")).unwrap();
    for (name, bytes) in [
        ("0000000a.pack", &one[..]),
        ("0000000b.pack", b""),
        ("0000000c.pack", b"torn"),
    ] {
        fs::write(dir.join(name), bytes).unwrap();
    }
    // One that is at work, in another process as far as anyone can tell.
    let store = again(&f);
    let mut writer = store.0.parts.packs.writer().unwrap();
    writer
        .append(NodeKind::Chunk as u8, &NodeId([7; 32]), &[], b"new")
        .unwrap();
    assert!(again(&f).stats().unwrap().unused > one.len() as u64 / 2);
    let done = again(&f).repack(&RepackRequest::default()).unwrap();
    assert_eq!((done.abandoned, done.packs_after), (3, 2), "{done:?}");
    let range = writer.finish().unwrap();
    assert_eq!(range.pack, 0xd);
    drop(store);
    let store = again(&f);
    let done = store.repack(&RepackRequest::default()).unwrap();
    assert_eq!((done.abandoned, done.packs_after), (1, 1), "{done:?}");
    assert!(store.stats().unwrap().unused < 100);
    all_read(&store, &files, "cleaned");
    assert_eq!(
        store.verify(&store.versions("main").unwrap(), &mut |_| {}).damage,
        []
    );
    // Their numbers are not used again.
    let path = f.write("model.safetensors", &files[0]);
    store.commit(&request(&path)).unwrap();
}

#[test]
fn what_lies_behind_what_was_published_is_cut_off() {
    let f = Fixture::new();
    let files = series(&f, &[3000], 3);
    again(&f).repack(&RepackRequest::default()).unwrap();
    let pack = fs::read_dir(f.store.dir().join("packs"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let good = fs::read(&pack).unwrap();
    fs::write(&pack, [&good[..], &[7; 5000]].concat()).unwrap();
    // Not while somebody writes there.
    let lock = crate::disk::RealDisk.lock(&pack, false).unwrap();
    again(&f).repack(&RepackRequest::default()).unwrap();
    assert_eq!(fs::metadata(&pack).unwrap().len(), good.len() as u64 + 5000);
    drop(lock);
    let done = again(&f).repack(&RepackRequest::default()).unwrap();
    assert_eq!((done.abandoned, done.moved, done.busy), (1, 0, 0));
    assert!(fs::read(&pack).unwrap() == good);
    all_read(&again(&f), &files, "cut");
}

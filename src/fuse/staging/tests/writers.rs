//! Writers that die, fail, or share a handle; and a run against a real store.

use super::*;
use std::process::{Command, Stdio};

/// A process that a signal has ended but nobody has buried: what a FLUSH during its death would see.
fn killed() -> std::process::Child {
    let mut child = Command::new("sleep")
        .arg("60")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    child.kill().unwrap();
    let stat = format!("/proc/{}/stat", child.id());
    for _ in 0..1000 {
        if std::fs::read_to_string(&stat).unwrap().contains(") Z ") {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}

#[test]
fn a_killed_writer_leaves_its_file_waiting() {
    let f = Fixture::new();
    let mut dead = killed();
    let file = f.create("main/a.pt");
    file.write(0, b"T").unwrap();
    file.flush(dead.id()).unwrap();
    drop(file);
    f.pass(30.0);
    assert!(
        f.waits("main/a.pt").contains("(sleep, process"),
        "{}",
        f.waits("main/a.pt")
    );
    f.put("main/a.pt", "T2");
    f.pass(3.0);
    assert!(f.committed("main/a.pt"));

    // Somebody who only had it open to read or append nothing did no harm.
    f.open("main/a.pt", libc::O_RDWR).flush(dead.id()).unwrap();
    f.pass(3.0);
    assert!(f.committed("main/a.pt"));
    dead.wait().unwrap();
}

#[test]
fn a_killed_child_does_not_spoil_what_its_parent_goes_on_writing() {
    let f = Fixture::new();
    let mut dead = killed();
    let file = f.create("main/a.pt");
    file.write(0, b"T").unwrap();
    file.flush(dead.id()).unwrap();
    file.write(1, b"U").unwrap();
    file.flush(std::process::id()).unwrap();
    drop(file);
    // But a child that outlives its killed parent proves nothing.
    let file = f.create("main/b.pt");
    file.write(0, b"T").unwrap();
    file.flush(dead.id()).unwrap();
    file.flush(std::process::id()).unwrap();
    drop(file);
    f.pass(3.0);
    assert!(f.waits("main/b.pt").contains("killed"));
    assert!(f.committed("main/a.pt"));
    dead.wait().unwrap();
}

#[test]
fn a_suspicion_follows_its_file() {
    let f = Fixture::new();
    let mut dead = killed();
    f.mkdir("main/tmp-d");
    let file = f.create("main/tmp-d/a");
    file.write(0, b"T").unwrap();
    file.flush(dead.id()).unwrap();
    drop(file);
    f.rename("main/tmp-d", "main/d");
    f.pass(1.0);
    assert!(f.waits("main/d").starts_with("a: its writer"));
    f.staging.unlink(&path("main/d/a")).unwrap();
    f.put("main/d/b", "T");
    f.pass(11.0);
    assert!(f.committed("main/d"));
    dead.wait().unwrap();
}

#[test]
fn a_write_that_failed_leaves_its_file_waiting() {
    let f = Fixture::new();
    let file = f.create("main/a.pt");
    file.write(0, b"T").unwrap();
    assert!(file.write(i64::MAX as u64 - 1, b"xx").is_err());
    file.flush(std::process::id()).unwrap();
    drop(file);
    f.pass(3.0);
    assert!(f.waits("main/a.pt").contains("writing it failed"));
    f.put("main/a.pt", "T");
    f.pass(3.0);
    assert!(f.committed("main/a.pt"));
}

#[test]
fn a_handle_does_what_a_file_does() {
    let f = Fixture::new();
    let file = f.create("main/a");
    assert_eq!(file.write(4, b"data").unwrap(), 4);
    assert_eq!(file.read(0, 100).unwrap(), b"\0\0\0\0data");
    assert_eq!(file.read(6, 1).unwrap(), b"t");
    assert!(file.read(u64::MAX, usize::MAX).unwrap().is_empty());
    file.truncate(6).unwrap();
    file.fallocate(0, 0, 10).unwrap();
    assert_eq!(file.attr().unwrap().size, 10);
    file.fallocate(libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE, 0, 10)
        .unwrap();
    assert_eq!(file.read(0, 100).unwrap(), [0; 10]);
    assert_eq!(file.lseek(0, libc::SEEK_HOLE).unwrap(), 10);
    assert_eq!(f.errno(file.lseek(10, libc::SEEK_DATA)), libc::ENXIO);
    assert_eq!(f.errno(file.lseek(-1, libc::SEEK_DATA)), libc::ENXIO);
    file.write(0, b"0123456789").unwrap();
    let other = f.create("main/b");
    assert_eq!(file.copy_to(2, &other, 0, 5).unwrap(), 5);
    assert_eq!(other.read(0, 9).unwrap(), b"23456");
    file.fsync(true).unwrap();
    file.fsync(false).unwrap();
    f.staging.sync_dir(&path("main"), false).unwrap();
    f.staging.unlink(&path("main/a")).unwrap();
    assert_eq!(file.attr().unwrap().nlink, 0);
    file.write(0, b"still here").unwrap();
    assert_eq!(file.read(0, 5).unwrap(), b"still");
    drop(file);
    assert_eq!(f.names("main"), ["b"]);
    assert!(f.staging.statfs().unwrap().f_blocks > 0);
}

#[test]
fn a_real_store_takes_what_settles() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open_or_init(
        dir.path(),
        &Options {
            memory: 8 << 20,
            threads: 2,
            background_threads: 1,
        },
    )
    .unwrap();
    let settle = Settle {
        files: Duration::from_millis(60),
        dirs: Duration::from_millis(80),
    };
    let staging = Staging::open(store.clone(), settle, false).unwrap();
    let header = br#"{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
    let mut model = (header.len() as u64).to_le_bytes().to_vec();
    model.extend_from_slice(header);
    model.extend_from_slice(b"1234");

    let put = |at: &str, bytes: &[u8]| {
        let file = match staging.locate(&path(at)) {
            Ok(_) => staging
                .open_file(&path(at), libc::O_WRONLY | libc::O_TRUNC)
                .unwrap(),
            Err(_) => {
                staging
                    .create(&path(at), 0o640, libc::O_WRONLY, 0, 0, 0)
                    .unwrap()
                    .0
            }
        };
        file.write(0, bytes).unwrap();
    };
    put("main/model.safetensors", &model);
    put("main/torn.safetensors", &model[..model.len() - 1]);
    staging.mkdir(&path("main/ckpt"), 0o755, 0, 0, 0).unwrap();
    put("main/ckpt/model.safetensors", &model);
    put("main/ckpt/notes.txt", &[b'x'; 100_000]);
    let left = staging.drain(Duration::from_secs(20)).unwrap();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(left[0].name, "torn.safetensors");
    assert!(matches!(left[0].state, State::Waiting { .. }));
    assert_eq!(store.versions("main").unwrap().len(), 2);

    // One byte of a committed directory: the rest comes back from the version as it was.
    let file = staging
        .open_file(&path("main/ckpt/model.safetensors"), libc::O_RDWR)
        .unwrap();
    assert_eq!(file.read(0, 1000).unwrap(), model);
    file.write(model.len() as u64 - 1, b"5").unwrap();
    drop(file);
    put("main/torn.safetensors", &model);
    assert!(staging.drain(Duration::from_secs(20)).unwrap().is_empty());
    assert_eq!(store.versions("main").unwrap().len(), 4);
    let Located::Version {
        version,
        path: inside,
    } = staging.locate(&path("main/ckpt/notes.txt")).unwrap()
    else {
        panic!("not committed");
    };
    assert_eq!(inside, path("ckpt/notes.txt"));
    let entry = super::super::repo::find(&store, &version, &inside).unwrap();
    assert_eq!((entry.mode, entry.len()), (0o640, 100_000));
    staging.stop();
    drop(staging);
    let again = Staging::open(store, settle, false).unwrap();
    assert!(again.is_owner());
    assert_eq!(again.list(&path("main")).unwrap().len(), 3);
}

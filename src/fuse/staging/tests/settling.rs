//! When work is committed, and what goes together.

use super::*;

#[test]
fn a_file_is_committed_once_it_was_left_alone() {
    let f = Fixture::new();
    let file = f.create("main/model.pt");
    file.write(0, b"T1").unwrap();
    f.pass(60.0);
    assert_eq!(f.state("main/model.pt"), State::Writing);
    drop(file);
    f.pass(1.0);
    assert_eq!(f.state("main/model.pt"), State::Settling);
    f.pass(1.1);
    assert_eq!(f.log(), ["main: model.pt"]);
    assert!(f.committed("main/model.pt"));
    assert_eq!(f.read("main/model.pt"), "T1");
    assert_eq!(f.names("main"), ["model.pt"]);
    f.pass(100.0);
    assert_eq!(f.log().len(), 1);
}

#[test]
fn a_directory_takes_longer_and_is_one_version() {
    let f = Fixture::new();
    f.mkdir("main/ckpt");
    f.put("main/ckpt/a.pt", "T1");
    f.pass(5.0);
    f.mkdir("main/ckpt/sub");
    f.put("main/ckpt/sub/b.pt", "T2");
    f.pass(9.0);
    assert!(f.log().is_empty());
    f.pass(1.1);
    assert_eq!(f.log(), ["main: ckpt"]);
    assert!(f.committed("main/ckpt"));
    assert_eq!(f.read("main/ckpt/sub/b.pt"), "T2");
    assert_eq!(f.names("main/ckpt"), ["a.pt", "sub"]);
}

#[test]
fn files_written_together_are_one_version_unless_several_hold_tensors() {
    let f = Fixture::new();
    f.put("main/config.json", "{}");
    f.put("main/model.pt", "T");
    f.pass(1.0);
    f.put("main/README.md", "hi");
    f.pass(1.5);
    assert!(f.log().is_empty(), "windows overlap");
    f.pass(1.0);
    assert_eq!(f.log(), ["main: README.md config.json model.pt"]);

    f.put("main/b.pt", "T1");
    f.put("main/a.pt", "T2");
    f.put("main/log.txt", "x");
    f.pass(3.0);
    assert_eq!(f.log()[1..], ["main: b.pt", "main: a.pt log.txt"]);
}

#[test]
fn shards_wait_for_their_index_and_the_index_for_its_shards() {
    let f = Fixture::new();
    let (one, two) = ("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors");
    f.put(&format!("main/{one}"), "T1");
    let second = f.create(&format!("main/{two}"));
    f.pass(30.0);
    assert!(f.log().is_empty(), "the first shard waits for the second");
    assert!(f.waits(&format!("main/{one}")).contains(two));
    f.put("main/m.safetensors.index.json", &format!("I {one} {two}"));
    f.pass(30.0);
    assert!(f.log().is_empty(), "so does the index");
    second.write(0, b"T2").unwrap();
    drop(second);
    f.pass(3.0);
    assert_eq!(f.log(), [format!("main: {one} {two} m.safetensors.index.json")]);
}

#[test]
fn an_index_that_names_a_missing_shard_waits_until_it_comes() {
    let f = Fixture::new();
    f.put("main/m.index.json", "I a.bin b.bin");
    f.put("main/a.bin", "T1");
    f.pass(5.0);
    assert!(f.log().is_empty());
    assert!(f.waits("main/m.index.json").contains("b.bin, which is not there"));
    assert!(f.waits("main/a.bin").contains("m.index.json"));
    f.pass(500.0);
    f.put("main/b.bin", "T2");
    f.pass(3.0);
    assert_eq!(f.log(), ["main: a.bin b.bin m.index.json"]);

    f.mkdir("main/d");
    f.put("main/d/m.index.json", "I c.bin ../../../etc/passwd");
    f.pass(11.0);
    assert!(f.waits("main/d").contains("c.bin, which is not there"));
    f.put("main/d/c.bin", "T");
    f.pass(11.0);
    assert!(f.committed("main/d"));
}

#[test]
fn unfinished_names_are_no_entries_and_a_renamed_directory_settles_at_once() {
    let f = Fixture::new();
    f.mkdir("main/tmp-ckpt");
    f.put("main/tmp-ckpt/a.pt", "T1");
    f.put("main/.model.pt.Ab12Cd", "T2");
    f.put("main/x.pt.tmp", "T3");
    f.pass(100.0);
    assert!(f.log().is_empty());
    assert!(f.waits("main/x.pt.tmp").contains("rename"));
    f.rename("main/tmp-ckpt", "main/ckpt");
    f.pass(0.0);
    assert_eq!(f.log(), ["main: ckpt"]);
    f.rename("main/.model.pt.Ab12Cd", "main/model.pt");
    f.pass(1.0);
    assert_eq!(f.log().len(), 1);
    f.pass(1.1);
    assert_eq!(f.log()[1], "main: model.pt");
    assert_eq!(f.names("main"), ["ckpt", "model.pt", "x.pt.tmp"]);
}

#[test]
fn unfinished_names_inside_keep_a_directory_from_settling_but_dotfiles_are_content() {
    let f = Fixture::new();
    f.mkdir("main/d");
    f.put("main/d/.metadata", "m");
    f.put("main/d/a.pt.tmp", "T");
    f.pass(11.0);
    assert!(f.waits("main/d").contains("a.pt.tmp"));
    f.rename("main/d/a.pt.tmp", "main/d/a.pt");
    f.pass(11.0);
    assert_eq!(f.names("main/d"), [".metadata", "a.pt"]);
    assert!(f.committed("main/d"));
}

#[test]
fn a_renamed_directory_with_an_open_writer_is_not_taken() {
    let f = Fixture::new();
    f.mkdir("main/tmp-d");
    let file = f.create("main/tmp-d/a");
    f.rename("main/tmp-d", "main/d");
    f.pass(20.0);
    assert_eq!(f.state("main/d"), State::Writing);
    file.write(0, b"T").unwrap();
    drop(file);
    f.pass(0.1);
    assert!(f.committed("main/d"));
    assert_eq!(f.read("main/d/a"), "T");
}

#[test]
fn a_renamed_directory_that_is_worked_on_has_to_settle() {
    let f = Fixture::new();
    f.mkdir("main/tmp-d");
    f.put("main/tmp-d/a", "T");
    f.rename("main/tmp-d", "main/d");
    f.put("main/d/b", "T");
    f.pass(0.1);
    assert!(!f.committed("main/d"));
    f.pass(11.0);
    assert!(f.committed("main/d"));
}

#[test]
fn what_is_torn_waits_and_becomes_whole_by_itself() {
    let f = Fixture::new();
    f.put("main/model.pt", "X");
    f.mkdir("main/d");
    f.put("main/d/w.safetensors", "X");
    f.pass(11.0);
    assert!(f.log().is_empty());
    assert_eq!(f.waits("main/model.pt"), "is cut short");
    assert_eq!(f.waits("main/d"), "w.safetensors: is cut short");
    f.open("main/model.pt", libc::O_RDWR).write(0, b"T!").unwrap();
    f.put("main/d/w.safetensors", "T");
    f.pass(11.0);
    assert_eq!(f.log(), ["main: d", "main: model.pt"]);
}

#[test]
fn whatever_speaks_against_it_commit_now_commits() {
    let f = Fixture::new();
    f.put("main/model.pt", "X");
    f.pass(3.0);
    let done = f.staging.commit_now(&path("main/model.pt"), "as it is").unwrap();
    assert_eq!(f.repo.version(&done.id).unwrap().version.message, "as it is");
    assert!(f.committed("main/model.pt"));
    assert_eq!(
        f.staging.commit_now(&path("main/model.pt"), "").unwrap().id,
        done.id
    );

    f.put("main/x.part", "T");
    f.staging.commit_now(&path("main/x.part"), "").unwrap();
    assert!(f.committed("main/x.part"));

    f.mkdir("main/d");
    f.put("main/d/a.tmp", "T");
    f.staging.commit_now(&path("main/d/a.tmp"), "").unwrap();
    assert!(f.committed("main/d"));
    assert_eq!(
        f.staging.commit_now(&path("main/no"), "").unwrap_err().kind(),
        Kind::NotFound
    );
    assert_eq!(
        f.staging.commit_now(&path("main"), "").unwrap_err().kind(),
        Kind::Usage
    );
}

#[test]
fn commit_now_takes_an_index_and_its_shards_together() {
    let f = Fixture::new();
    f.put("main/m.index.json", "I a.bin b.bin");
    f.put("main/a.bin", "T1");
    f.put("main/other.bin", "T2");
    f.staging.commit_now(&path("main/a.bin"), "").unwrap();
    assert_eq!(f.log(), ["main: a.bin m.index.json"]);
}

#[test]
fn a_failed_commit_keeps_the_entry_and_is_tried_again() {
    let f = Fixture::new();
    f.put("main/a.pt", "T");
    f.fail_next(|| Err(Error::new(Kind::NoSpace, "disk full")));
    f.pass(2.1);
    assert_eq!(
        f.state("main/a.pt"),
        State::Failed {
            reason: "disk full".into()
        }
    );
    assert_eq!(f.read("main/a.pt"), "T");
    f.pass(1.0);
    assert!(f.log().is_empty());
    f.pass(1.1);
    assert!(f.committed("main/a.pt"));
}

#[test]
fn a_commit_that_panics_is_a_failed_commit() {
    let f = Fixture::new();
    f.put("main/a.pt", "T");
    f.fail_next(|| panic!("on purpose"));
    f.pass(2.1);
    assert!(matches!(f.state("main/a.pt"), State::Failed { .. }));
    f.pass(2.1);
    assert!(f.committed("main/a.pt"));
}

#[test]
fn what_changes_during_its_commit_is_committed_only_as_it_is_then() {
    let f = Fixture::new();
    f.put("main/a.pt", "T1");
    let staging = f.staging.clone();
    f.fail_next(move || {
        staging
            .open_file(&path("main/a.pt"), libc::O_RDWR)?
            .write(0, b"T2")?;
        Ok(())
    });
    f.pass(2.1);
    assert_eq!(f.log().len(), 0, "a version that never was is not published");
    assert_eq!(f.state("main/a.pt"), State::Settling);
    assert_eq!(f.read("main/a.pt"), "T2");
    f.pass(2.1);
    assert_eq!(f.log().len(), 1);
    assert!(f.committed("main/a.pt"));
    assert_eq!(f.read("main/a.pt"), "T2");
}

#[test]
fn what_is_removed_or_replaced_during_its_commit_stays_removed_or_replaced() {
    let f = Fixture::new();
    f.put("main/a.pt", "T1");
    let staging = f.staging.clone();
    f.fail_next(move || staging.unlink(&path("main/a.pt")));
    f.pass(2.1);
    assert_eq!(f.log().len(), 0);
    assert!(f.names("main").is_empty());

    f.put("main/b.pt", "T1");
    f.put("main/b.tmp", "T22");
    let staging = f.staging.clone();
    f.fail_next(move || staging.rename(&path("main/b.tmp"), &path("main/b.pt"), 0));
    f.pass(2.1);
    assert_eq!(f.read("main/b.pt"), "T22");
    f.pass(2.1);
    assert!(f.committed("main/b.pt"));
    assert_eq!(f.read("main/b.pt"), "T22");
}

#[test]
fn what_was_published_under_an_open_writer_is_not_published_twice() {
    let f = Fixture::new();
    let file = f.create("main/a.pt");
    file.write(0, b"T").unwrap();
    f.pass(1.0);
    let done = f.staging.commit_now(&path("main/a.pt"), "").unwrap();
    assert_eq!(f.state("main/a.pt"), State::Writing);
    drop(file);
    f.pass(2.1);
    assert_eq!(f.log().len(), 1);
    assert!(f.committed("main/a.pt"));
    assert_eq!(
        f.state("main/a.pt"),
        State::Committed {
            version: format!("main/{:06}", done.number)
        }
    );
}

#[test]
fn changes_that_come_past_the_mount_are_noticed() {
    let f = Fixture::new();
    f.put("main/a.pt", "T1");
    f.pass(1.0);
    // The file's times are the real clock's, which the test's only runs ahead of: one second of settling is left.
    std::fs::write(f.backing("main/a.pt"), "T2").unwrap();
    let now = f.clock.now();
    f.clock.0.store(0, Ordering::Relaxed);
    std::fs::write(f.backing("main/a.pt"), "T3").unwrap();
    f.clock.0.store(now.as_millis() as u64, Ordering::Relaxed);
    f.pass(0.5);
    assert!(f.log().is_empty());
    f.pass(3.0);
    assert_eq!(f.read("main/a.pt"), "T3");
    std::fs::remove_dir_all(f.backing("main")).unwrap();
    std::fs::create_dir(f.backing("main")).unwrap();
    f.put("main/gone.pt", "T");
    std::fs::remove_file(f.backing("main/gone.pt")).unwrap();
    f.pass(3.0);
    assert!(f.status("main/gone.pt").is_none());
}

#[test]
fn draining_commits_what_settles_and_tells_what_stays() {
    let f = Fixture::new();
    f.put("main/config.json", "{}");
    let open = f.create("main/big.pt");
    f.pass(3.0);
    assert!(f.waits("main/config.json").contains("big.pt"));
    let staging = f.staging.clone();
    let clock = f.clock.clone();
    let committer = std::thread::spawn(move || {
        for _ in 0..200 {
            clock.0.fetch_add(100, Ordering::Relaxed);
            staging.step();
            std::thread::sleep(Duration::from_millis(2));
        }
    });
    f.staging.freeze();
    let left = f.staging.drain(Duration::from_secs(1000)).unwrap();
    committer.join().unwrap();
    assert_eq!(left.len(), 1, "{left:?}");
    assert_eq!(
        (left[0].name.as_str(), &left[0].state, left[0].writers),
        ("big.pt", &State::Writing, 1)
    );
    assert_eq!(f.log(), ["main: config.json"]);
    assert_eq!(
        f.errno(f.staging.create(&path("main/new"), 0o644, libc::O_RDWR, 0, 0, 0)),
        libc::EROFS
    );
    open.write(0, b"T").unwrap();
}

#[test]
fn a_pipe_is_never_read() {
    let f = Fixture::new();
    let fifo = super::super::super::attr::FileKind::Fifo;
    f.staging.mknod(&path("main/pipe"), fifo, 0o644, 0, 0, 0).unwrap();
    f.mkdir("main/d");
    f.staging
        .mknod(&path("main/d/pipe"), fifo, 0o644, 0, 0, 0)
        .unwrap();
    f.pass(20.0);
    assert!(f.waits("main/pipe").contains("no file"));
    assert!(f.waits("main/d").contains("pipe"));
}

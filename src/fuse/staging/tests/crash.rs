//! A mount that dies, between any two steps.

use super::*;
use crate::fuse::staging::marks::{Mark, Origin};

const WHY: &str = "was being written when the mount stopped";

#[test]
fn interrupted_work_waits_until_it_is_rewritten_removed_or_asked_for() {
    let mut f = Fixture::new();
    for name in ["a.pt", "b.pt", "c.pt", "d.pt"] {
        f.put(&format!("main/{name}"), "T1");
    }
    f.restart();
    f.pass(100.0);
    assert!(f.log().is_empty());
    assert_eq!(f.waits("main/a.pt"), WHY);
    assert_eq!(f.read("main/a.pt"), "T1");

    f.put("main/a.pt", "T2");
    f.staging.unlink(&path("main/b.pt")).unwrap();
    f.staging.commit_now(&path("main/c.pt"), "").unwrap();
    f.pass(3.0);
    assert_eq!(f.log(), ["main: c.pt", "main: a.pt"]);
    f.open("main/d.pt", libc::O_RDWR).write(0, b"T5").unwrap();
    f.pass(3.0);
    assert_eq!(f.waits("main/d.pt"), WHY, "patched, not rewritten");
    f.put("main/d.pt.tmp", "T3");
    f.rename("main/d.pt.tmp", "main/d.pt");
    f.pass(3.0);
    assert_eq!(f.log().len(), 3);
    f.restart();
    assert!(f.committed("main/a.pt") && f.committed("main/c.pt") && f.committed("main/d.pt"));
    f.pass(100.0);
    assert_eq!(f.log().len(), 3);
}

#[test]
fn an_interrupted_directory_waits_until_every_file_is_rewritten() {
    let mut f = Fixture::new();
    f.mkdir("main/d");
    f.put("main/d/a", "T1");
    f.put("main/d/b", "T2");
    f.mkdir("main/empty");
    f.restart();
    f.put("main/d/a", "T1");
    f.put("main/d/c", "T3");
    f.pass(20.0);
    assert_eq!(f.waits("main/d"), format!("b: {WHY}"));
    assert_eq!(f.waits("main/empty"), WHY);
    f.put("main/d/b", "T2");
    f.put("main/empty/x", "T2");
    f.pass(20.0);
    assert_eq!(f.log(), ["main: d", "main: empty"]);
}

#[test]
fn what_only_waited_to_be_renamed_is_suspect_too() {
    let mut f = Fixture::new();
    f.put("main/m.pt.part", "T1");
    f.restart();
    f.rename("main/m.pt.part", "main/m.pt");
    f.pass(20.0);
    assert_eq!(f.waits("main/m.pt"), WHY);
}

#[test]
fn a_crash_between_mark_and_removal_finishes_the_removal() {
    let mut f = Fixture::new();
    f.put("main/a.pt", "T1");
    f.pass(3.0);
    std::fs::write(f.backing("main/a.pt"), "T1").unwrap();
    f.restart();
    assert!(f.committed("main/a.pt"));
    assert_eq!(f.read("main/a.pt"), "T1");
}

#[test]
fn a_crash_before_the_mark_leaves_the_files() {
    let mut f = Fixture::new();
    f.put("main/a.pt", "T1");
    let staging = f.staging.clone();
    f.fail_next(move || {
        // From here on nothing of this mount reaches the disk.
        std::fs::remove_dir_all(staging.dir().join("copy")).map_err(|e| Error::io("", e))
    });
    f.pass(3.0);
    assert_eq!(f.log().len(), 1);
    assert_eq!(f.read("main/a.pt"), "T1");
    assert!(f.backing("main/a.pt").exists());
    f.restart();
    f.pass(100.0);
    assert_eq!(f.waits("main/a.pt"), WHY);
    assert_eq!(f.log().len(), 1);
}

#[test]
fn a_crash_while_copying_back_leaves_the_version_in_view() {
    let mut f = Fixture::new();
    f.mkdir("main/d");
    f.put("main/d/a.pt", "T1");
    f.put("main/d/b.pt", "T2");
    f.pass(11.0);
    let id = f.repo.data.lock().versions[0].id;
    let base = Origin {
        gone: [path("a.pt")].into(),
        ..Origin::new(id, b"d")
    };
    // The mark was written, the copy was not in place yet.
    f.staging
        .marks
        .write("main", b"d", &Mark::Dirty { base: Some(base) })
        .unwrap();
    let copy = f.staging.dir().join("copy/77");
    std::fs::create_dir(&copy).unwrap();
    std::fs::write(copy.join("half"), "x").unwrap();
    f.restart();
    assert!(!copy.exists());
    assert_eq!(f.names("main/d"), ["b.pt"]);
    assert_eq!(f.read("main/d/b.pt"), "T2");
    // The copy was in place: then it is work that was interrupted.
    f.staging
        .marks
        .write(
            "main",
            b"d",
            &Mark::Dirty {
                base: Some(Origin::new(id, b"d")),
            },
        )
        .unwrap();
    std::fs::create_dir(f.backing("main/d")).unwrap();
    std::fs::write(f.backing("main/d/b.pt"), "T9").unwrap();
    f.restart();
    assert_eq!(f.waits("main/d"), format!("b.pt: {WHY}"));
    assert_eq!(f.read("main/d/b.pt"), "T9");
}

#[test]
fn marks_without_files_and_files_without_marks() {
    let mut f = Fixture::new();
    f.staging.marks.write("main", b"never-made", &Mark::NEW).unwrap();
    std::fs::write(f.backing("main/foreign.pt"), "T").unwrap();
    std::fs::write(f.backing("main/damaged.pt"), "T").unwrap();
    std::fs::write(f.staging.dir().join("state/main/damaged.pt"), "nonsense").unwrap();
    f.restart();
    f.pass(100.0);
    assert!(f.status("main/never-made").is_none());
    assert_eq!(f.waits("main/foreign.pt"), WHY);
    assert_eq!(f.waits("main/damaged.pt"), WHY);
    assert!(f.log().is_empty());
}

#[test]
fn a_version_that_was_dropped_takes_its_entry_along_but_never_the_only_copy() {
    let mut f = Fixture::new();
    f.put("main/a.pt", "T1");
    f.pass(3.0);
    f.put("main/b.pt", "T1");
    f.pass(3.0);
    f.repo.data.lock().versions.clear();
    assert!(f.names("main").is_empty());
    std::fs::write(f.backing("main/b.pt"), "T1").unwrap();
    f.restart();
    assert_eq!(f.names("main"), ["b.pt"]);
    assert_eq!(f.waits("main/b.pt"), WHY);
}

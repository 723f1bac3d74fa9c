//! What programs do to staged and committed files.

use super::*;
use crate::fuse::attr::FileKind;
use crate::fuse::staging::{SetAttr, SetTime};

fn committed_dir(f: &Fixture) {
    f.mkdir("main/d");
    f.put("main/d/a.pt", "T1");
    f.mkdir("main/d/sub");
    f.put("main/d/sub/b.txt", "bb");
    f.staging.symlink(&path("main/d/link"), b"a.pt", 0, 0).unwrap();
    f.staging
        .link(&path("main/d/a.pt"), &path("main/d/same.pt"))
        .unwrap();
    let old = SetTime::At(Timestamp {
        seconds: 1_000_000,
        nanos: 7,
    });
    f.staging
        .setattr(
            &path("main/d/sub/b.txt"),
            &SetAttr {
                mode: Some(0o440),
                mtime: Some(old),
                ..SetAttr::default()
            },
        )
        .unwrap();
    f.staging
        .setattr(
            &path("main/d/sub"),
            &SetAttr {
                mode: Some(0o555),
                mtime: Some(old),
                ..SetAttr::default()
            },
        )
        .unwrap();
    f.pass(11.0);
    assert!(f.committed("main/d"));
}

#[test]
fn writing_a_committed_file_brings_it_back_and_makes_the_next_version() {
    let f = Fixture::new();
    f.put("main/a.pt", "Tabc");
    f.pass(3.0);
    assert_eq!(
        f.errno(f.staging.open_file(&path("main/a.pt"), libc::O_RDONLY)),
        libc::EAGAIN
    );
    let file = f.open("main/a.pt", libc::O_RDWR);
    assert_eq!(file.read(0, 10).unwrap(), b"Tabc");
    file.write(1, b"X").unwrap();
    drop(file);
    assert_eq!(f.read("main/a.pt"), "TXbc");
    f.pass(3.0);
    assert_eq!(f.log().len(), 2);
    assert_eq!(f.read("main/a.pt"), "TXbc");
    f.put("main/a.pt", "Tnew");
    f.pass(3.0);
    assert_eq!((f.log().len(), f.read("main/a.pt").as_str()), (3, "Tnew"));
}

#[test]
fn a_copy_brought_back_has_everything() {
    let f = Fixture::new();
    committed_dir(&f);
    let before = f.staging.attr(&path("main/d/sub/b.txt")).unwrap();
    f.put("main/d/new.txt", "n");
    assert_eq!(f.names("main/d"), ["a.pt", "link", "new.txt", "same.pt", "sub"]);
    let after = f.staging.attr(&path("main/d/sub/b.txt")).unwrap();
    assert_eq!(
        (before.mode, before.mtime, before.size),
        (after.mode, after.mtime, after.size)
    );
    assert_eq!(
        f.staging.attr(&path("main/d/sub")).unwrap().mtime.seconds,
        1_000_000
    );
    assert_eq!(f.staging.attr(&path("main/d/sub")).unwrap().mode, 0o555);
    assert_eq!(f.staging.attr(&path("main/d/a.pt")).unwrap().nlink, 2);
    assert_eq!(f.staging.readlink(&path("main/d/link")).unwrap(), b"a.pt");
    f.pass(11.0);
    assert_eq!(f.log(), ["main: d", "main: d"]);
    assert_eq!(f.staging.readlink(&path("main/d/link")).unwrap(), b"a.pt");
}

#[test]
fn removing_a_committed_checkpoint_brings_nothing_back() {
    let f = Fixture::new();
    committed_dir(&f);
    let no_files = || std::fs::read_dir(f.backing("main")).unwrap().count() == 0;
    assert_eq!(f.errno(f.staging.rmdir(&path("main/d"))), libc::ENOTEMPTY);
    assert_eq!(f.errno(f.staging.unlink(&path("main/d"))), libc::EISDIR);
    assert_eq!(f.errno(f.staging.rmdir(&path("main/d/a.pt"))), libc::ENOTDIR);
    for name in ["sub/b.txt", "link", "a.pt", "same.pt"] {
        f.staging.unlink(&path(&format!("main/d/{name}"))).unwrap();
        assert_eq!(
            f.errno(f.staging.attr(&path(&format!("main/d/{name}")))),
            libc::ENOENT
        );
    }
    assert_eq!(f.names("main/d"), ["sub"]);
    f.staging.rmdir(&path("main/d/sub")).unwrap();
    assert!(f.names("main/d").is_empty());
    f.staging.rmdir(&path("main/d")).unwrap();
    assert!(f.names("main").is_empty() && no_files());
    f.pass(20.0);
    assert_eq!(f.log().len(), 1);
    f.mkdir("main/d");
    f.put("main/d/x", "T");
    assert_eq!(f.names("main/d"), ["x"]);

    f.put("main/a.pt", "T");
    f.pass(3.0);
    f.staging.unlink(&path("main/a.pt")).unwrap();
    assert_eq!(f.errno(f.staging.locate(&path("main/a.pt"))), libc::ENOENT);
}

#[test]
fn removing_part_of_a_committed_directory_makes_a_version_without_it() {
    let mut f = Fixture::new();
    committed_dir(&f);
    f.staging.unlink(&path("main/d/a.pt")).unwrap();
    f.pass(45.0);
    assert_eq!(f.log().len(), 1);
    f.pass(5.1);
    assert_eq!(f.log().len(), 2);
    assert_eq!(f.names("main/d"), ["link", "same.pt", "sub"]);

    f.staging.unlink(&path("main/d/link")).unwrap();
    f.restart();
    assert_eq!(f.names("main/d"), ["same.pt", "sub"]);
    f.pass(20.0);
    assert!(f.waits("main/d").contains("being removed"));
    f.put("main/d/again", "x");
    assert_eq!(f.names("main/d"), ["again", "same.pt", "sub"]);
}

#[test]
fn replacing_by_rename_and_exchange() {
    let f = Fixture::new();
    f.put("main/a.pt", "T1");
    f.put("main/b.pt", "T2");
    f.pass(3.0);
    // A temporary file over a committed one: nothing is brought back for it.
    f.put("main/a.pt.tmp", "T3");
    f.rename("main/a.pt.tmp", "main/a.pt");
    assert_eq!(f.read("main/a.pt"), "T3");
    assert_eq!(f.names("main"), ["a.pt", "b.pt"]);
    f.pass(3.0);
    assert_eq!(f.log().len(), 3);

    f.staging
        .rename(&path("main/a.pt"), &path("main/b.pt"), libc::RENAME_EXCHANGE)
        .unwrap();
    assert_eq!(
        (f.read("main/a.pt"), f.read("main/b.pt")),
        ("T2".into(), "T3".into())
    );
    let r = f
        .staging
        .rename(&path("main/a.pt"), &path("main/b.pt"), libc::RENAME_NOREPLACE);
    assert_eq!(f.errno(r), libc::EEXIST);
    f.pass(3.0);
    assert_eq!(f.log()[3..], ["main: a.pt", "main: b.pt"]);

    f.rename("main/a.pt", "main/c.pt");
    assert_eq!(f.names("main"), ["b.pt", "c.pt"]);
    f.pass(3.0);
    assert_eq!(f.log()[5], "main: c.pt");
    f.mkdir("main/dir");
    assert_eq!(
        f.errno(f.staging.rename(&path("main/dir"), &path("main/c.pt"), 0)),
        libc::ENOTDIR
    );
    assert_eq!(
        f.errno(f.staging.rename(&path("main/no"), &path("main/c.pt"), 0)),
        libc::ENOENT
    );
    assert_eq!(f.read("main/c.pt"), "T2");
    assert!(f.committed("main/c.pt"));
}

#[test]
fn renaming_one_hard_link_over_another_does_nothing() {
    let f = Fixture::new();
    f.put("main/a", "T1");
    f.staging.link(&path("main/a"), &path("main/b")).unwrap();
    f.rename("main/a", "main/b");
    assert_eq!(f.names("main"), ["a", "b"]);
    f.pass(3.0);
    assert!(f.committed("main/a") && f.committed("main/b"));
    f.pass(30.0);
    assert_eq!(f.log().len(), 2);
}

#[test]
fn attributes_that_do_not_change_bring_nothing_back() {
    let f = Fixture::new();
    f.put("main/a.pt", "T1");
    f.pass(3.0);
    let at = path("main/a.pt");
    let attr = f.staging.attr(&at).unwrap();
    let same = SetAttr {
        mode: Some(attr.mode),
        uid: Some(1),
        atime: Some(SetTime::Now),
        mtime: Some(SetTime::At(attr.mtime)),
        ..SetAttr::default()
    };
    assert_eq!(f.staging.setattr(&at, &same).unwrap(), attr);
    assert!(f.committed("main/a.pt"));
    f.staging
        .setattr(
            &at,
            &SetAttr {
                size: Some(1),
                ..SetAttr::default()
            },
        )
        .unwrap();
    assert_eq!(f.read("main/a.pt"), "T");
    f.pass(3.0);
    f.staging
        .setattr(
            &at,
            &SetAttr {
                mode: Some(0o600),
                ..SetAttr::default()
            },
        )
        .unwrap();
    assert_eq!(f.staging.attr(&at).unwrap().mode, 0o600);
    f.pass(3.0);
    assert_eq!(f.log().len(), 3);
    f.staging
        .setattr(
            &at,
            &SetAttr {
                size: Some(0),
                ..SetAttr::default()
            },
        )
        .unwrap();
    assert_eq!(f.staging.attr(&at).unwrap().size, 0);
    assert_eq!(f.staging.attr(&at).unwrap().mode, 0o600);
}

#[test]
fn branches_are_made_put_away_and_taken_out_again() {
    let f = Fixture::new();
    assert_eq!(f.names(""), ["main"]);
    f.mkdir("exp7");
    assert!(f.repo.branches().contains(&"exp7".to_owned()));
    assert_eq!(
        f.errno(f.staging.mkdir(&path("exp7"), 0o755, 0, 0, 0)),
        libc::EEXIST
    );
    assert_eq!(
        f.errno(f.staging.mkdir(&path(".bad"), 0o755, 0, 0, 0)),
        libc::EINVAL
    );
    f.put("exp7/a", "T");
    assert_eq!(f.errno(f.staging.rmdir(&path("exp7"))), libc::ENOTEMPTY);
    f.pass(3.0);
    assert_eq!(f.errno(f.staging.rmdir(&path("exp7"))), libc::ENOTEMPTY);
    f.staging.unlink(&path("exp7/a")).unwrap();
    f.staging.rmdir(&path("exp7")).unwrap();
    assert_eq!(f.names(""), ["main"]);
    assert_eq!(f.errno(f.staging.attr(&path("exp7"))), libc::ENOENT);
    f.mkdir("exp7");
    assert_eq!(f.names(""), ["exp7", "main"]);
    assert_eq!(f.errno(f.staging.rmdir(&path("main"))), libc::EBUSY);
    assert_eq!(
        f.errno(f.staging.create(&path("file"), 0o644, libc::O_RDWR, 0, 0, 0)),
        libc::EPERM
    );
    assert_eq!(
        f.errno(f.staging.rename(&path("exp7"), &path("exp8"), 0)),
        libc::EPERM
    );
    f.put("main/x", "T");
    assert_eq!(
        f.errno(f.staging.rename(&path("main/x"), &path("x"), 0)),
        libc::EPERM
    );

    // A branch that another program made shows up, and needs no directory before it is used.
    f.repo.make_branch("fork").unwrap();
    assert!(f.staging.attr(&path("fork")).unwrap().kind == FileKind::Dir);
    assert!(f.names("fork").is_empty());
    f.put("fork/y", "T");
    f.pass(3.0);
    assert!(f.log().contains(&"fork: y".to_owned()));
}

#[test]
fn failed_calls_leave_no_entry_behind() {
    let f = Fixture::new();
    assert_eq!(
        f.errno(f.staging.create(&path("main/no/x"), 0o644, libc::O_RDWR, 0, 0, 0)),
        libc::ENOENT
    );
    assert_eq!(
        f.errno(f.staging.link(&path("main/no"), &path("main/x"))),
        libc::ENOENT
    );
    f.mkdir("main/d");
    assert_eq!(
        f.errno(f.staging.link(&path("main/d"), &path("main/x"))),
        libc::EPERM
    );
    let device = f.staging.mknod(&path("main/dev"), FileKind::Char, 0o644, 0, 0, 0);
    assert_eq!(f.errno(device), libc::EPERM);
    assert_eq!(
        f.errno(
            f.staging
                .create(&[b"main".to_vec(), b"..".to_vec()], 0o644, 2, 0, 0, 0)
        ),
        libc::EINVAL
    );
    assert_eq!(f.names("main"), ["d"]);
    assert_eq!(f.staging.status().unwrap().entries.len(), 1);
    assert!(f.staging.marks.load("main", b"x").unwrap().is_none());
}

#[test]
fn user_attributes_are_kept_and_the_mounts_own_are_not() {
    let f = Fixture::new();
    f.put("main/a", "T");
    let at = path("main/a");
    if f.staging.setxattr(&at, b"user.note", b"hi", 0).is_err() {
        return; // This file system keeps none.
    }
    f.staging.setxattr(&at, b"user.zspace.id", b"x", 0).unwrap();
    assert_eq!(f.staging.listxattr(&at).unwrap(), [b"user.note".to_vec()]);
    assert_eq!(f.staging.getxattr(&at, b"user.note").unwrap(), b"hi");
    assert_eq!(f.errno(f.staging.getxattr(&at, b"user.none")), libc::ENODATA);
    assert_eq!(
        f.errno(f.staging.setxattr(&at, b"trusted.x", b"", 0)),
        libc::ENOTSUP
    );
    f.staging.removexattr(&at, b"user.note").unwrap();
    assert!(f.staging.listxattr(&at).unwrap().is_empty());
    assert!(f.staging.listxattr(&path("main")).unwrap().is_empty());
}

#[test]
fn names_of_every_kind_are_entries() {
    let f = Fixture::new();
    let odd = [
        vec![0xff; 255],
        " -\n\u{1f980}".into(),
        "模型".repeat(40).into_bytes(),
    ];
    for name in &odd {
        let at = [b"main".to_vec(), name.clone()];
        f.staging
            .create(&at, 0o644, libc::O_RDWR, 0, 0, 0)
            .unwrap()
            .0
            .write(0, b"T")
            .unwrap();
    }
    f.pass(3.0);
    assert_eq!(f.log().len(), 3);
    for name in &odd {
        let at = [b"main".to_vec(), name.clone()];
        assert!(matches!(f.staging.locate(&at).unwrap(), Located::Version { .. }));
    }
    let long = [b"main".to_vec(), vec![b'x'; 256]];
    assert_eq!(
        f.errno(f.staging.create(&long, 0o644, 2, 0, 0, 0)),
        libc::ENAMETOOLONG
    );
}

#[test]
fn a_second_mount_only_looks() {
    let f = Fixture::new();
    f.put("main/a.pt", "T1");
    f.pass(3.0);
    f.put("main/b.pt", "T2");
    let second = f.second();
    assert!(!second.is_owner());
    assert!(matches!(
        second.locate(&path("main/a.pt")).unwrap(),
        Located::Version { .. }
    ));
    assert!(matches!(
        second.locate(&path("main/b.pt")).unwrap(),
        Located::Disk(_)
    ));
    assert_eq!(second.list(&path("main")).unwrap().len(), 2);
    assert_eq!(
        second
            .open_file(&path("main/b.pt"), libc::O_RDONLY)
            .unwrap()
            .read(0, 9)
            .unwrap(),
        b"T2"
    );
    assert_eq!(
        f.errno(second.open_file(&path("main/b.pt"), libc::O_RDWR)),
        libc::EROFS
    );
    assert_eq!(f.errno(second.unlink(&path("main/a.pt"))), libc::EROFS);
    assert_eq!(
        f.errno(second.create(&path("main/c"), 0o644, 2, 0, 0, 0)),
        libc::EROFS
    );
    assert_eq!(f.errno(second.mkdir(&path("exp"), 0o755, 0, 0, 0)), libc::EROFS);
    assert_eq!(f.errno(second.commit_now(&path("main/b.pt"), "")), libc::EROFS);
    f.pass(3.0);
    assert!(matches!(
        second.locate(&path("main/b.pt")).unwrap(),
        Located::Version { .. }
    ));
}

//! Any sequence of changes, with commits and deaths of the mount in between, leaves what an ordinary directory would hold.

use super::*;
use crate::fuse::attr::FileKind;
use proptest::prelude::*;
use rustix::fs::{AtFlags, CWD, Mode, RenameFlags};
use std::fs::{self, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

#[derive(Clone, Debug)]
enum Op {
    Write(String, u64, String, bool),
    Cut(String, u64),
    Mkdir(String),
    Unlink(String),
    Rmdir(String),
    Rename(String, String, u32),
    Link(String, String),
    Symlink(String),
    Mode(String, u32),
    Pass(u8),
    Commit(String),
    Restart,
}

fn name() -> impl Strategy<Value = String> {
    // Few names, so that they meet: files, directories and unfinished work at the top, and two levels below.
    let top = prop::sample::select(vec!["a.pt", "b.pt", "d", "e", "x.tmp", "tmp-d"]);
    let inside = prop::sample::select(vec!["", "", "f", "g", "s", "s/f", "s/h.tmp", ".m"]);
    (top, inside).prop_map(|(top, inside)| match inside {
        "" => format!("main/{top}"),
        _ => format!("main/{top}/{inside}"),
    })
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (name(), 0u64..9, "[TX]?[a-c]{0,4}", any::<bool>()).prop_map(|(p, at, s, t)| Op::Write(p, at, s, t)),
        1 => (name(), 0u64..9).prop_map(|(p, n)| Op::Cut(p, n)),
        3 => name().prop_map(Op::Mkdir),
        3 => name().prop_map(Op::Unlink),
        2 => name().prop_map(Op::Rmdir),
        4 => (name(), name(), prop::sample::select(vec![0, 0, 0, libc::RENAME_NOREPLACE, libc::RENAME_EXCHANGE]))
            .prop_map(|(a, b, f)| Op::Rename(a, b, f)),
        2 => (name(), name()).prop_map(|(a, b)| Op::Link(a, b)),
        1 => name().prop_map(Op::Symlink),
        1 => (name(), 0o600u32..0o610).prop_map(|(p, m)| Op::Mode(p, m)),
        4 => (0u8..15).prop_map(Op::Pass),
        1 => name().prop_map(Op::Commit),
        1 => Just(Op::Restart),
    ]
}

impl Op {
    fn paths(&self) -> Vec<&str> {
        match self {
            Op::Rename(a, b, _) | Op::Link(a, b) => vec![a, b],
            Op::Write(p, ..) | Op::Cut(p, _) | Op::Mkdir(p) | Op::Unlink(p) | Op::Rmdir(p) => vec![p],
            Op::Symlink(p) | Op::Mode(p, _) => vec![p],
            Op::Pass(_) | Op::Commit(_) | Op::Restart => Vec::new(),
        }
    }
}

/// Whether it would tell whether two names are one file: links between entries end with a commit, by design.
fn aliased(root: &Path, op: &Op) -> bool {
    let meta = |p: &str| fs::symlink_metadata(root.join(p)).ok();
    match op {
        Op::Write(p, ..) | Op::Cut(p, _) | Op::Mode(p, _) => {
            meta(p).is_some_and(|m| m.is_file() && m.nlink() > 1)
        }
        Op::Rename(a, b, _) => a != b && meta(a).zip(meta(b)).is_some_and(|(a, b)| a.ino() == b.ino()),
        _ => false,
    }
}

/// Whether some component before the last is there but is no directory.
fn leads_astray(root: &Path, p: &str) -> bool {
    let above = Path::new(p).ancestors().skip(1);
    above
        .filter_map(|a| fs::symlink_metadata(root.join(a)).ok())
        .any(|m| !m.is_dir())
}

fn code<T>(r: Result<T>) -> i32 {
    r.map_or_else(|e| e.errno(), |_| 0)
}

fn os<T>(r: rustix::io::Result<T>) -> i32 {
    r.map_or_else(|e| e.raw_os_error(), |_| 0)
}

fn io<T>(r: std::io::Result<T>) -> i32 {
    r.map_or_else(|e| e.raw_os_error().unwrap(), |_| 0)
}

/// Does the same to both; errno of each, 0 for success.
fn both(f: &mut Fixture, root: &Path, op: &Op) -> (i32, i32) {
    let s = f.staging.clone();
    match op {
        Op::Write(p, at, text, truncate) => {
            let flags = libc::O_RDWR | if *truncate { libc::O_TRUNC } else { 0 };
            let handle = match s.locate(&path(p)) {
                Ok(_) => s.open_file(&path(p), flags),
                Err(_) => s.create(&path(p), 0o644, flags, 0o022, 0, 0).map(|h| h.0),
            };
            let ours = handle.and_then(|h| h.write(*at, text.as_bytes()));
            let mut options = OpenOptions::new();
            options
                .read(true)
                .write(true)
                .create(true)
                .truncate(*truncate)
                .custom_flags(libc::O_NOFOLLOW);
            let theirs = options.open(root.join(p));
            (
                code(ours),
                io(theirs.and_then(|f| f.write_all_at(text.as_bytes(), *at))),
            )
        }
        Op::Cut(p, n) => {
            let change = super::super::SetAttr {
                size: Some(*n),
                ..Default::default()
            };
            (
                code(s.setattr(&path(p), &change)),
                io(OpenOptions::new()
                    .write(true)
                    .custom_flags(libc::O_NOFOLLOW)
                    .open(root.join(p))
                    .and_then(|f| f.set_len(*n))),
            )
        }
        Op::Mkdir(p) => (
            code(s.mkdir(&path(p), 0o755, 0, 0, 0)),
            os(rustix::fs::mkdir(root.join(p), Mode::from_raw_mode(0o755))),
        ),
        Op::Unlink(p) => (code(s.unlink(&path(p))), os(rustix::fs::unlink(root.join(p)))),
        Op::Rmdir(p) => (code(s.rmdir(&path(p))), os(rustix::fs::rmdir(root.join(p)))),
        Op::Rename(a, b, flags) => {
            let theirs = RenameFlags::from_bits_retain(*flags);
            let theirs = rustix::fs::renameat_with(CWD, root.join(a), CWD, root.join(b), theirs);
            (code(s.rename(&path(a), &path(b), *flags)), os(theirs))
        }
        Op::Link(a, b) => {
            let theirs = rustix::fs::linkat(CWD, root.join(a), CWD, root.join(b), AtFlags::empty());
            (code(s.link(&path(a), &path(b))), os(theirs))
        }
        Op::Symlink(p) => (
            code(s.symlink(&path(p), b"nowhere", 0, 0)),
            os(rustix::fs::symlink("nowhere", root.join(p))),
        ),
        Op::Mode(p, mode) => {
            if fs::symlink_metadata(root.join(p)).is_ok_and(|m| m.is_symlink()) {
                return (0, 0);
            }
            let change = super::super::SetAttr {
                mode: Some(*mode | 0o100),
                ..Default::default()
            };
            let theirs = rustix::fs::chmod(root.join(p), Mode::from_raw_mode(*mode | 0o100));
            (code(s.setattr(&path(p), &change)), os(theirs))
        }
        Op::Pass(seconds) => {
            f.pass(f64::from(*seconds));
            (0, 0)
        }
        Op::Commit(p) => {
            // Where there is an entry, it is committed, whatever state it is in.
            let _ = s.commit_now(&path(p), "");
            (0, 0)
        }
        Op::Restart => {
            drop(s);
            f.restart();
            (0, 0)
        }
    }
}

/// Everything visible, as lines.
fn ours(f: &Fixture, at: &str, out: &mut Vec<String>) {
    for (name, kind) in f.staging.list(&path(at)).unwrap() {
        let p = format!("{at}/{}", String::from_utf8(name).unwrap());
        let attr = f.staging.attr(&path(&p)).unwrap();
        assert_eq!(attr.kind, kind, "{p}");
        match kind {
            FileKind::Dir => {
                out.push(format!("{p}/ {:o}", attr.mode));
                ours(f, &p, out);
            }
            FileKind::Symlink => out.push(format!("{p} -> {:?}", f.staging.readlink(&path(&p)).unwrap())),
            _ => {
                let text = f.read(&p);
                assert_eq!(attr.size, text.len() as u64, "{p}");
                out.push(format!("{p} {:o} {text:?}", attr.mode));
            }
        }
    }
}

fn theirs(root: &Path, at: &str, out: &mut Vec<String>) {
    let mut names: Vec<_> = fs::read_dir(root.join(at))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    for name in names {
        let p = format!("{at}/{name}");
        let meta = fs::symlink_metadata(root.join(&p)).unwrap();
        let mode = meta.permissions().mode() & 0o7777;
        if meta.is_dir() {
            out.push(format!("{p}/ {mode:o}"));
            theirs(root, &p, out);
        } else if meta.is_symlink() {
            out.push(format!(
                "{p} -> {:?}",
                fs::read_link(root.join(&p)).unwrap().as_os_str().as_bytes()
            ));
        } else {
            let text = String::from_utf8(fs::read(root.join(&p)).unwrap()).unwrap();
            out.push(format!("{p} {mode:o} {text:?}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, max_shrink_iters: 400, ..ProptestConfig::default() })]
    #[test]
    fn staging_is_an_ordinary_directory(ops in prop::collection::vec(op(), 1..40)) {
        let mut f = Fixture::new();
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("main")).unwrap();
        for (i, op) in ops.iter().enumerate() {
            if aliased(dir.path(), op) {
                continue;
            }
            let astray = op.paths().iter().any(|p| leads_astray(dir.path(), p));
            let (mut a, mut b) = both(&mut f, dir.path(), op);
            if astray {
                // The kernel itself answers for paths through files and links: only that it fails is staging's.
                (a, b) = (i32::from(a != 0), i32::from(b != 0));
            }
            prop_assert_eq!(a, b, "{}: {:?}", i, op);
            let (mut mine, mut real) = (Vec::new(), Vec::new());
            ours(&f, "main", &mut mine);
            theirs(dir.path(), "main", &mut real);
            prop_assert_eq!(mine, real, "after {}: {:?}", i, op);
        }
        // All that is left alone and not suspect ends up committed, and looks the same from the versions.
        f.pass(100.0);
        let (mut mine, mut real) = (Vec::new(), Vec::new());
        ours(&f, "main", &mut mine);
        theirs(dir.path(), "main", &mut real);
        prop_assert_eq!(mine, real);
    }
}

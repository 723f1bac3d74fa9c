//! The mount without a kernel: what the door would be answered, over a real store.

use super::attr::FileKind;
use super::changes::Caller;
use super::files::{FOREVER, Files};
use super::inodes::ROOT;
use super::staging::{SetAttr, Settle, Staging};
use crate::error::{Kind, Result};
use crate::store::{CommitRequest, Options, Store};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

/// Nothing settles by itself while a test runs.
const LONG: Duration = Duration::from_secs(3600);
const ME: Caller = Caller {
    uid: 0,
    gid: 0,
    umask: 0o022,
};

/// The kernel asks us for everything.
const OURS: super::modes::Register<'static> = &|_| None;

struct Mount {
    dir: tempfile::TempDir,
    store: Store,
    files: Files,
}

impl Mount {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            memory: 8 << 20,
            threads: 2,
            background_threads: 1,
        };
        let store = Store::open_or_init(&dir.path().join("store"), &options).unwrap();
        let settle = Settle {
            files: LONG,
            dirs: LONG,
        };
        let staging = Staging::open(store.clone(), settle, false).unwrap();
        // Whoever mounts: staged files of a test are always this user's.
        let (uid, gid) = (
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        );
        let files = Files::new(store.clone(), staging, uid, gid, Default::default());
        Mount { dir, store, files }
    }

    fn source(&self, name: &str, bytes: &[u8]) -> std::path::PathBuf {
        let path = self.dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    fn commit(&self, branch: &str, path: &Path) {
        let request = CommitRequest {
            branch: branch.into(),
            entries: vec![(path.file_name().unwrap().as_bytes().to_vec(), path.to_owned())],
            message: "why".into(),
            ..CommitRequest::default()
        };
        self.store.commit(&request).unwrap();
    }

    /// Looks a path up from the root, as the kernel does, without following links.
    fn ino(&self, path: &str) -> Option<u64> {
        let mut at = ROOT;
        for name in path.split('/').filter(|n| !n.is_empty()) {
            at = self.files.look_up(at, name.as_bytes()).unwrap().ok()?.ino;
        }
        Some(at)
    }

    fn at(&self, path: &str) -> u64 {
        self.ino(path).unwrap_or_else(|| panic!("no {path}"))
    }

    fn list(&self, path: &str) -> Vec<String> {
        let ino = self.at(path);
        let (fh, _) = self.files.open_dir(ino).unwrap();
        let mut names = Vec::new();
        // Two names at a time: a listing goes on where it was full.
        let mut offset = 0;
        loop {
            let (start, before) = (offset, names.len());
            let add = |l: &super::files::Listing<'_>| {
                if names.len() == before + 2 {
                    return true;
                }
                offset = l.next;
                names.push(String::from_utf8_lossy(l.name).into_owned());
                false
            };
            self.files.list(ino, fh, start, true, add).unwrap();
            if names.len() == before {
                break;
            }
        }
        self.files.release(ino, fh);
        assert_eq!(names[..2], [".", ".."]);
        names.split_off(2)
    }

    fn target(&self, path: &str) -> String {
        String::from_utf8(self.files.target(self.at(path)).unwrap()).unwrap()
    }

    fn xattr(&self, path: &str, name: &str) -> Option<String> {
        let value = self.files.xattr(self.at(path), name.as_bytes()).unwrap()?;
        Some(String::from_utf8(value).unwrap())
    }

    fn read(&self, path: &str) -> Result<Vec<u8>> {
        let ino = self.at(path);
        let opened = self.files.open(ino, libc::O_RDONLY, OURS)?;
        let bytes = self.files.read(opened.fh, 0, 1 << 20, <[u8]>::to_vec);
        self.files.release(ino, opened.fh);
        bytes
    }
}

/// A safetensors file of bytes (`U8`), tensors by name and content.
fn safetensors(tensors: &[(&str, &[u8])]) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, bytes) in tensors {
        let range = [data.len(), data.len() + bytes.len()];
        data.extend_from_slice(bytes);
        let info = serde_json::json!({"dtype": "U8", "shape": [bytes.len()], "data_offsets": range});
        header.insert((*name).to_owned(), info);
    }
    let header = serde_json::to_vec(&header).unwrap();
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

#[test]
fn branches_versions_and_the_names_that_lead_to_them() {
    let m = Mount::new();
    assert_eq!(m.list("versions"), ["main"]);
    assert!(m.list("versions/main").is_empty() && m.ino("versions/main/latest").is_none());
    m.commit("main", &m.source("a.bin", b"one"));
    m.commit("main", &m.source("a.bin", b"two"));
    m.commit("exp", &m.source("a.bin", b"three"));
    assert_eq!(m.list("versions"), ["exp", "main"]);
    assert_eq!(m.list("versions/main"), ["000001", "000002", "latest"]);
    assert_eq!(m.target("versions/main/latest"), "000002");
    m.store.set_tag("best", "main/1", false).unwrap();
    assert_eq!(m.target("versions/best"), "main/000001");
    assert_eq!(m.target("tensors/main/best"), "000001");
    assert!(m.ino("versions/exp/best").is_none(), "a tag of another branch");
    assert_eq!(m.target("versions/main/2"), "000002");
    let id = m.store.resolve("exp/1").unwrap().id.to_string();
    assert_eq!(m.target(&format!("versions/{}", &id[..8])), "exp/000001");
    assert_eq!(m.target(&format!("versions/main/{}", &id[..12])), "../exp/000001");
    m.store.make_branch("fork", Some("main/1")).unwrap();
    assert_eq!(m.list("versions/fork"), ["latest"]);
    assert_eq!(m.target("versions/fork/latest"), "../main/000001");
    for absent in ["versions/none", "versions/main/000003", "versions/0123abcd", "x"] {
        assert!(m.ino(absent).is_none(), "{absent}");
    }
    assert_eq!(m.read("versions/main/000001/a.bin").unwrap(), b"one");
    assert_eq!(m.read("versions/exp/000001/a.bin").unwrap(), b"three");
}

#[test]
fn what_never_changes_may_be_kept_and_what_grows_is_asked_again() {
    let m = Mount::new();
    m.commit("main", &m.source("a.bin", b"one"));
    let found = |dir: &str, name: &str| m.files.look_up(m.at(dir), name.as_bytes()).unwrap();
    let ttl = |dir: &str, name: &str| found(dir, name).map(|f| (f.entry_ttl, f.attr_ttl)).unwrap();
    assert_eq!(ttl("versions/main/000001", "a.bin"), (FOREVER, FOREVER));
    assert_eq!(ttl("versions/main", "000001"), (FOREVER, FOREVER));
    assert_eq!(ttl("versions/main", "latest"), (Duration::ZERO, Duration::ZERO));
    assert_eq!(found("versions/main/000001", "none").err(), Some(FOREVER));
    assert_eq!(found("versions/main", "000002").err(), Some(Duration::ZERO));
    assert_eq!(found("versions", "exp").err(), Some(Duration::ZERO));
    let long = m.files.look_up(ROOT, &[b'x'; 256]).err().unwrap();
    assert_eq!(long.errno(), libc::ENAMETOOLONG);
}

#[test]
fn a_version_shows_what_was_committed() {
    let m = Mount::new();
    let dir = m.dir.path().join("ckpt");
    m.source("ckpt/a", b"aa");
    m.source("ckpt/sub/c", b"c");
    fs::hard_link(dir.join("a"), dir.join("b")).unwrap();
    std::os::unix::fs::symlink("../elsewhere", dir.join("l")).unwrap();
    let tagged =
        rustix::fs::setxattr(dir.join("a"), "user.note", b"hi", rustix::fs::XattrFlags::empty()).is_ok();
    m.commit("main", &dir);
    let root = "versions/main/000001/ckpt";
    assert_eq!(m.list(root), ["a", "b", "l", "sub"]);
    assert_eq!(m.at(&format!("{root}/a")), m.at(&format!("{root}/b")));
    let (attr, _) = m.files.attr(m.at(&format!("{root}/a")), None).unwrap();
    assert_eq!((attr.kind, attr.size, attr.nlink), (FileKind::File, 2, 2));
    assert_eq!(m.target(&format!("{root}/l")), "../elsewhere");
    assert_eq!(
        m.files.attr(m.at("versions/main/000001"), None).unwrap().0.size,
        5
    );
    if tagged {
        assert_eq!(m.xattr(&format!("{root}/a"), "user.note").unwrap(), "hi");
        let names = m.files.xattr_list(m.at(&format!("{root}/a"))).unwrap();
        assert!(String::from_utf8(names).unwrap().contains("user.note\0"));
    }
    let id = m.store.resolve("main").unwrap().id.to_string();
    assert_eq!(m.xattr("versions/main/000001", "user.zspace.id").unwrap(), id);
    assert_eq!(
        m.xattr("versions/main/000001", "user.zspace.label").unwrap(),
        "why"
    );
    assert_eq!(
        m.xattr(&format!("{root}/sub/c"), "user.zspace.path").unwrap(),
        format!("{root}/sub/c")
    );
    assert_eq!(m.xattr("", "user.zspace.path").unwrap(), "");
    let hash = "2e7d2c03a9507ae265ecf5b5356885a53393a2029d241394997265a1a25aefc6";
    assert_eq!(
        m.xattr(&format!("{root}/sub/c"), "user.zspace.sha256").unwrap(),
        hash
    );
    assert_eq!(m.xattr(root, "user.zspace.sha256"), None);
}

#[test]
fn views_show_tensors_and_what_leads_to_them() {
    let m = Mount::new();
    let dir = m.dir.path().join("ckpt");
    let bytes = safetensors(&[("bias", b"xyz"), ("layers/0/w", b"abcd"), ("layers/1/w", b"e")]);
    m.source("ckpt/m.safetensors", &bytes);
    m.source("ckpt/m", &bytes);
    m.source("ckpt/config.json", b"{}");
    m.source("ckpt/sub/n", &bytes);
    let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, dir.join(name)).unwrap();
    link("sub/n", "to-n");
    link("to-n", "to-link");
    link("sub", "to-sub");
    link("config.json", "to-json");
    link("../../../etc/passwd", "out");
    link("loop", "loop");
    m.commit("main", &dir);
    let shown = ["m", "m.safetensors", "sub", "to-link", "to-n", "to-sub"];
    assert_eq!(m.list("tensors/main/000001/ckpt"), shown);
    assert_eq!(m.list("arrays/main/000001/ckpt"), shown);
    let whole = [
        "m.2.safetensors",
        "m.safetensors",
        "sub",
        "to-link.safetensors",
        "to-n.safetensors",
        "to-sub",
    ];
    let root = "safetensors/main/000001/ckpt";
    assert_eq!(m.list(root), whole);
    for name in whole {
        assert!(
            m.ino(&format!("{root}/{name}")).is_some(),
            "{name} is listed and cannot be opened"
        );
    }
    for name in ["m", "to-n", "out", "config.json", "config.json.safetensors"] {
        assert!(
            m.ino(&format!("{root}/{name}")).is_none(),
            "{name} is not listed and can be opened"
        );
    }
    assert_eq!(m.target(&format!("{root}/to-n.safetensors")), "sub/n.safetensors");
    assert_eq!(
        m.target(&format!("{root}/to-link.safetensors")),
        "to-n.safetensors"
    );
    assert_eq!(m.target(&format!("{root}/to-sub")), "sub");
    assert_eq!(m.read(&format!("{root}/m.2.safetensors")).unwrap(), bytes);
    let tensors = m.list("tensors/main/000001/ckpt/m");
    assert!(tensors.contains(&"bias.pt".to_owned()), "{tensors:?}");
    let mut pending = vec!["arrays/main/000001/ckpt/m".to_owned()];
    let mut found = Vec::new();
    while let Some(at) = pending.pop() {
        for name in m.list(&at) {
            let path = format!("{at}/{name}");
            match m.files.attr(m.at(&path), None).unwrap().0.kind {
                FileKind::Dir => pending.push(path),
                _ => {
                    let bytes = m.read(&path).unwrap();
                    assert_eq!(
                        bytes.len() as u64,
                        m.files.attr(m.at(&path), None).unwrap().0.size
                    );
                    let (dtype, shape) = (
                        m.xattr(&path, "user.zspace.dtype"),
                        m.xattr(&path, "user.zspace.shape"),
                    );
                    found.push((
                        m.xattr(&path, "user.zspace.name").unwrap(),
                        bytes[128..].to_vec(),
                        dtype,
                        shape,
                    ));
                }
            }
        }
    }
    found.sort();
    let contents: Vec<&[u8]> = found.iter().map(|f| f.1.as_slice()).collect();
    assert_eq!(contents, [&b"xyz"[..], b"abcd", b"e"]);
    assert_eq!(
        (found[0].2.as_deref(), found[0].3.as_deref()),
        (Some("uint8"), Some("[3]"))
    );
}

#[test]
fn only_staging_takes_changes() {
    let m = Mount::new();
    m.commit("main", &m.source("a.bin", b"one"));
    let (dir, file) = (m.at("versions/main/000001"), m.at("versions/main/000001/a.bin"));
    let staged = m.at("staging/main");
    let denied = |what: &str, result: Result<()>| {
        assert_eq!(result.map_err(|e| e.errno()).err(), Some(libc::EROFS), "{what}");
    };
    denied("open", m.files.open(file, libc::O_RDWR, OURS).map(|_| ()));
    denied(
        "truncate",
        m.files
            .open(file, libc::O_RDONLY | libc::O_TRUNC, OURS)
            .map(|_| ()),
    );
    denied(
        "create",
        m.files
            .create(dir, b"x", 0o644, libc::O_WRONLY, ME, OURS)
            .map(|_| ()),
    );
    denied("mkdir", m.files.make_dir(ROOT, b"x", 0o755, ME).map(|_| ()));
    denied("symlink", m.files.make_link(dir, b"x", b"y", ME).map(|_| ()));
    denied("mknod", m.files.make_node(dir, b"x", 0o644, ME).map(|_| ()));
    denied("unlink", m.files.remove(dir, b"a.bin", false));
    denied(
        "rename out",
        m.files.rename((dir, b"a.bin"), (staged, b"a.bin"), 0),
    );
    denied("rename in", m.files.rename((staged, b"a.bin"), (dir, b"b"), 0));
    denied(
        "chmod",
        m.files.set_attr(file, None, &SetAttr::default()).map(|_| ()),
    );
    denied("setxattr", m.files.set_xattr(file, b"user.x", b"", 0));
    let opened = m.files.open(file, libc::O_RDONLY, OURS).unwrap();
    denied("write", m.files.write(opened.fh, 0, b"x", false).map(|_| ()));
    let link = m.files.link(file, staged, b"x").err().unwrap();
    assert_eq!(link.errno(), libc::EXDEV);
}

#[test]
fn staged_files_live_under_their_inodes() {
    let m = Mount::new();
    let dir = m.at("staging/main");
    let (found, opened) = m
        .files
        .create(dir, b"tmp", 0o666, libc::O_RDWR, ME, OURS)
        .unwrap();
    assert_eq!(m.files.write(opened.fh, 0, b"hello", false).unwrap(), 5);
    m.files.rename((dir, b"tmp"), (dir, b"model.bin"), 0).unwrap();
    assert_eq!(m.at("staging/main/model.bin"), found.ino);
    assert!(m.ino("staging/main/tmp").is_none());
    assert_eq!(m.files.attr(found.ino, None).unwrap().0.size, 5);
    // Another name of the same file is the same inode.
    m.files.link(found.ino, dir, b"again.bin").unwrap();
    assert_eq!(m.at("staging/main/again.bin"), found.ino);
    m.files.remove(dir, b"again.bin", false).unwrap();
    // Removed but open: still there for whoever has it open.
    m.files.remove(dir, b"model.bin", false).unwrap();
    let (attr, _) = m.files.attr(found.ino, None).unwrap();
    assert_eq!((attr.size, attr.nlink), (5, 0));
    assert_eq!(m.files.read(opened.fh, 1, 3, <[u8]>::to_vec).unwrap(), b"ell");
    m.files.release(found.ino, opened.fh);
    assert_eq!(
        m.files.attr(found.ino, None).err().unwrap().kind(),
        Kind::NotFound
    );
}

#[test]
fn a_reader_of_a_committed_entry_sees_it_being_changed() {
    let m = Mount::new();
    let dir = m.at("staging/main");
    let (found, opened) = m
        .files
        .create(dir, b"model.bin", 0o644, libc::O_RDWR, ME, OURS)
        .unwrap();
    m.files.write(opened.fh, 0, b"hello", false).unwrap();
    m.files.release(found.ino, opened.fh);
    m.files
        .staging
        .commit_now(&[b"main".to_vec(), b"model.bin".to_vec()], "")
        .unwrap();
    assert_eq!(
        m.at("staging/main/model.bin"),
        found.ino,
        "a commit changes no inode"
    );
    let id = m.store.resolve("main/1").unwrap().id.to_string();
    assert_eq!(m.xattr("staging/main/model.bin", "user.zspace.id").unwrap(), id);
    let reader = m.files.open(found.ino, libc::O_RDONLY, OURS).unwrap();
    assert!(!reader.fixed, "its bytes may change");
    let writer = m.files.open(found.ino, libc::O_RDWR, OURS).unwrap();
    m.files.write(writer.fh, 0, b"J", false).unwrap();
    assert_eq!(m.files.read(reader.fh, 0, 9, <[u8]>::to_vec).unwrap(), b"Jello");
    assert_eq!(m.read("versions/main/000001/model.bin").unwrap(), b"hello");
}

#[test]
fn copies_between_a_version_and_staging() {
    let m = Mount::new();
    let bytes: Vec<u8> = (0..3_000_000u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    m.commit("main", &m.source("a.bin", &bytes));
    let from = m
        .files
        .open(m.at("versions/main/000001/a.bin"), libc::O_RDONLY, OURS)
        .unwrap();
    let (found, to) = m
        .files
        .create(m.at("staging/main"), b".copy", 0o644, libc::O_RDWR, ME, OURS)
        .unwrap();
    let mut done = 0;
    while done < bytes.len() as u64 {
        let n = m.files.copy((from.fh, done), (to.fh, done), u64::MAX).unwrap();
        assert!(n > 0);
        done += n;
    }
    assert_eq!(m.files.attr(found.ino, None).unwrap().0.size, bytes.len() as u64);
    assert_eq!(
        m.files.read(to.fh, 2_999_000, 4096, <[u8]>::to_vec).unwrap(),
        bytes[2_999_000..]
    );
    assert_eq!(m.files.seek(from.fh, 5, libc::SEEK_DATA).unwrap(), 5);
    assert_eq!(
        m.files.seek(from.fh, 5, libc::SEEK_HOLE).unwrap(),
        bytes.len() as u64
    );
    assert_eq!(
        m.files
            .seek(from.fh, 3_000_000, libc::SEEK_DATA)
            .err()
            .unwrap()
            .errno(),
        libc::ENXIO
    );
}

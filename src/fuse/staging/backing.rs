//! The backing files: ordinary files below STORE/staging/tree, reached without ever following a symbolic link.

use super::super::attr::{Attr, FileKind};
use super::names::{self, errno};
use crate::error::{Error, IoContext, Kind, Result};
use crate::id::FileHasher;
use crate::store::Timestamp;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Stat};
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A directory whose names are worked on by path components.
pub(super) struct Backing {
    root: OwnedFd,
    path: PathBuf,
}

impl Backing {
    /// The tree at `path`, which must be a directory.
    pub(super) fn open(path: PathBuf) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root =
            rustix::fs::open(&path, flags, Mode::empty()).doing(|| format!("open {}", path.display()))?;
        Ok(Backing { root, path })
    }

    /// The path of the files on disk.
    pub(super) fn path(&self, path: &names::Path) -> PathBuf {
        self.path.join(names::join(path))
    }

    /// The tree's own directory.
    pub(super) fn root(&self) -> &OwnedFd {
        &self.root
    }

    /// Opens what lies at `path`, no component of which may be a symbolic link.
    pub(super) fn open_at(&self, path: &names::Path, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let mut dir: Option<OwnedFd> = None;
        let mut rest = path;
        loop {
            // A path may be longer than one call takes: go down in steps.
            let mut len = 0;
            let n = rest
                .iter()
                .take_while(|c| {
                    len += c.len() + 1;
                    len < 4000
                })
                .count();
            let (head, tail) = rest.split_at(n);
            let last = tail.is_empty();
            let rel = if head.is_empty() {
                PathBuf::from(".")
            } else {
                names::join(head)
            };
            let (flags, mode) = if last {
                (flags, mode)
            } else {
                (OFlags::PATH | OFlags::DIRECTORY, Mode::empty())
            };
            let at = dir.as_ref().unwrap_or(&self.root);
            let fd = rustix::fs::openat2(
                at.as_fd(),
                &rel,
                flags | OFlags::CLOEXEC | OFlags::NOFOLLOW,
                mode,
                resolve,
            )
            .doing(|| format!("open {}", names::show(path)))?;
            if last {
                return Ok(fd);
            }
            (dir, rest) = (Some(fd), tail);
        }
    }

    /// The directory that holds `path`, and its last name.
    pub(super) fn parent<'a>(&self, path: &'a names::Path) -> Result<(OwnedFd, &'a [u8])> {
        let (name, dir) = path
            .split_last()
            .ok_or_else(|| errno(libc::EBUSY, "staging itself"))?;
        let fd = self.open_at(dir, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())?;
        Ok((fd, name))
    }

    /// lstat; nothing if there is no such name.
    pub(super) fn stat(&self, path: &names::Path) -> Result<Option<Stat>> {
        let at = |dir: BorrowedFd<'_>, name: &[u8]| {
            rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)
                .doing(|| format!("stat {}", names::show(path)))
        };
        let found = match path {
            [] => rustix::fs::fstat(&self.root).doing(|| "stat staging".into()),
            // A branch, as almost every request asks: there is nothing to open on the way.
            [name] => at(self.root.as_fd(), name),
            _ => self.parent(path).and_then(|(dir, name)| at(dir.as_fd(), name)),
        };
        match found {
            Ok(stat) => Ok(Some(stat)),
            Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENOTDIR | libc::ELOOP) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The names in a directory.
    pub(super) fn list(&self, path: &names::Path) -> Result<Vec<(Vec<u8>, FileKind)>> {
        let what = || format!("list {}", names::show(path));
        let fd = self.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        let mut out = Vec::new();
        for e in rustix::fs::Dir::read_from(&fd).doing(what)? {
            let e = e.doing(what)?;
            let name = e.file_name().to_bytes();
            if name == b"." || name == b".." {
                continue;
            }
            let kind = match e.file_type() {
                rustix::fs::FileType::Unknown => {
                    match rustix::fs::statat(&fd, e.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
                        Ok(stat) => kind_of(stat.st_mode),
                        Err(_) => continue,
                    }
                }
                t => kind_of(t.as_raw_mode()),
            };
            out.push((name.to_vec(), kind));
        }
        out.sort_by(|a: &(Vec<u8>, FileKind), b| a.0.cmp(&b.0));
        Ok(out)
    }

    /// A path under /proc that names `name` in an open directory, for calls that take no directory.
    pub(super) fn proc_path(dir: &OwnedFd, name: &[u8]) -> PathBuf {
        Path::new("/proc/self/fd")
            .join(dir.as_raw_fd().to_string())
            .join(std::ffi::OsStr::from_bytes(name))
    }
}

/// The kind in the file-type bits of a mode.
pub(super) fn kind_of(mode: u32) -> FileKind {
    match mode & libc::S_IFMT {
        libc::S_IFDIR => FileKind::Dir,
        libc::S_IFLNK => FileKind::Symlink,
        libc::S_IFIFO => FileKind::Fifo,
        libc::S_IFSOCK => FileKind::Socket,
        libc::S_IFCHR => FileKind::Char,
        libc::S_IFBLK => FileKind::Block,
        _ => FileKind::File,
    }
}

/// What stat says in the mount's words.
// The widths of these fields differ between architectures.
#[allow(clippy::unnecessary_cast)]
pub(super) fn attr_of(s: &Stat) -> Attr {
    let time = |seconds, nanos: u64| Timestamp {
        seconds,
        nanos: nanos as u32,
    };
    Attr {
        kind: kind_of(s.st_mode as u32),
        mode: s.st_mode as u32 & 0o7777,
        size: s.st_size as u64,
        blocks: s.st_blocks as u64,
        nlink: s.st_nlink as u32,
        uid: s.st_uid,
        gid: s.st_gid,
        rdev: s.st_rdev as u32,
        atime: time(s.st_atime as i64, s.st_atime_nsec as u64),
        mtime: time(s.st_mtime as i64, s.st_mtime_nsec as u64),
        ctime: time(s.st_ctime as i64, s.st_ctime_nsec as u64),
    }
}

/// Visits `root` and everything below it, names sorted, iteratively; `visit` gets the path below `root`.
pub(super) fn walk(root: &Path, visit: &mut dyn FnMut(&Path, &fs::Metadata) -> Result<()>) -> Result<()> {
    let meta = fs::symlink_metadata(root).doing(|| format!("stat {}", root.display()))?;
    visit(Path::new(""), &meta)?;
    let mut todo = if meta.is_dir() {
        vec![PathBuf::new()]
    } else {
        Vec::new()
    };
    while let Some(dir) = todo.pop() {
        let what = || format!("list {}", root.join(&dir).display());
        let mut inside = Vec::new();
        for e in fs::read_dir(root.join(&dir)).doing(what)? {
            let e = e.doing(what)?;
            inside.push((e.file_name(), e.metadata().doing(what)?));
        }
        inside.sort_by(|a, b| a.0.cmp(&b.0));
        for (name, meta) in inside {
            let path = dir.join(name);
            visit(&path, &meta)?;
            if meta.is_dir() {
                todo.push(path);
            }
        }
    }
    Ok(())
}

/// The components of a path below an entry.
pub(super) fn components(path: &Path) -> Vec<Vec<u8>> {
    path.iter().map(|c| c.to_owned().into_vec()).collect()
}

/// What an entry's files looked like at one moment; two equal ones mean that nothing was changed in between.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Look {
    print: [u8; 32],
    /// Bytes of all regular files.
    pub bytes: u64,
    /// The latest change of any inode, nanoseconds since 1970.
    pub newest: i128,
    /// A name that marks unfinished work.
    pub unfinished: Option<PathBuf>,
    /// Something inside that is no file, directory or link: a version cannot hold it.
    pub special: Option<PathBuf>,
}

impl Look {
    /// Looks at everything below `root`, and hands each regular file to `file`.
    pub(super) fn at(root: &Path, file: &mut dyn FnMut(&Path)) -> Result<Look> {
        let mut h = FileHasher::default();
        let mut look = Look {
            print: [0; 32],
            bytes: 0,
            newest: 0,
            unfinished: None,
            special: None,
        };
        walk(root, &mut |path, m| {
            let name = path.as_os_str().as_bytes();
            h.update(&(name.len() as u64).to_le_bytes());
            h.update(name);
            for n in [
                m.ino() as i64,
                i64::from(m.mode()),
                m.len() as i64,
                m.mtime(),
                m.mtime_nsec(),
                m.ctime(),
                m.ctime_nsec(),
            ] {
                h.update(&n.to_le_bytes());
            }
            look.newest = look
                .newest
                .max(i128::from(m.ctime()) * 1_000_000_000 + i128::from(m.ctime_nsec()));
            if names::unfinished_inside(path.file_name().unwrap_or_default().as_bytes()) {
                look.unfinished.get_or_insert_with(|| path.to_owned());
            }
            if !(m.is_file() || m.is_dir() || m.is_symlink()) {
                look.special.get_or_insert_with(|| path.to_owned());
            }
            if m.is_file() {
                look.bytes += m.len();
                file(path);
            }
            Ok(())
        })?;
        look.print = h.clone().finish().0;
        Ok(look)
    }

    /// Whether anything was changed between the two.
    pub(super) fn differs(&self, other: &Look) -> bool {
        self.print != other.print
    }
}

/// Renames, also a directory that its owner may not write: one that gets another parent is written to.
pub(super) fn move_to(from: &Path, to: &Path) -> std::io::Result<()> {
    let denied = |e: &std::io::Error| e.kind() == std::io::ErrorKind::PermissionDenied;
    let first = fs::rename(from, to);
    let dir = || fs::symlink_metadata(from).ok().filter(fs::Metadata::is_dir);
    let Some(meta) = first.as_ref().err().filter(|e| denied(e)).and_then(|_| dir()) else {
        return first;
    };
    fs::set_permissions(from, fs::Permissions::from_mode(0o700))?;
    let done = fs::rename(from, to);
    let here = if done.is_ok() { to } else { from };
    done.and(fs::set_permissions(here, meta.permissions()))
}

/// Removes a file or a whole directory, also one whose directories its owner may not write.
pub(super) fn remove_all(path: &Path) -> Result<()> {
    let attempt = || match fs::symlink_metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(e) => Err(e),
        Ok(m) if m.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
    };
    let first = attempt();
    if first
        .as_ref()
        .is_err_and(|e| e.kind() == std::io::ErrorKind::PermissionDenied)
    {
        // Directories are listed after they are opened up, so that the walk itself can go on.
        let _ = walk(path, &mut |p, m| {
            if m.is_dir() {
                let _ = fs::set_permissions(path.join(p), fs::Permissions::from_mode(0o700));
            }
            Ok(())
        });
        return attempt().doing(|| format!("remove {}", path.display()));
    }
    first.doing(|| format!("remove {}", path.display()))
}

/// Reads up to `len` bytes at `offset`, fewer only at the end of the file.
pub(super) fn read_at(file: &File, offset: u64, len: usize) -> Result<Vec<u8>> {
    use std::os::unix::fs::FileExt;
    // The file's real size bounds what is allocated.
    let left = file
        .metadata()
        .doing(|| "stat staged file".into())?
        .len()
        .saturating_sub(offset);
    let mut buf = vec![0; len.min(usize::try_from(left).unwrap_or(usize::MAX))];
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(&mut buf[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::io("read staged file", e)),
        }
    }
    buf.truncate(done);
    Ok(buf)
}

/// The answer of calls that only read, on what was committed meanwhile.
pub(super) fn committed_meanwhile() -> Error {
    Error::new(
        Kind::Changed,
        "the entry was committed: it is served from its version",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(s: &str) -> Vec<Vec<u8>> {
        s.split('/').map(|c| c.as_bytes().to_vec()).collect()
    }

    #[test]
    fn no_component_is_followed_out_of_the_tree() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("tree/d")).unwrap();
        fs::write(dir.path().join("secret"), "x").unwrap();
        std::os::unix::fs::symlink("..", dir.path().join("tree/out")).unwrap();
        std::os::unix::fs::symlink("../secret", dir.path().join("tree/file")).unwrap();
        let b = Backing::open(dir.path().join("tree")).unwrap();
        assert!(
            b.open_at(&path("out/secret"), OFlags::RDONLY, Mode::empty())
                .is_err()
        );
        assert!(b.open_at(&path("file"), OFlags::RDONLY, Mode::empty()).is_err());
        assert!(b.parent(&path("out/x")).is_err());
        assert_eq!(b.stat(&path("out/secret")).unwrap().map(|_| ()), None);
        assert_eq!(
            kind_of(b.stat(&path("file")).unwrap().unwrap().st_mode),
            FileKind::Symlink
        );
    }

    #[test]
    fn paths_longer_than_one_call_takes_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let b = Backing::open(dir.path().to_owned()).unwrap();
        let mut path = Vec::new();
        for _ in 0..30 {
            path.push(vec![b'n'; 250]);
            let (fd, name) = b.parent(&path).unwrap();
            rustix::fs::mkdirat(fd, name, Mode::RWXU).unwrap();
        }
        assert!(b.stat(&path).unwrap().is_some());
        assert!(b.list(&path).unwrap().is_empty());
    }

    #[test]
    fn a_look_notices_every_change() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("e");
        fs::create_dir_all(root.join("sub")).unwrap();
        fs::write(root.join("sub/a"), "1").unwrap();
        let look = || Look::at(&root, &mut |_| {}).unwrap();
        let mut last = look();
        assert!(!look().differs(&last));
        for change in 0..5 {
            match change {
                0 => fs::write(root.join("sub/a"), "2x").unwrap(),
                1 => fs::set_permissions(root.join("sub/a"), fs::Permissions::from_mode(0o600)).unwrap(),
                2 => fs::rename(root.join("sub/a"), root.join("sub/b")).unwrap(),
                3 => fs::write(root.join("x.tmp"), "").unwrap(),
                _ => fs::remove_file(root.join("x.tmp")).unwrap(),
            }
            let now = look();
            assert!(now.differs(&last), "{change}");
            assert_eq!(now.unfinished.is_some(), change == 3);
            last = now;
        }
        assert_eq!(last.bytes, 2);
    }

    #[test]
    fn what_nobody_may_write_is_removed_too() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("e");
        fs::create_dir_all(root.join("ro/deep")).unwrap();
        fs::write(root.join("ro/deep/f"), "1").unwrap();
        fs::set_permissions(root.join("ro"), fs::Permissions::from_mode(0o555)).unwrap();
        remove_all(&root).unwrap();
        assert!(!root.exists());
        remove_all(&root).unwrap();
    }
}

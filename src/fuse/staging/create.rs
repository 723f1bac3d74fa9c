//! Opening and making files, directories, links and branches.

use super::attributes::set_mode;
use super::backing::{Backing, committed_meanwhile};
use super::handle::{Handle, stamp};
use super::names::{self, errno};
use super::ops::{Need, open_regular, regular};
use super::repo::{absent, find};
use super::state::Open;
use super::{Guard, Located, Staging, copyup, kind_of_entry};
use crate::error::{Error, IoContext, Kind, Result};
use crate::fuse::attr::{Attr, FileKind};
use crate::store::EntryKind;
use parking_lot::Mutex;
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

impl Staging {
    fn handle(
        self: &Arc<Self>,
        g: &mut Guard<'_>,
        file: File,
        writer: Option<&names::Path>,
        fresh: bool,
    ) -> Handle {
        let tick = Arc::new(AtomicU64::new(self.clock.now().as_millis() as u64));
        let writer = writer.map(|path| {
            let id = g.number();
            g.opens.insert(
                id,
                Open {
                    path: Some(path.to_vec()),
                    tick: tick.clone(),
                },
            );
            id
        });
        let staging = self.clone();
        let opened = stamp(&file);
        Handle {
            staging,
            file,
            writer,
            tick,
            wrote: AtomicBool::new(fresh || opened.0 == 0),
            opened,
            unheard: AtomicBool::new(false),
            flushed: AtomicBool::new(false),
            rescues: self.rescues(),
            killed: Mutex::new(None),
        }
    }

    /// Opens a staged file with the flags of open(2). Opening a committed file for writing brings its entry back to disk,
    /// unless O_TRUNC makes that needless.
    pub fn open_file(self: &Arc<Self>, path: &[Vec<u8>], flags: i32) -> Result<Handle> {
        names::check(path)?;
        let mut g = self.lock();
        self.wait_idle(&mut g, path);
        let at = self.locate_in(&g, path)?;
        let truncate = flags & libc::O_TRUNC != 0;
        let write = flags & libc::O_ACCMODE != libc::O_RDONLY || truncate;
        let oflags = open_flags(flags);
        if !write {
            return match at {
                Located::Disk(_) => {
                    let file = open_regular(self.backing()?, path, oflags)?;
                    Ok(self.handle(&mut g, file, None, false))
                }
                Located::Version { .. } => Err(committed_meanwhile()),
                Located::Branch(_) | Located::Root => Err(errno(libc::EISDIR, "a directory")),
            };
        }
        let file = match at {
            Located::Branch(_) | Located::Root => return Err(errno(libc::EISDIR, "a directory")),
            Located::Version {
                version,
                path: inside,
            } if truncate && path.len() == 2 => {
                let entry = find(self.repo.as_ref(), &version, &inside)?;
                regular(kind_of_entry(&entry))?;
                let owner = self.owner_of(&g, path);
                self.change(&mut g, path, Need::Nothing, |b, _| {
                    copyup::empty_like(&b.path(path), &entry, owner)?;
                    open_regular(b, path, oflags)
                })?
            }
            Located::Version {
                version,
                path: inside,
            } => {
                regular(kind_of_entry(&find(self.repo.as_ref(), &version, &inside)?))?;
                self.change(&mut g, path, Need::Whole, |b, _| open_regular(b, path, oflags))?
            }
            Located::Disk(_) => {
                self.change(&mut g, path, Need::Whole, |b, _| open_regular(b, path, oflags))?
            }
        };
        if truncate {
            g.clear(path);
        }
        Ok(self.handle(&mut g, file, Some(path), truncate))
    }

    /// Makes and opens a regular file. The caller becomes its owner where this process may give files away.
    #[allow(clippy::too_many_arguments)]
    pub fn create(
        self: &Arc<Self>,
        path: &[Vec<u8>],
        mode: u32,
        flags: i32,
        umask: u32,
        uid: u32,
        gid: u32,
    ) -> Result<(Handle, Attr)> {
        names::check(path)?;
        let there = self.locate(path);
        if there.is_ok() && flags & libc::O_EXCL == 0 {
            let handle = self.open_file(path, flags & !libc::O_CREAT)?;
            let attr = handle.attr()?;
            return Ok((handle, attr));
        }
        let mut file = None;
        let attr = self.make(path, |b| {
            let access = open_flags(flags & libc::O_ACCMODE | flags & (libc::O_SYNC | libc::O_DSYNC));
            let fd = b.open_at(
                path,
                access | OFlags::CREATE | OFlags::EXCL,
                Mode::RUSR | Mode::WUSR,
            )?;
            let new = File::from(fd);
            own(b, path, uid, gid)?;
            new.set_permissions(Permissions::from_mode(mode & !umask & 0o7777))
                .doing(|| "set the mode".into())?;
            file = Some(new);
            Ok(())
        })?;
        let file = file.ok_or_else(|| absent(path))?;
        let write = flags & libc::O_ACCMODE != libc::O_RDONLY;
        let mut g = self.lock();
        Ok((self.handle(&mut g, file, write.then_some(path), true), attr))
    }

    /// Makes a directory; directly in staging/, a branch.
    pub fn mkdir(&self, path: &[Vec<u8>], mode: u32, umask: u32, uid: u32, gid: u32) -> Result<Attr> {
        names::check(path)?;
        if let [branch] = path {
            return self.make_branch(branch);
        }
        self.make(path, |b| {
            let (dir, name) = b.parent(path)?;
            rustix::fs::mkdirat(&dir, name, Mode::RWXU).doing(|| format!("make {}", names::show(path)))?;
            own(b, path, uid, gid)?;
            let inherited = b.stat(path)?.map_or(0, |s| s.st_mode & libc::S_ISGID);
            set_mode(b, path, mode & !umask | inherited)
        })
    }

    fn make_branch(&self, name: &[u8]) -> Result<Attr> {
        let g = self.lock();
        self.check_writable(&g)?;
        let text =
            std::str::from_utf8(name).map_err(|_| errno(libc::EINVAL, "a branch is named in ASCII"))?;
        if self.branch(name).is_some() {
            return Err(Error::new(
                Kind::Exists,
                format!("there is a branch {text:?} already"),
            ));
        }
        if !self.repo.branches().iter().any(|b| b == text) {
            self.repo.make_branch(text)?;
        }
        self.branch_dir(text)?;
        let _ = std::fs::remove_file(self.hidden(text));
        self.stat_or_root(&[name.to_vec()])
    }

    /// Makes a regular file, a FIFO or a socket; devices are EPERM.
    pub fn mknod(
        &self,
        path: &[Vec<u8>],
        kind: FileKind,
        mode: u32,
        umask: u32,
        uid: u32,
        gid: u32,
    ) -> Result<Attr> {
        let file_type = match kind {
            FileKind::File => FileType::RegularFile,
            FileKind::Fifo => FileType::Fifo,
            FileKind::Socket => FileType::Socket,
            _ => return Err(errno(libc::EPERM, "no devices in staging")),
        };
        self.make(path, |b| {
            let (dir, name) = b.parent(path)?;
            rustix::fs::mknodat(&dir, name, file_type, Mode::RUSR | Mode::WUSR, 0)
                .doing(|| format!("make {}", names::show(path)))?;
            own(b, path, uid, gid)?;
            set_mode(b, path, mode & !umask)
        })
    }

    /// Makes a symbolic link.
    pub fn symlink(&self, path: &[Vec<u8>], target: &[u8], uid: u32, gid: u32) -> Result<Attr> {
        self.make(path, |b| {
            let (dir, name) = b.parent(path)?;
            rustix::fs::symlinkat(target, &dir, name).doing(|| format!("make {}", names::show(path)))?;
            own(b, path, uid, gid)
        })
    }

    /// Makes a hard link `to` to the file `from`.
    pub fn link(&self, from: &[Vec<u8>], to: &[Vec<u8>]) -> Result<Attr> {
        names::check(from)?;
        names::check(to)?;
        let pin = {
            let mut g = self.lock();
            self.check_writable(&g)?;
            self.wait_idle(&mut g, from);
            let at = self.locate_in(&g, from)?;
            if to.len() >= 2 {
                self.free(&mut g, to)?;
            }
            if self.attr_in(&g, from)?.kind == FileKind::Dir {
                return Err(errno(libc::EPERM, "a directory"));
            }
            if matches!(at, Located::Version { .. }) {
                self.begin(&mut g, from, Need::Whole)?;
            }
            self.pin(&mut g, from)
        };
        let made = self.make(to, |b| {
            let ((from_dir, from_name), (dir, name)) = (b.parent(from)?, b.parent(to)?);
            rustix::fs::linkat(&from_dir, from_name, &dir, name, AtFlags::empty())
                .doing(|| format!("link {}", names::show(to)))
        });
        self.lock().opens.remove(&pin);
        made
    }

    /// Where a symbolic link points.
    pub fn readlink(&self, path: &[Vec<u8>]) -> Result<Vec<u8>> {
        names::check(path)?;
        match self.locate(path)? {
            Located::Version { version, path } => match find(self.repo.as_ref(), &version, &path)?.kind {
                EntryKind::Symlink(target) => Ok(target),
                _ => Err(errno(libc::EINVAL, "no symbolic link")),
            },
            Located::Disk(_) => {
                let (dir, name) = self.backing()?.parent(path)?;
                let target = rustix::fs::readlinkat(&dir, name, Vec::new());
                Ok(target
                    .doing(|| format!("read link {}", names::show(path)))?
                    .into_bytes())
            }
            Located::Branch(_) | Located::Root => Err(errno(libc::EINVAL, "no symbolic link")),
        }
    }
}

/// The flags for the backing file: appending is the kernel's work, and O_DIRECT's alignment is not passed on.
fn open_flags(flags: i32) -> OFlags {
    let keep = libc::O_ACCMODE | libc::O_TRUNC | libc::O_SYNC | libc::O_DSYNC;
    OFlags::from_bits_truncate((flags & keep) as u32) | OFlags::NONBLOCK
}

/// Gives a new file to who made it, where this process may. A set-group-id directory decides over the group itself.
fn own(b: &Backing, path: &names::Path, uid: u32, gid: u32) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let (dir, name) = b.parent(path)?;
    let inherits = rustix::fs::fstat(&dir).is_ok_and(|s| s.st_mode & libc::S_ISGID != 0);
    let group = (!inherits).then(|| Gid::from_raw(gid));
    rustix::fs::chownat(
        &dir,
        name,
        Some(Uid::from_raw(uid)),
        group,
        AtFlags::SYMLINK_NOFOLLOW,
    )
    .doing(|| format!("set the owner of {}", names::show(path)))
}

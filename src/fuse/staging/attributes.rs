//! Attributes, plain and extended, and fsync of directories.

use super::backing::{Backing, attr_of, committed_meanwhile};
use super::names::{self, errno};
use super::ops::{Need, open_regular, regular};
use super::repo::{absent, find, timespec};
use super::{Located, Staging, copyup, kind_of_entry, version_attr};
use crate::error::{IoContext, Result};
use crate::fuse::attr::Attr;
use crate::store::{Entry, EntryKind, Timestamp};
use rustix::fs::{AtFlags, Gid, Mode, OFlags, Timespec, Timestamps, Uid};
use std::fs::{File, Permissions};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;

/// A time to set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SetTime {
    /// The present.
    Now,
    /// This one.
    At(Timestamp),
}

/// Attributes to change; what is `None` stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetAttr {
    /// Permission bits (07777).
    pub mode: Option<u32>,
    /// Owner.
    pub uid: Option<u32>,
    /// Group.
    pub gid: Option<u32>,
    /// Length in bytes.
    pub size: Option<u64>,
    /// Time of last access.
    pub atime: Option<SetTime>,
    /// Time of last modification.
    pub mtime: Option<SetTime>,
}

impl SetAttr {
    fn times(&self) -> Option<Timestamps> {
        let spec = |t: Option<SetTime>| match t {
            None => Timespec {
                tv_sec: 0,
                tv_nsec: rustix::fs::UTIME_OMIT,
            },
            Some(SetTime::Now) => Timespec {
                tv_sec: 0,
                tv_nsec: rustix::fs::UTIME_NOW,
            },
            Some(SetTime::At(t)) => timespec(t),
        };
        let times = Timestamps {
            last_access: spec(self.atime),
            last_modification: spec(self.mtime),
        };
        (self.atime.is_some() || self.mtime.is_some()).then_some(times)
    }

    /// Whether it makes something else of a committed entry. Owner and access time are not kept by a version.
    fn alters(&self, entry: &Entry) -> bool {
        let mtime = |t| matches!(t, SetTime::At(t) if t == entry.mtime);
        let same = self.mode.is_none_or(|m| m & 0o7777 == entry.mode)
            && self.size.is_none_or(|s| s == entry.len() && s != 0)
            && self.mtime.is_none_or(mtime);
        !same
    }

    fn owner(&self) -> Option<(Option<Uid>, Option<Gid>)> {
        let (uid, gid) = (self.uid.map(Uid::from_raw), self.gid.map(Gid::from_raw));
        (uid.is_some() || gid.is_some()).then_some((uid, gid))
    }
}

/// Sets owner, mode and times of an open file.
pub(super) fn apply_to_fd(file: &File, change: &SetAttr) -> Result<()> {
    let what = || "set the attributes of a staged file".to_owned();
    if let Some((uid, gid)) = change.owner() {
        rustix::fs::fchown(file, uid, gid).doing(what)?;
    }
    if let Some(mode) = change.mode {
        file.set_permissions(Permissions::from_mode(mode & 0o7777))
            .doing(what)?;
    }
    if let Some(times) = change.times() {
        rustix::fs::futimens(file, &times).doing(what)?;
    }
    Ok(())
}

impl Staging {
    /// Changes attributes. What would change nothing of a committed file brings nothing back to disk.
    pub fn setattr(&self, path: &[Vec<u8>], change: &SetAttr) -> Result<Attr> {
        names::check(path)?;
        let mut g = self.lock();
        self.check_writable(&g)?;
        self.wait_idle(&mut g, path);
        let apply = |b: &Backing| {
            apply(b, path, change)?;
            Ok(attr_of(&b.stat(path)?.ok_or_else(|| absent(path))?))
        };
        match self.locate_in(&g, path)? {
            Located::Root => Err(errno(libc::EPERM, "staging itself")),
            Located::Branch(branch) => {
                self.branch_dir(&branch)?;
                apply(self.backing()?)
            }
            Located::Version {
                version,
                path: inside,
            } => {
                let entry = find(self.repo.as_ref(), &version, &inside)?;
                if change.size.is_some() {
                    regular(kind_of_entry(&entry))?;
                }
                let owner = self.owner_of(&g, path);
                if !change.alters(&entry) {
                    return Ok(version_attr(&entry, version.version.time, owner));
                }
                let file = matches!(entry.kind, EntryKind::File { .. });
                if change.size == Some(0) && path.len() == 2 && file {
                    return self.change(&mut g, path, Need::Nothing, |b, _| {
                        copyup::empty_like(&b.path(path), &entry, owner)?;
                        apply(b)
                    });
                }
                self.change(&mut g, path, Need::Whole, |b, _| apply(b))
            }
            Located::Disk(_) => self.change(&mut g, path, Need::Whole, |b, g| {
                let attr = apply(b)?;
                if change.size == Some(0) {
                    g.clear(path);
                }
                Ok(attr)
            }),
        }
    }

    /// As [`Staging::prepare`], for a change of attributes: most change nothing that a version has.
    pub fn prepare_setattr(&self, path: &[Vec<u8>], change: &SetAttr) -> Result<()> {
        match self.locate(path)? {
            Located::Version {
                version,
                path: inside,
            } => {
                let entry = find(self.repo.as_ref(), &version, &inside)?;
                let emptied = change.size == Some(0) && path.len() == 2;
                if change.alters(&entry) && !emptied {
                    self.prepare(path)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// The value of an extended attribute of a staged file.
    pub fn getxattr(&self, path: &[Vec<u8>], name: &[u8]) -> Result<Vec<u8>> {
        names::check(path)?;
        let at = self.on_disk(path)?;
        let what = || format!("read an attribute of {}", names::show(path));
        let mut value = vec![0; 64 << 10];
        let n = rustix::fs::lgetxattr(at.1, name, &mut value).doing(what)?;
        value.truncate(n);
        Ok(value)
    }

    /// The names of the extended attributes of a staged file.
    pub fn listxattr(&self, path: &[Vec<u8>]) -> Result<Vec<Vec<u8>>> {
        names::check(path)?;
        let at = match self.on_disk(path) {
            Err(e) if e.errno() == libc::EPERM => return Ok(Vec::new()),
            at => at?,
        };
        let mut list = vec![0; 64 << 10];
        let n = rustix::fs::llistxattr(at.1, &mut list)
            .doing(|| format!("list attributes of {}", names::show(path)))?;
        let all = list[..n].split(|b| *b == 0).filter(|n| n.starts_with(b"user."));
        Ok(all.map(<[u8]>::to_vec).collect())
    }

    /// The directory that holds a staged file, and a path by which calls that follow no last link reach it.
    fn on_disk(&self, path: &names::Path) -> Result<(std::os::fd::OwnedFd, std::path::PathBuf)> {
        match self.locate(path)? {
            Located::Disk(_) => {
                let (dir, name) = self.backing()?.parent(path)?;
                let at = Backing::proc_path(&dir, name);
                Ok((dir, at))
            }
            Located::Version { .. } => Err(committed_meanwhile()),
            Located::Branch(_) | Located::Root => Err(errno(libc::EPERM, "no attributes here")),
        }
    }

    /// Sets an extended attribute: `user.*` only. `user.zspace.*` is what the mount itself tells of a version: copied along by
    /// `cp -a`, it is taken without effect.
    pub fn setxattr(&self, path: &[Vec<u8>], name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        self.change_xattr(path, name, |at| {
            let flags = rustix::fs::XattrFlags::from_bits_truncate(flags as u32);
            rustix::fs::lsetxattr(at, name, value, flags)
        })
    }

    /// Removes an extended attribute.
    pub fn removexattr(&self, path: &[Vec<u8>], name: &[u8]) -> Result<()> {
        self.change_xattr(path, name, |at| rustix::fs::lremovexattr(at, name))
    }

    fn change_xattr(
        &self,
        path: &names::Path,
        name: &[u8],
        work: impl FnOnce(&std::path::Path) -> rustix::io::Result<()>,
    ) -> Result<()> {
        names::check(path)?;
        if !name.starts_with(b"user.") {
            return Err(errno(libc::ENOTSUP, "only user.* attributes"));
        }
        let mut g = self.lock();
        self.check_writable(&g)?;
        self.wait_idle(&mut g, path);
        if matches!(self.locate_in(&g, path)?, Located::Branch(_) | Located::Root) {
            return Err(errno(libc::EPERM, "no attributes here"));
        }
        if name.starts_with(b"user.zspace.") {
            return Ok(());
        }
        self.change(&mut g, path, Need::Whole, |b, _| {
            let (dir, last) = b.parent(path)?;
            work(&Backing::proc_path(&dir, last))
                .doing(|| format!("set an attribute of {}", names::show(path)))
        })
    }

    /// fsync of a directory.
    pub fn sync_dir(&self, path: &[Vec<u8>], datasync: bool) -> Result<()> {
        names::check(path)?;
        let open = match self.locate(path)? {
            Located::Version { .. } => return Ok(()),
            Located::Branch(_) if self.backing()?.stat(path)?.is_none() => return Ok(()),
            _ => self
                .backing()?
                .open_at(path, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?,
        };
        let done = if datasync {
            rustix::fs::fdatasync(&open)
        } else {
            rustix::fs::fsync(&open)
        };
        done.doing(|| format!("fsync {}", names::show(path)))
    }
}

pub(super) fn set_mode(b: &Backing, path: &names::Path, mode: u32) -> Result<()> {
    let fd = b.open_at(path, OFlags::PATH, Mode::empty())?;
    let at = format!("/proc/self/fd/{}", fd.as_raw_fd());
    std::fs::set_permissions(&at, Permissions::from_mode(mode & 0o7777))
        .doing(|| format!("set the mode of {}", names::show(path)))
}

fn apply(b: &Backing, path: &names::Path, change: &SetAttr) -> Result<()> {
    let what = || format!("set the attributes of {}", names::show(path));
    let (dir, name) = b.parent(path)?;
    if let Some((uid, gid)) = change.owner() {
        rustix::fs::chownat(&dir, name, uid, gid, AtFlags::SYMLINK_NOFOLLOW).doing(what)?;
    }
    if let Some(size) = change.size {
        // A file that its owner may not write can still be cut through a handle opened before.
        let file = open_regular(b, path, OFlags::WRONLY | OFlags::NONBLOCK)?;
        file.set_len(size).doing(what)?;
    }
    if let Some(mode) = change.mode {
        set_mode(b, path, mode)?;
    }
    if let Some(times) = change.times() {
        let name = std::ffi::OsStr::from_bytes(name);
        rustix::fs::utimensat(&dir, name, &times, AtFlags::SYMLINK_NOFOLLOW).doing(what)?;
    }
    Ok(())
}

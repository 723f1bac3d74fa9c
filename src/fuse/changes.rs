//! Changes of names and attributes. Only `staging/` takes them.

use super::attr::{Attr, FileKind};
use super::errno::{os, read_only};
use super::files::{Files, Found, StagedPath};
use super::handles::{Backing, Open};
use super::io::Opened;
use super::modes::Register;
use super::place::Place;
use super::staging::SetAttr;
use crate::error::{Kind, Result};
use std::sync::Arc;

/// Who asks, and with which umask.
#[derive(Clone, Copy)]
pub(super) struct Caller {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) umask: u32,
}

impl Files {
    /// Does what of a change of `path` can take long before the names are held for it: bringing a committed entry back takes as
    /// long as reading it, and a rename elsewhere, and all who wait behind that, would wait for it.
    pub(super) fn ahead(
        &self,
        path: impl FnOnce() -> Result<StagedPath>,
        prepare: impl FnOnce(&[Vec<u8>]) -> Result<()>,
    ) -> Result<()> {
        let path = {
            let _names = self.names.read();
            path()?
        };
        match prepare(&path) {
            // The change itself knows better what is missing.
            Err(e) if matches!(e.kind(), Kind::NotFound | Kind::Changed | Kind::ReadOnly) => Ok(()),
            done => done,
        }
    }

    /// The same for a new name in a directory.
    fn ahead_in(&self, parent: u64) -> Result<()> {
        let inside = |path: &[Vec<u8>]| match path.len() {
            0 | 1 => Ok(()),
            _ => self.staging.prepare(path),
        };
        match self.place(parent)? {
            Place::Staged(_) => self.ahead(|| self.staged_path(parent), inside),
            _ => Ok(()),
        }
    }

    /// The path of a name in a directory of `staging/`; EROFS anywhere else.
    fn staged_child(&self, parent: u64, name: &[u8]) -> Result<StagedPath> {
        if !matches!(self.place(parent)?, Place::Staged(_)) {
            return Err(read_only());
        }
        let mut path = self.staged_path(parent)?;
        path.push(name.to_vec());
        Ok(path)
    }

    /// Makes and opens a file.
    pub(super) fn create(
        &self,
        parent: u64,
        name: &[u8],
        mode: u32,
        flags: i32,
        by: Caller,
        register: Register<'_>,
    ) -> Result<(Found, Opened)> {
        self.ahead_in(parent)?;
        let _names = self.names.read();
        let path = self.staged_child(parent, name)?;
        let flags = flags & (libc::O_ACCMODE | libc::O_TRUNC | libc::O_EXCL | libc::O_CREAT);
        let (handle, _) = self
            .staging
            .create(&path, mode & 0o7777, flags, by.umask, by.uid, by.gid)?;
        let found = self.found_staged(parent, &path)?;
        let opened = self.add_staged(found.ino, true, Backing::Disk(Arc::new(handle)), register);
        let opened = opened.inspect_err(|_| self.inodes.forget(found.ino, 1))?;
        Ok((found, opened))
    }

    /// Makes a regular file, a named pipe or a socket.
    pub(super) fn make_node(&self, parent: u64, name: &[u8], mode: u32, by: Caller) -> Result<Found> {
        let kind = match mode & libc::S_IFMT {
            libc::S_IFREG | 0 => FileKind::File,
            libc::S_IFIFO => FileKind::Fifo,
            libc::S_IFSOCK => FileKind::Socket,
            _ => return Err(os(libc::EPERM, "devices cannot be stored")),
        };
        self.ahead_in(parent)?;
        let _names = self.names.read();
        let path = self.staged_child(parent, name)?;
        self.staging
            .mknod(&path, kind, mode & 0o7777, by.umask, by.uid, by.gid)?;
        self.found_staged(parent, &path)
    }

    /// Makes a directory; directly under `staging/`, a branch.
    pub(super) fn make_dir(&self, parent: u64, name: &[u8], mode: u32, by: Caller) -> Result<Found> {
        self.ahead_in(parent)?;
        let _names = self.names.read();
        let path = self.staged_child(parent, name)?;
        self.staging
            .mkdir(&path, mode & 0o7777, by.umask, by.uid, by.gid)?;
        self.found_staged(parent, &path)
    }

    /// Makes a symbolic link.
    pub(super) fn make_link(&self, parent: u64, name: &[u8], target: &[u8], by: Caller) -> Result<Found> {
        self.ahead_in(parent)?;
        let _names = self.names.read();
        let path = self.staged_child(parent, name)?;
        self.staging.symlink(&path, target, by.uid, by.gid)?;
        self.found_staged(parent, &path)
    }

    /// Gives a staged file one more name.
    pub(super) fn link(&self, ino: u64, parent: u64, name: &[u8]) -> Result<Found> {
        self.ahead_in(parent)?;
        if matches!(self.place(ino)?, Place::Staged(_)) {
            self.ahead(|| self.staged_path(ino), |path| self.staging.prepare(path))?;
        }
        let _names = self.names.read();
        let to = self.staged_child(parent, name)?;
        if !matches!(self.place(ino)?, Place::Staged(_)) {
            return Err(os(libc::EXDEV, "a version cannot be linked to; copy it"));
        }
        let from = self.staged_path(ino)?;
        let attr = self.staging.link(&from, &to)?;
        self.inodes.link(ino, parent, name);
        // Linking may have made the committed file an ordinary one again.
        self.follow(ino, &to);
        Ok(Found {
            ino,
            attr,
            entry_ttl: std::time::Duration::ZERO,
            attr_ttl: std::time::Duration::ZERO,
        })
    }

    /// Removes a file, or with `dir` an empty directory.
    pub(super) fn remove(&self, parent: u64, name: &[u8], dir: bool) -> Result<()> {
        let _names = self.names.read();
        let path = self.staged_child(parent, name)?;
        if dir {
            self.staging.rmdir(&path)?;
        } else {
            self.staging.unlink(&path)?;
        }
        self.inodes.remove(parent, name);
        Ok(())
    }

    /// Moves a name, with the flags of `renameat2`.
    pub(super) fn rename(&self, from: (u64, &[u8]), to: (u64, &[u8]), flags: u32) -> Result<()> {
        if flags & !(libc::RENAME_NOREPLACE | libc::RENAME_EXCHANGE) != 0 {
            return Err(os(libc::EINVAL, "no such kind of rename here"));
        }
        let (source, target) = {
            let _names = self.names.read();
            (self.staged_child(from.0, from.1)?, self.staged_child(to.0, to.1)?)
        };
        self.staging.prepare_rename(&source, &target, flags)?;
        let _names = self.names.write();
        let source = self.staged_child(from.0, from.1)?;
        let target = self.staged_child(to.0, to.1)?;
        self.staging.rename(&source, &target, flags)?;
        self.inodes.rename(from, to, flags & libc::RENAME_EXCHANGE != 0);
        Ok(())
    }

    /// Changes attributes, through a handle if there is one.
    pub(super) fn set_attr(&self, ino: u64, fh: Option<u64>, change: &SetAttr) -> Result<Attr> {
        if !matches!(self.place(ino)?, Place::Staged(_)) {
            return Err(read_only());
        }
        if fh.is_none() && self.inodes.path(ino).is_some() {
            let prepare = |path: &[Vec<u8>]| self.staging.prepare_setattr(path, change);
            self.ahead(|| self.staged_path(ino), prepare)?;
        }
        let _names = self.names.read();
        if let Some(open) = fh.and_then(|fh| self.handles.get(fh))
            && let Open::Staged(staged) = &*open
            && let Some(handle) = staged.disk()
        {
            return handle.setattr(change);
        }
        match self.staged_path(ino) {
            Ok(path) => {
                let attr = self.staging.setattr(&path, change)?;
                self.follow(ino, &path);
                Ok(attr)
            }
            // Without a name, but open.
            Err(e) => {
                let disk = |o: &Arc<Open>| match &**o {
                    Open::Staged(staged) => staged.disk(),
                    _ => None,
                };
                let handle = self.handles.of(ino).iter().find_map(disk);
                handle.ok_or(e)?.setattr(change)
            }
        }
    }

    /// Makes the names of a directory durable.
    pub(super) fn sync_dir(&self, ino: u64, datasync: bool) -> Result<()> {
        if !matches!(self.place(ino)?, Place::Staged(_)) {
            return Ok(());
        }
        let _names = self.names.read();
        self.staging.sync_dir(&self.staged_path(ino)?, datasync)
    }
}

//! Extended attributes of any inode: the mount's own, those of versions, those of staged files.

use super::errno::{os, read_only};
use super::files::Files;
use super::place::Place;
use super::staging::Located;
use super::xattr::PREFIX;
use crate::error::{Kind, Result};
use std::os::unix::ffi::OsStrExt;

impl Files {
    /// The value of an extended attribute, if there is one.
    pub(super) fn xattr(&self, ino: u64, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let place = self.place(ino)?;
        let own = name.strip_prefix(PREFIX);
        if let Some(value) = own.and_then(|own| self.mount_xattr(ino, own)) {
            return Ok(Some(value));
        }
        let of_place = |place: &Place| match own {
            Some(own) => self.space.own_xattr(place, own),
            None => Ok(self.space.committed_xattr(place, name)),
        };
        if !matches!(place, Place::Staged(_)) {
            return of_place(&place);
        }
        let _names = self.names.read();
        let path = self.staged_path(ino)?;
        self.settled(|| match self.staging.locate(&path)? {
            Located::Version { version, path } => of_place(&self.space.walk(&version, &path)?),
            _ if own.is_some() => Ok(None),
            _ => match self.staging.getxattr(&path, name) {
                Err(e) if matches!(e.errno(), libc::ENODATA | libc::ENOTSUP) => Ok(None),
                value => value.map(Some),
            },
        })
    }

    /// What any path of the mount tells about the mount, unlisted: `store`, `path`, and `pid` and `staging` (`owner` or `reader`)
    /// of the process that serves it.
    fn mount_xattr(&self, ino: u64, name: &[u8]) -> Option<Vec<u8>> {
        match name {
            b"store" => Some(self.space.store.dir().as_os_str().as_bytes().to_vec()),
            b"path" => Some(self.inodes.path(ino)?.join(&b'/')),
            b"pid" => Some(std::process::id().to_string().into_bytes()),
            b"staging" => Some(if self.staging.is_owner() {
                b"owner".to_vec()
            } else {
                b"reader".to_vec()
            }),
            _ => None,
        }
    }

    /// The names of the extended attributes, each with a zero byte behind it.
    pub(super) fn xattr_list(&self, ino: u64) -> Result<Vec<u8>> {
        let place = self.place(ino)?;
        let names = if matches!(place, Place::Staged(_)) {
            let _names = self.names.read();
            let path = self.staged_path(ino)?;
            self.settled(|| match self.staging.locate(&path)? {
                Located::Version { version, path } => {
                    self.space.xattr_names(&self.space.walk(&version, &path)?)
                }
                _ => match self.staging.listxattr(&path) {
                    Err(e) if e.errno() == libc::ENOTSUP => Ok(Vec::new()),
                    names => names,
                },
            })?
        } else {
            self.space.xattr_names(&place)?
        };
        Ok(names.iter().flat_map(|n| n.iter().copied().chain([0])).collect())
    }

    /// Sets an extended attribute of a staged file. The mount's own names are accepted without effect, so that programs that copy
    /// a version with its attributes need not know of them.
    pub(super) fn set_xattr(&self, ino: u64, name: &[u8], value: &[u8], flags: i32) -> Result<()> {
        self.change_xattr(ino, name, |path| self.staging.setxattr(path, name, value, flags))
    }

    /// Removes an extended attribute of a staged file.
    pub(super) fn remove_xattr(&self, ino: u64, name: &[u8]) -> Result<()> {
        self.change_xattr(ino, name, |path| self.staging.removexattr(path, name))
    }

    fn change_xattr(&self, ino: u64, name: &[u8], change: impl Fn(&[Vec<u8>]) -> Result<()>) -> Result<()> {
        if !matches!(self.place(ino)?, Place::Staged(_)) {
            return Err(read_only());
        }
        if !name.starts_with(b"user.") {
            return Err(os(libc::ENOTSUP, "only user.* attributes are stored"));
        }
        if name.starts_with(PREFIX) {
            return Ok(());
        }
        self.ahead(|| self.staged_path(ino), |path| self.staging.prepare(path))?;
        let _names = self.names.read();
        let path = self.staged_path(ino)?;
        let result = change(&path);
        match result {
            Err(e) if e.kind() == Kind::Changed => change(&path),
            result => result,
        }
    }
}

//! What staging asks of the store, so that its rules can be tested without one.

use super::names;
use crate::error::{Error, Kind, Result};
use crate::id::{FileHash, NodeId, VersionId};
use crate::store::{
    CommitRequest, Committed, Confirm, Entry, EntryKind, Numbered, Probe, Store, Timestamp, Tree, Warmed,
    WholeFiles,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The store, seen from staging.
pub(super) trait Repo: Send + Sync {
    /// Its directory.
    fn dir(&self) -> &Path;
    /// Picks up what others committed.
    fn refresh(&self) -> Result<()>;
    /// Bytes of rebuilt chunks in its cache.
    fn cached_bytes(&self) -> u64;
    /// The most bytes that its cache holds.
    fn cache_limit(&self) -> u64;
    /// Branches by name.
    fn branches(&self) -> Vec<String>;
    /// Makes a branch without versions.
    fn make_branch(&self, name: &str) -> Result<()>;
    /// A version.
    fn version(&self, id: &VersionId) -> Option<Arc<Numbered>>;
    /// One directory of a version.
    fn tree(&self, id: &NodeId) -> Result<Arc<Tree>>;
    /// The bytes of a file in order, piece by piece.
    fn export(&self, hash: &FileHash, len: u64, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>;
    /// The whole files of versions that are kept, if they are.
    fn whole_files(&self) -> Option<&WholeFiles> {
        None
    }
    /// Has the files that REV or REV:PATH names kept whole, as long as `go_on` says so.
    fn warm(&self, what: &str, go_on: &dyn Fn() -> bool) -> Result<Warmed>;
    /// What a file on disk is by its structure.
    fn probe(&self, path: &Path) -> Result<Probe>;
    /// Makes a version, in the `background` on fewer threads, unless `confirm` says, once everything was read, that it should not be.
    fn commit(
        &self,
        branch: &str,
        entries: Vec<(Vec<u8>, PathBuf)>,
        message: &str,
        background: bool,
        confirm: Confirm<'_>,
    ) -> Result<Committed>;
}

impl Repo for Store {
    fn dir(&self) -> &Path {
        Store::dir(self)
    }

    fn refresh(&self) -> Result<()> {
        Store::refresh(self).map(|_| ())
    }

    fn cached_bytes(&self) -> u64 {
        Store::cached_bytes(self)
    }

    fn cache_limit(&self) -> u64 {
        Store::cache_limit(self)
    }

    fn branches(&self) -> Vec<String> {
        Store::branches(self)
    }

    fn make_branch(&self, name: &str) -> Result<()> {
        Store::make_branch(self, name, None)
    }

    fn version(&self, id: &VersionId) -> Option<Arc<Numbered>> {
        Store::version(self, id)
    }

    fn tree(&self, id: &NodeId) -> Result<Arc<Tree>> {
        Store::tree(self, id)
    }

    fn export(&self, hash: &FileHash, len: u64, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        const PIECE: u64 = 1 << 20;
        const AHEAD: usize = 8 << 20;
        let view = self.file(hash, len)?;
        let mut at = 0;
        while at < len {
            let next = at.saturating_add(PIECE);
            view.read_ahead(next, AHEAD);
            let piece = view.read(at, PIECE.min(len - at) as usize)?;
            if piece.is_empty() {
                return Err(Error::damage(format!(
                    "file {hash} ends {} bytes early",
                    len - at
                )));
            }
            sink(&piece)?;
            at += piece.len() as u64;
        }
        Ok(())
    }

    fn whole_files(&self) -> Option<&WholeFiles> {
        Store::whole_files(self)
    }

    fn warm(&self, what: &str, go_on: &dyn Fn() -> bool) -> Result<Warmed> {
        Store::warm(self, what, go_on)
    }

    fn probe(&self, path: &Path) -> Result<Probe> {
        Store::probe(self, path)
    }

    fn commit(
        &self,
        branch: &str,
        entries: Vec<(Vec<u8>, PathBuf)>,
        message: &str,
        background: bool,
        confirm: Confirm<'_>,
    ) -> Result<Committed> {
        let request = CommitRequest {
            branch: branch.to_owned(),
            entries,
            message: message.to_owned(),
            // Where staged files lie on disk, a link would lead elsewhere than it does in the mount.
            keep_links: true,
            background,
            ..CommitRequest::default()
        };
        Store::commit_if(self, &request, confirm)
    }
}

/// What lies at `path` (components below the version's root). The root itself is a directory of mode 0755.
pub(super) fn find(repo: &dyn Repo, version: &Numbered, path: &names::Path) -> Result<Entry> {
    let mut at = Entry {
        name: Vec::new(),
        mode: 0o755,
        mtime: version.version.time,
        xattrs: Vec::new(),
        kind: EntryKind::Dir {
            tree: version.version.tree,
            len: version.version.len,
        },
    };
    for name in path {
        let EntryKind::Dir { tree, .. } = &at.kind else {
            return Err(absent(path));
        };
        at = repo.tree(tree)?.find(name).cloned().ok_or_else(|| absent(path))?;
    }
    Ok(at)
}

/// There is nothing of this name.
pub(super) fn absent(path: &names::Path) -> Error {
    Error::new(Kind::NotFound, format!("no {} in staging", names::show(path)))
}

/// The same moment for system calls.
pub(super) fn timespec(t: Timestamp) -> rustix::fs::Timespec {
    rustix::fs::Timespec {
        tv_sec: t.seconds,
        tv_nsec: t.nanos.into(),
    }
}

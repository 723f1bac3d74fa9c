//! Walks what is committed, directory by directory, and stores each one's tree once its files are stored. Memory goes with
//! the depth and with the directories on the way there, not with the whole.

use super::file::{Stamp, stamp};
use super::{Commit, CommitRequest, Found};
use crate::error::{Error, IoContext, Kind, Result};
use crate::graph::{Entry, EntryKind, NodeKind, Timestamp, Tree};
use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// A directory being walked.
struct Frame {
    /// Where it is on disk, and in the version.
    source: PathBuf,
    path: Vec<u8>,
    /// Its own entry but for the tree.
    entry: Entry,
    /// Names still to visit, last first.
    names: Vec<OsString>,
    /// Names of files that wait until those are visited.
    waiting: Vec<OsString>,
    waited: bool,
    done: Vec<Entry>,
}

#[derive(Default)]
struct Walk {
    files: u64,
    links_outside: u64,
    /// The number last given to a file of several names.
    linked: u32,
    /// Files of several names that were stored, by device and inode.
    links: HashMap<(u64, u64), (EntryKind, Stamp)>,
    /// Real directories above the present one, when links are followed: a link back into them never ends.
    above: Vec<(u64, u64)>,
}

/// Stores everything the request names.
pub(super) fn walk(commit: &Commit<'_>) -> Result<Found> {
    let mut w = Walk::default();
    let mut entries = Vec::new();
    for (name, source) in &commit.request.entries {
        entries.push(w.top(commit, name, source)?);
    }
    Ok(Found {
        entries,
        files: w.files,
        links_outside: w.links_outside,
    })
}

impl Walk {
    /// One entry. A symbolic link given by name is followed, as `cp` does with its arguments, unless links are asked for.
    fn top(&mut self, commit: &Commit<'_>, name: &[u8], source: &Path) -> Result<Entry> {
        let meta = if commit.request.keep_links {
            std::fs::symlink_metadata(source)
        } else {
            std::fs::metadata(source)
        };
        let meta = meta.doing(|| source.display().to_string())?;
        let mut stack: Vec<Frame> = Vec::new();
        let mut finished = self.visit(commit, &mut stack, source, name.to_vec(), name, &meta)?;
        loop {
            let Some(frame) = stack.last_mut() else {
                return finished.ok_or_else(|| {
                    Error::new(Kind::NotFound, format!("{}: nothing there", source.display()))
                });
            };
            frame.done.extend(finished.take());
            if frame.names.is_empty() && !frame.waiting.is_empty() {
                frame.names = std::mem::take(&mut frame.waiting);
                frame.names.reverse();
                frame.waited = true;
            }
            if let Some(name) = frame.names.pop() {
                let source = frame.source.join(&name);
                let mut path = frame.path.clone();
                path.push(b'/');
                path.extend_from_slice(name.as_bytes());
                let follow = commit.request.follow_links;
                let meta = if follow {
                    std::fs::metadata(&source)
                } else {
                    std::fs::symlink_metadata(&source)
                };
                let meta = match meta {
                    Ok(m) => m,
                    Err(e) if follow && e.kind() == std::io::ErrorKind::NotFound => {
                        return Err(Error::io(format!("{} points nowhere", source.display()), e));
                    }
                    Err(e) => return Err(Error::io(source.display().to_string(), e)),
                };
                finished = self.visit(commit, &mut stack, &source, path, name.as_bytes(), &meta)?;
            } else if let Some(frame) = stack.pop() {
                self.above.pop();
                finished = Some(close(commit, frame)?);
            }
        }
    }

    /// Stores a file or link and gives its entry, or opens a directory on the stack.
    fn visit(
        &mut self,
        commit: &Commit<'_>,
        stack: &mut Vec<Frame>,
        source: &Path,
        path: Vec<u8>,
        name: &[u8],
        meta: &Metadata,
    ) -> Result<Option<Entry>> {
        commit.advance(0)?;
        let kind = meta.file_type();
        let (mode, mtime) = mode_and_time(meta);
        let mut entry = Entry {
            name: name.to_vec(),
            mode,
            mtime,
            xattrs: Vec::new(),
            kind: EntryKind::Symlink(Vec::new()),
        };
        if kind.is_symlink() {
            let target = std::fs::read_link(source).doing(|| format!("read link {}", source.display()))?;
            let depth = path.iter().filter(|b| **b == b'/').count();
            if leaves(&target, depth) {
                self.links_outside += 1;
                log::warn!(
                    "{} points outside of what is committed, to {}",
                    source.display(),
                    target.display()
                );
            }
            // A link's permissions mean nothing and differ between systems.
            entry.mode = 0o777;
            entry.kind = EntryKind::Symlink(target.as_os_str().as_bytes().to_vec());
            return Ok(Some(entry));
        }
        entry.xattrs = user_xattrs(source)?;
        if kind.is_dir() {
            let here = (meta.dev(), meta.ino());
            if Some(here) == commit.store {
                let why = format!(
                    "{} is the store itself: it cannot be committed, nor what it lies in",
                    source.display()
                );
                return Err(Error::new(Kind::Refused, why));
            }
            if self.above.contains(&here) {
                return Err(Error::new(
                    Kind::Refused,
                    format!("{} leads back into itself", source.display()),
                ));
            }
            self.above.push(here);
            let listed = std::fs::read_dir(source).and_then(|d| d.map(|e| Ok(e?.file_name())).collect());
            let mut names: Vec<OsString> = listed.doing(|| format!("list {}", source.display()))?;
            // In order, so that link numbers and packs come out the same each time.
            names.sort_unstable_by(|a, b| b.cmp(a));
            stack.push(Frame {
                source: source.to_owned(),
                path,
                entry,
                names,
                waiting: Vec::new(),
                waited: false,
                done: Vec::new(),
            });
            return Ok(None);
        }
        if !kind.is_file() {
            let why = format!(
                "{} is a device, pipe or socket: only files, directories and links can be committed",
                source.display()
            );
            return Err(Error::new(Kind::Refused, why));
        }
        // Numbers of links are given in order of names, so those do not wait.
        let others = |f: &Frame| !f.names.is_empty() || !f.waiting.is_empty();
        let waits = |f: &&mut Frame| !f.waited && others(f) && meta.nlink() == 1;
        let frame = stack.last_mut().filter(waits);
        if !self.file(commit, source, &path, meta, &mut entry, frame.is_some())? {
            if let (Some(frame), Some(name)) = (frame, source.file_name()) {
                frame.waiting.push(name.to_owned());
            }
            return Ok(None);
        }
        self.files += 1;
        Ok(Some(entry))
    }

    /// Stores a file, unless it is a further name of one that was stored, and gives the entry what goes with its bytes. False if
    /// it should wait, and may.
    fn file(
        &mut self,
        commit: &Commit<'_>,
        source: &Path,
        path: &[u8],
        meta: &Metadata,
        entry: &mut Entry,
        may_wait: bool,
    ) -> Result<bool> {
        let inode = (meta.dev(), meta.ino());
        if let Some((kind, seen)) = self.links.get(&inode)
            && *seen == stamp(meta)
        {
            entry.kind = kind.clone();
            return Ok(true);
        }
        let Some((hash, len, meta)) = commit.file(source, path, may_wait)? else {
            return Ok(false);
        };
        (entry.mode, entry.mtime) = mode_and_time(&meta);
        let mut link = 0;
        if meta.nlink() > 1 {
            self.linked += 1;
            link = self.linked;
        }
        entry.kind = EntryKind::File { hash, len, link };
        if link > 0 {
            self.links.insert(inode, (entry.kind.clone(), stamp(&meta)));
        }
        Ok(true)
    }
}

fn mode_and_time(meta: &Metadata) -> (u32, Timestamp) {
    let nanos = u32::try_from(meta.mtime_nsec()).unwrap_or(0);
    (
        meta.mode() & 0o7777,
        Timestamp {
            seconds: meta.mtime(),
            nanos,
        },
    )
}

/// Stores a directory's tree and gives its entry.
fn close(commit: &Commit<'_>, frame: Frame) -> Result<Entry> {
    let tree = Tree::new(frame.done).map_err(|e| e.context(frame.source.display()))?;
    let bytes = tree.encode();
    let id = Tree::id(&bytes);
    commit
        .encoder
        .node(NodeKind::Tree, id, &bytes, None)
        .map_err(|e| e.context(frame.source.display()))?;
    Ok(Entry {
        kind: EntryKind::Dir {
            tree: id,
            len: tree.len(),
        },
        ..frame.entry
    })
}

/// Whether a link `depth` directories below the version's root points outside of it.
fn leaves(target: &Path, depth: usize) -> bool {
    let mut level = depth;
    for c in target.components() {
        match c {
            Component::ParentDir if level <= 1 => return true,
            Component::ParentDir => level -= 1,
            Component::Normal(_) => level += 1,
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return true,
        }
    }
    false
}

/// The `user.*` attributes of a file, sorted; those that zspace itself shows are left out.
fn user_xattrs(path: &Path) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let what = || format!("read attributes of {}", path.display());
    let names = match grown(|buf| rustix::fs::listxattr(path, buf)) {
        Ok(names) => names,
        Err(rustix::io::Errno::NOTSUP | rustix::io::Errno::NOSYS) => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(what(), e.into())),
    };
    let mut out = Vec::new();
    for name in names.split(|b| *b == 0) {
        if !name.starts_with(b"user.") || name.starts_with(b"user.zspace.") {
            continue;
        }
        match grown(|buf| rustix::fs::getxattr(path, OsStr::from_bytes(name), buf)) {
            Ok(value) => out.push((name.to_vec(), value)),
            // Removed since it was listed.
            Err(rustix::io::Errno::NODATA) => {}
            Err(e) => return Err(Error::io(what(), e.into())),
        }
    }
    out.sort();
    Ok(out)
}

/// What a call that fills a buffer has to say: in a small one, or the largest an attribute may need.
fn grown(call: impl Fn(&mut [u8]) -> rustix::io::Result<usize>) -> rustix::io::Result<Vec<u8>> {
    let mut buf = vec![0; 1 << 10];
    let n = match call(&mut buf) {
        Err(rustix::io::Errno::RANGE) => {
            buf = vec![0; 1 << 16];
            call(&mut buf)?
        }
        done => done?,
    };
    buf.truncate(n);
    Ok(buf)
}

/// Bytes of all files the request names, as far as they can be seen; for progress only.
pub(super) fn total_len(request: &CommitRequest) -> u64 {
    let mut total = 0u64;
    let mut todo: Vec<PathBuf> = request.entries.iter().map(|(_, p)| p.clone()).collect();
    while let Some(path) = todo.pop() {
        let Ok(meta) = std::fs::symlink_metadata(&path) else {
            continue;
        };
        if meta.is_dir() {
            let entries = std::fs::read_dir(&path).into_iter().flatten().flatten();
            todo.extend(entries.map(|e| e.path()));
        } else if meta.is_file() {
            total = total.saturating_add(meta.len());
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_that_leave_are_told() {
        // The link lies at ENTRY/link: one directory below the root.
        for (target, out) in [
            ("model.pt", false),
            ("../x", true),
            ("sub/../model.pt", false),
            ("/etc/passwd", true),
        ] {
            assert_eq!(leaves(Path::new(target), 1), out, "{target}");
        }
        assert!(!leaves(Path::new("../../blobs/abc"), 3));
        assert!(leaves(Path::new("../../blobs/abc"), 2));
    }
}

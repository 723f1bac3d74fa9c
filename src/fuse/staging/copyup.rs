//! Copying a committed entry back to disk before it is changed.

use super::lease;
use super::marks::{Origin, Owner};
use super::mounter;
use super::names;
use super::repo::{Repo, find, timespec};
use super::whole::home_of;
use crate::error::{Error, IoContext, Result};
use crate::store::{Entry, EntryKind, Numbered, WholeFiles};
use rustix::fs::{AtFlags, CWD, Gid, Timestamps, Uid, XattrFlags};
use std::collections::HashMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// Writes the committed entry at `path` in staging/ to `dest`, which must not exist: bytes, modes, times, links and attributes,
/// without what was removed from it since. A whole file that came from there, and that nobody else reads, is moved back.
pub(super) fn export(
    repo: &dyn Repo,
    version: &Numbered,
    origin: &Origin,
    path: &names::Path,
    dest: &Path,
) -> Result<()> {
    let top = find(repo, version, std::slice::from_ref(&origin.name))?;
    let mut links: HashMap<u32, PathBuf> = HashMap::new();
    let mut dirs: Vec<(PathBuf, Entry)> = Vec::new();
    let mut todo: Vec<(Vec<Vec<u8>>, Entry)> = vec![(Vec::new(), top)];
    while let Some((rel, entry)) = todo.pop() {
        let to = if rel.is_empty() {
            dest.to_owned()
        } else {
            dest.join(names::join(&rel))
        };
        match &entry.kind {
            EntryKind::Dir { tree, .. } => {
                fs::create_dir(&to).doing(|| format!("make {}", to.display()))?;
                for child in repo.tree(tree)?.entries() {
                    let path: Vec<_> = rel.iter().chain([&child.name]).cloned().collect();
                    if !origin.gone.contains(&path) {
                        todo.push((path, child.clone()));
                    }
                }
                dirs.push((to, entry));
            }
            EntryKind::Symlink(target) => {
                std::os::unix::fs::symlink(std::ffi::OsStr::from_bytes(target), &to)
                    .doing(|| format!("link {}", to.display()))?;
                give(&to, origin.owner)?;
                set_times(&to, &entry)?;
            }
            EntryKind::File { hash, len, link } => {
                if let Some(first) = links.get(link).filter(|_| *link != 0) {
                    fs::hard_link(first, &to).doing(|| format!("link {}", to.display()))?;
                    continue;
                }
                let home = home_of(&[path, &rel].concat());
                let taken = |w: &WholeFiles| *link == 0 && w.take(&(*hash, *len), &home, &to, &lease::in_use);
                let file = if repo.whole_files().is_some_and(taken) {
                    File::open(&to).doing(|| format!("open {}", to.display()))?
                } else {
                    let mut file = create(&to)?;
                    repo.export(hash, *len, &mut |piece| {
                        file.write_all(piece).doing(|| format!("write {}", to.display()))
                    })?;
                    file
                };
                dress(&to, &file, &entry, origin.owner)?;
                links.insert(*link, to);
            }
        }
    }
    // Children first: filling a directory moves its time, and its mode may forbid filling it.
    for (path, entry) in dirs.iter().rev() {
        let dir = File::open(path).doing(|| format!("open {}", path.display()))?;
        dress(path, &dir, entry, origin.owner)?;
    }
    Ok(())
}

/// Makes an empty file that nobody else may read yet.
fn create(path: &Path) -> Result<File> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    file.doing(|| format!("create {}", path.display()))
}

/// An empty file with the mode and attributes of a committed one, for those who truncate it anyway.
pub(super) fn empty_like(path: &Path, entry: &Entry, owner: Owner) -> Result<()> {
    let file = create(path)?;
    dress(path, &file, entry, Some(owner).filter(|o| *o != mounter()))
}

/// Gives a file or link to who had it, before its mode is set: that takes set-user-id bits away.
fn give(path: &Path, owner: Option<Owner>) -> Result<()> {
    let Some((uid, gid)) = owner else { return Ok(()) };
    let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    rustix::fs::chownat(CWD, path, uid, gid, AtFlags::SYMLINK_NOFOLLOW)
        .doing(|| format!("set the owner of {}", path.display()))
}

fn dress(path: &Path, file: &File, entry: &Entry, owner: Option<Owner>) -> Result<()> {
    let what = || format!("set the attributes of {}", path.display());
    for (name, value) in &entry.xattrs {
        rustix::fs::fsetxattr(file, name.as_slice(), value, XattrFlags::empty()).doing(what)?;
    }
    give(path, owner)?;
    file.set_permissions(Permissions::from_mode(entry.mode))
        .doing(what)?;
    set_times(path, entry)
}

fn set_times(path: &Path, entry: &Entry) -> Result<()> {
    let time = timespec(entry.mtime);
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|e| Error::io(format!("set the times of {}", path.display()), e.into()))
}

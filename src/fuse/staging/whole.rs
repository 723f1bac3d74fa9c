//! Staged files and the whole files of versions: what was staged becomes the version's file as it is, and comes back when it is
//! to be changed.

use super::backing::walk;
use super::marks::Origin;
use super::names;
use super::repo::{Repo, find};
use super::state::{Key, path_of};
use super::{Staging, lease};
use crate::error::{IoContext, Result};
use crate::store::{EntryKind, FileKey, Home, Warmed, hash_file};
use std::fs::File;
use std::path::{Path, PathBuf};

/// How the cache of whole files names a path in staging/.
pub(crate) fn home_of(path: &names::Path) -> Home {
    path.join(&b'/').into()
}

impl Staging {
    /// Files of a committed entry, which lie at `at` now, become whole files of its version. What is not taken stays there.
    pub(super) fn keep_whole(&self, key: &Key, at: &Path, origin: &Origin) {
        let Some(whole) = self.repo.whole_files() else {
            return;
        };
        let kept = self.each_file(origin, &mut |rel, file| {
            let path = below(at, &names::join(rel));
            // Who has it open sees what is written to it later: a small one, too, must come back then.
            if whole.worth(file.1) || lease::in_use(&path) {
                whole.adopt(file, &path, home_of(&[&path_of(key), rel].concat()));
            }
            Ok(true)
        });
        if let Err(e) = kept {
            log::debug!("{}: not kept whole: {e}", names::show(&path_of(key)));
        }
    }

    /// Has the files that REV or REV:PATH names kept whole.
    pub(crate) fn warm(&self, what: &str) -> Result<Warmed> {
        self.repo.warm(what, &|| !self.lock().stopping)
    }

    /// Whether the files at `at` hold what the entry's version has.
    pub(super) fn holds_version(&self, at: &Path, origin: &Origin) -> Result<bool> {
        let mut same = true;
        self.each_file(origin, &mut |rel, file| {
            let path = below(at, &names::join(rel));
            let hashed = File::open(&path).and_then(|mut f| hash_file(&mut f, &|| true));
            same = hashed.doing(|| format!("read {}", path.display()))? == Some(*file);
            Ok(same)
        })?;
        Ok(same)
    }

    /// Calls `each` with the regular files of a committed entry, by their paths below it, until it says that this is enough.
    fn each_file(
        &self,
        origin: &Origin,
        each: &mut dyn FnMut(&names::Path, &FileKey) -> Result<bool>,
    ) -> Result<()> {
        let Some(version) = self.version(origin) else {
            return Ok(());
        };
        let repo: &dyn Repo = self.repo.as_ref();
        let mut todo = vec![(
            Vec::new(),
            find(repo, &version, std::slice::from_ref(&origin.name))?,
        )];
        while let Some((rel, entry)) = todo.pop() {
            match &entry.kind {
                EntryKind::File { hash, len, .. } => {
                    if !each(&rel, &(*hash, *len))? {
                        return Ok(());
                    }
                }
                EntryKind::Dir { tree, .. } => {
                    for child in repo.tree(tree)?.entries() {
                        let path: Vec<_> = rel.iter().chain([&child.name]).cloned().collect();
                        todo.push((path, child.clone()));
                    }
                }
                EntryKind::Symlink(_) => {}
            }
        }
        Ok(())
    }

    /// A file below the entry that somebody can still write, through a mapping that outlived its descriptor, say, or past the
    /// mount. Where the kernel writes by itself, we do not hear of it when the last mapping ends.
    pub(super) fn held(&self, key: &Key) -> Option<PathBuf> {
        let root = self.disk_path(key);
        let mut held = None;
        let _ = walk(&root, &mut |path, meta| {
            if held.is_none() && meta.is_file() {
                // Nobody opens it for writing through us meanwhile: that would have to wait.
                let _g = self.lock();
                held = lease::writable(&below(&root, path)).then(|| path.to_owned());
            }
            Ok(())
        });
        held
    }
}

/// A path below an entry, or the entry itself, which is no directory then.
pub(super) fn below(root: &Path, path: &Path) -> PathBuf {
    match path.as_os_str().is_empty() {
        true => root.to_owned(),
        false => root.join(path),
    }
}

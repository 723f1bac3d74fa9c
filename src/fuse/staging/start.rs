//! Opening the staging area: who owns it, and what a crash left to finish.

use super::backing::{Backing, components, remove_all, walk};
use super::clock::Clock;
use super::marks::{Mark, Marks, sync_dir};
use super::repo::Repo;
use super::state::{Entry, Inner, path_of};
use super::{Settle, Shared, Staging, names};
use crate::error::{IoContext, Kind, Result};
use crate::store::take_dir;
use parking_lot::Mutex;
use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;

/// What `status` says of work that a crash interrupted.
const INTERRUPTED: &str = "was being written when the mount stopped";

impl Staging {
    /// [`Staging::open`] without a committer thread.
    pub(super) fn start(
        repo: Arc<dyn Repo>,
        settle: Settle,
        read_only: bool,
        clock: Arc<dyn Clock>,
    ) -> Result<Arc<Staging>> {
        let dir = repo.dir().join("staging");
        let lock = if read_only { None } else { take(&dir)? };
        if lock.is_some() {
            for sub in ["tree", "tree/main", "state", "hidden", "copy", "trash", "rotated"] {
                fs::create_dir_all(dir.join(sub)).doing(|| format!("make {}", dir.join(sub).display()))?;
            }
            sync_dir(&dir)?;
        }
        let tree = dir.join("tree");
        let staging = Staging {
            backing: if tree.is_dir() {
                Some(Backing::open(tree)?)
            } else {
                None
            },
            marks: Marks::new(dir.join("state"), dir.join("copy")),
            repo,
            settle,
            dir,
            clock,
            shared: Arc::new(Shared::default()),
            lock,
            thread: Mutex::new(None),
        };
        if staging.is_owner() {
            staging.recover()?;
        }
        Ok(Arc::new(staging))
    }

    /// Takes up what the last owner left, however it ended.
    fn recover(&self) -> Result<()> {
        for sub in ["copy", "trash", "rotated"] {
            for name in fs::read_dir(self.dir.join(sub)).doing(|| format!("list staging/{sub}"))? {
                remove_all(&name.doing(|| format!("list staging/{sub}"))?.path())?;
            }
        }
        let mut inner = Inner::default();
        for branch in self.marks.branches()? {
            for (name, mark) in self.marks.of_branch(&branch)? {
                self.recover_entry(&mut inner, (branch.clone(), name), mark)?;
            }
        }
        let backing = self.backing()?;
        for (branch, _) in backing.list(&[])? {
            let Ok(text) = String::from_utf8(branch.clone()) else {
                continue;
            };
            if self.branch(&branch).is_none() {
                continue;
            }
            for (name, _) in backing.list(std::slice::from_ref(&branch))? {
                let key = (text.clone(), name);
                if inner.entries.contains_key(&key) {
                    continue;
                }
                if !names::unfinished(&key.1) {
                    self.marks.write(&key.0, &key.1, &Mark::NEW)?;
                    inner
                        .entries
                        .insert(key.clone(), Entry::new(Mark::NEW, self.clock.now()));
                }
                self.suspect(&mut inner, &path_of(&key))?;
            }
        }
        *self.shared.inner.lock() = inner;
        Ok(())
    }

    fn recover_entry(&self, inner: &mut Inner, key: (String, Vec<u8>), mark: Mark) -> Result<()> {
        let path = path_of(&key);
        let here = self.backing()?.stat(&path)?.is_some();
        let mark = match mark {
            Mark::Dirty { .. } if here => {
                self.suspect(inner, &path)?;
                mark
            }
            // The copy that was to be changed had not been put in place.
            Mark::Dirty { base: Some(origin) } => {
                let mark = Mark::Committed { origin };
                self.marks.write(&key.0, &key.1, &mark)?;
                return self.recover_entry(inner, key, mark);
            }
            Mark::Dirty { base: None } => return self.marks.remove(&key.0, &key.1),
            Mark::Committed { ref origin } if self.version(origin).is_none() => {
                // Dropped since. Files that are still here are then the only copy.
                if !here {
                    return self.marks.remove(&key.0, &key.1);
                }
                self.marks.write(&key.0, &key.1, &Mark::NEW)?;
                self.suspect(inner, &path)?;
                Mark::NEW
            }
            Mark::Committed { ref origin } => {
                if here {
                    self.trash(&path, inner.number())?;
                }
                if !origin.gone.is_empty() {
                    inner
                        .suspects
                        .insert(path, "was being removed when the mount stopped".into());
                }
                mark
            }
        };
        inner.entries.insert(key, Entry::new(mark, self.clock.now()));
        Ok(())
    }

    /// Every file of what a crash interrupted may be torn; of an empty directory, the directory itself.
    fn suspect(&self, inner: &mut Inner, path: &names::Path) -> Result<()> {
        let before = inner.suspects.len();
        walk(&self.backing()?.path(path), &mut |rel, meta| {
            if !meta.is_dir() {
                inner
                    .suspects
                    .insert([path, &components(rel)].concat(), INTERRUPTED.into());
            }
            Ok(())
        })?;
        if inner.suspects.len() == before {
            inner.suspects.insert(path.to_vec(), INTERRUPTED.into());
        }
        Ok(())
    }
}

/// The lock on STORE/staging, or nothing if another process holds it or the store cannot be written. Nobody else is to reach staged
/// files but through the mount, which checks their permissions.
fn take(dir: &Path) -> Result<Option<File>> {
    match take_dir(dir) {
        Err(e) if matches!(e.kind(), Kind::ReadOnly | Kind::NoSpace) || e.errno() == libc::EACCES => {
            log::warn!("staging is read-only in this mount: {e}");
            Ok(None)
        }
        r => r.map_err(|e| e.context("take over the staging area")),
    }
}

//! Checkpoints that their own trainer removes before they have settled, as trainers do that keep the last few only.
//!
//! Before the first file goes, the directory is linked aside, file by file; if all of it goes, what was linked is committed.

use super::backing::{Look, remove_all, walk};
use super::marks::Mark;
use super::names;
use super::state::{Key, path_of};
use super::{Guard, Staging};
use crate::error::{IoContext, Result};
use rustix::fs::{AtFlags, Timespec, Timestamps};
use std::fs::{self, Permissions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A directory that was left alone for so long is no longer being written, as far as its own writer goes on to other things.
const QUIET: Duration = Duration::from_secs(1);
/// Files of a directory that is linked aside: it happens while others wait.
const MOST: usize = 4096;

/// A directory that was removed and is still to be committed.
#[derive(Debug)]
pub(super) struct Rotated {
    pub key: Key,
    pub at: PathBuf,
    pub retry: Duration,
}

impl Staging {
    /// To be called before something is removed from an entry: what was linked aside before, or is now.
    pub(super) fn aside(&self, g: &mut Guard<'_>, key: &Key) -> Option<PathBuf> {
        let client = g.processes.client().map(|p| p.id);
        let quiet = g.last_change(key) + QUIET <= self.clock.now();
        let (path, number) = (path_of(key), g.number());
        let free = g.writers(&path).next().is_none() && g.doubt(key).is_none();
        let e = g.entries.get_mut(key)?;
        let known = e.aside.take();
        let own = client.is_some_and(|c| e.by.iter().any(|w| w.process.id == c && w.failed.is_none()));
        let dirty = matches!(e.mark, Mark::Dirty { .. }) && e.published.is_none();
        if known.is_some() || !(own && quiet && free && dirty && !names::unfinished(&key.1)) {
            return known;
        }
        let at = self.dir.join("rotated").join(number.to_string());
        match link_all(&self.disk_path(key), &at) {
            Ok(true) => Some(at),
            Ok(false) => None,
            Err(e) => {
                log::warn!("{}: removed before it was committed: {e}", names::show(&path));
                let _ = remove_all(&at);
                None
            }
        }
    }

    /// What was linked aside is not needed: the entry lives on.
    pub(super) fn drop_aside(&self, g: &mut Guard<'_>, key: &Key) {
        if let Some(at) = g.entries.get_mut(key).and_then(|e| e.aside.take())
            && let Err(e) = remove_all(&at)
        {
            log::warn!("{e}");
        }
    }

    /// The entry is gone altogether: what was linked aside is to be committed.
    pub(super) fn rotated(&self, g: &mut Guard<'_>, key: &Key, at: PathBuf) {
        g.rotated.push(Rotated {
            key: key.clone(),
            at,
            retry: Duration::ZERO,
        });
        self.wake(g);
    }

    /// Commits what was removed. Says when to try again what failed.
    pub(super) fn commit_rotated(&self) -> Option<Duration> {
        let due = std::mem::take(&mut self.lock().rotated);
        let mut next: Option<Duration> = None;
        for mut r in due {
            let now = self.clock.now();
            let done = if r.retry > now {
                Ok(false)
            } else {
                self.commit_aside(&r)
            };
            match done {
                Ok(true) => {
                    if let Err(e) = remove_all(&r.at) {
                        log::warn!("{e}");
                    }
                    continue;
                }
                Ok(false) => {}
                Err(e) => {
                    log::warn!(
                        "{}: removed, and not committed yet: {e}",
                        names::show(&path_of(&r.key))
                    );
                    r.retry = now + super::commit::RETRY_LIMIT;
                }
            }
            next = Some(next.map_or(r.retry, |n| n.min(r.retry)));
            self.lock().rotated.push(r);
        }
        next
    }

    /// Whether nothing is left to be done.
    fn commit_aside(&self, r: &Rotated) -> Result<bool> {
        let mut files = Vec::new();
        let look = Look::at(&r.at, &mut |f| files.push(f.to_owned()))?;
        let torn = match (&look.unfinished, &look.special) {
            (None, None) => self.torn_inside(&r.at, &files)?,
            (Some(name), _) | (_, Some(name)) => Some(format!("{} is unfinished", name.display())),
        };
        if let Some(why) = torn {
            log::info!(
                "{}: removed, and not committed: {why}",
                names::show(&path_of(&r.key))
            );
            return Ok(true);
        }
        let entry = vec![(r.key.1.clone(), r.at.clone())];
        let done = self.repo.commit(&r.key.0, entry, "", true, &|| Ok(()))?;
        log::info!(
            "committed {}/{:06} {}, which was removed",
            done.branch,
            done.number,
            done.id
        );
        Ok(true)
    }
}

/// Links the files of a directory into a new one, with the modes and times of its directories. Whether it was all of them.
fn link_all(from: &Path, to: &Path) -> Result<bool> {
    if !from.is_dir() {
        return Ok(false);
    }
    let (mut files, mut dirs) = (0, Vec::new());
    walk(from, &mut |rel, meta| {
        let (old, new) = (from.join(rel), to.join(rel));
        files += 1;
        if files > MOST {
            return Ok(());
        }
        if meta.is_dir() {
            dirs.push((new.clone(), meta.clone()));
            return fs::create_dir_all(&new).doing(|| format!("make {}", new.display()));
        }
        fs::hard_link(&old, &new).doing(|| format!("link {}", new.display()))
    })?;
    if files > MOST {
        remove_all(to)?;
        return Ok(false);
    }
    for (dir, meta) in dirs.iter().rev() {
        let what = || format!("set the attributes of {}", dir.display());
        fs::set_permissions(dir, Permissions::clone(&meta.permissions())).doing(what)?;
        let time = |tv_sec, nanos| Timespec {
            tv_sec,
            tv_nsec: nanos,
        };
        let times = Timestamps {
            last_access: time(meta.atime(), meta.atime_nsec()),
            last_modification: time(meta.mtime(), meta.mtime_nsec()),
        };
        rustix::fs::utimensat(rustix::fs::CWD, dir, &times, AtFlags::SYMLINK_NOFOLLOW).doing(what)?;
    }
    Ok(true)
}

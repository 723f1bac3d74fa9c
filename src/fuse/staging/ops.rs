//! Changes of what is staged, in general: each takes care of marks, copies up what is committed, and then does to the backing
//! files what was asked.

use super::backing::{Backing, attr_of, kind_of};
use super::marks::Mark;
use super::names::{self, errno};
use super::repo::absent;
use super::state::{Entry, Key, Open, key_of, path_of};
use super::{Guard, Staging};
use crate::error::{Error, IoContext, Kind, Result};
use crate::fuse::attr::{Attr, FileKind};
use rustix::fs::{Mode, OFlags};
use std::fs::File;

/// How much of a committed entry a change needs on disk.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// All of it.
    Whole,
    /// Nothing: the change puts something else in its place.
    Nothing,
}

/// What an entry was before a change that may fail.
pub(super) type Before = Option<(Key, Option<Mark>)>;

impl Staging {
    pub(super) fn check_writable(&self, g: &Guard<'_>) -> Result<()> {
        if !self.is_owner() {
            return Err(Error::new(
                Kind::ReadOnly,
                "another mount owns the staging area of this store",
            ));
        }
        if g.frozen {
            return Err(Error::new(
                Kind::ReadOnly,
                "the mount is ending: nothing new is taken in",
            ));
        }
        Ok(())
    }

    pub(super) fn wait_idle(&self, g: &mut Guard<'_>, path: &names::Path) {
        let Some(key) = key_of(path) else { return };
        while g.entries.get(&key).is_some_and(|e| e.busy) {
            self.shared.wake.wait(g);
        }
    }

    /// Gets the entry of `path` ready for a change: the durable mark first, then, if it is committed, its files.
    pub(super) fn begin(&self, g: &mut Guard<'_>, path: &names::Path, need: Need) -> Result<Before> {
        self.check_writable(g)?;
        self.wait_idle(g, path);
        let branch = self.branch(&path[0]).ok_or_else(|| absent(path))?;
        self.branch_dir(&branch)?;
        let Some(key) = key_of(path) else { return Ok(None) };
        let before = g.entries.get(&key).map(|e| e.mark.clone());
        let mark = match &before {
            None if names::unfinished(&key.1) => return Ok(None),
            Some(Mark::Dirty { .. }) => return Ok(Some((key, before))),
            Some(Mark::Committed { .. }) if need == Need::Whole => {
                self.copy_up(g, &key)?;
                return Ok(Some((
                    key,
                    g.entries.get(&path_key(path)).map(|e| e.mark.clone()),
                )));
            }
            Some(Mark::Committed { origin }) => Mark::Dirty {
                base: Some(origin.clone()),
            },
            None => Mark::NEW,
        };
        self.marks.write(&key.0, &key.1, &mark)?;
        g.entries.insert(key.clone(), Entry::new(mark, self.clock.now()));
        Ok(Some((key, before)))
    }

    /// Ends a change: notes it, or, if it failed and left nothing, makes the entry what it was.
    pub(super) fn end<T>(
        &self,
        g: &mut Guard<'_>,
        path: &names::Path,
        before: Before,
        done: Result<T>,
    ) -> Result<T> {
        if done.is_ok() {
            g.touch(path, self.clock.now());
            g.sign(path);
            if let Some(key) = key_of(path) {
                self.drop_aside(g, &key);
                // What was put there whole is being worked on.
                if let Some(e) = g.entries.get_mut(&key) {
                    (e.at_once, e.thinning) = (false, false);
                }
            }
            self.wake(g);
            return done;
        }
        if let Some((key, before)) = before
            && self.backing()?.stat(&path[..2]).is_ok_and(|s| s.is_none())
        {
            match before {
                Some(mark @ Mark::Committed { .. }) => {
                    self.marks.write(&key.0, &key.1, &mark)?;
                    g.entries.insert(key, Entry::new(mark, self.clock.now()));
                }
                _ => self.forget(g, &key),
            }
        }
        done
    }

    /// A change of what `path` names or holds, its entry being on disk as far as needed.
    pub(super) fn change<T>(
        &self,
        g: &mut Guard<'_>,
        path: &names::Path,
        need: Need,
        work: impl FnOnce(&Backing, &mut Guard<'_>) -> Result<T>,
    ) -> Result<T> {
        let before = self.begin(g, path, need)?;
        let done = self.backing().and_then(|b| work(b, g));
        self.end(g, path, before, done)
    }

    /// Makes something new at `path`, which must be free.
    pub(super) fn make(&self, path: &names::Path, work: impl FnOnce(&Backing) -> Result<()>) -> Result<Attr> {
        names::check(path)?;
        if path.len() < 2 {
            return Err(errno(libc::EPERM, "only branches lie directly in staging"));
        }
        let mut g = self.lock();
        self.check_writable(&g)?;
        self.free(&mut g, path)?;
        let need = if path.len() == 2 {
            Need::Nothing
        } else {
            Need::Whole
        };
        self.change(&mut g, path, need, |b, g| {
            work(b)?;
            g.clear(path);
            Ok(attr_of(&b.stat(path)?.ok_or_else(|| absent(path))?))
        })
    }

    /// Fails unless `path` is free and its directory is there.
    pub(super) fn free(&self, g: &mut Guard<'_>, path: &names::Path) -> Result<()> {
        self.wait_idle(g, path);
        self.locate_in(g, &path[..path.len() - 1])?;
        match self.locate_in(g, path) {
            Ok(_) => Err(Error::new(Kind::Exists, format!("{} exists", names::show(path)))),
            Err(e) if e.kind() == Kind::NotFound => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// The branch's directory on disk, made when it is first needed; then the branch is no longer put away.
    pub(super) fn branch_dir(&self, branch: &str) -> Result<()> {
        let dir = self.dir.join("tree").join(branch);
        match std::fs::create_dir(&dir) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
            r => r.doing(|| format!("make {}", dir.display())),
        }
    }

    /// Keeps an entry from being committed while several steps are taken on it; undone by removing the number from `opens`.
    pub(super) fn pin(&self, g: &mut Guard<'_>, path: &names::Path) -> u64 {
        let id = g.number();
        let (path, tick) = (Some(path.to_vec()), Default::default());
        g.opens.insert(id, Open { path, tick });
        id
    }

    /// Forgets an entry: nothing is staged under its name.
    pub(super) fn forget(&self, g: &mut Guard<'_>, key: &Key) {
        g.entries.remove(key);
        g.clear(&path_of(key));
        g.touch(&path_of(key), self.clock.now());
        if let Err(e) = self.marks.remove(&key.0, &key.1) {
            log::warn!("{e}");
        }
        self.wake(g);
    }
}

/// The entry of a path known to lie in one.
pub(super) fn path_key(path: &names::Path) -> Key {
    key_of(path).unwrap_or_default()
}

pub(super) fn open_regular(b: &Backing, path: &names::Path, flags: OFlags) -> Result<File> {
    let stat = b.stat(path)?.ok_or_else(|| absent(path))?;
    regular(kind_of(stat.st_mode))?;
    Ok(File::from(b.open_at(path, flags, Mode::empty())?))
}

/// Fails as open(2) with O_NOFOLLOW does on what is no regular file.
pub(super) fn regular(kind: FileKind) -> Result<()> {
    match kind {
        FileKind::File => Ok(()),
        FileKind::Dir => Err(errno(libc::EISDIR, "a directory")),
        FileKind::Symlink => Err(errno(libc::ELOOP, "a symbolic link")),
        _ => Err(errno(libc::ENXIO, "no regular file")),
    }
}

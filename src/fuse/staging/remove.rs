//! Removing names.

use super::backing::committed_meanwhile;
use super::marks::Mark;
use super::names::{self, errno};
use super::ops::{Need, path_key};
use super::repo::{absent, find};
use super::state::key_of;
use super::{Guard, Located, Staging};
use crate::error::{Error, IoContext, Result};
use crate::store::EntryKind;
use rustix::fs::AtFlags;

impl Staging {
    /// Removes a name that is no directory. From a committed entry this removes nothing but the name in staging.
    pub fn unlink(&self, path: &[Vec<u8>]) -> Result<()> {
        self.remove(path, false)
    }

    /// Removes an empty directory. A branch is only put away until it is used again.
    pub fn rmdir(&self, path: &[Vec<u8>]) -> Result<()> {
        self.remove(path, true)
    }

    fn remove(&self, path: &names::Path, dir: bool) -> Result<()> {
        names::check(path)?;
        let mut g = self.lock();
        self.check_writable(&g)?;
        self.wait_idle(&mut g, path);
        match self.locate_in(&g, path)? {
            Located::Root => Err(errno(libc::EBUSY, "staging itself")),
            Located::Branch(_) if !dir => Err(errno(libc::EISDIR, "a branch")),
            Located::Branch(branch) => self.put_away(&g, &branch),
            Located::Version {
                version,
                path: inside,
            } => {
                let entry = find(self.repo.as_ref(), &version, &inside)?;
                match (dir, matches!(entry.kind, EntryKind::Dir { .. })) {
                    (true, false) => return Err(errno(libc::ENOTDIR, "not a directory")),
                    (false, true) => return Err(errno(libc::EISDIR, "a directory")),
                    _ => {}
                }
                if dir && !self.list_in(&g, path)?.is_empty() {
                    return Err(errno(libc::ENOTEMPTY, "directory not empty"));
                }
                self.remove_committed(&mut g, path)
            }
            Located::Disk(_) => {
                let inside = key_of(path);
                let aside = inside.as_ref().and_then(|key| self.aside(&mut g, key));
                let done = self.change(&mut g, path, Need::Whole, |b, g| {
                    let (parent, name) = b.parent(path)?;
                    let flags = if dir { AtFlags::REMOVEDIR } else { AtFlags::empty() };
                    rustix::fs::unlinkat(&parent, name, flags)
                        .doing(|| format!("remove {}", names::show(path)))?;
                    g.orphan(path);
                    g.clear(path);
                    Ok(())
                });
                let Some(key) = inside else { return done };
                if done.is_err() || path.len() > 2 {
                    if let Some(e) = g.entries.get_mut(&key) {
                        e.aside = aside;
                        e.thinning = done.is_ok();
                    }
                    return done;
                }
                match aside {
                    Some(at) => self.rotated(&mut g, &key, at),
                    None if names::unfinished(&key.1) => {}
                    None => log::info!("{}: removed before it was committed", names::show(path)),
                }
                self.forget(&mut g, &key);
                Ok(())
            }
        }
    }

    /// Removes a name from a committed entry without bringing its files back: for `rm -r` of a whole checkpoint.
    fn remove_committed(&self, g: &mut Guard<'_>, path: &names::Path) -> Result<()> {
        let key = path_key(path);
        if path.len() == 2 {
            self.forget(g, &key);
            return Ok(());
        }
        let rel = &path[2..];
        let now = self.clock.now();
        match g.entries.get_mut(&key) {
            Some(e) => match &mut e.mark {
                Mark::Committed { origin } => {
                    self.marks.append_gone(&key.0, &key.1, rel)?;
                    // Of a directory only its own name is kept.
                    let below: Vec<_> = origin
                        .gone
                        .range(rel.to_vec()..)
                        .take_while(|p| p.starts_with(rel))
                        .cloned()
                        .collect();
                    for p in &below {
                        origin.gone.remove(p);
                    }
                    origin.gone.insert(rel.to_vec());
                    e.thinning = true;
                }
                Mark::Dirty { .. } => return Err(committed_meanwhile()),
            },
            None => return Err(absent(path)),
        }
        g.touch(path, now);
        // Whoever is killed now leaves half a checkpoint.
        g.sign(path);
        self.wake(g);
        Ok(())
    }

    fn put_away(&self, g: &Guard<'_>, branch: &str) -> Result<()> {
        if !self.list_branch(g, branch)?.is_empty() {
            return Err(errno(libc::ENOTEMPTY, "the branch has entries"));
        }
        if branch == "main" {
            return Err(errno(libc::EBUSY, "main always exists"));
        }
        let mark = self.hidden(branch);
        std::fs::write(&mark, b"").doing(|| format!("write {}", mark.display()))?;
        let dir = self.dir.join("tree").join(branch);
        match std::fs::remove_dir(&dir) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(format!("remove {}", dir.display()), e))
            }
            _ => Ok(()),
        }
    }
}

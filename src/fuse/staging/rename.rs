//! Renaming.

use super::backing::kind_of;
use super::marks::Mark;
use super::names::{self, errno};
use super::ops::{Need, path_key};
use super::repo::absent;
use super::state::{Key, key_of};
use super::{Guard, Located, Staging};
use crate::error::{Error, IoContext, Kind, Result};
use crate::fuse::attr::FileKind;
use rustix::fs::RenameFlags;

impl Staging {
    /// Does what of a rename can take long, so that the rename itself does not: brings back to disk what it needs there. Another
    /// change may come between the two; the rename then does it again.
    pub fn prepare_rename(&self, from: &[Vec<u8>], to: &[Vec<u8>], flags: u32) -> Result<()> {
        let mut g = self.lock();
        let Some((_, need)) = self.check_rename(&mut g, from, to, flags)? else {
            return Ok(());
        };
        for (path, need) in [(from, Need::Whole), (to, need)] {
            let committed = key_of(path)
                .filter(|k| matches!(g.entries.get(k), Some(e) if matches!(e.mark, Mark::Committed { .. })));
            if let (Some(key), true) = (committed, need == Need::Whole) {
                self.copy_up(&mut g, &key)?;
            }
        }
        Ok(())
    }

    /// Whether a rename may be: its flags, and what it needs of the target's entry; none if there is nothing to do.
    fn check_rename(
        &self,
        g: &mut Guard<'_>,
        from: &names::Path,
        to: &names::Path,
        flags: u32,
    ) -> Result<Option<(RenameFlags, Need)>> {
        names::check(from)?;
        names::check(to)?;
        let known = RenameFlags::NOREPLACE | RenameFlags::EXCHANGE;
        let flags = RenameFlags::from_bits(flags).filter(|f| known.contains(*f));
        let flags = flags.ok_or_else(|| errno(libc::EINVAL, "rename flags"))?;
        if from.len() < 2 || to.len() < 2 {
            return Err(errno(
                libc::EPERM,
                "branches are not renamed, and only branches lie directly in staging",
            ));
        }
        self.check_writable(g)?;
        self.wait_idle(g, from);
        self.wait_idle(g, to);
        self.locate_in(g, from)?;
        self.locate_in(g, &to[..to.len() - 1])?;
        let target = match self.locate_in(g, to) {
            Ok(at) => Some(at),
            Err(e) if e.kind() == Kind::NotFound => None,
            Err(e) => return Err(e),
        };
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        match &target {
            Some(_) if flags.contains(RenameFlags::NOREPLACE) => {
                return Err(Error::new(Kind::Exists, format!("{} exists", names::show(to))));
            }
            None if exchange => return Err(absent(to)),
            _ if from == to => return Ok(None),
            _ if to.starts_with(from) || exchange && from.starts_with(to) => {
                return Err(errno(libc::EINVAL, "a directory cannot go into itself"));
            }
            _ if from.starts_with(to) => return Err(errno(libc::ENOTEMPTY, "directory not empty")),
            Some(Located::Version { .. }) if !exchange => self.check_replace(g, from, to)?,
            _ => {}
        }
        let need = if to.len() == 2 && !exchange {
            Need::Nothing
        } else {
            Need::Whole
        };
        Ok(Some((flags, need)))
    }

    /// Renames with the flags of renameat2(2): RENAME_NOREPLACE, RENAME_EXCHANGE.
    pub fn rename(&self, from: &[Vec<u8>], to: &[Vec<u8>], flags: u32) -> Result<()> {
        let mut g = self.lock();
        let Some((flags, need)) = self.check_rename(&mut g, from, to, flags)? else {
            return Ok(());
        };
        let exchange = flags.contains(RenameFlags::EXCHANGE);
        let source_before = self.begin(&mut g, from, Need::Whole)?;
        let pin = self.pin(&mut g, from);
        let done = self.change(&mut g, to, need, |b, _| {
            let ((from_dir, from_name), (to_dir, to_name)) = (b.parent(from)?, b.parent(to)?);
            rustix::fs::renameat_with(&from_dir, from_name, &to_dir, to_name, flags)
                .doing(|| format!("rename {} to {}", names::show(from), names::show(to)))
        });
        g.opens.remove(&pin);
        self.end(&mut g, from, source_before, done)?;
        self.renamed(&mut g, from, to, exchange);
        Ok(())
    }

    /// What a rename over a committed file or directory must not do.
    fn check_replace(&self, g: &Guard<'_>, from: &names::Path, to: &names::Path) -> Result<()> {
        let is_dir = |path: &names::Path| Ok::<_, Error>(self.attr_in(g, path)?.kind == FileKind::Dir);
        match (is_dir(from)?, is_dir(to)?) {
            (true, false) => Err(errno(libc::ENOTDIR, "not a directory")),
            (false, true) => Err(errno(libc::EISDIR, "a directory")),
            (true, true) if !self.list_in(g, to)?.is_empty() => {
                Err(errno(libc::ENOTEMPTY, "directory not empty"))
            }
            _ => Ok(()),
        }
    }

    fn renamed(&self, g: &mut Guard<'_>, from: &names::Path, to: &names::Path, exchange: bool) {
        // Renaming one hard link of a file over another does nothing at all.
        if !exchange
            && self
                .backing()
                .and_then(|b| b.stat(from))
                .is_ok_and(|s| s.is_some())
        {
            return;
        }
        if !exchange {
            g.orphan(to);
            g.clear(to);
        }
        let (source, target) = (path_key(from), path_key(to));
        let apart = source != target && !(from.len() == 2 && to.len() == 2);
        let doubts = if apart {
            [(to, g.leaves(from)), (from, g.leaves(to))]
        } else {
            [(to, None), (from, None)]
        };
        g.moved(from, to, exchange);
        for (path, why) in doubts.into_iter().take(1 + usize::from(exchange)) {
            if let Some(why) = why {
                g.suspects.entry(path.to_vec()).or_insert(why);
            }
        }
        if from.len() == 2 && to.len() == 2 {
            g.resign(&path_key(from), &path_key(to), exchange);
        } else if !exchange && path_key(from) == path_key(to) {
            g.unsign(from);
        } else if !exchange {
            g.sign(from);
            // Whoever takes a directory apart may be at it still.
            if let Some(e) = g.entries.get_mut(&source) {
                e.thinning = true;
            }
        }
        if from.len() == 2 && !exchange {
            self.forget_name(g, &path_key(from));
        }
        let is_dir = self
            .backing()
            .and_then(|b| b.stat(to))
            .is_ok_and(|s| s.is_some_and(|s| kind_of(s.st_mode) == FileKind::Dir));
        let whole = from.len() == 2 && names::unfinished(&from[1]) || from[0] != to[0];
        let closed = g.number();
        if let Some(e) = g.entries.get_mut(&path_key(to)).filter(|_| to.len() == 2) {
            (e.at_once, e.closed) = (is_dir && whole, closed);
        }
        self.wake(g);
    }

    /// Forgets the entry of a name that was moved away, and only that.
    fn forget_name(&self, g: &mut Guard<'_>, key: &Key) {
        if g.entries.remove(key).is_some()
            && let Err(e) = self.marks.remove(&key.0, &key.1)
        {
            log::warn!("{e}");
        }
    }
}

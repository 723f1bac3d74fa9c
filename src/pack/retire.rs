//! Retiring packs: all that is served of them has been published again elsewhere, so the files can go.
//!
//! The order is what makes it safe. The records that take the place of theirs are durable before the record that retires the
//! pack is, and that record, the durable mark and the journal's copy are before the file is removed. So whoever finds a file
//! gone finds in the journal where its nodes are now. A pack that somebody may still append to is not retired: a writer holds
//! the pack's lock, and asks the journal before it uses a pack again.

use super::files::{pack_name, pack_number};
use super::publish::Build;
use super::{PackRange, Packs, store};
use crate::error::{Error, Kind, Result};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// Packs that nobody appends to while this exists; by default none.
#[derive(Default)]
pub struct Retiring {
    packs: Vec<u32>,
    /// As many, in the same order.
    locks: Vec<Box<dyn Send + Sync>>,
}

impl Retiring {
    /// Their numbers.
    pub fn packs(&self) -> &[u32] {
        &self.packs
    }

    /// The same, but for some packs, which anyone may append to again.
    pub fn without(self, others: &BTreeSet<u32>) -> Self {
        let both = self.packs.into_iter().zip(self.locks);
        let (packs, locks) = both.filter(|(pack, _)| !others.contains(pack)).unzip();
        Retiring { packs, locks }
    }

    /// The lock of the only pack.
    pub(super) fn into_lock(mut self) -> Option<Box<dyn Send + Sync>> {
        self.locks.pop()
    }
}

impl Packs {
    /// Held by whoever rewrites nodes: only one may at a time. `Busy` if another has it.
    pub fn lock_for_rewriting(&self) -> Result<Box<dyn Send + Sync>> {
        self.disk.lock(&self.root.join("repack.lock"), false)
    }

    /// Of these packs, those that no writer has, held until what comes back is dropped.
    pub fn hold(&self, packs: &[u32]) -> Result<Retiring> {
        let mut held = Retiring::default();
        for pack in packs {
            let path = self.path_of(*pack);
            // A lock would make a file that is missing.
            match self.disk.open(&path, false) {
                Ok(_) => {}
                Err(e) if e.kind() == Kind::NotFound => continue,
                Err(e) => {
                    log::warn!("left as it is: {e}");
                    continue;
                }
            }
            match self.disk.lock(&path, false) {
                Ok(lock) => {
                    held.packs.push(*pack);
                    held.locks.push(lock);
                }
                Err(e) if e.kind() == Kind::Busy => {}
                Err(e) => return Err(e),
            }
        }
        Ok(held)
    }

    /// Takes off a pack what lies beyond `end`, if no writer has it: what one that was killed left behind what it had published
    /// before. As far as is `known` that ends here; `end` is asked once the pack is held. Whether there was anything.
    pub fn cut_tail(&self, pack: u32, known: u64, end: impl FnOnce() -> Option<u64>) -> Result<bool> {
        if self.disk.open(&self.path_of(pack), false)?.len()? <= known {
            return Ok(false);
        }
        let held = self.hold(&[pack])?;
        if held.packs().is_empty() {
            return Ok(false);
        }
        self.refresh()?;
        let Some(end) = end().filter(|_| !self.is_retired(pack)) else {
            return Ok(false);
        };
        let file = self.disk.open(&self.path_of(pack), true)?;
        if file.len()? <= end {
            return Ok(false);
        }
        file.truncate(end)?;
        Ok(true)
    }

    /// Packs of which nothing was published, as far as is known here: new ones, and those of writers that died.
    pub fn unpublished(&self) -> Result<Vec<u32>> {
        let published = self.published.lock();
        let names = store::list(&*self.disk, self.files.dir())?;
        let packs = names.iter().filter_map(|name| pack_number(name));
        Ok(packs.filter(|p| !published.contains(p)).collect())
    }

    /// Publishes ranges, as [`Packs::publish`] does, in a record that retires packs, and then removes those. `build` must make
    /// sure that nothing is served of them once the ranges are published.
    pub fn retire(&self, mut ranges: Vec<PackRange>, held: &Retiring, build: Build) -> Result<u64> {
        ranges.retain(|r| r.count > 0);
        ranges.extend(held.packs.iter().map(|p| PackRange::retired(*p)));
        let seq = self.publish_all(ranges, None, build)?;
        self.remove_retired(seq);
        Ok(seq)
    }

    /// Removes the files of packs that were retired, such as a crash left; they were by record `seq` at the latest.
    fn remove_retired(&self, seq: u64) {
        let done = self.journal.read_mark().and_then(|mark| {
            if mark.seq < seq {
                return Err(Error::new(Kind::Io, "the durable mark is behind"));
            }
            self.journal.sync_copy();
            self.journal.sync_mark(true)?;
            for name in store::list(&*self.disk, self.files.dir())? {
                match pack_number(&name) {
                    Some(pack) if self.is_retired(pack) => {
                        self.disk.remove(&self.path_of(pack))?;
                    }
                    _ => {}
                }
            }
            self.disk.sync_dir(self.files.dir())
        });
        if let Err(e) = done {
            log::warn!("packs that hold nothing any more are left for the next time: {e}");
        }
    }

    /// Removes what an earlier call could not.
    pub fn clean_retired(&self) {
        let seq = self.applied.lock().pos.seq;
        if !self.retired.lock().is_empty() {
            self.remove_retired(seq);
        }
    }

    /// Takes in which packs a record retires.
    pub(super) fn let_go(&self, ranges: &[PackRange]) {
        for pack in ranges.iter().filter(|r| r.is_retired()).map(|r| r.pack) {
            self.retired.lock().insert(pack);
            self.idle.lock().retain(|p| p.number() != pack);
            self.files.close(pack);
            self.index.forget_damaged(pack);
        }
    }

    /// Whether a pack is retired, as far as the journal says now.
    pub(super) fn is_gone(&self, pack: u32) -> bool {
        self.is_retired(pack) || (self.refresh().unwrap_or(false) && self.is_retired(pack))
    }

    pub(super) fn is_retired(&self, pack: u32) -> bool {
        self.retired.lock().contains(&pack)
    }

    pub(super) fn path_of(&self, pack: u32) -> PathBuf {
        self.files.dir().join(pack_name(pack))
    }
}

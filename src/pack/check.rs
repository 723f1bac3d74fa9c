//! Reading every record of the packs, and telling what of them is damaged.

use super::{PackRange, Packs};
use crate::error::{Error, Result};
use crate::id::NodeId;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a pack that cannot be read as what was published there.
#[derive(Debug)]
pub struct Damaged {
    /// The kind and id of the node whose record it is, if its header can be read.
    pub node: Option<(u8, NodeId)>,
    /// Number of the pack.
    pub pack: u32,
    /// Where they lie.
    pub stretch: Range<u64>,
    /// What does not fit.
    pub why: Error,
}

/// Stretches of packs: what touches is one.
#[derive(Default)]
pub struct Stretches(BTreeMap<u32, BTreeMap<u64, u64>>);

impl Stretches {
    /// Adds one.
    pub fn add(&mut self, pack: u32, mut stretch: Range<u64>) {
        let all = self.0.entry(pack).or_default();
        while let Some((&from, &to)) = all.range(..=stretch.end).next_back() {
            if to < stretch.start {
                break;
            }
            all.remove(&from);
            stretch = stretch.start.min(from)..stretch.end.max(to);
        }
        all.insert(stretch.start, stretch.end);
    }

    fn cover(&self, pack: u32, stretch: &Range<u64>) -> bool {
        let before = self
            .0
            .get(&pack)
            .and_then(|all| all.range(..=stretch.start).next_back());
        !stretch.is_empty() && before.is_some_and(|(_, &to)| to >= stretch.end)
    }
}

impl Packs {
    /// Reads every record of a finished range and hands `damaged` what fails its checksums. What lies within the stretches `known` is
    /// left out.
    ///
    /// # Errors
    /// What the system reports, and `damaged`.
    pub fn check(
        &self,
        range: &PackRange,
        known: &Stretches,
        damaged: &mut dyn FnMut(Damaged) -> Result<()>,
    ) -> Result<()> {
        let found = RefCell::new(Vec::new());
        let pack = range.pack;
        let bad = |node, stretch: Range<u64>, why| {
            if !known.cover(pack, &stretch) {
                found.borrow_mut().push(Damaged {
                    node,
                    pack,
                    stretch,
                    why,
                });
            }
        };
        let checked = self.files.scan_all(
            range,
            &mut |id, place, meta| {
                if let Err(e) = self.files.node(&id, &place) {
                    bad(Some((meta.kind, id)), place.stretch(), e);
                }
                Ok(())
            },
            &mut |stretch, e| {
                let e = e.context(format!("pack {pack:08x} at {}", stretch.start));
                bad(None, stretch, e);
            },
        );
        if self.is_gone(pack) {
            return Ok(());
        }
        checked?;
        found.into_inner().into_iter().try_for_each(damaged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stretches_that_touch_are_one() {
        let mut all = Stretches::default();
        for stretch in [10..20, 30..40, 20..25, 5..10, 28..31, 60..70] {
            all.add(1, stretch);
        }
        assert!(all.cover(1, &(5..25)) && all.cover(1, &(28..40)) && all.cover(1, &(12..13)));
        assert!(!all.cover(1, &(5..28)) && !all.cover(1, &(24..29)) && !all.cover(1, &(4..6)));
        assert!(!all.cover(2, &(12..13)) && !all.cover(1, &(12..12)));
        all.add(1, 0..65);
        assert!(all.cover(1, &(0..70)));
    }
}

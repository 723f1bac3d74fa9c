//! Gives up packs of which little is served any more, or that are small: what counts of them is copied into new ones.

use super::UNIT;
use super::survey::is_local;
use super::table::{Row, Use};
use super::unit::Repack;
use crate::error::Result;
use crate::pack::{PackRange, PackWriter, Retiring};
use std::collections::BTreeMap;

/// Packs below this are worth being made one.
const SMALL: u64 = 64 << 20;

impl Repack<'_> {
    /// Gives up packs; when it is to `stop`, only those of which nothing counts.
    pub(super) fn gather(&mut self, stop: &dyn Fn() -> bool) -> Result<()> {
        if self.dry_run {
            return Ok(());
        }
        self.parts.packs.clean_retired();
        // What writers left that died: those that live hold theirs.
        let abandoned = self.parts.packs.unpublished()?;
        let held = self.parts.packs.hold(&abandoned)?;
        self.report.abandoned = held.packs().len() as u64;
        self.publish(Vec::new(), held)?;
        self.cut_tails()?;
        let wanted = self.wanted(stop());
        self.give_up(wanted, stop)?;
        // Of what this repack wrote, some was written twice, such as chains that had to be mended: where that is much, once more.
        let written = std::mem::take(&mut self.own);
        let mut wasted = self.table.uses();
        wasted.retain(|pack, used| {
            written.contains(pack) && !self.table.keep.contains(pack) && used.is_wasteful()
        });
        if !stop() {
            self.give_up(wasted, stop)?;
        }
        Ok(())
    }

    /// Takes off packs what killed writers left behind what they had published.
    fn cut_tails(&mut self) -> Result<()> {
        let history = &self.parts.history;
        let ends = || {
            let mut ends: BTreeMap<u32, u64> = BTreeMap::new();
            for range in history.ranges() {
                let end = ends.entry(range.pack).or_default();
                *end = range.to.max(*end);
            }
            ends
        };
        for (pack, known) in ends() {
            match self
                .parts
                .packs
                .cut_tail(pack, known, || ends().get(&pack).copied())
            {
                Ok(cut) => self.report.abandoned += u64::from(cut),
                Err(e) => log::warn!("pack {pack:08x} is left as it is: {e}"),
            }
        }
        Ok(())
    }

    fn give_up(&mut self, mut wanted: BTreeMap<u32, Use>, stop: &dyn Fn() -> bool) -> Result<()> {
        while !wanted.is_empty() {
            let mut batch = Vec::new();
            let mut bytes = 0;
            while let Some((pack, used)) = wanted.pop_first() {
                // One that was copied into meanwhile stays.
                if self.own.contains(&pack) {
                    continue;
                }
                batch.push(pack);
                bytes += used.live;
                if bytes >= UNIT {
                    break;
                }
            }
            let held = self.parts.packs.hold(&batch)?;
            self.report.busy += (batch.len() - held.packs().len()) as u64;
            self.publish(Vec::new(), held)?;
            if stop() {
                wanted.retain(|_, used| used.live == 0);
            }
        }
        Ok(())
    }

    /// Packs to give up, and what is in them.
    fn wanted(&self, only_empty: bool) -> BTreeMap<u32, Use> {
        let mut uses = self.table.uses();
        uses.retain(|pack, used| {
            used.published > 0 && !self.table.keep.contains(pack) && !self.own.contains(pack)
        });
        let small = uses.values().filter(|u| u.published < SMALL).count() + self.own.len();
        uses.retain(|_, used| {
            used.live == 0 || !only_empty && (used.is_wasteful() || used.published < SMALL && small > 1)
        });
        uses
    }

    /// Copies what counts of packs into a new one; its range, if there was anything. A pack of which something cannot be read is
    /// one to keep from then on.
    pub(super) fn copy_out(&mut self, held: &Retiring) -> Result<Option<PackRange>> {
        let wanted =
            |r: &&Row| held.packs().contains(&r.place.pack) && !self.table.keep.contains(&r.place.pack);
        let mut rows: Vec<Row> = self.table.rows.iter().filter(wanted).copied().collect();
        rows.sort_unstable_by_key(|r| (r.place.pack, r.place.offset));
        let mut writer: Option<PackWriter> = None;
        for row in rows {
            match self.parts.packs.get_at(&row.id, &row.place) {
                Ok(node) => {
                    let writer = match &mut writer {
                        Some(w) => w,
                        None => writer.insert(self.parts.packs.writer()?),
                    };
                    writer.append(node.kind, &row.id, &node.meta, &node.payload)?;
                    self.report.moved += 1;
                }
                Err(e) if is_local(e.kind()) => {
                    self.report.damage.push(e.to_string());
                    self.table.keep.insert(row.place.pack);
                }
                Err(e) => return Err(e),
            }
        }
        writer.map(PackWriter::finish).transpose()
    }
}

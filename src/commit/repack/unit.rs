//! Publishes what was encoded anew or moved, so that at no time a record says less of its chain than it takes.

use super::Repacked;
use super::survey::is_local;
use super::table::{NONE, Table};
use crate::commit::Parts;
use crate::commit::encode::{Against, Encoder};
use crate::commit::stamp::{Load, restamped};
use crate::error::{Error, Kind, Result};
use crate::graph::{Change, NodeMeta, Record};
use crate::pack::{Node, PackRange, PackWriter, Packs, Retiring};
use std::collections::{BTreeSet, HashSet};

/// One repack under way.
pub(super) struct Repack<'a> {
    pub(super) parts: &'a Parts,
    pub(super) table: Table,
    /// The journal record up to which the table knows all nodes.
    seq: u64,
    pub(super) dry_run: bool,
    /// Packs written by this repack.
    pub(super) own: BTreeSet<u32>,
    pub(super) report: Repacked,
}

impl<'a> Repack<'a> {
    pub(super) fn new(parts: &'a Parts, dry_run: bool) -> Result<Self> {
        let (seq, ranges) = parts.history.ranges_since(0);
        let mut report = Repacked::default();
        let damaged = &mut |e: Error| report.damage.push(e.to_string());
        let table = Table::new(&parts.packs, &ranges, damaged)?;
        let sizes = parts.packs.sizes()?;
        (report.before, report.packs_before) = (sizes.packs, sizes.pack_files);
        Ok(Repack {
            parts,
            table,
            seq,
            dry_run,
            own: BTreeSet::new(),
            report,
        })
    }

    /// Where the records of a unit go; nowhere in a dry run.
    pub(super) fn writer(&self) -> Result<Option<PackWriter>> {
        (!self.dry_run).then(|| self.parts.packs.writer()).transpose()
    }

    /// Publishes finished ranges in one journal record, with what else has to change for it. Packs that are held are retired, once
    /// what counts of them is copied; those of which something cannot be read are not. Without anything to publish or retire it
    /// does nothing.
    pub(super) fn publish(&mut self, mut ranges: Vec<PackRange>, mut retire: Retiring) -> Result<()> {
        ranges.retain(|r| r.count > 0);
        for range in &ranges {
            self.take_in(range)?;
        }
        loop {
            // Now that the packs are held, so that all that was published of them is known.
            self.parts.packs.refresh()?;
            self.catch_up(&mut ranges)?;
            if let Some(range) = self.copy_out(&retire)? {
                self.take_in(&range)?;
                ranges.push(range);
            }
            retire = retire.without(&self.table.keep);
            while let Some(range) = self.mend()? {
                self.take_in(&range)?;
                ranges.push(range);
            }
            if ranges.is_empty() && retire.packs().is_empty() {
                return Ok(());
            }
            if self.publish_once(ranges.clone(), &retire)? {
                break;
            }
        }
        self.own.extend(ranges.iter().map(|r| r.pack));
        Ok(())
    }

    /// Takes in what others published meanwhile. Where `ranges`, which will come after it, have some of the same nodes, a range is
    /// added so that the others' records count: one may have been stored again because its chain proved damaged.
    fn catch_up(&mut self, ranges: &mut Vec<PackRange>) -> Result<()> {
        let (seq, published) = self.parts.history.ranges_since(self.seq);
        self.seq = seq;
        let packs = self.parts.packs.clone();
        let own: BTreeSet<u32> = ranges.iter().map(|r| r.pack).collect();
        let mut writer: Option<PackWriter> = None;
        for range in &published {
            let mut shared = Vec::new();
            let table = &self.table;
            packs.scan_lossy(range, &mut |id, place, _| {
                let row = table.find(&id).map(|i| &table.rows[i as usize]);
                let within = |r: &PackRange| {
                    row.is_some_and(|row| {
                        r.pack == row.place.pack && (r.from..r.to).contains(&row.place.offset)
                    })
                };
                if row.is_some_and(|r| own.contains(&r.place.pack)) && ranges.iter().any(within) {
                    shared.push((id, place));
                }
                Ok(())
            })?;
            for (id, place) in shared {
                let node = packs.get_at(&id, &place)?;
                let writer = match &mut writer {
                    Some(w) => w,
                    None => writer.insert(packs.writer()?),
                };
                writer.append(node.kind, &id, &node.meta, &node.payload)?;
            }
            self.take_in(range)?;
        }
        if let Some(writer) = writer {
            let range = writer.finish()?;
            self.take_in(&range)?;
            ranges.push(range);
        }
        Ok(())
    }

    fn take_in(&mut self, range: &PackRange) -> Result<()> {
        let damage = &mut self.report.damage;
        let damaged = &mut |e: Error| damage.push(e.to_string());
        self.table.take_in(&self.parts.packs, range, damaged)
    }

    /// Publishes, unless there is something new in the journal that the table does not know: then false.
    fn publish_once(&mut self, ranges: Vec<PackRange>, retire: &Retiring) -> Result<bool> {
        let (history, seq) = (self.parts.history.clone(), self.seq);
        let build = move |pending: &[Vec<u8>]| {
            if !pending.is_empty() || history.ranges_since(seq).0 != seq {
                return Err(Error::new(Kind::Changed, "something was published meanwhile"));
            }
            let changes = vec![Change::Repack];
            Ok(Record { changes }.encode())
        };
        let published = self.parts.packs.retire(ranges, retire, Box::new(build));
        match published {
            Err(e) if e.kind() == Kind::Changed => Ok(false),
            published => {
                self.seq = published?;
                for pack in retire.packs() {
                    self.table.forget(*pack);
                }
                Ok(true)
            }
        }
    }

    /// Writes those deltas again that say less of their chain than it takes, or that lead nowhere within bounds: the range of
    /// what was written, if there was anything.
    fn mend(&self) -> Result<Option<PackRange>> {
        let mut loads: Vec<Load> = self.table.rows.iter().map(|r| r.load).collect();
        let mut freed = HashSet::new();
        let mut lens: Vec<u32> = self.table.rows.iter().map(|r| r.payload_len).collect();
        let mut hopeless = HashSet::new();
        let mut writer: Option<PackWriter> = None;
        loop {
            // What all bases of a node take; of one that is not known nothing can be said.
            let base_of = |i: usize, loads: &[Load]| {
                let known = |b: &u32| *b != NONE;
                Load::together(self.table.bases(i).filter(known).map(|b| loads[b as usize]))
            };
            let holds = |i: usize| {
                self.table.rows[i].base == NONE
                    || freed.contains(&i)
                    || loads[i].covers(base_of(i, &loads), lens[i], self.table.rows[i].step)
            };
            let broken = (0..loads.len()).filter(|i| !holds(*i) && !hopeless.contains(i));
            let mut broken: Vec<usize> = broken.collect();
            if broken.is_empty() {
                break;
            }
            broken.sort_by_key(|i| loads[*i].depth);
            for i in broken {
                let row = &self.table.rows[i];
                let base = base_of(i, &loads);
                match self.mended(&writer, i, base) {
                    Ok((meta, payload)) => {
                        let writer = match &mut writer {
                            Some(w) => w,
                            None => writer.insert(self.parts.packs.writer()?),
                        };
                        writer.append(row.kind as u8, &row.id, &meta.encode(), &payload)?;
                        lens[i] = payload.len() as u32;
                        loads[i] = Load::of(&meta, lens[i]);
                        if meta.delta.is_none() {
                            freed.insert(i);
                        }
                    }
                    // It cannot be rebuilt as it is: nothing is lost by leaving it.
                    Err(e) if is_local(e.kind()) => {
                        hopeless.insert(i);
                    }
                    Err(e) => return Err(e),
                }
            }
        }
        writer.map(PackWriter::finish).transpose()
    }

    /// A node's record with a chain that is as long as its base's now says, or without a base where that is too long.
    fn mended(&self, writer: &Option<PackWriter>, i: usize, base: Load) -> Result<(NodeMeta, Vec<u8>)> {
        let row = &self.table.rows[i];
        let packs: &Packs = &self.parts.packs;
        let Node { meta, payload, .. } = match writer {
            Some(w) if w.contains(&row.id) => w.get(&row.id)?,
            _ => packs.get_at(&row.id, &row.place)?,
        };
        let meta = NodeMeta::decode(row.kind, &meta)?;
        if let Some(meta) = restamped(&meta, payload.len() as u32, base) {
            return Ok((meta, payload.into()));
        }
        let raw = self.parts.rebuilder.node(packs, row.kind, &row.id)?;
        let encoder = Encoder {
            rebuilder: self.parts.rebuilder.clone(),
            source: self.parts.packs.clone(),
        };
        encoder.best(row.kind, &raw, meta.number, &Against::default())
    }

    /// The report, once everything is done.
    pub(super) fn finish(mut self) -> Result<Repacked> {
        let sizes = self.parts.packs.sizes()?;
        let report = &mut self.report;
        (report.after, report.packs_after) = (sizes.packs, sizes.pack_files);
        if self.dry_run {
            let saved = report.rewritten_before - report.rewritten_after;
            let dead: u64 = self
                .table
                .uses()
                .values()
                .map(|u| u.published.saturating_sub(u.live))
                .sum();
            report.after = sizes.packs.saturating_sub(saved + dead);
        }
        Ok(self.report)
    }
}

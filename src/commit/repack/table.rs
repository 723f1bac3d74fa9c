//! Every node of a store and the record that counts for it: some 80 bytes of memory each.

use crate::commit::stamp::Load;
use crate::error::{Error, Kind, Result};
use crate::graph::{Delta, NodeKind, NodeMeta};
use crate::id::NodeId;
use crate::pack::{Meta, PackRange, Packs, Place};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// No base, or none that is known.
pub(super) const NONE: u32 = u32::MAX;

/// The record that counts for a node.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub(super) id: NodeId,
    pub(super) place: Place,
    pub(super) kind: NodeKind,
    pub(super) load: Load,
    pub(super) payload_len: u32,
    /// The row of the base; the first, where there are many.
    pub(super) base: u32,
    /// What the node adds to the depth of its deepest base.
    pub(super) step: u8,
}

/// A pack is given up when at least one part in so many of it does not count any more.
const DEAD: u64 = 8;

/// What is in a pack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Use {
    /// Bytes of published records.
    pub(super) published: u64,
    /// Bytes of those that count.
    pub(super) live: u64,
}

impl Use {
    /// Whether so little of the pack counts that it is worth being given up.
    pub(super) fn is_wasteful(&self) -> bool {
        self.published.saturating_sub(self.live) * DEAD >= self.published
    }
}

/// All nodes, found by id.
#[derive(Default)]
pub(super) struct Table {
    pub(super) rows: Vec<Row>,
    /// The rows of the further bases of those nodes that have any.
    further: HashMap<u32, Vec<u32>>,
    /// So many rows are in order of id; the rest are found by `recent`.
    sorted: usize,
    recent: HashMap<NodeId, u32>,
    published: BTreeMap<u32, u64>,
    /// Packs that hold something that cannot be read, or not understood: they stay.
    pub(super) keep: BTreeSet<u32>,
}

impl Table {
    /// The nodes of published ranges, in the order of their publication. What is damaged is handed to `damaged`.
    pub(super) fn new(packs: &Packs, ranges: &[PackRange], damaged: &mut dyn FnMut(Error)) -> Result<Self> {
        let mut table = Table::default();
        let mut found = Vec::new();
        for range in ranges {
            table.scan(packs, range, &mut found, damaged)?;
        }
        // Stable, so that of equal ids the last one published comes last.
        found.sort_by_key(|f| f.0.id);
        found.reverse();
        found.dedup_by_key(|f| f.0.id);
        found.reverse();
        table.rows = found.iter().map(|f| f.0).collect();
        table.sorted = table.rows.len();
        for (i, (_, delta)) in found.iter().enumerate() {
            table.note_bases(i as u32, delta.as_ref());
        }
        Ok(table)
    }

    /// Takes in a range that was published, or will be, after all others.
    pub(super) fn take_in(
        &mut self,
        packs: &Packs,
        range: &PackRange,
        damaged: &mut dyn FnMut(Error),
    ) -> Result<()> {
        let mut found = Vec::new();
        self.scan(packs, range, &mut found, damaged)?;
        let mut places = Vec::with_capacity(found.len());
        for (row, _) in &found {
            places.push(match self.find(&row.id) {
                Some(i) => {
                    self.rows[i as usize] = *row;
                    i
                }
                None => {
                    let i = self.rows.len() as u32;
                    self.rows.push(*row);
                    self.recent.insert(row.id, i);
                    i
                }
            });
        }
        for (i, (_, delta)) in places.into_iter().zip(found) {
            self.note_bases(i, delta.as_ref());
        }
        Ok(())
    }

    fn note_bases(&mut self, i: u32, delta: Option<&Delta>) {
        let mut rows = delta
            .into_iter()
            .flat_map(Delta::bases)
            .map(|b| self.find(&b).unwrap_or(NONE));
        let (base, further): (u32, Vec<u32>) = (rows.next().unwrap_or(NONE), rows.collect());
        self.rows[i as usize].base = base;
        if further.is_empty() {
            self.further.remove(&i);
        } else {
            self.further.insert(i, further);
        }
    }

    /// The rows of all bases of a node; `NONE` for those that are not known.
    pub(super) fn bases(&self, i: usize) -> impl Iterator<Item = u32> {
        let further = self.further.get(&(i as u32)).into_iter().flatten().copied();
        std::iter::once(self.rows[i].base).chain(further)
    }

    fn scan(
        &mut self,
        packs: &Packs,
        range: &PackRange,
        found: &mut Vec<(Row, Option<Delta>)>,
        damaged: &mut dyn FnMut(Error),
    ) -> Result<()> {
        if self.rows.len() + found.len() > NONE as usize - range.count as usize {
            return Err(Error::new(Kind::Limit, "more nodes than one repack can look at"));
        }
        let mut odd = Vec::new();
        let first = packs.scan_lossy(range, &mut |id, place, m| {
            match read(id, place, &m) {
                Ok(row) => found.push(row),
                Err(e) if e.kind() == Kind::Damage => odd.push(e.context(format!("node {}", id.short()))),
                Err(e) => return Err(e),
            }
            Ok(())
        })?;
        odd.extend(first);
        if !odd.is_empty() {
            self.keep.insert(range.pack);
            odd.into_iter().for_each(damaged);
        }
        *self.published.entry(range.pack).or_default() += range.to - range.from;
        Ok(())
    }

    /// The row of a node.
    pub(super) fn find(&self, id: &NodeId) -> Option<u32> {
        let sorted = self.rows[..self.sorted].binary_search_by(|r| r.id.cmp(id));
        sorted
            .ok()
            .map(|i| i as u32)
            .or_else(|| self.recent.get(id).copied())
    }

    /// What is in each pack.
    pub(super) fn uses(&self) -> BTreeMap<u32, Use> {
        let mut uses: BTreeMap<u32, Use> = BTreeMap::new();
        for (pack, published) in &self.published {
            uses.entry(*pack).or_default().published = *published;
        }
        for r in &self.rows {
            uses.entry(r.place.pack).or_default().live += u64::from(r.place.len);
        }
        uses
    }

    /// Forgets a pack that was retired.
    pub(super) fn forget(&mut self, pack: u32) {
        self.published.remove(&pack);
    }
}

fn read(id: NodeId, place: Place, m: &Meta) -> Result<(Row, Option<Delta>)> {
    let kind = crate::commit::stamp::kind_of(m.kind)?;
    let meta = NodeMeta::decode(kind, &m.meta)?;
    let row = Row {
        id,
        place,
        kind,
        load: Load::of(&meta, m.payload_len),
        payload_len: m.payload_len,
        base: NONE,
        step: meta.step(),
    };
    Ok((row, meta.delta))
}

//! Append-only packs, the journal that publishes what they hold, the index that finds it, and recovery.
//!
//! `pack` sees bytes and ids, never tensors, versions or branches. A [`PackWriter`] appends nodes to a pack of its own and
//! [`PackWriter::finish`] makes them durable; [`Packs::publish`] appends one journal record under the store's lock, and the
//! journal's fsync is the moment of commit. Every byte is specified in docs/FORMAT.md.
//!
//! Locks are taken in this order, and none that `get`, `meta` and `contains` need is held while waiting on the disk:
//! STORE/lock, `reading`, the index's maintenance lock, then the leaves (queue, live index, applied position, open files).

mod check;
#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod damage_tests;
mod files;
mod index;
mod journal;
pub mod parse;
mod publish;
mod retire;
#[cfg(test)]
mod retire_tests;
mod run;
mod segment;
mod store;
#[cfg(test)]
mod tests;
mod writer;

pub use check::{Damaged, Stretches};
pub use parse::RECORD_OVERHEAD;
pub use retire::Retiring;
pub use writer::PackWriter;

use crate::disk::Disk;
use crate::error::{Error, Kind, Result};
use crate::id::NodeId;
use ::bytes::Bytes;
use files::PackFiles;
use index::Index;
use journal::Journal;
use parking_lot::{Condvar, Mutex};
use parse::{Pos, StoreId};
use std::collections::BTreeSet;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A node as it is stored: kind and meta mean something only to the layer above.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The layer above's kind of node.
    pub kind: u8,
    /// Up to 255 bytes that can be read without the payload.
    pub meta: Vec<u8>,
    /// The node's bytes.
    pub payload: Bytes,
}

/// What is known of a node without reading its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// The layer above's kind of node.
    pub kind: u8,
    /// Up to 255 bytes about the node.
    pub meta: Vec<u8>,
    /// Bytes of the payload.
    pub payload_len: u32,
    /// Bytes of the whole record in its pack.
    pub stored_len: u32,
}

/// Where a record lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Number of the pack.
    pub pack: u32,
    /// First byte of the record.
    pub offset: u64,
    /// Bytes of the record.
    pub len: u32,
}

impl Place {
    /// The record's bytes in its pack.
    pub fn stretch(&self) -> Range<u64> {
        self.offset..self.offset + u64::from(self.len)
    }
}

/// A run of records in one pack, as one writer finished it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackRange {
    /// Number of the pack.
    pub pack: u32,
    /// First byte of the first record.
    pub from: u64,
    /// One past the last byte of the last record.
    pub to: u64,
    /// How many records.
    pub count: u32,
}

impl PackRange {
    /// What says in a journal record that a pack is retired: nothing of it is served any more, and its file may be gone.
    pub fn retired(pack: u32) -> Self {
        PackRange {
            pack,
            from: parse::PACK_HEADER as u64,
            to: parse::PACK_HEADER as u64,
            count: 0,
        }
    }

    /// Whether this retires its pack.
    pub fn is_retired(&self) -> bool {
        self.count == 0
    }
}

/// Receives every durable journal body in sequence order: at open, at refresh, after a publish of this process.
///
/// If `apply` fails, the same record comes again at the next refresh and nothing after it before. It must not call anything of
/// the store that reads or publishes nodes.
pub trait Ledger: Send + Sync {
    /// Takes in the record with sequence `seq`.
    fn apply(&self, seq: u64, ranges: &[PackRange], body: &[u8]) -> Result<()>;
}

/// What a store's files take up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of all packs.
    pub packs: u64,
    /// How many packs.
    pub pack_files: u64,
    /// Of their bytes, their own headers.
    pub pack_headers: u64,
    /// Bytes of the journal, its copy and the durable mark.
    pub journal: u64,
    /// Bytes of the index.
    pub index: u64,
    /// Nodes published; one that was published twice counts twice.
    pub nodes: u64,
}

/// Sizes at which files are followed by new ones; other than the default only in tests.
#[derive(Clone, Copy)]
struct Limits {
    /// Nodes in memory before they are written as a run.
    table: usize,
    /// Bytes after which a pack is not reused.
    pack: u64,
    /// Bytes after which the journal goes on in a new segment.
    segment: u64,
}

const LIMITS: Limits = Limits {
    table: 32_768,
    pack: 1 << 30,
    segment: 64 << 20,
};

/// An open store of nodes; share it as `Arc<Packs>`.
pub struct Packs {
    disk: Arc<dyn Disk>,
    root: PathBuf,
    store: StoreId,
    ledger: Arc<dyn Ledger>,
    limits: Limits,
    files: PackFiles,
    index: Index,
    journal: Journal,
    /// Held while records are read from the journal and applied, so that they are applied once and in order.
    reading: Mutex<()>,
    applied: Mutex<Applied>,
    queue: Mutex<publish::Queue>,
    wake: Condvar,
    /// Why this instance does not publish any more.
    poisoned: Mutex<Option<String>>,
    idle: Mutex<Vec<writer::OpenPack>>,
    /// Packs that the journal names, …
    published: Mutex<BTreeSet<u32>>,
    /// … and those of them of which nothing is served any more.
    retired: Mutex<BTreeSet<u32>>,
    /// What was finished and not published so far, each with the lock that keeps its pack from being retired.
    finished: Mutex<Vec<(PackRange, writer::PackLock)>>,
}

#[derive(Clone, Copy)]
struct Applied {
    pos: Pos,
    nodes: u64,
    /// The highest number of a pack that was published.
    last_pack: u32,
}

impl Packs {
    /// Makes an empty store: `Exists` if there is one, `Refused` if the directory holds anything else.
    pub fn create(disk: Arc<dyn Disk>, root: &Path) -> Result<()> {
        store::create(&*disk, root)
    }

    /// Opens a store and hands every durable record to `ledger`.
    ///
    /// What a crash left is put right if the publish lock can be had without waiting. Damage that the journal's copy or a
    /// scan of the packs survives is logged; damage to the journal that it does not is an error.
    pub fn open(disk: Arc<dyn Disk>, root: &Path, ledger: Arc<dyn Ledger>) -> Result<Arc<Packs>> {
        store::open(disk, root, ledger, LIMITS)
    }

    /// The random id of the store.
    pub fn store_id(&self) -> [u8; 16] {
        self.store
    }

    /// Takes in what other processes have published: true if there was anything. Costs one small read if there was not.
    pub fn refresh(&self) -> Result<bool> {
        let before = self.applied.lock().pos;
        let end = match self.journal.read_mark() {
            Ok(mark) => mark,
            // Read while it was being written, or damaged: whoever publishes next writes it anew.
            Err(e) if e.kind() == Kind::Damage || e.kind() == Kind::NotFound => {
                match self.disk.lock(&store::lock_path(&self.root), false) {
                    Ok(_lock) => self.journal.settle(before)?,
                    Err(_) => return Ok(false),
                }
            }
            Err(e) => return Err(e),
        };
        if end == before || end.seq < before.seq {
            return Ok(false);
        }
        self.catch_up(end)
    }

    /// Reads a node. `NotFound`, or `Damage` naming pack and offset.
    pub fn get(&self, id: &NodeId) -> Result<Node> {
        self.with_place(id, |place| self.files.node(id, place))
    }

    /// Reads a node's header and meta, in one small read.
    pub fn meta(&self, id: &NodeId) -> Result<Meta> {
        self.with_place(id, |place| self.files.meta(id, place))
    }

    /// Whether the node has been published.
    pub fn contains(&self, id: &NodeId) -> Result<bool> {
        Ok(self.lookup(id)?.is_some())
    }

    /// The sequence of the last record that was taken in.
    pub fn seq(&self) -> u64 {
        self.applied.lock().pos.seq
    }

    /// Where a node lies that may have been published in a record after `since`; nothing if it certainly was not.
    pub fn published_since(&self, id: &NodeId, since: u64) -> Result<Option<Place>> {
        self.look_up(|| self.index.find_since(id, since))
    }

    /// Whether the record at a place is the one that counts for its node.
    pub fn counts(&self, id: &NodeId, place: &Place) -> Result<bool> {
        Ok(self.lookup(id)?.as_ref() == Some(place))
    }

    /// Reads a node at its place, or if that is damaged at any other place where the node was published too.
    fn with_place<T>(&self, id: &NodeId, read: impl Fn(&Place) -> Result<T>) -> Result<T> {
        loop {
            let found = self.lookup(id)?;
            let failed = match &found {
                None => self.index.missing(id),
                Some(place) => match read(place) {
                    Err(e) if matches!(e.kind(), Kind::Damage | Kind::NotFound) => e,
                    done => return done,
                },
            };
            // Its pack may be gone because what is in it was written anew: then it lies elsewhere now.
            let gone = match &found {
                None => failed.kind() == Kind::Damage,
                Some(_) => failed.kind() == Kind::NotFound,
            };
            if gone {
                self.refresh()?;
                if self.lookup(id)? != found {
                    continue;
                }
            }
            let Some(place) = found else { return Err(failed) };
            let others = self.index.all(id);
            let other = others.iter().filter(|p| **p != place).find_map(|p| read(p).ok());
            return other.ok_or_else(|| Error::damage(failed.to_string()));
        }
    }

    fn lookup(&self, id: &NodeId) -> Result<Option<Place>> {
        self.look_up(|| self.index.find_since(id, 0))
    }

    fn look_up(&self, find: impl Fn() -> Result<Option<Place>>) -> Result<Option<Place>> {
        loop {
            match find() {
                Ok(found) => return Ok(found),
                Err(e) => self.heal(&e, false)?,
            }
        }
    }

    /// Leaves out index runs that proved unreadable, or all, and finds their nodes by scanning packs.
    fn heal(&self, why: &Error, all: bool) -> Result<()> {
        log::warn!("{why}; finding its nodes again by scanning packs");
        let pos = self.applied.lock().pos;
        self.index
            .heal(pos.seq, all, |wanted, add| self.scan_published(pos, wanted, add))
    }

    /// Hands `add` every node of the records up to `end` whose sequence is wanted.
    fn scan_published(&self, end: Pos, wanted: &dyn Fn(u64) -> bool, add: &mut index::Add) -> Result<()> {
        self.journal.read(Pos::START, end, &mut |record, _| {
            if wanted(record.seq) {
                self.scan_record(record.seq, &record.ranges, add)
            } else {
                Ok(())
            }
        })
    }

    /// Hands `add` the nodes of one record. What cannot be read of them is noted as damaged, not an error.
    fn scan_record(&self, seq: u64, ranges: &[PackRange], add: &mut index::Add) -> Result<()> {
        for range in ranges.iter().filter(|r| !r.is_retired()) {
            if self.is_retired(range.pack) {
                continue;
            }
            let found = self
                .files
                .scan_lossy(range, &mut |id, place, _| add(seq, id, place))?;
            if let Some((offset, why)) = found {
                self.index.note_damaged(seq, range.pack, offset, &why);
            }
        }
        Ok(())
    }

    /// Applies the records up to `end`; true if there were any.
    fn catch_up(&self, end: Pos) -> Result<bool> {
        let _reading = self.reading.lock();
        let from = self.applied.lock().pos;
        if end.seq < from.seq || end.segment < from.segment {
            return Ok(false);
        }
        self.journal.read(from, end, &mut |record, pos| {
            if !self.index.covers(record.seq) {
                let mut nodes = Vec::new();
                self.scan_record(record.seq, &record.ranges, &mut |_, id, place| {
                    nodes.push((id, place));
                    Ok(())
                })?;
                self.index.add(record.seq, nodes);
            }
            self.apply(pos, &record.ranges, &record.body)?;
            // At open, so that memory stays bounded when the index is lost.
            if self.index.pending() >= 16 * self.limits.table {
                self.flush_soon();
            }
            Ok(())
        })?;
        self.applied.lock().pos = end;
        self.index.tell_damage();
        Ok(end.seq > from.seq)
    }

    /// Hands one record to the ledger; `pos` is the place after it.
    fn apply(&self, pos: Pos, ranges: &[PackRange], body: &[u8]) -> Result<()> {
        self.ledger.apply(pos.seq, ranges, body)?;
        self.published.lock().extend(ranges.iter().map(|r| r.pack));
        self.let_go(ranges);
        let mut applied = self.applied.lock();
        applied.pos = pos;
        applied.last_pack = ranges.iter().map(|r| r.pack).fold(applied.last_pack, u32::max);
        applied.nodes += ranges.iter().map(|r| u64::from(r.count)).sum::<u64>();
        Ok(())
    }

    /// A writer with a pack of its own.
    pub fn writer(self: &Arc<Self>) -> Result<PackWriter> {
        PackWriter::new(self)
    }

    /// Writes the nodes published since the newest run as a run, merging runs so that they stay few.
    pub fn flush_index(&self) -> Result<()> {
        self.flush(true)
    }

    fn flush(&self, wait: bool) -> Result<()> {
        let seq = self.applied.lock().pos.seq;
        match self.index.flush(seq, wait) {
            // A run that could not be read: scan its nodes and write them anew.
            Err(e) if e.kind() == Kind::Damage => {
                self.heal(&e, false)?;
                self.index.flush(seq, wait)
            }
            done => done,
        }
    }

    /// A flush that may as well come later.
    fn flush_soon(&self) {
        if let Err(e) = self.flush(false) {
            log::warn!("index run not written, will be tried again: {e}");
        }
    }

    /// Reads the headers of a finished range in order; `Damage` at the first that does not fit.
    pub fn scan(
        &self,
        range: &PackRange,
        f: &mut dyn FnMut(NodeId, Place, Meta) -> Result<()>,
    ) -> Result<()> {
        match self.files.scan(range, f) {
            Err(_) if self.is_gone(range.pack) => Ok(()),
            done => done,
        }
    }

    /// As `scan`, but goes on after damage, and returns the first of it.
    pub fn scan_lossy(
        &self,
        range: &PackRange,
        f: &mut dyn FnMut(NodeId, Place, Meta) -> Result<()>,
    ) -> Result<Option<Error>> {
        let found = self.files.scan_lossy(range, f)?;
        Ok(found.map(|(at, e)| e.context(format!("pack {:08x} at {at}", range.pack))))
    }

    /// Reads the record at a place, which may be in a finished range that is not published.
    pub fn get_at(&self, id: &NodeId, place: &Place) -> Result<Node> {
        self.files.node(id, place)
    }

    /// Where a node lies, as far as the index knows: also where it was published before.
    pub fn places(&self, id: &NodeId) -> Result<Vec<Place>> {
        let mut all: Vec<Place> = self.lookup(id)?.into_iter().collect();
        for place in self.index.all(id) {
            if !all.contains(&place) {
                all.push(place);
            }
        }
        Ok(all)
    }

    /// Copies the bytes of a stretch, whatever they are: fewer, or none, where the pack ends before or is missing.
    pub fn copy_raw(&self, pack: u32, stretch: &Range<u64>, to: &mut dyn Write) -> io::Result<()> {
        self.files.copy_raw(pack, stretch, to)
    }

    /// Writes the index anew from the published parts of the packs, reading nothing of the old one.
    pub fn rebuild_index(&self) -> Result<()> {
        self.heal(&Error::damage("the index is not trusted"), true)?;
        self.flush_index()
    }

    /// What the store's files take up.
    pub fn sizes(&self) -> Result<Sizes> {
        let total = |dir: &str| -> Result<(u64, u64)> {
            let dir = self.root.join(dir);
            let (mut sum, mut files) = (0, 0);
            for name in store::list(&*self.disk, &dir)? {
                match self.disk.open(&dir.join(name), false).and_then(|f| f.len()) {
                    Ok(n) => (sum, files) = (sum + n, files + 1),
                    Err(e) if e.kind() == Kind::NotFound => {} // merged or dropped meanwhile
                    Err(e) => return Err(e),
                }
            }
            Ok((sum, files))
        };
        let (packs, files) = total("packs")?;
        let nodes = self.applied.lock().nodes;
        Ok(Sizes {
            packs,
            pack_files: files,
            pack_headers: packs.min(files * parse::PACK_HEADER as u64),
            journal: total("journal")?.0,
            index: total("index")?.0,
            nodes,
        })
    }

    /// Writes the index and makes the journal's copy and mark durable; publishing and reading still work afterwards.
    pub fn close(&self) -> Result<()> {
        self.journal.sync_copy();
        match self.flush_index() {
            Err(e) if store::is_read_only(&e) => {}
            done => done?,
        }
        self.journal.sync_mark(false)
    }
}

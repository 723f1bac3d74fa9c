//! One index run: an immutable file of entries sorted by id, found by bucket and read with one small read.

use super::Place;
use super::parse::{self, RUN_BUCKET, RUN_ENTRY, RUN_HEADER, RunHeader, StoreId};
use crate::disk::{Disk, DiskFile, read_exact_at};
use crate::error::{Error, Kind, Result};
use crate::id::NodeId;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Entries a bucket holds on average, at most: 3 KiB, so that a lookup is one read of one page or two.
const BUCKET_ENTRIES: u64 = 64;
/// Bytes of entries read or written at once when runs are merged.
const BLOCK: usize = 256 << 10;

pub(super) struct Run {
    pub(super) name: String,
    pub(super) header: RunHeader,
    file: Arc<dyn DiskFile>,
    table: Vec<(u32, u32)>,
    bad: AtomicBool,
}

impl Run {
    /// Opens a run, checking all but its entries.
    pub(super) fn open(disk: &dyn Disk, dir: &Path, name: &str, store: &StoreId) -> Result<Run> {
        let file = disk.open(&dir.join(name), false)?;
        let read = || {
            let header = RunHeader::decode(&read_exact_at(&*file, 0, RUN_HEADER)?)?;
            if header.store != *store {
                return Err(Error::damage("it belongs to another store"));
            }
            if file.len()? != header.file_len() {
                return Err(Error::damage("its length is not what its header says"));
            }
            let table = read_exact_at(&*file, header.table_at(), RUN_BUCKET << header.bits)?;
            let table = parse::bucket_table(&table, &header)?;
            Ok((header, table))
        };
        let (header, table) = read().map_err(|e: Error| e.context(format!("index run {name}")))?;
        Ok(Run {
            name: name.to_owned(),
            header,
            file,
            table,
            bad: AtomicBool::new(false),
        })
    }

    pub(super) fn is_bad(&self) -> bool {
        self.bad.load(Ordering::Relaxed)
    }

    pub(super) fn covers(&self, seq: u64) -> bool {
        (self.header.first..=self.header.last).contains(&seq)
    }

    fn start(&self, bucket: usize) -> u32 {
        if bucket == 0 { 0 } else { self.table[bucket - 1].0 }
    }

    /// The bytes of the buckets `from..to`.
    fn bytes(&self, from: usize, to: usize) -> Result<Vec<u8>> {
        let (from, to) = (self.start(from) as usize, self.start(to) as usize);
        read_exact_at(
            &*self.file,
            (RUN_HEADER + from * RUN_ENTRY) as u64,
            (to - from) * RUN_ENTRY,
        )
    }

    fn bad_if_failed<T>(&self, read: Result<T>) -> Result<T> {
        read.map_err(|e| {
            self.bad.store(true, Ordering::Relaxed);
            Error::damage(format!("index run {}: {e}", self.name))
        })
    }

    /// The entries of the buckets `from..to`. Failure makes the run bad.
    fn entries(&self, from: usize, to: usize) -> Result<Vec<(NodeId, Place)>> {
        self.bad_if_failed(self.bytes(from, to).and_then(|bytes| {
            let mut entries = Vec::with_capacity(bytes.len() / RUN_ENTRY);
            let mut rest = &bytes[..];
            for b in from..to {
                let (bucket, more) = rest.split_at((self.start(b + 1) - self.start(b)) as usize * RUN_ENTRY);
                entries.extend(parse::run_entries(bucket, self.table[b].1)?);
                rest = more;
            }
            Ok(entries)
        }))
    }

    /// Looks an id up. Failure makes the run bad.
    pub(super) fn find(&self, id: &NodeId) -> Result<Option<Place>> {
        let b = parse::bucket(id, self.header.bits);
        if self.start(b) == self.start(b + 1) {
            return Ok(None);
        }
        let bytes = self.bytes(b, b + 1);
        self.bad_if_failed(bytes.and_then(|bytes| parse::find_entry(&bytes, self.table[b].1, id)))
    }
}

/// Entries in order of id: of a run, or of nodes in memory.
pub(super) struct Source {
    run: Option<Arc<Run>>,
    bucket: usize,
    entries: std::vec::IntoIter<(NodeId, Place)>,
}

impl Source {
    pub(super) fn run(run: Arc<Run>) -> Self {
        Self {
            run: Some(run),
            bucket: 0,
            entries: Vec::new().into_iter(),
        }
    }

    /// `entries` must be sorted.
    pub(super) fn memory(entries: Vec<(NodeId, Place)>) -> Self {
        Self {
            run: None,
            bucket: 0,
            entries: entries.into_iter(),
        }
    }

    fn next(&mut self) -> Result<Option<(NodeId, Place)>> {
        loop {
            if let Some(e) = self.entries.next() {
                return Ok(Some(e));
            }
            let Some(run) = self.run.as_ref().filter(|r| self.bucket < r.table.len()) else {
                return Ok(None);
            };
            let from = run.start(self.bucket) as usize;
            let mut end = self.bucket + 1;
            while end < run.table.len() && (run.table[end].0 as usize - from) * RUN_ENTRY <= BLOCK {
                end += 1;
            }
            self.entries = run.entries(self.bucket, end)?.into_iter();
            self.bucket = end;
        }
    }
}

/// Merges sources into a new run at `path`, which is made durable but not its name. Of equal ids the earliest source's stays.
pub(super) fn write(
    disk: &dyn Disk,
    path: &Path,
    store: &StoreId,
    (first, last): (u64, u64),
    at_most: u64,
    mut sources: Vec<Source>,
) -> Result<()> {
    let mut bits = 0;
    while bits < parse::MAX_BUCKET_BITS && at_most >> bits > BUCKET_ENTRIES {
        bits += 1;
    }
    let file = disk.create_new(path)?;
    let mut heads = sources.iter_mut().map(Source::next).collect::<Result<Vec<_>>>()?;
    let (mut count, mut at, mut buffer) = (0u32, RUN_HEADER as u64, Vec::new());
    let mut table = Vec::with_capacity(1 << bits);
    let mut sum = crc32fast::Hasher::new();
    let mut previous = None;
    while let Some((i, (id, place))) = heads
        .iter()
        .enumerate()
        .filter_map(|(i, h)| h.map(|h| (i, h)))
        .min_by_key(|(i, (id, _))| (*id, *i))
    {
        heads[i] = sources[i].next()?;
        if previous == Some(id) {
            continue;
        }
        previous = Some(id);
        while table.len() < parse::bucket(&id, bits) {
            table.push((count, std::mem::take(&mut sum).finalize()));
        }
        let entry = parse::run_entry(&id, &place);
        sum.update(&entry);
        buffer.extend_from_slice(&entry);
        count = count
            .checked_add(1)
            .ok_or_else(|| Error::new(Kind::Limit, "an index run is full"))?;
        if buffer.len() >= BLOCK {
            file.write_at(at, &buffer)?;
            at += buffer.len() as u64;
            buffer.clear();
        }
    }
    while table.len() < 1 << bits {
        table.push((count, std::mem::take(&mut sum).finalize()));
    }
    let table: Vec<u8> = table
        .iter()
        .flat_map(|(n, c)| [n.to_le_bytes(), c.to_le_bytes()])
        .flatten()
        .collect();
    buffer.extend_from_slice(&table);
    file.write_at(at, &buffer)?;
    let table_crc = crc32fast::hash(&table);
    let header = RunHeader {
        store: *store,
        first,
        last,
        count: u64::from(count),
        bits,
        table_crc,
    };
    file.write_at(0, &header.encode())?;
    file.sync()
}

//! Writing packs: one writer, one pack, buffered appends, and one barrier at the end.

use super::files::{pack_name, pack_number, read_meta, read_node};
use super::parse::{self, PACK_HEADER};
use super::{Meta, Node, PackRange, Packs, Place};
use crate::disk::DiskFile;
use crate::error::{Error, Kind, Result};
use crate::id::NodeId;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;

const BUFFER: usize = 1 << 20;

/// A pack of this process that no writer uses now.
pub(super) struct OpenPack {
    number: u32,
    file: Arc<dyn DiskFile>,
    /// Durable length: the next writer begins here.
    len: u64,
    /// Whether its name is durable too.
    named: bool,
    /// Held while a writer has it, and until what that wrote is published, so that it is not retired meanwhile.
    lock: Option<PackLock>,
}

/// Keeps a pack from being retired.
pub(super) type PackLock = Arc<dyn Send + Sync>;

impl OpenPack {
    pub(super) fn number(&self) -> u32 {
        self.number
    }
}

/// Appends nodes to a pack of its own.
///
/// Dropped without `finish`, or if that fails, what it wrote is cut off again. After a failed write or fsync it refuses all
/// further work.
pub struct PackWriter {
    packs: Arc<Packs>,
    pack: Option<OpenPack>,
    pending: Mutex<Pending>,
    nodes: HashMap<NodeId, Place>,
    count: u32,
    end: u64,
}

/// What has been appended and not yet written.
struct Pending {
    buffer: Vec<u8>,
    /// Where the buffer will lie.
    at: u64,
    failed: Option<Error>,
}

impl PackWriter {
    pub(super) fn new(packs: &Arc<Packs>) -> Result<Self> {
        let pack = match used_pack(packs)? {
            Some(pack) => pack,
            None => new_pack(packs)?,
        };
        let mut buffer = Vec::new();
        let (at, mut end) = (pack.len, pack.len);
        if at == 0 {
            buffer = parse::pack_header(&packs.store, pack.number);
            end = PACK_HEADER as u64;
        }
        let pending = Mutex::new(Pending {
            buffer,
            at,
            failed: None,
        });
        Ok(Self {
            packs: packs.clone(),
            pack: Some(pack),
            pending,
            nodes: HashMap::new(),
            count: 0,
            end,
        })
    }

    fn pack(&self) -> Result<&OpenPack> {
        self.pack
            .as_ref()
            .ok_or_else(|| Error::new(Kind::Poisoned, "this pack writer has ended"))
    }

    /// Appends a node, whether or not it is stored already, and returns the bytes its record takes. `Limit` if the meta
    /// exceeds 255 bytes or the record 4 GiB; `NoSpace` or another I/O error ends the writer.
    pub fn append(&mut self, kind: u8, id: &NodeId, meta: &[u8], payload: &[u8]) -> Result<u32> {
        let number = self.pack()?.number;
        let mut pending = self.pending.lock();
        check(&pending)?;
        if self.count == u32::MAX {
            return Err(Error::new(
                Kind::Limit,
                "one writer appends at most 2^32 - 1 nodes",
            ));
        }
        let len = parse::write_record(&mut pending.buffer, kind, id, meta, payload)?;
        let place = Place {
            pack: number,
            offset: self.end,
            len,
        };
        self.end += u64::from(len);
        self.count += 1;
        if pending.buffer.len() >= BUFFER {
            self.flush(&mut pending)?;
        }
        drop(pending);
        self.nodes.insert(*id, place);
        Ok(len)
    }

    fn flush(&self, pending: &mut Pending) -> Result<()> {
        check(pending)?;
        if let Err(e) = self.pack()?.file.write_at(pending.at, &pending.buffer) {
            pending.failed = Some(e.share());
            return Err(e);
        }
        pending.at += pending.buffer.len() as u64;
        pending.buffer.clear();
        Ok(())
    }

    /// Whether this writer appended the node and has not finished.
    pub fn contains(&self, id: &NodeId) -> bool {
        self.nodes.contains_key(id)
    }

    fn place(&self, id: &NodeId) -> Result<(&dyn DiskFile, &Place)> {
        let missing = || {
            Error::new(
                Kind::NotFound,
                format!("node {} was not appended by this writer", id.short()),
            )
        };
        let place = self.nodes.get(id).ok_or_else(missing)?;
        let mut pending = self.pending.lock();
        if place.offset + u64::from(place.len) > pending.at {
            self.flush(&mut pending)?;
        }
        Ok((&*self.pack()?.file, place))
    }

    /// Reads back a node that this writer appended.
    pub fn get(&self, id: &NodeId) -> Result<Node> {
        let (file, place) = self.place(id)?;
        read_node(file, id, place)
    }

    /// Reads back the header and meta of a node that this writer appended.
    pub fn meta(&self, id: &NodeId) -> Result<Meta> {
        let (file, place) = self.place(id)?;
        read_meta(file, id, place)
    }

    /// Makes the nodes durable: writes what is buffered and fsyncs the pack and, for a new one, its directory. What comes
    /// back is for [`Packs::publish`]. A failed fsync is `Poisoned` (`NoSpace` if that was why), and the pack is never used
    /// again.
    pub fn finish(mut self) -> Result<PackRange> {
        let mut pack = self
            .pack
            .take()
            .ok_or_else(|| Error::new(Kind::Poisoned, "this pack writer has ended"))?;
        let from = pack.len.max(PACK_HEADER as u64);
        let range = PackRange {
            pack: pack.number,
            from,
            to: self.end,
            count: self.count,
        };
        if self.count == 0 {
            self.pack = Some(pack); // nothing to make durable: dropping puts the pack back or removes it
            return Ok(range);
        }
        let pending = self.pending.get_mut();
        if let Err(e) = check(pending).and_then(|()| pack.file.write_at(pending.at, &pending.buffer)) {
            pending.failed = Some(e.share());
            self.pack = Some(pack);
            return Err(e);
        }
        pending.buffer.clear();
        let synced = pack.file.sync().and_then(|()| match pack.named {
            true => Ok(()),
            false => self.packs.disk.sync_dir(self.packs.files.dir()),
        });
        if let Err(e) = synced {
            let kind = if e.kind() == Kind::NoSpace {
                Kind::NoSpace
            } else {
                Kind::Poisoned
            };
            let text = format!(
                "pack {:08x} could not be made durable and is abandoned: {e}",
                pack.number
            );
            cut(&self.packs, &pack);
            return Err(Error::new(kind, text));
        }
        pack.named = true;
        pack.len = self.end;
        if let Some(lock) = &pack.lock {
            self.packs.finished.lock().push((range, lock.clone()));
        }
        keep(&self.packs, pack);
        Ok(range)
    }
}

fn check(pending: &Pending) -> Result<()> {
    match &pending.failed {
        Some(e) => Err(e.share().context("this pack writer failed before")),
        None => Ok(()),
    }
}

fn keep(packs: &Packs, mut pack: OpenPack) {
    if pack.len < packs.limits.pack {
        pack.lock = None;
        packs.idle.lock().push(pack);
    }
}

/// A pack of this process that no writer has, unless it was retired meanwhile: the lock is taken first, then the journal asked,
/// and whoever retires a pack does it the other way round.
fn used_pack(packs: &Packs) -> Result<Option<OpenPack>> {
    loop {
        let Some(mut pack) = packs.idle.lock().pop() else {
            return Ok(None);
        };
        let finished = packs.finished.lock();
        let held = finished.iter().find(|f| f.0.pack == pack.number);
        let held = held.map(|(_, lock)| lock.clone());
        drop(finished);
        pack.lock = match held {
            Some(lock) => Some(lock),
            None => packs.hold(&[pack.number])?.into_lock().map(Arc::from),
        };
        if pack.lock.is_none() {
            continue; // it is being retired, or gone
        }
        packs.refresh()?;
        if !packs.is_retired(pack.number) {
            return Ok(Some(pack));
        }
    }
}

/// Takes what was not published off a pack, or the pack away if there is nothing else in it; true if that worked and the
/// pack still exists. What is left when it does not work is beyond any published range, and so ignored.
fn cut(packs: &Packs, pack: &OpenPack) -> bool {
    let done = match pack.len {
        0 => packs.disk.remove(&packs.files.dir().join(pack_name(pack.number))),
        len => pack.file.truncate(len),
    };
    if let Err(e) = &done {
        log::warn!(
            "pack {:08x} keeps bytes that were not published: {e}",
            pack.number
        );
    }
    done.is_ok() && pack.len > 0
}

impl Drop for PackWriter {
    fn drop(&mut self) {
        if let Some(pack) = self.pack.take()
            && cut(&self.packs, &pack)
        {
            keep(&self.packs, pack);
        }
    }
}

/// Makes the next pack. Other processes do so too: a taken number leads to the next one.
fn new_pack(packs: &Packs) -> Result<OpenPack> {
    let dir = packs.files.dir();
    let taken = match packs.disk.list(dir) {
        // The store's maker died before this directory was durable.
        Err(e) if e.kind() == Kind::NotFound => {
            packs.disk.create_dir_all(dir)?;
            packs.disk.sync_dir(&packs.root)?;
            Vec::new()
        }
        names => names?,
    };
    // A pack that was published keeps its number even if it is missing: it may come back.
    let present = taken.iter().filter_map(|n| pack_number(n)).max();
    let mut number = present.unwrap_or(0).max(packs.applied.lock().last_pack);
    loop {
        number = number
            .checked_add(1)
            .ok_or_else(|| Error::new(Kind::Limit, "all pack numbers are used"))?;
        let file = match packs.disk.create_new(&dir.join(pack_name(number))) {
            Err(e) if e.kind() == Kind::Exists => continue,
            made => made?,
        };
        // Before it is locked it may be taken for one that was abandoned.
        let lock = match packs.disk.lock(&packs.path_of(number), false) {
            Err(e) if e.kind() == Kind::Busy => continue,
            held => Some(Arc::from(held?)),
        };
        packs.refresh()?;
        if !packs.is_retired(number) {
            return Ok(OpenPack {
                number,
                file,
                len: 0,
                named: false,
                lock,
            });
        }
    }
}

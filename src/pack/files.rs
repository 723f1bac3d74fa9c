//! Reading packs: a bounded table of open files, single records, and scans of published ranges.

use super::parse::{self, PACK_HEADER, RECORD_HEADER, StoreId};
use super::{Meta, Node, PackRange, Place};
use crate::disk::{Disk, DiskFile, read_exact_at};
use crate::error::{Error, Kind, Result};
use crate::id::NodeId;
use lru::LruCache;
use parking_lot::Mutex;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const OPEN_FILES: NonZeroUsize = NonZeroUsize::new(64).unwrap();
/// The most that a header and its meta can take.
const HEAD: u64 = RECORD_HEADER as u64 + 255;
/// Above this, a record's length is checked against its file before memory is allocated for it.
const TRUSTED_LEN: u32 = 4 << 20;

pub(super) struct PackFiles {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    store: StoreId,
    open: Mutex<LruCache<u32, Arc<dyn DiskFile>>>,
}

/// The file name of a pack.
pub(super) fn pack_name(pack: u32) -> String {
    format!("{pack:08x}.pack")
}

/// The number in a pack's file name.
pub(super) fn pack_number(name: &str) -> Option<u32> {
    let digits = name.strip_suffix(".pack")?;
    u32::from_str_radix(digits, 16)
        .ok()
        .filter(|n| name == pack_name(*n))
}

impl PackFiles {
    pub(super) fn new(disk: Arc<dyn Disk>, root: &Path, store: StoreId) -> Self {
        Self {
            disk,
            dir: root.join("packs"),
            store,
            open: Mutex::new(LruCache::new(OPEN_FILES)),
        }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Closes a pack, so that the space of one that is removed comes back.
    pub(super) fn close(&self, pack: u32) {
        self.open.lock().pop(&pack);
    }

    fn file(&self, pack: u32) -> Result<Arc<dyn DiskFile>> {
        if let Some(file) = self.open.lock().get(&pack) {
            return Ok(file.clone());
        }
        let file = self.disk.open(&self.dir.join(pack_name(pack)), false)?;
        match read_exact_at(&*file, 0, PACK_HEADER).and_then(|b| parse::read_pack_header(&b)) {
            Ok((store, number)) if store == self.store && number == pack => {}
            Ok(_) => {
                return Err(Error::damage(format!(
                    "pack {pack:08x} belongs to another store or place"
                )));
            }
            Err(e) if e.kind() == Kind::Unsupported => return Err(e.context(format!("pack {pack:08x}"))),
            // Its records name their own ids and carry their own checksums: they are good or bad by themselves.
            Err(e) => log::warn!("pack {pack:08x}: {e}"),
        }
        self.open.lock().put(pack, file.clone());
        Ok(file)
    }

    /// Reads a whole record and checks that it is the node asked for.
    pub(super) fn node(&self, id: &NodeId, place: &Place) -> Result<Node> {
        read_node(&*self.file(place.pack)?, id, place)
    }

    /// Reads a record's header and meta and checks that they are those of the node asked for.
    pub(super) fn meta(&self, id: &NodeId, place: &Place) -> Result<Meta> {
        read_meta(&*self.file(place.pack)?, id, place)
    }

    /// Reads the headers of a range; damage at the first that does not fit, or if their number is wrong.
    pub(super) fn scan(
        &self,
        range: &PackRange,
        f: &mut dyn FnMut(NodeId, Place, Meta) -> Result<()>,
    ) -> Result<()> {
        let mut window = Window::new(self.file(range.pack)?, range.to);
        let (mut at, mut count) = (range.from, 0u32);
        while at < range.to {
            let (id, place, meta) = step(&mut window, range.pack, at)?;
            at += u64::from(place.len);
            count = count.saturating_add(1);
            f(id, place, meta)?;
        }
        if count != range.count {
            let text = format!(
                "pack {:08x} has {count} records where {} were published",
                range.pack, range.count
            );
            return Err(Error::damage(text));
        }
        Ok(())
    }

    /// As `scan`, but goes on at the next whole header after a damaged one. Returns the first damage, if any.
    pub(super) fn scan_lossy(
        &self,
        range: &PackRange,
        f: &mut dyn FnMut(NodeId, Place, Meta) -> Result<()>,
    ) -> Result<Option<(u64, Error)>> {
        let mut first = None;
        self.scan_all(range, f, &mut |stretch, e| {
            first.get_or_insert((stretch.start, e));
        })?;
        Ok(first)
    }

    /// As `scan`, but hands `damaged` what does not fit, up to the next whole header, and why.
    pub(super) fn scan_all(
        &self,
        range: &PackRange,
        f: &mut dyn FnMut(NodeId, Place, Meta) -> Result<()>,
        damaged: &mut dyn FnMut(Range<u64>, Error),
    ) -> Result<()> {
        let file = match self.file(range.pack) {
            Ok(file) => file,
            Err(e) if e.kind() == Kind::Unsupported => return Err(e),
            Err(e) => {
                damaged(range.from..range.to, e);
                return Ok(());
            }
        };
        let end = range.to.min(file.len()?);
        let mut window = Window::new(file, end);
        let mut whole = true;
        let (mut at, mut count) = (range.from, 0u32);
        while at < end {
            match step(&mut window, range.pack, at) {
                Ok((id, place, meta)) => {
                    f(id, place, meta)?;
                    count = count.saturating_add(1);
                    at += u64::from(place.len);
                }
                Err(e) => {
                    whole = false;
                    let next = window.find_record(at + 1)?;
                    damaged(at..next, e);
                    at = next;
                }
            }
        }
        let missing = end.max(range.from)..range.to;
        if !missing.is_empty() || (whole && count != range.count) {
            let text = format!("{count} whole records where {} were published", range.count);
            damaged(missing, Error::damage(text));
        }
        Ok(())
    }

    /// Copies the bytes of a stretch, whatever they are: fewer, or none, where the pack ends before or is missing.
    pub(super) fn copy_raw(&self, pack: u32, stretch: &Range<u64>, to: &mut dyn Write) -> io::Result<()> {
        let Ok(file) = self.file(pack) else { return Ok(()) };
        let mut at = stretch.start;
        while at < stretch.end {
            let want = (stretch.end - at).min(1 << 20) as usize;
            let bytes = file.read_vec(at, want).unwrap_or_default();
            if bytes.is_empty() {
                break;
            }
            to.write_all(&bytes)?;
            at += bytes.len() as u64;
        }
        Ok(())
    }
}

/// Reads and checks one record from an open pack.
pub(super) fn read_node(file: &dyn DiskFile, id: &NodeId, place: &Place) -> Result<Node> {
    let at = |e: Error| {
        e.context(format!(
            "node {} in pack {:08x} at {}",
            id.short(),
            place.pack,
            place.offset
        ))
    };
    if place.len > TRUSTED_LEN && place.offset.saturating_add(u64::from(place.len)) > file.len()? {
        return Err(at(Error::damage("the pack ends before the record does")));
    }
    let bytes = read_exact_at(file, place.offset, place.len as usize).map_err(at)?;
    let (found, node) = parse::record(bytes).map_err(at)?;
    if found != *id {
        return Err(at(Error::damage(format!(
            "node {} is there instead",
            found.short()
        ))));
    }
    Ok(node)
}

/// Reads and checks one record's header and meta from an open pack.
pub(super) fn read_meta(file: &dyn DiskFile, id: &NodeId, place: &Place) -> Result<Meta> {
    let at = |e: Error| {
        e.context(format!(
            "node {} in pack {:08x} at {}",
            id.short(),
            place.pack,
            place.offset
        ))
    };
    let bytes = read_exact_at(file, place.offset, u64::from(place.len).min(HEAD) as usize).map_err(at)?;
    let h = parse::record_header(&bytes).map_err(at)?;
    if h.id != *id || h.stored_len() != u64::from(place.len) {
        return Err(at(Error::damage(format!(
            "node {} of {} bytes is there instead",
            h.id.short(),
            h.stored_len()
        ))));
    }
    Ok(Meta {
        kind: h.kind,
        meta: h.meta,
        payload_len: h.payload_len,
        stored_len: place.len,
    })
}

fn step(window: &mut Window, pack: u32, at: u64) -> Result<(NodeId, Place, Meta)> {
    let where_ = |e: Error| e.context(format!("pack {pack:08x} at {at}"));
    let end = window.end;
    let head = window.get(at, HEAD.min(end.saturating_sub(at))).map_err(where_)?;
    let h = parse::record_header(head).map_err(where_)?;
    let len = match u32::try_from(h.stored_len()) {
        Ok(len) if u64::from(len) <= end - at => len,
        _ => {
            return Err(where_(Error::damage(
                "a record reaches beyond the published range",
            )));
        }
    };
    let meta = Meta {
        kind: h.kind,
        meta: h.meta,
        payload_len: h.payload_len,
        stored_len: len,
    };
    Ok((
        h.id,
        Place {
            pack,
            offset: at,
            len,
        },
        meta,
    ))
}

/// Reads a file forwards through a buffer, never beyond `end`.
pub(super) struct Window {
    file: Arc<dyn DiskFile>,
    end: u64,
    at: u64,
    buf: Vec<u8>,
}

impl Window {
    const SIZE: u64 = 64 << 10;
    /// Read at once after a jump out of the buffer: the records there are larger than it.
    const SMALL: u64 = 512;

    pub(super) fn new(file: Arc<dyn DiskFile>, end: u64) -> Self {
        Self {
            file,
            end,
            at: 0,
            buf: Vec::new(),
        }
    }

    /// `len` bytes at `at`; damage if the file or the permitted part of it ends before.
    pub(super) fn get(&mut self, at: u64, len: u64) -> Result<&[u8]> {
        if at.saturating_add(len) > self.end {
            return Err(Error::damage(format!(
                "ends at {}, within what is expected at {at}",
                self.end
            )));
        }
        let have = self.at + self.buf.len() as u64;
        if at < self.at || at + len > have {
            let jumped = !self.buf.is_empty() && (at < self.at || at > have);
            let want = len
                .max(if jumped { Self::SMALL } else { Self::SIZE })
                .min(self.end - at);
            if want > Self::SIZE && at.saturating_add(want) > self.file.len()? {
                return Err(Error::damage(format!(
                    "the file ends within what is expected at {at}"
                )));
            }
            self.buf.resize(want as usize, 0);
            self.at = at;
            let n = self
                .file
                .read_at(at, &mut self.buf)
                .inspect_err(|_| self.buf.clear())?;
            self.buf.truncate(n);
        }
        let from = (at - self.at) as usize;
        let got = self.buf.get(from..from + len as usize);
        got.ok_or_else(|| Error::damage(format!("the file ends within what is expected at {at}")))
    }

    /// The place of the next whole record header at or after `at`, or the end.
    fn find_record(&mut self, mut at: u64) -> Result<u64> {
        let magic = parse::RECORD_MAGIC.to_le_bytes();
        while at < self.end {
            let len = Self::SIZE.min(self.end - at);
            let bytes = self.get(at, len)?;
            let hits: Vec<u64> = bytes
                .windows(2)
                .enumerate()
                .filter(|(_, w)| *w == magic)
                .map(|(i, _)| i as u64)
                .collect();
            for hit in hits {
                if step(self, 0, at + hit).is_ok() {
                    return Ok(at + hit);
                }
            }
            at += if at + len == self.end { len } else { len - 1 };
        }
        Ok(self.end)
    }
}

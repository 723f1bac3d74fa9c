//! The journal: numbered segments of records, each with a copy, and the durable mark that readers stop at.
//!
//! Reading needs no lock. Everything that writes here is called under the store's lock.

use super::parse::{self, Pos, SEGMENT_HEADER, SegmentHeader, StoreId};
use super::segment::{self, Damaged, Each, Segment, after};
use super::store;
use crate::disk::{Disk, DiskFile, read_exact_at};
use crate::error::{Error, Kind, Result};
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes moved at once when a segment is copied or written again.
const BLOCK: u64 = 1 << 20;

pub(super) struct Journal {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    store: StoreId,
    limit: u64,
    mark: RwLock<Option<Arc<dyn DiskFile>>>,
    damaged: Damaged,
    copy: Mutex<Option<Copy>>,
    /// Whether this process has raised the mark since it was last fsynced.
    raised: AtomicBool,
}

/// The copy that this process last wrote to.
struct Copy {
    segment: u32,
    file: Arc<dyn DiskFile>,
    /// Whether there is something to fsync.
    dirty: bool,
    /// Whether its name may not be durable yet.
    new: bool,
}

/// What a walk beyond the durable mark found.
pub(super) struct Located {
    /// Where the walk through the newest segment began: nothing is known to be durable after it.
    start: Pos,
    /// The end of the last whole record.
    pub(super) end: Pos,
    /// A segment that was being made when its maker died.
    unfinished: Option<u32>,
}

impl Journal {
    pub(super) fn new(disk: Arc<dyn Disk>, root: &Path, store: StoreId, limit: u64) -> Self {
        let dir = root.join("journal");
        let (mark, damaged, copy) = (RwLock::default(), Damaged::default(), Mutex::default());
        Self {
            disk,
            dir,
            store,
            limit,
            mark,
            damaged,
            copy,
            raised: AtomicBool::new(false),
        }
    }

    fn path(&self, segment: u32) -> PathBuf {
        self.dir.join(format!("{segment:08x}"))
    }

    fn copy_path(&self, segment: u32) -> PathBuf {
        self.dir.join(format!("{segment:08x}.copy"))
    }

    /// Opens a file that may be missing.
    fn open(&self, path: &Path, write: bool) -> Result<Option<Arc<dyn DiskFile>>> {
        match self.disk.open(path, write) {
            Ok(file) => Ok(Some(file)),
            Err(e) if e.kind() == Kind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    // ---- the durable mark

    /// Reads the durable mark: `NotFound` if there is none, `Damage` if it is torn.
    pub(super) fn read_mark(&self) -> Result<Pos> {
        let cached = self.mark.read().clone();
        let file = match cached {
            Some(file) => file,
            None => {
                let file = self.disk.open(&self.dir.join("durable"), false)?;
                *self.mark.write() = Some(file.clone());
                file
            }
        };
        let mut tries = 0;
        loop {
            let read = read_exact_at(&*file, 0, parse::MARK).and_then(|b| parse::Pos::decode_mark(&b));
            match read {
                Ok((store, pos)) if store == self.store && pos.segment > 0 => return Ok(pos),
                Ok(_) => return Err(Error::damage("the durable mark belongs to another store")),
                // It may have been read while it was being written.
                Err(e) if e.kind() == Kind::Damage && tries < 3 => tries += 1,
                Err(e) => return Err(e),
            }
        }
    }

    /// Writes the durable mark. A failure loses nothing: whoever publishes next finds the records after the old mark.
    pub(super) fn raise(&self, pos: Pos) {
        let path = self.dir.join("durable");
        let written = self.open(&path, true).and_then(|file| {
            let file = match file {
                Some(file) => file,
                None => self.disk.create_new(&path)?,
            };
            file.write_at(0, &pos.encode_mark(&self.store))?;
            Ok(file)
        });
        match written {
            Ok(file) => {
                self.raised.store(true, Ordering::Relaxed);
                *self.mark.write() = Some(file);
            }
            Err(e) => log::warn!("the durable mark could not be raised to record {}: {e}", pos.seq),
        }
    }

    // ---- reading

    fn segment(&self, number: u32) -> Result<Segment<'_>> {
        Ok(Segment {
            damaged: &self.damaged,
            store: self.store,
            number,
            primary: self.open(&self.path(number), false)?,
            copy: self.open(&self.copy_path(number), false)?,
        })
    }

    /// Hands `f` each record between two places and the place after it. Damage that the copy cannot heal is an error.
    pub(super) fn read(&self, from: Pos, to: Pos, f: Each<'_>) -> Result<()> {
        let mut pos = from;
        if from == Pos::START {
            self.segment(from.segment)?.header()?; // so that damage to it is noticed
        }
        while pos.segment < to.segment {
            let next = self.segment(pos.segment + 1)?.header()?;
            let next = next.ok_or_else(|| segment::lost(pos.segment + 1))?;
            let end = Pos {
                segment: pos.segment,
                offset: next.previous_len,
                seq: next.previous_seq,
            };
            self.segment(pos.segment)?.read(pos, end, f)?;
            pos = first_of(&next);
        }
        self.segment(pos.segment)?.read(pos, to, f)
    }

    /// Whether the journal ends where the mark says: no record, torn or whole, and no segment after it.
    pub(super) fn ends_at(&self, mark: Pos) -> Result<bool> {
        let len = match self.open(&self.path(mark.segment), false)? {
            Some(file) => file.len()?,
            None => return Ok(false),
        };
        let next = mark.segment.saturating_add(1);
        let more = self.open(&self.path(next), false)?.is_some()
            || self.open(&self.copy_path(next), false)?.is_some();
        Ok(len == mark.offset && !more)
    }

    /// Walks from a durable place to the end of the last whole record, changing nothing. Damage is an error where a record
    /// was durable, which a later batch, a later segment or the copy can prove; else it is a torn tail.
    pub(super) fn locate(&self, from: Pos) -> Result<Located> {
        let mut pos = from;
        let mut unfinished = None;
        loop {
            let mut next = self.segment(pos.segment.saturating_add(1))?;
            let header = match next.header() {
                Ok(Some(header)) => header,
                Ok(None) => break,
                Err(_) if next.copy.is_none() && next.size()? <= SEGMENT_HEADER as u64 => {
                    unfinished = Some(next.number);
                    break;
                }
                Err(e) => return Err(e),
            };
            let end = Pos {
                segment: pos.segment,
                offset: header.previous_len,
                seq: header.previous_seq,
            };
            self.segment(pos.segment)?.read(pos, end, &mut |_, _| Ok(()))?;
            pos = first_of(&header);
        }
        let start = pos;
        let mut segment = self.segment(pos.segment)?;
        if segment.header()?.is_none() {
            return Err(segment::lost(pos.segment));
        }
        let size = segment.size()?;
        let mut reading = segment.reading(size);
        while pos.offset < size {
            match reading.record(pos) {
                Ok(record) => pos = after(pos, &record),
                Err(e) if e.kind() == Kind::Damage && !segment.durable_after(pos)? => break,
                Err(e) => return Err(e),
            }
        }
        Ok(Located {
            start,
            end: pos,
            unfinished,
        })
    }

    /// Under the store's lock: where the journal ends. Records that a crash left beyond the mark are made durable and the mark
    /// raised; what is torn is cut off. `known` is a place this process knows to be durable.
    pub(super) fn settle(&self, known: Pos) -> Result<Pos> {
        let from = match self.read_mark() {
            Ok(mark) if mark.seq >= known.seq && mark.segment >= known.segment => {
                if self.ends_at(mark)? {
                    return Ok(mark);
                }
                mark
            }
            Ok(_) => known,
            Err(e) if matches!(e.kind(), Kind::Damage | Kind::NotFound) => {
                log::warn!("finding the journal's end again: {e}");
                known
            }
            Err(e) => return Err(e),
        };
        let Located {
            start,
            end,
            unfinished,
        } = self.locate(from)?;
        if let Some(segment) = unfinished {
            self.disk.remove(&self.path(segment))?;
        }
        match self.open(&self.path(end.segment), true)? {
            Some(file) if file.len()? >= end.offset && !self.damaged.contains(end.segment) => {
                if file.len()? > end.offset {
                    log::info!(
                        "journal segment {:08x}: cutting off an unfinished record",
                        end.segment
                    );
                    file.truncate(end.offset)?;
                }
                // Written again, because an fsync alone says nothing of bytes whose write-back failed before it.
                let new = start.segment != from.segment;
                let begin = if new { 0 } else { start.offset };
                if begin < end.offset {
                    copy_bytes(&*file, &*file, begin, end.offset)?;
                    let named = || {
                        if new {
                            self.disk.sync_dir(&self.dir)
                        } else {
                            Ok(())
                        }
                    };
                    let synced = file.sync().and_then(|()| named());
                    synced.map_err(|e| poisoned("fsync of the journal after a crash", &e))?;
                }
            }
            _ => {
                self.damaged.note(
                    end.segment,
                    &Error::damage("it ends before records that were published"),
                );
                if let Some(copy) = self.open(&self.copy_path(end.segment), true)? {
                    copy.sync()
                        .map_err(|e| poisoned("fsync of the journal's copy", &e))?;
                }
            }
        }
        self.raise(end);
        self.mirror_from(0, end);
        Ok(end)
    }

    // ---- appending

    /// The place to append at: `end`, or the beginning of a new segment if that one is damaged or long enough.
    pub(super) fn ready(&self, end: Pos) -> Result<Pos> {
        let full = end.offset >= self.limit && end.offset > SEGMENT_HEADER as u64;
        if full || self.damaged.contains(end.segment) {
            self.roll(end)
        } else {
            Ok(end)
        }
    }

    /// Makes the next segment, whose header says where this one ends, and lets the mark name it.
    fn roll(&self, end: Pos) -> Result<Pos> {
        self.sync_copy();
        let limit = || Error::new(Kind::Limit, "all journal segment numbers are used");
        let segment = end.segment.checked_add(1).ok_or_else(limit)?;
        let header = SegmentHeader {
            store: self.store,
            segment,
            previous_len: end.offset,
            previous_seq: end.seq,
        };
        let path = self.path(segment);
        let file = self.disk.create_new(&path)?;
        let made = file.write_at(0, &header.encode()).and_then(|()| file.sync());
        if let Err(e) = made.and_then(|()| self.disk.sync_dir(&self.dir)) {
            let _ = self.disk.remove(&path); // if it stays, it closes a segment at its true end: harmless
            return Err(e);
        }
        let pos = first_of(&header);
        self.raise(pos);
        Ok(pos)
    }

    /// Appends whole records at the journal's end and makes them durable: the moment of commit.
    ///
    /// A failed write is cut off again and may be repeated. A failed fsync closes the segment where it was and is `Poisoned`.
    pub(super) fn append(&self, end: Pos, bytes: &[u8]) -> Result<()> {
        let file = self.disk.open(&self.path(end.segment), true)?;
        if let Err(e) = file.write_at(end.offset, bytes) {
            return match file.truncate(end.offset).or_else(|_| self.roll(end).map(|_| ())) {
                Ok(()) => Err(e),
                Err(worse) => Err(poisoned(
                    "cutting off an unfinished record of the journal",
                    &worse,
                )),
            };
        }
        let Err(e) = file.sync() else { return Ok(()) };
        if let Err(worse) = self.roll(end) {
            log::warn!("no new journal segment after a failed fsync: {worse}");
            // So that no other process takes the record, which it can see, for a durable one.
            if let Err(worst) = file.truncate(end.offset) {
                log::error!("nor could the record that was not acknowledged be cut off: {worst}");
            }
        }
        Err(poisoned("fsync of the journal", &e))
    }

    // ---- the copy

    /// Brings the copy of the newest segment up to the durable end. A failure only costs the copy.
    pub(super) fn mirror(&self, end: Pos) {
        self.mirror_from(u64::MAX, end);
    }

    fn mirror_from(&self, from: u64, end: Pos) {
        if self.damaged.contains(end.segment) {
            return;
        }
        let mut copy = self.copy.lock();
        if let Err(e) = self.try_mirror(&mut copy, from, end) {
            log::warn!("the copy of journal segment {:08x} is behind: {e}", end.segment);
            *copy = None;
        }
    }

    fn try_mirror(&self, copy: &mut Option<Copy>, from: u64, end: Pos) -> Result<()> {
        let segment = end.segment;
        let copy = match copy {
            Some(copy) if copy.segment == segment => copy,
            _ => {
                let path = self.copy_path(segment);
                let (file, new) = match self.open(&path, true)? {
                    Some(file) => (file, false),
                    None => (self.disk.create_new(&path)?, true),
                };
                copy.insert(Copy {
                    segment,
                    file,
                    dirty: true,
                    new,
                })
            }
        };
        let from = from.min(copy.file.len()?);
        copy.dirty = true;
        copy_bytes(
            &*self.disk.open(&self.path(segment), false)?,
            &*copy.file,
            from,
            end.offset,
        )
    }

    /// Makes durable what was copied by earlier publishes, and the mark with it.
    pub(super) fn sync_copy(&self) {
        let mut copy = self.copy.lock();
        let Some(c) = copy.as_mut().filter(|c| c.dirty) else {
            return;
        };
        let named = || {
            if c.new {
                self.disk.sync_dir(&self.dir)
            } else {
                Ok(())
            }
        };
        match c.file.sync().and_then(|()| named()) {
            Ok(()) => (c.dirty, c.new) = (false, false),
            Err(e) => {
                // An fsync is never repeated on the same file: a new one takes its place.
                log::warn!("the copy of journal segment {:08x} is made anew: {e}", c.segment);
                let _ = self.disk.remove(&self.copy_path(c.segment));
                *copy = None;
            }
        }
    }

    /// Makes the mark durable, so that the next opening has nothing to find; with `always` even if another process raised it.
    pub(super) fn sync_mark(&self, always: bool) -> Result<()> {
        let mark = self.mark.read().clone();
        match mark.filter(|_| self.raised.swap(false, Ordering::Relaxed) || always) {
            Some(file) => file.sync(),
            None => Ok(()),
        }
    }

    /// Makes the copies that are missing, but for the newest segment's, which each publish sees to.
    pub(super) fn restore_copies(&self, end: Pos) -> Result<()> {
        let names: BTreeSet<String> = store::list(&*self.disk, &self.dir)?.into_iter().collect();
        for segment in 1..end.segment {
            let name = format!("{segment:08x}");
            if names.contains(&name) && !names.contains(&format!("{name}.copy")) {
                let source = self.disk.open(&self.path(segment), false)?;
                let file = self.disk.create_new(&self.copy_path(segment))?;
                copy_bytes(&*source, &*file, 0, source.len()?)?;
                file.sync()?;
            }
        }
        Ok(())
    }
}

fn poisoned(what: &str, e: &Error) -> Error {
    Error::new(Kind::Poisoned, format!("{what} failed: {e}"))
}

/// The place before the first record of a segment.
fn first_of(header: &SegmentHeader) -> Pos {
    Pos {
        segment: header.segment,
        offset: SEGMENT_HEADER as u64,
        seq: header.previous_seq,
    }
}

fn copy_bytes(from: &dyn DiskFile, to: &dyn DiskFile, mut at: u64, end: u64) -> Result<()> {
    while at < end {
        let bytes = read_exact_at(from, at, (end - at).min(BLOCK) as usize)?;
        to.write_at(at, &bytes)?;
        at += bytes.len() as u64;
    }
    Ok(())
}

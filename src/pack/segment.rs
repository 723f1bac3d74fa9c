//! Reading one journal segment: each record from its file, or else from its copy.

use super::files::Window;
use super::parse::{self, JOURNAL_HEADER, JournalRecord, Pos, SEGMENT_HEADER, SegmentHeader, StoreId};
use crate::disk::{DiskFile, read_exact_at};
use crate::error::{Error, Kind, Result};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Takes a record and the place after it.
pub(super) type Each<'a> = &'a mut dyn FnMut(JournalRecord, Pos) -> Result<()>;

/// The place after a record.
pub(super) fn after(pos: Pos, record: &JournalRecord) -> Pos {
    Pos {
        offset: pos.offset + record.stored_len,
        seq: record.seq,
        ..pos
    }
}

pub(super) fn lost(segment: u32) -> Error {
    Error::damage(format!("journal segment {segment:08x} and its copy are missing"))
}

/// Segments whose file is missing or damaged: read with the help of the copy, and never appended to.
#[derive(Default)]
pub(super) struct Damaged(Mutex<BTreeSet<u32>>);

impl Damaged {
    pub(super) fn note(&self, segment: u32, why: &Error) {
        if self.0.lock().insert(segment) {
            log::warn!("journal segment {segment:08x} is damaged, using its copy: {why}");
        }
    }

    pub(super) fn contains(&self, segment: u32) -> bool {
        self.0.lock().contains(&segment)
    }
}

/// One segment: its file and its copy, either of which may be missing.
pub(super) struct Segment<'a> {
    pub(super) damaged: &'a Damaged,
    pub(super) store: StoreId,
    pub(super) number: u32,
    pub(super) primary: Option<Arc<dyn DiskFile>>,
    pub(super) copy: Option<Arc<dyn DiskFile>>,
}

impl<'a> Segment<'a> {
    /// The segment's header; none if there is neither file nor copy.
    pub(super) fn header(&mut self) -> Result<Option<SegmentHeader>> {
        let read = |file: &Arc<dyn DiskFile>| {
            let header = SegmentHeader::decode(&read_exact_at(&**file, 0, SEGMENT_HEADER)?)?;
            if header.store != self.store || header.segment != self.number {
                return Err(Error::damage("journal segment belongs to another store or place"));
            }
            Ok(header)
        };
        let found = match (self.primary.as_ref().map(read), self.copy.as_ref()) {
            (None, None) => return Ok(None),
            (Some(Ok(header)), _) => return Ok(Some(header)),
            (Some(Err(e)), _) if e.kind() == Kind::Unsupported => Err(e),
            (Some(Err(e)), None) => Err(e),
            (Some(Err(e)), Some(copy)) => read(copy).inspect(|_| self.damaged.note(self.number, &e)),
            (None, Some(copy)) => {
                read(copy).inspect(|_| self.damaged.note(self.number, &Error::damage("it is missing")))
            }
        };
        found
            .map(Some)
            .map_err(|e| e.context(format!("journal segment {:08x}", self.number)))
    }

    /// The length of the longer of file and copy.
    pub(super) fn size(&self) -> Result<u64> {
        let len = |f: &Option<Arc<dyn DiskFile>>| f.as_ref().map_or(Ok(0), |f| f.len());
        Ok(len(&self.primary)?.max(len(&self.copy)?))
    }

    pub(super) fn reading(&self, end: u64) -> Reading<'a> {
        let window = |f: &Option<Arc<dyn DiskFile>>| f.clone().map(|f| Window::new(f, end));
        Reading {
            damaged: self.damaged,
            number: self.number,
            primary: window(&self.primary),
            copy: window(&self.copy),
        }
    }

    /// Hands `f` the records between two places, which must both be ends of records.
    pub(super) fn read(&self, mut pos: Pos, to: Pos, f: Each<'_>) -> Result<()> {
        if self.primary.is_none() && self.copy.is_none() {
            return Err(lost(self.number));
        }
        let mut reading = self.reading(to.offset);
        while pos.offset < to.offset {
            let record = reading.record(pos)?;
            pos = after(pos, &record);
            f(record, pos)?;
        }
        if pos.offset != to.offset || pos.seq != to.seq {
            return Err(Error::damage(format!(
                "journal segment {:08x} has record {} at {} where record {} should end at {}",
                self.number, pos.seq, pos.offset, to.seq, to.offset
            )));
        }
        Ok(())
    }

    /// Whether a whole record of a later batch proves that what should be at `pos` was durable.
    pub(super) fn durable_after(&self, pos: Pos) -> Result<bool> {
        for file in [&self.primary, &self.copy].into_iter().flatten() {
            let rest = file
                .len()?
                .saturating_sub(pos.offset)
                .min(2 * parse::MAX_JOURNAL as u64);
            if rest > 0
                && parse::later_batch(&read_exact_at(&**file, pos.offset, rest as usize)?, pos.seq + 1)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Reads a segment's records one after the other, each from the file or else from the copy.
pub(super) struct Reading<'a> {
    damaged: &'a Damaged,
    number: u32,
    primary: Option<Window>,
    copy: Option<Window>,
}

impl Reading<'_> {
    pub(super) fn record(&mut self, pos: Pos) -> Result<JournalRecord> {
        let missing = || Error::damage("it is missing");
        let first = self
            .primary
            .as_mut()
            .map_or_else(|| Err(missing()), |w| fetch(w, pos));
        let Err(why) = first else { return first };
        match self.copy.as_mut().map(|w| fetch(w, pos)) {
            Some(Ok(record)) => {
                self.damaged.note(self.number, &why);
                Ok(record)
            }
            _ => Err(why.context(format!(
                "journal segment {:08x} at {}, record {}",
                self.number,
                pos.offset,
                pos.seq + 1
            ))),
        }
    }
}

fn fetch(window: &mut Window, pos: Pos) -> Result<JournalRecord> {
    let len = parse::journal_len(window.get(pos.offset, JOURNAL_HEADER as u64)?)?;
    let record = parse::journal_record(window.get(pos.offset, len)?)?;
    if record.seq != pos.seq + 1 {
        return Err(Error::damage(format!("record {} is there instead", record.seq)));
    }
    Ok(record)
}

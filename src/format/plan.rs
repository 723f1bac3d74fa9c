//! Chunk planning: which bytes of a file go into which chunk (docs/FORMAT.md, "Planning").

use super::layout::{ChunkPlan, Extent, Format, Layout, Region, Tensor};
use crate::tensor::Number;
use sha2::{Digest, Sha256};

/// Regions longer than this get chunks of their own, and a tail shorter than this joins the chunk before it.
const OWN: u64 = 64 << 10;
/// Length of a chunk of a region that has chunks of its own.
const LARGE: u64 = 1 << 20;
/// Small regions and structural bytes are gathered up to this length.
const GATHER: u64 = 256 << 10;
/// A chunk of small regions is closed after one in so many bytes, by their names …
const CLOSE: u64 = 96 << 10;
/// … once it has this length.
const LEAST: u64 = 32 << 10;

/// What a parser found.
#[derive(Debug)]
pub(super) struct Parts {
    pub(super) format: Format,
    pub(super) regions: Vec<Region>,
    pub(super) tensors: Vec<Tensor>,
    pub(super) metadata: Vec<(String, String)>,
}

/// Plans the chunks of a file of `len` bytes; the reason if the parts contradict each other or are too many.
pub(super) fn plan(parts: Parts, len: u64) -> Result<Layout, String> {
    let Parts {
        format,
        regions,
        tensors,
        metadata,
    } = parts;
    let mut p = Planner {
        chunks: vec![],
        extents: vec![],
        open: [None; 9],
    };
    let mut at = 0;
    for r in &regions {
        let end = r
            .offset
            .checked_add(r.len)
            .filter(|end| r.offset >= at && *end <= len);
        let end = end.ok_or_else(|| format!("the data of {} overlaps or leaves the file", r.name))?;
        p.gather(Number::Bytes, r.offset - at);
        // A storage of bytes may end amid an element; gathered, it would put what follows out of step.
        let number = r.dtype.number();
        let number = if r.len % number.width() as u64 == 0 {
            number
        } else {
            Number::Bytes
        };
        if r.len > OWN {
            p.own(number, r.len);
        } else {
            p.gather(number, r.len);
            if number != Number::Bytes && closes(r) {
                p.close(number);
            }
        }
        at = end;
    }
    p.gather(Number::Bytes, len - at);
    let Planner { chunks, extents, .. } = p;
    let layout = Layout {
        format,
        len,
        chunks,
        extents,
        regions,
        tensors,
        metadata,
    };
    layout.check().map_err(|e| e.to_string())?;
    Ok(layout)
}

/// Whether a small region is the last one of its chunk. The names decide, as the content does where files are cut by it: where one is
/// added, removed or renamed, only the chunks nearby change. What a renamed model keeps is looked at: the numbers (of layers) and the
/// last two components.
fn closes(r: &Region) -> bool {
    let mut parts = r.name.rsplit('.');
    let last = [parts.next(), parts.next()];
    let numbers = parts.filter(|p| p.bytes().all(|b| b.is_ascii_digit())).map(Some);
    let mut hasher = Sha256::new();
    for part in last.into_iter().chain(numbers).flatten() {
        hasher.update(part);
        hasher.update(b".");
    }
    let [a, b, c, d, ..]: [u8; 32] = hasher.finalize().into();
    u64::from(u32::from_be_bytes([a, b, c, d])) * CLOSE < r.len << 32
}

struct Planner {
    chunks: Vec<ChunkPlan>,
    extents: Vec<Extent>,
    /// The chunk that still gathers bytes, per kind of number.
    open: [Option<u32>; 9],
}

impl Planner {
    /// Adds `len` bytes to the open chunk of this kind, opening further ones as they fill up.
    fn gather(&mut self, number: Number, mut len: u64) {
        let slot = usize::from(number.tag());
        // A small region stays whole where it can: it opens a new chunk rather than being cut in two.
        if number != Number::Bytes && self.open[slot].is_some_and(|c| self.room(c) < len) {
            self.open[slot] = None;
        }
        while len > 0 {
            let chunk = match self.open[slot] {
                Some(c) if self.room(c) > 0 => c,
                _ => self.new_chunk(number),
            };
            self.open[slot] = Some(chunk);
            let n = len.min(self.room(chunk));
            self.extend(chunk, n as u32);
            len -= n;
        }
    }

    /// Opens a new chunk for the next region of this kind, if the open one is long enough.
    fn close(&mut self, number: Number) {
        let open = &mut self.open[usize::from(number.tag())];
        *open = open.filter(|c| {
            self.chunks
                .get(*c as usize)
                .is_some_and(|c| u64::from(c.len) < LEAST)
        });
    }

    /// Gives a region chunks of its own, the first one starting where the region starts.
    fn own(&mut self, number: Number, mut len: u64) {
        while len > 0 {
            let n = if len < LARGE + OWN { len } else { LARGE };
            let chunk = self.new_chunk(number);
            self.extend(chunk, n as u32);
            len -= n;
        }
    }

    fn room(&self, chunk: u32) -> u64 {
        GATHER.saturating_sub(u64::from(self.chunks[chunk as usize].len))
    }

    fn new_chunk(&mut self, number: Number) -> u32 {
        self.chunks.push(ChunkPlan { len: 0, number });
        (self.chunks.len() - 1) as u32
    }

    fn extend(&mut self, chunk: u32, n: u32) {
        let plan = &mut self.chunks[chunk as usize];
        let offset = plan.len;
        plan.len += n;
        match self.extents.last_mut() {
            Some(e) if e.chunk == chunk => e.len += n,
            _ => self.extents.push(Extent {
                chunk,
                offset,
                len: n,
            }),
        }
    }
}

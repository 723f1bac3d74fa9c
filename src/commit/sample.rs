//! Whether a region of a file that is being committed is close to one that is stored, judged by a few stretches of both.

use super::known::{Known, Plan};
use crate::codec;
use crate::error::Result;
use crate::format::Source;
use crate::rebuild::{NodeSource, Rebuilder};

/// A sample is this many stretches …
const STRETCHES: u64 = 8;
/// … of at most this many bytes …
const STRETCH: u64 = 512;
/// … from the first so many bytes of the region: no more than lie in its first chunk.
const WINDOW: u64 = 512 << 10;

/// What a sample shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Closeness {
    /// The base is equal, once it is converted.
    Exact,
    /// Next to nothing without a base: there is no need to look for one.
    Idle,
    /// A base would save little or nothing.
    Far,
    /// Encoded sizes of the sample with the base and without.
    Close { with: usize, alone: usize },
}

/// Takes samples.
pub(super) struct Probe<'a> {
    rebuilder: &'a Rebuilder,
    source: &'a dyn NodeSource,
    file: &'a dyn Source,
    plan: &'a Plan,
}

impl<'a> Probe<'a> {
    pub(super) fn new(
        rebuilder: &'a Rebuilder,
        source: &'a dyn NodeSource,
        file: &'a dyn Source,
        plan: &'a Plan,
    ) -> Self {
        Probe {
            rebuilder,
            source,
            file,
            plan,
        }
    }

    /// Compares a region of the file with one of as many elements. What cannot be read is not close.
    pub(super) fn compare(&self, region: usize, known: &Known, other: usize) -> Closeness {
        self.try_compare(region, known, other).unwrap_or_else(|e| {
            log::debug!("no sample of a base: {e}");
            Closeness::Far
        })
    }

    fn try_compare(&self, region: usize, known: &Known, other: usize) -> Result<Closeness> {
        let r = &self.plan.regions[region];
        let (window, number) = (r.len.min(WINDOW), r.dtype.number());
        let other_number = known.plan.regions[other].dtype.number();
        let (width, other_width) = (number.width() as u64, other_number.width() as u64);
        let len = (window / STRETCHES).min(STRETCH) & !7;
        let len = if len == 0 { window } else { len };
        let (mut raw, mut base) = (Vec::new(), Vec::new());
        for i in 0..STRETCHES.min(window / len) {
            let at = (i * (window / STRETCHES)) & !7;
            let start = raw.len();
            raw.resize(start + len as usize, 0);
            self.file.read_at(r.offset + at, &mut raw[start..])?;
            let (at, len) = (at / width * other_width, len / width * other_width);
            self.read(known, other, at, len, &mut base)?;
        }
        if other_number != number {
            let stored = std::mem::take(&mut base);
            codec::convert(other_number, &stored, number, &mut base);
        }
        if base.len() != raw.len() {
            return Ok(Closeness::Far);
        }
        if base == raw {
            return Ok(Closeness::Exact);
        }
        let alone = codec::encode(&raw, number, None).payload.len();
        let with = codec::encode(&raw, number, Some(&base)).payload.len();
        Ok(match () {
            () if alone <= raw.len() / 16 => Closeness::Idle,
            () if with + raw.len() / 32 > alone => Closeness::Far,
            () => Closeness::Close { with, alone },
        })
    }

    /// Appends bytes of a stored region.
    fn read(&self, known: &Known, region: usize, at: u64, len: u64, to: &mut Vec<u8>) -> Result<()> {
        for s in known.plan.stretches(region, at, len) {
            let Some(id) = known.chunks.get(s.chunk as usize) else {
                continue;
            };
            let chunk = self.rebuilder.chunk(self.source, id)?;
            let (from, to_) = (s.at as usize, s.at as usize + s.len as usize);
            to.extend_from_slice(chunk.get(from..to_).unwrap_or_default());
        }
        Ok(())
    }
}

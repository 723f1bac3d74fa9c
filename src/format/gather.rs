//! Reads a range of a strided tensor as if its elements lay in row-major order.

use super::source::Source;
use crate::error::{Error, Result};

/// A gap between wanted elements is read over, not skipped, up to this many bytes at a time.
const WINDOW: u64 = 64 << 10;

/// A strided tensor in a file. Lengths and offsets in bytes, shape and strides in elements.
pub(super) struct Gather<'a> {
    pub(super) offset: u64,
    pub(super) item: u64,
    pub(super) shape: &'a [u64],
    pub(super) strides: &'a [u64],
}

/// A box of consecutive indices per dimension, whose elements are consecutive in row-major order only in the last
/// dimension: `(file step, output step, count)` per dimension, steps in elements.
type Steps = Vec<(u64, u64, u64)>;

impl Gather<'_> {
    /// Fills `buf` with the bytes at `from` of the row-major form.
    pub(super) fn read(&self, file: &dyn Source, from: u64, buf: &mut [u8]) -> Result<()> {
        let item = self.item.max(1);
        let to = from + buf.len() as u64;
        // Whole elements are gathered straight into `buf`, cut ones at either end through a small one of their own.
        let mut at = from;
        while at < to {
            let (index, skip) = (at / item, at % item);
            let whole = (to - at) / item;
            if skip == 0 && whole > 0 {
                let start = (at - from) as usize;
                self.elements(
                    file,
                    index,
                    whole,
                    &mut buf[start..start + (whole * item) as usize],
                )?;
                at += whole * item;
                continue;
            }
            let n = (item - skip).min(to - at);
            let mut one = vec![0; item as usize];
            self.elements(file, index, 1, &mut one)?;
            let start = (at - from) as usize;
            buf[start..start + n as usize].copy_from_slice(&one[skip as usize..(skip + n) as usize]);
            at += n;
        }
        Ok(())
    }

    /// Gathers `count` elements from row-major index `first`, as few boxes: each takes the longest run of whole
    /// sub-arrays that fits, so there are at most two per dimension.
    fn elements(&self, file: &dyn Source, first: u64, count: u64, out: &mut [u8]) -> Result<()> {
        let dims = self.shape.len();
        // sizes[d]: elements of one sub-array of dimensions d and up.
        let mut sizes = vec![1u64; dims + 1];
        for d in (0..dims).rev() {
            sizes[d] = sizes[d + 1].saturating_mul(self.shape[d]);
        }
        let (mut index, end) = (first, first + count);
        while index < end {
            // The largest sub-arrays that start here and end in time.
            let aligned = |d: &usize| index.is_multiple_of(sizes[*d]) && index + sizes[*d] <= end;
            let d = (0..=dims).find(aligned).unwrap_or(dims);
            let run = match d.checked_sub(1) {
                Some(p) => (self.shape[p] - index / sizes[d] % self.shape[p]).min((end - index) / sizes[d]),
                None => 1,
            };
            let mut at = self.offset;
            for p in 0..d {
                at += index / sizes[p + 1] % self.shape[p] * self.strides[p] * self.item;
            }
            let mut steps: Steps = (d..dims)
                .map(|p| (self.strides[p], sizes[p + 1], self.shape[p]))
                .collect();
            if let Some(p) = d.checked_sub(1) {
                steps.push((self.strides[p], sizes[d], run));
            }
            let done = ((index - first) * self.item) as usize;
            let len = (run * sizes[d] * self.item) as usize;
            self.gather_box(file, at, steps, &mut out[done..done + len])?;
            index += run * sizes[d];
        }
        Ok(())
    }

    /// Gathers one box in the order of the file, so that reads are as long and as local as the strides allow.
    fn gather_box(&self, file: &dyn Source, at: u64, mut steps: Steps, out: &mut [u8]) -> Result<()> {
        steps.retain(|(_, _, count)| *count != 1);
        steps.sort_by_key(|(step, _, _)| std::cmp::Reverse(*step));
        let (step, out_step, count) = steps.pop().unwrap_or((1, 1, 1));
        let mut index = vec![0u64; steps.len()];
        let mut window = Vec::new();
        loop {
            let mut place = (at, 0u64);
            for (i, (step, out_step, _)) in index.iter().zip(&steps) {
                place = (place.0 + i * step * self.item, place.1 + i * out_step * self.item);
            }
            self.gather_row(file, place, (step, out_step, count), &mut window, out)?;
            // Count up, last dimension fastest.
            let Some(d) = (0..steps.len()).rev().find(|d| index[*d] + 1 < steps[*d].2) else {
                return Ok(());
            };
            index[d] += 1;
            index[d + 1..].fill(0);
        }
    }

    fn gather_row(
        &self,
        file: &dyn Source,
        (at, out_at): (u64, u64),
        (step, out_step, count): (u64, u64, u64),
        window: &mut Vec<u8>,
        out: &mut [u8],
    ) -> Result<()> {
        let item = self.item as usize;
        if step == 1 && out_step == 1 {
            let n = count as usize * item;
            let target = out.get_mut(out_at as usize..out_at as usize + n);
            return file.read_at(
                at,
                target.ok_or_else(|| Error::damage("a view's strides contradict its shape"))?,
            );
        }
        // As many elements at a time as one window spans.
        let per_window = (WINDOW / (step * self.item).max(1)).max(1);
        let mut i = 0;
        while i < count {
            let n = if step == 0 {
                count - i
            } else {
                per_window.min(count - i)
            };
            let span = (n - 1) * step * self.item + self.item;
            window.resize(span as usize, 0);
            file.read_at(at + i * step * self.item, window)?;
            for k in 0..n {
                let from = (k * step * self.item) as usize;
                let to = (out_at + (i + k) * out_step * self.item) as usize;
                out[to..to + item].copy_from_slice(&window[from..from + item]);
            }
            i += n;
        }
        Ok(())
    }
}

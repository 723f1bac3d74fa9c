//! Differences in classes, and in bands of blocks. Blocks that moved more than others of like magnitudes are coded apart from those
//! that moved less: an optimiser moves some rows and columns further than others. And those that a moment's decay has only made
//! smaller, as no gradient came in, are coded against their base times that factor.

use super::decode::decode_words;
use super::encode::{Pair, encode_words};
use super::{Order, for_order};
use crate::bytes::{Reader, Writer};
use crate::codec::cpu::{self, BLOCK, Cpu, Work};
use crate::codec::lanes::{Word, for_width};
use crate::codec::{Input, Job, diff, plane, scratch};
use crate::error::{Error, Result};
use crate::tensor::Number;

/// Bands of a chunk by how far they moved, at most; one more is of those that decayed.
const BANDS: usize = 8;
/// Blocks of a band on average, at least: each has tables of its own.
const LEAST: usize = 1024;
/// The middle half of the blocks must spread over so many bits, summed over a block's elements, for bands to pay.
const SPREAD: i64 = 40;
/// Lengths are summed in units of two to minus this many bits.
const UNIT: u32 = 8;
/// Blocks that decayed, at least, for a band of their own.
const LEAST_DECAYED: usize = 8;

fn order(number: Number) -> Order {
    Order::of(number, Order::Magnitudes)
}

pub(in crate::codec) fn encode(input: Input<'_>) -> Option<Vec<u8>> {
    let (raw, base, tail) = diff::pair(input)?;
    let mut w = Writer::new();
    for_width!(input.number, encode_bands(raw, base, input.number, &mut w))?;
    w.raw(tail);
    Some(w.finish())
}

fn encode_bands<W: Word>(raw: &[u8], base: &[u8], number: Number, w: &mut Writer) -> Option<()> {
    let order = order(number);
    let (bands, factors) = divide::<W>(raw, base, number)?;
    w.u8(factors.len() as u8);
    for f in &factors {
        w.u32(f.to_bits());
    }
    let mut coded = Vec::new();
    plane::put(&bands, &mut coded);
    w.raw(&coded);
    for (band, factor) in (0..).zip(&factors) {
        scratch::with_buffer(|raws| {
            scratch::with_buffer(|bases| {
                gather::<W>(raw, &bands, band, raws);
                gather::<W>(base, &bands, band, bases);
                scale(bases, *factor);
                let mut coded = Writer::new();
                if !raws.is_empty() {
                    encode_words::<W>(raws, bases, order, &mut coded);
                }
                w.blob(&coded.finish());
            });
        });
    }
    Some(())
}

/// The band of each block, and the factor of each band; nothing if it is not worth it.
fn divide<W: Word>(raw: &[u8], base: &[u8], number: Number) -> Option<(Vec<u8>, Vec<f32>)> {
    let decay = if number == Number::F32 {
        Decay::find(raw, base)
    } else {
        None
    };
    let moved = cpu::best(Moved(Pair::<W>::new(raw, base, order(number))));
    let mut sorted = moved.clone();
    sorted.sort_unstable();
    let quantile = |i: usize, of: usize| sorted.get(i * sorted.len() / of).copied().unwrap_or(0);
    let mut count = (moved.len() / LEAST).clamp(1, BANDS);
    if quantile(3, 4) - quantile(1, 4) < SPREAD << UNIT {
        count = 1;
    }
    if count == 1 && decay.is_none() {
        return None;
    }
    let limits: Vec<i64> = (1..count).map(|i| quantile(i, count)).collect();
    let band = |m: &i64| limits.iter().filter(|l| m >= l).count() as u8;
    let mut bands: Vec<u8> = moved.iter().map(band).collect();
    let mut factors = vec![1.0; count];
    if let Some(decay) = decay {
        for block in decay.blocks {
            bands[block] = count as u8;
        }
        factors.push(decay.factor);
    }
    Some((bands, factors))
}

/// Appends the blocks of one band.
fn gather<W: Word>(from: &[u8], bands: &[u8], band: u8, to: &mut Vec<u8>) {
    let blocks = from.chunks(BLOCK * W::WIDTH).zip(bands);
    for (block, _) in blocks.filter(|(_, b)| **b == band) {
        to.extend_from_slice(block);
    }
}

/// Multiplies f32 elements, rounding to the nearest. What is not finite stays as it is: processors differ in the bits of NaNs.
fn scale(elements: &mut [u8], factor: f32) {
    if factor == 1.0 {
        return;
    }
    for bytes in elements.as_chunks_mut().0 {
        let x = f32::from_le_bytes(*bytes);
        let scaled = x * factor;
        if scaled.is_finite() {
            *bytes = scaled.to_le_bytes();
        }
    }
}

/// Whole blocks that are their base times one factor, but for rounding.
struct Decay {
    factor: f32,
    blocks: Vec<usize>,
}

impl Decay {
    fn find(raw: &[u8], base: &[u8]) -> Option<Decay> {
        let whole = |bytes| <[u8]>::as_chunks::<{ 4 * BLOCK }>(bytes).0;
        let mut found: Vec<(f32, usize)> = whole(raw)
            .iter()
            .zip(whole(base))
            .enumerate()
            .filter_map(|(i, (raw, base))| Some((ratio(raw, base)?, i)))
            .collect();
        found.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let factor = found.get(found.len() / 2)?.0;
        found.retain(|(f, _)| (f / factor - 1.0).abs() < 1e-5);
        (found.len() >= LEAST_DECAYED).then(|| Decay {
            factor,
            blocks: found.into_iter().map(|(_, i)| i).collect(),
        })
    }
}

/// The ratio of a block of f32 to its base, if it is nearly the same for all elements, and not nearly one.
fn ratio(raw: &[u8; 4 * BLOCK], base: &[u8; 4 * BLOCK]) -> Option<f32> {
    let floats = |bytes: &[u8; 4 * BLOCK]| {
        let mut floats = [0.0; BLOCK];
        for (f, b) in floats.iter_mut().zip(bytes.as_chunks().0) {
            *f = f32::from_le_bytes(*b);
        }
        floats
    };
    let (raw, base) = (floats(raw), floats(base));
    let pairs = || raw.iter().zip(&base);
    let (first, first_base) = pairs().max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))?;
    let ratio = first / first_base;
    let near = |(x, b): (&f32, &f32)| (x - b * ratio).abs() <= (x.abs() * 1e-5).max(f32::MIN_POSITIVE);
    let changed = ratio.is_finite() && ratio != 0.0 && (ratio - 1.0).abs() > 1e-3;
    (changed && pairs().all(near)).then_some(ratio)
}

/// For each block, how many bits longer its differences are than those of elements of the same magnitudes on average.
struct Moved<'a, W>(Pair<'a, W>);

impl<W: Word> Work for Moved<'_, W> {
    type Output = Vec<i64>;

    #[inline(always)]
    fn run(self, _: impl Cpu) -> Vec<i64> {
        for_order!(self.0.order, self.by())
    }
}

impl<W: Word> Moved<'_, W> {
    #[inline(always)]
    fn by(self, order: Order) -> Vec<i64> {
        let Moved(pair) = self;
        let mut sums = [(0u64, 0u64); 256];
        for i in 0..pair.blocks() {
            let block = pair.block(i);
            for (m, length) in block.lengths(order) {
                let (sum, n) = &mut sums[usize::from(m)];
                (*sum, *n) = (*sum + u64::from(length), *n + 1);
            }
        }
        let expected = sums.map(|(sum, n)| ((sum << UNIT) / n.max(1)).cast_signed());
        let more = |(m, length): (u8, u32)| (i64::from(length) << UNIT) - expected[usize::from(m)];
        let block = |i| pair.block(i).lengths(order).map(more).sum();
        (0..pair.blocks()).map(block).collect()
    }
}

pub(in crate::codec) fn decode(job: Job<'_>) -> Result<()> {
    let number = job.number;
    diff::onto(job, "difference in bands", |r, raw| {
        for_width!(number, decode_bands(r, number, raw))
    })
}

fn decode_bands<W: Word>(r: &mut Reader<'_>, number: Number, raw: &mut [u8]) -> Result<()> {
    let count = r.u8()?;
    if count == 0 || usize::from(count) > BANDS + 1 {
        return Err(Error::damage(format!("{count} bands")));
    }
    let factors = (0..count).map(|_| Ok(f32::from_bits(r.u32()?)));
    let factors = factors.collect::<Result<Vec<f32>>>()?;
    if number != Number::F32 && factors.iter().any(|f| *f != 1.0) {
        return Err(Error::damage("a factor for elements that are not f32"));
    }
    scratch::with_bytes(raw.len().div_ceil(BLOCK * W::WIDTH), |room| {
        let bands = plane::take(r, room)?;
        if bands.iter().any(|b| *b >= count) {
            return Err(Error::damage("a block lies in no band"));
        }
        for (band, factor) in (0..).zip(factors) {
            scratch::with_buffer(|of_band| {
                gather::<W>(raw, bands, band, of_band);
                scale(of_band, factor);
                let mut r = Reader::new(r.blob()?, "band");
                if !of_band.is_empty() {
                    decode_words::<W>(&mut r, order(number), of_band)?;
                }
                r.finish()?;
                let mut from = &of_band[..];
                let blocks = raw.chunks_mut(BLOCK * W::WIDTH).zip(bands);
                for (block, _) in blocks.filter(|(_, b)| **b == band) {
                    let (head, rest) = from.split_at(block.len().min(from.len()));
                    block.copy_from_slice(head);
                    from = rest;
                }
                Ok(())
            })?;
        }
        Ok(())
    })
}

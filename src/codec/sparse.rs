//! Differences to the base where few elements change: how many unchanged elements lie before each changed one, and its difference.
//! Applying one costs what it stores, not what it covers.

use super::diff::{onto, pair};
use super::lanes::{Planes, STRETCH, Word, for_width, merge};
use super::planes::{put_all, take_all};
use super::{Input, Job, plane, scratch};
use crate::bytes::Writer;
use crate::error::{Error, Result};
use crate::tensor::Number;

/// A gap byte that means: this many unchanged elements, and the gap goes on.
const MORE: u8 = 255;

pub(super) fn encode(input: Input<'_>) -> Option<Vec<u8>> {
    let (raw, base, tail) = pair(input)?;
    let mut out = scratch::with_buffer(|gaps| {
        scratch::with_buffer(|values| {
            for_width!(input.number, collect(raw, base, input.number, gaps, values));
            write(gaps, values, input.number)
        })
    });
    out.extend_from_slice(tail);
    Some(out)
}

/// Finds the changed elements: gap bytes, and the zigzag differences as planes.
fn collect<W: Word>(raw: &[u8], base: &[u8], number: Number, gaps: &mut Vec<u8>, values: &mut Vec<u8>) {
    let n = raw.len() / W::WIDTH;
    let (mut x, mut b) = ([W::default(); STRETCH], [W::default(); STRETCH]);
    let mut hits = [0u16; STRETCH];
    let mut flat: Vec<W> = Vec::new();
    let mut next = 0;
    for start in (0..n).step_by(STRETCH) {
        let len = STRETCH.min(n - start);
        let bytes = start * W::WIDTH..(start + len) * W::WIDTH;
        if raw[bytes.clone()] == base[bytes] {
            continue;
        }
        W::load(&raw[start * W::WIDTH..], &mut x[..len]);
        W::load(&base[start * W::WIDTH..], &mut b[..len]);
        let mut m = 0;
        for i in 0..len {
            hits[m] = i as u16;
            m += usize::from(x[i] != b[i]);
        }
        for i in hits[..m].iter().map(|i| usize::from(*i)) {
            let mut gap = start + i - next;
            while gap >= usize::from(MORE) {
                gaps.push(MORE);
                gap -= usize::from(MORE);
            }
            gaps.push(gap as u8);
            next = start + i + 1;
            flat.push(if number.is_float() {
                x[i].ordered().zigzag_from(b[i].ordered())
            } else {
                x[i].zigzag_from(b[i])
            });
        }
    }
    values.resize(flat.len() * W::WIDTH, 0);
    for k in 0..W::WIDTH {
        let to = &mut values[k * flat.len()..(k + 1) * flat.len()];
        W::take_byte(&flat, 8 * (W::WIDTH - 1 - k) as u32, to);
    }
}

fn write(gaps: &[u8], values: &[u8], number: Number) -> Vec<u8> {
    let mut w = Writer::new();
    w.varint((values.len() / number.width()) as u64)
        .varint(gaps.len() as u64);
    let mut out = w.finish();
    plane::put(gaps, &mut out);
    put_all(values, number, &mut out);
    out
}

pub(super) fn decode(job: Job<'_>) -> Result<()> {
    let number = job.number;
    onto(job, "sparse difference", |r, raw| {
        let n = raw.len() / number.width();
        let count = at_most(r.varint()?, n)?;
        let gap_bytes = at_most(r.varint()?, count + n / usize::from(MORE))?;
        scratch::with_bytes(gap_bytes, |room| {
            let gaps = plane::take(r, room)?;
            scratch::with_bytes(count * number.width(), |room| {
                let values = take_all(r, number, room)?;
                for_width!(number, apply(gaps, &values, number, raw))
            })
        })
    })
}

fn at_most(v: u64, limit: usize) -> Result<usize> {
    match usize::try_from(v) {
        Ok(v) if v <= limit => Ok(v),
        _ => Err(Error::damage(format!(
            "sparse difference counts {v} where {limit} is the most"
        ))),
    }
}

fn apply<W: Word>(gaps: &[u8], values: &Planes<'_>, number: Number, raw: &mut [u8]) -> Result<()> {
    let bad = || Error::damage("sparse difference's gaps do not fit its values or the chunk");
    let mut flat = Vec::with_capacity(values[0].len());
    merge::<W>(values, |_, words| flat.extend_from_slice(words));
    let float = number.is_float();
    let mut flat = flat.iter();
    let mut at = 0;
    for gap in gaps {
        at += usize::from(*gap);
        if *gap == MORE {
            continue;
        }
        let (Some(z), Some(b)) = (flat.next(), W::get(raw, at)) else {
            return Err(bad());
        };
        let x = if float {
            z.unzigzag_onto(b.ordered()).unordered()
        } else {
            z.unzigzag_onto(b)
        };
        W::set(raw, at, x);
        at += 1;
    }
    // A gap may not be left open, nor a value unplaced.
    if flat.next().is_some() || gaps.last() == Some(&MORE) {
        return Err(bad());
    }
    Ok(())
}

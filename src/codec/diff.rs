//! Byte planes of a chunk's difference to its base: of order-mapped numbers, so that a float's next neighbour differs by one, or of
//! bits.

use super::cpu::{self, Cpu, Work};
use super::lanes::{Planes, STRETCH, Word, for_width, merge, split, take_tail, whole};
use super::planes::{put_all, take_all};
use super::{Input, Job, scratch};
use crate::bytes::Reader;
use crate::error::{Error, Result};
use crate::tensor::Number;
use std::marker::PhantomData;

/// How an element and its base become a small number.
#[derive(Clone, Copy)]
enum Op {
    /// Zigzag difference of integers.
    Integer,
    /// Zigzag difference of order-mapped floats.
    Float,
    /// Exclusive or.
    Xor,
    /// Exclusive or of floats, the sign at the bottom.
    XorFloat,
}

impl Op {
    fn diff(number: Number) -> Self {
        if number.is_float() { Op::Float } else { Op::Integer }
    }

    fn xor(number: Number) -> Self {
        if number.is_float() { Op::XorFloat } else { Op::Xor }
    }
}

pub(super) fn encode_diff(input: Input<'_>) -> Option<Vec<u8>> {
    encode(input, Op::diff(input.number))
}

pub(super) fn encode_xor(input: Input<'_>) -> Option<Vec<u8>> {
    encode(input, Op::xor(input.number))
}

pub(super) fn decode_diff(job: Job<'_>) -> Result<()> {
    decode(Op::diff(job.number), job)
}

pub(super) fn decode_xor(job: Job<'_>) -> Result<()> {
    decode(Op::xor(job.number), job)
}

fn encode(input: Input<'_>, op: Op) -> Option<Vec<u8>> {
    let (raw, base, tail) = pair(input)?;
    let mut out = Vec::new();
    scratch::with_bytes(raw.len(), |planes| {
        for_width!(input.number, split_against(op, raw, base, planes));
        put_all(planes, input.number, &mut out);
    });
    out.extend_from_slice(tail);
    Some(out)
}

fn split_against<W: Word>(op: Op, raw: &[u8], base: &[u8], planes: &mut [u8]) {
    match op {
        Op::Integer => split_with::<W>(raw, base, planes, |x, b| x.zigzag_from(b)),
        Op::Float => split_with::<W>(raw, base, planes, |x, b| x.ordered().zigzag_from(b.ordered())),
        Op::Xor => split_with::<W>(raw, base, planes, |x, b| x.xor(b)),
        Op::XorFloat => split_with::<W>(raw, base, planes, |x, b| x.xor(b).sign_down()),
    }
}

fn split_with<W: Word>(raw: &[u8], base: &[u8], planes: &mut [u8], f: impl Fn(W, W) -> W) {
    let mut bases = [W::default(); STRETCH];
    split::<W>(raw, planes, |at, words| {
        let bases = &mut bases[..words.len()];
        W::load(&base[at..], bases);
        words.iter_mut().zip(bases).for_each(|(x, b)| *x = f(*x, *b));
    });
}

fn decode(op: Op, job: Job<'_>) -> Result<()> {
    let number = job.number;
    onto(job, "difference", |r, raw| {
        scratch::with_bytes(raw.len(), |room| {
            let planes = take_all(r, number, room)?;
            for_width!(number, merge_onto(op, &planes, raw));
            Ok(())
        })
    })
}

/// Decodes a difference: `change` makes the whole elements of the base those of the chunk, then the tail follows.
pub(super) fn onto(
    job: Job<'_>,
    what: &'static str,
    change: impl FnOnce(&mut Reader<'_>, &mut [u8]) -> Result<()>,
) -> Result<()> {
    let Job {
        number,
        payload,
        raw_len,
        buf,
    } = job;
    check_base(buf, raw_len)?;
    let mut r = Reader::new(payload, what);
    let (raw, tail) = buf.split_at_mut(raw_len - raw_len % number.width());
    change(&mut r, raw)?;
    take_tail(r, tail)
}

/// The whole elements of a chunk, those of its base, and the chunk's tail; nothing without a base of equal length, or any element.
pub(super) fn pair(input: Input<'_>) -> Option<(&[u8], &[u8], &[u8])> {
    let base = input.base.filter(|b| b.len() == input.raw.len())?;
    let (raw, tail) = whole(input.raw, input.number);
    (!raw.is_empty()).then(|| (raw, &base[..raw.len()], tail))
}

/// A difference needs a base of the chunk's own length.
fn check_base(base: &[u8], raw_len: usize) -> Result<()> {
    if base.len() != raw_len {
        return Err(Error::damage(format!(
            "base has {} bytes, the chunk {raw_len}",
            base.len()
        )));
    }
    Ok(())
}

fn merge_onto<W: Word>(op: Op, planes: &Planes<'_>, raw: &mut [u8]) {
    match op {
        Op::Integer => merge_with::<W>(planes, raw, |z, b| z.unzigzag_onto(b)),
        Op::Float => merge_with::<W>(planes, raw, |z, b| z.unzigzag_onto(b.ordered()).unordered()),
        Op::Xor => merge_with::<W>(planes, raw, |z, b| z.xor(b)),
        Op::XorFloat => merge_with::<W>(planes, raw, |z, b| z.sign_up().xor(b)),
    }
}

fn merge_with<W: Word>(planes: &Planes<'_>, raw: &mut [u8], f: impl Fn(W, W) -> W) {
    cpu::best(MergeOnto::<W, _> {
        planes,
        raw,
        f,
        word: PhantomData,
    });
}

/// Changes the elements of a chunk by `f`, which gets that of the planes first.
struct MergeOnto<'a, W, F> {
    planes: &'a Planes<'a>,
    raw: &'a mut [u8],
    f: F,
    word: PhantomData<W>,
}

impl<W: Word, F: Fn(W, W) -> W> Work for MergeOnto<'_, W, F> {
    type Output = ();

    #[inline(always)]
    fn run(self, _: impl Cpu) {
        let mut bases = [W::default(); STRETCH];
        merge::<W>(self.planes, |at, words| {
            let raw = &mut self.raw[at..at + words.len() * W::WIDTH];
            let bases = &mut bases[..words.len()];
            W::load(raw, bases);
            words
                .iter_mut()
                .zip(bases)
                .for_each(|(z, b)| *z = (self.f)(*z, *b));
            W::store(words, raw);
        });
    }
}

//! Byte planes of a chunk by itself. A float's sign goes to the bottom first, so that bf16 and f32 have their exponent in a plane of
//! its own (the idea of ZipNN, arXiv 2411.05239).

use super::lanes::{Word, for_width, merge, split, take_tail, whole};
use super::{Input, Job, plane, scratch};
use crate::bytes::Reader;
use crate::error::Result;
use crate::tensor::Number;

pub(super) fn encode(input: Input<'_>) -> Option<Vec<u8>> {
    let (raw, tail) = whole(input.raw, input.number);
    if raw.is_empty() {
        return None;
    }
    let mut out = Vec::new();
    scratch::with_bytes(raw.len(), |planes| {
        for_width!(input.number, split_alone(raw, input.number, planes));
        put_all(planes, input.number, &mut out);
    });
    out.extend_from_slice(tail);
    Some(out)
}

fn split_alone<W: Word>(raw: &[u8], number: Number, planes: &mut [u8]) {
    if number.is_float() {
        split::<W>(raw, planes, |_, words| {
            words.iter_mut().for_each(|w| *w = w.sign_down())
        });
    } else {
        split::<W>(raw, planes, |_, _| {});
    }
}

pub(super) fn decode(job: Job<'_>) -> Result<()> {
    let Job {
        number,
        payload,
        raw_len,
        buf,
    } = job;
    let tail = raw_len % number.width();
    let mut r = Reader::new(payload, "planes");
    buf.resize(raw_len, 0);
    let (raw, tail) = buf.split_at_mut(raw_len - tail);
    scratch::with_bytes(raw.len(), |planes| {
        take_all(&mut r, number, planes)?;
        for_width!(number, merge_alone(planes, number, raw));
        Ok(())
    })?;
    take_tail(r, tail)
}

fn merge_alone<W: Word>(planes: &[u8], number: Number, raw: &mut [u8]) {
    if number.is_float() {
        merge::<W>(planes, raw, |_, words| {
            words.iter_mut().for_each(|w| *w = w.sign_up())
        });
    } else {
        merge::<W>(planes, raw, |_, _| {});
    }
}

/// Appends every plane, most significant first.
pub(super) fn put_all(planes: &[u8], number: Number, out: &mut Vec<u8>) {
    let n = planes.len() / number.width();
    for k in 0..number.width() {
        plane::put(&planes[k * n..(k + 1) * n], out);
    }
}

/// Reads every plane.
pub(super) fn take_all(r: &mut Reader<'_>, number: Number, planes: &mut [u8]) -> Result<()> {
    let n = planes.len() / number.width();
    for k in 0..number.width() {
        plane::take(r, &mut planes[k * n..(k + 1) * n])?;
    }
    Ok(())
}

//! Byte planes of a chunk by itself. A float's sign goes to the bottom first, so that bf16 and f32 have their exponent in a plane of
//! its own (the idea of ZipNN, arXiv 2411.05239).

use super::cpu::{self, Cpu, Work};
use super::lanes::{Planes, STRETCH, Word, for_width, merge, split, whole};
use super::{Input, Job, plane, scratch};
use crate::bytes::Reader;
use crate::error::Result;
use crate::tensor::Number;
use std::marker::PhantomData;

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
    buf.clear();
    buf.reserve(raw_len);
    scratch::with_bytes(raw_len - tail, |room| {
        let planes = take_all(&mut r, number, room)?;
        for_width!(number, merge_alone(&planes, number.is_float(), buf));
        Ok(())
    })?;
    buf.extend_from_slice(r.raw(tail)?);
    r.finish()
}

fn merge_alone<W: Word>(planes: &Planes<'_>, float: bool, out: &mut Vec<u8>) {
    cpu::best(Merge::<W> {
        planes,
        float,
        out,
        word: PhantomData,
    });
}

/// Appends the elements of planes.
struct Merge<'a, W> {
    planes: &'a Planes<'a>,
    float: bool,
    out: &'a mut Vec<u8>,
    word: PhantomData<W>,
}

impl<W: Word> Work for Merge<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run(self, _: impl Cpu) {
        let mut bytes = [0; 8 * STRETCH];
        merge::<W>(self.planes, |_, words| {
            if self.float {
                words.iter_mut().for_each(|w| *w = w.sign_up());
            }
            let bytes = &mut bytes[..words.len() * W::WIDTH];
            W::store(words, bytes);
            self.out.extend_from_slice(bytes);
        });
    }
}

/// Appends every plane, most significant first.
pub(super) fn put_all(planes: &[u8], number: Number, out: &mut Vec<u8>) {
    let n = planes.len() / number.width();
    for k in 0..number.width() {
        plane::put(&planes[k * n..(k + 1) * n], out);
    }
}

/// Reads every plane; there is `room` for all.
pub(super) fn take_all<'a, 'r: 'a>(
    r: &mut Reader<'r>,
    number: Number,
    room: &'a mut [u8],
) -> Result<Planes<'a>> {
    let mut planes = Planes::default();
    let n = room.len() / number.width();
    let mut rooms = room.chunks_mut(n.max(1));
    for plane in planes.iter_mut().take(number.width()) {
        *plane = plane::take(r, rooms.next().unwrap_or_default())?;
    }
    Ok(planes)
}

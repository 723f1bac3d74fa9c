//! One plane: bytes of like kind, coded by themselves. Its length is known to the decoder.

use super::frame::{self, Effort};
use crate::bytes::Reader;
use crate::error::{Error, Result};

/// As they are.
const RAW: u8 = 0;
/// One byte, repeated.
const CONSTANT: u8 = 1;
/// A varint length and a zstd frame of that length.
const ZSTD: u8 = 2;

/// Appends a plane in the smallest form.
pub(super) fn put(plane: &[u8], out: &mut Vec<u8>) {
    if let [first, rest @ ..] = plane
        && rest == &plane[..rest.len()]
    {
        out.extend_from_slice(&[CONSTANT, *first]);
        return;
    }
    let start = out.len();
    out.push(ZSTD);
    if worth_coding(plane) {
        let mut frame = Vec::new();
        if frame::compress(Effort::Fast, plane, plane.len().saturating_sub(3), &mut frame) {
            put_varint(frame.len(), out);
            out.extend_from_slice(&frame);
            return;
        }
    }
    out.truncate(start);
    out.push(RAW);
    out.extend_from_slice(plane);
}

fn worth_coding(plane: &[u8]) -> bool {
    plane.len() > 8
}

fn put_varint(mut v: usize, out: &mut Vec<u8>) {
    while v >= 0x80 {
        out.push(v as u8 | 0x80);
        v >>= 7;
    }
    out.push(v as u8);
}

/// Reads a plane into all of `to`.
pub(super) fn take(r: &mut Reader<'_>, to: &mut [u8]) -> Result<()> {
    match r.u8()? {
        RAW => to.copy_from_slice(r.raw(to.len())?),
        CONSTANT => to.fill(r.u8()?),
        ZSTD => frame::decompress(r.blob()?, to)?,
        kind => return Err(Error::damage(format!("plane of unknown kind {kind}"))),
    }
    Ok(())
}

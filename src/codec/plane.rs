//! One plane: bytes of like kind, coded by themselves. Its length is known to the decoder.

use super::frame::{self, Effort};
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};

/// As they are.
const RAW: u8 = 0;
/// One byte, repeated.
const CONSTANT: u8 = 1;
/// A varint length and a zstd frame of that length.
const ZSTD: u8 = 2;

/// Planes up to this length (bytes) are tried in every way.
const SMALL: usize = 4 << 10;

/// Appends a plane in the form that is smallest for its cost.
pub(super) fn put(plane: &[u8], out: &mut Vec<u8>) {
    if let [first, rest @ ..] = plane
        && rest == &plane[..rest.len()]
    {
        out.extend_from_slice(&[CONSTANT, *first]);
        return;
    }
    let mut best: Option<Vec<u8>> = None;
    // A frame must earn its decoding: save a 128th.
    let mut limit = plane.len() - plane.len() / 128;
    for effort in efforts(plane) {
        let mut frame = Vec::new();
        if frame::compress(effort, plane, limit.saturating_sub(2), &mut frame) {
            limit = frame.len();
            best = Some(frame);
        }
    }
    match best {
        Some(frame) => {
            let mut w = Writer::new();
            w.u8(ZSTD).blob(&frame);
            out.extend_from_slice(&w.finish());
        }
        None => {
            out.push(RAW);
            out.extend_from_slice(plane);
        }
    }
}

/// The ways to code a plane that a sample of it does not rule out.
fn efforts(plane: &[u8]) -> Vec<Effort> {
    if plane.len() <= SMALL {
        return vec![Effort::Entropy, Effort::Fast];
    }
    let stretch = SMALL / 4;
    let mut sample = Vec::with_capacity(4 * stretch);
    for i in 0..4 {
        let at = (plane.len() - stretch) / 3 * i;
        sample.extend_from_slice(&plane[at..at + stretch]);
    }
    let size = |effort| {
        let mut frame = Vec::new();
        frame::compress(effort, &sample, sample.len(), &mut frame);
        if frame.is_empty() {
            sample.len()
        } else {
            frame.len()
        }
    };
    let (entropy, fast) = (size(Effort::Entropy), size(Effort::Fast));
    if entropy.min(fast) > sample.len() - sample.len() / 128 {
        Vec::new()
    } else if fast < entropy - entropy / 64 {
        vec![Effort::Fast]
    } else {
        vec![Effort::Entropy]
    }
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

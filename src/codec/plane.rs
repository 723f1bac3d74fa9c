//! One plane: bytes of like kind, coded by themselves. Its length is known to the decoder.

use super::frame::{self, Effort};
use super::rans::{self, Frequencies};
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};

/// As they are.
const RAW: u8 = 0;
/// One byte, repeated.
const CONSTANT: u8 = 1;
/// A varint length and a zstd frame of that length.
const ZSTD: u8 = 2;
/// A varint length and as many bytes of the entropy coder.
const ENTROPY: u8 = 3;

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
    // A form must earn its decoding: save a 128th, and the slower entropy coder another 64th.
    let mut best = (RAW, None);
    let mut limit = plane.len() - plane.len() / 128;
    let likely = likely(plane);
    for effort in likely.frames {
        let mut frame = Vec::new();
        if frame::compress(effort, plane, limit.saturating_sub(2), &mut frame) {
            limit = frame.len();
            best = (ZSTD, Some(frame));
        }
    }
    if likely.entropy
        && let Some((f, size)) = Frequencies::of(plane)
        && size < limit - limit / 64
    {
        best = (ENTROPY, Some(rans::encode(&f, plane)));
    }
    let mut w = Writer::new();
    w.u8(best.0);
    match best.1 {
        Some(coded) => w.blob(&coded),
        None => w.raw(plane),
    };
    out.extend_from_slice(&w.finish());
}

/// The ways to code a plane that a sample of it does not rule out.
struct Likely {
    frames: Vec<Effort>,
    entropy: bool,
}

fn likely(plane: &[u8]) -> Likely {
    if plane.len() <= SMALL {
        return Likely {
            frames: vec![Effort::Entropy, Effort::Fast],
            entropy: true,
        };
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
    let (huffman, matches) = (size(Effort::Entropy), size(Effort::Fast));
    let entropy = Frequencies::of(&sample).map_or(0, |f| f.1);
    let little = sample.len() - sample.len() / 128;
    let frames = if huffman.min(matches) > little {
        Vec::new()
    } else if matches < huffman - huffman / 64 {
        vec![Effort::Fast]
    } else {
        vec![Effort::Entropy]
    };
    // The sample's own table weighs more than the plane's will.
    Likely {
        frames,
        entropy: entropy < (little + 64).min(huffman.min(matches) + 64),
    }
}

/// Reads a plane into all of `to`.
pub(super) fn take(r: &mut Reader<'_>, to: &mut [u8]) -> Result<()> {
    match r.u8()? {
        RAW => to.copy_from_slice(r.raw(to.len())?),
        CONSTANT => to.fill(r.u8()?),
        ZSTD => frame::decompress(r.blob()?, to)?,
        ENTROPY => rans::decode(r.blob()?, to)?,
        kind => return Err(Error::damage(format!("plane of unknown kind {kind}"))),
    }
    Ok(())
}

//! One plane: bytes of like kind, coded by themselves. Its length is known to the decoder.

use super::fitted::{self, Fitted};
use super::frame::{self, Effort};
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
    let (mut kind, mut best) = (RAW, Vec::new());
    // A form must earn its decoding: save a 128th of the plane, and the slower entropy coder a 32nd of a frame.
    let mut limit = plane.len() - plane.len() / 128;
    for way in ways(plane) {
        match way {
            Way::Frame(effort) => {
                let mut coded = Vec::new();
                if frame::compress(effort, plane, limit.saturating_sub(2), &mut coded) {
                    limit = coded.len();
                    (kind, best) = (ZSTD, coded);
                }
            }
            Way::Entropy => {
                if let Some(f) = Fitted::of(plane)
                    && f.size() < limit - limit / 32
                {
                    (kind, best) = (ENTROPY, fitted::encode(&f, plane));
                }
            }
        }
    }
    out.push(kind);
    if kind == RAW {
        out.extend_from_slice(plane);
    } else {
        let mut w = Writer::new();
        w.blob(&best);
        out.extend_from_slice(&w.finish());
    }
}

#[derive(Clone, Copy)]
enum Way {
    Frame(Effort),
    Entropy,
}

/// The ways to code a plane that a sample of it does not rule out.
fn ways(plane: &[u8]) -> Vec<Way> {
    let fast = Way::Frame(Effort::Fast);
    let huffman = Way::Frame(Effort::Entropy);
    if plane.len() <= SMALL {
        return vec![huffman, fast, Way::Entropy];
    }
    let sample = sample(plane);
    let size = |effort| {
        let mut coded = Vec::new();
        if frame::compress(effort, &sample, sample.len(), &mut coded) {
            coded.len()
        } else {
            sample.len()
        }
    };
    let (with_fast, with_huffman) = (size(Effort::Fast), size(Effort::Entropy));
    // Huffman codes take a bit a byte where the plane is not all the same: runs are better copied.
    let runs = with_fast < sample.len() / 64;
    let (with_frame, frame) = if runs || with_fast < with_huffman - with_huffman / 64 {
        (with_fast, fast)
    } else {
        (with_huffman, huffman)
    };
    let with_entropy = Fitted::of(&sample).map_or(sample.len(), |f| f.data_size());
    if with_frame.min(with_entropy) > sample.len() - sample.len() / 128 {
        Vec::new()
    } else if with_entropy < with_frame - with_frame / 8 {
        vec![Way::Entropy]
    } else if with_entropy < with_frame - with_frame / 32 {
        vec![frame, Way::Entropy]
    } else {
        vec![frame]
    }
}

/// Four stretches of the plane, an eighth of it in all but at most 16 KiB.
fn sample(plane: &[u8]) -> Vec<u8> {
    let stretch = (plane.len() / 32).clamp(SMALL / 4, SMALL);
    let step = (plane.len() - stretch) / 3;
    (0..4)
        .flat_map(|i| &plane[i * step..i * step + stretch])
        .copied()
        .collect()
}

/// Reads a plane as long as `room`; it is there, unless it can be read where it is.
pub(super) fn take<'a, 'r: 'a>(r: &mut Reader<'r>, room: &'a mut [u8]) -> Result<&'a [u8]> {
    match r.u8()? {
        RAW => return r.raw(room.len()),
        CONSTANT => room.fill(r.u8()?),
        ZSTD => frame::decompress(r.blob()?, room)?,
        ENTROPY => fitted::decode(r.blob()?, room)?,
        kind => return Err(Error::damage(format!("plane of unknown kind {kind}"))),
    }
    Ok(room)
}

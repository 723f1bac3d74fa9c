//! Which codec for which chunk: the cheap certainties first, then a sample rules out what cannot win, then the likely winners are
//! encoded in full and compared.

use super::{Codec, Encoded, Input, encode_as, scratch};
use crate::tensor::Number;

/// Chunks up to this length (bytes) are tried with everything, until a 16th of them is enough.
const SMALL: usize = 4 << 10;
/// A difference of at most one part in so many is not compared with the chunk alone.
const TINY: usize = 32;
/// Bytes of which the difference to the base is at most one part in so many are not compared with copies from there.
const FEW: usize = 256;
/// Bytes compared at once for that.
const BLOCK: usize = 64;
/// A sample is this many stretches, spread evenly …
const STRETCHES: usize = 16;
/// … each of at most this many bytes, and a sixteenth of the chunk in all …
const STRETCH: usize = 2 << 10;
/// … but each of at least this many.
const STRETCH_LEAST: usize = 128;

pub(super) fn encode(input: Input<'_>) -> Encoded {
    for codec in [Codec::Same, Codec::Constant] {
        if let Some(payload) = (codec.row().encode)(input)
            && payload.len() < input.raw.len().max(1)
        {
            return Encoded { codec, payload };
        }
    }
    if let Some(found) = hardly_changed(input) {
        return found;
    }
    let mut best: Option<Encoded> = None;
    let classes = in_classes(input.number);
    if input.raw.len() > SMALL
        && input.number != Number::Bytes
        && let Some(payload) = (classes.row().encode)(input)
    {
        let few = payload.len() <= input.raw.len() / 4;
        let found = Encoded {
            codec: classes,
            payload,
        };
        // Of few differences bands make hardly less, but for moments, most of which may be zeros.
        let in_bands = if !few || input.number == Number::F32 && found.payload.len() > input.raw.len() / 64 {
            encode_as(Codec::DiffBands, input.raw, input.number, input.base)
        } else {
            None
        };
        let found = [Some(found), in_bands]
            .into_iter()
            .flatten()
            .min_by_key(|e| e.payload.len());
        // Tables make a sample look worse than the whole, so it is always tried; where it makes little of much, nothing else is, but
        // what hardly varies by itself: that may be smaller without a base.
        if few {
            return found.map_or_else(|| raw(input), |found| or_alone(input, found));
        }
        best = found.filter(|e| e.payload.len() < input.raw.len());
    }
    for (codec, estimate) in likely(input) {
        if best
            .as_ref()
            .is_some_and(|b| cost(b.codec, b.payload.len()) <= estimate)
        {
            continue;
        }
        if let Some(payload) = (codec.row().encode)(input)
            && payload.len() < input.raw.len()
            && best
                .as_ref()
                .is_none_or(|b| cost(codec, payload.len()) < cost(b.codec, b.payload.len()))
        {
            best = Some(Encoded { codec, payload });
        }
    }
    best.unwrap_or_else(|| raw(input))
}

/// Bytes without a type of which so few differ from the base's at the same place that looking for copies is not worth its time.
fn hardly_changed(input: Input<'_>) -> Option<Encoded> {
    let base = input.base.filter(|base| base.len() == input.raw.len())?;
    if input.number != Number::Bytes || input.raw.len() <= SMALL {
        return None;
    }
    let blocks = input.raw.chunks(BLOCK).zip(base.chunks(BLOCK));
    let changed = blocks.filter(|(x, b)| x != b).count();
    let found = (changed <= input.raw.len() / BLOCK / 16)
        .then(|| encode_as(Codec::DiffSparse, input.raw, input.number, Some(base)))??;
    (found.payload.len() <= input.raw.len() / FEW).then_some(found)
}

/// The chunk without its base, if a sample says that this is smaller, and it is.
fn or_alone(input: Input<'_>, found: Encoded) -> Encoded {
    let len = found.payload.len();
    if len <= input.raw.len() / TINY {
        return found;
    }
    let alone = Input { base: None, ..input };
    by_sample(alone, false)
        .into_iter()
        .filter(|(_, estimate)| *estimate < len)
        .filter_map(|(codec, _)| encode_as(codec, input.raw, input.number, None))
        .fold(
            found,
            |a, b| if b.payload.len() < a.payload.len() { b } else { a },
        )
}

fn raw(input: Input<'_>) -> Encoded {
    Encoded {
        codec: Codec::Raw,
        payload: input.raw.to_vec(),
    }
}

/// The codec of differences in classes.
fn in_classes(number: Number) -> Codec {
    if number.is_float() {
        Codec::DiffMagnitudes
    } else {
        Codec::DiffBuckets
    }
}

/// Stored bytes, and a 64th more for what needs its base rebuilt first.
fn cost(codec: Codec, len: usize) -> usize {
    if codec.needs_base() { len + len / 64 } else { len }
}

/// The codecs worth encoding with in full, the likeliest first, each with the cost below which a better one need not look for it.
fn likely(input: Input<'_>) -> Vec<(Codec, usize)> {
    use Codec::{DiffPlanes, DiffSparse, Planes, XorPlanes, Zstd, ZstdRef};
    if input.raw.len() <= SMALL {
        if is_unrelated(input) {
            return vec![(ZstdRef, 0), (Planes, 0), (Zstd, 0)];
        }
        return [
            in_classes(input.number),
            DiffSparse,
            DiffPlanes,
            XorPlanes,
            ZstdRef,
            Planes,
            Zstd,
        ]
        .map(|codec| (codec, input.raw.len() / 16))
        .to_vec();
    }
    // What copies from afar is invisible to a sample. zstd alone finds hardly anything that zstd with the base does not.
    let mut likely = Vec::new();
    let copies = input.number == Number::Bytes || repeats(input);
    if copies {
        likely.extend([(ZstdRef, 0), (Zstd, input.raw.len() / 2)]);
    }
    likely.extend(by_sample(input, copies));
    likely
}

/// Whether the base of bytes without a type has other bytes nearly everywhere, as a small file of a like name may have: what
/// codes differences then makes nothing smaller, and takes most of the time that such a file does.
fn is_unrelated(input: Input<'_>) -> bool {
    let same = |base: &[u8]| input.raw.iter().zip(base).filter(|(x, b)| x == b).count();
    input.number == Number::Bytes
        && input
            .base
            .is_some_and(|base| same(base) * 4 < input.raw.len().min(base.len()))
}

/// Encodes a sample with the codecs that see elements one by one, and names the two best with what they should cost.
fn by_sample(input: Input<'_>, copies: bool) -> Vec<(Codec, usize)> {
    let base = input.base.filter(|b| b.len() == input.raw.len());
    let mut estimates: Vec<(Codec, usize)> = scratch::with_buffer(|raw_sample| {
        scratch::with_buffer(|base_sample| {
            sample(input.raw, raw_sample);
            if let Some(base) = base {
                sample(base, base_sample);
            }
            let sampled = Input {
                raw: &raw_sample[..],
                base: base.is_some().then_some(&base_sample[..]),
                number: input.number,
            };
            let limit = raw_sample.len() - raw_sample.len() / 128;
            let estimate = |codec: Codec| {
                let cost = cost(codec, (codec.row().encode)(sampled)?.len());
                (cost < limit).then(|| (codec, input.raw.len() * cost / raw_sample.len()))
            };
            candidates(sampled, copies)
                .into_iter()
                .filter_map(estimate)
                .collect()
        })
    });
    estimates.sort_by_key(|e| e.1);
    estimates.truncate(2);
    estimates
}

/// What could win, judged by how many elements of the sample differ from the base.
fn candidates(sampled: Input<'_>, copies: bool) -> Vec<Codec> {
    let mut candidates = Vec::new();
    if sampled.number != Number::Bytes {
        candidates.push(Codec::Planes);
    }
    if !copies && !sampled.number.is_float() {
        candidates.push(Codec::Zstd);
    }
    if let Some(base) = sampled.base {
        let width = sampled.number.width();
        let pairs = sampled.raw.chunks_exact(width).zip(base.chunks_exact(width));
        let changed = pairs.filter(|(x, b)| x != b).count() * 64 / (sampled.raw.len() / width);
        // Fewer changes are coded better, and faster, in classes.
        if changed > 8 {
            candidates.push(Codec::DiffPlanes);
        }
        // A flipped bit is a small change of an integer's bits, not of a float's value.
        if !sampled.number.is_float() && changed > 8 {
            candidates.push(Codec::XorPlanes);
        }
    }
    candidates
}

/// Copies evenly spread stretches of `bytes`, which is longer than [`SMALL`]; whole 8-byte words, so that elements stay whole.
fn sample(bytes: &[u8], to: &mut Vec<u8>) {
    let stretch = (bytes.len() / (16 * STRETCHES)).clamp(STRETCH_LEAST, STRETCH) & !7;
    let step = (bytes.len() / STRETCHES) & !7;
    for i in 0..STRETCHES {
        to.extend_from_slice(&bytes[i * step..i * step + stretch]);
    }
}

/// Whether a good part of the chunk's 8-byte words occurs in it twice, or in a base that is shifted against it. Looks at the words
/// whose hash falls into one 64th, so that the same words are looked at wherever they lie.
fn repeats(input: Input<'_>) -> bool {
    const SLOTS: usize = 1 << 12;
    let hash = |word: u64| word.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 46;
    let chosen = |bytes: &[u8]| -> Vec<u64> {
        bytes
            .as_chunks()
            .0
            .iter()
            .map(|w| u64::from_le_bytes(*w))
            .filter(|w| hash(*w) >> 12 == 0)
            .collect()
    };
    let mut slots = vec![None; SLOTS];
    let slot = |word: u64| hash(word) as usize % SLOTS;
    if let Some(base) = input.base.filter(|b| b.len() != input.raw.len()) {
        for word in chosen(base) {
            slots[slot(word)] = Some(word);
        }
    }
    let words = chosen(input.raw);
    let found = words
        .iter()
        .filter(|w| slots[slot(**w)].replace(**w) == Some(**w))
        .count();
    words.len() >= 16 && found * 8 >= words.len()
}

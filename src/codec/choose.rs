//! Which codec for which chunk: the cheap certainties first, then a sample rules out what cannot win, then the likely winners are
//! encoded in full and compared.

use super::{Codec, Encoded, Input, scratch};
use crate::tensor::Number;

/// Chunks up to this length (bytes) are tried with everything.
const SMALL: usize = 4 << 10;
/// A sample is this many stretches, spread evenly …
const STRETCHES: usize = 16;
/// … each of at most this many bytes, and an eighth of the chunk in all.
const STRETCH: usize = 2 << 10;

pub(super) fn encode(input: Input<'_>) -> Encoded {
    for codec in [Codec::Same, Codec::Constant] {
        if let Some(payload) = (codec.row().encode)(input)
            && payload.len() < input.raw.len().max(1)
        {
            return Encoded { codec, payload };
        }
    }
    let mut best: Option<Encoded> = None;
    for codec in likely(input) {
        if best.as_ref().is_some_and(|b| settled(b, codec, input)) {
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
    best.unwrap_or_else(|| Encoded {
        codec: Codec::Raw,
        payload: input.raw.to_vec(),
    })
}

/// Stored bytes, and a 64th more for what needs its base rebuilt first.
fn cost(codec: Codec, len: usize) -> usize {
    if codec.needs_base() { len + len / 64 } else { len }
}

/// Whether `best` makes trying `next` pointless: zstd alone finds hardly anything that zstd with the base does not.
fn settled(best: &Encoded, next: Codec, input: Input<'_>) -> bool {
    next == Codec::Zstd
        && best.codec == Codec::ZstdRef
        && best.payload.len() < input.raw.len() / 2
        && input.raw.len() > SMALL
}

/// The codecs worth encoding with in full, the likeliest first.
fn likely(input: Input<'_>) -> Vec<Codec> {
    use Codec::{DiffPlanes, DiffSparse, Planes, XorPlanes, Zstd, ZstdRef};
    if input.raw.len() <= SMALL {
        return vec![DiffSparse, DiffPlanes, XorPlanes, ZstdRef, Planes, Zstd];
    }
    // What copies from afar is invisible to a sample.
    let mut likely = Vec::new();
    let copies = input.number == Number::Bytes || repeats(input);
    if copies {
        likely.extend([ZstdRef, Zstd]);
    }
    likely.extend(by_sample(input, copies));
    likely
}

/// Encodes a sample with the codecs that see elements one by one, and names the best and those within a 32nd of it.
fn by_sample(input: Input<'_>, copies: bool) -> Vec<Codec> {
    let base = input.base.filter(|b| b.len() == input.raw.len());
    let mut estimates: Vec<(usize, Codec)> = scratch::with_buffer(|raw_sample| {
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
            let estimate = |codec: Codec| Some((cost(codec, (codec.row().encode)(sampled)?.len()), codec));
            let limit = raw_sample.len() - raw_sample.len() / 128;
            candidates(sampled, copies)
                .into_iter()
                .filter_map(estimate)
                .filter(|e| e.0 < limit)
                .collect()
        })
    });
    estimates.sort_by_key(|e| e.0);
    let enough = estimates.first().map_or(0, |e| e.0 + e.0 / 32);
    estimates
        .into_iter()
        .filter(|e| e.0 <= enough)
        .take(2)
        .map(|e| e.1)
        .collect()
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
        // Sparse is smaller up to about a half; its cost is that of the changes.
        if changed < 40 {
            candidates.push(Codec::DiffSparse);
        }
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
    let stretch = (bytes.len() / (8 * STRETCHES)).min(STRETCH) & !7;
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

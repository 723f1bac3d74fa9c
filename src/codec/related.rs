//! A chunk against a tensor of another float width. The base is picked out of one or several chunks, converted to the chunk's own
//! numbers, and what then differs is coded by one of the codecs for bases of equal length: nothing, if the chunk is the exact
//! result of the conversion.

use super::recast::recast;
use super::{Codec, Encoded, Input, Job, MAX_RAW_LEN, choose, scratch};
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};
use crate::tensor::Number;

/// Where in the base's chunks, taken as one after the other, the related elements lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Related {
    /// What the elements are there.
    pub number: Number,
    /// Offset and length of each stretch, in bytes, in order.
    pub pieces: Vec<(u32, u32)>,
}

/// Encodes against a related tensor; nothing if that gains nothing over encoding alone, or for numbers that are not related.
pub(super) fn encode(input: Input<'_>, related: &Related) -> Option<Encoded> {
    let codec = codec_for(related.number, input.number)?;
    let bases = input.base.filter(|_| !input.raw.is_empty())?;
    let inner = scratch::with_buffer(|picked| {
        for (at, len) in &related.pieces {
            picked.extend_from_slice(bytes_at(bases, u64::from(*at), u64::from(*len))?);
        }
        scratch::with_buffer(|base| {
            recast(related.number, picked, input.number, base);
            let like = Input {
                base: Some(base),
                ..input
            };
            (base.len() == input.raw.len()).then(|| choose::encode(like))
        })
    })?;
    if !takes_inner(inner.codec) {
        return None;
    }
    let mut w = Writer::new();
    w.u8(related.number.tag()).varint(related.pieces.len() as u64);
    for (at, len) in &related.pieces {
        w.varint(u64::from(*at)).varint(u64::from(*len));
    }
    w.u8(inner.codec.tag()).raw(&inner.payload);
    Some(Encoded {
        codec,
        payload: w.finish(),
    })
}

/// For rows of the table: against all of the base.
pub(super) fn encode_whole(input: Input<'_>, number: Number) -> Option<Vec<u8>> {
    let len = u32::try_from(input.base?.len()).ok()?;
    let pieces = vec![(0, len)];
    Some(encode(input, &Related { number, pieces })?.payload)
}

/// The codec for numbers of which one is the rounding of the other.
fn codec_for(base: Number, number: Number) -> Option<Codec> {
    match (base, number) {
        (Number::F32, Number::BF16 | Number::F16) => Some(Codec::Rounded),
        (Number::BF16 | Number::F16, Number::F32) => Some(Codec::Widened),
        _ => None,
    }
}

/// Whether a codec may code what is left after the conversion: those whose base is as long as the chunk, and not these again.
fn takes_inner(codec: Codec) -> bool {
    codec.needs_base() && !codec.takes_many()
}

fn bytes_at(bases: &[u8], at: u64, len: u64) -> Option<&[u8]> {
    let from = usize::try_from(at).ok()?;
    bases.get(from..from.checked_add(usize::try_from(len).ok()?)?)
}

/// Decodes either codec.
pub(super) fn decode(codec: Codec, job: Job<'_>) -> Result<()> {
    let Job {
        number,
        payload,
        raw_len,
        buf,
    } = job;
    let mut r = Reader::new(payload, "related tensor");
    let from = r.u8()?;
    let from = Number::from_tag(from).filter(|n| codec_for(*n, number) == Some(codec));
    let from = from.ok_or_else(|| Error::damage("numbers that are not related"))?;
    if !raw_len.is_multiple_of(number.width()) {
        return Err(Error::damage("a related chunk has a tail"));
    }
    let needed = raw_len / number.width() * from.width();
    if needed > MAX_RAW_LEN {
        return Err(Error::damage("a related tensor is too long"));
    }
    scratch::with_buffer(|picked| {
        for _ in 0..r.count(2)? {
            let piece = bytes_at(buf, r.varint()?, r.varint()?);
            let piece = piece.filter(|p| !p.is_empty() && p.len() <= needed - picked.len());
            picked.extend_from_slice(
                piece.ok_or_else(|| Error::damage("a piece leaves its base or the chunk"))?,
            );
        }
        if picked.len() != needed {
            return Err(Error::damage("pieces do not make up the related tensor"));
        }
        buf.clear();
        recast(from, picked, number, buf);
        Ok(())
    })?;
    let inner = Codec::from_tag(r.u8()?).filter(|c| takes_inner(*c));
    let inner = inner.ok_or_else(|| Error::damage("a codec that may not stand within another"))?;
    let payload = r.raw(r.remaining())?;
    (inner.row().decode)(Job {
        number,
        payload,
        raw_len,
        buf,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{decode, encode, encode_related};
    use proptest::prelude::*;

    fn round_trips(raw: &[u8], number: Number, bases: &[u8], related: &Related) -> Option<Encoded> {
        let e = encode_related(raw, number, bases, related)?;
        assert_eq!(Some(&e), encode_related(raw, number, bases, related).as_ref());
        assert!(e.payload.len() < raw.len());
        let mut buf = bases.to_vec();
        decode(e.codec, number, &e.payload, raw.len(), &mut buf).unwrap();
        assert!(buf == raw);
        Some(e)
    }

    fn all_of(number: Number, bytes: &[u8]) -> Related {
        Related {
            number,
            pieces: vec![(0, bytes.len() as u32)],
        }
    }

    /// Pseudo-random numbers (splitmix64).
    fn noise(seed: u64, n: u64) -> impl Iterator<Item = u32> {
        (1..=n).map(move |i| {
            let z = (seed << 32).wrapping_add(i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            ((z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32) as u32
        })
    }

    /// f32 of all exponents and signs, NaNs, infinities, subnormals and zeros included, and those around all ties.
    fn odd_floats() -> Vec<u8> {
        let patterns = [
            0u32, 1, 0xfff, 0x1000, 0x1fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0x1_8000, 0x7f_ffff, 0x40_0000,
        ];
        (0..1u32 << 9)
            .flat_map(|top| patterns.map(|low| top << 23 | low))
            .flat_map(u32::to_le_bytes)
            .collect()
    }

    #[test]
    fn a_rounding_costs_nothing_whatever_is_rounded() {
        for number in [Number::BF16, Number::F16] {
            let wide = odd_floats();
            let mut raw = Vec::new();
            assert!(recast(Number::F32, &wide, number, &mut raw));
            let e = round_trips(&raw, number, &wide, &all_of(Number::F32, &wide)).unwrap();
            assert_eq!(e.codec, Codec::Rounded);
            assert!(e.payload.len() < 10, "{}", e.payload.len());
            // Back again: what is exact costs nothing either.
            let mut back = Vec::new();
            assert!(recast(number, &raw, Number::F32, &mut back));
            let e = round_trips(&back, Number::F32, &raw, &all_of(number, &raw)).unwrap();
            assert_eq!(e.codec, Codec::Widened);
            assert!(e.payload.len() < 10, "{}", e.payload.len());
        }
    }

    #[test]
    fn other_roundings_of_a_few_values_cost_little() {
        let wide = odd_floats();
        let mut raw = Vec::new();
        recast(Number::F32, &wide, Number::BF16, &mut raw);
        // Another NaN, and a subnormal flushed to zero.
        for w in raw.as_chunks_mut().0 {
            let x = u16::from_le_bytes(*w);
            *w = match x & 0x7fff {
                0x7f81.. => (x | 0x7fff).to_le_bytes(),
                1..0x80 => (x & 0x8000).to_le_bytes(),
                _ => *w,
            };
        }
        let e = round_trips(&raw, Number::BF16, &wide, &all_of(Number::F32, &wide)).unwrap();
        assert!(e.payload.len() < raw.len() / 30, "{}", e.payload.len());
    }

    #[test]
    fn what_rounding_lost_is_all_that_widening_stores() {
        let wide: Vec<u8> = noise(5, 100_000)
            .flat_map(|x| (0x3c00_0000 | x & 0x81ff_ffff).to_le_bytes())
            .collect();
        let mut narrow = Vec::new();
        recast(Number::F32, &wide, Number::BF16, &mut narrow);
        let e = round_trips(&wide, Number::F32, &narrow, &all_of(Number::BF16, &narrow)).unwrap();
        let alone = encode(&wide, Number::F32, None).payload.len();
        assert!(
            e.payload.len() < wide.len() * 51 / 100 && e.payload.len() < alone,
            "{} {alone}",
            e.payload.len()
        );
    }

    #[test]
    fn what_is_not_related_is_not_encoded() {
        let wide: Vec<u8> = noise(3, 40_000).flat_map(u32::to_le_bytes).collect();
        let raw: Vec<u8> = noise(7, 40_000).flat_map(|x| (x as u16).to_le_bytes()).collect();
        for (raw, number, base, from) in [
            (&raw, Number::BF16, &wide, Number::F32),
            (&wide, Number::F32, &raw, Number::F16),
            (&raw, Number::I16, &wide, Number::F32),
            (&raw, Number::BF16, &raw, Number::F16),
        ] {
            assert!(
                encode_related(raw, number, base, &all_of(from, base)).is_none(),
                "{from:?}"
            );
        }
        // Pieces that leave the base, or are too few.
        let mut rounded = Vec::new();
        recast(Number::F32, &wide, Number::BF16, &mut rounded);
        for pieces in [
            vec![(4, wide.len() as u32)],
            vec![(0, wide.len() as u32 - 4)],
            vec![],
            vec![(u32::MAX, u32::MAX)],
        ] {
            let number = Number::F32;
            assert_eq!(
                encode_related(&rounded, Number::BF16, &wide, &Related { number, pieces }),
                None
            );
        }
    }

    #[test]
    fn no_codec_stands_within_itself() {
        let base = [0u8; 16];
        for inner in [Codec::Raw, Codec::Constant, Codec::Rounded, Codec::Widened] {
            let payload = [Number::F32.tag(), 1, 0, 16, inner.tag()];
            assert!(decode(Codec::Rounded, Number::BF16, &payload, 8, &mut base.to_vec()).is_err());
        }
        let payload = [Number::F32.tag(), 1, 0, 16, Codec::Same.tag()];
        assert!(decode(Codec::Rounded, Number::BF16, &payload, 8, &mut base.to_vec()).is_ok());
        assert!(decode(Codec::Widened, Number::BF16, &payload, 8, &mut base.to_vec()).is_err());
        assert!(decode(Codec::Rounded, Number::F32, &payload, 8, &mut base.to_vec()).is_err());
        assert!(decode(Codec::Rounded, Number::BF16, &payload, 9, &mut base.to_vec()).is_err());
    }

    proptest! {
        #[test]
        fn pieces_in_any_order_round_trip(
            words in prop::collection::vec(any::<u32>(), 1..600), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
            narrow: bool, half: bool, change in 1usize..50,
        ) {
            let bases: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
            let small = if half { Number::F16 } else { Number::BF16 };
            let (from, number) = if narrow { (Number::F32, small) } else { (small, Number::F32) };
            let mut cuts: Vec<u32> = cuts.iter().map(|i| i.index(words.len()) as u32 * 4).chain([0, bases.len() as u32]).collect();
            cuts.sort_unstable();
            let pieces: Vec<(u32, u32)> = cuts.windows(2).rev().map(|w| (w[0], w[1] - w[0])).filter(|p| p.1 > 0).collect();
            let picked: Vec<u8> = pieces.iter().flat_map(|(at, n)| bases[*at as usize..][..*n as usize].to_vec()).collect();
            let mut raw = Vec::new();
            recast(from, &picked, number, &mut raw);
            for x in raw.iter_mut().step_by(change * number.width()) {
                *x ^= 1;
            }
            round_trips(&raw, number, &bases, &Related { number: from, pieces });
        }

        #[test]
        fn any_payload_is_decoded_or_refused(payload in prop::collection::vec(any::<u8>(), 0..60), head: bool, n in 0usize..100) {
            let mut bytes = payload;
            if head && bytes.len() > 4 {
                bytes[..4].copy_from_slice(&[Number::F32.tag(), 1, 0, (n * 4) as u8 & 0x7f]);
            }
            let mut buf = vec![7; n * 4];
            if decode(Codec::Rounded, Number::F16, &bytes, n * 2, &mut buf).is_ok() {
                prop_assert_eq!(buf.len(), n * 2);
            }
        }
    }
}

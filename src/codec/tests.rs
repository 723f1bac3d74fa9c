//! Every codec against every number, hostile payloads, and all bit patterns.

use super::*;
use crate::error::Kind;
use crate::tensor::Number;
use proptest::prelude::*;

const NUMBERS: [Number; 9] = [
    Number::Bytes,
    Number::I8,
    Number::I16,
    Number::I32,
    Number::I64,
    Number::F16,
    Number::BF16,
    Number::F32,
    Number::F64,
];

/// Decodes and compares, in a buffer that holds the base only where the codec asks for it.
fn assert_decodes(e: &Encoded, raw: &[u8], number: Number, base: Option<&[u8]>) {
    let mut buf = if e.codec.needs_base() {
        base.unwrap().to_vec()
    } else {
        Vec::new()
    };
    decode(e.codec, number, &e.payload, raw.len(), &mut buf).unwrap();
    assert!(
        buf == raw,
        "{} of {number:?} changed {} bytes",
        e.codec.name(),
        raw.len()
    );
}

/// Round trip through the chooser and through every codec that applies.
fn assert_round_trips(raw: &[u8], number: Number, base: Option<&[u8]>) {
    let chosen = encode(raw, number, base);
    assert!(chosen.payload.len() <= raw.len());
    assert_eq!(chosen, encode(raw, number, base), "not deterministic");
    assert_decodes(&chosen, raw, number, base);
    for codec in Codec::ALL {
        if let Some(e) = encode_as(*codec, raw, number, base) {
            assert_decodes(&e, raw, number, base);
            assert_eq!(Some(e), encode_as(*codec, raw, number, base), "not deterministic");
        }
    }
}

#[test]
fn the_table_is_in_order_of_the_numbers_on_disk() {
    for (i, (row, codec)) in ROWS.iter().zip(Codec::ALL).enumerate() {
        assert_eq!(row.codec, *codec);
        assert!(i == 0 || ROWS[i - 1].codec.tag() < codec.tag());
        assert_eq!(codec.row().name, row.name);
        assert_eq!(Codec::from_tag(codec.tag()), Some(*codec));
    }
    assert_eq!(Codec::ALL.len(), ROWS.len());
    assert_eq!(Codec::from_tag(15), None);
    assert_eq!(Codec::from_tag(255), None);
}

/// All 65,536 values in order, or shuffled by a multiplier that is odd.
fn all_16_bit(step: u16) -> Vec<u8> {
    (0..=u16::MAX)
        .flat_map(|i| i.wrapping_mul(step).to_le_bytes())
        .collect()
}

#[test]
fn all_16_bit_patterns_against_several_bases() {
    let bases = [
        all_16_bit(1),
        all_16_bit(0x6b2f),
        vec![0; 1 << 17],
        [0x00, 0x80].repeat(1 << 16),
        [0xff, 0x7f].repeat(1 << 16),
        [0xff; 1 << 17].to_vec(),
    ];
    for number in [Number::I16, Number::F16, Number::BF16] {
        for base in &bases {
            assert_round_trips(&all_16_bit(0x9e37), number, Some(base));
            assert_round_trips(&all_16_bit(1), number, Some(base));
        }
    }
}

#[test]
fn special_floats_against_each_other() {
    let f32s = [
        0,
        1,
        0x007f_ffff,
        0x0080_0000,
        0x7f7f_ffff,
        0x7f80_0000,
        0x7f80_0001,
        0x7fc0_0000,
        0x7fff_ffffu32,
    ];
    let f64s = [
        0,
        1,
        (1 << 52) - 1,
        1 << 52,
        0x7fef << 48,
        0x7ff0 << 48,
        (0x7ff0 << 48) | 1,
        0x7ff8 << 48,
        u64::MAX >> 1,
    ];
    let f32s: Vec<u32> = f32s.into_iter().flat_map(|x| [x, x | 1 << 31]).collect();
    let f64s: Vec<u64> = f64s.into_iter().flat_map(|x| [x, x | 1 << 63]).collect();
    // Every pair of a value and a base.
    let pairs = |n: usize| (0..n * n).map(move |i| (i / n, i % n));
    let (raw, base): (Vec<_>, Vec<_>) = pairs(f32s.len())
        .map(|(i, j)| (f32s[i].to_le_bytes(), f32s[j].to_le_bytes()))
        .unzip();
    assert_round_trips(&raw.concat(), Number::F32, Some(&base.concat()));
    let (raw, base): (Vec<_>, Vec<_>) = pairs(f64s.len())
        .map(|(i, j)| (f64s[i].to_le_bytes(), f64s[j].to_le_bytes()))
        .unzip();
    assert_round_trips(&raw.concat(), Number::F64, Some(&base.concat()));
}

/// Noise that is the same on every machine (an xorshift generator).
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut s = seed | 1;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        s.to_le_bytes()
    };
    (0..len.div_ceil(8)).flat_map(|_| next()).take(len).collect()
}

/// `base` with about one element in `every` moved by a small step.
fn nudged(base: &[u8], number: Number, every: u64, seed: u64) -> Vec<u8> {
    let mut raw = base.to_vec();
    let random = noise(seed, raw.len() / number.width() * 8);
    for (e, r) in raw.chunks_exact_mut(number.width()).zip(random.chunks_exact(8)) {
        let r = u64::from_le_bytes(r.try_into().unwrap());
        if r.is_multiple_of(every) {
            e[0] = e[0].wrapping_add((r >> 32) as u8 % 5);
        }
    }
    raw
}

#[test]
fn chunks_of_a_mebibyte_and_a_bit() {
    for number in NUMBERS {
        let base = noise(1, (1 << 20) + 3);
        let raw = nudged(&base, number, 20, 2);
        let e = encode(&raw, number, Some(&base));
        assert_decodes(&e, &raw, number, Some(&base));
        assert!(
            e.payload.len() < raw.len() / 8,
            "{number:?}: {} {}",
            e.codec.name(),
            e.payload.len()
        );
        let e = encode(&base, number, Some(&base));
        assert_eq!((e.codec, e.payload.len()), (Codec::Same, 0));
        let e = encode(&base, number, None);
        assert_eq!((e.codec, e.payload.len()), (Codec::Raw, base.len()));
        let e = encode(&vec![7; 1 << 20], number, Some(&base[..1 << 20]));
        assert_eq!((e.codec, e.payload.len()), (Codec::Constant, number.width()));
    }
}

#[test]
fn text_that_moved_is_copied_from_the_base() {
    let base = noise(3, 100_000);
    let mut raw = base[70_000..].to_vec();
    raw.extend_from_slice(&base[..60_000]);
    let e = encode(&raw, Number::Bytes, Some(&base));
    assert_eq!(e.codec, Codec::ZstdRef);
    assert!(e.payload.len() < 100, "{}", e.payload.len());
    assert_decodes(&e, &raw, Number::Bytes, Some(&base));
}

#[test]
fn rows_that_repeat_from_afar_are_found() {
    let rows = noise(5, 300_000);
    let twice = [&rows[..], &rows[..]].concat();
    let e = encode(&twice, Number::F32, None);
    assert!(
        e.payload.len() < rows.len() + 1000,
        "{} {}",
        e.codec.name(),
        e.payload.len()
    );
    assert_decodes(&e, &twice, Number::F32, None);
    let grown = [&noise(6, 4096)[..], &rows[..]].concat();
    let e = encode(&grown, Number::F32, Some(&rows));
    assert_eq!(e.codec, Codec::ZstdRef);
    assert!(e.payload.len() < 5000, "{}", e.payload.len());
    assert_decodes(&e, &grown, Number::F32, Some(&rows));
}

#[test]
fn what_a_thread_did_before_changes_nothing() {
    let base = noise(8, 200_000);
    let raw = nudged(&base, Number::BF16, 3, 9);
    let run = move || {
        let each = |codec: &Codec| encode_as(*codec, &raw, Number::BF16, Some(&base));
        Codec::ALL.iter().map(each).collect::<Vec<_>>()
    };
    let here = run();
    assert_eq!(here, run());
    assert_eq!(here, std::thread::spawn(run).join().unwrap());
}

#[test]
fn any_processor_writes_and_reads_the_same() {
    for (number, every) in [
        (Number::BF16, 20),
        (Number::F16, 2),
        (Number::F32, 3),
        (Number::F64, 1),
        (Number::I8, 9),
    ] {
        let base = noise(11, 100_003);
        let raw = nudged(&base, number, every, 12);
        let each = || {
            Codec::ALL
                .iter()
                .filter_map(|codec| {
                    let e = encode_as(*codec, &raw, number, Some(&base))?;
                    assert_decodes(&e, &raw, number, Some(&base));
                    Some(e)
                })
                .collect::<Vec<_>>()
        };
        let [portable, avx2, avx512] = super::cpu::tests::at_each_level(each);
        assert_eq!(avx2, portable);
        assert_eq!(avx512, portable);
    }
}

#[test]
fn blocks_that_moved_further_are_coded_apart() {
    // bf16 of one exponent; every fourth row of 256 moves 16 times as far.
    let base: Vec<u16> = noise(3, 600_001)
        .chunks_exact(2)
        .map(|b| 0x3c00 | u16::from_le_bytes([b[0], b[1]]) & 0x807f)
        .collect();
    let steps = noise(4, 2 * base.len());
    let moved = base.iter().enumerate().map(|(i, x)| {
        let far = if i / 256 % 4 == 0 { 250 } else { 16 };
        x + u16::from(steps[i]) % far
    });
    let bytes = |words: &mut dyn Iterator<Item = u16>| words.flat_map(u16::to_le_bytes).collect::<Vec<u8>>();
    let (raw, base) = (bytes(&mut moved.clone()), bytes(&mut base.iter().copied()));
    let each = super::cpu::tests::at_each_level(|| {
        let e = encode_as(Codec::DiffBands, &raw, Number::BF16, Some(&base)).unwrap();
        assert_decodes(&e, &raw, Number::BF16, Some(&base));
        e.payload
    });
    assert!(each[0] == each[1] && each[1] == each[2]);
    let plain = encode_as(Codec::DiffMagnitudes, &raw, Number::BF16, Some(&base)).unwrap();
    assert!(each[0].len() * 20 < plain.payload.len() * 19);
    assert_eq!(encode(&raw, Number::BF16, Some(&base)).codec, Codec::DiffBands);
}

/// The highest magnitude of flips is low, and an infinity or a NaN flips too.
#[test]
fn rare_flips_far_above_the_others_round_trip() {
    for (number, one, special) in [
        (
            Number::F32,
            &1f32.to_le_bytes()[..],
            [0xff80_0000u32, 0xffc0_1234, 0xff7f_ffff],
        ),
        (Number::BF16, &[0x80, 0x3f], [0xff80, 0xffc1, 0xff7f]),
        (Number::F16, &[0x00, 0x3c], [0xfc00, 0xfe01, 0xfbff]),
    ] {
        let width = number.width();
        for special in special {
            for (n, zeros, at) in [(65, 64, 64), (1000, 63, 999), (1000, 100, 999), (70_000, 0, 65)] {
                let base = one.repeat(n);
                let mut raw = base.clone();
                for i in 0..zeros {
                    raw[i * width..][..width].fill(0);
                    raw[i * width + width - 1] = 0x80;
                }
                raw[at * width..][..width].copy_from_slice(&special.to_le_bytes()[..width]);
                assert_round_trips(&raw, number, Some(&base));
            }
        }
    }
}

#[test]
fn what_is_nearly_constant_does_not_need_a_noisy_base() {
    for (number, one) in [(Number::BF16, 0x3f80u64), (Number::I16, 7)] {
        let random = noise(21, 1 << 20);
        let elements = |f: &dyn Fn(usize) -> u64| -> Vec<u8> {
            (0..(1 << 20) / number.width())
                .flat_map(|i| f(i).to_le_bytes()[..number.width()].to_vec())
                .collect()
        };
        let base = elements(&|i| one + u64::from(random[i] & 1));
        let raw = elements(&|i| one + u64::from(i == 1000));
        let (with, alone) = (encode(&raw, number, Some(&base)), encode(&raw, number, None));
        assert_decodes(&with, &raw, number, Some(&base));
        assert!(
            with.payload.len() <= alone.payload.len() + 64,
            "{number:?}: {}",
            with.payload.len()
        );
    }
}

#[test]
fn moments_that_only_decayed_cost_little() {
    let float =
        |b: &[u8]| f32::from_bits(0x3000_0000 | u32::from_le_bytes(b.try_into().unwrap()) & 0x80ff_ffff);
    let mut base: Vec<f32> = noise(5, 400_000).chunks_exact(4).map(float).collect();
    base[64 * 7] = f32::from_bits(0xffc0_1234);
    base[64 * 9 + 5] = f32::INFINITY;
    base[64 * 11..64 * 12].fill(0.0);
    base[64 * 13 + 1] = f32::from_bits(1);
    // Rows without a gradient decay five times, others get one.
    let moved = base.iter().enumerate().map(|(i, x)| {
        let decayed = (0..5).fold(*x, |x, _| x * 0.9);
        if i / 640 % 3 == 0 {
            decayed + 0.3 * x
        } else {
            decayed
        }
    });
    let bytes = |floats: &[f32]| floats.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
    let (raw, base) = (bytes(&moved.collect::<Vec<_>>()), bytes(&base));
    let e = encode(&raw, Number::F32, Some(&base));
    assert_eq!(e.codec, Codec::DiffBands);
    assert_decodes(&e, &raw, Number::F32, Some(&base));
    let plain = encode_as(Codec::DiffMagnitudes, &raw, Number::F32, Some(&base)).unwrap();
    assert!(e.payload.len() * 2 < plain.payload.len());
}

fn number() -> impl Strategy<Value = Number> {
    prop::sample::select(&NUMBERS[..])
}

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        prop::collection::vec(any::<u8>(), 0..3000),
        prop::collection::vec(0u8..3, 0..3000),
        (any::<[u8; 3]>(), 0usize..3000).prop_map(|(b, n)| b.iter().copied().cycle().take(n).collect()),
        (any::<u64>(), 0usize..60_000).prop_map(|(seed, n)| noise(seed, n)),
    ]
}

proptest! {
    #[test]
    fn any_bytes_round_trip(raw in bytes(), number in number(), other in bytes(), every in 1u64..3000, seed: u64) {
        assert_round_trips(&raw, number, None);
        assert_round_trips(&raw, number, Some(&other));
        assert_round_trips(&raw, number, Some(&nudged(&raw, number, every, seed)));
        let n = raw.len().min(other.len());
        assert_round_trips(&raw[..n], number, Some(&other[..n]));
    }

    #[test]
    fn any_payload_is_decoded_or_refused(
        payload in bytes(), number in number(), raw_len in 0usize..5000, base in bytes(), equal: bool, tag in 0..ROWS.len(),
    ) {
        let mut buf = base;
        if equal {
            buf.resize(raw_len, 9);
        }
        match decode(ROWS[tag].codec, number, &payload, raw_len, &mut buf) {
            Ok(()) => prop_assert_eq!(buf.len(), raw_len),
            Err(e) => {
                prop_assert_eq!(e.kind(), Kind::Damage);
                prop_assert!(buf.is_empty());
            }
        }
    }

    #[test]
    fn a_mangled_payload_is_decoded_or_refused(
        raw in bytes(), number in number(), every in 1u64..100, seed: u64, at: prop::sample::Index, flip in 1u8.., cut: prop::sample::Index,
    ) {
        let base = nudged(&raw, number, every, seed);
        for codec in Codec::ALL {
            let Some(e) = encode_as(*codec, &raw, number, Some(&base)) else { continue };
            let mut mangled = e.payload.clone();
            if !mangled.is_empty() {
                mangled[at.index(e.payload.len())] ^= flip;
            }
            for payload in [&mangled[..], &e.payload[..cut.index(e.payload.len() + 1)]] {
                for raw_len in [raw.len(), raw.len() + 1, raw.len() / 2] {
                    let mut buf = base.clone();
                    match decode(*codec, number, payload, raw_len, &mut buf) {
                        Ok(()) => prop_assert_eq!(buf.len(), raw_len),
                        Err(e) => prop_assert_eq!(e.kind(), Kind::Damage),
                    }
                }
            }
        }
    }
}

#[test]
fn a_chunk_beyond_the_limit_is_refused_before_anything_is_allocated() {
    for codec in Codec::ALL {
        let mut buf = Vec::new();
        let e = decode(*codec, Number::F32, &[0; 9], usize::MAX, &mut buf).unwrap_err();
        assert_eq!(e.kind(), Kind::Damage);
        assert_eq!(buf.capacity(), 0);
    }
}

#[test]
fn a_bomb_does_not_grow_past_the_raw_length() {
    let e = encode_as(Codec::Zstd, &[0; 1 << 20], Number::Bytes, None).unwrap();
    let mut buf = Vec::new();
    assert!(decode(Codec::Zstd, Number::Bytes, &e.payload, 1000, &mut buf).is_err());
    assert!(buf.capacity() < 2000);
}

#[test]
fn bytes_of_which_few_changed_are_stored_as_those() {
    let base: Vec<u8> = (0..300_000u32)
        .flat_map(|i| i.wrapping_mul(0x9E37_79B9).to_le_bytes())
        .collect();
    let mut raw = base.clone();
    for at in [0, 77_777, 1_199_968] {
        raw[at..at + 32].fill(0xA5);
    }
    let found = encode(&raw, Number::Bytes, Some(&base));
    assert_eq!(found.codec, Codec::DiffSparse);
    assert!(found.payload.len() < 10_000, "{}", found.payload.len());
    // Many that changed, all to the same, are less as copies.
    for at in (0..raw.len()).step_by(100) {
        raw[at] = 0;
    }
    assert_ne!(encode(&raw, Number::Bytes, Some(&base)).codec, Codec::DiffSparse);
    assert_round_trips(&raw, Number::Bytes, Some(&base));
}

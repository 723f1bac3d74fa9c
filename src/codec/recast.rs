//! Floats of one width as floats of another: what rounding a copy of a tensor to fewer bits does, and its inverse. Results are the
//! same on any CPU; NaNs stay NaNs and keep the payload bits that fit.

use super::lanes::{STRETCH, Word};
use crate::tensor::Number;

/// Converts whole elements of `bytes` and appends them to `to`. False, and nothing is appended, for other pairs than f32 and f16
/// or bf16.
pub(super) fn recast(from: Number, bytes: &[u8], number: Number, to: &mut Vec<u8>) -> bool {
    match (from, number) {
        (Number::F32, Number::BF16) => convert::<u32, u16>(bytes, to, f32_to_bf16),
        (Number::F32, Number::F16) => convert::<u32, u16>(bytes, to, f32_to_f16),
        (Number::BF16, Number::F32) => convert::<u16, u32>(bytes, to, |x| u32::from(x) << 16),
        (Number::F16, Number::F32) => convert::<u16, u32>(bytes, to, f16_to_f32),
        _ => return false,
    }
    true
}

fn convert<A: Word, B: Word>(bytes: &[u8], to: &mut Vec<u8>, f: impl Fn(A) -> B) {
    let (mut a, mut b) = ([A::default(); STRETCH], [B::default(); STRETCH]);
    for part in bytes.chunks(STRETCH * A::WIDTH) {
        let n = part.len() / A::WIDTH;
        A::load(part, &mut a[..n]);
        a[..n].iter().zip(&mut b).for_each(|(x, y)| *y = f(*x));
        let start = to.len();
        to.resize(start + n * B::WIDTH, 0);
        B::store(&b[..n], &mut to[start..]);
    }
}

/// To the nearest, ties to even. A NaN is made quiet.
fn f32_to_bf16(x: u32) -> u16 {
    let rounded = x.wrapping_add(0x7fff + ((x >> 16) & 1)) >> 16;
    let nan = x >> 16 | 0x40;
    let is_nan = x & 0x7fff_ffff > 0x7f80_0000;
    (if is_nan { nan } else { rounded }) as u16
}

/// To the nearest, ties to even; too large becomes infinite, a NaN is made quiet. After F. Giesen's float_to_half_fast3_rtne.
fn f32_to_f16(x: u32) -> u16 {
    let (sign, x) = (x >> 16 & 0x8000, x & 0x7fff_ffff);
    // Rebias the exponent by 112, round at bit 13.
    let normal = x.wrapping_sub(112 << 23).wrapping_add(0xfff + ((x >> 13) & 1)) >> 13;
    // Added to 0.5, whose last bit is worth 2^-24, the sum is rounded by the addition.
    let small = (f32::from_bits(x) + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let magnitude = match x {
        0x7f80_0001.. => 0x7e00 | (x >> 13 & 0x3ff),
        0x4780_0000.. => 0x7c00,
        0x3880_0000.. => normal,
        _ => small,
    };
    (sign | magnitude) as u16
}

/// Exact. A NaN is made quiet.
fn f16_to_f32(x: u16) -> u32 {
    let (sign, x) = (u32::from(x & 0x8000) << 16, u32::from(x & 0x7fff));
    let magnitude = match x {
        0x7c01.. => 0x7fc0_0000 | x << 13,
        0x7c00 => 0x7f80_0000,
        0x0400.. => (x << 13) + (112 << 23),
        // A whole number of 2^-24.
        _ => (x as f32 * f32::from_bits(0x3380_0000)).to_bits(),
    };
    sign | magnitude
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_halves_widen_as_elsewhere_and_come_back() {
        for x in 0..=u16::MAX {
            let wide = f16_to_f32(x);
            assert_eq!(wide, half::f16::from_bits(x).to_f32().to_bits(), "{x:04x}");
            let quiet = if half::f16::from_bits(x).is_nan() {
                x | 0x200
            } else {
                x
            };
            assert_eq!(f32_to_f16(wide), quiet, "{x:04x}");
            let quiet = if half::bf16::from_bits(x).is_nan() {
                x | 0x40
            } else {
                x
            };
            assert_eq!(f32_to_bf16(u32::from(x) << 16), quiet, "{x:04x}");
        }
    }

    #[test]
    fn floats_round_as_elsewhere() {
        // Every exponent and sign, with mantissas around all the ties and at random.
        let mut s = 1u32;
        for top in 0..1 << 9 {
            let check = |mantissa: u32| {
                let x = top << 23 | (mantissa & 0x7f_ffff);
                let f = f32::from_bits(x);
                assert_eq!(f32_to_bf16(x), half::bf16::from_f32(f).to_bits(), "{x:08x}");
                assert_eq!(f32_to_f16(x), half::f16::from_f32(f).to_bits(), "{x:08x}");
            };
            for bit in 0..23 {
                for around in [-2i32, -1, 0, 1, 2] {
                    check((1u32 << bit).wrapping_add_signed(around));
                    check((3u32 << bit).wrapping_add_signed(around));
                    check(0u32.wrapping_sub(1 << bit).wrapping_add_signed(around));
                }
            }
            for _ in 0..4000 {
                s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                check(s >> 9);
                check(s >> 9 | 0xfff);
                check((s >> 9) & !0x1fff | 0x1000);
            }
        }
    }
}

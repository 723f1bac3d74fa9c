//! Elements of one width, and the loops over them: loading, storing, planes, order mapping.
//!
//! The loops run over short stretches ([`STRETCH`] elements) held in arrays, one simple operation at a time, so that each becomes
//! vector code for each width.

use super::cpu::BLOCK;
use crate::bytes::Reader;
use crate::error::Result;
use crate::tensor::Number;

/// Elements handled at a time.
pub(super) const STRETCH: usize = 512;

/// An unsigned integer with an element's bits.
pub(super) trait Word: Copy + Eq + Default + 'static {
    /// Bytes.
    const WIDTH: usize;
    /// Loads the elements of `bytes`, little-endian.
    fn load(bytes: &[u8], to: &mut [Self]);
    /// Stores elements, little-endian.
    fn store(from: &[Self], bytes: &mut [u8]);
    /// Writes the eight bits from `shift` on of each element.
    fn take_byte(from: &[Self], shift: u32, to: &mut [u8]);
    /// Ors eight bits into each element at `shift`.
    fn put_byte(to: &mut [Self], shift: u32, from: &[u8]);
    /// The element at `at`, counted in elements.
    fn get(bytes: &[u8], at: usize) -> Option<Self>;
    /// Replaces the element at `at`.
    fn set(bytes: &mut [u8], at: usize, value: Self);
    /// A float's bits as an integer of the same order.
    fn ordered(self) -> Self;
    /// The inverse of `ordered`.
    fn unordered(self) -> Self;
    /// The sign bit moved to the bottom, so that the exponent starts at the top.
    fn sign_down(self) -> Self;
    /// The inverse of `sign_down`.
    fn sign_up(self) -> Self;
    /// `self - base`, zigzag: 0, -1, 1, -2, … become 0, 1, 2, 3, …
    fn zigzag_from(self, base: Self) -> Self;
    /// The inverse: `base` plus the zigzag difference `self`.
    fn unzigzag_onto(self, base: Self) -> Self;
    /// Exclusive or.
    fn xor(self, other: Self) -> Self;
    /// The first block of `bytes`, if there is a whole one.
    fn block(bytes: &[u8]) -> Option<[Self; BLOCK]>;
    /// Stores a block at the front of `bytes`, if there is room for a whole one.
    fn put_block(block: &[Self; BLOCK], bytes: &mut [u8]) -> bool;
    /// For each element a byte that grows with its magnitude: a float's exponent.
    fn magnitudes(from: &[Self; BLOCK], to: &mut [u8; BLOCK]);
    /// Bits below a magnitude.
    const FRACTION: u32;
    /// The magnitude of one element.
    fn magnitude(self) -> u8;
    /// Its bits below the magnitude.
    fn fraction(self) -> u64;
    /// Whether the signs are not the same.
    fn differs_in_sign(self, other: Self) -> bool;
    /// The other sign, and these bits for all others.
    fn flipped(self, bits: u64) -> Self;
    /// -1 if the highest bit is set, else 0.
    fn side(self) -> i64;
    /// `self - base`, wrapping.
    fn less(self, base: Self) -> Self;
    /// Negated, if the highest bit of `by` is set.
    fn sided(self, by: Self) -> Self;
    /// As a signed number.
    fn signed(self) -> i64;
    /// `zero` and this difference, if it is less than `limit` either way (and `zero` not less than `limit`); else 0.
    fn near(self, limit: u8, zero: u8) -> u8;
    /// `self + difference`, wrapping.
    fn plus(self, difference: i64) -> Self;
}

macro_rules! word {
    ($u:ident, $i:ident, $fraction:literal, $magnitude:expr) => {
        impl Word for $u {
            const WIDTH: usize = size_of::<$u>();

            #[inline]
            fn load(bytes: &[u8], to: &mut [Self]) {
                for (t, b) in to.iter_mut().zip(bytes.as_chunks().0) {
                    *t = $u::from_le_bytes(*b);
                }
            }
            #[inline]
            fn store(from: &[Self], bytes: &mut [u8]) {
                for (f, b) in from.iter().zip(bytes.as_chunks_mut().0) {
                    *b = f.to_le_bytes();
                }
            }
            #[inline]
            fn take_byte(from: &[Self], shift: u32, to: &mut [u8]) {
                for (f, t) in from.iter().zip(to) {
                    *t = (f >> shift) as u8;
                }
            }
            #[inline]
            fn put_byte(to: &mut [Self], shift: u32, from: &[u8]) {
                for (t, f) in to.iter_mut().zip(from) {
                    *t |= $u::from(*f) << shift;
                }
            }
            #[inline(always)]
            fn get(bytes: &[u8], at: usize) -> Option<Self> {
                bytes.as_chunks().0.get(at).map(|b| $u::from_le_bytes(*b))
            }
            #[inline(always)]
            fn set(bytes: &mut [u8], at: usize, value: Self) {
                if let Some(b) = bytes.as_chunks_mut().0.get_mut(at) {
                    *b = value.to_le_bytes();
                }
            }
            #[inline(always)]
            fn ordered(self) -> Self {
                const SIGN: $u = 1 << ($u::BITS - 1);
                self ^ (self.cast_signed() >> ($u::BITS - 1)).cast_unsigned() ^ (!self & SIGN)
            }
            #[inline(always)]
            fn unordered(self) -> Self {
                const SIGN: $u = 1 << ($u::BITS - 1);
                self ^ (!self.cast_signed() >> ($u::BITS - 1)).cast_unsigned() ^ (self & SIGN)
            }
            #[inline]
            fn sign_down(self) -> Self {
                self.rotate_left(1)
            }
            #[inline]
            fn sign_up(self) -> Self {
                self.rotate_right(1)
            }
            #[inline]
            fn zigzag_from(self, base: Self) -> Self {
                let d = self.wrapping_sub(base).cast_signed();
                ((d << 1) ^ (d >> ($u::BITS - 1))).cast_unsigned()
            }
            #[inline]
            fn unzigzag_onto(self, base: Self) -> Self {
                base.wrapping_add((self >> 1) ^ (self & 1).wrapping_neg())
            }
            #[inline]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
            #[inline(always)]
            fn block(bytes: &[u8]) -> Option<[Self; BLOCK]> {
                let bytes = bytes.first_chunk::<{ BLOCK * size_of::<$u>() }>()?;
                let mut block = [0; BLOCK];
                for (t, b) in block.iter_mut().zip(bytes.as_chunks().0) {
                    *t = $u::from_le_bytes(*b);
                }
                Some(block)
            }
            #[inline(always)]
            fn put_block(block: &[Self; BLOCK], bytes: &mut [u8]) -> bool {
                let Some(bytes) = bytes.first_chunk_mut::<{ BLOCK * size_of::<$u>() }>() else {
                    return false;
                };
                bytes.copy_from_slice(bytemuck::bytes_of(&block.map($u::to_le)));
                true
            }
            #[inline(always)]
            fn magnitudes(from: &[Self; BLOCK], to: &mut [u8; BLOCK]) {
                for (f, t) in from.iter().zip(to) {
                    *t = f.magnitude();
                }
            }
            const FRACTION: u32 = $fraction;
            #[inline(always)]
            fn magnitude(self) -> u8 {
                let magnitude: fn($u) -> u8 = $magnitude;
                magnitude(self)
            }
            #[inline(always)]
            fn fraction(self) -> u64 {
                u64::from(self & ((1 << $fraction) - 1))
            }
            #[inline(always)]
            fn differs_in_sign(self, other: Self) -> bool {
                (self ^ other) >> ($u::BITS - 1) != 0
            }
            #[inline(always)]
            fn flipped(self, bits: u64) -> Self {
                const SIGN: $u = 1 << ($u::BITS - 1);
                (!self & SIGN) | (bits as $u & !SIGN)
            }
            #[inline(always)]
            fn side(self) -> i64 {
                i64::from(self.cast_signed() >> ($u::BITS - 1))
            }
            #[inline(always)]
            fn less(self, base: Self) -> Self {
                self.wrapping_sub(base)
            }
            #[inline(always)]
            fn sided(self, by: Self) -> Self {
                let side = (by.cast_signed() >> ($u::BITS - 1)).cast_unsigned();
                (self ^ side).wrapping_sub(side)
            }
            #[inline(always)]
            fn signed(self) -> i64 {
                i64::from(self.cast_signed())
            }
            #[inline(always)]
            fn near(self, limit: u8, zero: u8) -> u8 {
                let above_least = self.wrapping_add($u::from(limit - 1));
                let token = (above_least as u8).wrapping_add(zero - (limit - 1));
                if above_least <= $u::from(2 * (limit - 1)) {
                    token
                } else {
                    0
                }
            }
            #[inline(always)]
            fn plus(self, difference: i64) -> Self {
                self.wrapping_add(difference as $u)
            }
        }
    };
}

word!(u8, i8, 0, |x| x & 0x7f);
// The upper three bits of an f16's fraction go with its exponent.
word!(u16, i16, 7, |x| (x >> 7) as u8);
word!(u32, i32, 23, |x| (x >> 23) as u8);
// The exponents that an f32 has; all others count as its lowest or highest.
word!(
    u64,
    i64,
    52,
    |x| ((x >> 52) as u32 & 0x7ff).saturating_sub(896).min(255) as u8
);

/// The first block of `bytes`; elements that are not there are 0.
#[inline(always)]
pub(super) fn block_or_part<W: Word>(bytes: &[u8]) -> [W; BLOCK] {
    W::block(bytes).unwrap_or_else(|| part(bytes))
}

#[cold]
#[inline(never)]
fn part<W: Word>(bytes: &[u8]) -> [W; BLOCK] {
    let mut block = [W::default(); BLOCK];
    W::load(bytes, &mut block);
    block
}

/// Stores a block, or as much of it as there is room for.
#[inline(always)]
pub(super) fn store_block<W: Word>(block: &[W; BLOCK], bytes: &mut [u8]) {
    if !W::put_block(block, bytes) {
        store_part(block, bytes);
    }
}

// By itself, so that the compiler does not make one copy of any length of both.
#[cold]
#[inline(never)]
fn store_part<W: Word>(block: &[W; BLOCK], bytes: &mut [u8]) {
    W::store(&block[..bytes.len() / W::WIDTH], bytes);
}

/// Calls `$f::<W>($args…)` with the word of a number's width.
macro_rules! for_width {
    ($number:expr, $f:ident ( $($arg:expr),* $(,)? )) => {
        match $number.width() {
            1 => $f::<u8>($($arg),*),
            2 => $f::<u16>($($arg),*),
            4 => $f::<u32>($($arg),*),
            _ => $f::<u64>($($arg),*),
        }
    };
}
pub(super) use for_width;

/// Splits the elements of `raw` into byte planes, most significant first, after `map` has been applied to each stretch: `map` gets the
/// byte offset of the stretch and its elements.
pub(super) fn split<W: Word>(raw: &[u8], planes: &mut [u8], mut map: impl FnMut(usize, &mut [W])) {
    let n = raw.len() / W::WIDTH;
    let mut words = [W::default(); STRETCH];
    for start in (0..n).step_by(STRETCH) {
        let words = &mut words[..STRETCH.min(n - start)];
        W::load(&raw[start * W::WIDTH..], words);
        map(start * W::WIDTH, words);
        for k in 0..W::WIDTH {
            let at = k * n + start;
            W::take_byte(
                words,
                8 * (W::WIDTH - 1 - k) as u32,
                &mut planes[at..at + words.len()],
            );
        }
    }
}

/// The planes of a chunk, most significant first; the others are empty.
pub(super) type Planes<'a> = [&'a [u8]; 8];

/// The inverse of [`split`]: builds elements from planes and hands each stretch to `take`, with its byte offset.
#[inline(always)]
pub(super) fn merge<W: Word>(planes: &Planes<'_>, mut take: impl FnMut(usize, &mut [W])) {
    let n = planes[0].len();
    let mut words = [W::default(); STRETCH];
    for start in (0..n).step_by(STRETCH) {
        let words = &mut words[..STRETCH.min(n - start)];
        words.fill(W::default());
        for (k, plane) in planes.iter().take(W::WIDTH).enumerate() {
            W::put_byte(words, 8 * (W::WIDTH - 1 - k) as u32, &plane[start..]);
        }
        take(start * W::WIDTH, words);
    }
}

/// The whole elements of a chunk and the tail, which no codec looks into.
pub(super) fn whole<T: AsRef<[u8]> + ?Sized>(raw: &T, number: Number) -> (&[u8], &[u8]) {
    let raw = raw.as_ref();
    raw.split_at(raw.len() - raw.len() % number.width())
}

/// Reads a chunk's tail, with which a payload ends.
pub(super) fn take_tail(mut r: Reader<'_>, tail: &mut [u8]) -> Result<()> {
    tail.copy_from_slice(r.raw(tail.len())?);
    r.finish()
}

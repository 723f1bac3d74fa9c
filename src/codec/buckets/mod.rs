//! Differences of order-mapped numbers to the base, in classes by the base's magnitude. An optimiser's step has about the same
//! size for all weights, so how many units in the last place a weight moves is decided by its exponent, and the decoder knows the
//! base's exponent. Each class has its own frequencies; where few elements of a class change, a bit for each says which.

mod bits;
mod classes;
mod decode;
mod encode;
mod token;

pub(super) use decode::decode;
pub(super) use encode::encode;

use super::cpu::BLOCK;
use super::lanes::Word;
use super::weights::Spread;

/// Classes of a chunk, at most.
const CLASSES: usize = 16;
/// The byte that stands for a byte of bits that is written elsewhere.
const BITS_ESCAPE: u8 = 255;

/// How the elements of a class are coded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
enum Kind {
    /// None differs from its base.
    #[default]
    Unchanged = 0,
    /// A bit for each says whether it differs.
    Sparse = 1,
    /// All have a token.
    Dense = 2,
}

/// Tokens have a weight each, from the lowest to the highest that occurs.
struct Tokens {
    low: u8,
    high: u8,
}

impl Spread for Tokens {
    fn len(&self) -> usize {
        1 + usize::from(self.high - self.low)
    }
    fn of(&self, symbol: usize) -> Option<usize> {
        let (low, high) = (usize::from(self.low), usize::from(self.high));
        (low..=high).contains(&symbol).then(|| symbol - low)
    }
}

/// Bytes of bits have one weight for each number of ones, the escape one of its own.
struct Ones;

impl Spread for Ones {
    fn len(&self) -> usize {
        9
    }
    fn of(&self, symbol: usize) -> Option<usize> {
        Some(symbol.count_ones() as usize)
    }
}

/// Whether there are tokens for elements with the other sign.
const fn has_flips<W: Word>(float: bool) -> bool {
    float && W::WIDTH < 8
}

/// Makes classes of magnitudes, given the lowest magnitude of each class.
#[inline(always)]
fn to_classes(magnitudes: &mut [u8], from: &[u8]) {
    for magnitudes in magnitudes.chunks_mut(BLOCK) {
        let mut classes = [0; BLOCK];
        for from in from.iter().skip(1) {
            for (c, m) in classes.iter_mut().zip(magnitudes.iter()) {
                *c += u8::from(m >= from);
            }
        }
        magnitudes.copy_from_slice(&classes[..magnitudes.len()]);
    }
}

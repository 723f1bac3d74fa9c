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

use super::lanes::Word;
use super::weights::Spread;

/// Classes of a chunk, at most.
const CLASSES: usize = 16;
/// The byte that stands for a byte of bits that is written elsewhere.
const BITS_ESCAPE: u8 = 255;

/// How the elements of a class are coded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// None differs from its base.
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

/// The class of each magnitude, given the lowest magnitude of each class.
fn class_table(from: impl Iterator<Item = u8>) -> [u8; 256] {
    let mut table = [0; 256];
    for (class, from) in (0..).zip(from) {
        table[usize::from(from)..].fill(class);
    }
    table
}

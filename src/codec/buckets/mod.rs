//! Differences of order-mapped numbers to the base, in classes by the base's magnitude. An optimiser's step has about the same
//! size for all weights, so how many units in the last place a weight moves is decided by its exponent, and the decoder knows the
//! base's exponent. Each class has its own frequencies; where few elements of a class change, a bit for each says which.

pub(super) mod bands;
mod bits;
mod classes;
mod decode;
mod encode;
mod token;

pub(super) use decode::{decode, decode_magnitudes};
pub(super) use encode::{encode, encode_magnitudes};

use super::cpu::BLOCK;
use super::lanes::Word;
use super::weights::Spread;
use crate::tensor::Number;

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

/// What a difference is the difference of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    /// Integers.
    Integers,
    /// Floats in their order.
    Floats,
    /// Floats in their order away from zero on the base's side: a step towards zero is the same for both signs.
    Magnitudes,
}

/// Calls `$self.$f(…, order)` with the order as a constant, so that no loop asks for it.
macro_rules! for_order {
    ($order:expr, $self:ident.$f:ident($($arg:expr),*)) => {
        match $order {
            Order::Integers => $self.$f($($arg,)* Order::Integers),
            Order::Floats => $self.$f($($arg,)* Order::Floats),
            Order::Magnitudes => $self.$f($($arg,)* Order::Magnitudes),
        }
    };
}
use for_order;

impl Order {
    /// `floats` for floats.
    fn of(number: Number, floats: Order) -> Order {
        if number.is_float() {
            floats
        } else {
            Order::Integers
        }
    }

    fn is_float(self) -> bool {
        self != Order::Integers
    }

    /// What to add to `base` for a difference.
    #[inline(always)]
    fn add<W: Word>(self, base: W, difference: i64) -> W {
        match self {
            Order::Integers => base.plus(difference),
            Order::Floats => base.ordered().plus(difference).unordered(),
            Order::Magnitudes => {
                // All ones for a negative base: the difference with the other sign.
                let side = base.side();
                base.ordered()
                    .plus((difference ^ side).wrapping_sub(side))
                    .unordered()
            }
        }
    }

    /// The difference of `x` to `base`, wrapping.
    #[inline(always)]
    fn difference<W: Word>(self, x: W, base: W) -> W {
        match self {
            Order::Integers => x.less(base),
            Order::Floats => x.ordered().less(base.ordered()),
            Order::Magnitudes => x.ordered().less(base.ordered()).sided(base),
        }
    }
}

/// Whether there are tokens for elements with the other sign.
fn has_flips<W: Word>(order: Order) -> bool {
    order.is_float() && W::WIDTH < 8
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

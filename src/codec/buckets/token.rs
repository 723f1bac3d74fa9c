//! A difference as a byte, its token, and bits that are as likely 0 as 1 beside it: tokens are exact for small differences and grow
//! with them, as the digits of a floating-point number.

/// The token of no difference; those of opposite differences are as far from it on either side.
pub(super) const ZERO: u8 = 128;

/// How many bits after the leading one belong to the token of a difference of elements of so many bytes: as many as leave room for
/// the largest.
pub(super) const fn fraction(width: usize) -> u32 {
    match width {
        1 | 2 => 3,
        4 => 2,
        _ => 1,
    }
}

/// Tokens whose differences lie less than this far from zero have no bits beside them.
pub(super) const fn exact(width: usize) -> u8 {
    2 << fraction(width)
}

/// The token, and how many bits are beside it; these are the lowest ones of the difference's magnitude.
#[inline(always)]
pub(super) fn of(difference: i64, width: usize) -> (u8, u32) {
    let fraction = fraction(width);
    let magnitude = difference.unsigned_abs();
    let beside = (63 - (magnitude | 1).leading_zeros()).saturating_sub(fraction);
    // With a leading one, the upper bits count from 1 << fraction on, so that the next exponent follows on.
    let token = (beside << fraction) as u8 + (magnitude >> beside) as u8;
    (
        if difference < 0 {
            ZERO - token
        } else {
            ZERO.wrapping_add(token)
        },
        beside,
    )
}

/// What a token says of a difference.
#[derive(Clone, Copy, Default)]
pub(super) struct Meaning {
    /// The magnitude without the bits beside the token.
    pub(super) least: u64,
    /// How many these are.
    pub(super) beside: u32,
}

/// The meaning of each token of elements of so many bytes. Those that no difference has mean more than fits, which wraps.
pub(super) fn meanings(width: usize) -> [Meaning; 256] {
    let fraction = fraction(width);
    std::array::from_fn(|token| {
        let magnitude = u64::from((token as u8).abs_diff(ZERO));
        let beside = (magnitude >> fraction).saturating_sub(1) as u32;
        let upper = magnitude - u64::from(beside << fraction);
        Meaning {
            least: upper.checked_shl(beside).unwrap_or(0),
            beside: beside.min(63),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn assert_comes_back(d: i64, width: usize) {
        let (token, beside) = of(d, width);
        let meaning = meanings(width)[usize::from(token)];
        assert_eq!(beside, meaning.beside);
        let magnitude = meaning.least | d.unsigned_abs() & ((1 << beside) - 1);
        assert_eq!(magnitude, d.unsigned_abs(), "{d} as {token}");
        assert_eq!(token < ZERO, d < 0);
        assert_eq!(token.abs_diff(ZERO) < exact(width), beside == 0);
    }

    proptest! {
        #[test]
        fn tokens_mean_what_they_were_made_of(d: i64, small: i32, smaller: i16) {
            assert_comes_back(d, 8);
            assert_comes_back(i64::from(small), 4);
            assert_comes_back(i64::from(smaller), 2);
        }
    }

    #[test]
    fn ends_of_every_width() {
        for (width, least, most) in [
            (1, i64::from(i8::MIN), i64::from(i8::MAX)),
            (2, i64::from(i16::MIN), i64::from(i16::MAX)),
            (4, i64::from(i32::MIN), i64::from(i32::MAX)),
            (8, i64::MIN, i64::MAX),
        ] {
            for d in (-20..20).chain([least, least + 1, most - 1, most]) {
                assert_comes_back(d, width);
            }
        }
    }
}

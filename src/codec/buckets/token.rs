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

/// Tokens that no difference of elements of up to four bytes has. They say that a float has the other sign, how far its
/// magnitude is below the highest of these: its difference, which counts all numbers between, says less in more bits.
pub(super) const FLIPS: u8 = 14;
/// So many of them at the lower end, from 1 on; the others are the highest.
const LOW_FLIPS: u8 = 7;

/// The token of a float with the other sign, so far below the highest magnitude.
#[inline(always)]
pub(super) fn flip(below: u8) -> u8 {
    if below < LOW_FLIPS {
        below + 1
    } else {
        below + (u8::MAX - FLIPS + 1)
    }
}

/// What a token says of an element.
#[derive(Clone, Copy, Default)]
pub(super) struct Meaning {
    /// The difference's magnitude, or the element's other bits, without the bits beside the token.
    pub(super) least: u64,
    /// How many these are.
    pub(super) beside: u32,
    /// Whether the sign is the other one.
    pub(super) flip: bool,
}

/// Gives the tokens of floats with the other sign their meaning: their highest magnitude, and how many bits are below it.
pub(super) fn add_flips(meanings: &mut [Meaning; 256], highest: u8, beside: u32) {
    for below in 0..FLIPS {
        let least = u64::from(highest.saturating_sub(below)) << beside;
        meanings[usize::from(flip(below))] = Meaning {
            least,
            beside,
            flip: true,
        };
    }
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
            flip: false,
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
    fn flips_are_no_differences() {
        let flips: Vec<u8> = (0..FLIPS).map(flip).collect();
        for (width, most) in [(1, 1u64 << 7), (2, 1 << 15), (4, 1 << 31)] {
            for d in [most.cast_signed(), -most.cast_signed()] {
                assert!(!flips.contains(&of(d, width).0));
                assert!(
                    flips
                        .iter()
                        .all(|f| f.abs_diff(ZERO) > of(d, width).0.abs_diff(ZERO))
                );
            }
        }
        let mut all = meanings(4);
        add_flips(&mut all, 9, 23);
        assert_eq!(all.iter().filter(|m| m.flip).count(), usize::from(FLIPS));
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

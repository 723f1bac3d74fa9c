//! Tables of frequencies in few bytes: each weight is a small floating-point number, as exact as the number of symbols coded with
//! it deserves. docs/FORMAT.md, "Weights".

use super::rans::{Frequencies, SCALE};
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};

/// Bits of a weight's exponent.
const EXPONENT: u32 = 4;
/// The most bits of a weight's fraction.
const MAX_FRACTION: u32 = 4;

/// A weight's value: 0, or its fraction with a leading one, shifted by its exponent.
fn value(field: u32, fraction: u32) -> u32 {
    match field {
        0 => 0,
        v => (1 << fraction | v & ((1 << fraction) - 1)) << (v >> fraction),
    }
}

/// The field with the value nearest to `share`, which is at most 1, of the largest value; at least 1 if `share` is above 0.
fn field(share: f32, fraction: u32) -> u32 {
    if share <= 0.0 {
        return 0;
    }
    let top = value((1 << (EXPONENT + fraction)) - 1, fraction) as f32;
    let wanted = (share * top).max(1.0);
    let e = (wanted.log2().floor() as i32 - fraction as i32).clamp(0, 15);
    let m = (wanted / 2f32.powi(e)).round() as i32 - (1 << fraction);
    ((e << fraction) + m).clamp(1, (1 << (EXPONENT + fraction)) - 1) as u32
}

/// Frequencies that go with weights; several symbols may share one.
pub(super) trait Spread {
    /// How many weights there are.
    fn len(&self) -> usize;
    /// Which weight a symbol has; nothing for those that cannot occur.
    fn of(&self, symbol: usize) -> Option<usize>;
}

/// Scales weights to frequencies: each symbol's share rounded down but at least 1, the rest to the most frequent symbol.
fn spread(weights: &[u32], how: &impl Spread) -> Option<Frequencies> {
    let weight = |s: usize| how.of(s).and_then(|w| weights.get(w)).copied().unwrap_or(0);
    let total: u64 = (0..256).map(|s| u64::from(weight(s))).sum();
    if total == 0 {
        return None;
    }
    let mut f: Frequencies = std::array::from_fn(|s| match weight(s) {
        0 => 0,
        w => (u64::from(w) * u64::from(SCALE) / total).max(1) as u32,
    });
    let mut sum: u32 = f.iter().sum();
    while sum != SCALE {
        // The first of the most frequent; there are at most 256 symbols, so it has enough to give.
        let most = f.iter_mut().rev().max_by_key(|f| **f)?;
        let new = if sum > SCALE {
            (*most / 2).max(most.saturating_sub(sum - SCALE)).max(1)
        } else {
            *most + SCALE - sum
        };
        sum = sum + new - *most;
        *most = new;
    }
    Some(f)
}

/// Weights fitted to what they are to code.
pub(super) struct Weights {
    fields: Vec<u32>,
    fraction: u32,
    pub(super) frequencies: Frequencies,
}

/// How many bits of fraction pay: rounding a weight to `f` of them costs about 0.03·4⁻ᶠ bits a symbol.
fn fraction(symbols: u32, weights: usize) -> u32 {
    (0..MAX_FRACTION)
        .find(|f| 0.02 * symbols as f32 <= (weights << (2 * f)) as f32)
        .unwrap_or(MAX_FRACTION)
}

impl Weights {
    /// Fits weights to how often each symbol occurs. Nothing if none does.
    pub(super) fn fit(counts: &[u32; 256], how: &impl Spread) -> Option<Self> {
        let mut sums = vec![(0u64, 0u32); how.len()];
        for (s, c) in counts.iter().enumerate() {
            if let Some(sum) = how.of(s).and_then(|w| sums.get_mut(w)) {
                *sum = (sum.0 + u64::from(*c), sum.1 + 1);
            }
        }
        let shares: Vec<f32> = sums
            .iter()
            .map(|(sum, n)| *sum as f32 / (*n).max(1) as f32)
            .collect();
        let most = shares.iter().copied().fold(0.0, f32::max);
        let fraction = fraction(counts.iter().sum(), sums.len());
        let fields: Vec<u32> = shares.iter().map(|s| field(s / most, fraction)).collect();
        let weights: Vec<u32> = fields.iter().map(|v| value(*v, fraction)).collect();
        let frequencies = spread(&weights, how)?;
        Some(Weights {
            fields,
            fraction,
            frequencies,
        })
    }

    /// Writes the bits of the fraction and the fields, lowest bit first; after a zero follows how many more there are.
    pub(super) fn write(&self, w: &mut Writer) {
        w.u8(self.fraction as u8);
        let width = EXPONENT + self.fraction;
        let (mut bits, mut n) = (0u32, 0);
        for v in runs(&self.fields, width) {
            bits |= v << n;
            n += width;
            while n >= 8 {
                w.u8(bits as u8);
                bits >>= 8;
                n -= 8;
            }
        }
        if n > 0 {
            w.u8(bits as u8);
        }
    }

    /// Reads what [`Weights::write`] wrote, as frequencies.
    pub(super) fn read(r: &mut Reader<'_>, how: &impl Spread) -> Result<Frequencies> {
        let fraction = u32::from(r.u8()?);
        if fraction > MAX_FRACTION {
            return Err(Error::damage(format!("weights with {fraction} bits of fraction")));
        }
        let width = EXPONENT + fraction;
        let (mut bits, mut n) = (0u32, 0);
        let mut field = || -> Result<u32> {
            while n < width {
                bits |= u32::from(r.u8()?) << n;
                n += 8;
            }
            let v = bits & ((1 << width) - 1);
            bits >>= width;
            n -= width;
            Ok(v)
        };
        let mut weights = Vec::with_capacity(how.len());
        while weights.len() < how.len() {
            let v = field()?;
            weights.push(value(v, fraction));
            if v == 0 {
                weights.resize(weights.len() + field()? as usize, 0);
            }
        }
        if weights.len() > how.len() {
            return Err(Error::damage("weights are too many"));
        }
        spread(&weights, how).ok_or_else(|| Error::damage("weights are all zero"))
    }
}

/// The fields as they are written.
fn runs(fields: &[u32], width: u32) -> Vec<u32> {
    let mut out = Vec::with_capacity(fields.len());
    let mut fields = fields.iter().peekable();
    while let Some(v) = fields.next() {
        out.push(*v);
        if *v == 0 {
            let most = (1 << width) - 1;
            let mut more = 0;
            while more < most && fields.next_if(|v| **v == 0).is_some() {
                more += 1;
            }
            out.push(more);
        }
    }
    out
}

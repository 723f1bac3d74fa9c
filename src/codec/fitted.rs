//! A plane through the entropy coder with one table, fitted to it and written before it.

use super::rans::{self, Frequencies, LANES, SCALE};
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};

/// How often each byte is expected, in 4096ths: at least two bytes, each of those that occur at least one.
pub(super) struct Fitted {
    of: Frequencies,
    /// The bytes they were fitted to, coded with them.
    data_size: usize,
}

impl Fitted {
    /// Fits frequencies to `bytes`. Nothing if fewer than two values occur.
    pub(super) fn of(bytes: &[u8]) -> Option<Self> {
        let counts = histogram(bytes);
        if counts.iter().filter(|c| **c > 0).count() < 2 {
            return None;
        }
        let total = bytes.len() as u64;
        let mut f = counts.map(|c| match c {
            0 => 0,
            c => ((c * u64::from(SCALE) + total / 2) / total).clamp(1, u64::from(SCALE) - 1) as u32,
        });
        // Rounding left the sum a little off: take from, or give to, whoever feels it least, or gains most.
        let mut sum: u32 = f.iter().sum();
        while sum != SCALE {
            let occurring = || (0..256).filter(|s| f[*s] > 0);
            // Fractions counts/f compared without dividing.
            let by =
                |a: &usize, b: &usize| (counts[*a] * u64::from(f[*b])).cmp(&(counts[*b] * u64::from(f[*a])));
            let (at, step) = if sum > SCALE {
                (occurring().filter(|s| f[*s] > 1).min_by(by), u32::MAX)
            } else {
                (occurring().max_by(by), 1)
            };
            let at = at?;
            f[at] = f[at].wrapping_add(step);
            sum = sum.wrapping_add(step);
        }
        let bits: f64 = (0..256)
            .filter(|s| f[*s] > 0)
            .map(|s| counts[s] as f64 * (12.0 - f64::from(f[s]).log2()))
            .sum();
        Some(Fitted {
            of: f,
            data_size: (bits / 8.0) as usize,
        })
    }

    /// About how many bytes [`encode`] will make, without the frequencies.
    pub(super) fn data_size(&self) -> usize {
        // The states hold about half of what they can.
        4 * LANES + self.data_size.saturating_sub(LANES)
    }

    /// About how many bytes [`encode`] will make.
    pub(super) fn size(&self) -> usize {
        let mut w = Writer::new();
        self.write(&mut w);
        w.finish().len() + self.data_size()
    }

    /// The highest byte that occurs, then the frequency of each byte from 0 up to it; after a zero, how many more follow.
    fn write(&self, w: &mut Writer) {
        let last = self.of.iter().rposition(|f| *f > 0).unwrap_or(0);
        w.u8(last as u8);
        let mut s = 0;
        while s <= last {
            w.varint(u64::from(self.of[s]));
            if self.of[s] == 0 {
                let more = self.of[s + 1..].iter().take_while(|f| **f == 0).count();
                w.u8(more as u8);
                s += more;
            }
            s += 1;
        }
    }

    fn read(r: &mut Reader<'_>) -> Result<Self> {
        let bad = || Error::damage("frequencies do not add up");
        let mut f = [0; 256];
        let last = usize::from(r.u8()?);
        let mut s = 0;
        let mut sum = 0;
        while s <= last {
            let v = u32::try_from(r.varint()?)
                .ok()
                .filter(|v| *v < SCALE)
                .ok_or_else(bad)?;
            if v == 0 {
                s += usize::from(r.u8()?);
            } else {
                f[s] = v;
                sum += v;
            }
            s += 1;
        }
        if sum != SCALE || s != last + 1 {
            return Err(bad());
        }
        Ok(Fitted { of: f, data_size: 0 })
    }
}

fn histogram(bytes: &[u8]) -> [u64; 256] {
    // Four tables, so that equal neighbours do not wait for each other.
    let mut tables = [[0u32; 256]; 4];
    let (fours, rest) = bytes.as_chunks::<4>();
    for four in fours {
        for (table, b) in tables.iter_mut().zip(four) {
            table[usize::from(*b)] += 1;
        }
    }
    for b in rest {
        tables[0][usize::from(*b)] += 1;
    }
    std::array::from_fn(|s| tables.iter().map(|t| u64::from(t[s])).sum())
}

/// Codes `bytes` with frequencies that were fitted to them.
pub(super) fn encode(f: &Fitted, bytes: &[u8]) -> Vec<u8> {
    let mut w = Writer::new();
    f.write(&mut w);
    rans::encode::<1>(&[f.of], rans::One, bytes, &mut w);
    w.finish()
}

/// Fills `out`; a payload that holds less or more is damage.
pub(super) fn decode(payload: &[u8], out: &mut [u8]) -> Result<()> {
    let mut r = Reader::new(payload, "entropy-coded plane");
    let f = Fitted::read(&mut r)?;
    rans::decode::<1>(&[f.of], rans::One, r, out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn assert_round_trips(bytes: &[u8]) {
        let Some(f) = Fitted::of(bytes) else {
            return;
        };
        let size = f.size();
        let payload = encode(&f, bytes);
        assert!(
            payload.len().abs_diff(size) <= 10 + size / 64,
            "{} bytes instead of {size}",
            payload.len()
        );
        let mut out = vec![0; bytes.len()];
        decode(&payload, &mut out).unwrap();
        assert!(out == bytes);
        for wrong in [bytes.len() + 1, bytes.len() - 1, bytes.len() + 8] {
            assert!(decode(&payload, &mut vec![0; wrong]).is_err());
        }
    }

    proptest! {
        #[test]
        fn round_trips(bytes: Vec<u8>, few in prop::collection::vec(0u8..3, 0..2000), skew in 0u32..60) {
            assert_round_trips(&bytes);
            assert_round_trips(&few);
            let skewed: Vec<u8> = few.iter().zip(0u32..).map(|(b, i)| if i % 60 < skew { 7 } else { *b }).collect();
            assert_round_trips(&skewed);
        }

        #[test]
        fn any_payload_is_decoded_or_refused(payload: Vec<u8>, len in 0usize..100) {
            let _ = decode(&payload, &mut vec![0; len]);
        }
    }

    #[test]
    fn one_rare_byte_among_a_million_costs_little() {
        let mut bytes = vec![200; 1 << 20];
        bytes[77_777] = 3;
        assert_round_trips(&bytes);
        let f = Fitted::of(&bytes).unwrap();
        assert!(encode(&f, &bytes).len() < 150);
        assert!(Fitted::of(&[5; 100]).is_none());
        assert!(Fitted::of(&[]).is_none());
    }

    #[test]
    fn all_bytes_at_once() {
        let bytes: Vec<u8> = (0..=255).flat_map(|b| vec![b; usize::from(b) * 9 + 1]).collect();
        assert_round_trips(&bytes);
    }
}

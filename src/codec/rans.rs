//! An order-0 entropy coder for bytes: range asymmetric numeral systems with static frequencies (J. Duda, arXiv 1311.2540), eight
//! interleaved states of 32 bits that move 16 bits at a time (F. Giesen, arXiv 1402.3392). Takes fractions of a bit for what is
//! almost certain, where Huffman codes take one.

use super::scratch;
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};
use std::hint::select_unpredictable;

/// Frequencies add up to two to this power.
const SCALE_BITS: u32 = 12;
const SCALE: u32 = 1 << SCALE_BITS;
/// States; byte `i` belongs to state `i % LANES`.
const LANES: usize = 8;
/// A state is at least this between two bytes; where the encoder starts and the decoder must end.
const LOW: u32 = 1 << 16;

/// How often each byte is expected, in 4096ths: at least two bytes, each of those that occur at least one.
pub(super) struct Frequencies {
    of: [u32; 256],
    /// The bytes they were fitted to, coded with them.
    data_size: usize,
}

impl Frequencies {
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
        Some(Frequencies {
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
        Ok(Frequencies { of: f, data_size: 0 })
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

/// What coding a byte takes: its frequency, the sum of those before it, and the frequency's reciprocal.
#[derive(Clone, Copy)]
struct Symbol {
    frequency: u32,
    start: u32,
    reciprocal: u64,
}

/// With x < 2²⁰f and f < 2¹², ⌊x·⌈2⁴⁴/f⌉ / 2⁴⁴⌋ is ⌊x/f⌋ and the product stays below 2⁶⁴.
const RECIPROCAL_BITS: u32 = 44;

impl Frequencies {
    fn symbols(&self) -> [Symbol; 256] {
        let mut sum = 0;
        self.of.map(|frequency| {
            let reciprocal = (1u64 << RECIPROCAL_BITS).div_ceil(u64::from(frequency.max(1)));
            sum += frequency;
            Symbol {
                frequency,
                start: sum - frequency,
                reciprocal,
            }
        })
    }
}

/// Codes `bytes` with frequencies that were fitted to them.
pub(super) fn encode(f: &Frequencies, bytes: &[u8]) -> Vec<u8> {
    let symbols = f.symbols();
    let mut states = [LOW; LANES];
    let (groups, rest) = bytes.as_chunks::<LANES>();
    // The decoder reads forwards what is written here backwards: at most a word for each byte.
    scratch::with_bytes(2 * bytes.len(), |words| {
        let mut end = words.len();
        for (x, b) in states.iter_mut().zip(rest).rev() {
            let (word, more) = put(&symbols[usize::from(*b)], x);
            words[end - 2..end].copy_from_slice(&word.to_le_bytes());
            end -= 2 * usize::from(more);
        }
        let (mut room, _) = words.split_at_mut(end);
        for group in groups.iter().rev() {
            let Some((rest, last)) = room.split_last_chunk_mut::<{ 2 * LANES }>() else {
                break;
            };
            let mut end = LANES;
            for (x, b) in states.iter_mut().zip(group).rev() {
                let (word, more) = put(&symbols[usize::from(*b)], x);
                let at = 2 * (end - 1);
                last[at..at + 2].copy_from_slice(&word.to_le_bytes());
                end -= usize::from(more);
            }
            let left = rest.len() + 2 * end;
            room = &mut room[..left];
        }
        let taken = room.len();
        let mut w = Writer::new();
        f.write(&mut w);
        for x in states {
            w.u32(x);
        }
        w.raw(&words[taken..]);
        w.finish()
    })
}

/// Codes one byte into a state; gives the state's lower half and whether it had to be moved out first.
#[inline(always)]
fn put(symbol: &Symbol, x: &mut u32) -> (u16, bool) {
    let word = *x as u16;
    let more = u64::from(*x) >= u64::from(symbol.frequency) << (32 - SCALE_BITS);
    let y = select_unpredictable(more, *x >> 16, *x);
    let quotient = ((u64::from(y) * symbol.reciprocal) >> RECIPROCAL_BITS) as u32;
    *x = y + quotient * (SCALE - symbol.frequency) + symbol.start;
    (word, more)
}

/// Fills `out`; a payload that holds less or more is damage.
pub(super) fn decode(payload: &[u8], out: &mut [u8]) -> Result<()> {
    let mut r = Reader::new(payload, "entropy-coded plane");
    let table = table(&Frequencies::read(&mut r)?);
    let mut states = [0; LANES];
    for x in &mut states {
        *x = r.u32()?;
    }
    let mut words = r.raw(r.remaining())?;
    let (groups, rest) = out.as_chunks_mut::<LANES>();
    for group in groups {
        let n = match words.first_chunk() {
            Some(next) => step(&table, &mut states, next, group),
            // Near the end, zeros stand in for words that are not there; none of them may be taken.
            None => step(&table, &mut states, &padded(words), group),
        };
        words = words
            .get(n..)
            .ok_or_else(|| Error::damage("entropy-coded plane is truncated"))?;
    }
    let next = padded(words);
    let mut taken = 0;
    for (x, b) in states.iter_mut().zip(rest) {
        *b = take(&table, x, &next, &mut taken);
    }
    if 2 * taken != words.len() || states != [LOW; LANES] {
        return Err(Error::damage("entropy-coded plane does not end where it should"));
    }
    Ok(())
}

fn padded(words: &[u8]) -> [u8; 2 * LANES] {
    let mut next = [0; 2 * LANES];
    let n = words.len().min(next.len());
    next[..n].copy_from_slice(&words[..n]);
    next
}

/// Decodes a byte from each state; gives the bytes of `next` that topped them up.
#[inline(always)]
fn step(table: &Table, states: &mut [u32; LANES], next: &[u8; 2 * LANES], group: &mut [u8; LANES]) -> usize {
    let mut taken = 0;
    for (x, b) in states.iter_mut().zip(group) {
        *b = take(table, x, next, &mut taken);
    }
    2 * taken
}

/// Decodes a byte from one state and tops it up from `next`, of which `taken` words have been taken.
#[inline(always)]
fn take(table: &Table, x: &mut u32, next: &[u8; 2 * LANES], taken: &mut usize) -> u8 {
    let entry = table[(*x % SCALE) as usize];
    // Below 2³², as the frequency is below 2¹² and the state's upper bits below 2²⁰.
    let y = (entry >> 20) * (*x >> SCALE_BITS) + (entry >> 8 & (SCALE - 1));
    let at = *taken % LANES * 2;
    let word = u32::from(u16::from_le_bytes([next[at], next[at + 1]]));
    // Without a branch: whether a state needs topping up is what cannot be predicted.
    let more = y < LOW;
    *x = select_unpredictable(more, y << 16 | word, y);
    *taken += usize::from(more);
    entry as u8
}

type Table = [u32; SCALE as usize];

/// For each remainder of a state: frequency in the upper 12 bits, offset within it in the next 12, the byte in the lower 8.
fn table(f: &Frequencies) -> Box<Table> {
    let mut table = Box::new([0; SCALE as usize]);
    let mut entries = table.iter_mut();
    for (s, freq) in (0..).zip(f.of) {
        for (offset, entry) in (0..freq).zip(&mut entries) {
            *entry = freq << 20 | offset << 8 | s;
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn assert_round_trips(bytes: &[u8]) {
        let Some(f) = Frequencies::of(bytes) else {
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
        let f = Frequencies::of(&bytes).unwrap();
        assert!(encode(&f, &bytes).len() < 150);
        assert!(Frequencies::of(&[5; 100]).is_none());
        assert!(Frequencies::of(&[]).is_none());
    }

    #[test]
    fn all_bytes_at_once() {
        let bytes: Vec<u8> = (0..=255).flat_map(|b| vec![b; usize::from(b) * 9 + 1]).collect();
        assert_round_trips(&bytes);
    }
}

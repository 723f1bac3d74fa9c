//! An entropy coder for bytes: range asymmetric numeral systems with static frequencies (J. Duda, arXiv 1311.2540), eight interleaved
//! states of 32 bits that move 16 bits at a time (F. Giesen, arXiv 1402.3392). Takes fractions of a bit for what is almost certain,
//! where Huffman codes take one. Each byte may have its own table, chosen by a context that the decoder knows beforehand.

use super::cpu::{self, Cpu, Work};
use super::scratch;
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};
use std::cell::Cell;
use std::hint::select_unpredictable;

/// Frequencies add up to two to this power.
pub(super) const SCALE_BITS: u32 = 12;
/// What the frequencies of a table add up to.
pub(super) const SCALE: u32 = 1 << SCALE_BITS;
/// States; byte `i` belongs to state `i % LANES`.
pub(super) const LANES: usize = 8;
/// Tables at most.
const MAX_TABLES: usize = 16;
/// A state is at least this between two bytes; where the encoder starts and the decoder must end.
pub(super) const LOW: u32 = 1 << 16;

/// How often each byte is expected, in 4096ths. They add up to [`SCALE`].
pub(super) type Frequencies = [u32; 256];

/// Which table codes which byte.
pub(super) trait Contexts: Copy {
    /// The table of each of the eight bytes of group `g`.
    fn group(self, g: usize) -> [u8; LANES];
    /// The table of byte `i`.
    fn at(self, i: usize) -> u8;
}

/// One table for all.
#[derive(Clone, Copy)]
pub(super) struct One;

impl Contexts for One {
    #[inline(always)]
    fn group(self, _: usize) -> [u8; LANES] {
        [0; LANES]
    }
    #[inline(always)]
    fn at(self, _: usize) -> u8 {
        0
    }
}

/// A context for each byte; those that are missing are 0.
impl Contexts for &[u8] {
    #[inline(always)]
    fn group(self, g: usize) -> [u8; LANES] {
        self.as_chunks().0.get(g).copied().unwrap_or_default()
    }
    #[inline(always)]
    fn at(self, i: usize) -> u8 {
        self.get(i).copied().unwrap_or_default()
    }
}

/// What coding a byte takes: its frequency, the sum of those before it, and the frequency's reciprocal.
#[derive(Clone, Copy)]
struct Symbol {
    frequency: u32,
    start: u32,
    reciprocal: u64,
}

/// With x < 2²⁰f and f ≤ 2¹², ⌊x·⌈2⁴⁴/f⌉ / 2⁴⁴⌋ is ⌊x/f⌋ and the product stays below 2⁶⁴.
const RECIPROCAL_BITS: u32 = 44;

/// Of each frequency; a division for each byte of each table would take as long as coding.
static RECIPROCALS: [u64; SCALE as usize + 1] = {
    let mut all = [0; SCALE as usize + 1];
    let mut f = 1;
    while f < all.len() {
        all[f] = (1u64 << RECIPROCAL_BITS).div_ceil(f as u64);
        f += 1;
    }
    all
};

fn symbols(f: &Frequencies) -> [Symbol; 256] {
    let mut sum = 0;
    f.map(|frequency| {
        sum += frequency;
        Symbol {
            frequency,
            start: sum - frequency,
            reciprocal: RECIPROCALS.get(frequency as usize).copied().unwrap_or_default(),
        }
    })
}

/// Codes `bytes`, each with the table of its context (`K` tables at most, a power of two); each must have a frequency there.
pub(super) fn encode<const K: usize>(
    tables: &[Frequencies],
    contexts: impl Contexts,
    bytes: &[u8],
    w: &mut Writer,
) {
    let mut table = vec![
        [Symbol {
            frequency: 0,
            start: 0,
            reciprocal: 0
        }; 256];
        K
    ];
    for (t, f) in table.iter_mut().zip(tables) {
        *t = symbols(f);
    }
    let Ok(table) = <Box<[_; K]>>::try_from(table) else {
        return;
    };
    let symbol = |context: u8, b: u8| &table[usize::from(context) % K][usize::from(b)];
    let mut states = [LOW; LANES];
    let (groups, rest) = bytes.as_chunks::<LANES>();
    // The decoder reads forwards what is written here backwards: at most a word for each byte.
    scratch::with_bytes(2 * bytes.len(), |words| {
        let mut end = words.len();
        let from = groups.len() * LANES;
        for (i, (x, b)) in states.iter_mut().zip(rest).enumerate().rev() {
            let (word, more) = put(symbol(contexts.at(from + i), *b), x);
            words[end - 2..end].copy_from_slice(&word.to_le_bytes());
            end -= 2 * usize::from(more);
        }
        let (mut room, _) = words.split_at_mut(end);
        for (g, group) in groups.iter().enumerate().rev() {
            let Some((rest, last)) = room.split_last_chunk_mut::<{ 2 * LANES }>() else {
                break;
            };
            let mut end = LANES;
            let contexts = contexts.group(g);
            for lane in (0..LANES).rev() {
                let (word, more) = put(symbol(contexts[lane], group[lane]), &mut states[lane]);
                let at = 2 * (end - 1);
                last[at..at + 2].copy_from_slice(&word.to_le_bytes());
                end -= usize::from(more);
            }
            let left = rest.len() + 2 * end;
            room = &mut room[..left];
        }
        let taken = room.len();
        for x in states {
            w.u32(x);
        }
        w.raw(&words[taken..]);
    });
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

/// Fills `out` from all that `r` still holds; a payload that holds less or more is damage. `K` as in [`encode`].
pub(super) fn decode<const K: usize>(
    tables: &[Frequencies],
    contexts: impl Contexts,
    r: Reader<'_>,
    out: &mut [u8],
) -> Result<()> {
    let mut table = TABLES.take().unwrap_or_else(|| Box::new([0; TABLES_LEN]));
    cpu::best(Fill {
        tables,
        to: &mut table,
    });
    let result = decode_with::<K>(&table, contexts, r, out);
    TABLES.set(Some(table));
    result
}

thread_local! {
    /// Kept, as a fresh one costs as much as filling it.
    static TABLES: Cell<Option<Box<Tables>>> = const { Cell::new(None) };
}

fn decode_with<const K: usize>(
    table: &Tables,
    contexts: impl Contexts,
    mut r: Reader<'_>,
    out: &mut [u8],
) -> Result<()> {
    let mut states = [0; LANES];
    for x in &mut states {
        *x = r.u32()?;
    }
    let words = r.raw(r.remaining())?;
    let (groups, rest) = out.as_chunks_mut::<LANES>();
    let count = groups.len();
    let mut run = |first: usize, words: &[u8], groups: &mut [[u8; LANES]]| {
        cpu::best(Groups::<K, _> {
            table,
            contexts,
            first,
            states: &mut states,
            words,
            groups,
        })
    };
    let (done, used) = run(0, words, groups);
    // Near the end, zeros stand in for words that are not there; none of them may be taken.
    let mut last = [0; 6 * LANES];
    for (l, w) in last.iter_mut().zip(words.iter().skip(used).take(2 * LANES)) {
        *l = *w;
    }
    let (more, used_last) = run(done, &last, &mut groups[done..]);
    let next = last.get(used_last..).and_then(|l| l.first_chunk());
    let next = next
        .filter(|_| done + more == count)
        .ok_or_else(|| Error::damage("entropy-coded bytes are truncated"))?;
    let mut taken = 0;
    for (i, (x, b)) in states.iter_mut().zip(rest).enumerate() {
        let entry = entry::<K>(table, contexts.at(count * LANES + i), *x);
        *b = take(entry, x, next, &mut taken);
    }
    if used + used_last + 2 * taken != words.len() || states != [LOW; LANES] {
        return Err(Error::damage("entropy-coded bytes do not end where they should"));
    }
    Ok(())
}

/// Decodes groups as far as there are words that may be needed; gives how many, and the bytes that topped up the states.
struct Groups<'a, const K: usize, C> {
    table: &'a Tables,
    contexts: C,
    /// The number of the first group.
    first: usize,
    states: &'a mut [u32; LANES],
    words: &'a [u8],
    groups: &'a mut [[u8; LANES]],
}

impl<const K: usize, C: Contexts> Work for Groups<'_, K, C> {
    type Output = (usize, usize);

    #[inline(always)]
    fn run(self, cpu: impl Cpu) -> (usize, usize) {
        let Groups {
            table,
            contexts,
            first,
            states,
            words,
            groups,
        } = self;
        let contexts = |g: usize| contexts.group(first + g);
        let (mut done, mut used) = cpu.decode_groups::<K>(table, contexts, states, words, groups);
        for group in &mut groups[done..] {
            let Some(next) = words.get(used..).and_then(|w| w.first_chunk()) else {
                break;
            };
            used += step::<K>(table, contexts(done), states, next, group);
            done += 1;
        }
        (done, used)
    }
}

/// Decodes a byte from each state; gives the bytes of `next` that topped them up.
#[inline(always)]
fn step<const K: usize>(
    table: &Tables,
    contexts: [u8; LANES],
    states: &mut [u32; LANES],
    next: &[u8; 2 * LANES],
    group: &mut [u8; LANES],
) -> usize {
    let mut taken = 0;
    for (x, (b, c)) in states.iter_mut().zip(group.iter_mut().zip(contexts)) {
        *b = take(entry::<K>(table, c, *x), x, next, &mut taken);
    }
    2 * taken
}

/// Decodes a byte from one state, whose entry this is, and tops it up from `next`, of which `taken` words have been taken.
#[inline(always)]
fn take(entry: u32, x: &mut u32, next: &[u8; 2 * LANES], taken: &mut usize) -> u8 {
    let upper = *x >> SCALE_BITS;
    // Below 2³², as the frequency is at most 2¹² and the state's upper bits below 2²⁰.
    let y = (entry >> 20) * upper + (upper + (entry >> 8 & (SCALE - 1)));
    let at = *taken % LANES * 2;
    let word = u32::from(u16::from_le_bytes([next[at], next[at + 1]]));
    // Without a branch: whether a state needs topping up is what cannot be predicted.
    let more = y < LOW;
    *x = select_unpredictable(more, y << 16 | word, y);
    *taken += usize::from(more);
    entry as u8
}

/// The tables of a decoder, one after the other. For each remainder of a state: frequency less one in the upper 12 bits, offset
/// within it in the next 12, the byte in the lower 8.
pub(super) type Tables = [u32; TABLES_LEN];

const TABLES_LEN: usize = MAX_TABLES * SCALE as usize + RUN;

/// So many entries are written at once: what is too much, those of the next byte cover.
const RUN: usize = 16;

/// Fills tables.
struct Fill<'a> {
    tables: &'a [Frequencies],
    to: &'a mut Tables,
}

impl Work for Fill<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self, _: impl Cpu) {
        for (t, frequencies) in self.tables.iter().enumerate().take(MAX_TABLES) {
            let mut at = t * SCALE as usize;
            for (s, frequency) in (0..).zip(frequencies) {
                let end = at + *frequency as usize;
                let mut entry = frequency.wrapping_sub(1) << 20 | s;
                for from in (at..end).step_by(RUN) {
                    let Some(run) = self.to[from..].first_chunk_mut::<RUN>() else {
                        return;
                    };
                    for (e, i) in run.iter_mut().zip(0..) {
                        *e = entry + (i << 8);
                    }
                    entry = entry.wrapping_add((RUN as u32) << 8);
                }
                at = end;
            }
        }
    }
}

/// The entry for a state in the table of a context.
#[inline(always)]
fn entry<const K: usize>(tables: &Tables, context: u8, x: u32) -> u32 {
    tables[usize::from(context) % K * SCALE as usize + (x % SCALE) as usize]
}

//! Writing differences in classes.

use super::bits::BitWriter;
use super::classes::{Class, Sample};
use super::{BITS_ESCAPE, CLASSES, Kind, Ones, Order, Tokens, for_order, token};
use crate::bytes::Writer;
use crate::codec::cpu::{self, BLOCK, Cpu, Work};
use crate::codec::lanes::{Word, block_or_part, for_width};
use crate::codec::rans::{self, SCALE};
use crate::codec::weights::Weights;
use crate::codec::{Input, diff, scratch};
use std::marker::PhantomData;

/// Blocks that are looked at to choose the classes.
const SAMPLED: usize = 512;

/// Differences of integers, or of floats in their order.
pub(in crate::codec) fn encode(input: Input<'_>) -> Option<Vec<u8>> {
    encode_input(input, Order::of(input.number, Order::Floats))
}

/// Differences of floats away from zero.
pub(in crate::codec) fn encode_magnitudes(input: Input<'_>) -> Option<Vec<u8>> {
    if !input.number.is_float() {
        return None;
    }
    encode_input(input, Order::Magnitudes)
}

fn encode_input(input: Input<'_>, order: Order) -> Option<Vec<u8>> {
    let (raw, base, tail) = diff::pair(input)?;
    let mut w = Writer::new();
    for_width!(input.number, encode_words(raw, base, order, &mut w));
    w.raw(tail);
    Some(w.finish())
}

pub(super) fn encode_words<W: Word>(raw: &[u8], base: &[u8], order: Order, w: &mut Writer) {
    let pair = Pair::<W>::new(raw, base, order);
    let sample = cpu::best(Sampling(pair));
    let classes = sample.classes();
    let highest = sample.highest_flip();
    let room = pair.blocks() * BLOCK + BLOCK;
    scratch::with_bytes(room, |tokens| {
        scratch::with_bytes(room, |token_classes| {
            let split = cpu::best(Splitting {
                pair,
                classes: &classes,
                highest,
                tokens,
                token_classes,
            });
            write(&classes, highest, split, w);
        });
    });
}

/// Writes what was split.
fn write(classes: &[Class], highest: u8, mut split: Split<'_>, w: &mut Writer) {
    let mut counts = vec![[0u32; 256]; classes.len()];
    for (c, t) in split.classes.iter().zip(split.tokens) {
        if let Some(counts) = counts.get_mut(usize::from(*c)) {
            counts[usize::from(*t)] += 1;
        }
    }

    w.u8(classes.len() as u8 - 1);
    for c in classes.iter().skip(1) {
        w.u8(c.from);
    }
    w.u8(highest);
    let mut token_tables = vec![[0; 256]; classes.len()];
    let mut bits_tables = token_tables.clone();
    let (mut bits, mut bit_classes, mut bits_aside) = (Vec::new(), Vec::new(), Vec::new());
    for (i, class) in classes.iter().enumerate() {
        let occurring = || (0..=255u8).filter(|s| counts[i][usize::from(*s)] > 0);
        if counts[i].iter().all(|c| *c == 0) {
            w.u8(Kind::Unchanged as u8);
            continue;
        }
        w.u8(class.kind as u8);
        let how = Tokens {
            low: occurring().next().unwrap_or(0),
            high: occurring().next_back().unwrap_or(0),
        };
        w.u8(how.low).u8(how.high);
        if let Some(weights) = Weights::fit(&counts[i], &how) {
            weights.write(w);
            token_tables[i] = weights.frequencies;
        }
        if class.kind == Kind::Sparse {
            let sink = std::mem::take(&mut split.bits[i]);
            w.varint(sink.len() as u64);
            let from = bits.len();
            bits.extend_from_slice(&sink.finish());
            if let Some(weights) = fit_bits(&mut bits[from..], &mut bits_aside) {
                weights.write(w);
                bits_tables[i] = weights.frequencies;
            }
            bit_classes.resize(bits.len(), i as u8);
        }
    }
    put_coded(&bits_tables, &bit_classes, &bits, w);
    w.blob(&bits_aside);
    put_coded(&token_tables, split.classes, split.tokens, w);
    w.blob(&split.beside.finish());
}

/// What the entropy coder makes of bytes, as a blob; an empty one for no bytes.
fn put_coded(tables: &[rans::Frequencies], classes: &[u8], bytes: &[u8], w: &mut Writer) {
    let mut coded = Writer::new();
    if !bytes.is_empty() {
        match tables.len() {
            1 => rans::encode::<1>(tables, rans::One, bytes, &mut coded),
            2..=4 => rans::encode::<4>(tables, classes, bytes, &mut coded),
            _ => rans::encode::<CLASSES>(tables, classes, bytes, &mut coded),
        }
    }
    w.blob(&coded.finish());
}

/// Chooses how many ones a byte may have to be coded as it is, and puts the others aside.
fn fit_bits(bits: &mut [u8], aside: &mut Vec<u8>) -> Option<Weights> {
    let mut counts = [0u32; 256];
    for b in bits.iter() {
        counts[usize::from(*b)] += 1;
    }
    let mut of_ones = [(0u32, 0u32); 9];
    for (s, c) in counts.iter().enumerate() {
        let (sum, symbols) = &mut of_ones[s.count_ones() as usize];
        (*sum, *symbols) = (*sum + c, *symbols + 1);
    }
    // A byte that is much rarer than the least frequency would make room for itself at the others' cost.
    let rare = |(sum, symbols): (u32, u32)| sum * 4 * SCALE < symbols * bits.len() as u32;
    let most = (2..8).find(|n| rare(of_ones[*n])).map_or(7, |n| n - 1) as u32;
    for b in bits.iter_mut().filter(|b| b.count_ones() > most) {
        counts[usize::from(*b)] -= 1;
        counts[usize::from(BITS_ESCAPE)] += 1;
        aside.push(*b);
        *b = BITS_ESCAPE;
    }
    Weights::fit(&counts, &Ones)
}

/// A chunk and its base, block by block.
#[derive(Clone, Copy)]
pub(super) struct Pair<'a, W> {
    raw: &'a [u8],
    base: &'a [u8],
    pub(super) order: Order,
    word: PhantomData<W>,
}

/// One block of both, and the magnitudes of the base.
pub(super) struct Block<W> {
    raw: [W; BLOCK],
    base: [W; BLOCK],
    magnitudes: [u8; BLOCK],
    /// Elements in it.
    len: usize,
}

impl<'a, W: Word> Pair<'a, W> {
    pub(super) fn new(raw: &'a [u8], base: &'a [u8], order: Order) -> Self {
        Pair {
            raw,
            base,
            order,
            word: PhantomData,
        }
    }

    pub(super) fn blocks(&self) -> usize {
        (self.raw.len() / W::WIDTH).div_ceil(BLOCK)
    }

    #[inline(always)]
    pub(super) fn block(&self, i: usize) -> Block<W> {
        let start = i * BLOCK * W::WIDTH;
        let end = (start + BLOCK * W::WIDTH).min(self.raw.len());
        let base = block_or_part(&self.base[start..end]);
        let mut magnitudes = [0; BLOCK];
        W::magnitudes(&base, &mut magnitudes);
        Block {
            raw: block_or_part(&self.raw[start..end]),
            base,
            magnitudes,
            len: (end - start) / W::WIDTH,
        }
    }
}

impl<W: Word> Block<W> {
    #[inline(always)]
    fn difference(&self, i: usize, order: Order) -> i64 {
        order
            .difference(self.raw[i % BLOCK], self.base[i % BLOCK])
            .signed()
    }

    /// Of each element, the base's magnitude and the bits of its difference.
    #[inline(always)]
    pub(super) fn lengths(&self, order: Order) -> impl Iterator<Item = (u8, u32)> {
        (0..self.len).map(move |i| {
            let difference = self.difference(i, order).unsigned_abs();
            (self.magnitudes[i % BLOCK], u64::BITS - difference.leading_zeros())
        })
    }

    /// An element's token, how many bits are beside it, and these.
    #[inline(always)]
    fn token(&self, i: usize, order: Order, highest: u8) -> (u8, u32, u64) {
        let x = self.raw[i % BLOCK];
        if super::has_flips::<W>(order) && x.differs_in_sign(self.base[i % BLOCK]) {
            let below = highest.checked_sub(x.magnitude());
            if let Some(below) = below.filter(|b| *b < token::FLIPS) {
                return (token::flip(below), W::FRACTION, x.fraction());
            }
        }
        let difference = self.difference(i, order);
        let (token, beside) = token::of(difference, W::WIDTH);
        (token, beside, difference.unsigned_abs() & ((1 << beside) - 1))
    }

    /// The tokens of those elements that have the same sign and only a token; 0 for all others.
    #[inline(always)]
    fn small_differences(&self, order: Order) -> [u8; BLOCK] {
        let mut tokens = [0; BLOCK];
        for ((x, b), t) in self.raw.iter().zip(&self.base).zip(&mut tokens) {
            let token = order.difference(*x, *b).near(token::exact(W::WIDTH), token::ZERO);
            *t = if order.is_float() && x.differs_in_sign(*b) {
                0
            } else {
                token
            };
        }
        tokens
    }

    /// A bit for each element that differs.
    #[inline(always)]
    fn changed(&self, cpu: impl Cpu) -> u64 {
        let mut differs = [0; BLOCK];
        for ((x, b), d) in self.raw.iter().zip(&self.base).zip(&mut differs) {
            *d = u8::from(x != b);
        }
        cpu.at_least(&differs, 1)
    }
}

/// Looks at evenly spread blocks.
struct Sampling<'a, W>(Pair<'a, W>);

impl<W: Word> Work for Sampling<'_, W> {
    type Output = Sample;

    #[inline(always)]
    fn run(self, _: impl Cpu) -> Sample {
        for_order!(self.0.order, self.sample())
    }
}

impl<W: Word> Sampling<'_, W> {
    #[inline(always)]
    fn sample(self, order: Order) -> Sample {
        let Sampling(pair) = self;
        let step = (pair.blocks() / SAMPLED).max(1);
        let mut sample = Sample::new(step as f32);
        for i in (0..pair.blocks()).step_by(step) {
            let block = pair.block(i);
            for i in 0..block.len {
                sample.add(block.magnitudes[i], block.difference(i, order));
                if super::has_flips::<W>(order) && block.raw[i].differs_in_sign(block.base[i]) {
                    sample.add_flip(block.raw[i].magnitude());
                }
            }
        }
        sample
    }
}

/// Which elements have a token, and what follows.
struct Split<'a> {
    /// For each class whether its elements differ, if it is sparse.
    bits: Vec<BitWriter>,
    /// The tokens, in order, the class of each, and the bits beside them.
    tokens: &'a [u8],
    classes: &'a [u8],
    beside: BitWriter,
}

/// If so many of a block have no small difference, all are done one by one.
const MANY: u32 = 16;

struct Splitting<'a, 'b, W> {
    pair: Pair<'a, W>,
    classes: &'a [Class],
    /// The highest magnitude of elements with the other sign.
    highest: u8,
    /// Room for a token and its class for all elements, and a block more.
    tokens: &'b mut [u8],
    token_classes: &'b mut [u8],
}

impl<'b, W: Word> Work for Splitting<'_, 'b, W> {
    type Output = Split<'b>;

    #[inline(always)]
    fn run(self, cpu: impl Cpu) -> Split<'b> {
        for_order!(self.pair.order, self.split(cpu))
    }
}

impl<'b, W: Word> Splitting<'_, 'b, W> {
    #[inline(always)]
    fn split(self, cpu: impl Cpu, order: Order) -> Split<'b> {
        let Splitting {
            pair,
            classes,
            highest,
            tokens,
            token_classes,
        } = self;
        let mut bits: Vec<_> = classes.iter().map(|_| BitWriter::default()).collect();
        let mut beside = BitWriter::default();
        let mut count = 0;
        for i in 0..pair.blocks() {
            let block = pair.block(i);
            let changed = block.changed(cpu);
            let mut valued = 0;
            let mut below = u64::MAX >> (BLOCK - block.len);
            for (class, bits) in classes.iter().zip(&mut bits).rev() {
                let from = cpu.at_least(&block.magnitudes, class.from);
                let here = below & from;
                below &= !from;
                if class.kind == Kind::Sparse {
                    bits.put(cpu.extract(changed, here), here.count_ones());
                    valued |= changed & here;
                } else {
                    valued |= here;
                }
            }
            let (Some(tokens), Some(token_classes)) = (
                tokens.get_mut(count..).and_then(|t| t.first_chunk_mut()),
                token_classes.get_mut(count..).and_then(|c| c.first_chunk_mut()),
            ) else {
                break;
            };
            let mut small = block.small_differences(order);
            let mut others = valued & !cpu.at_least(&small, 1);
            if others.count_ones() >= MANY {
                // Those without a token do not differ, and have no bits beside it.
                others = u64::MAX;
            }
            while others != 0 {
                let i = others.trailing_zeros() as usize % BLOCK;
                let (token, n, bits) = block.token(i, order, highest);
                small[i] = token;
                beside.put(bits, n);
                others &= others - 1;
            }
            cpu.pack(&small, valued, tokens);
            cpu.pack(&block.magnitudes, valued, token_classes);
            count += valued.count_ones() as usize;
        }
        let from: Vec<u8> = classes.iter().map(|c| c.from).collect();
        super::to_classes(&mut token_classes[..count], &from);
        Split {
            bits,
            tokens: &tokens[..count],
            classes: &token_classes[..count],
            beside,
        }
    }
}

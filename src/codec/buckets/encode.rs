//! Writing differences in classes.

use super::bits::BitWriter;
use super::classes::{Class, Sample};
use super::{BITS_ESCAPE, CLASSES, Kind, Ones, Tokens, token};
use crate::bytes::Writer;
use crate::codec::cpu::{self, BLOCK, Cpu, Work};
use crate::codec::lanes::{Word, block_or_part, for_width};
use crate::codec::rans::{self, SCALE};
use crate::codec::weights::Weights;
use crate::codec::{Input, diff};
use std::marker::PhantomData;

/// Blocks that are looked at to choose the classes.
const SAMPLED: usize = 512;

pub(in crate::codec) fn encode(input: Input<'_>) -> Option<Vec<u8>> {
    let (raw, base, tail) = diff::pair(input)?;
    let float = input.number.is_float();
    let mut w = Writer::new();
    for_width!(input.number, encode_words(raw, base, float, &mut w));
    w.raw(tail);
    Some(w.finish())
}

fn encode_words<W: Word>(raw: &[u8], base: &[u8], float: bool, w: &mut Writer) {
    let pair = Pair::<W> {
        raw,
        base,
        float,
        word: PhantomData,
    };
    let sample = cpu::best(Sampling(pair));
    let classes = sample.classes();
    let highest = sample.highest_flip();
    let mut split = cpu::best(Splitting {
        pair,
        classes: &classes,
        highest,
    });

    let mut counts = vec![[0u32; 256]; classes.len()];
    for (c, t) in split.classes.iter().zip(&split.tokens) {
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
    put_coded(&token_tables, &split.classes, &split.tokens, w);
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
struct Pair<'a, W> {
    raw: &'a [u8],
    base: &'a [u8],
    float: bool,
    word: PhantomData<W>,
}

/// One block of both, and the magnitudes of the base.
struct Block<W> {
    raw: [W; BLOCK],
    base: [W; BLOCK],
    magnitudes: [u8; BLOCK],
    /// Elements in it.
    len: usize,
}

impl<W: Word> Pair<'_, W> {
    fn blocks(&self) -> usize {
        (self.raw.len() / W::WIDTH).div_ceil(BLOCK)
    }

    #[inline(always)]
    fn block(&self, i: usize) -> Block<W> {
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
    fn difference(&self, i: usize, float: bool) -> i64 {
        let (x, b) = (self.raw[i % BLOCK], self.base[i % BLOCK]);
        if float {
            x.ordered().minus(b.ordered())
        } else {
            x.minus(b)
        }
    }

    /// An element's token, how many bits are beside it, and these.
    #[inline(always)]
    fn token(&self, i: usize, float: bool, highest: u8) -> (u8, u32, u64) {
        let x = self.raw[i % BLOCK];
        if super::has_flips::<W>(float) && x.differs_in_sign(self.base[i % BLOCK]) {
            let below = highest.wrapping_sub(x.magnitude());
            if below < token::FLIPS {
                return (token::flip(below), W::FRACTION, x.fraction());
            }
        }
        let difference = self.difference(i, float);
        let (token, beside) = token::of(difference, W::WIDTH);
        (token, beside, difference.unsigned_abs() & ((1 << beside) - 1))
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
        let Sampling(pair) = self;
        let step = (pair.blocks() / SAMPLED).max(1);
        let mut sample = Sample::new(step as f32);
        for i in (0..pair.blocks()).step_by(step) {
            let block = pair.block(i);
            for i in 0..block.len {
                sample.add(block.magnitudes[i], block.difference(i, pair.float));
                if super::has_flips::<W>(pair.float) && block.raw[i].differs_in_sign(block.base[i]) {
                    sample.add_flip(block.raw[i].magnitude());
                }
            }
        }
        sample
    }
}

/// Which elements have a token, and what follows.
struct Split {
    /// For each class whether its elements differ, if it is sparse.
    bits: Vec<BitWriter>,
    /// The tokens, in order, the class of each, and the bits beside them.
    tokens: Vec<u8>,
    classes: Vec<u8>,
    beside: BitWriter,
}

impl Split {
    /// Adds a block whose elements all have a token.
    #[inline(always)]
    fn block<W: Word>(&mut self, block: &Block<W>, float: bool, highest: u8, class_of: &[u8; 256]) {
        let (mut tokens, mut classes) = ([0; BLOCK], [0; BLOCK]);
        for i in 0..BLOCK {
            let (token, beside, bits) = block.token(i, float, highest);
            tokens[i] = token;
            classes[i] = class_of[usize::from(block.magnitudes[i])];
            self.beside.put(bits, beside);
        }
        self.tokens.extend_from_slice(&tokens);
        self.classes.extend_from_slice(&classes);
    }
}

struct Splitting<'a, W> {
    pair: Pair<'a, W>,
    classes: &'a [Class],
    /// The highest magnitude of elements with the other sign.
    highest: u8,
}

impl<W: Word> Work for Splitting<'_, W> {
    type Output = Split;

    #[inline(always)]
    fn run(self, cpu: impl Cpu) -> Split {
        let Splitting {
            pair,
            classes,
            highest,
        } = self;
        let class_of = super::class_table(classes.iter().map(|c| c.from));
        let mut split = Split {
            bits: classes.iter().map(|_| BitWriter::default()).collect(),
            tokens: Vec::new(),
            classes: Vec::new(),
            beside: BitWriter::default(),
        };
        for i in 0..pair.blocks() {
            let block = pair.block(i);
            let changed = block.changed(cpu);
            let mut valued = 0;
            let mut below = u64::MAX >> (BLOCK - block.len);
            for (class, bits) in classes.iter().zip(&mut split.bits).rev() {
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
            if valued == u64::MAX {
                split.block(&block, pair.float, highest, &class_of);
                continue;
            }
            while valued != 0 {
                let i = valued.trailing_zeros() as usize;
                let (token, beside, bits) = block.token(i, pair.float, highest);
                split.tokens.push(token);
                split.classes.push(class_of[usize::from(block.magnitudes[i])]);
                split.beside.put(bits, beside);
                valued &= valued - 1;
            }
        }
        split
    }
}

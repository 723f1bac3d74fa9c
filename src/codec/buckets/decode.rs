//! Reading differences in classes, onto the base.

use super::bits::{BitReader, peek};
use super::{BITS_ESCAPE, CLASSES, Kind, Ones, Order, Tokens, for_order, token};
use crate::bytes::Reader;
use crate::codec::cpu::{self, BLOCK, Cpu, Work};
use crate::codec::lanes::{Word, block_or_part, for_width, store_block};
use crate::codec::rans::{self, Frequencies};
use crate::codec::weights::Weights;
use crate::codec::{Job, diff, scratch};
use crate::error::{Error, Result};
use std::marker::PhantomData;

/// Differences of integers, or of floats in their order.
pub(in crate::codec) fn decode(job: Job<'_>) -> Result<()> {
    let order = Order::of(job.number, Order::Floats);
    decode_job(job, order)
}

/// Differences of floats away from zero.
pub(in crate::codec) fn decode_magnitudes(job: Job<'_>) -> Result<()> {
    if !job.number.is_float() {
        return Err(Error::damage("differences of magnitudes of integers"));
    }
    decode_job(job, Order::Magnitudes)
}

fn decode_job(job: Job<'_>, order: Order) -> Result<()> {
    let number = job.number;
    diff::onto(job, "difference in classes", |r, raw| {
        for_width!(number, decode_words(r, order, raw))
    })
}

struct Head {
    /// The highest magnitude of elements with the other sign.
    highest: u8,
    from: Vec<u8>,
    kinds: Vec<Kind>,
    /// Elements of each class, if it is sparse.
    lens: Vec<usize>,
    tokens: Vec<Frequencies>,
    bits: Vec<Frequencies>,
}

impl Head {
    /// Reads the classes of a chunk of `n` elements.
    fn read(r: &mut Reader<'_>, n: usize) -> Result<Self> {
        let bad = |what: &str| Error::damage(format!("classes {what}"));
        let count = usize::from(r.u8()?) + 1;
        if count > CLASSES {
            return Err(bad("are too many"));
        }
        let mut from = vec![0];
        from.extend_from_slice(r.raw(count - 1)?);
        if !from.is_sorted_by(|a, b| a < b) {
            return Err(bad("are not in order"));
        }
        let mut head = Head {
            highest: r.u8()?,
            from,
            kinds: Vec::new(),
            lens: vec![0; count],
            tokens: vec![[0; 256]; count],
            bits: vec![[0; 256]; count],
        };
        let mut left = n;
        for i in 0..count {
            let kind = match r.u8()? {
                0 => Kind::Unchanged,
                1 => Kind::Sparse,
                2 => Kind::Dense,
                _ => return Err(bad("are of an unknown kind")),
            };
            head.kinds.push(kind);
            if kind == Kind::Unchanged {
                continue;
            }
            let (low, high) = (r.u8()?, r.u8()?);
            if low > high {
                return Err(bad("have tokens out of order"));
            }
            head.tokens[i] = Weights::read(r, &Tokens { low, high })?;
            if kind == Kind::Sparse {
                let len = r.varint()?;
                left = usize::try_from(len)
                    .ok()
                    .and_then(|len| left.checked_sub(len))
                    .ok_or_else(|| bad("have more elements than the chunk"))?;
                head.lens[i] = len as usize;
                head.bits[i] = Weights::read(r, &Ones)?;
            }
        }
        Ok(head)
    }
}

pub(super) fn decode_words<W: Word>(r: &mut Reader<'_>, order: Order, raw: &mut [u8]) -> Result<()> {
    let n = raw.len() / W::WIDTH;
    let head = Head::read(r, n)?;
    let words = |i: usize| head.lens[i].div_ceil(BLOCK) * (BLOCK / 8);
    let bits_len = (0..head.lens.len()).map(words).sum();
    scratch::with_bytes(bits_len, |bits| {
        scratch::with_buffer(|bit_classes| {
            for i in 0..head.lens.len() {
                bit_classes.resize(bit_classes.len() + words(i), i as u8);
            }
            take_coded(r, &head.bits, bit_classes, bits)
        })?;
        put_back(bits, r.blob()?)?;
        scratch::with_bytes(n.div_ceil(BLOCK) * MASK, |masks| {
            scratch::with_bytes(n + BLOCK, |tokens| {
                let masks = masks.as_chunks_mut().0;
                let count = scratch::with_bytes(n + BLOCK, |events| {
                    let locate = Locate::<W> {
                        head: &head,
                        bits,
                        base: raw,
                        masks,
                        events,
                        word: PhantomData,
                    };
                    let count = cpu::best(locate)
                        .ok_or_else(|| Error::damage("classes have not the elements that they say"))?;
                    take_coded(r, &head.tokens, &events[..count], &mut tokens[..count])?;
                    Ok(count)
                })?;
                let beside = r.blob()?;
                let apply = Apply::<W> {
                    order,
                    masks,
                    tokens: &tokens[..count + BLOCK],
                    beside: BitReader::new(beside),
                    raw,
                    highest: head.highest,
                    word: PhantomData,
                };
                let taken = cpu::best(apply);
                if taken.div_ceil(BLOCK) * (BLOCK / 8) != beside.len() {
                    return Err(Error::damage(
                        "bits beside the tokens are not as many as they need",
                    ));
                }
                Ok(())
            })
        })
    })
}

/// Fills `out` from a blob of the entropy coder.
fn take_coded(r: &mut Reader<'_>, tables: &[Frequencies], classes: &[u8], out: &mut [u8]) -> Result<()> {
    let coded = r.blob()?;
    if out.is_empty() {
        return if coded.is_empty() {
            Ok(())
        } else {
            Err(Error::damage("codes where nothing is coded"))
        };
    }
    let coded = Reader::new(coded, "codes");
    match tables.len() {
        1 => rans::decode::<1>(tables, rans::One, coded, out),
        2..=4 => rans::decode::<4>(tables, classes, coded, out),
        _ => rans::decode::<CLASSES>(tables, classes, coded, out),
    }
}

/// Puts the bytes of bits that were written aside in the places of their escapes.
fn put_back(mut bits: &mut [u8], aside: &[u8]) -> Result<()> {
    let mut aside = aside.iter();
    while let Some(at) = memchr::memchr(BITS_ESCAPE, bits) {
        let (_, rest) = bits.split_at_mut(at);
        let Some((escape, rest)) = rest.split_first_mut() else {
            break;
        };
        *escape = *aside.next().ok_or_else(short)?;
        bits = rest;
    }
    if aside.next().is_some() {
        Err(short())
    } else {
        Ok(())
    }
}

fn short() -> Error {
    Error::damage("escapes and what was put aside do not agree")
}

/// Finds out which elements have a token: a bit for each, and the class of those that have. There is room for all and a block more.
/// Gives how many there are; nothing if classes have not as many elements as they say.
struct Locate<'a, W> {
    head: &'a Head,
    /// Whether each element of a sparse class differs, class after class.
    bits: &'a [u8],
    base: &'a [u8],
    /// For each block.
    masks: &'a mut [[u8; MASK]],
    events: &'a mut [u8],
    word: PhantomData<W>,
}

/// Bytes of a bit for each element of a block.
const MASK: usize = BLOCK / 8;

/// Blocks whose magnitudes are worked out before they are looked at.
const AHEAD: usize = 8;

impl<W: Word> Work for Locate<'_, W> {
    type Output = Option<usize>;

    #[inline(always)]
    fn run(self, cpu: impl Cpu) -> Option<usize> {
        let Locate {
            head,
            bits,
            base,
            masks,
            events,
            ..
        } = self;
        // Neighbours of which all or none have tokens need not be told apart.
        let mut ranges = [Range::default(); CLASSES];
        let (mut n, mut at) = (0, 0);
        for (i, kind) in head.kinds.iter().copied().enumerate() {
            if n == 0 || kind == Kind::Sparse || ranges[n - 1].kind != kind {
                ranges[n] = Range {
                    from: head.from[i],
                    kind,
                    at,
                    end: at + head.lens[i],
                };
                n += 1;
            }
            at += head.lens[i].next_multiple_of(BLOCK);
        }
        let mut magnitudes = [[0; BLOCK]; AHEAD];
        let mut count = 0;
        for (bytes, masks) in base.chunks(AHEAD * BLOCK * W::WIDTH).zip(masks.chunks_mut(AHEAD)) {
            let blocks = || bytes.chunks(BLOCK * W::WIDTH);
            for (block, magnitudes) in blocks().zip(&mut magnitudes) {
                W::magnitudes(&block_or_part(block), magnitudes);
            }
            for ((block, mask), magnitudes) in blocks().zip(masks).zip(&magnitudes) {
                let mut below = u64::MAX >> (BLOCK - block.len() / W::WIDTH);
                let mut valued = 0;
                for range in ranges[..n].iter_mut().rev() {
                    let from = cpu.at_least(magnitudes, range.from);
                    let here = below & from;
                    below &= !from;
                    match range.kind {
                        Kind::Unchanged => {}
                        Kind::Dense => valued |= here,
                        Kind::Sparse => {
                            let n = here.count_ones();
                            valued |= cpu.deposit(peek(bits, range.at, n <= 57), here);
                            range.at += n as usize;
                        }
                    }
                }
                *mask = valued.to_le_bytes();
                let room = events.get_mut(count..)?.first_chunk_mut()?;
                cpu.pack(magnitudes, valued, room);
                count += valued.count_ones() as usize;
            }
        }
        super::to_classes(&mut events[..count], &head.from);
        ranges[..n].iter().all(|r| r.at == r.end).then_some(count)
    }
}

/// A class, or neighbours of one kind.
#[derive(Clone, Copy, Default)]
struct Range {
    /// The lowest magnitude.
    from: u8,
    kind: Kind,
    /// The next bit of a sparse one, and where they end.
    at: usize,
    end: usize,
}

/// Adds the differences to the base; gives how many bits it took from beside the tokens.
struct Apply<'a, W> {
    order: Order,
    masks: &'a [[u8; MASK]],
    /// A block more than there are.
    tokens: &'a [u8],
    beside: BitReader<'a>,
    raw: &'a mut [u8],
    /// The highest magnitude of elements with the other sign.
    highest: u8,
    word: PhantomData<W>,
}

/// If so many of a block have bits beside their tokens, all are done one by one.
const MANY: u32 = 16;

/// Elements that are done later …
const LATER: usize = 1024;

/// … as how many of a block are is what cannot be predicted, but how many of many blocks are need not be.
struct Later {
    /// There is room for a block more.
    at: [u32; LATER + BLOCK],
    tokens: [u8; LATER + BLOCK],
    count: usize,
}

/// The places of a block's elements.
const PLACES: [u8; BLOCK] = {
    let mut places = [0; BLOCK];
    let mut i = 0;
    while i < BLOCK {
        places[i] = i as u8;
        i += 1;
    }
    places
};

impl Later {
    fn new() -> Self {
        Later {
            at: [0; LATER + BLOCK],
            tokens: [0; LATER + BLOCK],
            count: 0,
        }
    }

    /// Adds those elements of the block at `first`, fewer than [`MANY`].
    #[inline(always)]
    fn add(&mut self, cpu: impl Cpu, first: usize, which: u64, tokens: &[u8; BLOCK]) {
        let mut packed = [0; BLOCK];
        let room = self
            .tokens
            .get_mut(self.count..)
            .and_then(|t| t.first_chunk_mut::<{ MANY as usize }>());
        let at = self
            .at
            .get_mut(self.count..)
            .and_then(|t| t.first_chunk_mut::<{ MANY as usize }>());
        let (Some(room), Some(at)) = (room, at) else {
            return;
        };
        cpu.pack(tokens, which, &mut packed);
        room.copy_from_slice(&packed[..MANY as usize]);
        cpu.pack(&PLACES, which, &mut packed);
        for (at, place) in at.iter_mut().zip(&packed) {
            *at = first as u32 + u32::from(*place);
        }
        self.count += which.count_ones() as usize;
    }

    fn is_full(&self) -> bool {
        self.count >= LATER
    }

    /// Hands over all, in order, with their tokens.
    #[inline(always)]
    fn each(&mut self, mut f: impl FnMut(usize, u8)) {
        for (at, t) in self.at.iter().zip(&self.tokens).take(self.count) {
            f(*at as usize, *t);
        }
        self.count = 0;
    }
}

/// Changes an element.
#[inline(always)]
fn change<W: Word>(raw: &mut [u8], at: usize, to: impl FnOnce(W) -> W) {
    if let Some(x) = W::get(raw, at) {
        W::set(raw, at, to(x));
    }
}

impl<W: Word> Work for Apply<'_, W> {
    type Output = usize;

    #[inline(always)]
    fn run(self, cpu: impl Cpu) -> usize {
        for_order!(self.order, self.apply(cpu))
    }
}

impl<W: Word> Apply<'_, W> {
    #[inline(always)]
    fn apply(self, cpu: impl Cpu, order: Order) -> usize {
        let Apply {
            masks,
            mut tokens,
            mut beside,
            raw,
            highest,
            ..
        } = self;
        let mut meanings = token::meanings(W::WIDTH);
        if super::has_flips::<W>(order) {
            token::add_flips(&mut meanings, highest, W::FRACTION);
        }
        let mut apply = |base: W, t: u8| {
            let meaning = meanings[usize::from(t)];
            let bits = meaning.least | beside.take(meaning.beside, W::WIDTH < 8);
            // Without a branch: signs cannot be predicted.
            let sign = -i64::from(t < token::ZERO);
            let moved = order.add(base, (bits.cast_signed() ^ sign).wrapping_sub(sign));
            if meaning.flip { base.flipped(bits) } else { moved }
        };
        let exact = token::exact(W::WIDTH);
        let mut later = Later::new();
        for (i, mask) in masks.iter().enumerate() {
            let mask = u64::from_le_bytes(*mask);
            let Some(next) = tokens.first_chunk().filter(|_| mask != 0) else {
                continue;
            };
            tokens = &tokens[mask.count_ones() as usize..];
            let here = cpu.unpack(next, mask, token::ZERO);
            let Some(bytes) = raw.get_mut(i * BLOCK * W::WIDTH..) else {
                break;
            };
            let mut words = block_or_part::<W>(bytes);
            let with_bits =
                !cpu.at_least(&here, token::ZERO - exact + 1) | cpu.at_least(&here, token::ZERO + exact);
            if with_bits.count_ones() >= MANY {
                later.each(|at, t| change(raw, at, |x| apply(x, t)));
                for (x, t) in words.iter_mut().zip(&here) {
                    *x = apply(*x, *t);
                }
                store_block(&words, raw.get_mut(i * BLOCK * W::WIDTH..).unwrap_or_default());
                continue;
            }
            for (x, t) in words.iter_mut().zip(&here) {
                let is_exact = t.wrapping_sub(token::ZERO - exact + 1) < 2 * exact - 1;
                let t = if is_exact { *t } else { token::ZERO };
                *x = order.add(*x, i64::from(t) - i64::from(token::ZERO));
            }
            store_block(&words, bytes);
            later.add(cpu, i * BLOCK, with_bits, &here);
            if later.is_full() {
                later.each(|at, t| change(raw, at, |x| apply(x, t)));
            }
        }
        later.each(|at, t| change(raw, at, |x| apply(x, t)));
        beside.taken()
    }
}

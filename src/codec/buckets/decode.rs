//! Reading differences in classes, onto the base.

use super::bits::BitReader;
use super::{BITS_ESCAPE, CLASSES, Kind, Ones, Tokens, token};
use crate::bytes::Reader;
use crate::codec::cpu::{self, BLOCK, Cpu, Work};
use crate::codec::lanes::{Word, block_or_part, for_width, take_tail};
use crate::codec::rans::{self, Frequencies};
use crate::codec::weights::Weights;
use crate::codec::{Job, diff, scratch};
use crate::error::{Error, Result};
use std::marker::PhantomData;

pub(in crate::codec) fn decode(job: Job<'_>) -> Result<()> {
    let Job {
        number,
        payload,
        raw_len,
        buf,
    } = job;
    diff::check_base(buf, raw_len)?;
    let mut r = Reader::new(payload, "difference in classes");
    let (raw, tail) = buf.split_at_mut(raw_len - raw_len % number.width());
    let float = number.is_float();
    for_width!(number, decode_words(&mut r, float, raw))?;
    take_tail(r, tail)
}

/// A class as the decoder needs it.
struct Class<'a> {
    from: u8,
    kind: Kind,
    /// Whether each of its elements differs, if it is sparse.
    bits: BitReader<'a>,
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

fn decode_words<W: Word>(r: &mut Reader<'_>, float: bool, raw: &mut [u8]) -> Result<()> {
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
        let mut classes = Vec::with_capacity(CLASSES);
        let mut at = 0;
        for (i, kind) in head.kinds.iter().copied().enumerate() {
            let end = at + words(i);
            classes.push(Class {
                from: head.from[i],
                kind,
                bits: BitReader::new(&bits[at..end]),
            });
            at = end;
        }
        scratch::with_bytes(4 * (n + ROOM), |places| {
            scratch::with_bytes(n + ROOM, |events| {
                let places = places.as_chunks_mut().0;
                let locate = Locate::<W> {
                    classes: &mut classes,
                    base: raw,
                    places,
                    events,
                    word: PhantomData,
                };
                let count = cpu::best(locate);
                if classes
                    .iter()
                    .zip(&head.lens)
                    .any(|(c, len)| c.bits.taken() != *len)
                {
                    return Err(Error::damage("classes have not the elements that they say"));
                }
                scratch::with_bytes(count, |tokens| {
                    take_coded(r, &head.tokens, &events[..count], tokens)?;
                    let beside = r.blob()?;
                    let places = &places[..count];
                    let apply = Apply::<W> {
                        places,
                        tokens,
                        beside: BitReader::new(beside),
                        raw,
                        highest: head.highest,
                        word: PhantomData,
                    };
                    let taken = if float {
                        cpu::best(Floats(apply))
                    } else {
                        cpu::best(Integers(apply))
                    };
                    if taken.div_ceil(BLOCK) * (BLOCK / 8) != beside.len() {
                        return Err(Error::damage(
                            "bits beside the tokens are not as many as they need",
                        ));
                    }
                    Ok(())
                })
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
fn put_back(bits: &mut [u8], aside: &[u8]) -> Result<()> {
    let mut aside = aside.iter();
    if !aside.as_slice().is_empty() {
        for b in bits.iter_mut().filter(|b| **b == BITS_ESCAPE) {
            *b = *aside.next().ok_or_else(short)?;
        }
    } else if bits.contains(&BITS_ESCAPE) {
        return Err(short());
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

/// Finds out which elements have a token: where they are and the class of each. There is room for all and [`ROOM`] more. Gives
/// how many there are.
struct Locate<'a, 'b, W> {
    classes: &'a mut [Class<'b>],
    base: &'a [u8],
    places: &'a mut [[u8; 4]],
    events: &'a mut [u8],
    word: PhantomData<W>,
}

/// So many places are written at once, whether they are needed or not: that is quicker than to count.
const ROOM: usize = 4;

/// Blocks whose magnitudes are worked out before they are looked at.
const AHEAD: usize = 8;

impl<W: Word> Work for Locate<'_, '_, W> {
    type Output = usize;

    #[inline(always)]
    fn run(self, cpu: impl Cpu) -> usize {
        if self.classes.iter().all(|c| c.kind == Kind::Dense) {
            return self.all();
        }
        let Locate {
            classes,
            base,
            places,
            events,
            ..
        } = self;
        let class_of = super::class_table(classes.iter().map(|c| c.from));
        // Neighbours of which all or none have tokens need not be told apart.
        let mut ranges: Vec<&mut Class<'_>> = Vec::with_capacity(classes.len());
        for class in classes {
            match ranges.last() {
                Some(last) if last.kind == class.kind && class.kind != Kind::Sparse => {}
                _ => ranges.push(class),
            }
        }
        let mut magnitudes = [[0; BLOCK]; AHEAD];
        let (mut count, mut start) = (0, 0);
        for bytes in base.chunks(AHEAD * BLOCK * W::WIDTH) {
            for (block, magnitudes) in bytes.chunks(BLOCK * W::WIDTH).zip(&mut magnitudes) {
                W::magnitudes(&block_or_part(block), magnitudes);
            }
            for (block, magnitudes) in bytes.chunks(BLOCK * W::WIDTH).zip(&magnitudes) {
                let mut below = u64::MAX >> (BLOCK - block.len() / W::WIDTH);
                let mut valued = 0;
                for class in ranges.iter_mut().rev() {
                    let from = cpu.at_least(magnitudes, class.from);
                    let here = below & from;
                    below &= !from;
                    match class.kind {
                        Kind::Unchanged => {}
                        Kind::Dense => valued |= here,
                        Kind::Sparse => {
                            valued |= cpu.deposit(class.bits.take(here.count_ones(), false), here)
                        }
                    }
                }
                let n = valued.count_ones() as usize;
                for done in (0..n).step_by(ROOM) {
                    let at = count + done;
                    let (Some(places), Some(events)) =
                        (places.get_mut(at..at + ROOM), events.get_mut(at..at + ROOM))
                    else {
                        return count;
                    };
                    for (place, event) in places.iter_mut().zip(events) {
                        let i = valued.trailing_zeros() as usize;
                        *place = ((start + i) as u32).to_le_bytes();
                        *event = class_of[usize::from(magnitudes[i % BLOCK])];
                        valued &= valued.wrapping_sub(1);
                    }
                }
                count += n;
                start += BLOCK;
            }
        }
        count
    }
}

impl<W: Word> Locate<'_, '_, W> {
    /// The classes of all elements; places are not needed.
    #[inline(always)]
    fn all(self) -> usize {
        let n = self.base.len() / W::WIDTH;
        for (block, events) in self
            .base
            .chunks(BLOCK * W::WIDTH)
            .zip(self.events[..n].chunks_mut(BLOCK))
        {
            let (mut magnitudes, mut classes) = ([0; BLOCK], [0; BLOCK]);
            W::magnitudes(&block_or_part(block), &mut magnitudes);
            for class in self.classes.iter().skip(1) {
                for (c, m) in classes.iter_mut().zip(&magnitudes) {
                    *c += u8::from(*m >= class.from);
                }
            }
            events.copy_from_slice(&classes[..events.len()]);
        }
        n
    }
}

/// Adds the differences to the base; gives how many bits it took from beside the tokens.
struct Apply<'a, W> {
    places: &'a [[u8; 4]],
    tokens: &'a [u8],
    beside: BitReader<'a>,
    raw: &'a mut [u8],
    /// The highest magnitude of elements with the other sign.
    highest: u8,
    word: PhantomData<W>,
}

struct Floats<'a, W>(Apply<'a, W>);

struct Integers<'a, W>(Apply<'a, W>);

impl<W: Word> Work for Floats<'_, W> {
    type Output = usize;

    #[inline(always)]
    fn run(self, cpu: impl Cpu) -> usize {
        self.0.run(cpu, true, |base, difference| {
            base.ordered().plus(difference).unordered()
        })
    }
}

impl<W: Word> Work for Integers<'_, W> {
    type Output = usize;

    #[inline(always)]
    fn run(self, cpu: impl Cpu) -> usize {
        self.0.run(cpu, false, |base, difference| base.plus(difference))
    }
}

impl<W: Word> Apply<'_, W> {
    #[inline(always)]
    fn run(self, cpu: impl Cpu, float: bool, add: impl Fn(W, i64) -> W) -> usize {
        let Apply {
            places,
            tokens,
            mut beside,
            raw,
            highest,
            ..
        } = self;
        let mut meanings = token::meanings(W::WIDTH);
        if super::has_flips::<W>(float) {
            token::add_flips(&mut meanings, highest, W::FRACTION);
        }
        let mut apply = |base: W, t: u8| {
            let meaning = meanings[usize::from(t)];
            let bits = meaning.least | beside.take(meaning.beside, W::WIDTH < 8);
            // Without a branch: signs cannot be predicted.
            let sign = -i64::from(t < token::ZERO);
            let moved = add(base, (bits.cast_signed() ^ sign).wrapping_sub(sign));
            if meaning.flip { base.flipped(bits) } else { moved }
        };
        if tokens.len() == raw.len() / W::WIDTH {
            let exact = token::exact(W::WIDTH);
            for (bytes, tokens) in raw.chunks_mut(BLOCK * W::WIDTH).zip(tokens.chunks(BLOCK)) {
                let mut words = block_or_part::<W>(bytes);
                match tokens.first_chunk() {
                    Some(tokens)
                        if cpu.at_least(tokens, token::ZERO - exact + 1)
                            & !cpu.at_least(tokens, token::ZERO + exact)
                            == u64::MAX =>
                    {
                        for (x, t) in words.iter_mut().zip(tokens) {
                            *x = add(*x, i64::from(*t) - i64::from(token::ZERO));
                        }
                    }
                    _ => {
                        for (x, t) in words.iter_mut().zip(tokens) {
                            *x = apply(*x, *t);
                        }
                    }
                }
                W::store(&words[..bytes.len() / W::WIDTH], bytes);
            }
        } else {
            for (t, place) in tokens.iter().zip(places) {
                let place = u32::from_le_bytes(*place) as usize;
                if let Some(x) = W::get(raw, place) {
                    W::set(raw, place, apply(x, *t));
                }
            }
        }
        beside.taken()
    }
}

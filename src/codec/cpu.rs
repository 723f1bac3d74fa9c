//! The few operations on 64 elements at once for which processors have instructions that Rust does not find by itself, and loops
//! compiled once for any processor and once for what most have today. All give the same results.

use super::rans::{LANES, Tables};

/// Elements handled at once: one bit of a word each.
pub(super) const BLOCK: usize = 64;

/// A processor's way of doing it.
pub(super) trait Cpu: Copy {
    /// A bit for each byte that is at least `least`.
    fn at_least(self, bytes: &[u8; BLOCK], least: u8) -> u64;
    /// The bits of `from` where `mask` has ones, moved together at the bottom.
    fn extract(self, from: u64, mask: u64) -> u64;
    /// The lowest bits of `from` moved to where `mask` has ones.
    fn deposit(self, from: u64, mask: u64) -> u64;
    /// Moves the bytes of `from` where `mask` has ones to the front of `to`; what follows them there may be anything.
    fn pack(self, from: &[u8; BLOCK], mask: u64, to: &mut [u8; BLOCK]);
    /// The first bytes of `from` in the places where `mask` has ones, `other` in all others.
    fn unpack(self, from: &[u8; BLOCK], mask: u64, other: u8) -> [u8; BLOCK];
    /// Decodes as many groups of bytes as it can by [`super::rans`], one after the other: gives how many, and how many bytes of
    /// `words` topped up the states.
    fn decode_groups<const K: usize>(
        self,
        _tables: &Tables,
        _contexts: impl Fn(usize) -> [u8; LANES],
        _states: &mut [u32; LANES],
        _words: &[u8],
        _groups: &mut [[u8; LANES]],
    ) -> (usize, usize) {
        (0, 0)
    }
}

/// Work that is compiled for each kind of processor. `run` must be `#[inline(always)]`, and so must what it calls in loops.
pub(super) trait Work {
    /// What comes out.
    type Output;
    /// Does it.
    fn run(self, cpu: impl Cpu) -> Self::Output;
}

/// Does the work in the best way that this processor has.
pub(super) fn best<T: Work>(work: T) -> T::Output {
    #[cfg(target_arch = "x86_64")]
    {
        #[cfg(test)]
        let most = tests::AT_MOST.get();
        #[cfg(not(test))]
        let most = Level::Avx512;
        if let Some(cpu) = x86::Avx512::detect().filter(|_| most >= Level::Avx512) {
            return cpu.run(work);
        }
        if let Some(cpu) = x86::Avx2::detect().filter(|_| most >= Level::Avx2) {
            return cpu.run(work);
        }
    }
    work.run(Portable)
}

/// How much of what a processor has is used.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
#[cfg_attr(not(test), allow(dead_code))]
pub(super) enum Level {
    Portable,
    Avx2,
    Avx512,
}

/// [`Cpu::pack`], byte by byte: few bytes are packed of most blocks.
#[inline(always)]
fn pack(from: &[u8; BLOCK], mut mask: u64, to: &mut [u8; BLOCK]) {
    let n = mask.count_ones() as usize;
    for t in &mut to[..n] {
        *t = from[mask.trailing_zeros() as usize % BLOCK];
        mask &= mask.wrapping_sub(1);
    }
}

/// [`Cpu::unpack`], byte by byte.
#[inline(always)]
fn unpack(from: &[u8; BLOCK], mut mask: u64, other: u8) -> [u8; BLOCK] {
    if mask == u64::MAX {
        return *from;
    }
    let mut to = [other; BLOCK];
    for f in &from[..mask.count_ones() as usize] {
        to[mask.trailing_zeros() as usize % BLOCK] = *f;
        mask &= mask.wrapping_sub(1);
    }
    to
}

/// Any processor.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Cpu for Portable {
    #[inline(always)]
    fn at_least(self, bytes: &[u8; BLOCK], least: u8) -> u64 {
        let mut mask = 0;
        for (i, b) in bytes.iter().enumerate() {
            mask |= u64::from(*b >= least) << i;
        }
        mask
    }

    #[inline(always)]
    fn extract(self, from: u64, mut mask: u64) -> u64 {
        let (mut out, mut n) = (0, 0);
        while mask != 0 {
            out |= (from >> mask.trailing_zeros() & 1) << n;
            n += 1;
            mask &= mask - 1;
        }
        out
    }

    #[inline(always)]
    fn deposit(self, mut from: u64, mut mask: u64) -> u64 {
        let mut out = 0;
        while mask != 0 {
            out |= (from & 1) << mask.trailing_zeros();
            from >>= 1;
            mask &= mask - 1;
        }
        out
    }

    #[inline(always)]
    fn pack(self, from: &[u8; BLOCK], mask: u64, to: &mut [u8; BLOCK]) {
        pack(from, mask, to);
    }

    #[inline(always)]
    fn unpack(self, from: &[u8; BLOCK], mask: u64, other: u8) -> [u8; BLOCK] {
        unpack(from, mask, other)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86;

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    thread_local! {
        /// Makes [`best`] do without what this processor has more, on this thread.
        pub(in crate::codec) static AT_MOST: std::cell::Cell<Level> = const { std::cell::Cell::new(Level::Avx512) };
    }

    /// What `f` gives at each level.
    pub(in crate::codec) fn at_each_level<T>(f: impl Fn() -> T) -> [T; 3] {
        [Level::Portable, Level::Avx2, Level::Avx512].map(|level| {
            AT_MOST.set(level);
            let result = f();
            AT_MOST.set(Level::Avx512);
            result
        })
    }

    struct All([u8; BLOCK], u8, u64, u64);

    impl Work for All {
        type Output = ([u64; 3], Vec<u8>, [u8; BLOCK]);
        fn run(self, cpu: impl Cpu) -> Self::Output {
            let All(bytes, least, from, mask) = self;
            let mut packed = [0; BLOCK];
            cpu.pack(&bytes, mask, &mut packed);
            (
                [
                    cpu.at_least(&bytes, least),
                    cpu.extract(from, mask),
                    cpu.deposit(from, mask),
                ],
                packed[..mask.count_ones() as usize].to_vec(),
                cpu.unpack(&bytes, mask, least),
            )
        }
    }

    proptest! {
        #[test]
        fn every_processor_does_the_same(bytes: [u8; BLOCK], least: u8, from: u64, mask: u64) {
            for mask in [mask, mask & from, 0, u64::MAX] {
                let [expected, avx2, avx512] = at_each_level(|| best(All(bytes, least, from, mask)));
                prop_assert_eq!(&avx2, &expected);
                prop_assert_eq!(&avx512, &expected);
                let ([ge, _, deposited], packed, unpacked) = expected;
                prop_assert_eq!(deposited.count_ones() + (from & !low_bits(mask.count_ones())).count_ones(), from.count_ones());
                prop_assert_eq!(All(bytes, least, deposited, mask).run(Portable).0[1], from & low_bits(mask.count_ones()));
                prop_assert!(bytes.iter().enumerate().all(|(i, b)| (ge >> i & 1 == 1) == (*b >= least)));
                let chosen = |m: u64| (0..BLOCK).filter(move |i| m >> i & 1 == 1);
                prop_assert_eq!(packed, chosen(mask).map(|i| bytes[i]).collect::<Vec<_>>());
                prop_assert!(chosen(mask).zip(bytes).all(|(i, b)| unpacked[i] == b));
                prop_assert!(chosen(!mask).all(|i| unpacked[i] == least));
            }
        }
    }

    fn low_bits(n: u32) -> u64 {
        if n == 64 { u64::MAX } else { (1 << n) - 1 }
    }
}

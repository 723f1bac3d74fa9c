//! The few operations on 64 elements at once for which processors have instructions that Rust does not find by itself, and loops
//! compiled once for any processor and once for what most have today. All give the same results.

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
    #[cfg(test)]
    if tests::PORTABLE.get() {
        return work.run(Portable);
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(cpu) = x86::Avx2::detect() {
        return cpu.run(work);
    }
    work.run(Portable)
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
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BLOCK, Cpu, Work};
    use std::arch::x86_64::{
        __m256i, _mm256_cmpeq_epi8, _mm256_loadu_si256, _mm256_max_epu8, _mm256_movemask_epi8,
        _mm256_set1_epi8, _pdep_u64, _pext_u64,
    };

    /// Proof that the processor has AVX2, BMI1, BMI2, LZCNT and POPCNT.
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(());

    impl Avx2 {
        pub(super) fn detect() -> Option<Self> {
            let has = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("popcnt");
            has.then_some(Avx2(()))
        }

        pub(super) fn run<T: Work>(self, work: T) -> T::Output {
            // SAFETY: `self` exists only where the processor has these features.
            unsafe { with_features(self, work) }
        }
    }

    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn with_features<T: Work>(cpu: Avx2, work: T) -> T::Output {
        work.run(cpu)
    }

    impl Cpu for Avx2 {
        #[inline(always)]
        fn at_least(self, bytes: &[u8; BLOCK], least: u8) -> u64 {
            let half = |from: &[u8; BLOCK], at: usize| {
                // SAFETY: the processor has AVX2, as `self` exists; 32 bytes from 0 or 32 on lie within the 64.
                unsafe {
                    let bytes = _mm256_loadu_si256(from.as_ptr().add(at).cast::<__m256i>());
                    let least = _mm256_set1_epi8(least.cast_signed());
                    let is = _mm256_cmpeq_epi8(_mm256_max_epu8(bytes, least), bytes);
                    _mm256_movemask_epi8(is).cast_unsigned()
                }
            };
            u64::from(half(bytes, 0)) | u64::from(half(bytes, BLOCK / 2)) << 32
        }

        #[inline(always)]
        fn extract(self, from: u64, mask: u64) -> u64 {
            // SAFETY: the processor has BMI2, as `self` exists.
            unsafe { _pext_u64(from, mask) }
        }

        #[inline(always)]
        fn deposit(self, from: u64, mask: u64) -> u64 {
            // SAFETY: the processor has BMI2, as `self` exists.
            unsafe { _pdep_u64(from, mask) }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    thread_local! {
        /// Makes [`best`] do without what this processor has, on this thread.
        pub(in crate::codec) static PORTABLE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }

    struct All([u8; BLOCK], u8, u64, u64);

    impl Work for All {
        type Output = [u64; 3];
        fn run(self, cpu: impl Cpu) -> [u64; 3] {
            let All(bytes, least, from, mask) = self;
            [
                cpu.at_least(&bytes, least),
                cpu.extract(from, mask),
                cpu.deposit(from, mask),
            ]
        }
    }

    proptest! {
        #[test]
        fn every_processor_does_the_same(bytes: [u8; BLOCK], least: u8, from: u64, mask: u64) {
            let [ge, extracted, deposited] = All(bytes, least, from, mask).run(Portable);
            prop_assert_eq!([ge, extracted, deposited], best(All(bytes, least, from, mask)));
            prop_assert_eq!(deposited.count_ones() + (from & !low_bits(mask.count_ones())).count_ones(), from.count_ones());
            prop_assert_eq!(All(bytes, least, deposited, mask).run(Portable)[1], from & low_bits(mask.count_ones()));
            prop_assert!(bytes.iter().enumerate().all(|(i, b)| (ge >> i & 1 == 1) == (*b >= least)));
        }
    }

    fn low_bits(n: u32) -> u64 {
        if n == 64 { u64::MAX } else { (1 << n) - 1 }
    }
}

//! What x86-64 processors have: AVX2 and BMI2 (Haswell, 2013; Zen, 2017), and AVX-512 with VBMI2 (Ice Lake, 2019; Zen 4, 2022).

use super::{BLOCK, Cpu, Work};
use crate::codec::rans::{LANES, LOW, SCALE, SCALE_BITS, Tables};
use std::arch::x86_64::{
    __m256i, __m512i, _mm_and_si128, _mm_cvtsi64_si128, _mm_loadu_si128, _mm_set1_epi8, _mm_storel_epi64,
    _mm256_add_epi32, _mm256_and_si256, _mm256_cmpeq_epi8, _mm256_cmplt_epu32_mask, _mm256_cvtepi32_epi8,
    _mm256_cvtepu8_epi32, _mm256_cvtepu16_epi32, _mm256_i32gather_epi32, _mm256_loadu_si256,
    _mm256_mask_or_epi32, _mm256_maskz_expand_epi32, _mm256_max_epu8, _mm256_movemask_epi8,
    _mm256_mullo_epi32, _mm256_or_si256, _mm256_set1_epi8, _mm256_set1_epi32, _mm256_slli_epi32,
    _mm256_srli_epi32, _mm256_storeu_si256, _mm512_cmpge_epu8_mask, _mm512_loadu_si512,
    _mm512_mask_expand_epi8, _mm512_maskz_compress_epi8, _mm512_set1_epi8, _mm512_storeu_si512, _pdep_u64,
    _pext_u64,
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
        unsafe { with_avx2(self, work) }
    }
}

#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn with_avx2<T: Work>(cpu: Avx2, work: T) -> T::Output {
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

    #[inline(always)]
    fn pack(self, from: &[u8; BLOCK], mask: u64, to: &mut [u8; BLOCK]) {
        super::pack(from, mask, to);
    }

    #[inline(always)]
    fn unpack(self, from: &[u8; BLOCK], mask: u64, other: u8) -> [u8; BLOCK] {
        super::unpack(from, mask, other)
    }
}

/// Proof that the processor has what [`Avx2`] says, and of AVX-512: F, BW, DQ, VL, VBMI and VBMI2.
#[derive(Clone, Copy)]
pub(super) struct Avx512(Avx2);

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vbmi")
            && is_x86_feature_detected!("avx512vbmi2");
        Avx2::detect().filter(|_| has).map(Avx512)
    }

    pub(super) fn run<T: Work>(self, work: T) -> T::Output {
        // SAFETY: `self` exists only where the processor has these features.
        unsafe { with_avx512(self, work) }
    }
}

#[target_feature(
    enable = "avx2,bmi1,bmi2,lzcnt,popcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2"
)]
fn with_avx512<T: Work>(cpu: Avx512, work: T) -> T::Output {
    work.run(cpu)
}

#[inline(always)]
fn load(from: &[u8; BLOCK]) -> __m512i {
    // SAFETY: only called with an [`Avx512`]; 64 bytes are there, at any alignment.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

impl Cpu for Avx512 {
    #[inline(always)]
    fn at_least(self, bytes: &[u8; BLOCK], least: u8) -> u64 {
        // SAFETY: the processor has AVX512BW, as `self` exists.
        unsafe { _mm512_cmpge_epu8_mask(load(bytes), _mm512_set1_epi8(least.cast_signed())) }
    }

    #[inline(always)]
    fn extract(self, from: u64, mask: u64) -> u64 {
        self.0.extract(from, mask)
    }

    #[inline(always)]
    fn deposit(self, from: u64, mask: u64) -> u64 {
        self.0.deposit(from, mask)
    }

    #[inline(always)]
    fn pack(self, from: &[u8; BLOCK], mask: u64, to: &mut [u8; BLOCK]) {
        // SAFETY: the processor has AVX512_VBMI2, as `self` exists; there is room for 64 bytes, at any alignment.
        unsafe {
            _mm512_storeu_si512(
                to.as_mut_ptr().cast(),
                _mm512_maskz_compress_epi8(mask, load(from)),
            )
        }
    }

    #[inline(always)]
    fn unpack(self, from: &[u8; BLOCK], mask: u64, other: u8) -> [u8; BLOCK] {
        let mut to = [other; BLOCK];
        // SAFETY: the processor has AVX512_VBMI2, as `self` exists; there is room for 64 bytes, at any alignment.
        unsafe {
            let other = _mm512_set1_epi8(other.cast_signed());
            let placed = _mm512_mask_expand_epi8(other, mask, load(from));
            _mm512_storeu_si512(to.as_mut_ptr().cast(), placed);
        }
        to
    }

    /// All lanes at once, as [`crate::codec::rans`] does one after the other. That is hardly quicker by itself, but takes so few instructions
    /// that another thread on the same core loses nothing.
    #[inline(always)]
    fn decode_groups<const K: usize>(
        self,
        tables: &Tables,
        contexts: impl Fn(usize) -> [u8; LANES],
        states: &mut [u32; LANES],
        words: &[u8],
        groups: &mut [[u8; LANES]],
    ) -> (usize, usize) {
        const { assert!(K.is_power_of_two() && K * SCALE as usize * 4 <= size_of::<Tables>()) };
        let table = tables.as_ptr().cast::<i32>();
        let (mut done, mut at) = (0, 0);
        // SAFETY: the processor has AVX2 and AVX512VL, BW and F, as `self` exists. Loads and stores go through references to
        // arrays of their size. The gather's indices are below K · SCALE, and there are at least as many entries.
        unsafe {
            let mut x = _mm256_loadu_si256(states.as_ptr().cast());
            let remainder = _mm256_set1_epi32((SCALE - 1).cast_signed());
            let context = _mm_set1_epi8((K - 1) as i8);
            let low = _mm256_set1_epi32(LOW.cast_signed());
            for (g, group) in groups.iter_mut().enumerate() {
                let Some(next) = words.get(at..).and_then(|w| w.first_chunk::<{ 2 * LANES }>()) else {
                    break;
                };
                let next = _mm256_cvtepu16_epi32(_mm_loadu_si128(next.as_ptr().cast()));
                let mut index = _mm256_and_si256(x, remainder);
                if K > 1 {
                    let contexts = _mm_cvtsi64_si128(i64::from_le_bytes(contexts(g)));
                    let contexts = _mm256_cvtepu8_epi32(_mm_and_si128(contexts, context));
                    index =
                        _mm256_or_si256(index, _mm256_slli_epi32::<{ SCALE_BITS.cast_signed() }>(contexts));
                }
                let entry = _mm256_i32gather_epi32::<4>(table, index);
                let upper = _mm256_srli_epi32::<{ SCALE_BITS.cast_signed() }>(x);
                let less_one = _mm256_srli_epi32::<20>(entry);
                let offset = _mm256_and_si256(_mm256_srli_epi32::<8>(entry), remainder);
                let y = _mm256_add_epi32(
                    _mm256_mullo_epi32(less_one, upper),
                    _mm256_add_epi32(upper, offset),
                );
                let more = _mm256_cmplt_epu32_mask(y, low);
                let words = _mm256_maskz_expand_epi32(more, next);
                x = _mm256_mask_or_epi32(y, more, _mm256_slli_epi32::<16>(y), words);
                _mm_storel_epi64(group.as_mut_ptr().cast(), _mm256_cvtepi32_epi8(entry));
                at += 2 * more.count_ones() as usize;
                done = g + 1;
            }
            _mm256_storeu_si256(states.as_mut_ptr().cast(), x);
        }
        (done, at)
    }
}

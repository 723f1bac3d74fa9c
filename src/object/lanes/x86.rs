//! Eight BLAKE2b side by side in the lanes of AVX-512 (Skylake-X, 2017; Zen 4, 2022), or four in those of AVX2 (Haswell, 2013; Zen, 2017).

use super::{ID, Lanes};
use std::arch::x86_64::{
    __m256i, __m512i, _mm256_add_epi64, _mm256_loadu_si256, _mm256_or_si256, _mm256_set1_epi64x,
    _mm256_setr_epi8, _mm256_shuffle_epi8, _mm256_shuffle_epi32, _mm256_srli_epi64, _mm256_storeu_si256,
    _mm256_xor_si256, _mm512_add_epi64, _mm512_loadu_si512, _mm512_ror_epi64, _mm512_set1_epi64,
    _mm512_storeu_si512, _mm512_xor_si512,
};

/// RFC 7693, 2.6.
const IV: [u64; 8] = [
    0x6a09_e667_f3bc_c908,
    0xbb67_ae85_84ca_a73b,
    0x3c6e_f372_fe94_f82b,
    0xa54f_f53a_5f1d_36f1,
    0x510e_527f_ade6_82d1,
    0x9b05_688c_2b3e_6c1f,
    0x1f83_d9ab_fb41_bd6b,
    0x5be0_cd19_137e_2179,
];

/// RFC 7693, 2.7; the last two rounds are the first two again.
const SIGMA: [[usize; 16]; 12] = [
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
    [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
    [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
    [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
    [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
    [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
    [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
    [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
    [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
    [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
];

/// The first word of the state: no key, fan-out and depth 1, digests of 12 bytes (RFC 7693, 2.5).
const START: u64 = IV[0] ^ 0x0101_0000 ^ ID as u64;

/// Words of a message that are not zero: 37 bytes at most.
const WORDS: usize = 5;

/// One message in each lane, of the same length: their words, lane by lane. The first two words of each digest.
macro_rules! kernel {
    ($name:ident, $feature:literal, $vector:ty, $lanes:literal, $all:ident, $add:ident, $xor:ident, $turn:ident, $load:ident, $store:ident) => {
        // The last round leaves words of the state that no digest of 12 bytes needs.
        #[allow(unused_assignments)]
        #[target_feature(enable = $feature)]
        fn $name(words: &[[u64; $lanes]; WORDS], len: u64) -> [[u64; $lanes]; 2] {
            // SAFETY: all lanes are there, at any alignment.
            let m: [$vector; WORDS] = std::array::from_fn(|i| unsafe { $load(words[i].as_ptr().cast()) });
            let [mut v0, mut v1, mut v2, mut v3] = [START, IV[1], IV[2], IV[3]].map(|w| $all(w as i64));
            let [mut v4, mut v5, mut v6, mut v7] = [IV[4], IV[5], IV[6], IV[7]].map(|w| $all(w as i64));
            let [mut v8, mut v9, mut v10, mut v11] = [IV[0], IV[1], IV[2], IV[3]].map(|w| $all(w as i64));
            let [mut v12, mut v13, mut v14, mut v15] =
                [IV[4] ^ len, IV[5], !IV[6], IV[7]].map(|w| $all(w as i64));
            // RFC 7693, 3.1; words beyond the message are zero.
            macro_rules! mix {
                ($a:ident $b:ident $c:ident $d:ident $x:expr, $y:expr) => {
                    $a = $add($a, $b);
                    if const { $x < WORDS } {
                        $a = $add($a, m[const { $x % WORDS }]);
                    }
                    $d = $turn!(32, $xor($d, $a));
                    $c = $add($c, $d);
                    $b = $turn!(24, $xor($b, $c));
                    $a = $add($a, $b);
                    if const { $y < WORDS } {
                        $a = $add($a, m[const { $y % WORDS }]);
                    }
                    $d = $turn!(16, $xor($d, $a));
                    $c = $add($c, $d);
                    $b = $turn!(63, $xor($b, $c));
                };
            }
            macro_rules! round {
                                                        ($r:literal) => {
                                                            mix!(v0 v4 v8 v12 SIGMA[$r][0], SIGMA[$r][1]);
                                                            mix!(v1 v5 v9 v13 SIGMA[$r][2], SIGMA[$r][3]);
                                                            mix!(v2 v6 v10 v14 SIGMA[$r][4], SIGMA[$r][5]);
                                                            mix!(v3 v7 v11 v15 SIGMA[$r][6], SIGMA[$r][7]);
                                                            mix!(v0 v5 v10 v15 SIGMA[$r][8], SIGMA[$r][9]);
                                                            mix!(v1 v6 v11 v12 SIGMA[$r][10], SIGMA[$r][11]);
                                                            mix!(v2 v7 v8 v13 SIGMA[$r][12], SIGMA[$r][13]);
                                                            mix!(v3 v4 v9 v14 SIGMA[$r][14], SIGMA[$r][15]);
                                                        };
                                                    }
            round!(0);
            round!(1);
            round!(2);
            round!(3);
            round!(4);
            round!(5);
            round!(6);
            round!(7);
            round!(8);
            round!(9);
            round!(10);
            round!(11);
            let first = $xor($all(START as i64), $xor(v0, v8));
            let second = $xor($all(IV[1] as i64), $xor(v1, v9));
            let mut out = [[0; $lanes]; 2];
            for (to, digest) in out.iter_mut().zip([first, second]) {
                // SAFETY: as above.
                unsafe { $store(to.as_mut_ptr().cast(), digest) };
            }
            out
        }
    };
}

macro_rules! turn512 {
    ($bits:literal, $x:expr) => {
        _mm512_ror_epi64::<$bits>($x)
    };
}

/// AVX2 has no rotation: halves and bytes are moved, and by 63 is by one the other way.
macro_rules! turn256 {
    (32, $x:expr) => {
        _mm256_shuffle_epi32::<0b10_11_00_01>($x)
    };
    (24, $x:expr) => {
        _mm256_shuffle_epi8(
            $x,
            _mm256_setr_epi8(
                3, 4, 5, 6, 7, 0, 1, 2, 11, 12, 13, 14, 15, 8, 9, 10, 3, 4, 5, 6, 7, 0, 1, 2, 11, 12, 13, 14,
                15, 8, 9, 10,
            ),
        )
    };
    (16, $x:expr) => {
        _mm256_shuffle_epi8(
            $x,
            _mm256_setr_epi8(
                2, 3, 4, 5, 6, 7, 0, 1, 10, 11, 12, 13, 14, 15, 8, 9, 2, 3, 4, 5, 6, 7, 0, 1, 10, 11, 12, 13,
                14, 15, 8, 9,
            ),
        )
    };
    (63, $x:expr) => {{
        let x = $x;
        _mm256_or_si256(_mm256_add_epi64(x, x), _mm256_srli_epi64::<63>(x))
    }};
}

kernel!(
    eight,
    "avx512f",
    __m512i,
    8,
    _mm512_set1_epi64,
    _mm512_add_epi64,
    _mm512_xor_si512,
    turn512,
    _mm512_loadu_si512,
    _mm512_storeu_si512
);
kernel!(
    four,
    "avx2",
    __m256i,
    4,
    _mm256_set1_epi64x,
    _mm256_add_epi64,
    _mm256_xor_si256,
    turn256,
    _mm256_loadu_si256,
    _mm256_storeu_si256
);

/// Hashes `LANES` messages at a time. Inlined into functions that have the kernel's features.
#[inline(always)]
fn hash<const LANES: usize, const SIZE: usize>(
    kernel: impl Fn(&[[u64; LANES]; WORDS], u64) -> [[u64; LANES]; 2],
    scale: u8,
    payloads: &[u8],
    ids: &mut [[u8; ID]],
) {
    for (payloads, ids) in payloads.chunks(LANES * SIZE).zip(ids.chunks_mut(LANES)) {
        let mut words = [[0; LANES]; WORDS];
        for (lane, payload) in payloads.chunks_exact(SIZE).enumerate() {
            let mut padded = [0; 8 * WORDS];
            padded[..SIZE].copy_from_slice(payload);
            let (eights, _) = padded.as_chunks::<8>();
            // The byte before the payload moves all of it up by one.
            let mut carry = u64::from(scale);
            for (word, eight) in words.iter_mut().zip(eights) {
                let next = u64::from_le_bytes(*eight);
                word[lane] = next << 8 | carry;
                carry = next >> 56;
            }
        }
        let [first, second] = kernel(&words, SIZE as u64 + 1);
        for (lane, id) in ids.iter_mut().enumerate() {
            id[..8].copy_from_slice(&first[lane].to_le_bytes());
            id[8..].copy_from_slice(&second[lane].to_le_bytes()[..ID - 8]);
        }
    }
}

macro_rules! way {
    ($name:ident, $feature:tt, $inside:ident, $kernel:ident) => {
        #[target_feature(enable = $feature)]
        fn $inside<const SIZE: usize>(scale: u8, payloads: &[u8], ids: &mut [[u8; ID]]) {
            hash::<_, SIZE>(|words, len| $kernel(words, len), scale, payloads, ids);
        }

        /// If the processor has it.
        pub(super) fn $name() -> Option<Lanes> {
            is_x86_feature_detected!($feature).then_some(Lanes {
                // SAFETY: only handed out where the processor has the feature.
                leaves: |scale, payloads, ids| unsafe { $inside::<32>(scale, payloads, ids) },
                // SAFETY: as above.
                inner: |scale, payloads, ids| unsafe { $inside::<36>(scale, payloads, ids) },
            })
        }
    };
}

way!(avx512, "avx512f", by_eight, eight);
way!(avx2, "avx2", by_four, four);

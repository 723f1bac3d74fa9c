//! Sixteen SHA-256 side by side in the lanes of AVX-512 (Skylake-X, 2017; Zen 4, 2022).

use super::{BLOCK, LANES};
use std::arch::x86_64::{
    __m512i, _mm_set_epi8, _mm512_add_epi32, _mm512_broadcast_i32x4, _mm512_loadu_si512, _mm512_ror_epi32,
    _mm512_set1_epi32, _mm512_setzero_si512, _mm512_shuffle_epi8, _mm512_shuffle_i32x4, _mm512_srli_epi32,
    _mm512_storeu_si512, _mm512_ternarylogic_epi32, _mm512_unpackhi_epi32, _mm512_unpackhi_epi64,
    _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
};

/// FIPS 180-4, 4.2.2.
const K: [u32; 64] = [
    0x428a_2f98,
    0x7137_4491,
    0xb5c0_fbcf,
    0xe9b5_dba5,
    0x3956_c25b,
    0x59f1_11f1,
    0x923f_82a4,
    0xab1c_5ed5,
    0xd807_aa98,
    0x1283_5b01,
    0x2431_85be,
    0x550c_7dc3,
    0x72be_5d74,
    0x80de_b1fe,
    0x9bdc_06a7,
    0xc19b_f174,
    0xe49b_69c1,
    0xefbe_4786,
    0x0fc1_9dc6,
    0x240c_a1cc,
    0x2de9_2c6f,
    0x4a74_84aa,
    0x5cb0_a9dc,
    0x76f9_88da,
    0x983e_5152,
    0xa831_c66d,
    0xb003_27c8,
    0xbf59_7fc7,
    0xc6e0_0bf3,
    0xd5a7_9147,
    0x06ca_6351,
    0x1429_2967,
    0x27b7_0a85,
    0x2e1b_2138,
    0x4d2c_6dfc,
    0x5338_0d13,
    0x650a_7354,
    0x766a_0abb,
    0x81c2_c92e,
    0x9272_2c85,
    0xa2bf_e8a1,
    0xa81a_664b,
    0xc24b_8b70,
    0xc76c_51a3,
    0xd192_e819,
    0xd699_0624,
    0xf40e_3585,
    0x106a_a070,
    0x19a4_c116,
    0x1e37_6c08,
    0x2748_774c,
    0x34b0_bcb5,
    0x391c_0cb3,
    0x4ed8_aa4a,
    0x5b9c_ca4f,
    0x682e_6ff3,
    0x748f_82ee,
    0x78a5_636f,
    0x84c8_7814,
    0x8cc7_0208,
    0x90be_fffa,
    0xa450_6ceb,
    0xbef9_a3f7,
    0xc671_78f2,
];

/// Truth tables of three bits: one of them or all three, the second where the first is set and else the third, most of them.
const XOR: i32 = 0x96;
const CHOICE: i32 = 0xca;
const MAJORITY: i32 = 0xe8;

/// Whether the processor has AVX-512 F and BW.
pub(super) fn is_there() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")
}

/// Compresses the blocks of each lane into its state. Only where [`is_there`].
pub(super) fn compress(states: &mut [[u32; 8]; LANES], blocks: [&[[u8; BLOCK]]; LANES]) {
    assert!(is_there());
    // SAFETY: the processor has the features.
    unsafe { rounds(states, blocks) }
}

/// Rows to columns: word `i` of vector `j` becomes word `j` of vector `i`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn transpose(w: &mut [__m512i; 16]) {
    let mut t = [_mm512_setzero_si512(); 16];
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(w[2 * i], w[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(w[2 * i], w[2 * i + 1]);
    }
    for k in [0, 4, 8, 12] {
        w[k] = _mm512_unpacklo_epi64(t[k], t[k + 2]);
        w[k + 1] = _mm512_unpackhi_epi64(t[k], t[k + 2]);
        w[k + 2] = _mm512_unpacklo_epi64(t[k + 1], t[k + 3]);
        w[k + 3] = _mm512_unpackhi_epi64(t[k + 1], t[k + 3]);
    }
    const EVEN: i32 = 0x88;
    const ODD: i32 = 0xdd;
    for i in 0..4 {
        t[i] = _mm512_shuffle_i32x4::<EVEN>(w[i], w[4 + i]);
        t[4 + i] = _mm512_shuffle_i32x4::<ODD>(w[i], w[4 + i]);
        t[8 + i] = _mm512_shuffle_i32x4::<EVEN>(w[8 + i], w[12 + i]);
        t[12 + i] = _mm512_shuffle_i32x4::<ODD>(w[8 + i], w[12 + i]);
    }
    for i in 0..4 {
        w[i] = _mm512_shuffle_i32x4::<EVEN>(t[i], t[8 + i]);
        w[8 + i] = _mm512_shuffle_i32x4::<ODD>(t[i], t[8 + i]);
        w[4 + i] = _mm512_shuffle_i32x4::<EVEN>(t[4 + i], t[12 + i]);
        w[12 + i] = _mm512_shuffle_i32x4::<ODD>(t[4 + i], t[12 + i]);
    }
}

#[target_feature(enable = "avx512f,avx512bw")]
fn rounds(states: &mut [[u32; 8]; LANES], blocks: [&[[u8; BLOCK]]; LANES]) {
    let add = |a, b| _mm512_add_epi32(a, b);
    let mut s = columns(states);
    let big_endian =
        _mm512_broadcast_i32x4(_mm_set_epi8(12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3));
    let count = blocks.iter().map(|b| b.len()).min().unwrap_or(0);
    let mut n = 0;
    while n < count {
        let mut w: [__m512i; 16] = std::array::from_fn(|i| {
            let block = &blocks[i][n];
            // SAFETY: a block has 64 bytes.
            let block = unsafe { _mm512_loadu_si512(block.as_ptr().cast()) };
            _mm512_shuffle_epi8(block, big_endian)
        });
        transpose(&mut w);
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = s;
        // Written out sixteen at a time: which word is used is known then, and no vector leaves its register for a table.
        macro_rules! round {
            ($from:expr, $($i:literal)*) => {$(
                let e3 = _mm512_ternarylogic_epi32::<XOR>(
                    _mm512_ror_epi32::<6>(e), _mm512_ror_epi32::<11>(e), _mm512_ror_epi32::<25>(e));
                let choice = _mm512_ternarylogic_epi32::<CHOICE>(e, f, g);
                let k = _mm512_set1_epi32(K[$from + $i].cast_signed());
                let t = add(add(h, e3), add(choice, add(w[$i], k)));
                let a3 = _mm512_ternarylogic_epi32::<XOR>(
                    _mm512_ror_epi32::<2>(a), _mm512_ror_epi32::<13>(a), _mm512_ror_epi32::<22>(a));
                let most = _mm512_ternarylogic_epi32::<MAJORITY>(a, b, c);
                (h, g, f, e, d, c, b, a) = (g, f, e, add(d, t), c, b, a, add(t, add(a3, most)));
            )*};
        }
        macro_rules! schedule {
            ($($i:literal)*) => {$(
                let (x, y) = (w[($i + 1) % 16], w[($i + 14) % 16]);
                let x3 = _mm512_ternarylogic_epi32::<XOR>(
                    _mm512_ror_epi32::<7>(x), _mm512_ror_epi32::<18>(x), _mm512_srli_epi32::<3>(x));
                let y3 = _mm512_ternarylogic_epi32::<XOR>(
                    _mm512_ror_epi32::<17>(y), _mm512_ror_epi32::<19>(y), _mm512_srli_epi32::<10>(y));
                w[$i] = add(add(w[$i], x3), add(w[($i + 9) % 16], y3));
            )*};
        }
        round!(0, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        for from in [16, 32, 48] {
            schedule!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
            round!(from, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
        }
        for (sum, word) in s.iter_mut().zip([a, b, c, d, e, f, g, h]) {
            *sum = add(*sum, word);
        }
        n += 1;
    }
    for (i, word) in s.iter().enumerate() {
        let mut row = [0u32; LANES];
        // SAFETY: the row has room for a vector.
        unsafe { _mm512_storeu_si512(row.as_mut_ptr().cast(), *word) };
        for (state, word) in states.iter_mut().zip(row) {
            state[i] = word;
        }
    }
}

/// The states' words, those of one place in one vector.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn columns(states: &[[u32; 8]; LANES]) -> [__m512i; 8] {
    std::array::from_fn(|i| {
        let row: [u32; LANES] = std::array::from_fn(|lane| states[lane][i]);
        // SAFETY: the row is as long as a vector.
        unsafe { _mm512_loadu_si512(row.as_ptr().cast()) }
    })
}

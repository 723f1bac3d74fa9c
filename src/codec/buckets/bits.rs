//! Strings of bits, lowest first.

/// Writes bits.
#[derive(Default)]
pub(super) struct BitWriter {
    words: Vec<u8>,
    open: u64,
    used: u32,
}

impl BitWriter {
    /// Appends the `n` lowest bits of `bits`, at most 64; the others must be 0.
    #[inline(always)]
    pub(super) fn put(&mut self, bits: u64, n: u32) {
        self.open |= bits << self.used;
        let all = self.used + n;
        if all < 64 {
            self.used = all;
            return;
        }
        self.words.extend_from_slice(&self.open.to_le_bytes());
        self.used = all - 64;
        // What did not fit; nothing if all did.
        self.open = (bits >> 1) >> (n - 1 - self.used);
    }

    /// Bits so far.
    pub(super) fn len(&self) -> usize {
        self.words.len() * 8 + self.used as usize
    }

    /// The bits, with zeros up to a multiple of 64.
    pub(super) fn finish(mut self) -> Vec<u8> {
        if self.used > 0 {
            self.words.extend_from_slice(&self.open.to_le_bytes());
        }
        self.words
    }
}

/// Reads bits; past the end there are zeros.
#[derive(Clone, Copy, Default)]
pub(super) struct BitReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> BitReader<'a> {
    /// Reads `bytes`.
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        BitReader { bytes, at: 0 }
    }

    /// The next `n` bits, at most 64; at most 57 if `few`, which is quicker.
    #[inline(always)]
    pub(super) fn take(&mut self, n: u32, few: bool) -> u64 {
        let bits = peek(self.bytes, self.at, few);
        self.at += n as usize;
        // All ones for 64.
        bits & (1u64.checked_shl(n).unwrap_or(0)).wrapping_sub(1)
    }

    /// Bits taken so far.
    pub(super) fn taken(&self) -> usize {
        self.at
    }
}

/// 64 bits of `bytes` from bit `at` on, of which the lowest 57 are right if `few`, which is quicker, else all.
#[inline(always)]
pub(super) fn peek(bytes: &[u8], at: usize, few: bool) -> u64 {
    let (at, shift) = (at / 8, at as u32 % 8);
    let bits = match bytes.get(at..).and_then(|b| b.first_chunk()) {
        Some(word) => u64::from_le_bytes(*word) >> shift,
        None => last(bytes, at) >> shift,
    };
    if few {
        return bits;
    }
    let next = bytes.get(at + 8).copied().unwrap_or_default();
    bits | (u64::from(next) << 1) << (63 - shift)
}

#[cold]
fn last(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    for (w, b) in word.iter_mut().zip(bytes.iter().skip(at)) {
        *w = *b;
    }
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(parts in prop::collection::vec((any::<u64>(), 0u32..=64), 0..200)) {
            let low = |(bits, n): (u64, u32)| if n == 64 { bits } else { bits & ((1 << n) - 1) };
            let mut w = BitWriter::default();
            for p in &parts {
                w.put(low(*p), p.1);
            }
            let len = w.len();
            prop_assert_eq!(len, parts.iter().map(|p| p.1 as usize).sum::<usize>());
            let bytes = w.finish();
            prop_assert_eq!(bytes.len(), len.div_ceil(64) * 8);
            let mut r = BitReader::new(&bytes);
            for p in &parts {
                prop_assert_eq!(r.take(p.1, false), low(*p));
            }
            prop_assert_eq!(r.taken(), len);
            let mut short = BitReader::new(&bytes[..bytes.len().min(3)]);
            prop_assert_eq!(short.take(57, true), short.bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b)));
        }
    }
}

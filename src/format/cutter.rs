//! Content-defined chunks for files without structure: FastCDC (Xia et al., 2020) from the fastcdc crate.

use crate::error::Result;
use fastcdc::v2020::FastCDC;

/// Bytes of the shortest, the average and the longest chunk; only a file's last chunk may be shorter.
const MIN: usize = 64 << 10;
const AVERAGE: usize = 256 << 10;
const MAX: usize = 1 << 20;

/// Cuts a stream into content-defined chunks of 64 KiB to 1 MiB, 256 KiB on average. Where it cuts depends on the bytes
/// alone, not on how they were handed over; it holds less than 2 MiB.
#[derive(Default)]
pub struct Cutter {
    /// Bytes not yet emitted start at `start`.
    held: Vec<u8>,
    start: usize,
}

impl Cutter {
    /// A cutter at the start of a file.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes of the file and hands every chunk that is complete to `emit`, in order.
    ///
    /// # Errors
    /// Whatever `emit` returns.
    pub fn push(&mut self, mut data: &[u8], emit: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        loop {
            // A cut is certain once as many bytes are there as the longest chunk may have.
            if self.start == self.held.len() && data.len() >= MAX {
                let (chunk, rest) = data.split_at(cut(&data[..MAX]));
                emit(chunk)?;
                data = rest;
                continue;
            }
            let wanted = MAX.saturating_sub(self.held.len() - self.start);
            let (head, rest) = data.split_at(wanted.min(data.len()));
            if self.start > MAX / 2 {
                self.held.drain(..self.start);
                self.start = 0;
            }
            self.held.extend_from_slice(head);
            data = rest;
            if self.held.len() - self.start < MAX {
                return Ok(());
            }
            self.emit_one(emit)?;
        }
    }

    /// Hands the rest of the file to `emit`.
    ///
    /// # Errors
    /// Whatever `emit` returns.
    pub fn finish(mut self, emit: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        while self.start < self.held.len() {
            self.emit_one(emit)?;
        }
        Ok(())
    }

    fn emit_one(&mut self, emit: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let rest = &self.held[self.start..];
        let n = cut(rest);
        emit(&rest[..n])?;
        self.start += n;
        if self.start == self.held.len() {
            self.held.clear();
            self.start = 0;
        }
        Ok(())
    }
}

/// Length of the chunk at the front of `bytes`, which hold at least the longest chunk or else end where the file ends.
fn cut(bytes: &[u8]) -> usize {
    FastCDC::new(bytes, MIN, AVERAGE, MAX).cut(0, bytes.len()).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn noise(n: usize, mut seed: u64) -> Vec<u8> {
        let mut out = Vec::with_capacity(n + 8);
        while out.len() < n {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            out.extend_from_slice(&(seed >> 16).to_le_bytes()[..6]);
        }
        out.truncate(n);
        out
    }

    fn chunks(data: &[u8], step: usize) -> Vec<Vec<u8>> {
        let mut out = vec![];
        let mut c = Cutter::new();
        let mut emit = |b: &[u8]| {
            out.push(b.to_vec());
            Ok(())
        };
        for part in data.chunks(step.max(1)) {
            c.push(part, &mut emit).unwrap();
            assert!(c.held.len() < 2 * MAX);
        }
        c.finish(&mut emit).unwrap();
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn cuts_depend_on_the_bytes_alone(n in 0usize..5_000_000, seed: u64, step in 1usize..3_000_000, flat: bool) {
            let data = if flat { vec![7; n] } else { noise(n, seed) };
            let a = chunks(&data, n);
            prop_assert_eq!(&a.concat(), &data);
            let mut want = vec![];
            for c in FastCDC::new(&data, MIN, AVERAGE, MAX) {
                want.push(c.length);
            }
            prop_assert_eq!(a.iter().map(Vec::len).collect::<Vec<_>>(), want);
            prop_assert!(a == chunks(&data, step));
            prop_assert!(a.iter().rev().skip(1).all(|c| (MIN..=MAX).contains(&c.len())));
        }
    }

    #[test]
    fn an_insertion_moves_few_chunks() {
        let data = noise(6 << 20, 1);
        let mut other = data.clone();
        other.splice(100..100, *b"inserted");
        let known: std::collections::HashSet<_> = chunks(&data, 1 << 20).into_iter().collect();
        let new = chunks(&other, 1 << 20)
            .iter()
            .filter(|c| !known.contains(*c))
            .count();
        assert!(
            known.len() > 10 && new <= 2,
            "{new} of {} chunks are new",
            known.len()
        );
    }
}

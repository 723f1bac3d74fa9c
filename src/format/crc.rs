//! CRC-32 of many spans of one file in one pass.

use crate::error::{Error, Kind, Result};
use crc32fast::Hasher;

/// Computes the CRC-32 of each of a set of spans, however they overlap, while the file streams by once.
///
/// The CRC-32 of the file's first bytes is noted at every place where a span begins or ends. A span's own value follows
/// from the two notes at its ends, since combining is linear: crc(AB) = shift(crc(A), |B|) xor crc(B) (zlib's
/// `crc32_combine`). So the cost is one pass, a sort, and O(log length) per span.
pub struct SpanCrc {
    spans: Vec<(u64, u64)>,
    /// Places to note, in order, and the values noted so far.
    places: Vec<u64>,
    noted: Vec<u32>,
    running: Hasher,
    at: u64,
}

impl SpanCrc {
    /// For spans of (offset, length) in bytes; the values come back in this order.
    ///
    /// # Errors
    /// `Usage` if a span's end overflows.
    pub fn new(spans: Vec<(u64, u64)>) -> Result<Self> {
        let mut places = Vec::with_capacity(2 * spans.len());
        for (offset, len) in &spans {
            let end = offset.checked_add(*len);
            places.extend([
                *offset,
                end.ok_or_else(|| Error::new(Kind::Usage, "a span's end overflows"))?,
            ]);
        }
        places.sort_unstable();
        places.dedup();
        Ok(Self {
            spans,
            places,
            noted: vec![],
            running: Hasher::new(),
            at: 0,
        })
    }

    /// Takes the next bytes of the file.
    pub fn update(&mut self, mut bytes: &[u8]) {
        while let Some(place) = self.places.get(self.noted.len()) {
            let until = usize::try_from(place - self.at).unwrap_or(usize::MAX);
            let Some((head, rest)) = bytes.split_at_checked(until) else {
                self.running.update(bytes);
                self.at += bytes.len() as u64;
                return;
            };
            self.running.update(head);
            self.at = *place;
            self.noted.push(self.running.clone().finalize());
            bytes = rest;
        }
    }

    /// The CRC-32 of each span.
    ///
    /// # Errors
    /// `Changed` if the file ended before a span did.
    pub fn finish(mut self) -> Result<Vec<u32>> {
        // Spans that start and end at the end of what came need one more look.
        self.update(&[]);
        let note = |place: u64| -> Option<u32> {
            let i = self.places.binary_search(&place).ok()?;
            self.noted.get(i).copied()
        };
        let value = |(offset, len): &(u64, u64)| {
            let (a, ab) = (note(*offset)?, note(*offset + *len)?);
            let mut shifted = Hasher::new_with_initial_len(a, 0);
            shifted.combine(&Hasher::new_with_initial_len(0, *len));
            Some(shifted.finalize() ^ ab)
        };
        let values: Option<Vec<u32>> = self.spans.iter().map(value).collect();
        values.ok_or_else(|| Error::new(Kind::Changed, "the file ended before one of its tensors"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn equals_hashing_each_span(
            data in prop::collection::vec(any::<u8>(), 0..600),
            raw in prop::collection::vec((0usize..600, 0usize..600), 0..20),
            step in 1usize..200,
        ) {
            let spans: Vec<_> = raw.iter().map(|(a, n)| {
                let a = *a.min(&data.len());
                (a as u64, (*n).min(data.len() - a) as u64)
            }).collect();
            let mut crc = SpanCrc::new(spans.clone()).unwrap();
            for part in data.chunks(step) {
                crc.update(part);
            }
            let want: Vec<_> = spans.iter()
                .map(|(a, n)| crc32fast::hash(&data[*a as usize..(a + n) as usize])).collect();
            prop_assert_eq!(crc.finish().unwrap(), want);
        }
    }

    #[test]
    fn a_short_file_is_told() {
        let mut crc = SpanCrc::new(vec![(0, 2), (1, 3)]).unwrap();
        crc.update(b"abc");
        assert_eq!(crc.finish().unwrap_err().kind(), Kind::Changed);
        assert!(SpanCrc::new(vec![(u64::MAX, 1)]).is_err());
    }
}

//! Recognises sequential readers of one file, and readers of whole tensors, so that what they read next can be rebuilt ahead.
//!
//! Streams are told apart by where they read, not by file handle: loaders share one descriptor among threads that each read a
//! range of their own, and the kernel's readahead sends a stream's requests out of order.

use std::ops::Range;

/// Bytes kept rebuilt, or being rebuilt, ahead of a stream, once it has gone on for as long.
const WINDOW: u64 = 16 << 20;
/// The same when it begins: whoever wants one small tensor must not have to wait for what he does not want.
const FIRST: u64 = 4 << 20;
/// How far from a stream's end a request may lie and still belong to it: what the kernel has in flight at once.
const SLACK: u64 = 2 << 20;
/// Streams of one file that are followed at a time.
const STREAMS: usize = 16;

#[derive(Clone, Copy)]
struct Stream {
    /// End of the furthest request.
    next: u64,
    /// Up to where rebuilding was asked for.
    ahead: u64,
    /// Bytes to keep ahead.
    window: u64,
    /// Nothing is fetched from here on: the end of the tensor it began in, until it reads past that.
    until: u64,
    /// Requests seen.
    seen: u32,
    /// When it was last read, in requests of the file.
    used: u64,
}

/// The streams of one file.
#[derive(Default)]
pub(super) struct Streams {
    known: Vec<Stream>,
    clock: u64,
}

impl Streams {
    /// Notes a read. The answer is a range, as offset and length, worth rebuilding now. `tensor` tells what tensor lies at an
    /// offset: whoever reads the start of one wants the rest of it, too.
    pub(super) fn read(
        &mut self,
        offset: u64,
        len: u64,
        size: u64,
        tensor: impl FnOnce(u64) -> Option<Range<u64>>,
    ) -> Option<(u64, u64)> {
        self.clock += 1;
        let end = offset.saturating_add(len).min(size);
        let near = |s: &&mut Stream| {
            offset.saturating_add(SLACK) >= s.next && offset <= s.next.saturating_add(SLACK)
        };
        let found = self
            .known
            .iter_mut()
            .filter(near)
            .min_by_key(|s| s.next.abs_diff(offset));
        let Some(stream) = found else {
            return self.begin(offset, end, size, tensor);
        };
        stream.used = self.clock;
        // Reading again what was read is no progress.
        if end <= stream.next {
            return None;
        }
        stream.next = end;
        stream.seen = stream.seen.saturating_add(1);
        if end > stream.until {
            stream.until = size;
        }
        let from = stream.ahead.max(end);
        let to = end.saturating_add(stream.window).min(stream.until);
        // Asked for in halves of the window, so that a stream of small reads does not ask at every read.
        let worth = to.saturating_sub(from) >= stream.window / 2 || (to == stream.until && to > from);
        if stream.seen < 2 || !worth {
            return None;
        }
        stream.window = (stream.window * 2).min(WINDOW);
        stream.ahead = to;
        Some((from, to - from))
    }

    fn begin(
        &mut self,
        offset: u64,
        end: u64,
        size: u64,
        tensor: impl FnOnce(u64) -> Option<Range<u64>>,
    ) -> Option<(u64, u64)> {
        let tensor = tensor(end.saturating_sub(1));
        // The start of the file holds its header, which is read whatever is wanted.
        let starts = |t: &Range<u64>| offset > 0 && (offset..end).contains(&t.start);
        let ahead = match tensor.as_ref().filter(|t| starts(t)) {
            Some(t) => end.saturating_add(FIRST).min(t.end).max(end),
            None => end,
        };
        let new = Stream {
            next: end,
            ahead,
            window: FIRST,
            until: tensor.map_or(size, |t| t.end),
            seen: 1,
            used: self.clock,
        };
        if self.known.len() < STREAMS {
            self.known.push(new);
        } else if let Some(oldest) = self.known.iter_mut().min_by_key(|s| s.used) {
            *oldest = new;
        }
        (ahead > end).then(|| (end, ahead - end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    const MIB: u64 = 1 << 20;

    fn opaque(_: u64) -> Option<Range<u64>> {
        None
    }

    #[test]
    fn who_reads_the_start_of_a_tensor_gets_the_rest_and_no_more() {
        let tensors = [MIB..3 * MIB, 3 * MIB..60 * MIB, 60 * MIB..61 * MIB];
        let tensor = |at: u64| tensors.iter().find(|t| t.contains(&at)).cloned();
        let size = 61 * MIB;
        let mut s = Streams::default();
        let mut read = |at: u64| s.read(at, MIB / 2, size, tensor);
        assert_eq!(read(0), None, "the header");
        let half = MIB / 2;
        // A page fault asks for what is around it, too.
        assert_eq!(read(20 * MIB), None, "the middle of one");
        assert_eq!(
            Streams::default().read(MIB - half, MIB, size, tensor),
            Some((MIB + half, 2 * MIB - half))
        );
        let mut s = Streams::default();
        let mut covered = 0;
        for i in 0..114 {
            if let Some((from, len)) = s.read(3 * MIB + i * half, half, size, tensor) {
                assert!(from >= covered && from + len <= 60 * MIB, "{i}: {from} + {len}");
                assert!(i > 0 || len == FIRST, "{i}: {len}");
                covered = from + len;
            }
        }
        assert_eq!(covered, 60 * MIB);
        // It reads on: then it reads the file, not a tensor.
        assert_eq!(
            s.read(60 * MIB, half, size, tensor),
            Some((60 * MIB + half, half))
        );
    }

    #[test]
    fn a_sequential_reader_is_served_ahead_once_and_without_gaps() {
        let mut s = Streams::default();
        let size = 200 * MIB;
        let mut asked = 0;
        let mut covered = MIB;
        for i in 0..200 {
            if let Some((from, len)) = s.read(i * MIB, MIB, size, opaque) {
                assert!(
                    from >= covered && from + len <= size,
                    "{i}: {from} after {covered}"
                );
                assert!(from <= covered.max((i + 1) * MIB));
                covered = from + len;
                asked += 1;
            }
        }
        assert_eq!(covered, size);
        assert!(asked <= 28, "asked {asked} times");
    }

    #[test]
    fn interleaved_streams_and_out_of_order_requests_are_followed() {
        let mut s = Streams::default();
        let size = 4000 * MIB;
        let mut ahead = [0u64; 8];
        for i in 0..32u64 {
            for t in 0..8u64 {
                // Pairs of requests swapped, as the kernel's readahead may send them.
                let at = t * 500 * MIB + (i ^ 1) * MIB;
                if let Some((from, len)) = s.read(at, MIB, size, opaque) {
                    ahead[t as usize] = from + len - t * 500 * MIB;
                }
            }
        }
        assert!(ahead.iter().all(|a| *a >= 32 * MIB), "{ahead:?}");
    }

    #[test]
    fn scattered_reads_ask_for_nothing() {
        let mut s = Streams::default();
        let size = 1 << 40;
        let mut at = 12345u64;
        for _ in 0..500 {
            at = at
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            assert_eq!(s.read(at % size, 4096, size, opaque), None);
        }
    }

    #[test]
    fn hostile_offsets_do_not_overflow() {
        let mut s = Streams::default();
        for _ in 0..3 {
            s.read(u64::MAX, u64::MAX, u64::MAX, opaque);
            s.read(0, u64::MAX, 10, opaque);
            s.read(u64::MAX - 5, 1, 0, |_| Some(0..u64::MAX));
        }
    }
}

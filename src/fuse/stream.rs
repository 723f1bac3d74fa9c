//! Recognises sequential readers of one file, and readers of whole tensors, so that what they read next can be rebuilt ahead.
//!
//! Streams are told apart by where they read, not by file handle: loaders share one descriptor among threads that each read a
//! range of their own, and the kernel's readahead sends a stream's requests out of order.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Bytes kept rebuilt, or being rebuilt, ahead of a stream, once it has gone on for as long. So much that chunks are rebuilt in
/// batches that are worth it: their hashes are computed side by side.
const WINDOW: u64 = 64 << 20;
/// The same when it begins: whoever wants one small tensor must not have to wait for what he does not want.
const FIRST: u64 = 4 << 20;
/// How far from a stream's end a request may lie and still belong to it: what the kernel has in flight at once.
const SLACK: u64 = 2 << 20;
/// What is touched in a mapping, at least; the kernel's readahead asks for as much before it as after it.
const PAGE: u64 = 4096;
/// The least window of a stream among many.
const LEAST: u64 = 1 << 20;
/// Streams of one file that are followed at a time.
const STREAMS: usize = 16;
/// A stream that has asked for nothing for so long has ended, or is slow enough to do with a small window.
const RECENT: Duration = Duration::from_secs(1);

/// The bytes that all streams of a mount together may have ahead of them: shared out among those that go on at present, lest one
/// has out of the cache what was rebuilt for another.
pub(super) struct Share {
    bytes: u64,
    streams: AtomicU64,
    /// Which stream asked when.
    going: Mutex<HashMap<u64, Instant>>,
}

impl Share {
    pub(super) fn new(bytes: u64) -> Self {
        Share {
            bytes,
            streams: AtomicU64::new(0),
            going: Mutex::default(),
        }
    }

    /// The largest window for a stream that asks now.
    fn of(&self, stream: u64) -> u64 {
        let now = Instant::now();
        let mut going = self.going.lock();
        going.retain(|_, asked| now.duration_since(*asked) < RECENT);
        going.insert(stream, now);
        // Not even one alone takes all: it reads what it has while more is rebuilt.
        (self.bytes / going.len().max(2) as u64).clamp(LEAST, WINDOW)
    }
}

#[derive(Clone, Copy)]
struct Stream {
    id: u64,
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
    /// offset: whoever reads the start of one, or touches it in a mapping, wants the rest of it, too.
    pub(super) fn read(
        &mut self,
        offset: u64,
        len: u64,
        size: u64,
        share: &Share,
        tensor: impl Fn(u64) -> Option<Range<u64>>,
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
            let id = share.streams.fetch_add(1, Ordering::Relaxed);
            return self.begin(id, offset..end, size, tensor);
        };
        stream.used = self.clock;
        // Reading again what was read is no progress.
        if end <= stream.next {
            return None;
        }
        stream.next = end;
        stream.seen = stream.seen.saturating_add(1);
        if offset >= stream.until {
            // It reads the file, not a tensor: or so it seems, as the kernel's readahead may do by itself.
            stream.until = size;
            stream.window = FIRST;
        }
        let from = stream.ahead.max(end);
        let to = end.saturating_add(stream.window).min(stream.until).max(end);
        // Asked for in halves of the window, so that a stream of small reads does not ask at every read.
        let worth = to.saturating_sub(from) >= stream.window / 2 || (to == stream.until && to > from);
        if stream.seen < 2 || !worth {
            return None;
        }
        stream.window = (stream.window * 2).min(share.of(stream.id));
        stream.ahead = to;
        Some((from, to - from))
    }

    fn begin(
        &mut self,
        id: u64,
        read: Range<u64>,
        size: u64,
        tensor: impl Fn(u64) -> Option<Range<u64>>,
    ) -> Option<(u64, u64)> {
        let end = read.end;
        let middle = (read.start + end.saturating_sub(read.start) / 2) / PAGE * PAGE;
        let touched = [read.start, middle].into_iter().find_map(|at| {
            let t = tensor(at.saturating_add(PAGE - 1).min(size.saturating_sub(1)))?;
            // The start of the file holds its header, which is read whatever is wanted.
            (at > 0 && t.start >= at).then_some(t)
        });
        let ahead = match &touched {
            Some(t) => end.saturating_add(FIRST).min(t.end).max(end),
            None => end,
        };
        let around = touched.or_else(|| tensor(end.saturating_sub(1)));
        let new = Stream {
            id,
            next: end,
            ahead,
            window: FIRST,
            until: around.map_or(size, |t| t.end),
            seen: 1,
            used: self.clock,
        };
        if self.known.len() < STREAMS {
            self.known.push(new);
        } else if let Some(oldest) = self.known.iter_mut().min_by_key(|s| s.used) {
            *oldest = new;
        }
        // Its own bytes, too, so that they are rebuilt side by side.
        (ahead > end).then(|| (read.start, ahead - read.start))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    const MIB: u64 = 1 << 20;

    fn share() -> Share {
        Share::new(1 << 30)
    }

    fn opaque(_: u64) -> Option<Range<u64>> {
        None
    }

    #[test]
    fn who_reads_the_start_of_a_tensor_gets_the_rest_and_no_more() {
        let tensors = [MIB..3 * MIB, 3 * MIB..60 * MIB, 60 * MIB..61 * MIB];
        let tensor = |at: u64| tensors.iter().find(|t| t.contains(&at)).cloned();
        let size = 61 * MIB;
        let mut s = Streams::default();
        let mut read = |at: u64| s.read(at, MIB / 2, size, &share(), tensor);
        assert_eq!(read(0), None, "the header");
        let half = MIB / 2;
        assert_eq!(read(20 * MIB), None, "the middle of one");
        // A page fault asks for what is around it, too.
        let around = |at: u64| Streams::default().read(at - half, MIB, size, &share(), tensor);
        assert_eq!(around(MIB), Some((half, 2 * MIB + half)));
        assert_eq!(around(MIB + half / 2), None, "whose start is there by chance");
        let mut s = Streams::default();
        let mut covered = 0;
        for i in 0..114 {
            if let Some((from, len)) = s.read(3 * MIB + i * half, half, size, &share(), tensor) {
                assert!(from >= covered && from + len <= 60 * MIB, "{i}: {from} + {len}");
                assert!(i > 0 || len == half + FIRST, "{i}: {len}");
                covered = from + len;
            }
        }
        assert_eq!(covered, 60 * MIB);
        // It reads on: then it reads the file, not a tensor.
        assert_eq!(
            s.read(60 * MIB, half, size, &share(), tensor),
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
            if let Some((from, len)) = s.read(i * MIB, MIB, size, &share(), opaque) {
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
                if let Some((from, len)) = s.read(at, MIB, size, &share(), opaque) {
                    ahead[t as usize] = from + len - t * 500 * MIB;
                }
            }
        }
        assert!(ahead.iter().all(|a| *a >= 32 * MIB), "{ahead:?}");
    }

    #[test]
    fn streams_share_what_may_lie_ahead() {
        let (share, size) = (Share::new(128 * MIB), 4000 * MIB);
        let mut files: Vec<Streams> = (0..16).map(|_| Streams::default()).collect();
        let mut ahead = [0u64; 16];
        for i in 0..200 {
            for (s, ahead) in files.iter_mut().zip(&mut ahead) {
                if let Some((from, len)) = s.read(i * MIB, MIB, size, &share, opaque) {
                    *ahead = from + len;
                }
            }
            if i > 100 {
                let beyond: u64 = ahead.iter().map(|a| a.saturating_sub((i + 1) * MIB)).sum();
                assert!(beyond <= 128 * MIB, "{i}: {beyond}");
            }
        }
        assert!(ahead.iter().all(|a| *a >= 204 * MIB), "{ahead:?}");
        let mut alone = Share::new(128 * MIB);
        assert_eq!(alone.of(1), 64 * MIB);
        alone.bytes = 0;
        assert_eq!(alone.of(1), LEAST);
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
            assert_eq!(s.read(at % size, 4096, size, &share(), opaque), None);
        }
    }

    #[test]
    fn hostile_offsets_do_not_overflow() {
        let mut s = Streams::default();
        for _ in 0..3 {
            s.read(u64::MAX, u64::MAX, u64::MAX, &share(), opaque);
            s.read(0, u64::MAX, 10, &share(), opaque);
            s.read(u64::MAX - 5, 1, 0, &share(), |_| Some(0..u64::MAX));
        }
    }
}

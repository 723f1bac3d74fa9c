//! SHA-256 of many messages at once: their blocks are hashed side by side, one message in each lane of a vector.
//!
//! One message is a chain that no processor gets through faster than its SHA instructions allow; sixteen beside each other take a
//! third of the time. The idea is that of S. Gueron and V. Krasnov, "Simultaneous hashing of multiple messages" (2012).

use super::Domain;
use sha2::block_api::compress256;

#[cfg(target_arch = "x86_64")]
mod avx512;

/// Messages hashed side by side.
const LANES: usize = 16;
/// With fewer left, the processor's SHA instructions are as fast, one message after the other.
pub const WORTH: usize = 6;

/// Bytes of a block.
const BLOCK: usize = 64;

/// FIPS 180-4, 5.3.3.
const START: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// Compresses the blocks of all lanes, each of which has as many, into their states.
type Compress = fn(states: &mut [[u32; 8]; LANES], blocks: [&[[u8; BLOCK]]; LANES]);

/// A message on its way: the state after what was hashed, the whole blocks that come next, and what follows them.
struct Message<'a> {
    state: [u32; 8],
    blocks: &'a [[u8; BLOCK]],
    tail: Vec<u8>,
    len: usize,
}

/// The hash of each message under a domain's tag: the same as [`Domain::hash`] of one after the other.
pub(super) fn hash(domain: Domain, messages: &[&[u8]]) -> Vec<[u8; 32]> {
    match compress() {
        Some(compress) if messages.len() >= WORTH => hash_with(compress, domain, messages),
        _ => messages.iter().map(|m| domain.hash(m)).collect(),
    }
}

/// The processor's way, if it has one.
fn compress() -> Option<Compress> {
    #[cfg(target_arch = "x86_64")]
    if avx512::is_there() {
        return Some(avx512::compress);
    }
    None
}

fn hash_with(compress: Compress, domain: Domain, messages: &[&[u8]]) -> Vec<[u8; 32]> {
    let tag = domain.tag();
    let mut messages: Vec<_> = messages.iter().map(|m| Message::new(tag, m)).collect();
    let mut todo: Vec<&mut Message<'_>> = messages.iter_mut().collect();
    // The longest are taken first, so that few are left when lanes run empty.
    todo.sort_by_key(|m| m.blocks.len());
    let mut lanes: Vec<&mut Message<'_>> = Vec::with_capacity(LANES);
    loop {
        lanes.retain(|m| !m.blocks.is_empty());
        while lanes.len() < LANES
            && let Some(next) = todo.pop()
        {
            lanes.push(next);
        }
        if lanes.len() < WORTH {
            break;
        }
        side_by_side(compress, &mut lanes);
    }
    messages.into_iter().map(Message::end).collect()
}

/// Hashes as many blocks of each lane as the shortest has.
fn side_by_side(compress: Compress, lanes: &mut [&mut Message<'_>]) {
    let count = lanes.iter().map(|m| m.blocks.len()).min().unwrap_or(0);
    let idle = lanes.first().map_or(&[][..], |m| &m.blocks[..count]);
    let (mut states, mut blocks) = ([START; LANES], [idle; LANES]);
    for ((m, state), next) in lanes.iter_mut().zip(&mut states).zip(&mut blocks) {
        *state = m.state;
        (*next, m.blocks) = m.blocks.split_at(count);
    }
    compress(&mut states, blocks);
    for (m, state) in lanes.iter_mut().zip(states) {
        m.state = state;
    }
}

impl<'a> Message<'a> {
    /// The message after a tag, which is shorter than a block. The first block is hashed already, if there is a whole one.
    fn new(tag: &[u8], bytes: &'a [u8]) -> Self {
        let (first, rest) = bytes.split_at(bytes.len().min(BLOCK - tag.len()));
        let (blocks, last) = rest.as_chunks();
        let (mut state, mut tail) = (START, [tag, first].concat());
        if tail.len() == BLOCK {
            compress256(&mut state, tail.as_chunks().0);
            tail.clear();
        }
        tail.extend_from_slice(last);
        let len = tag.len() + bytes.len();
        Message {
            state,
            blocks,
            tail,
            len,
        }
    }

    /// Hashes what is left and the padding (FIPS 180-4, 5.1.1).
    fn end(mut self) -> [u8; 32] {
        compress256(&mut self.state, self.blocks);
        self.tail.push(0x80);
        self.tail
            .resize((self.tail.len() + 8).next_multiple_of(BLOCK) - 8, 0);
        self.tail.extend_from_slice(&(self.len as u64 * 8).to_be_bytes());
        compress256(&mut self.state, self.tail.as_chunks().0);
        let mut hash = [0; 32];
        for (bytes, word) in hash.as_chunks_mut().0.iter_mut().zip(self.state) {
            *bytes = word.to_be_bytes();
        }
        hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lanes one after the other, as a check of how they are filled.
    fn portable(states: &mut [[u32; 8]; LANES], blocks: [&[[u8; BLOCK]]; LANES]) {
        for (state, blocks) in states.iter_mut().zip(blocks) {
            compress256(state, blocks);
        }
    }

    fn agree(lens: &[usize]) {
        let bytes: Vec<u8> = (0..1 << 17)
            .map(|i: u32| (i.wrapping_mul(0x9e37_79b1) >> 23) as u8)
            .collect();
        let messages: Vec<&[u8]> = lens.iter().enumerate().map(|(i, n)| &bytes[i..i + n]).collect();
        for domain in [Domain::Chunk, Domain::Manifest] {
            let want: Vec<_> = messages.iter().map(|m| domain.hash(m)).collect();
            assert_eq!(hash_with(portable, domain, &messages), want, "{lens:?}");
            assert_eq!(hash(domain, &messages), want, "{lens:?}");
        }
    }

    #[test]
    fn many_hashes_equal_single_ones() {
        for n in 0..=300 {
            let near: Vec<usize> = (0..20).map(|i| n + i % 3).collect();
            agree(&near);
        }
        for count in 0..50 {
            let lens: Vec<usize> = (0..count).map(|i| i * 7919 % 9001).collect();
            agree(&lens);
        }
        agree(&[100_000; 17]);
        agree(&[100_000, 1, 0, 65_536, 63, 64, 49, 48, 47, 70_000, 12_345]);
    }
}

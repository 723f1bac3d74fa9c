//! Which magnitudes of the base share a class: chosen on a sample, by what coding the differences should take.

use super::{CLASSES, Kind};

/// Bits of a difference's magnitude: 0 to 64.
const LENGTHS: usize = 65;

/// Bits that a class of its own costs: its tables.
const CLASS_BITS: f32 = 200.0;
/// Where so many 8ths of a class differ, they are all coded.
const DENSE_8THS: u32 = 5;

/// How long the differences of elements of each magnitude are.
pub(super) struct Sample {
    lengths: Box<[[u32; LENGTHS]; 256]>,
    /// How often each magnitude occurs with another sign than the base's.
    flips: [u32; 256],
    /// The chunk has this many times the elements of the sample.
    scale: f32,
}

/// Elements whose base's magnitude lies in one range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Class {
    /// The lowest magnitude in it.
    pub(super) from: u8,
    pub(super) kind: Kind,
}

struct Group {
    from: u8,
    lengths: [u32; LENGTHS],
    bits: f32,
}

impl Group {
    fn new(from: u8, lengths: [u32; LENGTHS], scale: f32) -> Self {
        Group {
            from,
            lengths,
            bits: scale * entropy(&lengths),
        }
    }

    fn with(&self, next: &Group, scale: f32) -> Group {
        let lengths = std::array::from_fn(|i| self.lengths[i] + next.lengths[i]);
        Group::new(self.from, lengths, scale)
    }

    fn changed(&self) -> u32 {
        self.lengths[1..].iter().sum()
    }
}

/// Bits that telling the lengths apart takes.
fn entropy(lengths: &[u32; LENGTHS]) -> f32 {
    let log = |n: u32| if n == 0 { 0.0 } else { n as f32 * (n as f32).log2() };
    log(lengths.iter().sum()) - lengths.iter().map(|n| log(*n)).sum::<f32>()
}

impl Sample {
    pub(super) fn new(scale: f32) -> Self {
        Sample {
            lengths: Box::new([[0; LENGTHS]; 256]),
            flips: [0; 256],
            scale,
        }
    }

    /// Counts an element with the other sign.
    #[inline(always)]
    pub(super) fn add_flip(&mut self, magnitude: u8) {
        self.flips[usize::from(magnitude)] += 1;
    }

    /// The highest magnitude of those with the other sign, but for a few.
    pub(super) fn highest_flip(&self) -> u8 {
        let mut beyond = self.flips.iter().sum::<u32>() / 64;
        for (magnitude, n) in (0..=255u8).zip(&self.flips).rev() {
            if *n > beyond {
                return magnitude;
            }
            beyond -= n;
        }
        0
    }

    #[inline(always)]
    pub(super) fn add(&mut self, magnitude: u8, difference: i64) {
        let length = 64 - difference.unsigned_abs().leading_zeros();
        self.lengths[usize::from(magnitude)][length as usize] += 1;
    }

    /// Joins neighbours while that costs nothing, or there are too many.
    pub(super) fn classes(&self) -> Vec<Class> {
        let occurring = |m: &u8| self.lengths[usize::from(*m)].iter().any(|n| *n > 0);
        let mut groups: Vec<Group> = (0..=255)
            .filter(occurring)
            .map(|m| Group::new(m, self.lengths[usize::from(m)], self.scale))
            .collect();
        let loss = |a: &Group, b: &Group| a.with(b, self.scale).bits - a.bits - b.bits;
        let mut losses: Vec<f32> = groups.windows(2).map(|w| loss(&w[0], &w[1])).collect();
        while let Some((i, least)) = losses
            .iter()
            .copied()
            .enumerate()
            .min_by(|a, b| a.1.total_cmp(&b.1))
        {
            if groups.len() <= CLASSES && least > CLASS_BITS {
                break;
            }
            let next = groups.remove(i + 1);
            groups[i] = groups[i].with(&next, self.scale);
            losses.remove(i);
            if let Some(next) = groups.get(i + 1) {
                losses[i] = loss(&groups[i], next);
            }
            if i > 0 {
                losses[i - 1] = loss(&groups[i - 1], &groups[i]);
            }
        }
        let all: u32 = groups.iter().flat_map(|g| g.lengths).sum();
        let changed: u32 = groups.iter().map(Group::changed).sum();
        // Where most of the chunk differs, telling which does not is not worth the time.
        let all_dense = u64::from(changed) * 8 >= u64::from(all) * u64::from(DENSE_8THS);
        let class = |(i, g): (usize, &Group)| {
            let dense = g.changed() * 8 >= g.lengths.iter().sum::<u32>() * DENSE_8THS;
            Class {
                from: if i == 0 { 0 } else { g.from },
                kind: if dense || all_dense {
                    Kind::Dense
                } else {
                    Kind::Sparse
                },
            }
        };
        groups.iter().enumerate().map(class).collect()
    }
}

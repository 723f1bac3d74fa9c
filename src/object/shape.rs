//! The forest over an object's atoms: how many nodes each scale has, which of them are roots, and which a range touches.
//!
//! A run of atoms is split greedily into the largest full ternary trees. So node `i` of scale `s` covers the atoms from i·3ˢ to
//! (i+1)·3ˢ, there are ⌊atoms / 3ˢ⌋ of a scale, and those whose parent is not there are roots: two of a scale at most.

use super::record::{ATOM, MAX_SCALE, Record};
use std::fmt;
use std::ops::Range;

/// The forest over a number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    len: u64,
}

/// How many records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Leaves.
    pub leaves: u64,
    /// Leaves and inner records.
    pub records: u64,
    /// Bytes of all of them, encoded.
    pub bytes: u64,
}

impl Counts {
    /// Adds records of a scale.
    pub(super) fn add(&mut self, scale: u8, count: u64) {
        self.leaves += if scale == 0 { count } else { 0 };
        self.records += count;
        self.bytes = self
            .bytes
            .saturating_add(count.saturating_mul(Record::encoded_len(scale) as u64));
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} leaves, {} records, {} bytes",
            self.leaves, self.records, self.bytes
        )
    }
}

/// The place of a record in an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// 0 for leaves.
    pub scale: u8,
    /// Among those of the scale, in the object's order.
    pub index: u64,
}

/// Atoms below a record of a scale.
pub(super) fn atoms_of(scale: u8) -> u64 {
    3_u64.pow(u32::from(scale.min(MAX_SCALE)))
}

impl Shape {
    /// The shape of an object of `len` bytes.
    pub fn new(len: u64) -> Self {
        Shape { len }
    }

    /// Bytes of the object.
    pub fn len(self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// Atoms of the object.
    pub fn atoms(self) -> u64 {
        self.len.div_ceil(ATOM as u64)
    }

    /// Records of a scale.
    pub fn count(self, scale: u8) -> u64 {
        self.atoms() / atoms_of(scale)
    }

    /// Those records of a scale that are roots.
    fn roots_of(self, scale: u8) -> Range<u64> {
        let inner = if scale < MAX_SCALE {
            self.count(scale + 1)
        } else {
            0
        };
        inner * 3..self.count(scale)
    }

    /// The roots, in the object's order.
    pub fn roots(self) -> impl Iterator<Item = Place> {
        let of = move |scale| self.roots_of(scale).map(move |index| Place { scale, index });
        (0..=MAX_SCALE).rev().flat_map(of)
    }

    /// The records of a scale that a range of bytes touches.
    pub fn touched(self, scale: u8, bytes: &Range<u64>) -> Range<u64> {
        let end = bytes.end.min(self.len);
        if bytes.start >= end {
            return 0..0;
        }
        let (first, last) = (bytes.start / ATOM as u64, (end - 1) / ATOM as u64);
        let to = (last / atoms_of(scale) + 1).min(self.count(scale));
        (first / atoms_of(scale)).min(to)..to
    }

    /// All records that a range of bytes touches, from the highest scale down, each scale's in the object's order.
    pub fn path(self, bytes: Range<u64>) -> impl Iterator<Item = Place> {
        let of = move |scale| {
            self.touched(scale, &bytes)
                .map(move |index| Place { scale, index })
        };
        (0..=MAX_SCALE).rev().flat_map(of)
    }

    /// How many records a range of bytes touches, had none the same content.
    pub fn cost(self, bytes: Range<u64>) -> Counts {
        let mut counts = Counts::default();
        for scale in 0..=MAX_SCALE {
            let touched = self.touched(scale, &bytes);
            counts.add(scale, touched.end - touched.start);
        }
        counts
    }
}

impl Place {
    /// The bytes that the record covers in an object of this shape.
    pub fn bytes(self, shape: Shape) -> Range<u64> {
        let width = atoms_of(self.scale).saturating_mul(ATOM as u64);
        let from = self.index.saturating_mul(width);
        from.min(shape.len)..from.saturating_add(width).min(shape.len)
    }

    /// The places of its children; only where the scale is above 0.
    pub fn children(self) -> [Place; 3] {
        [0, 1, 2].map(|n| Place {
            scale: self.scale.saturating_sub(1),
            index: self.index * 3 + n,
        })
    }

    /// The place of its parent, if that is in the object.
    pub fn parent(self, shape: Shape) -> Option<Place> {
        let parent = Place {
            scale: self.scale + 1,
            index: self.index / 3,
        };
        (self.scale < MAX_SCALE && parent.index < shape.count(parent.scale)).then_some(parent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_run_is_split_greedily() {
        let scales: Vec<u8> = Shape::new(32_768).roots().map(|p| p.scale).collect();
        assert_eq!(scales, [6, 5, 3, 2, 2, 1, 1, 0]);
        assert_eq!(Shape::new(0).roots().count(), 0);
        assert_eq!(
            Shape::new(1).roots().collect::<Vec<_>>(),
            [Place { scale: 0, index: 0 }]
        );
        assert_eq!(Shape::new(32_768).cost(0..32_768).bytes, 70_972);
    }

    #[test]
    fn a_range_touches_its_leaves_and_what_is_above_them() {
        // 23 bytes over the border of two atoms.
        let path: Vec<_> = Shape::new(32_768).path(50..73).collect();
        assert_eq!(path.iter().filter(|p| p.scale == 0).count(), 2);
        assert_eq!(path.len(), 8);
        assert_eq!(
            path.iter().map(|p| Record::encoded_len(p.scale)).sum::<usize>(),
            384
        );
        assert_eq!(Shape::new(100).path(100..200).count(), 0);
        assert_eq!(Shape::new(100).path(7..7).count(), 0);
    }

    proptest! {
        #[test]
        fn roots_cover_every_byte_once(len in prop_oneof![0u64..100_000, any::<u64>()]) {
            let shape = Shape::new(len);
            let mut at = 0;
            for (n, root) in shape.roots().enumerate() {
                let bytes = root.bytes(shape);
                prop_assert_eq!(bytes.start, at);
                prop_assert!(bytes.end > at && n < 80);
                prop_assert!(root.parent(shape).is_none());
                at = bytes.end;
            }
            prop_assert_eq!(at, len);
        }

        #[test]
        fn children_share_their_parents_bytes(len in 1u64..10_000_000, at: u64) {
            let shape = Shape::new(len);
            for place in shape.path(at % len..at % len + 1).filter(|p| p.scale > 0) {
                let children = place.children();
                prop_assert_eq!(children[0].bytes(shape).start, place.bytes(shape).start);
                prop_assert_eq!(children[2].bytes(shape).end, place.bytes(shape).end);
                for child in children {
                    prop_assert_eq!(child.parent(shape), Some(place));
                }
            }
        }
    }
}

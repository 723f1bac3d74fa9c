//! One record of an object: a leaf with 32 bytes, or three children (docs/FORMAT.md, "Exact byte objects").

use super::lanes::ID;
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};
use crate::id::RecordId;
use blake2::digest::consts::U12;
use blake2::{Blake2b, Digest};

/// Bytes of an atom, the unit that leaves hold.
pub const ATOM: usize = 32;
/// The highest scale there can be: 3³⁷ atoms are more than 2⁶⁴ bytes hold.
pub(super) const MAX_SCALE: u8 = 37;

/// How many bits of an id count: all, but in tests that make records collide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Width(u8);

impl Width {
    /// All 96 bits.
    pub const FULL: Width = Width(96);

    /// Ids of which all but the first bits are zero.
    #[cfg(test)]
    pub(crate) fn narrow(bits: u8) -> Self {
        Width(bits.min(96))
    }

    /// Clears the bits that do not count.
    pub(super) fn cut(self, ids: &mut [[u8; ID]]) {
        if self == Self::FULL {
            return;
        }
        for id in ids {
            for (at, byte) in id.iter_mut().enumerate() {
                let left = usize::from(self.0).saturating_sub(8 * at).min(8);
                *byte &= !(0xff_u16 >> left) as u8;
            }
        }
    }
}

/// BLAKE2b-96 of a scale and a payload.
pub(super) fn hash(scale: u8, payload: &[u8]) -> [u8; ID] {
    Blake2b::<U12>::new_with_prefix([scale])
        .chain_update(payload)
        .finalize()
        .into()
}

/// What a record holds. Its id is not kept: it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// 32 bytes of the object; the last leaf's are filled up with zeros.
    Leaf([u8; ATOM]),
    /// A full ternary tree over 3^scale atoms: its three children, each one scale lower.
    Inner {
        /// At least 1.
        scale: u8,
        /// In the object's order.
        children: [RecordId; 3],
    },
}

impl Record {
    /// Bytes of an encoded leaf: scale, id, atom.
    pub const LEAF: usize = 1 + ID + ATOM;
    /// Bytes of an encoded inner record: scale, id, three ids.
    pub const INNER: usize = 1 + ID + 3 * ID;

    /// 0 for leaves.
    pub fn scale(&self) -> u8 {
        match self {
            Record::Leaf(_) => 0,
            Record::Inner { scale, .. } => *scale,
        }
    }

    /// Bytes of the encoded record.
    pub fn encoded_len(scale: u8) -> usize {
        if scale == 0 { Self::LEAF } else { Self::INNER }
    }

    /// The record's id.
    pub fn id(&self, width: Width) -> RecordId {
        let mut id = match self {
            Record::Leaf(atom) => hash(0, atom),
            Record::Inner { scale, children } => hash(*scale, children.map(|c| c.0).as_flattened()),
        };
        width.cut(std::slice::from_mut(&mut id));
        RecordId(id)
    }

    /// Appends the record's bytes.
    pub fn encode(&self, width: Width, to: &mut Writer) {
        to.u8(self.scale()).raw(&self.id(width).0);
        match self {
            Record::Leaf(atom) => to.raw(atom),
            Record::Inner { children, .. } => to.raw(children.map(|c| c.0).as_flattened()),
        };
    }

    /// Reads records that follow one another, each with its id.
    ///
    /// # Errors
    /// As of [`Record::decode`].
    pub fn decode_all(width: Width, bytes: &[u8]) -> Result<Vec<(RecordId, Self)>> {
        let mut reader = Reader::new(bytes, "records");
        let mut all = Vec::new();
        while reader.remaining() > 0 {
            all.push(Record::decode(width, &mut reader)?);
        }
        Ok(all)
    }

    /// Takes one record off the front.
    ///
    /// # Errors
    /// Damage, if it is truncated, its scale is impossible, or its id is not that of its payload.
    pub fn decode(width: Width, from: &mut Reader<'_>) -> Result<(RecordId, Self)> {
        let scale = from.u8()?;
        if scale > MAX_SCALE {
            return Err(Error::damage(format!(
                "record of scale {scale}: at most {MAX_SCALE} is possible"
            )));
        }
        let id = RecordId(from.fixed()?);
        let record = match scale {
            0 => Record::Leaf(from.fixed()?),
            _ => Record::Inner {
                scale,
                children: [
                    RecordId(from.fixed()?),
                    RecordId(from.fixed()?),
                    RecordId(from.fixed()?),
                ],
            },
        };
        if record.id(width) != id {
            return Err(Error::damage(format!(
                "record {id} has other content than its id says"
            )));
        }
        Ok((id, record))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ids_are_blake2b_with_a_digest_of_12_bytes() {
        // python3 -c 'import hashlib; print(hashlib.blake2b(bytes(33), digest_size=12).hexdigest())', and of 1 and three such ids.
        let leaf = Record::Leaf([0; 32]);
        assert_eq!(leaf.id(Width::FULL).to_string(), "809aa4906db59da44ac69d7c");
        let inner = Record::Inner {
            scale: 1,
            children: [leaf.id(Width::FULL); 3],
        };
        assert_eq!(inner.id(Width::FULL).to_string(), "d4fcc48ae091f3ea8e0d7124");
    }

    #[test]
    fn narrow_ids_keep_their_first_bits() {
        let id = Record::Leaf([7; 32]).id(Width::FULL).0;
        let narrow = Record::Leaf([7; 32]).id(Width::narrow(12)).0;
        assert_eq!((narrow[0], narrow[1]), (id[0], id[1] & 0xf0));
        assert_eq!(narrow[2..], [0; 10]);
    }

    proptest! {
        #[test]
        fn what_is_accepted_is_canonical(mut bytes in proptest::collection::vec(any::<u8>(), 0..60), scale in 0u8..3) {
            if bytes.len() > 12 {
                // With its right id.
                bytes[0] = scale;
                let end = Record::encoded_len(scale).min(bytes.len());
                let id = hash(scale, &bytes[13..end.max(13)]);
                bytes[1..13].copy_from_slice(&id);
            }
            let mut reader = Reader::new(&bytes, "test");
            if let Ok((id, record)) = Record::decode(Width::FULL, &mut reader) {
                let mut out = Writer::new();
                record.encode(Width::FULL, &mut out);
                prop_assert_eq!(out.finish(), &bytes[..bytes.len() - reader.remaining()]);
                prop_assert_eq!(id, record.id(Width::FULL));
            } else {
                prop_assert!(bytes.len() < Record::encoded_len(scale) || bytes.len() <= 12);
            }
        }

        #[test]
        fn a_flipped_bit_is_found(atom: [u8; 32], bit in 0..Record::LEAF * 8) {
            let mut out = Writer::new();
            Record::Leaf(atom).encode(Width::FULL, &mut out);
            let mut bytes = out.finish();
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Record::decode(Width::FULL, &mut Reader::new(&bytes, "test")).is_err());
        }
    }
}

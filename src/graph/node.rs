//! How a node lies in a pack: its kind, and how its bytes are encoded (docs/FORMAT.md, "Node meta").

use crate::bytes::{Reader, Writer};
use crate::codec::Codec;
use crate::error::{Error, Result};
use crate::id::{Domain, NodeId};
use crate::tensor::Number;

/// What a node is; the number is the record's kind in a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeKind {
    /// Raw bytes of one or more tensors, or of a file without structure.
    Chunk = 1,
    /// How files are cut into chunks, and what tensors they hold.
    Layout = 2,
    /// The chunks of one file.
    Manifest = 3,
    /// One directory.
    Tree = 4,
}

impl NodeKind {
    /// The kind with this number.
    pub fn from_tag(tag: u8) -> Option<Self> {
        [
            NodeKind::Chunk,
            NodeKind::Layout,
            NodeKind::Manifest,
            NodeKind::Tree,
        ]
        .into_iter()
        .find(|k| *k as u8 == tag)
    }

    /// The name for people.
    pub fn name(self) -> &'static str {
        match self {
            NodeKind::Chunk => "chunk",
            NodeKind::Layout => "layout",
            NodeKind::Manifest => "manifest",
            NodeKind::Tree => "tree",
        }
    }

    /// The id of a node with these raw bytes; a manifest is addressed by its file instead.
    pub fn id_of(self, raw: &[u8]) -> Option<NodeId> {
        let domain = match self {
            NodeKind::Chunk => Domain::Chunk,
            NodeKind::Layout => Domain::Layout,
            NodeKind::Tree => Domain::Tree,
            NodeKind::Manifest => return None,
        };
        Some(NodeId(domain.hash(raw)))
    }

    /// The most raw bytes that a node of this kind may have: bounds what decoding allocates.
    pub fn max_len(self) -> u32 {
        match self {
            NodeKind::Chunk => 16 << 20,
            NodeKind::Layout | NodeKind::Manifest | NodeKind::Tree => 256 << 20,
        }
    }
}

/// How the bytes of a node are encoded, and what that costs a reader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeMeta {
    /// The codec of the payload.
    pub codec: Codec,
    /// What the elements are.
    pub number: Number,
    /// Raw bytes.
    pub raw_len: u32,
    /// The delta's place in its chain; none for what is encoded alone.
    pub delta: Option<Delta>,
}

/// A delta's base and the sums along its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Delta {
    /// The node the delta is against; the first, where the codec takes many.
    pub base: NodeId,
    /// The others, whose bytes follow the first one's.
    pub further: Further,
    /// Deltas to apply, this one included. One that takes many bases counts for [`MANY_DEPTH`] more than the deepest of them.
    pub depth: u8,
    /// Revisions of this chunk since the chain's root.
    pub revision: u32,
    /// Payload bytes to read for a rebuild, roots included.
    pub cost: u64,
}

impl Delta {
    /// All bases, in order.
    pub fn bases(&self) -> impl Iterator<Item = NodeId> {
        std::iter::once(self.base).chain(self.further.0.iter().map_while(|id| *id))
    }
}

/// The bases after the first: at most five, without gaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Further([Option<NodeId>; MAX_BASES - 1]);

/// What a node that takes many bases adds to their depth: so that not many stand one within the other, and a rebuild's nodes are
/// bounded by its depth.
pub const MANY_DEPTH: u8 = 16;

/// The most bases of one node; a record's meta has room for no more.
pub const MAX_BASES: usize = 6;

impl Further {
    /// These bases; none if they are too many.
    pub fn new(ids: &[NodeId]) -> Option<Self> {
        let mut all = [None; MAX_BASES - 1];
        let slots = all.get_mut(..ids.len())?;
        slots.iter_mut().zip(ids).for_each(|(slot, id)| *slot = Some(*id));
        Some(Further(all))
    }
}

impl NodeMeta {
    /// Deltas to apply.
    pub fn depth(&self) -> u8 {
        self.delta.map_or(0, |d| d.depth)
    }

    /// What the node adds to the depth of its deepest base.
    pub fn step(&self) -> u8 {
        if self.codec.takes_many() { MANY_DEPTH } else { 1 }
    }

    /// Revisions since the chain's root.
    pub fn revision(&self) -> u32 {
        self.delta.map_or(0, |d| d.revision)
    }

    /// Payload bytes to read for a rebuild; `own` is this node's payload.
    pub fn cost(&self, own: u32) -> u64 {
        self.delta.map_or(u64::from(own), |d| d.cost)
    }

    /// The record's meta bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.u8(self.codec.tag())
            .u8(self.number.tag())
            .varint(u64::from(self.raw_len));
        if let Some(d) = &self.delta {
            w.u8(d.depth)
                .varint(u64::from(d.revision))
                .varint(d.cost)
                .raw(&d.base.0);
            if self.codec.takes_many() {
                w.u8((d.bases().count() - 1) as u8);
                d.bases().skip(1).for_each(|id| {
                    w.raw(&id.0);
                });
            }
        }
        w.finish()
    }

    /// Reads meta bytes back.
    pub fn decode(kind: NodeKind, bytes: &[u8]) -> Result<Self> {
        let mut r = Reader::new(bytes, "node meta");
        let (c, n) = (r.u8()?, r.u8()?);
        let codec = Codec::from_tag(c).ok_or_else(|| unknown("codec", c))?;
        let number = Number::from_tag(n).ok_or_else(|| unknown("number", n))?;
        let raw_len = u32::try_from(r.varint()?).ok().filter(|n| *n <= kind.max_len());
        let raw_len =
            raw_len.ok_or_else(|| Error::damage("node claims more raw bytes than its kind may have"))?;
        let mut delta = None;
        if codec.needs_base() {
            let depth = r.u8()?;
            let revision =
                u32::try_from(r.varint()?).map_err(|_| Error::damage("node has a revision out of range"))?;
            let (cost, base) = (r.varint()?, NodeId(r.id()?));
            let mut further = Further::default();
            if codec.takes_many() {
                let count = usize::from(r.u8()?);
                let slots = further.0.get_mut(..count);
                for slot in slots.ok_or_else(|| Error::damage("node has too many bases"))? {
                    *slot = Some(NodeId(r.id()?));
                }
            }
            delta = Some(Delta {
                depth,
                revision,
                cost,
                base,
                further,
            });
        }
        r.finish()?;
        Ok(NodeMeta {
            codec,
            number,
            raw_len,
            delta,
        })
    }
}

fn unknown(what: &str, tag: u8) -> Error {
    let why = format!("node has {what} {tag}, which this version of zspace does not know");
    Error::new(crate::error::Kind::Unsupported, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_accepted_is_canonical(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Ok(m) = NodeMeta::decode(NodeKind::Chunk, &bytes) {
                prop_assert_eq!(m.encode(), bytes);
            }
        }
    }

    #[test]
    fn round_trips() {
        for codec in Codec::ALL.iter().copied() {
            let delta = Delta {
                base: NodeId([9; 32]),
                further: Further::default(),
                depth: 3,
                revision: 300,
                cost: 1 << 40,
            };
            let m = NodeMeta {
                codec,
                number: Number::BF16,
                raw_len: 1 << 20,
                delta: codec.needs_base().then_some(delta),
            };
            let bytes = m.encode();
            assert!(bytes.len() <= 64, "chunks of small models must stay cheap");
            assert_eq!(NodeMeta::decode(NodeKind::Chunk, &bytes).unwrap(), m);
        }
    }

    #[test]
    fn several_bases_fit_into_a_record() {
        let ids: Vec<NodeId> = (0..MAX_BASES as u8).map(|i| NodeId([i; 32])).collect();
        let delta = Delta {
            base: ids[0],
            further: Further::new(&ids[1..]).unwrap(),
            depth: u8::MAX,
            revision: u32::MAX,
            cost: u64::MAX,
        };
        assert_eq!(delta.bases().collect::<Vec<_>>(), ids);
        let m = NodeMeta {
            codec: Codec::Rounded,
            number: Number::BF16,
            raw_len: 16 << 20,
            delta: Some(delta),
        };
        let mut bytes = m.encode();
        assert!(bytes.len() <= 255, "{}", bytes.len());
        assert_eq!(NodeMeta::decode(NodeKind::Chunk, &bytes).unwrap(), m);
        assert_eq!(Further::new(&ids), None);
        // One more than there may be.
        let count = bytes.len() - (MAX_BASES - 1) * 32 - 1;
        bytes[count] += 1;
        bytes.extend_from_slice(&[7; 32]);
        assert!(NodeMeta::decode(NodeKind::Chunk, &bytes).is_err());
    }

    #[test]
    fn a_node_cannot_claim_unbounded_memory() {
        let m = NodeMeta {
            codec: Codec::Raw,
            number: Number::Bytes,
            raw_len: u32::MAX,
            delta: None,
        };
        for kind in [NodeKind::Chunk, NodeKind::Tree] {
            assert!(NodeMeta::decode(kind, &m.encode()).is_err());
        }
    }
}

//! How one file is put together: its layout and its chunks (docs/FORMAT.md, "Manifests").
//!
//! A manifest is addressed by the file it rebuilds, not by its own bytes, so that a better encoding can replace it.

use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};
use crate::id::{Domain, FileHash, NodeId};

/// The chunks of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Where the chunks' bytes go.
    pub shape: Shape,
    /// The chunks, in the layout's order.
    pub chunks: Vec<NodeId>,
    /// CRC-32 of the span of each tensor, in the layout's order; none for files without tensors.
    pub crcs: Vec<u32>,
}

/// How the chunks make up the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One after another, with these lengths.
    Opaque(Vec<u32>),
    /// As a layout node says.
    Layout(NodeId),
}

impl Manifest {
    /// The address of the manifest of a file.
    pub fn id(hash: &FileHash, len: u64) -> NodeId {
        let mut w = Writer::new();
        w.raw(&hash.0).u64(len);
        NodeId(Domain::Manifest.hash(&w.finish()))
    }

    /// Canonical bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        match &self.shape {
            Shape::Opaque(lens) => {
                w.u8(0).varint(lens.len() as u64);
                for n in lens {
                    w.varint(u64::from(*n));
                }
            }
            Shape::Layout(id) => {
                w.u8(1).raw(&id.0).varint(self.chunks.len() as u64);
            }
        }
        for c in &self.chunks {
            w.raw(&c.0);
        }
        for c in &self.crcs {
            w.u32(*c);
        }
        w.finish()
    }

    /// Reads canonical bytes back.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut r = Reader::new(bytes, "manifest");
        let (shape, n) = match r.u8()? {
            0 => {
                let n = r.count(33)?;
                let len = |v: u64| {
                    u32::try_from(v).map_err(|_| Error::damage("manifest has a chunk that is too long"))
                };
                (
                    Shape::Opaque((0..n).map(|_| len(r.varint()?)).collect::<Result<_>>()?),
                    n,
                )
            }
            1 => {
                let id = NodeId(r.id()?);
                (Shape::Layout(id), r.count(32)?)
            }
            t => return Err(Error::damage(format!("manifest has unknown shape {t}"))),
        };
        let chunks = (0..n).map(|_| Ok(NodeId(r.id()?))).collect::<Result<_>>()?;
        let mut crcs = Vec::with_capacity(r.remaining() / 4);
        while r.remaining() > 0 {
            crcs.push(r.u32()?);
        }
        if matches!(shape, Shape::Opaque(_)) && !crcs.is_empty() {
            return Err(Error::damage(
                "manifest of an opaque file has checksums of tensors",
            ));
        }
        Ok(Manifest { shape, chunks, crcs })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trips(lens: Vec<u32>, ids: Vec<[u8; 32]>, crcs: Vec<u32>) {
            let chunks: Vec<_> = ids.into_iter().map(NodeId).collect();
            let m = Manifest { shape: Shape::Layout(NodeId([1; 32])), chunks, crcs };
            prop_assert_eq!(Manifest::decode(&m.encode()).unwrap(), m);
            let chunks = lens.iter().map(|n| NodeId([*n as u8; 32])).collect();
            let m = Manifest { shape: Shape::Opaque(lens), chunks, crcs: vec![] };
            prop_assert_eq!(Manifest::decode(&m.encode()).unwrap(), m);
        }

        #[test]
        fn what_is_accepted_is_canonical(bytes: Vec<u8>) {
            if let Ok(m) = Manifest::decode(&bytes) {
                prop_assert_eq!(m.encode(), bytes);
            }
        }
    }
}

//! An object's manifest, which pins its length, roots and SHA-256 (docs/FORMAT.md, "Exact byte objects").

use super::shape::Shape;
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};
use crate::id::{FileHash, ObjectId, RecordId};
use sha2::{Digest, Sha256};

/// What the manifest begins with.
const TAG: &[u8] = b"zspace.object.1\0";

/// Pins an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectManifest {
    /// Bytes of the object.
    pub len: u64,
    /// The SHA-256 of all of them.
    pub hash: FileHash,
    /// The ids of the roots, in the object's order.
    pub roots: Vec<RecordId>,
}

impl ObjectManifest {
    /// The most bytes that a manifest has.
    pub const MOST: usize = TAG.len() + 8 + 32 + 2 * 38 * 12;

    /// The forest that the roots are those of.
    pub fn shape(&self) -> Shape {
        Shape::new(self.len)
    }

    /// The object's id: the SHA-256 of the canonical bytes.
    pub fn id(&self) -> ObjectId {
        ObjectId(Sha256::digest(self.encode()).into())
    }

    /// Canonical bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.raw(TAG).u64(self.len).raw(&self.hash.0);
        for root in &self.roots {
            w.raw(&root.0);
        }
        w.finish()
    }

    /// Reads canonical bytes back.
    ///
    /// # Errors
    /// Damage, if it is no manifest or has not as many roots as an object of its length.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut r = Reader::new(bytes, "object manifest");
        if r.raw(TAG.len())? != TAG {
            return Err(Error::damage(
                "this is no object manifest, or one of a newer version",
            ));
        }
        let (len, hash) = (r.u64()?, FileHash(r.fixed()?));
        let roots = Shape::new(len)
            .roots()
            .map(|_| Ok(RecordId(r.fixed()?)))
            .collect::<Result<_>>()?;
        r.finish()?;
        Ok(ObjectManifest { len, hash, roots })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trips_and_refuses_every_other_length(len: u64) {
            let roots = Shape::new(len).roots().map(|p| RecordId([p.scale; 12])).collect();
            let manifest = ObjectManifest { len, hash: FileHash([7; 32]), roots };
            let bytes = manifest.encode();
            prop_assert!(bytes.len() <= ObjectManifest::MOST);
            prop_assert_eq!(ObjectManifest::decode(&bytes).unwrap(), manifest);
            for n in 0..bytes.len() {
                prop_assert!(ObjectManifest::decode(&bytes[..n]).is_err());
            }
            prop_assert!(ObjectManifest::decode(&[&bytes[..], &[0]].concat()).is_err());
        }
    }
}

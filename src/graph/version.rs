//! A version: an immutable tree of files with parents (docs/FORMAT.md, "Versions").

use super::tree::Timestamp;
use crate::bytes::{Reader, Writer};
use crate::error::Result;
use crate::id::{Domain, NodeId, VersionId};

/// What a version's id is the hash of. Never a manifest, codec, base or number: those may be replaced under the same id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// The versions it follows; the first is the one before it on its branch.
    pub parents: Vec<VersionId>,
    /// The name of what was committed: `model.pt`, `checkpoint-500`.
    pub entry: Vec<u8>,
    /// When it was committed.
    pub time: Timestamp,
    /// What the committer said; may be empty.
    pub message: String,
    /// The root directory, which holds the entry under its name.
    pub tree: NodeId,
    /// Bytes of all files.
    pub len: u64,
}

impl Version {
    /// Canonical bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.varint(self.parents.len() as u64);
        for p in &self.parents {
            w.raw(&p.0);
        }
        w.blob(&self.entry);
        self.time.encode(&mut w);
        w.blob(self.message.as_bytes()).raw(&self.tree.0).varint(self.len);
        w.finish()
    }

    /// Reads canonical bytes back.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut r = Reader::new(bytes, "version");
        let n = r.count(32)?;
        let parents = (0..n).map(|_| Ok(VersionId(r.id()?))).collect::<Result<_>>()?;
        let entry = r.blob()?.to_vec();
        let time = Timestamp::decode(&mut r)?;
        let message = r.text()?.to_owned();
        let v = Version {
            parents,
            entry,
            time,
            message,
            tree: NodeId(r.id()?),
            len: r.varint()?,
        };
        r.finish()?;
        Ok(v)
    }

    /// The id: the hash of the canonical bytes.
    pub fn id(&self) -> VersionId {
        VersionId(Domain::Version.hash(&self.encode()))
    }
}

/// A version in its place: a number on a branch, and what publishing it added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numbered {
    /// Its id.
    pub id: VersionId,
    /// The branch.
    pub branch: String,
    /// Its number on the branch, from 1.
    pub number: u64,
    /// What was committed.
    pub version: Version,
    /// Regular files in it.
    pub files: u64,
    /// Bytes that its commit added to the packs.
    pub stored: u64,
}

impl Numbered {
    /// `BRANCH/000001`.
    pub fn name(&self) -> String {
        format!("{}/{:06}", self.branch, self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trips(parents: Vec<[u8; 32]>, entry: Vec<u8>, seconds: i64, nanos in 0u32..1_000_000_000,
                       message: String, tree: [u8; 32], len: u64) {
            let v = Version {
                parents: parents.into_iter().map(VersionId).collect(), entry,
                time: Timestamp { seconds, nanos }, message, tree: NodeId(tree), len,
            };
            prop_assert_eq!(Version::decode(&v.encode()).unwrap(), v);
        }

        #[test]
        fn what_is_accepted_is_canonical(bytes: Vec<u8>) {
            if let Ok(v) = Version::decode(&bytes) {
                prop_assert_eq!(v.encode(), bytes);
            }
        }
    }

    #[test]
    fn the_id_is_fixed_by_the_format() {
        let v = Version {
            parents: vec![],
            entry: b"model.pt".to_vec(),
            time: Timestamp { seconds: 1, nanos: 2 },
            message: String::new(),
            tree: NodeId([7; 32]),
            len: 9,
        };
        // Changes only with a new domain tag: ids of existing versions must never move.
        assert_eq!(v.encode().len(), 1 + 9 + 12 + 1 + 32 + 1);
        assert_eq!(v.id().short(), "ed4de420");
    }
}

//! What a journal record says: the change of the history it publishes (docs/FORMAT.md, "Journal bodies").

use super::tree::Timestamp;
use super::version::Version;
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};
use crate::id::VersionId;
use crate::object::ObjectManifest;

/// One journal body: changes that become visible together.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Record {
    /// In order.
    pub changes: Vec<Change>,
}

/// One change of the history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// A new version on a branch, made if absent.
    Commit {
        /// The branch.
        branch: String,
        /// The number it has there.
        number: u64,
        /// The version.
        version: Version,
        /// Regular files in it.
        files: u64,
        /// Bytes its commit added to the packs.
        stored: u64,
    },
    /// A new branch; `from` is the version its next one follows.
    Branch {
        /// Its name.
        name: String,
        /// Where it forks off, or nowhere.
        from: Option<VersionId>,
    },
    /// A tag set or moved.
    Tag {
        /// Its name.
        name: String,
        /// What it names.
        version: VersionId,
    },
    /// Nodes encoded anew: the record's take the place of those published before. Nothing of the history changes.
    Repack,
    /// An exact byte object, whose bytes are stored as a file's are.
    Object {
        /// What pins it.
        manifest: ObjectManifest,
        /// When it was put.
        time: Timestamp,
    },
}

impl Record {
    /// Canonical bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.varint(self.changes.len() as u64);
        for c in &self.changes {
            match c {
                Change::Commit {
                    branch,
                    number,
                    version,
                    files,
                    stored,
                } => {
                    w.u8(1)
                        .blob(branch.as_bytes())
                        .varint(*number)
                        .blob(&version.encode());
                    w.varint(*files).varint(*stored);
                }
                Change::Branch { name, from } => {
                    w.u8(2).blob(name.as_bytes()).u8(u8::from(from.is_some()));
                    if let Some(v) = from {
                        w.raw(&v.0);
                    }
                }
                Change::Tag { name, version } => {
                    w.u8(3).blob(name.as_bytes()).raw(&version.0);
                }
                Change::Repack => {
                    w.u8(4);
                }
                Change::Object { manifest, time } => {
                    w.u8(5).blob(&manifest.encode());
                    time.encode(&mut w);
                }
            }
        }
        w.finish()
    }

    /// Reads canonical bytes back.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut r = Reader::new(bytes, "journal body");
        let n = r.count(1)?;
        let mut changes = Vec::new();
        for _ in 0..n {
            changes.push(match r.u8()? {
                1 => Change::Commit {
                    branch: r.text()?.to_owned(),
                    number: r.varint()?,
                    version: Version::decode(r.blob()?)?,
                    files: r.varint()?,
                    stored: r.varint()?,
                },
                2 => Change::Branch {
                    name: r.text()?.to_owned(),
                    from: match r.u8()? {
                        0 => None,
                        1 => Some(VersionId(r.id()?)),
                        _ => return Err(Error::damage("journal body has a malformed branch")),
                    },
                },
                3 => Change::Tag {
                    name: r.text()?.to_owned(),
                    version: VersionId(r.id()?),
                },
                4 => Change::Repack,
                5 => Change::Object {
                    manifest: ObjectManifest::decode(r.blob()?)?,
                    time: Timestamp::decode(&mut r)?,
                },
                t => {
                    return Err(Error::damage(format!(
                        "journal body has a change of unknown kind {t}"
                    )));
                }
            });
        }
        r.finish()?;
        Ok(Record { changes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{FileHash, NodeId, RecordId};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_accepted_is_canonical(bytes: Vec<u8>) {
            if let Ok(v) = Record::decode(&bytes) {
                prop_assert_eq!(v.encode(), bytes);
            }
        }
    }

    #[test]
    fn round_trips_and_refuses_every_truncation() {
        let version = Version {
            parents: vec![VersionId([1; 32])],
            entry: b"m".to_vec(),
            time: Timestamp::default(),
            message: "hi".into(),
            tree: NodeId([2; 32]),
            len: 3,
        };
        let record = Record {
            changes: vec![
                Change::Commit {
                    branch: "main".into(),
                    number: 300,
                    version,
                    files: 1,
                    stored: 99,
                },
                Change::Branch {
                    name: "b".into(),
                    from: None,
                },
                Change::Branch {
                    name: "c".into(),
                    from: Some(VersionId([3; 32])),
                },
                Change::Tag {
                    name: "t".into(),
                    version: VersionId([4; 32]),
                },
                Change::Repack,
                Change::Object {
                    manifest: ObjectManifest {
                        len: 33,
                        hash: FileHash([5; 32]),
                        roots: vec![RecordId([6; 12]); 2],
                    },
                    time: Timestamp::default(),
                },
            ],
        };
        let bytes = record.encode();
        assert_eq!(Record::decode(&bytes).unwrap(), record);
        for n in 0..bytes.len() {
            assert!(Record::decode(&bytes[..n]).is_err(), "{n}");
        }
    }
}

//! Typed identifiers and the domain-tagged SHA-256 that makes most of them.
//!
//! Every kind of hashed structure has its own domain tag (docs/FORMAT.md, "Identifiers"), so that the bytes of one kind can
//! never be taken for another's. A file's own SHA-256 is the plain one, equal to `sha256sum`.

mod many;

pub use many::WORTH as WORTH_TOGETHER;

use crate::error::{Error, Kind, Result};
use sha2::{Digest, Sha256};
use std::fmt;
use std::str::FromStr;

macro_rules! define_id {
    ($(#[$doc:meta])* $name:ident: $len:literal bytes) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub [u8; $len]);

        impl $name {
            /// The bytes of the identifier.
            pub fn as_bytes(&self) -> &[u8; $len] {
                &self.0
            }

            /// The first 8 hex digits, for people.
            pub fn short(&self) -> String {
                hex(&self.0[..4])
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&hex(&self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.short())
            }
        }

        impl FromStr for $name {
            type Err = Error;
            fn from_str(s: &str) -> Result<Self> {
                let bytes = unhex(s).and_then(|b| <[u8; $len]>::try_from(b).ok());
                bytes.map($name).ok_or_else(|| Error::new(Kind::Usage, format!("{s:?} is not {} hex digits", 2 * $len)))
            }
        }
    };
}

define_id!(
    /// Names a node in a pack: a chunk, layout, manifest or tree.
    NodeId: 32 bytes
);
define_id!(
    /// Names a version.
    VersionId: 32 bytes
);
define_id!(
    /// A file's plain SHA-256.
    FileHash: 32 bytes
);
define_id!(
    /// Names an exact byte object: the SHA-256 of its manifest (docs/FORMAT.md, "Exact byte objects").
    ObjectId: 32 bytes
);
define_id!(
    /// Names a record of an exact byte object: a BLAKE2b-96.
    RecordId: 12 bytes
);

/// What is being hashed. The tag is part of the hashed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Domain {
    /// Raw bytes of a chunk, whatever their dtype.
    Chunk,
    /// A layout: how a file is cut into chunks and what tensors it holds.
    Layout,
    /// The address of a file's manifest: made of the file's hash and length.
    Manifest,
    /// One directory of a version.
    Tree,
    /// A version.
    Version,
}

impl Domain {
    fn tag(self) -> &'static [u8] {
        match self {
            Domain::Chunk => b"zspace.chunk.1\0",
            Domain::Layout => b"zspace.layout.1\0",
            Domain::Manifest => b"zspace.manifest.1\0",
            Domain::Tree => b"zspace.tree.1\0",
            Domain::Version => b"zspace.version.1\0",
        }
    }

    /// SHA-256 of the domain tag and `bytes`.
    pub fn hash(self, bytes: &[u8]) -> [u8; 32] {
        Sha256::new_with_prefix(self.tag())
            .chain_update(bytes)
            .finalize()
            .into()
    }

    /// The hash of each of many messages, which costs less at once than one after the other.
    pub fn hash_many(self, messages: &[&[u8]]) -> Vec<[u8; 32]> {
        many::hash(self, messages)
    }
}

/// A running plain SHA-256, as `sha256sum` computes it.
#[derive(Clone, Default)]
pub struct FileHasher(Sha256);

impl FileHasher {
    /// Adds the next bytes of the file.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The hash of all bytes added.
    pub fn finish(self) -> FileHash {
        FileHash(self.0.finalize().into())
    }
}

/// Lower-case hex digits of `bytes`.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    bytes
        .iter()
        .flat_map(|b| {
            [
                DIGITS[usize::from(b >> 4)] as char,
                DIGITS[usize::from(b & 15)] as char,
            ]
        })
        .collect()
}

fn unhex(s: &str) -> Option<Vec<u8>> {
    let s = s.as_bytes();
    if !s.len().is_multiple_of(2) {
        return None;
    }
    let digit = |c: u8| char::from(c).to_digit(16).map(|d| d as u8);
    s.chunks_exact(2)
        .map(|p| Some(digit(p[0])? << 4 | digit(p[1])?))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_file_hash_equals_sha256sum() {
        let mut h = FileHasher::default();
        h.update(b"ab");
        h.update(b"c");
        let want = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(h.finish().to_string(), want);
        assert_eq!(want.parse::<FileHash>().unwrap().to_string(), want);
        assert!("zz".parse::<FileHash>().is_err());
        assert!("ü".parse::<FileHash>().is_err());
    }

    #[test]
    fn domains_separate_equal_bytes() {
        let all = [
            Domain::Chunk,
            Domain::Layout,
            Domain::Manifest,
            Domain::Tree,
            Domain::Version,
        ];
        let ids: std::collections::HashSet<_> = all.iter().map(|d| d.hash(b"x")).collect();
        assert_eq!(ids.len(), all.len());
    }
}

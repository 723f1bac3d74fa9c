//! One directory of a version in canonical bytes (docs/FORMAT.md, "Trees").

use crate::bytes::{Reader, Writer};
use crate::error::{Error, Result};
use crate::id::{Domain, FileHash, NodeId};

/// A time in whole seconds since 1970 (may be negative) and nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Timestamp {
    /// Seconds since 1970-01-01 UTC.
    pub seconds: i64,
    /// Nanoseconds, below 10⁹.
    pub nanos: u32,
}

impl Timestamp {
    pub(super) fn encode(self, to: &mut Writer) {
        to.u64(self.seconds as u64).u32(self.nanos);
    }

    pub(super) fn decode(from: &mut Reader<'_>) -> Result<Self> {
        let (seconds, nanos) = (from.u64()? as i64, from.u32()?);
        if nanos >= 1_000_000_000 {
            return Err(Error::damage("a time has a second or more in its nanoseconds"));
        }
        Ok(Timestamp { seconds, nanos })
    }
}

/// A name in a directory and all that an export gives back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The name: 1 to 255 bytes, no slash, no NUL, not "." or "..".
    pub name: Vec<u8>,
    /// Permission bits (07777).
    pub mode: u32,
    /// Time of last modification.
    pub mtime: Timestamp,
    /// `user.*` attributes, sorted by name.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// What it is.
    pub kind: EntryKind,
}

/// What a directory entry is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File {
        /// Its plain SHA-256.
        hash: FileHash,
        /// Length in bytes.
        len: u64,
        /// Names of one version with the same number above 0 are hard links to one file.
        link: u32,
    },
    /// A directory.
    Dir {
        /// Its tree.
        tree: NodeId,
        /// Bytes of all files below it.
        len: u64,
    },
    /// A symbolic link and where it points, as written.
    Symlink(Vec<u8>),
}

/// The most bytes of an attribute's value, and of a symbolic link's target: as many as Linux allows.
const MAX_XATTR: usize = 64 << 10;
const MAX_TARGET: usize = 4095;

impl Entry {
    /// Logical size: a file's length, the sum below a directory, the length of a link's target.
    pub fn len(&self) -> u64 {
        match &self.kind {
            EntryKind::File { len, .. } | EntryKind::Dir { len, .. } => *len,
            EntryKind::Symlink(target) => target.len() as u64,
        }
    }

    /// Whether the logical size is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A directory: entries sorted by the bytes of their names.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Tree(Vec<Entry>);

impl Tree {
    /// A directory of these entries. Names must differ.
    pub fn new(mut entries: Vec<Entry>) -> Result<Self> {
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        let tree = Tree(entries);
        tree.check()?;
        Ok(tree)
    }

    /// The entries, sorted.
    pub fn entries(&self) -> &[Entry] {
        &self.0
    }

    /// The entry with this name.
    pub fn find(&self, name: &[u8]) -> Option<&Entry> {
        let at = self.0.binary_search_by(|e| e.name.as_slice().cmp(name)).ok()?;
        self.0.get(at)
    }

    /// Sum of the logical sizes of all files.
    pub fn len(&self) -> u64 {
        let files = self.0.iter().filter(|e| !matches!(e.kind, EntryKind::Symlink(_)));
        files.fold(0u64, |n, e| n.saturating_add(e.len()))
    }

    /// Whether there are no bytes in it.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn check(&self) -> Result<()> {
        for e in &self.0 {
            let n = &e.name;
            let bad = n.is_empty()
                || n.len() > 255
                || n == b"."
                || n == b".."
                || n.contains(&b'/')
                || n.contains(&0);
            if bad || e.mode & !0o7777 != 0 || e.mtime.nanos >= 1_000_000_000 {
                return Err(Error::damage(format!(
                    "tree has a malformed entry {:?}",
                    String::from_utf8_lossy(n)
                )));
            }
            let user = |name: &[u8]| name.starts_with(b"user.") && name.len() <= 255 && !name.contains(&0);
            if !e
                .xattrs
                .iter()
                .all(|(name, value)| user(name) && value.len() <= MAX_XATTR)
            {
                return Err(Error::damage(
                    "tree has an attribute that is not a user's, or too long",
                ));
            }
            if !e.xattrs.is_sorted_by(|a, b| a.0 < b.0) {
                return Err(Error::damage("tree has attributes out of order"));
            }
            if let EntryKind::Symlink(target) = &e.kind
                && (target.is_empty() || target.len() > MAX_TARGET || target.contains(&0))
            {
                return Err(Error::damage("tree has a symbolic link to nowhere"));
            }
        }
        if !self.0.is_sorted_by(|a, b| a.name < b.name) {
            return Err(Error::damage("tree has entries out of order or twice"));
        }
        Ok(())
    }

    /// The node id: the hash of the canonical bytes.
    pub fn id(bytes: &[u8]) -> NodeId {
        NodeId(Domain::Tree.hash(bytes))
    }

    /// Canonical bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.varint(self.0.len() as u64);
        for e in &self.0 {
            w.blob(&e.name).varint(u64::from(e.mode));
            e.mtime.encode(&mut w);
            w.varint(e.xattrs.len() as u64);
            for (name, value) in &e.xattrs {
                w.blob(name).blob(value);
            }
            match &e.kind {
                EntryKind::File { hash, len, link } => {
                    w.u8(b'f').raw(&hash.0).varint(*len).varint(u64::from(*link));
                }
                EntryKind::Dir { tree, len } => {
                    w.u8(b'd').raw(&tree.0).varint(*len);
                }
                EntryKind::Symlink(target) => {
                    w.u8(b'l').blob(target);
                }
            }
        }
        w.finish()
    }

    /// Reads canonical bytes back.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut r = Reader::new(bytes, "tree");
        let n = r.count(18)?;
        let mut entries = Vec::with_capacity(n);
        for _ in 0..n {
            let name = r.blob()?.to_vec();
            let mode = small(r.varint()?)?;
            let mtime = Timestamp::decode(&mut r)?;
            let count = r.count(2)?;
            let mut xattrs = Vec::with_capacity(count);
            for _ in 0..count {
                xattrs.push((r.blob()?.to_vec(), r.blob()?.to_vec()));
            }
            let kind = match r.u8()? {
                b'f' => EntryKind::File {
                    hash: FileHash(r.id()?),
                    len: r.varint()?,
                    link: small(r.varint()?)?,
                },
                b'd' => EntryKind::Dir {
                    tree: NodeId(r.id()?),
                    len: r.varint()?,
                },
                b'l' => EntryKind::Symlink(r.blob()?.to_vec()),
                t => return Err(Error::damage(format!("tree has an entry of unknown kind {t}"))),
            };
            entries.push(Entry {
                name,
                mode,
                mtime,
                xattrs,
                kind,
            });
        }
        r.finish()?;
        let tree = Tree(entries);
        tree.check()?;
        Ok(tree)
    }
}

fn small(v: u64) -> Result<u32> {
    u32::try_from(v).map_err(|_| Error::damage("tree has a number out of range"))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry() -> impl Strategy<Value = Entry> {
        let kind = prop_oneof![
            (any::<[u8; 32]>(), any::<u64>(), any::<u32>()).prop_map(|(h, len, link)| EntryKind::File {
                hash: FileHash(h),
                len,
                link
            }),
            (any::<[u8; 32]>(), any::<u64>()).prop_map(|(h, len)| EntryKind::Dir { tree: NodeId(h), len }),
            proptest::collection::vec(1u8.., 1..60).prop_map(EntryKind::Symlink),
        ];
        let name = "user\\.[a-z]{0,9}".prop_map(String::into_bytes);
        let xattrs = proptest::collection::btree_map(name, any::<Vec<u8>>(), 0..3);
        (
            "[a-z.\u{e4}\n -]{3,20}",
            0u32..0o10000,
            any::<i64>(),
            0u32..1_000_000_000,
            xattrs,
            kind,
        )
            .prop_map(|(name, mode, seconds, nanos, xattrs, kind)| Entry {
                name: name.into_bytes(),
                mode,
                mtime: Timestamp { seconds, nanos },
                xattrs: xattrs.into_iter().collect(),
                kind,
            })
    }

    proptest! {
        #[test]
        fn round_trips(entries in proptest::collection::vec(entry(), 0..8)) {
            if let Ok(tree) = Tree::new(entries) {
                let bytes = tree.encode();
                prop_assert_eq!(Tree::decode(&bytes).unwrap(), tree);
            }
        }

        #[test]
        fn mangled_bytes_are_refused_or_canonical(
            entries in proptest::collection::vec(entry(), 0..4), at: prop::sample::Index, flip in 1u8..
        ) {
            let Ok(tree) = Tree::new(entries) else { return Ok(()) };
            let mut bytes = tree.encode();
            let i = at.index(bytes.len());
            bytes[i] ^= flip;
            if let Ok(t) = Tree::decode(&bytes) {
                prop_assert_eq!(t.encode(), bytes);
            }
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
            let _ = Tree::decode(&bytes);
        }
    }

    #[test]
    fn what_would_do_harm_where_it_is_exported_is_refused() {
        let with = |xattr: Option<&[u8]>, target: &[u8]| {
            Tree::new(vec![Entry {
                name: b"a".to_vec(),
                mode: 0o777,
                mtime: Timestamp::default(),
                xattrs: xattr.into_iter().map(|name| (name.to_vec(), vec![1])).collect(),
                kind: EntryKind::Symlink(target.to_vec()),
            }])
        };
        assert!(with(Some(b"user.a"), b"t").is_ok());
        let long = [&b"user."[..], &[b'x'; 251]].concat();
        for name in [&b"security.capability"[..], b"trusted.a", b"", b"user.a\0", &long] {
            assert!(with(Some(name), b"t").is_err(), "{name:?}");
        }
        for target in [&b""[..], b"a\0b", &[b'x'; 4096]] {
            assert!(with(None, target).is_err());
        }
    }

    #[test]
    fn names_that_would_escape_are_refused() {
        for name in [&b".."[..], b".", b"", b"a/b", b"a\0"] {
            let e = Entry {
                name: name.to_vec(),
                mode: 0o644,
                mtime: Timestamp::default(),
                xattrs: vec![],
                kind: EntryKind::Symlink(b"t".to_vec()),
            };
            assert!(Tree::new(vec![e]).is_err(), "{name:?}");
        }
    }
}

//! What peers say to each other, in bytes (PROTOCOL.md, "Messages").

use super::link::MAX_FRAME;
use crate::error::Error;
use crate::id::{FileHash, NodeId, ObjectId, VersionId};
use crate::store::{Place, Version};
use std::ops::Range;

/// The versions of the protocol that are spoken, from and to.
pub(super) const SPOKEN: (u16, u16) = (1, 1);

/// The most ids in one request for nodes.
pub(super) const MAX_IDS: usize = 256;
/// The most versions that are named as known.
pub(super) const MAX_KNOWN: usize = 64;
/// Bytes of one page of a list, so that one more entry fits into the frame.
const PAGE: usize = MAX_FRAME / 2;
/// The most records in one request.
pub(super) const MAX_PLACES: usize = 1024;
/// The most bytes of an object in one request.
pub(super) const MAX_READ: u64 = 1_000_000;

/// The first message of either side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// The versions of the protocol that it speaks, from and to.
    pub(super) spoken: (u16, u16),
    /// The id of its store.
    pub(super) store: [u8; 16],
    /// What program it is, for people.
    pub(super) agent: String,
}

/// What is asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// The branches and tags whose names come after this.
    Refs { after: String },
    /// The versions that lead to one, back to one that is known.
    Log { head: VersionId, known: Vec<VersionId> },
    /// Nodes, as they lie in packs.
    Nodes(Vec<NodeId>),
    /// An object's manifest.
    Object(Target),
    /// The objects whose ids come after this.
    Objects { after: ObjectId },
    /// Records of an object, by their places.
    Records { of: Target, places: Vec<Place> },
    /// Bytes of an object, or of a node; `packed` if they may be compressed.
    Read {
        of: Readable,
        bytes: Range<u64>,
        packed: bool,
    },
    /// Whether something is here, and all of it is right.
    Check(Checked),
    /// Take this branch from me: from now on the other side asks, until it answers this.
    Push {
        branch: String,
        head: VersionId,
        signature: Vec<u8>,
    },
    /// Take this object from me, likewise.
    PushObject(ObjectId),
}

/// Something that is an exact object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// One that was put.
    Object(ObjectId),
    /// A file of a version, by its SHA-256 and length.
    File(FileHash, u64),
}

/// What has bytes that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Readable {
    /// An object.
    Whole(Target),
    /// A node, decoded: its kind and id.
    Node(u8, NodeId),
}

/// What is to be checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checked {
    /// An object.
    Object(ObjectId),
    /// A version.
    Version(VersionId),
}

/// What came of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// It is here, and every hash is right.
    Right,
    /// It is not here.
    Absent,
    /// It is here, and this is wrong with it.
    Damaged(String),
}

/// A branch or a tag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ref {
    /// `false` for a branch.
    pub(super) tag: bool,
    /// Its name.
    pub(super) name: String,
    /// The version it names, or a branch's newest; none for a branch without any.
    pub(super) head: Option<VersionId>,
    /// How many versions of its own a branch has.
    pub(super) count: u64,
    /// The signature of a branch's newest version; may be empty.
    pub(super) signature: Vec<u8>,
}

/// What is answered.
#[derive(Debug)]
pub(super) enum Answer {
    /// Refs in the order of their names, and whether there are more.
    Refs { more: bool, refs: Vec<Ref> },
    /// Versions, the newest first; whether there are more behind them.
    Log { more: bool, versions: Vec<Version> },
    /// A node: its record's kind and meta, the length of its payload, and the payload's first bytes.
    Node {
        kind: u8,
        meta: Vec<u8>,
        len: u64,
        first: Vec<u8>,
    },
    /// The next bytes of the payload.
    More(Vec<u8>),
    /// A node that is not there, or is damaged.
    Missing { damaged: bool },
    /// An object's manifest.
    Object(Vec<u8>),
    /// Ids of objects in their order, and whether there are more.
    Objects { more: bool, ids: Vec<ObjectId> },
    /// Records, one after the other.
    Records(Vec<u8>),
    /// Bytes of an object.
    Bytes {
        /// The bytes.
        bytes: Vec<u8>,
        /// Whether they may be compressed.
        packed: bool,
    },
    /// What came of a check.
    State(State),
    /// What was pushed is here.
    Taken,
    /// It cannot be done; after this nothing more is said.
    Failed(Error),
}

/// As many of `all` as go on a page, and whether there are more; `len` tells about how long one is.
pub(super) fn page<T>(all: impl IntoIterator<Item = T>, len: impl Fn(&T) -> usize) -> (Vec<T>, bool) {
    let (mut page, mut bytes) = (Vec::new(), 0);
    for item in all {
        if bytes >= PAGE {
            return (page, true);
        }
        bytes += len(&item);
        page.push(item);
    }
    (page, false)
}

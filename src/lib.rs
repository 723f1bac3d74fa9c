//! zspace: a mountable, versioned, content-addressed store of model checkpoints.
//!
//! The layers, lowest first (docs/ARCHITECTURE.md is the map; `scripts/check-layers` keeps them): a file imports only from
//! lower layers, never from its own layer's other rooms.

// 0: one error type, typed ids, bounded readers, the disk
pub mod bytes;
pub mod disk;
pub mod error;
pub mod id;
// 1: dtype and shape, a byte-weighted LRU
pub mod cache;
pub mod tensor;
// 2: how a chunk is encoded, how a file is split, exact byte objects, where nodes lie
pub mod codec;
pub mod format;
pub mod object;
pub mod pack;
// 3: versions, branches, tags, trees
pub mod graph;
// 4: version + path + range → bytes
pub mod rebuild;
// 5: a tree of files becomes a version; every hash checked
pub mod commit;
pub mod verify;
// 6: the one façade
pub mod store;
// 7: doors: the mount, and peers
pub mod fuse;
pub mod sync;
// 8: one file per verb
pub mod cli;

//! The mount: a store as a file system (docs/SEMANTICS.md says what it promises).
//!
//! `door`, `answers`, `session`, `attach` and `unmount` alone know FUSE; all else answers in plain types and is tested without a mount. `files` is what the door
//! calls: it finds out by the inode whether a request goes to `namespace` (versions and their views, which never change) or to
//! `staging` (ordinary files on their way to a commit).

mod answers;
mod attach;
mod attr;
mod attributes;
mod changes;
pub mod control;
mod door;
mod errno;
mod files;
mod handles;
mod holders;
mod inodes;
mod io;
mod killed;
mod manners;
mod modes;
mod namespace;
mod passthrough;
mod place;
mod pool;
mod session;
mod staging;
mod stream;
mod unmount;
mod versions;
mod views;
mod warm;
mod xattr;

pub use attr::{Attr, FileKind};
pub use session::{MountOptions, mount, refuse_nested};
pub use staging::{
    EntryStatus, Handle, Located, SetAttr, SetTime, Settle, Staging, State, Status, unfinished,
};
pub use unmount::unmount;

#[cfg(test)]
mod tests;

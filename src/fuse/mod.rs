//! The mount.

mod attr;
pub mod control;
mod staging;

pub use attr::{Attr, FileKind};
pub use staging::{EntryStatus, Handle, Located, SetAttr, SetTime, Settle, Staging, State, Status};

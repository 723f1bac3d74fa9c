//! Versions, branches, tags and trees: what was committed, by whom it is followed, and how it is named.

mod adopt;
mod history;
mod ledger;
mod manifest;
mod names;
mod node;
mod record;
mod tree;
mod version;

pub use adopt::{Adopted, Follow};
pub use history::{Branch, History, MAIN, Object, now};
pub use ledger::LiveHistory;
pub use manifest::{Manifest, Shape};
pub use names::{check_name, is_name};
pub use node::{Delta, Further, MANY_DEPTH, MAX_BASES, NodeKind, NodeMeta};
pub use record::{Change, Record};
pub use tree::{Entry, EntryKind, Timestamp, Tree};
pub use version::{Numbered, Version};

//! Exact byte objects: any bytes as a forest of ternary trees of small records, so that a range is proved by the records on its path,
//! and two objects that share most of their bytes differ in few records (docs/FORMAT.md, "Exact byte objects").
//!
//! Records are computed from the bytes when a proof, a check or a peer asks for them, never stored.

mod fold;
mod lanes;
mod manifest;
mod record;
mod records;
mod shape;
#[cfg(test)]
mod tests;

pub use fold::{Block, Fold, Interruptible, Source, touches};
pub use manifest::ObjectManifest;
pub use record::{ATOM, Record, Width};
pub use records::{Proof, Records};
pub use shape::{Counts, Place, Shape};

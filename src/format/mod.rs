//! How a file is split into chunks and which tensors it holds, and how tensors are laid out as files of their own.
//!
//! Pure logic over a random-access [`Source`]: nothing here touches a disk, executes input or inflates a zip member.
//! docs/FORMAT.md specifies the planning rules, the names, the bytes of an encoded [`Layout`] and the bytes of the views.

mod complete;
mod crc;
mod cutter;
mod facts;
mod file_name;
mod gather;
mod layout;
mod names;
mod npy;
mod pickle;
mod places;
mod plan;
mod safetensors;
mod source;
mod torch;
mod view_npy;
mod view_safetensors;
mod view_torch;
mod virt;
mod walk;
mod wire;
mod zip;

pub use complete::{Completeness, completeness, distributed_parts, index_shards, is_distributed_part};
pub use crc::SpanCrc;
pub use cutter::Cutter;
pub use facts::facts;
pub use file_name::file_name;
pub use layout::{ChunkPlan, Extent, Format, Layout, Region, Tensor};
pub use names::true_name;
pub use places::Place;
pub use source::Source;
pub use view_npy::npy_file;
pub use view_safetensors::safetensors_file;
pub use view_torch::{crc_spans, torch_file};
pub use virt::{Piece, Virtual};

use crate::error::Result;
use plan::Parts;
use source::{Parse, Stop};

/// What [`split`] made of a file.
#[derive(Clone, Debug, PartialEq)]
pub enum Split {
    /// A parser understood the whole file.
    Parsed(Layout),
    /// No parser did; the reason is for logs. The file is stored as content-defined chunks.
    Opaque(String),
}

/// Splits a file by what its bytes say, never by its name. Content never makes it fail: what no parser understands
/// fully, or what parses oddly, is [`Split::Opaque`].
///
/// # Errors
/// Only what [`Source::read_at`] reports.
pub fn split(src: &dyn Source) -> Result<Split> {
    Ok(match find(src) {
        Ok(Some(parts)) => match plan::plan(parts, src.len()) {
            Ok(layout) => Split::Parsed(layout),
            Err(why) => Split::Opaque(why),
        },
        Ok(None) => Split::Opaque("no known format".to_owned()),
        Err(Stop::Odd(why)) => Split::Opaque(why),
        Err(Stop::Io(e)) => return Err(e),
    })
}

/// What the first parser that knows the file's beginning makes of it.
fn find(src: &dyn Source) -> Parse<Option<Parts>> {
    if zip::is_zip(src)? {
        let members = zip::members(src)?;
        return match torch::parse(src, &members)? {
            None => npy::parse_npz(src, &members),
            found => Ok(found),
        };
    }
    match npy::parse(src)? {
        None => safetensors::parse(src),
        found => Ok(found),
    }
}

#[cfg(test)]
mod tests;

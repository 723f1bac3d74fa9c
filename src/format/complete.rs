//! Whether a file is whole by its own structure, and which files an index names: what decides when staged work is done.

use super::source::{Parse, Source, Stop};
use super::{npy, safetensors, zip};
use crate::error::Result;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use std::collections::BTreeSet;
use std::fmt;

/// What [`completeness`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Completeness {
    /// Nothing says that the file is unfinished.
    Complete,
    /// The file is shorter than it says itself, for this reason.
    Torn(String),
}

/// Whether a file is as long as its own structure says: a safetensors or npy file by its header, a zip by its directory.
/// Only a file that is certainly cut short is torn; an empty one, one of another kind and one that is merely odd are
/// complete. `name` tells a safetensors file that does not show what it is.
///
/// # Errors
/// Only what [`Source::read_at`] reports.
pub fn completeness(src: &dyn Source, name: &str) -> Result<Completeness> {
    match torn(src, name) {
        Ok(Some(why)) => Ok(Completeness::Torn(why.to_owned())),
        Ok(None) | Err(Stop::Odd(_)) => Ok(Completeness::Complete),
        Err(Stop::Io(e)) => Err(e),
    }
}

fn torn(src: &dyn Source, name: &str) -> Parse<Option<&'static str>> {
    if src.is_empty() {
        return Ok(None);
    }
    if zip::is_zip(src)? {
        return torn_zip(src);
    }
    if let Some(header) = npy::header(src, 0, src.len())? {
        if header.data > src.len() {
            return Ok(Some("npy: the header is cut short"));
        }
        let promised = npy::promised(src, &header)?;
        let short = promised.is_some_and(|n| header.data.checked_add(n).is_none_or(|end| end > src.len()));
        return Ok(short.then_some("npy: the data is shorter than the header says"));
    }
    match safetensors::header_len(src)? {
        Some(len) if len > src.len() - 8 => Ok(Some("safetensors: the header is cut short")),
        Some(len) => {
            let header = safetensors::read_header(src, len)?;
            Ok((header.data_end() > src.len())
                .then_some("safetensors: the data is shorter than the header says"))
        }
        // By its name, a file that is too short or claims too long a header to show what it is.
        None if name.ends_with(".safetensors")
            && safetensors::claimed_len(src)?.is_none_or(|n| n > src.len() - 8) =>
        {
            Ok(Some("safetensors: the header is cut short"))
        }
        None => Ok(None),
    }
}

fn torn_zip(src: &dyn Source) -> Parse<Option<&'static str>> {
    let Some(end) = zip::find_end(src, true)? else {
        // Something after the end record makes an odd zip, not an unfinished one.
        let cut = zip::find_end(src, false)?.is_none();
        return Ok(cut.then_some("zip: the end record is missing"));
    };
    let directory = zip::read_end(src, end)?;
    Ok(zip::exceeds_file(src, &directory)?.then_some("zip: its members exceed the file"))
}

/// The distinct file names in the `weight_map` of a `*.index.json`, sorted; `None` if it is no such index.
pub fn index_shards(json: &[u8]) -> Option<Vec<String>> {
    serde_json::from_slice::<Index>(json)
        .ok()
        .map(|i| i.weight_map.0.into_iter().collect())
}

const PART: &[u8] = b".distcp";

/// How long the name of a part of a distributed checkpoint is that ends where `text` does: `__RANK_NUMBER.distcp`.
fn part_len(text: &[u8]) -> Option<usize> {
    let digits = |t: &[u8]| t.iter().rev().take_while(|b| b.is_ascii_digit()).count();
    let rest = text.strip_suffix(PART)?;
    let number = digits(rest);
    let rest = rest[..rest.len() - number].strip_suffix(b"_")?;
    let rank = digits(rest);
    let rest = rest[..rest.len() - rank].strip_suffix(b"__")?;
    (number > 0 && rank > 0).then(|| text.len() - rest.len())
}

/// Whether a file of this name is a part of a checkpoint that torch.distributed.checkpoint writes.
pub fn is_distributed_part(name: &[u8]) -> bool {
    part_len(name) == Some(name.len())
}

/// The parts that the `.metadata` of a distributed checkpoint names. It is a pickle, in which names are plain.
pub fn distributed_parts(metadata: &[u8]) -> Vec<String> {
    let ends = memchr::memmem::find_iter(metadata, PART).map(|at| at + PART.len());
    let names = ends.filter_map(|end| part_len(&metadata[..end]).map(|len| &metadata[end - len..end]));
    let names: std::collections::BTreeSet<&[u8]> = names.collect();
    names
        .into_iter()
        .map(|n| String::from_utf8_lossy(n).into_owned())
        .collect()
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: Shards,
}

/// The values of a map, each once: the map itself may name a million tensors.
struct Shards(BTreeSet<String>);

impl<'de> Deserialize<'de> for Shards {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        d.deserialize_map(ShardsVisitor)
    }
}

struct ShardsVisitor;

impl<'de> Visitor<'de> for ShardsVisitor {
    type Value = Shards;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map of tensor names to file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Shards, A::Error> {
        let mut shards = BTreeSet::new();
        while let Some((IgnoredAny, shard)) = map.next_entry::<IgnoredAny, String>()? {
            shards.insert(shard);
        }
        Ok(Shards(shards))
    }
}

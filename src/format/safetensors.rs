//! Reads a safetensors file: an 8-byte header length, a JSON header, then tensors without gap or overlap.
//!
//! Source: <https://huggingface.co/docs/safetensors>, and what the reference implementation (`safetensors/src/tensor.rs`)
//! refuses. The header is parsed as a stream, so that memory goes with the tensors it names, not with its length.

use super::layout::{Format, MAX_DIMS, Region, Tensor};
use super::names;
use super::plan::Parts;
use super::source::{Parse, Source, Stop, Stretch, odd, take};
use crate::tensor::{Dtype, contiguous_strides, elements};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use std::collections::HashSet;
use std::fmt;
use std::io::BufReader;

/// The longest header, in bytes: the reference implementation's own limit.
const MAX_HEADER: u64 = 100_000_000;
/// The most tensors a file may name; more are kept as opaque bytes, so that memory stays bounded.
const MAX_TENSORS: usize = 1 << 18;

/// What the header says, not yet compared with the file.
#[derive(Default)]
pub(super) struct Header {
    /// Where the data starts in the file.
    pub(super) data_start: u64,
    tensors: Vec<Entry>,
    metadata: Vec<(String, String)>,
}

struct Entry {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    begin: u64,
    end: u64,
}

impl Header {
    /// The `__metadata__`, in the file's order.
    pub(super) fn metadata(&self) -> &[(String, String)] {
        &self.metadata
    }

    /// Where the data ends in the file, by what the header says.
    pub(super) fn data_end(&self) -> u64 {
        let end = self.tensors.iter().map(|t| t.end).max().unwrap_or(0);
        self.data_start.saturating_add(end)
    }
}

/// The length of the header if the file starts like a safetensors file.
pub(super) fn header_len(src: &dyn Source) -> Parse<Option<u64>> {
    if src.len() < 9 {
        return Ok(None);
    }
    let head = take(src, 0, 9, "header length")?;
    let n = head[..8].iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
    Ok((head[8] == b'{' && n <= MAX_HEADER).then_some(n))
}

/// The length of the header that the first bytes claim, whatever follows; none if they are not there.
pub(super) fn claimed_len(src: &dyn Source) -> Parse<Option<u64>> {
    if src.len() < 8 {
        return Ok(None);
    }
    Ok(Some(
        take(src, 0, 8, "header length")?
            .iter()
            .rev()
            .fold(0u64, |n, b| n << 8 | u64::from(*b)),
    ))
}

/// Reads the header of a file that starts like a safetensors file.
pub(super) fn read_header(src: &dyn Source, len: u64) -> Parse<Header> {
    let data_start = 8 + len;
    if data_start > src.len() {
        return odd("safetensors: the header ends beyond the file");
    }
    let mut stretch = Stretch::new(src, 8, data_start);
    let parsed = {
        let mut json = serde_json::Deserializer::from_reader(BufReader::with_capacity(1 << 16, &mut stretch));
        HeaderSeed
            .deserialize(&mut json)
            .and_then(|h| json.end().map(|()| h))
    };
    match (stretch.failed, parsed) {
        (Some(e), _) => Err(Stop::Io(e)),
        (None, Err(e)) => odd(format!("safetensors: {e}")),
        (None, Ok(mut header)) => {
            header.data_start = data_start;
            Ok(header)
        }
    }
}

/// Splits a safetensors file; `None` if it does not start like one.
pub(super) fn parse(src: &dyn Source) -> Parse<Option<Parts>> {
    let Some(len) = header_len(src)? else {
        return Ok(None);
    };
    let Header {
        data_start,
        mut tensors,
        metadata,
    } = read_header(src, len)?;
    // Zero-size tensors sort before the tensor that starts where they do.
    tensors.sort_by(|a, b| (a.begin, a.end, &a.name).cmp(&(b.begin, b.end, &b.name)));
    let mut at = 0;
    let mut seen = HashSet::with_capacity(tensors.len());
    let mut parts = Parts {
        format: Format::Safetensors,
        regions: vec![],
        tensors: vec![],
        metadata,
    };
    for t in &tensors {
        if t.begin != at || t.end < t.begin {
            return odd(format!("safetensors: {:?} leaves a gap or overlaps", t.name));
        }
        let size = elements(&t.shape).and_then(|n| n.checked_mul(t.dtype.size() as u64));
        if size != Some(t.end - t.begin) {
            return odd(format!(
                "safetensors: the size of {:?} is not that of its shape",
                t.name
            ));
        }
        if !seen.insert(t.name.as_str()) {
            return odd(format!("safetensors: {:?} is named twice", t.name));
        }
        at = t.end;
    }
    if data_start.checked_add(at) != Some(src.len()) {
        return odd("safetensors: the data does not end where the file ends");
    }
    drop(seen);
    for (i, t) in tensors.into_iter().enumerate() {
        let name = names::encode(t.name.as_bytes());
        let offset = data_start + t.begin;
        parts.regions.push(Region {
            offset,
            len: t.end - t.begin,
            dtype: t.dtype,
            name: name.clone(),
        });
        let strides = contiguous_strides(&t.shape);
        let tensor = Tensor {
            name,
            region: i as u32,
            byte_offset: 0,
            dtype: t.dtype,
            shape: t.shape,
            strides,
        };
        parts.tensors.push(tensor);
    }
    Ok(Some(parts))
}

struct HeaderSeed;

impl<'de> DeserializeSeed<'de> for HeaderSeed {
    type Value = Header;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Header, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a header object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut header = Header::default();
        let mut has_metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            if name == "__metadata__" {
                if std::mem::replace(&mut has_metadata, true) {
                    return Err(A::Error::custom("__metadata__ is given twice"));
                }
                header.metadata = map.next_value_seed(MetadataSeed)?;
                continue;
            }
            if header.tensors.len() == MAX_TENSORS {
                return Err(A::Error::custom("more tensors than this program splits"));
            }
            let entry = map.next_value_seed(EntrySeed(name))?;
            header.tensors.push(entry);
        }
        Ok(header)
    }
}

struct MetadataSeed;

impl<'de> DeserializeSeed<'de> for MetadataSeed {
    type Value = Vec<(String, String)>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed {
    type Value = Vec<(String, String)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        let mut keys = HashSet::new();
        while let Some((k, v)) = map.next_entry::<String, String>()? {
            if !keys.insert(k.clone()) {
                return Err(A::Error::custom("a metadata key is given twice"));
            }
            pairs.push((k, v));
        }
        Ok(pairs)
    }
}

struct EntrySeed(String);

impl<'de> DeserializeSeed<'de> for EntrySeed {
    type Value = Entry;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Entry, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the dtype, shape and data_offsets of {:?}", self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(key) = map.next_key::<String>()? {
            let again = match key.as_str() {
                "dtype" => dtype.replace(map.next_value::<String>()?).is_some(),
                "shape" => shape.replace(map.next_value_seed(Shape)?).is_some(),
                "data_offsets" => offsets.replace(map.next_value::<(u64, u64)>()?).is_some(),
                _ => {
                    map.next_value::<IgnoredAny>()?;
                    return Err(A::Error::custom(format!("unknown field {key:?}")));
                }
            };
            if again {
                return Err(A::Error::custom(format!("{key} of {:?} is given twice", self.0)));
            }
        }
        let (Some(dtype), Some(shape), Some((begin, end))) = (dtype, shape, offsets) else {
            return Err(A::Error::custom(format!("{:?} lacks a field", self.0)));
        };
        let Some(dtype) = Dtype::from_safetensors(&dtype) else {
            return Err(A::Error::custom(format!("unknown dtype {dtype:?}")));
        };
        Ok(Entry {
            name: self.0,
            dtype,
            shape,
            begin,
            end,
        })
    }
}

struct Shape;

impl<'de> DeserializeSeed<'de> for Shape {
    type Value = Vec<u64>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Vec<u64>, D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Shape {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of dimensions")
    }

    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut shape = Vec::new();
        while let Some(n) = seq.next_element()? {
            if shape.len() == MAX_DIMS {
                return Err(A::Error::custom("too many dimensions"));
            }
            shape.push(n);
        }
        Ok(shape)
    }
}

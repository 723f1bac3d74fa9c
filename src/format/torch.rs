//! Reads a torch file: a zip of stored members, of which `PREFIX/data.pkl` describes tensors over the storages
//! `PREFIX/data/KEY`.
//!
//! Source: `torch/serialization.py` (`_save`, `_load`), `torch/_utils.py` (`_rebuild_tensor*`) and
//! `caffe2/serialize/inline_container.cc` of PyTorch 2.x.

use super::layout::{Format, MAX_DIMS, Region, Tensor};
use super::names::encode;
use super::pickle::{self, Id, Pickle, Value};
use super::plan::Parts;
use super::source::{Parse, Source, Stop, odd, take};
use super::walk::{self, Rebuild, Version};
use super::zip::Member;
use crate::tensor::Dtype;
use std::collections::HashMap;

/// A storage that the pickle names.
struct Storage {
    /// Its region, in the order in which the pickle names storages.
    index: usize,
    /// The dtype of a typed storage.
    dtype: Option<Dtype>,
}

/// Splits a torch file; `None` if the zip has no `PREFIX/data.pkl`.
pub(super) fn parse(src: &dyn Source, members: &[Member]) -> Parse<Option<Parts>> {
    let Some(data) = description(members)? else {
        return Ok(None);
    };
    let prefix = &data.name[..data.name.len() - b"data.pkl".len()];
    let inside: HashMap<&[u8], &Member> = members
        .iter()
        .filter_map(|m| Some((m.name.strip_prefix(prefix)?, m)))
        .collect();
    check_byte_order(src, inside.get(b"byteorder".as_slice()).copied())?;
    let p = Pickle::read(take(src, data.offset, data.len, "torch: data.pkl")?).map_err(Stop::Odd)?;

    let (storages, mut regions) = read_storages(&p, &inside)?;
    let mut named = vec![false; regions.len()];
    let mut tensors = Vec::new();
    for (name, rebuild) in walk::tensors(&p).map_err(Stop::Odd)? {
        let Some((storage, t)) = read_tensor(&p, &rebuild, &storages, name) else {
            return odd("torch: a tensor's description is not understood");
        };
        let (region, named) = (&mut regions[storage.index], &mut named[storage.index]);
        if !*named {
            *named = true;
            region.name.clone_from(&t.name);
            if storage.dtype.is_none() {
                region.dtype = t.dtype;
            }
        }
        tensors.push(t);
    }
    sort_regions(&mut regions, &mut tensors);
    Ok(Some(Parts {
        format: Format::Torch,
        regions,
        tensors,
        metadata: vec![],
    }))
}

/// The member that describes the tensors, if there is one.
pub(super) fn description(members: &[Member]) -> Parse<Option<&Member>> {
    let is_pickle = |m: &&Member| {
        m.name
            .strip_suffix(b"/data.pkl")
            .is_some_and(|p| !p.contains(&b'/'))
    };
    let mut pickles = members.iter().filter(is_pickle);
    let Some(data) = pickles.next() else {
        return Ok(None);
    };
    if pickles.next().is_some() {
        return odd("torch: more than one data.pkl");
    }
    if !data.stored || data.len > pickle::MAX_LEN {
        return odd("torch: data.pkl is compressed or too long");
    }
    Ok(Some(data))
}

fn check_byte_order(src: &dyn Source, record: Option<&Member>) -> Parse<()> {
    // Files from before torch 2.1 have no such record; they are little-endian.
    let Some(m) = record else { return Ok(()) };
    if !m.stored || m.len > 16 || take(src, m.offset, m.len, "torch: byteorder")? != b"little" {
        return odd("torch: the byte order is not little-endian");
    }
    Ok(())
}

/// Every storage the pickle names, by its persistent id, and a region for each.
fn read_storages(p: &Pickle, inside: &HashMap<&[u8], &Member>) -> Parse<(HashMap<Id, Storage>, Vec<Region>)> {
    let mut by_id = HashMap::new();
    let mut by_key: HashMap<&[u8], (usize, Option<Dtype>, u64)> = HashMap::new();
    let mut regions: Vec<Region> = Vec::new();
    for (id, value) in p.values.iter().enumerate() {
        let Value::Persistent(about) = value else { continue };
        let Some((key, dtype, numel)) = describe_storage(p, *about) else {
            return odd("torch: a storage's description is not understood");
        };
        let index = match by_key.get(key) {
            Some(known) if (known.1, known.2) == (dtype, numel) => known.0,
            Some(_) => return odd("torch: a storage is described in two ways"),
            None => {
                let path = [b"data/", key].concat();
                let Some(m) = inside.get(path.as_slice()) else {
                    return odd("torch: a storage's record is missing");
                };
                let size = numel.checked_mul(dtype.map_or(1, |d| d.size() as u64));
                if !m.stored || size != Some(m.len) {
                    return odd("torch: a storage's record is compressed or has another size");
                }
                let name = format!("data/{}", encode(key));
                regions.push(Region {
                    offset: m.offset,
                    len: m.len,
                    dtype: dtype.unwrap_or(Dtype::U8),
                    name,
                });
                by_key.insert(key, (regions.len() - 1, dtype, numel));
                regions.len() - 1
            }
        };
        by_id.insert(id as Id, Storage { index, dtype });
    }
    Ok((by_id, regions))
}

/// Key, dtype (`None` for bytes) and number of elements from `('storage', type, key, location, numel)`.
fn describe_storage(p: &Pickle, id: Id) -> Option<(&[u8], Option<Dtype>, u64)> {
    let [tag, class, key, _location, numel] = p.tuple(id)? else {
        return None;
    };
    let text = |id: Id| match p.get(id) {
        Value::Text(s) => Some(p.text(*s)),
        _ => None,
    };
    if text(*tag)? != b"storage" {
        return None;
    }
    let dtype = match p.global(*class)? {
        (b"torch.storage" | b"torch", b"UntypedStorage") => None,
        (b"torch", name) => Some(typed_storage(name)?),
        _ => return None,
    };
    Some((text(*key)?, dtype, number(p, *numel)?))
}

fn typed_storage(name: &[u8]) -> Option<Dtype> {
    Dtype::ALL
        .iter()
        .copied()
        .find(|d| storage_class(*d).is_some_and(|class| class.as_bytes() == name))
}

/// The typed storage class of a dtype; newer dtypes have none.
pub(super) fn storage_class(dtype: Dtype) -> Option<&'static str> {
    match dtype {
        Dtype::F64 => Some("DoubleStorage"),
        Dtype::F32 => Some("FloatStorage"),
        Dtype::F16 => Some("HalfStorage"),
        Dtype::BF16 => Some("BFloat16Storage"),
        Dtype::I64 => Some("LongStorage"),
        Dtype::I32 => Some("IntStorage"),
        Dtype::I16 => Some("ShortStorage"),
        Dtype::I8 => Some("CharStorage"),
        Dtype::U8 => Some("ByteStorage"),
        Dtype::BOOL => Some("BoolStorage"),
        Dtype::C64 => Some("ComplexFloatStorage"),
        Dtype::C128 => Some("ComplexDoubleStorage"),
        Dtype::U16
        | Dtype::U32
        | Dtype::U64
        | Dtype::F8_E4M3
        | Dtype::F8_E5M2
        | Dtype::F8_E8M0
        | Dtype::F8_E4M3FNUZ
        | Dtype::F8_E5M2FNUZ => None,
    }
}

fn number(p: &Pickle, id: Id) -> Option<u64> {
    match p.get(id) {
        Value::Int(n) => u64::try_from(*n).ok(),
        _ => None,
    }
}

fn numbers(p: &Pickle, id: Id) -> Option<Vec<u64>> {
    let items = match p.get(id) {
        Value::Tuple(items) | Value::List(items) => items,
        Value::Call(c) if p.global(c.callable) == Some((b"torch", b"Size")) => match p.tuple(c.args)? {
            [inner] => p.tuple(*inner)?,
            _ => return None,
        },
        _ => return None,
    };
    if items.len() > MAX_DIMS {
        return None;
    }
    items.iter().map(|id| number(p, *id)).collect()
}

/// The tensor a rebuild call describes; `None` if anything about it is not understood. That it stays within its storage
/// is checked with the whole layout.
fn read_tensor<'a>(
    p: &Pickle,
    rebuild: &Rebuild,
    storages: &'a HashMap<Id, Storage>,
    name: String,
) -> Option<(&'a Storage, Tensor)> {
    let args = p.tuple(rebuild.args)?;
    let [storage, offset, shape, strides, rest @ ..] = args else {
        return None;
    };
    // Version 1 has these alone; then come requires_grad, hooks, for version 3 the dtype, and metadata at the end.
    let (own_dtype, metadata) = match (rebuild.version, rest) {
        (Version::V1, []) => (None, None),
        (Version::V2, [_, _, metadata @ ..]) if metadata.len() < 2 => (None, metadata.first()),
        (Version::V3, [_, _, dtype, metadata @ ..]) if metadata.len() < 2 => (Some(*dtype), metadata.first()),
        _ => return None,
    };
    // Metadata would say that the values are the conjugates or negatives of what is stored.
    match metadata.map(|id| p.get(*id)) {
        None | Some(Value::None) => {}
        Some(Value::Dict(pairs)) if pairs.is_empty() => {}
        Some(_) => return None,
    }
    let storage = storages.get(storage)?;
    let dtype = match (own_dtype, storage.dtype) {
        (None, Some(dtype)) => dtype,
        (Some(id), None) => match p.global(id)? {
            (b"torch", name) => Dtype::from_torch(std::str::from_utf8(name).ok()?)?,
            _ => return None,
        },
        _ => return None,
    };
    let byte_offset = number(p, *offset)?.checked_mul(dtype.size() as u64)?;
    let (shape, strides) = (numbers(p, *shape)?, numbers(p, *strides)?);
    let region = storage.index as u32;
    Some((
        storage,
        Tensor {
            name,
            region,
            byte_offset,
            dtype,
            shape,
            strides,
        },
    ))
}

/// Puts the regions into file order.
fn sort_regions(regions: &mut [Region], tensors: &mut [Tensor]) {
    let mut order: Vec<usize> = (0..regions.len()).collect();
    order.sort_by_key(|i| regions[*i].offset);
    let mut place = vec![0u32; order.len()];
    for (new, old) in order.iter().enumerate() {
        place[*old] = new as u32;
    }
    for t in tensors {
        t.region = place[t.region as usize];
    }
    regions.sort_by_key(|r| r.offset);
}

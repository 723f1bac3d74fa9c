//! All tensors of a file as one safetensors file, byte for byte as the reference implementation (0.8) writes them.
//!
//! Source: `safetensors/src/tensor.rs` (`prepare`, and the order of its `Dtype`).

use super::layout::{Format, Layout, Tensor};
use super::names::true_name;
use super::view_npy::{gathered, packed};
use super::virt::{Piece, Virtual};
use crate::error::{Error, Kind, Result};
use crate::tensor::Dtype;
use std::collections::HashSet;

/// The longest header readers of the format accept, in bytes.
const MAX_HEADER: usize = 100_000_000;

/// All tensors of the file as one safetensors file; of a safetensors file, the file itself. Names are the true names
/// ([`true_name`]), or the encoded ones if two true names are equal. Strided tensors are gathered, shared ones repeated.
///
/// # Errors
/// `Refused`, naming the tensor, if the format lacks its dtype, it cannot have its name, or gathering it would take more
/// bytes than its region has; `Refused` too if the file has no tensors or the header would exceed the format's limit.
pub fn safetensors_file(layout: &Layout) -> Result<Virtual> {
    let mut out = Virtual::default();
    if layout.format == Format::Safetensors {
        out.push(
            layout.len,
            Piece::File {
                offset: 0,
                len: layout.len,
            },
        );
        return Ok(out);
    }
    let refuse = |why: String| Err(Error::new(Kind::Refused, why));
    if layout.tensors.is_empty() {
        return refuse("the file has no tensors".to_owned());
    }
    let mut tensors = named(layout);
    for (name, t) in &tensors {
        if t.dtype.safetensors().is_empty() {
            return refuse(format!("{}: safetensors has no {}", t.name, t.dtype));
        }
        if name == "__metadata__" {
            return refuse(format!("{}: safetensors keeps this name for itself", t.name));
        }
    }
    tensors.sort_by(|(a, s), (b, t)| order(s.dtype).cmp(&order(t.dtype)).then_with(|| a.cmp(b)));

    let framework = if layout.format == Format::Torch {
        "pt"
    } else {
        "np"
    };
    let mut header = format!("{{\"__metadata__\":{{\"format\":\"{framework}\"}}");
    let mut data = Virtual::default();
    for (name, t) in &tensors {
        let (len, piece) = match packed(layout, t, false) {
            Some(found) => found,
            None => gathered(layout, t)?,
        };
        let begin = data.len;
        data.push(len, piece);
        let quoted = serde_json::Value::from(name.as_str());
        let dims: Vec<String> = t.shape.iter().map(u64::to_string).collect();
        header += &format!(
            ",{quoted}:{{\"dtype\":\"{}\",\"shape\":[{}],\"data_offsets\":[{begin},{}]}}",
            t.dtype.safetensors(),
            dims.join(","),
            data.len
        );
        if header.len() > MAX_HEADER {
            return refuse("the header would be longer than readers of the format accept".to_owned());
        }
    }
    header.push('}');
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    out.push_bytes(bytes);
    for (start, piece) in data.pieces {
        out.pieces.push((out.len + start, piece));
    }
    out.len = out.len.saturating_add(data.len);
    Ok(out)
}

/// Each tensor with the name it gets.
fn named(layout: &Layout) -> Vec<(String, &Tensor)> {
    let tensors = &layout.tensors;
    let with_true_names: Vec<_> = tensors.iter().map(|t| (true_name(&t.name), t)).collect();
    let distinct: HashSet<&str> = with_true_names.iter().map(|(name, _)| name.as_str()).collect();
    if distinct.len() == tensors.len() {
        return with_true_names;
    }
    tensors.iter().map(|t| (t.name.clone(), t)).collect()
}

/// The reference writes the widest dtypes first, in this order.
fn order(dtype: Dtype) -> u8 {
    match dtype {
        Dtype::C128 => 0,
        Dtype::U64 => 1,
        Dtype::I64 => 2,
        Dtype::F64 => 3,
        Dtype::C64 => 4,
        Dtype::F32 => 5,
        Dtype::U32 => 6,
        Dtype::I32 => 7,
        Dtype::BF16 => 8,
        Dtype::F16 => 9,
        Dtype::U16 => 10,
        Dtype::I16 => 11,
        Dtype::F8_E5M2FNUZ => 12,
        Dtype::F8_E4M3FNUZ => 13,
        Dtype::F8_E8M0 => 14,
        Dtype::F8_E4M3 => 15,
        Dtype::F8_E5M2 => 16,
        Dtype::I8 => 17,
        Dtype::U8 => 18,
        Dtype::BOOL => 19,
    }
}

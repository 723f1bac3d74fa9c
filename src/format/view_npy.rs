//! One tensor as a NumPy file of its own, byte for byte as `numpy.save` of NumPy 2 writes it.
//!
//! Source: `numpy/lib/_format_impl.py` (`_write_array_header`).

use super::layout::{Layout, Tensor};
use super::virt::{Piece, Virtual};
use crate::error::{Error, Kind, Result};
use crate::tensor::elements;

/// The data starts at a multiple of this, so that it can be mapped.
const ALIGN: usize = 64;
/// NumPy leaves room for a first dimension of this many digits.
const GROWTH_DIGITS: usize = 21;

/// The tensor in a file that `numpy.load` opens, also with `mmap_mode="r"`. A tensor in Fortran order stays so; one with
/// other strides is gathered. bf16 and fp8 are `<u2` and `|u1`.
///
/// # Errors
/// `NotFound` if the layout has no such tensor; `Refused` if gathering it would take more bytes than its region has.
pub fn npy_file(layout: &Layout, tensor: usize) -> Result<Virtual> {
    let t = layout.tensor(tensor)?;
    let fortran = t.is_fortran() && !t.is_contiguous();
    let mut out = Virtual::default();
    out.push_bytes(header(t, fortran));
    let (len, piece) = match packed(layout, t, fortran) {
        Some(found) => found,
        None => gathered(layout, t)?,
    };
    out.push(len, piece);
    Ok(out)
}

/// The tensor's bytes as they lie in the file, if they are in row-major (or, where that will do, column-major) order.
pub(super) fn packed(layout: &Layout, t: &Tensor, fortran: bool) -> Option<(u64, Piece)> {
    if !fortran && !t.is_contiguous() {
        return None;
    }
    let (offset, len) = layout.tensor_span(t);
    Some((len, Piece::File { offset, len }))
}

/// The tensor's elements collected in row-major order.
pub(super) fn gathered(layout: &Layout, t: &Tensor) -> Result<(u64, Piece)> {
    let region = layout.regions.get(t.region as usize);
    let len = elements(&t.shape).and_then(|n| n.checked_mul(t.dtype.size() as u64));
    match (region, len) {
        (Some(region), Some(len)) if len <= region.len => {
            let (offset, item) = (layout.tensor_span(t).0, t.dtype.size() as u32);
            Ok((
                len,
                Piece::Gather {
                    offset,
                    item,
                    shape: t.shape.clone(),
                    strides: t.strides.clone(),
                },
            ))
        }
        _ => {
            let why = format!(
                "{}: its elements overlap, and laid out one by one they would exceed its storage",
                t.name
            );
            Err(Error::new(Kind::Refused, why))
        }
    }
}

fn header(t: &Tensor, fortran: bool) -> Vec<u8> {
    let dims: Vec<String> = t.shape.iter().map(u64::to_string).collect();
    let shape = match dims.as_slice() {
        [one] => format!("({one},)"),
        dims => format!("({})", dims.join(", ")),
    };
    let order = if fortran { "True" } else { "False" };
    let mut text = format!(
        "{{'descr': '{}', 'fortran_order': {order}, 'shape': {shape}, }}",
        t.dtype.npy()
    );
    let grows = if fortran { dims.last() } else { dims.first() };
    text += &" ".repeat(grows.map_or(0, |d| GROWTH_DIGITS - d.len()));
    // Magic, version and length take 10 bytes, the line's end 1; NumPy pads by 1 to 64.
    text += &" ".repeat(ALIGN - (text.len() + 11) % ALIGN);
    text.push('\n');
    let mut out = b"\x93NUMPY\x01\x00".to_vec();
    out.extend_from_slice(&(text.len() as u16).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
    out
}

//! What changed between two versions, tensor by tensor.

use super::{EntryKind, FileView, Numbered, Store, TensorInfo};
use crate::error::{Error, Result};
use crate::id::FileHash;
use crate::tensor::{Dtype, Number};
use half::{bf16, f16};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes compared at a time; a multiple of every element's size.
const STEP: usize = 1 << 20;

/// The difference of two versions.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct Diff {
    /// Tensors in both, by name.
    pub tensors: Vec<TensorDiff>,
    /// Tensors only in the second.
    pub added: Vec<String>,
    /// Tensors only in the first.
    pub removed: Vec<String>,
    /// Paths of files without tensors that are only in the second, only in the first, or differ.
    pub files_added: Vec<String>,
    #[allow(missing_docs)]
    pub files_removed: Vec<String>,
    #[allow(missing_docs)]
    pub files_changed: Vec<String>,
}

/// How one tensor changed.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TensorDiff {
    /// Its name.
    pub name: String,
    /// Elements in it.
    pub elements: u64,
    /// Share of the elements whose bits differ, 0 to 1.
    pub changed: f64,
    /// ‖b − a‖ / ‖a‖ over the finite elements; none for what is no number, or where ‖a‖ is 0 and ‖b − a‖ is not.
    pub relative_norm: Option<f64>,
    /// Why the values cannot be compared: another dtype or shape.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub differs_in: Option<String>,
}

struct Holder {
    file: Arc<FileView>,
    tensor: TensorInfo,
}

#[derive(Default)]
struct Contents {
    tensors: BTreeMap<String, Holder>,
    plain: BTreeMap<String, FileHash>,
}

impl Store {
    /// Compares two versions. Tensors are matched by name; a name that several files of a version use is told apart by the file.
    pub fn diff(&self, a: &Numbered, b: &Numbered) -> Result<Diff> {
        let (mut a, b) = (self.contents(a)?, self.contents(b)?);
        let mut d = Diff::default();
        for (name, new) in b.tensors {
            match a.tensors.remove(&name) {
                Some(old) => d.tensors.push(compare(name, &old, &new)?),
                None => d.added.push(name),
            }
        }
        d.removed = a.tensors.into_keys().collect();
        for (path, new) in b.plain {
            match a.plain.remove(&path) {
                Some(old) if old != new => d.files_changed.push(path),
                Some(_) => {}
                None => d.files_added.push(path),
            }
        }
        d.files_removed = a.plain.into_keys().collect();
        Ok(d)
    }

    fn contents(&self, version: &Numbered) -> Result<Contents> {
        let mut out = Contents::default();
        for (path, entry) in self.walk(version)? {
            let EntryKind::File { hash, len, .. } = entry.kind else {
                continue;
            };
            let file = self.file(&hash, len)?;
            let path = String::from_utf8_lossy(&path).into_owned();
            if !file.has_tensors() {
                out.plain.insert(path, hash);
                continue;
            }
            for tensor in file.tensors() {
                let taken = out.tensors.contains_key(&tensor.name);
                let name = if taken {
                    format!("{path}:{}", tensor.name)
                } else {
                    tensor.name.clone()
                };
                out.tensors.insert(
                    name,
                    Holder {
                        file: file.clone(),
                        tensor,
                    },
                );
            }
        }
        Ok(out)
    }
}

fn compare(name: String, a: &Holder, b: &Holder) -> Result<TensorDiff> {
    let (ta, tb) = (&a.tensor, &b.tensor);
    let elements = crate::tensor::elements(&tb.shape).unwrap_or(0);
    let mut out = TensorDiff {
        name,
        elements,
        changed: 0.0,
        relative_norm: Some(0.0),
        differs_in: None,
    };
    if (ta.dtype, &ta.shape) != (tb.dtype, &tb.shape) || ta.span.1 != tb.span.1 {
        let why = format!("{} {:?} became {} {:?}", ta.dtype, ta.shape, tb.dtype, tb.shape);
        (out.changed, out.relative_norm, out.differs_in) = (1.0, None, Some(why));
        return Ok(out);
    }
    let size = tb.dtype.size();
    let (mut at, mut changed, mut total) = (0, 0u64, 0u64);
    let (mut moved, mut norm) = (0f64, 0f64);
    while at < tb.span.1 {
        let n = STEP.min((tb.span.1 - at) as usize);
        a.file.read_ahead(ta.span.0 + at, 8 * STEP);
        b.file.read_ahead(tb.span.0 + at, 8 * STEP);
        let (x, y) = (a.file.read(ta.span.0 + at, n)?, b.file.read(tb.span.0 + at, n)?);
        if x.len() != n || y.len() != n {
            return Err(Error::damage("tensor reaches past the end of its file"));
        }
        for (p, q) in x.chunks_exact(size).zip(y.chunks_exact(size)) {
            total += 1;
            changed += u64::from(p != q);
            let (u, v) = (value(tb.dtype, p), value(tb.dtype, q));
            if u.is_finite() && v.is_finite() {
                norm += u * u;
                moved += (v - u) * (v - u);
            }
        }
        at += n as u64;
    }
    out.changed = if total == 0 {
        0.0
    } else {
        changed as f64 / total as f64
    };
    out.relative_norm = match (norm > 0.0, moved > 0.0) {
        _ if !is_number(tb.dtype) => None,
        (true, _) => Some((moved / norm).sqrt()),
        (false, false) => Some(0.0),
        (false, true) => None,
    };
    Ok(out)
}

fn is_number(dtype: Dtype) -> bool {
    use Dtype::{BF16, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
    matches!(
        dtype,
        BF16 | F16 | F32 | F64 | I8 | I16 | I32 | I64 | U8 | U16 | U32 | U64
    )
}

/// An element as a number; NaN where it is none.
fn value(dtype: Dtype, b: &[u8]) -> f64 {
    let word = b.iter().rev().fold(0u64, |v, x| v << 8 | u64::from(*x));
    match (dtype.number(), dtype) {
        _ if !is_number(dtype) => f64::NAN,
        (Number::BF16, _) => f64::from(bf16::from_bits(word as u16)),
        (Number::F16, _) => f64::from(f16::from_bits(word as u16)),
        (Number::F32, _) => f64::from(f32::from_bits(word as u32)),
        (Number::F64, _) => f64::from_bits(word),
        (_, Dtype::I8) => f64::from(word as i8),
        (_, Dtype::I16) => f64::from(word as i16),
        (_, Dtype::I32) => f64::from(word as i32),
        (_, Dtype::I64) => word as i64 as f64,
        _ => word as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_as_their_dtype() {
        assert_eq!(value(Dtype::BF16, &[0x80, 0x3f]), 1.0);
        assert_eq!(value(Dtype::F32, &(-2.5f32).to_le_bytes()), -2.5);
        assert_eq!(value(Dtype::I8, &[0xff]), -1.0);
        assert_eq!(value(Dtype::U8, &[0xff]), 255.0);
        assert!(value(Dtype::BOOL, &[1]).is_nan());
    }
}

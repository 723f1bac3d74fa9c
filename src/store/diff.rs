//! What changed between two versions, tensor by tensor.

use super::object::keep;
use super::{EntryKind, FileView, Numbered, Store, TensorInfo};
use crate::error::{Error, Kind, Result};
use crate::id::FileHash;
use crate::tensor::{Dtype, Number};
use half::{bf16, f16};
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes compared at a time; a multiple of every element's size.
const STEP: usize = 1 << 20;

/// The difference of two versions.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Diff {
    /// Tensors in both, those first that changed most.
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
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct TensorDiff {
    /// Its name.
    pub name: String,
    /// Elements in it.
    pub elements: u64,
    /// Share of the elements whose bits differ, 0 to 1.
    pub changed: f64,
    /// ‖b − a‖ / ‖a‖ over the finite elements; none for what is no number, or where ‖a‖ is 0 and ‖b − a‖ is not.
    pub relative_norm: Option<f64>,
    /// The largest |b − a| of a finite element; none for what is no number.
    pub largest: Option<f64>,
    /// ‖a‖² over the finite elements, to put tensors together.
    pub norm: f64,
    /// Why the values cannot be compared: another dtype or shape.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub differs_in: Option<String>,
}

/// A version in which a tensor is another than before.
#[derive(Clone, Debug)]
pub struct Blame {
    /// The version.
    pub version: Arc<Numbered>,
    /// Whether it has the tensor.
    pub there: bool,
    /// How the tensor changed, if it was there before and still is.
    pub change: Option<TensorDiff>,
}

impl Diff {
    /// The share of the elements of tensors in both that changed; those of tensors that cannot be compared did.
    pub fn share(&self) -> f64 {
        let elements = |t: &TensorDiff| t.elements as f64;
        let all: f64 = self.tensors.iter().map(elements).sum();
        let changed: f64 = self.tensors.iter().map(|t| t.changed * elements(t)).sum();
        match all > 0.0 {
            true => changed / all,
            false => 0.0,
        }
    }
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
        // What cannot be compared has changed more than anything.
        let most = |t: &TensorDiff| {
            (
                t.differs_in.is_some(),
                t.relative_norm.unwrap_or(t.changed),
                t.changed,
            )
        };
        d.tensors.sort_by(|x, y| {
            let order = most(y).partial_cmp(&most(x)).unwrap_or(Ordering::Equal);
            order.then_with(|| x.name.cmp(&y.name))
        });
        Ok(d)
    }

    /// The same, kept in STORE/diffs, so that it is computed once.
    ///
    /// # Errors
    /// As of [`Store::diff`].
    pub fn kept_diff(&self, a: &Numbered, b: &Numbered) -> Result<Diff> {
        let path = self.dir().join("diffs").join(format!("{}-{}", a.id, b.id));
        let kept = std::fs::read(&path).ok();
        if let Some(kept) = kept.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
            return Ok(kept);
        }
        let diff = self.diff(a, b)?;
        if let Ok(bytes) = serde_json::to_vec(&diff)
            && let Err(e) = keep(&path, &bytes)
        {
            log::info!("{} is not kept: {e}", path.display());
        }
        Ok(diff)
    }

    /// In which of some versions, given in their order, a tensor is another than in the one before. `told` hears of each that was looked
    /// at, and its error ends it.
    ///
    /// # Errors
    /// `NotFound` if none of them has a tensor of that name; damage.
    pub fn blame(
        &self,
        versions: &[Arc<Numbered>],
        tensor: &str,
        told: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Vec<Blame>> {
        let mut out = Vec::new();
        let mut before: Option<Holder> = None;
        for version in versions {
            told()?;
            let now = self.contents(version)?.tensors.remove(tensor);
            let change = match (&before, &now) {
                (Some(a), Some(b)) => Some(compare(tensor.to_owned(), a, b)?),
                (None, Some(_)) | (Some(_), None) => None,
                (None, None) => continue,
            };
            if change
                .as_ref()
                .is_none_or(|c| c.changed > 0.0 || c.differs_in.is_some())
            {
                out.push(Blame {
                    version: version.clone(),
                    there: now.is_some(),
                    change,
                });
            }
            before = now;
        }
        match out.is_empty() {
            true => Err(Error::new(
                Kind::NotFound,
                format!("none of these versions has a tensor {tensor:?} (`zspace tensors` lists them)"),
            )),
            false => Ok(out),
        }
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
        largest: Some(0.0),
        norm: 0.0,
        differs_in: None,
    };
    if (ta.dtype, &ta.shape) != (tb.dtype, &tb.shape) || ta.span.1 != tb.span.1 {
        let why = format!("{} {:?} became {} {:?}", ta.dtype, ta.shape, tb.dtype, tb.shape);
        (out.changed, out.relative_norm, out.largest) = (1.0, None, None);
        out.differs_in = Some(why);
        return Ok(out);
    }
    let size = tb.dtype.size();
    let (mut at, mut changed, mut total) = (0, 0u64, 0u64);
    let (mut moved, mut norm, mut largest) = (0f64, 0f64, 0f64);
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
                largest = largest.max((v - u).abs());
            }
        }
        at += n as u64;
    }
    out.changed = if total == 0 {
        0.0
    } else {
        changed as f64 / total as f64
    };
    out.norm = norm;
    out.largest = is_number(tb.dtype).then_some(largest);
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

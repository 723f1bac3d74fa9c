//! A layout: how one file is put together from chunks, and which tensors lie where in it.

use crate::error::{Error, Result};
use crate::tensor::{Dtype, Number, contiguous_strides, elements};
use std::collections::HashSet;

/// The longest chunk a layout may plan, in bytes: the codecs' own limit.
pub(super) const MAX_CHUNK: u32 = 16 << 20;

/// The most dimensions of a tensor: torch and NumPy stop there too.
pub(super) const MAX_DIMS: usize = 64;

/// Which parser understood the file. The number is the one on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// None: content-defined chunks.
    Opaque = 0,
    /// A safetensors file.
    Safetensors = 1,
    /// A zip as `torch.save` writes it.
    Torch = 2,
    /// A NumPy array.
    Npy = 3,
    /// A zip of NumPy arrays.
    Npz = 4,
}

impl Format {
    /// The format with this number on disk.
    pub fn from_tag(tag: u8) -> Option<Self> {
        [
            Format::Opaque,
            Format::Safetensors,
            Format::Torch,
            Format::Npy,
            Format::Npz,
        ]
        .get(usize::from(tag))
        .copied()
    }
}

/// One chunk of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPlan {
    /// Bytes, at least 1 and at most 16 MiB.
    pub len: u32,
    /// What a codec should take the bytes for.
    pub number: Number,
}

/// A stretch of the file that lies in one piece in a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Index into [`Layout::chunks`].
    pub chunk: u32,
    /// Where the stretch starts in the chunk, in bytes.
    pub offset: u32,
    /// Bytes, at least 1.
    pub len: u32,
}

/// A data area of the file: a safetensors tensor, a torch storage, the body of an npy file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Where it starts in the file, in bytes.
    pub offset: u64,
    /// Bytes; may be 0.
    pub len: u64,
    /// What it holds.
    pub dtype: Dtype,
    /// Its name, percent-encoded (docs/FORMAT.md, "Names").
    pub name: String,
}

/// A tensor: a view of a region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its name, percent-encoded; no two tensors of a layout share one.
    pub name: String,
    /// Index into [`Layout::regions`].
    pub region: u32,
    /// Where its first element lies in the region, in bytes.
    pub byte_offset: u64,
    /// What its elements are.
    pub dtype: Dtype,
    /// Elements per dimension; empty for a scalar.
    pub shape: Vec<u64>,
    /// Elements to step per dimension, as many as `shape` has.
    pub strides: Vec<u64>,
}

/// How a file is cut into chunks and which tensors it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Which parser understood the file.
    pub format: Format,
    /// Length of the file in bytes.
    pub len: u64,
    /// The chunks, numbered in the order of their first byte in the file.
    pub chunks: Vec<ChunkPlan>,
    /// The file in order, every byte once; the extents of one chunk fill it front to back.
    pub extents: Vec<Extent>,
    /// Data areas in file order, disjoint.
    pub regions: Vec<Region>,
    /// The tensors, in the order the file names them.
    pub tensors: Vec<Tensor>,
    /// The safetensors `__metadata__`, in the file's order.
    pub metadata: Vec<(String, String)>,
}

impl Tensor {
    /// The number of elements.
    pub fn elements(&self) -> u64 {
        elements(&self.shape).unwrap_or(u64::MAX)
    }

    /// Whether the elements lie one after the other in row-major order (strides of dimensions of size 1 do not matter).
    pub fn is_contiguous(&self) -> bool {
        self.packed(self.shape.iter().zip(&self.strides).rev())
    }

    /// Whether the elements lie one after the other in column-major (Fortran) order.
    pub fn is_fortran(&self) -> bool {
        self.packed(self.shape.iter().zip(&self.strides))
    }

    fn packed<'a>(&self, fastest_first: impl Iterator<Item = (&'a u64, &'a u64)>) -> bool {
        let mut step = 1u64;
        for (&dim, &stride) in fastest_first {
            if dim > 1 && stride != step {
                return self.shape.contains(&0);
            }
            step = step.saturating_mul(dim);
        }
        true
    }

    /// Bytes from the first element to the last one touched; `None` if that overflows.
    pub(super) fn span_len(&self) -> Option<u64> {
        if elements(&self.shape)? == 0 {
            return Some(0);
        }
        let mut last = 0u64;
        for (dim, stride) in self.shape.iter().zip(&self.strides) {
            last = last.checked_add((dim - 1).checked_mul(*stride)?)?;
        }
        last.checked_add(1)?.checked_mul(self.dtype.size() as u64)
    }
}

impl Layout {
    /// The layout of a file without structure, cut into chunks of these lengths.
    ///
    /// # Errors
    /// `Damage` if a length is 0 or beyond 16 MiB.
    pub fn opaque(chunk_lens: &[u32]) -> Result<Layout> {
        let chunk = |(i, len): (usize, &u32)| Extent {
            chunk: i as u32,
            offset: 0,
            len: *len,
        };
        let layout = Layout {
            format: Format::Opaque,
            len: chunk_lens.iter().map(|l| u64::from(*l)).sum(),
            chunks: chunk_lens
                .iter()
                .map(|len| ChunkPlan {
                    len: *len,
                    number: Number::Bytes,
                })
                .collect(),
            extents: chunk_lens.iter().enumerate().map(chunk).collect(),
            regions: vec![],
            tensors: vec![],
            metadata: vec![],
        };
        layout.check()?;
        Ok(layout)
    }

    /// The bytes a tensor touches: file offset of its first element, and bytes up to the end of its last one.
    /// A tensor of another layout gives an empty span.
    pub fn tensor_span(&self, t: &Tensor) -> (u64, u64) {
        let Some(region) = self.regions.get(t.region as usize) else {
            return (0, 0);
        };
        (region.offset + t.byte_offset, t.span_len().unwrap_or(0))
    }

    /// Checks everything the rest of the program takes for granted about a layout.
    pub(super) fn check(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::damage(format!("layout: {what}")));
        if self.chunks.len() > u32::MAX as usize || self.regions.len() > u32::MAX as usize {
            return bad("too many parts");
        }
        let mut filled: Vec<u32> = Vec::with_capacity(self.chunks.len());
        let (mut total, mut previous) = (0u64, None);
        for e in &self.extents {
            if e.chunk as usize == filled.len() {
                filled.push(0);
            }
            let Some(fill) = filled.get_mut(e.chunk as usize) else {
                return bad("chunks are not numbered in file order");
            };
            if e.len == 0 || e.offset != *fill || previous == Some(e.chunk) {
                return bad("extents do not fill their chunks in order");
            }
            match fill.checked_add(e.len) {
                Some(n) if n <= MAX_CHUNK => *fill = n,
                _ => return bad("a chunk is too long"),
            }
            previous = Some(e.chunk);
            total += u64::from(e.len);
        }
        if total != self.len || !filled.iter().eq(self.chunks.iter().map(|c| &c.len)) {
            return bad("extents do not cover the file");
        }
        let mut end = 0u64;
        for r in &self.regions {
            match r.offset.checked_add(r.len) {
                Some(e) if r.offset >= end && e <= self.len => end = e,
                _ => return bad("regions overlap or leave the file"),
            }
        }
        let mut names = HashSet::with_capacity(self.tensors.len());
        for t in &self.tensors {
            self.check_tensor(t)?;
            if !names.insert(t.name.as_str()) {
                return bad("two tensors share a name");
            }
        }
        let named = self
            .tensors
            .iter()
            .map(|t| &t.name)
            .chain(self.regions.iter().map(|r| &r.name));
        for name in named {
            if !super::names::is_encoded(name) {
                return bad("a name is malformed");
            }
        }
        if self.format == Format::Opaque && !(self.regions.is_empty() && self.tensors.is_empty()) {
            return bad("an opaque file has no regions");
        }
        if self.format != Format::Safetensors && !self.metadata.is_empty() {
            return bad("only safetensors files have metadata");
        }
        Ok(())
    }

    fn check_tensor(&self, t: &Tensor) -> Result<()> {
        let region = self.regions.get(t.region as usize);
        let span = if t.shape.len() == t.strides.len() {
            t.span_len()
        } else {
            None
        };
        match (region, span.and_then(|n| n.checked_add(t.byte_offset))) {
            (Some(r), Some(end)) if end <= r.len => Ok(()),
            _ => Err(Error::damage(format!(
                "layout: tensor {} leaves its region",
                t.name
            ))),
        }
    }
}

/// Whether the strides are what [`contiguous_strides`] gives: then they need not be written down.
pub(super) fn plain_strides(t: &Tensor) -> bool {
    t.strides == contiguous_strides(&t.shape)
}

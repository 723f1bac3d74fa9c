//! Files of versions and their views, as doors read them.

use super::Slice;
use crate::error::{Error, IoContext, Kind, Result};
use crate::format::{self, Format, Virtual};
use crate::rebuild::{AHEAD, StoredFile, VirtualFile};
use crate::tensor::Dtype;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Bytes copied at a time.
const STEP: usize = 1 << 20;

/// A file of a version, or a view of one: random access, rebuilt chunk by chunk through the shared cache.
pub struct FileView {
    body: Body,
    torch_paths: OnceLock<Arc<TensorPaths>>,
    npy_paths: OnceLock<Arc<TensorPaths>>,
    /// Where its tensors lie, in order.
    spans: OnceLock<Vec<Range<u64>>>,
}

/// Path components of tensors' files, each with the tensor's place.
pub type TensorPaths = Vec<(Vec<String>, usize)>;

enum Body {
    Stored(Arc<StoredFile>),
    Laid(VirtualFile),
}

/// Which single-tensor files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum View {
    /// `.pt`, for `torch.load`.
    Torch,
    /// `.npy`, for `np.load`.
    Npy,
}

/// A tensor of a checkpoint file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name: nested keys joined by `/`, percent-encoded where they need it; no two of a file share one.
    pub name: String,
    /// Its name as the file has it.
    pub true_name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Whether its elements lie one after another.
    pub contiguous: bool,
    /// The bytes it spans in the file: offset and length.
    pub span: (u64, u64),
}

impl FileView {
    pub(super) fn stored(file: Arc<StoredFile>) -> Self {
        FileView {
            body: Body::Stored(file),
            torch_paths: OnceLock::new(),
            npy_paths: OnceLock::new(),
            spans: OnceLock::new(),
        }
    }

    fn laid(file: &Arc<StoredFile>, plan: Virtual) -> Arc<Self> {
        let body = Body::Laid(VirtualFile::new(file.clone(), plan));
        Arc::new(FileView {
            body,
            torch_paths: OnceLock::new(),
            npy_paths: OnceLock::new(),
            spans: OnceLock::new(),
        })
    }

    /// Bytes of memory it takes, roughly.
    pub(super) fn weight(&self) -> u64 {
        match &self.body {
            Body::Stored(f) => {
                let l = f.layout();
                256 + (l.chunks.len() * 48 + l.extents.len() * 20 + (l.tensors.len() + l.regions.len()) * 200)
                    as u64
            }
            Body::Laid(_) => 1024,
        }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        match &self.body {
            Body::Stored(f) => f.len(),
            Body::Laid(f) => f.len(),
        }
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Up to `len` bytes at `offset`, fewer only at the end. A part of one shared chunk where the range lies in one.
    pub fn read(&self, offset: u64, len: usize) -> Result<Slice> {
        match &self.body {
            Body::Stored(f) => f.read(offset, len),
            Body::Laid(f) => f.read(offset, len),
        }
    }

    /// The bytes of the tensor that lies at `offset`, if one does. The file of a view is as if all of it were one.
    pub fn tensor_around(&self, offset: u64) -> Option<Range<u64>> {
        let Body::Stored(f) = &self.body else {
            return Some(0..self.len());
        };
        let spans = self.spans.get_or_init(|| {
            let layout = f.layout();
            let span = |t: &format::Tensor| {
                let (start, len) = layout.tensor_span(t);
                start..start.saturating_add(len)
            };
            let mut spans: Vec<_> = layout.tensors.iter().map(span).collect();
            spans.sort_unstable_by_key(|s| (s.start, s.end));
            spans
        });
        let before = spans.partition_point(|s| s.start <= offset);
        let span = spans.get(before.checked_sub(1)?)?;
        span.contains(&offset).then(|| span.clone())
    }

    /// Starts rebuilding the chunks of a range in the background.
    pub fn read_ahead(&self, offset: u64, len: usize) {
        match &self.body {
            Body::Stored(f) => f.read_ahead(offset, len as u64),
            Body::Laid(f) => f.read_ahead(offset, len as u64),
        }
    }

    /// Writes the bytes of a range, all of which must be there; `told` hears of them, and ends it with an error.
    pub fn copy_to(
        &self,
        range: Range<u64>,
        out: &mut dyn Write,
        told: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<()> {
        // What is large goes past the buffer, from the chunk where it is.
        let mut out = BufWriter::with_capacity(STEP / 16, out);
        let mut at = range.start;
        // Parts may be small and many: those ahead are not gone through again for each.
        let mut ask_at = at;
        while at < range.end {
            let left = usize::try_from(range.end - at).unwrap_or(usize::MAX);
            if left > STEP && at >= ask_at {
                self.read_ahead(at, left.min(AHEAD));
                ask_at = at + STEP as u64;
            }
            let bytes = match &self.body {
                Body::Stored(f) => f.read_part(at, left.min(STEP))?,
                Body::Laid(f) => f.read(at, left.min(STEP))?,
            };
            if bytes.is_empty() {
                return Err(Error::damage("file ends early"));
            }
            out.write_all(&bytes).doing(|| "write".to_owned())?;
            at += bytes.len() as u64;
            told(bytes.len() as u64)?;
        }
        out.flush().doing(|| "write".to_owned())
    }

    fn source(&self) -> Result<&Arc<StoredFile>> {
        match &self.body {
            Body::Stored(f) => Ok(f),
            Body::Laid(_) => Err(Error::new(Kind::Usage, "a view has no views of its own")),
        }
    }

    /// Bytes of its chunks in the packs, bases not counted.
    pub fn stored_bytes(&self) -> Result<u64> {
        self.source()?.stored()
    }

    /// Bytes in the packs, bases not counted, and deltas to apply for the chunks of a range.
    pub fn stored_range(&self, offset: u64, len: u64) -> Result<(u64, u8)> {
        self.source()?.stored_range(offset, len)
    }

    /// What the file is: `safetensors`, `torch`, `npy`, `npz` or `opaque`.
    pub fn format(&self) -> &'static str {
        match &self.body {
            Body::Stored(f) => match f.layout().format {
                Format::Opaque => "opaque",
                Format::Safetensors => "safetensors",
                Format::Torch => "torch",
                Format::Npy => "npy",
                Format::Npz => "npz",
            },
            Body::Laid(_) => "view",
        }
    }

    /// Its tensors, in the file's order.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        let Body::Stored(f) = &self.body else {
            return Vec::new();
        };
        let layout = f.layout();
        let info = |t: &format::Tensor| TensorInfo {
            name: t.name.clone(),
            true_name: format::true_name(&t.name),
            dtype: t.dtype,
            shape: t.shape.clone(),
            contiguous: t.is_contiguous(),
            span: layout.tensor_span(t),
        };
        layout.tensors.iter().map(info).collect()
    }

    /// One of its tensors.
    pub fn tensor(&self, i: usize) -> Option<TensorInfo> {
        let Body::Stored(f) = &self.body else { return None };
        let layout = f.layout();
        let t = layout.tensors.get(i)?;
        let (contiguous, span) = (t.is_contiguous(), layout.tensor_span(t));
        Some(TensorInfo {
            name: t.name.clone(),
            true_name: format::true_name(&t.name),
            dtype: t.dtype,
            shape: t.shape.clone(),
            contiguous,
            span,
        })
    }

    /// The numbers that it says of itself.
    pub(super) fn facts(&self) -> Result<Vec<(String, f64)>> {
        format::facts(&**self.source()?)
    }

    /// Whether it has tensors.
    pub fn has_tensors(&self) -> bool {
        matches!(&self.body, Body::Stored(f) if !f.layout().tensors.is_empty())
    }

    /// The path of each tensor's file below the file's directory, and its place in [`FileView::tensors`]; sorted.
    pub fn tensor_paths(&self, view: View) -> Arc<TensorPaths> {
        let (slot, suffix) = match view {
            View::Torch => (&self.torch_paths, ".pt"),
            View::Npy => (&self.npy_paths, ".npy"),
        };
        let make = || {
            let Body::Stored(f) = &self.body else {
                return Arc::default();
            };
            let names = f.layout().tensors.iter().enumerate();
            let mut paths: Vec<_> = names
                .map(|(i, t)| (format::file_name(&t.name, suffix), i))
                .collect();
            paths.sort();
            Arc::new(paths)
        };
        slot.get_or_init(make).clone()
    }

    /// A tensor as a torch file of its own.
    pub fn torch_view(&self, tensor: usize) -> Result<Arc<FileView>> {
        let f = self.source()?;
        let crc = f
            .crcs()
            .get(tensor)
            .ok_or_else(|| Error::new(Kind::NotFound, "no such tensor"))?;
        Ok(Self::laid(f, format::torch_file(f.layout(), tensor, *crc)?))
    }

    /// A tensor as a NumPy file. `Refused` if it would be larger than its storage.
    pub fn npy_view(&self, tensor: usize) -> Result<Arc<FileView>> {
        let f = self.source()?;
        Ok(Self::laid(f, format::npy_file(f.layout(), tensor)?))
    }

    /// All tensors as one safetensors file. `Refused` if the format cannot hold one of them.
    pub fn safetensors_view(&self) -> Result<Arc<FileView>> {
        let f = self.source()?;
        Ok(Self::laid(f, format::safetensors_file(f.layout())?))
    }
}

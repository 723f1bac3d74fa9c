//! A file that is laid out from pieces of another: a tensor as a torch or NumPy file, a checkpoint as safetensors.

use super::file::{Slice, StoredFile};
use crate::error::Result;
use crate::format::{Piece, Virtual};
use std::sync::Arc;

/// A laid-out file over the stored one; a range read rebuilds only the chunks it touches.
pub struct VirtualFile {
    file: Arc<StoredFile>,
    plan: Virtual,
}

impl VirtualFile {
    /// A file of the plan's pieces.
    pub fn new(file: Arc<StoredFile>, plan: Virtual) -> Self {
        VirtualFile { file, plan }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.plan.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.plan.len == 0
    }

    /// Up to `len` bytes at `offset`, fewer only at the end of the file. What lies in one chunk is not copied.
    pub fn read(&self, offset: u64, len: usize) -> Result<Slice> {
        let end = offset.saturating_add(len as u64).min(self.plan.len);
        if offset >= end {
            return Ok(Slice::Owned(Vec::new()));
        }
        let mut pieces = self.plan.range(offset, end);
        if let (Some((start, _, Piece::File { offset: at, .. })), None) = (pieces.next(), pieces.next()) {
            return self.file.read(at + (offset - start), (end - offset) as usize);
        }
        let mut out = vec![0; (end - offset) as usize];
        self.plan.read_at(&*self.file, offset, &mut out)?;
        Ok(Slice::Owned(out))
    }

    /// Starts rebuilding, in the background, the chunks that a range needs.
    pub fn read_ahead(&self, offset: u64, len: u64) {
        let to = offset.saturating_add(len).min(self.plan.len);
        for (start, end, piece) in self.plan.range(offset.min(to), to) {
            if let Piece::File { offset: at, .. } = piece {
                let from = offset.max(start);
                self.file.read_ahead(at + (from - start), end.min(to) - from);
            }
        }
    }
}

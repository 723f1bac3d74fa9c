//! A file made of pieces, none of which is built before it is read.

use super::gather;
use super::source::Source;
use crate::error::{Error, Result};

/// One stretch of a [`Virtual`] file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// These bytes.
    Bytes(Vec<u8>),
    /// Bytes of the underlying file as they are.
    File {
        /// Where they start in the underlying file.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Elements of the underlying file, collected in row-major order.
    Gather {
        /// Where the first element starts in the underlying file, in bytes.
        offset: u64,
        /// Bytes of one element.
        item: u32,
        /// Elements per dimension.
        shape: Vec<u64>,
        /// Elements to step per dimension.
        strides: Vec<u64>,
    },
}

/// A file laid out over an underlying file.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Virtual {
    /// Length in bytes.
    pub len: u64,
    /// Where each piece starts, and the piece; in order, without gaps; none is empty.
    pub pieces: Vec<(u64, Piece)>,
}

impl Virtual {
    /// Adds a piece of `len` bytes at the end; an empty one is left out.
    pub(super) fn push(&mut self, len: u64, piece: Piece) {
        if len > 0 {
            self.pieces.push((self.len, piece));
            self.len = self.len.saturating_add(len);
        }
    }

    /// Adds bytes at the end; stretches of bytes grow together.
    pub(super) fn push_bytes(&mut self, bytes: Vec<u8>) {
        match self.pieces.last_mut() {
            Some((_, Piece::Bytes(last))) => {
                self.len += bytes.len() as u64;
                last.extend_from_slice(&bytes);
            }
            _ => self.push(bytes.len() as u64, Piece::Bytes(bytes)),
        }
    }

    /// The pieces that hold any of the bytes from `from` up to `to`, with where each starts and ends.
    pub fn range(&self, from: u64, to: u64) -> impl Iterator<Item = (u64, u64, &Piece)> {
        let first = self
            .pieces
            .partition_point(|(start, _)| *start <= from)
            .saturating_sub(1);
        let ends = self
            .pieces
            .iter()
            .skip(first + 1)
            .map(|(start, _)| *start)
            .chain([self.len]);
        let pieces = self.pieces[first..]
            .iter()
            .zip(ends)
            .map(|((start, piece), end)| (*start, end, piece));
        pieces
            .skip_while(move |(_, end, _)| *end <= from)
            .take_while(move |(start, _, _)| *start < to)
    }

    /// Fills `buf` with the bytes at `offset`, taking what it needs from the underlying file.
    ///
    /// # Errors
    /// `Damage` if the range leaves the file; whatever the underlying file's reads report.
    pub fn read_at(&self, file: &dyn Source, offset: u64, buf: &mut [u8]) -> Result<()> {
        let to = offset.checked_add(buf.len() as u64).filter(|to| *to <= self.len);
        let to = to.ok_or_else(|| Error::damage("read beyond the end of a view"))?;
        let mut rest = buf;
        for (start, end, piece) in self.range(offset, to) {
            let (a, b) = (offset.max(start), to.min(end));
            let (head, tail) = rest.split_at_mut((b - a) as usize);
            let skip = a - start;
            match piece {
                Piece::Bytes(bytes) => bytes.as_slice().read_at(skip, head)?,
                Piece::File { offset, .. } => file.read_at(offset.saturating_add(skip), head)?,
                Piece::Gather {
                    offset,
                    item,
                    shape,
                    strides,
                } => {
                    gather::Gather {
                        offset: *offset,
                        item: u64::from(*item),
                        shape,
                        strides,
                    }
                    .read(file, skip, head)?;
                }
            }
            rest = tail;
        }
        Ok(())
    }
}

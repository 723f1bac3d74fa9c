//! The bytes a parser reads, and the two ways it can stop.

use crate::error::{Error, Result};
use std::io;

/// A file of known length that can be read anywhere.
pub trait Source {
    /// Length in bytes.
    fn len(&self) -> u64;

    /// Fills `buf` with the bytes at `offset`; all of them lie within [`Source::len`].
    ///
    /// # Errors
    /// Whatever keeps the bytes from being read.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;

    /// Whether there is no byte at all.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Source for [u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let from = usize::try_from(offset).ok();
        let found = from.and_then(|from| self.get(from..from.checked_add(buf.len())?));
        match found {
            Some(bytes) => {
                buf.copy_from_slice(bytes);
                Ok(())
            }
            None => Err(Error::damage("read beyond the end of the source")),
        }
    }
}

impl Source for Vec<u8> {
    fn len(&self) -> u64 {
        Source::len(self.as_slice())
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.as_slice().read_at(offset, buf)
    }
}

/// Why a parser stopped: the content is not what it understands, or the source could not be read.
#[derive(Debug)]
pub(super) enum Stop {
    Odd(String),
    Io(Error),
}

impl From<Error> for Stop {
    fn from(e: Error) -> Self {
        Stop::Io(e)
    }
}

/// The result of a parser.
pub(super) type Parse<T> = std::result::Result<T, Stop>;

/// A [`Stop::Odd`] with a reason.
pub(super) fn odd<T>(why: impl Into<String>) -> Parse<T> {
    Err(Stop::Odd(why.into()))
}

/// Reads `len` bytes at `offset` after checking that the source has them, so that nothing is allocated on a claim alone.
pub(super) fn take(src: &dyn Source, offset: u64, len: u64, what: &str) -> Parse<Vec<u8>> {
    let fits = offset.checked_add(len).is_some_and(|end| end <= src.len());
    let (true, Ok(n)) = (fits, usize::try_from(len)) else {
        return odd(format!("{what} ends beyond the file"));
    };
    let mut buf = vec![0; n];
    src.read_at(offset, &mut buf)?;
    Ok(buf)
}

/// A stretch of a source as a stream, for parsers that need no more than a window. An error of the source is kept aside,
/// so that it can be told from an error of the content.
pub(super) struct Stretch<'a> {
    src: &'a dyn Source,
    at: u64,
    end: u64,
    pub(super) failed: Option<Error>,
}

impl<'a> Stretch<'a> {
    /// The bytes from `at` to `end`, which must lie within the source.
    pub(super) fn new(src: &'a dyn Source, at: u64, end: u64) -> Self {
        Self {
            src,
            at,
            end,
            failed: None,
        }
    }
}

impl io::Read for Stretch<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = usize::try_from(self.end - self.at)
            .unwrap_or(usize::MAX)
            .min(buf.len());
        if let Err(e) = self.src.read_at(self.at, &mut buf[..n]) {
            self.failed = Some(e);
            return Err(io::Error::other("source"));
        }
        self.at += n as u64;
        Ok(n)
    }
}

//! A bounded little-endian reader and writer for everything zspace puts on disk.
//!
//! Integers are little-endian; `varint` is unsigned LEB128 of at most 64 bits in its shortest form, so that equal values have
//! equal bytes (docs/FORMAT.md, "Conventions").

use crate::error::{Error, Result};

/// Appends fields to a byte vector.
#[derive(Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// An empty writer.
    pub fn new() -> Self {
        Self::default()
    }

    /// One byte.
    pub fn u8(&mut self, v: u8) -> &mut Self {
        self.0.push(v);
        self
    }

    /// Two bytes.
    pub fn u16(&mut self, v: u16) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }

    /// Four bytes.
    pub fn u32(&mut self, v: u32) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }

    /// Eight bytes.
    pub fn u64(&mut self, v: u64) -> &mut Self {
        self.raw(&v.to_le_bytes())
    }

    /// A variable-length unsigned integer.
    pub fn varint(&mut self, mut v: u64) -> &mut Self {
        while v >= 0x80 {
            self.0.push(v as u8 | 0x80);
            v >>= 7;
        }
        self.u8(v as u8)
    }

    /// Bytes as they are.
    pub fn raw(&mut self, b: &[u8]) -> &mut Self {
        self.0.extend_from_slice(b);
        self
    }

    /// A varint length, then the bytes.
    pub fn blob(&mut self, b: &[u8]) -> &mut Self {
        self.varint(b.len() as u64).raw(b)
    }

    /// What has been written.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Takes fields off the front of a byte slice; every shortfall is damage, never a panic.
#[derive(Clone)]
pub struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    /// Reads from `bytes`; `what` names the structure in errors.
    pub fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { rest: bytes, what }
    }

    fn short(&self) -> Error {
        Error::damage(format!("{} is truncated", self.what))
    }

    /// Bytes not read yet.
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// The next `n` bytes.
    pub fn raw(&mut self, n: usize) -> Result<&'a [u8]> {
        let (head, rest) = self.rest.split_at_checked(n).ok_or_else(|| self.short())?;
        self.rest = rest;
        Ok(head)
    }

    /// The next `N` bytes.
    pub fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or_else(|| self.short())?;
        self.rest = rest;
        Ok(*head)
    }

    /// One byte.
    pub fn u8(&mut self) -> Result<u8> {
        Ok(self.fixed::<1>()?[0])
    }

    /// Two bytes.
    pub fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.fixed()?))
    }

    /// Four bytes.
    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.fixed()?))
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.fixed()?))
    }

    /// A 32-byte identifier.
    pub fn id(&mut self) -> Result<[u8; 32]> {
        self.fixed()
    }

    /// A variable-length unsigned integer in its shortest form.
    pub fn varint(&mut self) -> Result<u64> {
        let mut v = 0u64;
        for shift in (0..64).step_by(7) {
            let b = self.u8()?;
            if shift == 63 && b > 1 || b == 0 && shift > 0 {
                break;
            }
            v |= u64::from(b & 0x7f) << shift;
            if b < 0x80 {
                return Ok(v);
            }
        }
        Err(Error::damage(format!("{} has a malformed varint", self.what)))
    }

    /// A varint that counts things of at least `min_size` bytes each, all still to come: bounds what may be allocated.
    pub fn count(&mut self, min_size: usize) -> Result<usize> {
        let n = self.varint()?;
        match usize::try_from(n) {
            Ok(n) if n <= self.rest.len() / min_size.max(1) => Ok(n),
            _ => Err(self.short()),
        }
    }

    /// A varint length, then that many bytes.
    pub fn blob(&mut self) -> Result<&'a [u8]> {
        let n = self.count(1)?;
        self.raw(n)
    }

    /// A blob that must be UTF-8.
    pub fn text(&mut self) -> Result<&'a str> {
        let what = self.what;
        std::str::from_utf8(self.blob()?)
            .map_err(|_| Error::damage(format!("{what} has text that is not UTF-8")))
    }

    /// Fails unless everything was read.
    pub fn finish(self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            n => Err(Error::damage(format!("{} has {n} bytes too many", self.what))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn varint_round_trips(v: u64, rest: Vec<u8>) {
            let mut w = Writer::new();
            w.varint(v).raw(&rest);
            let b = w.finish();
            let mut r = Reader::new(&b, "test");
            prop_assert_eq!(r.varint().unwrap(), v);
            prop_assert_eq!(r.remaining(), rest.len());
        }

        #[test]
        fn whatever_is_accepted_is_canonical(b: Vec<u8>) {
            let mut r = Reader::new(&b, "test");
            if let Ok(v) = r.varint() {
                let mut w = Writer::new();
                w.varint(v);
                prop_assert_eq!(&b[..b.len() - r.remaining()], &w.finish()[..]);
            }
        }
    }

    #[test]
    fn counts_cannot_exceed_what_is_there() {
        let mut w = Writer::new();
        w.varint(1 << 60);
        let b = w.finish();
        assert!(Reader::new(&b, "test").count(1).is_err());
        assert!(Reader::new(&b, "test").blob().is_err());
    }
}

//! Reads NumPy files: one array (npy), or a zip of stored ones (npz).
//!
//! Source: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>, versions 1.0 to 3.0. The header is a
//! Python dict, of which exactly the form that NumPy writes is read.

use super::layout::{Format, MAX_DIMS, Region, Tensor};
use super::names::encode;
use super::plan::Parts;
use super::source::{Parse, Source, Stop, odd, take};
use super::zip::Member;
use crate::tensor::{Dtype, contiguous_strides, elements};

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// The longest header that is read, in bytes; NumPy itself stops at 10,000 unless told otherwise.
const MAX_HEADER: u64 = 1 << 16;

/// An array as its header describes it.
#[derive(Debug, PartialEq)]
struct Array {
    dtype: Dtype,
    fortran: bool,
    shape: Vec<u64>,
}

/// What the first bytes of an npy file say.
pub(super) struct Header {
    /// Where the header's text starts and the data starts, from the file's beginning.
    text: u64,
    pub(super) data: u64,
}

/// Reads the length of the header of what starts at `at` and ends at `end`; `None` if it is no npy file.
pub(super) fn header(src: &dyn Source, at: u64, end: u64) -> Parse<Option<Header>> {
    let have = end.saturating_sub(at).min(12);
    let head = take(src, at, have, "npy")?;
    let Some([major, _minor, rest @ ..]) = head.strip_prefix(MAGIC) else {
        return Ok(None);
    };
    let (text, len) = match (major, rest) {
        (1, [a, b, ..]) => (10, u64::from(u16::from_le_bytes([*a, *b]))),
        (2 | 3, [a, b, c, d, ..]) => (12, u64::from(u32::from_le_bytes([*a, *b, *c, *d]))),
        (1..=3, _) => (12, 0),
        _ => return odd("npy: unknown version"),
    };
    Ok(Some(Header {
        text,
        data: text + len,
    }))
}

/// The bytes of data that the header promises; `None` if it is not understood.
pub(super) fn promised(src: &dyn Source, header: &Header) -> Parse<Option<u64>> {
    let array = read_array(src, 0, header)?;
    Ok(elements(&array.shape).and_then(|n| n.checked_mul(array.dtype.size() as u64)))
}

/// Splits an npy file; `None` if it does not start like one.
pub(super) fn parse(src: &dyn Source) -> Parse<Option<Parts>> {
    let Some(header) = header(src, 0, src.len())? else {
        return Ok(None);
    };
    let mut parts = Parts {
        format: Format::Npy,
        regions: vec![],
        tensors: vec![],
        metadata: vec![],
    };
    add(src, 0, src.len(), &header, "array".to_owned(), &mut parts)?;
    Ok(Some(parts))
}

/// Splits an npz file; `None` if the zip has no member that could be an array.
pub(super) fn parse_npz(src: &dyn Source, members: &[Member]) -> Parse<Option<Parts>> {
    let mut parts = Parts {
        format: Format::Npz,
        regions: vec![],
        tensors: vec![],
        metadata: vec![],
    };
    let mut why = None;
    for m in members.iter().filter(|m| m.stored) {
        let Some(stem) = m.name.strip_suffix(b".npy") else {
            continue;
        };
        let end = m.offset + m.len;
        let added = match header(src, m.offset, end) {
            Ok(None) => continue,
            Ok(Some(h)) => add(src, m.offset, end, &h, encode(stem), &mut parts),
            Err(stop) => Err(stop),
        };
        match added {
            // An array of objects, say: its bytes stay structural.
            Err(Stop::Odd(reason)) => why = Some(reason),
            other => other?,
        }
    }
    match (parts.regions.is_empty(), why) {
        (false, _) => Ok(Some(parts)),
        (true, Some(why)) => odd(why),
        (true, None) => Ok(None),
    }
}

/// Adds the array between `at` and `end` as a region and a tensor.
fn add(src: &dyn Source, at: u64, end: u64, header: &Header, name: String, parts: &mut Parts) -> Parse<()> {
    if at + header.data > end {
        return odd("npy: the header ends beyond the file");
    }
    let Array {
        dtype,
        fortran,
        shape,
    } = read_array(src, at, header)?;
    let (offset, len) = (at + header.data, end - at - header.data);
    if elements(&shape).and_then(|n| n.checked_mul(dtype.size() as u64)) != Some(len) {
        return odd("npy: the data is not as long as the header says");
    }
    let strides = if fortran {
        let reversed: Vec<u64> = shape.iter().rev().copied().collect();
        contiguous_strides(&reversed).into_iter().rev().collect()
    } else {
        contiguous_strides(&shape)
    };
    let region = parts.regions.len() as u32;
    parts.regions.push(Region {
        offset,
        len,
        dtype,
        name: name.clone(),
    });
    parts.tensors.push(Tensor {
        name,
        region,
        byte_offset: 0,
        dtype,
        shape,
        strides,
    });
    Ok(())
}

fn read_array(src: &dyn Source, at: u64, header: &Header) -> Parse<Array> {
    if header.data - header.text > MAX_HEADER {
        return odd("npy: the header is too long");
    }
    let text = take(
        src,
        at + header.text,
        header.data - header.text,
        "npy: the header",
    )?;
    Literal { rest: &text }
        .array()
        .ok_or_else(|| Stop::Odd("npy: the header is not understood".to_owned()))
}

/// A reader of the one Python literal that a header is.
struct Literal<'a> {
    rest: &'a [u8],
}

impl<'a> Literal<'a> {
    /// `{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }` and spaces up to the line's end.
    fn array(mut self) -> Option<Array> {
        let (mut dtype, mut fortran, mut shape) = (None, None, None);
        self.expect(b"{")?;
        while self.expect(b"}").is_none() {
            let again = match self.string()? {
                b"descr" => {
                    self.expect(b":")?;
                    let name = self.string()?;
                    // Two dtypes may share a descriptor (bf16 travels as <u2): the first is NumPy's own.
                    let found = Dtype::ALL.iter().find(|d| d.npy().as_bytes() == name)?;
                    dtype.replace(*found).is_some()
                }
                b"fortran_order" => {
                    self.expect(b":")?;
                    let yes = self.expect(b"True").is_some();
                    if !yes {
                        self.expect(b"False")?;
                    }
                    fortran.replace(yes).is_some()
                }
                b"shape" => {
                    self.expect(b":")?;
                    shape.replace(self.shape()?).is_some()
                }
                _ => return None,
            };
            if again || self.expect(b",").is_none() && self.rest.first() != Some(&b'}') {
                return None;
            }
        }
        let done = self.rest.is_empty();
        Some(Array {
            dtype: dtype?,
            fortran: fortran?,
            shape: shape?,
        })
        .filter(|_| done)
    }

    /// Takes `token` and the white space after it.
    fn expect(&mut self, token: &[u8]) -> Option<()> {
        self.rest = self.rest.strip_prefix(token)?.trim_ascii_start();
        Some(())
    }

    fn string(&mut self) -> Option<&'a [u8]> {
        let quote = *self.rest.first().filter(|c| matches!(c, b'\'' | b'"'))?;
        let len = self.rest[1..].iter().position(|c| *c == quote)?;
        let (found, rest) = self.rest[1..].split_at(len);
        self.rest = rest;
        self.expect(&[quote])?;
        Some(found).filter(|s| !s.contains(&b'\\'))
    }

    fn shape(&mut self) -> Option<Vec<u64>> {
        let mut shape = Vec::new();
        self.expect(b"(")?;
        while self.expect(b")").is_none() {
            let digits = self.rest.iter().take_while(|c| c.is_ascii_digit()).count();
            let (number, rest) = self.rest.split_at(digits);
            // A leading zero is no Python integer; one number without a comma is no tuple.
            if number.len() > 1 && number[0] == b'0' || shape.len() == MAX_DIMS {
                return None;
            }
            shape.push(std::str::from_utf8(number).ok()?.parse().ok()?);
            self.rest = rest.trim_ascii_start();
            let comma = self.expect(b",").is_some();
            if !comma && (shape.len() == 1 || self.rest.first() != Some(&b')')) {
                return None;
            }
        }
        Some(shape)
    }
}

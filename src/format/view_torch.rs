//! One tensor as a torch file of its own, byte for byte as `torch.save(tensor, "archive")` of PyTorch 2.15 writes it, but
//! without the record `.data/serialization_id`, which loading does not need.
//!
//! Source: `torch/serialization.py` (`_save`), `caffe2/serialize/inline_container.cc` and miniz 3 (zip64 fields).

use super::layout::{Layout, Tensor};
use super::torch::storage_class;
use super::virt::{Piece, Virtual};
use crate::bytes::Writer;
use crate::error::{Error, Kind, Result};

/// Values and offsets from here on are written as zip64 fields, as miniz does.
const WIDE: u64 = 0xffff_ffff;
/// The data of every member starts at a multiple of this.
const ALIGN: u64 = 64;
/// General purpose flags: the sizes follow the data (bit 3, for members that have any), names are UTF-8 (bit 11).
const SIZES_FOLLOW: u16 = 1 << 3;
const UTF8: u16 = 1 << 11;

/// The tensor's bytes and strides in a file that `torch.load` opens, also with `weights_only=True` and `mmap=True`. The
/// bytes are those the tensor touches, from its first element to its last; `crc` is their CRC-32 ([`super::crc_spans`]).
///
/// # Errors
/// `NotFound` if the layout has no such tensor.
pub fn torch_file(layout: &Layout, tensor: usize, crc: u32) -> Result<Virtual> {
    let t = layout.tensor(tensor)?;
    let (offset, len) = layout.tensor_span(t);
    let mut zip = Zip::default();
    zip.bytes("data.pkl", pickle(t, len));
    zip.bytes(".format_version", b"1".to_vec());
    zip.bytes(".storage_alignment", ALIGN.to_string().into_bytes());
    zip.bytes("byteorder", b"little".to_vec());
    zip.member("data/0", crc, len, Piece::File { offset, len });
    zip.bytes("version", b"3\n".to_vec());
    Ok(zip.finish())
}

/// For each tensor, the span (file offset, bytes) whose CRC-32 [`torch_file`] needs.
pub fn crc_spans(layout: &Layout) -> Vec<(u64, u64)> {
    layout.tensors.iter().map(|t| layout.tensor_span(t)).collect()
}

impl Layout {
    /// The tensor with this index.
    pub(super) fn tensor(&self, index: usize) -> Result<&Tensor> {
        self.tensors
            .get(index)
            .ok_or_else(|| Error::new(Kind::NotFound, format!("the file has no tensor {index}")))
    }
}

/// A zip as torch writes it.
#[derive(Default)]
struct Zip {
    out: Virtual,
    directory: Writer,
    entries: u64,
}

impl Zip {
    fn bytes(&mut self, name: &str, bytes: Vec<u8>) {
        self.member(
            name,
            crc32fast::hash(&bytes),
            bytes.len() as u64,
            Piece::Bytes(bytes),
        );
    }

    fn member(&mut self, name: &str, crc: u32, len: u64, data: Piece) {
        let name = format!("archive/{name}");
        let start = self.out.len;
        let (wide_len, wide_start) = (len >= WIDE, start >= WIDE);
        let flags = UTF8 | if len > 0 { SIZES_FOLLOW } else { 0 };
        // Of the packed length, a local header holds what miniz knows when it writes it: nothing yet.
        let wide = |packed: u64| {
            let fields = [(wide_len, len), (wide_len, packed), (wide_start, start)];
            let mut w = Writer::new();
            if wide_len || wide_start {
                w.u16(1).u16(8 * fields.iter().filter(|f| f.0).count() as u16);
            }
            for (_, value) in fields.iter().filter(|f| f.0) {
                w.u64(*value);
            }
            w.finish()
        };
        let (local, wide) = (wide(0), wide(len));
        // "FB" is torch's own extra field; its Zs move the data to a multiple of 64.
        let data_start = start + 30 + (name.len() + wide.len() + 4) as u64;
        let padding = (data_start.next_multiple_of(ALIGN) - data_start) as usize;

        let mut w = Writer::new();
        w.raw(b"PK\x03\x04").u16(0).u16(flags).raw(&[0; 18]);
        w.u16(name.len() as u16)
            .u16((wide.len() + 4 + padding) as u16)
            .raw(name.as_bytes())
            .raw(&local);
        w.raw(b"FB").u16(padding as u16).raw(&vec![b'Z'; padding]);
        self.out.push_bytes(w.finish());
        match data {
            Piece::Bytes(bytes) => self.out.push_bytes(bytes),
            piece => self.out.push(len, piece),
        }
        if len > 0 {
            let mut w = Writer::new();
            w.raw(b"PK\x07\x08").u32(crc);
            if wide.is_empty() {
                w.u32(len as u32).u32(len as u32);
            } else {
                w.u64(len).u64(len);
            }
            self.out.push_bytes(w.finish());
        }
        let d = &mut self.directory;
        d.raw(b"PK\x01\x02")
            .u16(0)
            .u16(0)
            .u16(flags)
            .raw(&[0; 6])
            .u32(crc);
        d.u32(len.min(WIDE) as u32).u32(len.min(WIDE) as u32);
        d.u16(name.len() as u16)
            .u16(wide.len() as u16)
            .raw(&[0; 10])
            .u32(start.min(WIDE) as u32);
        d.raw(name.as_bytes()).raw(&wide);
        self.entries += 1;
    }

    /// Adds the directory and the end records; torch always writes the zip64 ones too.
    fn finish(mut self) -> Virtual {
        let directory = self.directory.finish();
        let (start, len) = (self.out.len, directory.len() as u64);
        let mut w = Writer::new();
        w.raw(&directory);
        w.raw(b"PK\x06\x06").u64(44).u16(0x031e).u16(45).u32(0).u32(0);
        w.u64(self.entries).u64(self.entries).u64(len).u64(start);
        w.raw(b"PK\x06\x07").u32(0).u64(start + len).u32(1);
        w.raw(b"PK\x05\x06")
            .u16(0)
            .u16(0)
            .u16(self.entries as u16)
            .u16(self.entries as u16);
        w.u32(len as u32).u32(start.min(WIDE) as u32).u16(0);
        self.out.push_bytes(w.finish());
        self.out
    }
}

/// The pickle of a tensor over storage 0 of `len` bytes: protocol 2, as Python's own pickler writes it.
fn pickle(t: &Tensor, len: u64) -> Vec<u8> {
    let mut p = Pickler {
        out: Writer::new(),
        memo: 0,
    };
    let typed = storage_class(t.dtype);
    p.out.raw(&[0x80, 2]);
    p.global(
        "torch._utils",
        if typed.is_some() {
            "_rebuild_tensor_v2"
        } else {
            "_rebuild_tensor_v3"
        },
    );
    p.out.raw(b"((");
    p.text("storage");
    match typed {
        Some(class) => p.global("torch", class),
        None => p.global("torch.storage", "UntypedStorage"),
    }
    p.text("0");
    p.text("cpu");
    p.int(if typed.is_some() {
        len / t.dtype.size() as u64
    } else {
        len
    });
    p.out.u8(b't');
    p.remember();
    p.out.u8(b'Q');
    p.int(0);
    p.tuple(&t.shape);
    p.tuple(&t.strides);
    p.out.u8(0x89);
    p.global("collections", "OrderedDict");
    p.out.raw(b")R");
    p.remember();
    if typed.is_none() {
        p.global("torch", t.dtype.torch());
    }
    p.out.u8(b't');
    p.remember();
    p.out.u8(b'R');
    p.remember();
    p.out.u8(b'.');
    p.out.finish()
}

struct Pickler {
    out: Writer,
    memo: u8,
}

impl Pickler {
    /// A tensor's pickle remembers at most 13 values, so one byte does.
    fn remember(&mut self) {
        self.out.u8(b'q').u8(self.memo);
        self.memo += 1;
    }

    fn global(&mut self, module: &str, name: &str) {
        self.out
            .u8(b'c')
            .raw(module.as_bytes())
            .u8(b'\n')
            .raw(name.as_bytes())
            .u8(b'\n');
        self.remember();
    }

    fn text(&mut self, s: &str) {
        self.out.u8(b'X').u32(s.len() as u32).raw(s.as_bytes());
        self.remember();
    }

    fn int(&mut self, n: u64) {
        if let Ok(n) = u8::try_from(n) {
            self.out.u8(b'K').u8(n);
        } else if let Ok(n) = u16::try_from(n) {
            self.out.u8(b'M').u16(n);
        } else if n <= 0x7fff_ffff {
            self.out.u8(b'J').u32(n as u32);
        } else {
            // LONG1: two's complement in the fewest bytes, so with a zero byte before a set top bit.
            let len = (65 - n.leading_zeros()).div_ceil(8) as usize;
            let wide = u128::from(n).to_le_bytes();
            self.out.u8(0x8a).u8(len as u8).raw(&wide[..len]);
        }
    }

    fn tuple(&mut self, items: &[u64]) {
        if items.len() > 3 {
            self.out.u8(b'(');
        }
        for n in items {
            self.int(*n);
        }
        match items.len() {
            0 => drop(self.out.u8(b')')),
            n @ 1..=3 => drop(self.out.u8(0x84 + n as u8)),
            _ => drop(self.out.u8(b't')),
        }
        if !items.is_empty() {
            self.remember();
        }
    }
}

//! How one chunk is encoded, alone or against a base chunk: pure functions over bytes.
//!
//! A codec is one file and one row of [`ROWS`]; docs/FORMAT.md specifies every payload byte for byte. Encoders are free to
//! change (any encoder whose output the decoder accepts is right); decoders and numbers are for ever.

mod buckets;
mod choose;
mod constant;
mod cpu;
mod diff;
mod fitted;
mod frame;
#[cfg(test)]
mod golden;
mod lanes;
mod plain;
mod plane;
mod planes;
mod rans;
mod recast;
mod related;
mod rounded;
mod scratch;
mod sparse;
#[cfg(test)]
mod tests;
mod weights;
mod widened;

pub use related::Related;

use crate::error::{Error, Result};
use crate::tensor::Number;

/// The most bytes that any decoder rebuilds: what bounds the memory that a damaged record can ask for. Chunks have a lower bound,
/// set where a record's meta is read.
pub const MAX_RAW_LEN: usize = 256 << 20;

/// How a chunk's payload is to be read. The number is the one on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Codec {
    /// The bytes themselves.
    Raw = 0,
    /// One zstd frame.
    Zstd = 1,
    /// Byte planes, each coded by itself.
    Planes = 2,
    /// One element, repeated.
    Constant = 3,
    /// Equal to the base.
    Same = 4,
    /// Differences to the base of order-mapped numbers, as byte planes.
    DiffPlanes = 5,
    /// Exclusive-or with the base, as byte planes.
    XorPlanes = 6,
    /// One zstd frame that may copy from the base.
    ZstdRef = 7,
    /// Differences to the base, only where there are any: gaps and values.
    DiffSparse = 8,
    /// Differences to the base of order-mapped numbers, in classes of like magnitude of the base.
    DiffBuckets = 9,
    /// The same, of floats away from zero on the base's side.
    DiffMagnitudes = 10,
    /// The same, with blocks that moved further coded apart.
    DiffBands = 11,
    /// The rounding of a base of wider floats, and what differs from it.
    Rounded = 16,
    /// A base of narrower floats widened, and what differs from it.
    Widened = 17,
}

/// What an encoder sees.
#[derive(Clone, Copy)]
struct Input<'a> {
    raw: &'a [u8],
    number: Number,
    base: Option<&'a [u8]>,
}

/// What a decoder works on. All but the limit of `raw_len` is untrusted.
struct Job<'a> {
    number: Number,
    payload: &'a [u8],
    /// At most [`MAX_RAW_LEN`].
    raw_len: usize,
    /// The base on entry, exactly `raw_len` bytes on success.
    buf: &'a mut Vec<u8>,
}

/// One codec: its row in the table.
struct Row {
    codec: Codec,
    name: &'static str,
    needs_base: bool,
    /// The payload, or nothing where the codec does not apply or clearly gains nothing. Equal input, equal output; also used to
    /// estimate, on a sample of the chunk (and the same places of the base).
    encode: fn(Input<'_>) -> Option<Vec<u8>>,
    /// The inverse; bounded by `raw_len` in time and memory, whatever the payload.
    decode: fn(Job<'_>) -> Result<()>,
}

#[rustfmt::skip]
static ROWS: [Row; 14] = [
    Row { codec: Codec::Raw, name: "raw", needs_base: false, encode: plain::encode_raw, decode: plain::decode_raw },
    Row { codec: Codec::Zstd, name: "zstd", needs_base: false, encode: plain::encode_zstd, decode: plain::decode_zstd },
    Row { codec: Codec::Planes, name: "planes", needs_base: false, encode: planes::encode, decode: planes::decode },
    Row { codec: Codec::Constant, name: "constant", needs_base: false, encode: constant::encode, decode: constant::decode },
    Row { codec: Codec::Same, name: "same", needs_base: true, encode: constant::encode_same, decode: constant::decode_same },
    Row { codec: Codec::DiffPlanes, name: "diff-planes", needs_base: true, encode: diff::encode_diff, decode: diff::decode_diff },
    Row { codec: Codec::XorPlanes, name: "xor-planes", needs_base: true, encode: diff::encode_xor, decode: diff::decode_xor },
    Row { codec: Codec::ZstdRef, name: "zstd-ref", needs_base: true, encode: plain::encode_zstd_ref, decode: plain::decode_zstd_ref },
    Row { codec: Codec::DiffSparse, name: "diff-sparse", needs_base: true, encode: sparse::encode, decode: sparse::decode },
    Row { codec: Codec::DiffBuckets, name: "diff-buckets", needs_base: true, encode: buckets::encode, decode: buckets::decode },
    Row { codec: Codec::DiffMagnitudes, name: "diff-magnitudes", needs_base: true, encode: buckets::encode_magnitudes, decode: buckets::decode_magnitudes },
    Row { codec: Codec::DiffBands, name: "diff-bands", needs_base: true, encode: buckets::bands::encode, decode: buckets::bands::decode },
    Row { codec: Codec::Rounded, name: "rounded", needs_base: true, encode: rounded::encode, decode: rounded::decode },
    Row { codec: Codec::Widened, name: "widened", needs_base: true, encode: widened::encode, decode: widened::decode },
];

impl Codec {
    /// Every codec, by number.
    pub const ALL: &'static [Codec] = &[
        Codec::Raw,
        Codec::Zstd,
        Codec::Planes,
        Codec::Constant,
        Codec::Same,
        Codec::DiffPlanes,
        Codec::XorPlanes,
        Codec::ZstdRef,
        Codec::DiffSparse,
        Codec::DiffBuckets,
        Codec::DiffMagnitudes,
        Codec::DiffBands,
        Codec::Rounded,
        Codec::Widened,
    ];

    fn row(self) -> &'static Row {
        // Numbers have gaps; every codec has its row, as a test makes sure.
        ROWS.iter().find(|row| row.codec == self).unwrap_or(&ROWS[0])
    }

    /// The codec with this number on disk; nothing if a newer version of zspace wrote it.
    pub fn from_tag(tag: u8) -> Option<Codec> {
        ROWS.iter().map(|row| row.codec).find(|codec| codec.tag() == tag)
    }

    /// The number on disk.
    pub fn tag(self) -> u8 {
        self as u8
    }

    /// The name in statistics.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Whether [`decode`] must be given the base's raw bytes.
    pub fn needs_base(self) -> bool {
        self.row().needs_base
    }

    /// Whether the base may be made of several chunks, one after the other: then it is a tensor of another number.
    pub fn takes_many(self) -> bool {
        matches!(self, Codec::Rounded | Codec::Widened)
    }
}

/// An encoded chunk: what [`decode`] needs beside the base, the number and the raw length.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Encoded {
    /// How to read the payload.
    pub codec: Codec,
    /// Never longer than the raw bytes.
    pub payload: Vec<u8>,
}

/// Encodes `raw` (at most [`MAX_RAW_LEN`] bytes), choosing the smallest for its cost; never larger than `raw` (falls back to `Raw`).
/// `number` says what the bytes hold and must be given to [`decode`] again; `raw` need not be a whole number of elements.
/// Equal arguments give equal results.
pub fn encode(raw: &[u8], number: Number, base: Option<&[u8]>) -> Encoded {
    choose::encode(Input { raw, number, base })
}

/// Encodes with one given codec, whether it gains anything or not: for measuring, tests and repacking. Nothing if the codec does not
/// apply to this input.
pub fn encode_as(codec: Codec, raw: &[u8], number: Number, base: Option<&[u8]>) -> Option<Encoded> {
    let payload = (codec.row().encode)(Input { raw, number, base })?;
    Some(Encoded { codec, payload })
}

/// Encodes `raw` against a tensor of wider or narrower floats that lies in `bases`, as [`Related`] says: with `Rounded` or `Widened`.
/// Nothing if that is no smaller than `raw`, or than [`encode`] without a base makes it.
pub fn encode_related(raw: &[u8], number: Number, bases: &[u8], related: &Related) -> Option<Encoded> {
    let base = Some(bases);
    related::encode(Input { raw, number, base }, related).filter(|e| e.payload.len() < raw.len())
}

/// Appends floats converted to `number`, rounded to the nearest (ties to even) where it is the narrower; false if these numbers are
/// not related.
pub fn convert(from: Number, bytes: &[u8], number: Number, to: &mut Vec<u8>) -> bool {
    recast::recast(from, bytes, number, to)
}

/// Decodes in place: on entry `buf` holds the base's raw bytes (all bases' one after the other, none if the codec needs none), on success exactly `raw_len` raw bytes.
///
/// # Errors
/// `Damage`, with what is wrong, if the payload is not one that the codec writes for `raw_len` bytes; `buf` is empty then.
pub fn decode(codec: Codec, number: Number, payload: &[u8], raw_len: usize, buf: &mut Vec<u8>) -> Result<()> {
    let result = if raw_len > MAX_RAW_LEN {
        Err(Error::damage(format!(
            "chunk claims {raw_len} bytes, the limit is {MAX_RAW_LEN}"
        )))
    } else {
        (codec.row().decode)(Job {
            number,
            payload,
            raw_len,
            buf,
        })
    };
    result.map_err(|e| {
        buf.clear();
        e.context(format_args!(
            "{} payload of {} bytes",
            codec.name(),
            payload.len()
        ))
    })
}

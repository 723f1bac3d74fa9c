//! zstd frames without what is known anyway: no magic number, no content size, no checksum (RFC 8878; the magicless format of zstd.h).

use super::scratch::with_buffer;
use crate::error::{Error, Result};
use std::cell::RefCell;
use zstd::zstd_safe::{self, CCtx, CParameter, DCtx, DParameter, FrameFormat, ParamSwitch, ResetDirective};

thread_local! {
    static COMPRESSOR: RefCell<CCtx<'static>> = RefCell::new(CCtx::create());
    static DECOMPRESSOR: RefCell<DCtx<'static>> = RefCell::new(DCtx::create());
}

/// How hard to look for repetitions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effort {
    /// Not at all (zstd's lowest level): Huffman coding alone, for noise with a skewed histogram.
    Entropy,
    /// zstd's level 1.
    Fast,
    /// zstd's level 3.
    Usual,
}

fn set_up(c: &mut CCtx<'_>, effort: Effort) -> zstd_safe::SafeResult {
    c.reset(ResetDirective::SessionAndParameters)?;
    c.set_parameter(CParameter::Format(FrameFormat::Magicless))?;
    c.set_parameter(CParameter::ContentSizeFlag(false))?;
    c.set_parameter(CParameter::ChecksumFlag(false))?;
    let level = match effort {
        Effort::Entropy => -131_072,
        Effort::Fast => 1,
        Effort::Usual => 3,
    };
    if effort == Effort::Entropy {
        c.set_parameter(CParameter::LiteralCompressionMode(ParamSwitch::Enable))?;
    }
    c.set_parameter(CParameter::CompressionLevel(level))
}

/// Appends a frame of `src` to `out`, if it is shorter than `limit` bytes.
pub(super) fn compress(effort: Effort, src: &[u8], limit: usize, out: &mut Vec<u8>) -> bool {
    COMPRESSOR.with_borrow_mut(|c| set_up(c, effort).is_ok() && append(c, src, limit, out))
}

/// The same for a frame that may copy from `base`, in front of `src`.
pub(super) fn compress_after(base: &[u8], src: &[u8], limit: usize, out: &mut Vec<u8>) -> bool {
    // The binding ties a prefix's lifetime to the context's, so this context cannot be kept.
    let mut c = CCtx::create();
    let window = (base.len() + src.len())
        .next_power_of_two()
        .trailing_zeros()
        .clamp(10, 27);
    let ready = set_up(&mut c, Effort::Usual)
        .and_then(|_| c.set_parameter(CParameter::WindowLog(window)))
        .and_then(|_| c.set_parameter(CParameter::DeterministicRefPrefix(true)))
        .and_then(|_| c.ref_prefix(base));
    ready.is_ok() && append(&mut c, src, limit, out)
}

fn append(c: &mut CCtx<'_>, src: &[u8], limit: usize, out: &mut Vec<u8>) -> bool {
    with_buffer(|frame| {
        frame.reserve(zstd_safe::compress_bound(src.len()));
        let shorter = c.compress2(frame, src).is_ok_and(|n| n < limit);
        if shorter {
            out.extend_from_slice(frame);
        }
        shorter
    })
}

/// Fills `out` from a frame; a frame that holds less or more is damage.
pub(super) fn decompress(frame: &[u8], out: &mut [u8]) -> Result<()> {
    DECOMPRESSOR.with_borrow_mut(|d| {
        d.reset(ResetDirective::SessionAndParameters).map_err(damaged)?;
        d.set_parameter(DParameter::Format(FrameFormat::Magicless))
            .map_err(damaged)?;
        fill(d, frame, out)
    })
}

/// The inverse of [`compress_after`].
pub(super) fn decompress_after(base: &[u8], frame: &[u8], out: &mut [u8]) -> Result<()> {
    let mut d = DCtx::create();
    d.set_parameter(DParameter::Format(FrameFormat::Magicless))
        .map_err(damaged)?;
    d.ref_prefix(base).map_err(damaged)?;
    fill(&mut d, frame, out)
}

fn fill(d: &mut DCtx<'_>, frame: &[u8], out: &mut [u8]) -> Result<()> {
    let n = d.decompress(out, frame).map_err(damaged)?;
    if n != out.len() {
        return Err(Error::damage(format!(
            "zstd frame holds {n} bytes instead of {}",
            out.len()
        )));
    }
    Ok(())
}

fn damaged(code: zstd_safe::ErrorCode) -> Error {
    Error::damage(format!("zstd frame: {}", zstd_safe::get_error_name(code)))
}

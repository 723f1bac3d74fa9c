//! Bytes as they are, and through zstd, alone or with the base in front.

use super::{Input, Job, frame, frame::Effort, scratch};
use crate::error::{Error, Result};

pub(super) fn encode_raw(input: Input<'_>) -> Option<Vec<u8>> {
    Some(input.raw.to_vec())
}

pub(super) fn decode_raw(job: Job<'_>) -> Result<()> {
    let Job {
        payload,
        raw_len,
        buf,
        ..
    } = job;
    if payload.len() != raw_len {
        return Err(Error::damage(format!("{raw_len} bytes expected")));
    }
    buf.clear();
    buf.extend_from_slice(payload);
    Ok(())
}

pub(super) fn encode_zstd(input: Input<'_>) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    frame::compress(Effort::Usual, input.raw, usize::MAX, &mut out).then_some(out)
}

pub(super) fn decode_zstd(job: Job<'_>) -> Result<()> {
    let Job {
        payload,
        raw_len,
        buf,
        ..
    } = job;
    buf.resize(raw_len, 0);
    frame::decompress(payload, buf)
}

pub(super) fn encode_zstd_ref(input: Input<'_>) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    frame::compress_after(input.base?, input.raw, usize::MAX, &mut out).then_some(out)
}

pub(super) fn decode_zstd_ref(job: Job<'_>) -> Result<()> {
    let Job {
        payload,
        raw_len,
        buf,
        ..
    } = job;
    scratch::with_bytes(raw_len, |out| {
        frame::decompress_after(buf, payload, out)?;
        buf.clear();
        buf.extend_from_slice(out);
        Ok(())
    })
}

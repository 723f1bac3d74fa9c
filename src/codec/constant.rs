//! Chunks that need no bytes of their own: one element repeated, or the base again.

use super::{Input, Job};
use crate::error::{Error, Result};

pub(super) fn encode(input: Input<'_>) -> Option<Vec<u8>> {
    let (element, rest) = input.raw.split_at_checked(input.number.width())?;
    // Equal to itself shifted by one element; a tail shorter than an element repeats the element's first bytes.
    (rest == &input.raw[..rest.len()]).then(|| element.to_vec())
}

pub(super) fn decode(job: Job<'_>) -> Result<()> {
    let Job {
        number,
        payload,
        raw_len,
        buf,
    } = job;
    let width = number.width();
    if payload.len() != width || raw_len < width {
        return Err(Error::damage(format!(
            "not one element of {width} bytes for {raw_len}"
        )));
    }
    buf.resize(raw_len, 0);
    buf[..width].copy_from_slice(payload);
    let mut done = width;
    while done < raw_len {
        let n = done.min(raw_len - done);
        buf.copy_within(..n, done);
        done += n;
    }
    Ok(())
}

pub(super) fn encode_same(input: Input<'_>) -> Option<Vec<u8>> {
    (input.base == Some(input.raw)).then(Vec::new)
}

pub(super) fn decode_same(job: Job<'_>) -> Result<()> {
    let Job {
        payload,
        raw_len,
        buf,
        ..
    } = job;
    if !payload.is_empty() || buf.len() != raw_len {
        return Err(Error::damage(format!(
            "base of {} bytes cannot be {raw_len} bytes",
            buf.len()
        )));
    }
    Ok(())
}

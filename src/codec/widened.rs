//! An f32 chunk against the f16 or bf16 tensor that is its rounding: what the rounding lost is left.

use super::{Codec, Input, Job, related};
use crate::error::Result;
use crate::tensor::Number;

/// Tries both kinds of base; what codes well is the right one.
pub(super) fn encode(input: Input<'_>) -> Option<Vec<u8>> {
    let tried = [Number::BF16, Number::F16].map(|number| related::encode_whole(input, number));
    tried.into_iter().flatten().min_by_key(Vec::len)
}

pub(super) fn decode(job: Job<'_>) -> Result<()> {
    related::decode(Codec::Widened, job)
}

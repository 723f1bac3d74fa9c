//! An f16 or bf16 chunk against the f32 tensor that it is the rounding of.

use super::{Codec, Input, Job, related};
use crate::error::Result;
use crate::tensor::Number;

pub(super) fn encode(input: Input<'_>) -> Option<Vec<u8>> {
    related::encode_whole(input, Number::F32).filter(|_| input.number.width() == 2)
}

pub(super) fn decode(job: Job<'_>) -> Result<()> {
    related::decode(Codec::Rounded, job)
}

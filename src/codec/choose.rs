//! Which codec for which chunk.

use super::{Codec, Encoded, Input};

pub(super) fn encode(input: Input<'_>) -> Encoded {
    let mut best = Encoded {
        codec: Codec::Raw,
        payload: input.raw.to_vec(),
    };
    for codec in Codec::ALL {
        if let Some(payload) = (codec.row().encode)(input)
            && payload.len() < best.payload.len()
        {
            best = Encoded {
                codec: *codec,
                payload,
            };
        }
    }
    best
}

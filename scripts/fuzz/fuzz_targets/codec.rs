//! Every decoder, fed arbitrary payloads: no panic, and never more than the claimed length.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zspace::codec::{Codec, Related, decode, encode, encode_related};
use zspace::tensor::Number;

fuzz_target!(|data: &[u8]| {
    let [codec, number, len, base_len, rest @ ..] = data else { return };
    let Some(codec) = Codec::from_tag(codec % 18) else { return };
    let Some(number) = Number::from_tag(number % 9) else { return };
    let raw_len = usize::from(*len) * 17;
    let (base, payload) = rest.split_at(rest.len().min(usize::from(*base_len)));
    // A base of the right length, made of what there is.
    let base_len = match codec {
        Codec::Rounded => raw_len * 2,
        Codec::Widened => raw_len / 2,
        _ => raw_len,
    };
    let mut buf: Vec<u8> = base.iter().copied().cycle().take(if base.is_empty() { 0 } else { base_len }).collect();
    let whole_base = buf.clone();
    if decode(codec, number, payload, raw_len, &mut buf).is_ok() {
        assert_eq!(buf.len(), raw_len);
        if codec.takes_many() {
            let pieces = vec![(0, whole_base.len() as u32)];
            for from in [Number::F32, Number::F16, Number::BF16] {
                let related = Related { number: from, pieces: pieces.clone() };
                let Some(again) = encode_related(&buf, number, &whole_base, &related) else { continue };
                let mut back = whole_base.clone();
                decode(again.codec, number, &again.payload, raw_len, &mut back).expect("own encoding");
                assert_eq!(back, buf);
            }
            return;
        }
        // What came out goes in again.
        let base = codec.needs_base().then_some(&whole_base[..]);
        let again = encode(&buf, number, base);
        let mut back = if again.codec.needs_base() { whole_base } else { Vec::new() };
        decode(again.codec, number, &again.payload, raw_len, &mut back).expect("own encoding");
        assert_eq!(back, buf);
    }
});

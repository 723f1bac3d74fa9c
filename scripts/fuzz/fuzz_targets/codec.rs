//! Every decoder, fed arbitrary payloads: no panic, and never more than the claimed length.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zspace::codec::{Codec, decode, encode};
use zspace::tensor::Number;

fuzz_target!(|data: &[u8]| {
    let [codec, number, len, base_len, rest @ ..] = data else { return };
    let Some(codec) = Codec::from_tag(codec % 16) else { return };
    let Some(number) = Number::from_tag(number % 9) else { return };
    let raw_len = usize::from(*len) * 17;
    let (base, payload) = rest.split_at(rest.len().min(usize::from(*base_len)));
    // A base of the right length, made of what there is.
    let mut buf: Vec<u8> = base.iter().copied().cycle().take(if base.is_empty() { 0 } else { raw_len }).collect();
    let whole_base = buf.clone();
    if decode(codec, number, payload, raw_len, &mut buf).is_ok() {
        assert_eq!(buf.len(), raw_len);
        // What came out goes in again.
        let base = codec.needs_base().then_some(&whole_base[..]);
        let again = encode(&buf, number, base);
        let mut back = if again.codec.needs_base() { whole_base } else { Vec::new() };
        decode(again.codec, number, &again.payload, raw_len, &mut back).expect("own encoding");
        assert_eq!(back, buf);
    }
});

//! The messages of peers, both ends': what is accepted is canonical.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zspace::sync::{encoded_again, parse_checks};

fuzz_target!(|data: &[u8]| {
    let [kind, body @ ..] = data else { return };
    for (kind_again, again) in encoded_again(*kind, body) {
        assert_eq!((kind_again, &again[..]), (*kind, body));
    }
    if let Ok(text) = std::str::from_utf8(body) {
        let _ = parse_checks(text);
        let _ = text.parse::<zspace::sync::Address>();
    }
});

//! Manifests and proofs of objects: what is accepted is canonical, and a range of it is proven or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zspace::object::{ObjectManifest, Proof, Width};

fuzz_target!(|data: &[u8]| {
    let [which, data @ ..] = data else { return };
    if which % 2 == 0 {
        drop(ObjectManifest::decode(data).map(|m| assert_eq!(m.encode(), data)));
        return;
    }
    let Ok(proof) = Proof::decode(Width::FULL, data) else { return };
    assert_eq!(proof.encode(), data);
    let len = proof.manifest.len;
    for range in [0..len.min(64), len / 2..len.min(len / 2 + 200), 0..len.min(1 << 20)] {
        let wanted = range.end - range.start;
        if let Ok(bytes) = proof.records.range(&proof.manifest, range) {
            assert_eq!(bytes.len() as u64, wanted);
        }
    }
});

//! Trees, versions, manifests, journal bodies and node metas: what is accepted is canonical.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zspace::graph::{Manifest, NodeKind, NodeMeta, Record, Tree, Version};

fuzz_target!(|data: &[u8]| {
    let [which, data @ ..] = data else { return };
    match which % 5 {
        0 => drop(Tree::decode(data).map(|t| assert_eq!(t.encode(), data))),
        1 => drop(Version::decode(data).map(|v| assert_eq!(v.encode(), data))),
        2 => drop(Manifest::decode(data).map(|m| assert_eq!(m.encode(), data))),
        3 => drop(Record::decode(data).map(|r| assert_eq!(r.encode(), data))),
        _ => drop(NodeMeta::decode(NodeKind::Chunk, data).map(|m| assert_eq!(m.encode(), data))),
    }
});

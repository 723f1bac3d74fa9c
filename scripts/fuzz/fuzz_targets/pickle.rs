//! The pickle reader, fed arbitrary pickles inside a well-formed torch file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zspace::format::split;

/// A stored zip of these members, without checksums (nothing here reads them).
fn zip(members: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in members {
        let sizes = [(data.len() as u32).to_le_bytes(), (data.len() as u32).to_le_bytes()].concat();
        let names = (name.len() as u16).to_le_bytes();
        let at = (out.len() as u32).to_le_bytes();
        let head = [&[0u8; 6][..], &[0; 4], &[0; 4], &sizes, &names, &[0, 0]].concat();
        out.extend([&b"PK\x03\x04\x14\0"[..], &head[2..], name.as_bytes(), data].concat());
        directory.extend([&b"PK\x01\x02\x14\0\x14\0"[..], &head[2..], &[0; 10], &at, name.as_bytes()].concat());
    }
    let (n, len, at) = (members.len() as u16, directory.len() as u32, out.len() as u32);
    out.extend(&directory);
    out.extend([&b"PK\x05\x06\0\0\0\0"[..], &n.to_le_bytes(), &n.to_le_bytes(), &len.to_le_bytes(), &at.to_le_bytes(), &[0, 0]].concat());
    out
}

fuzz_target!(|data: &[u8]| {
    let file = zip(&[("a/data.pkl", data), ("a/byteorder", b"little"), ("a/data/0", &[7; 64]), ("a/data/1", &[7; 256])]);
    let _ = split(&file).expect("only I/O fails");
});

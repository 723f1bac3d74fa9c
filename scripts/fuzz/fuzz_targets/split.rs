//! Every file parser and every view, fed arbitrary files.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zspace::format::{self, Split};

/// Reads a view from end to end, as far as it is short.
fn read(view: zspace::error::Result<format::Virtual>, file: &Vec<u8>) {
    if let Ok(v) = view {
        let mut buf = vec![0; v.len.min(1 << 16) as usize];
        v.read_at(file, 0, &mut buf).expect("a view lies within its file");
    }
}

fuzz_target!(|data: &[u8]| {
    let file = data.to_vec();
    let _ = format::completeness(&file, "x.safetensors").expect("only I/O fails");
    let _ = format::index_shards(&file);
    let facts = format::facts(&file).expect("only I/O fails");
    assert!(facts.iter().all(|(_, n)| n.is_finite()));
    let Split::Parsed(layout) = format::split(&file).expect("only I/O fails") else { return };
    let covered: u64 = layout.extents.iter().map(|e| u64::from(e.len)).sum();
    assert_eq!(covered, file.len() as u64);
    let bytes = layout.encode();
    assert_eq!(format::Layout::decode(&bytes).expect("own encoding"), layout);
    let spans = format::crc_spans(&layout);
    let mut crc = format::SpanCrc::new(spans).expect("spans");
    crc.update(&file);
    let crcs = crc.finish().expect("spans lie within the file");
    for (i, c) in crcs.iter().enumerate().take(64) {
        read(format::torch_file(&layout, i, *c), &file);
        read(format::npy_file(&layout, i), &file);
    }
    read(format::safetensors_file(&layout), &file);
});

//! Layouts: what is accepted is canonical, and its views stay within the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zspace::format::{self, Layout};

fuzz_target!(|data: &[u8]| {
    let Ok(layout) = Layout::decode(data) else { return };
    assert_eq!(layout.encode(), data);
    let keys = layout.chunk_keys();
    assert_eq!(keys.len(), layout.chunks.len());
    for i in 0..layout.tensors.len().min(16) {
        let (at, len) = layout.tensor_span(&layout.tensors[i]);
        assert!(at + len <= layout.len);
        let _ = format::torch_file(&layout, i, 0);
        let _ = format::npy_file(&layout, i);
        let _ = format::file_name(&layout.tensors[i].name, ".pt");
    }
    let _ = format::safetensors_file(&layout);
});

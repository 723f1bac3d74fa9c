//! Tests of the whole folder over sample files, built files and hostile ones.

mod build;
mod cases;
mod hostile;
mod layouts;
mod views;

use super::*;
use std::path::Path;

/// A file of `samples/`.
fn sample(name: &str) -> Vec<u8> {
    std::fs::read(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("src/format/samples")
            .join(name),
    )
    .unwrap()
}

/// Every sample, by name.
fn samples() -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/format/samples");
    let mut names: Vec<String> = dir
        .read_dir()
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names.into_iter().map(|n| (n.clone(), sample(&n))).collect()
}

/// The layout of a file that must be understood.
fn parsed(file: &[u8]) -> Layout {
    match split(&file.to_vec()).unwrap() {
        Split::Parsed(layout) => {
            check(&layout, file);
            layout
        }
        Split::Opaque(why) => panic!("opaque: {why}"),
    }
}

/// Why a file is not understood.
fn opaque(file: &[u8]) -> String {
    match split(&file.to_vec()).unwrap() {
        Split::Opaque(why) => why,
        Split::Parsed(layout) => panic!("understood as {:?}", layout.format),
    }
}

/// What must hold of every layout: chunks filled from extents rebuild the file, and the encoding is one to one.
fn check(layout: &Layout, file: &[u8]) {
    assert_eq!(layout.len, file.len() as u64);
    let mut chunks: Vec<Vec<u8>> = layout.chunks.iter().map(|c| vec![0; c.len as usize]).collect();
    let mut used = vec![0; chunks.len()];
    let mut at = 0;
    for e in &layout.extents {
        let (from, n) = (e.offset as usize, e.len as usize);
        chunks[e.chunk as usize][from..from + n].copy_from_slice(&file[at..at + n]);
        used[e.chunk as usize] += n;
        at += n;
    }
    assert_eq!(at, file.len());
    assert!(chunks.iter().zip(used).all(|(c, n)| c.len() == n));
    let mut back = Vec::new();
    for e in &layout.extents {
        back.extend_from_slice(&chunks[e.chunk as usize][e.offset as usize..(e.offset + e.len) as usize]);
    }
    assert!(back == file);
    let bytes = layout.encode();
    assert_eq!(&Layout::decode(&bytes).unwrap(), layout);
    assert_eq!(layout.chunk_keys().len(), layout.chunks.len());
}

/// The bytes of a view.
fn read(view: &Virtual, file: &[u8]) -> Vec<u8> {
    let mut out = vec![0; view.len as usize];
    view.read_at(&file.to_vec(), 0, &mut out).unwrap();
    out
}

/// The tensors' names.
fn names(layout: &Layout) -> Vec<&str> {
    layout.tensors.iter().map(|t| t.name.as_str()).collect()
}

/// The index of the tensor with this name.
fn find(layout: &Layout, name: &str) -> usize {
    layout
        .tensors
        .iter()
        .position(|t| t.name == name)
        .unwrap_or_else(|| panic!("no {name}"))
}

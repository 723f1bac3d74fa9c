//! Views: equal to what torch, NumPy and safetensors write, and pinned.

use super::build::*;
use super::*;
use crate::error::Kind;
use crate::id::hex;
use proptest::prelude::*;
use sha2::{Digest, Sha256};

fn crcs(layout: &Layout, file: &[u8]) -> Vec<u32> {
    let mut crc = SpanCrc::new(crc_spans(layout)).unwrap();
    file.chunks(1000).for_each(|part| crc.update(part));
    crc.finish().unwrap()
}

fn torch_view(file: &[u8], name: &str) -> Vec<u8> {
    let layout = parsed(file);
    let i = find(&layout, name);
    read(&torch_file(&layout, i, crcs(&layout, file)[i]).unwrap(), file)
}

fn npy_view(file: &[u8], name: &str) -> Vec<u8> {
    let layout = parsed(file);
    read(&npy_file(&layout, find(&layout, name)).unwrap(), file)
}

#[test]
fn torch_views_start_as_torch_writes_them() {
    for (source, name, want) in [
        ("strided.pt", "window", "want-window.pt.start"),
        ("strided.pt", "empty", "want-empty.pt.start"),
        ("dtypes.pt", "float8_e4m3fn", "want-float8.pt.start"),
    ] {
        let (view, want) = (torch_view(&sample(source), name), sample(want));
        assert!(view.starts_with(&want), "{name}");
        assert_eq!(view[want.len()..want.len() + 4], *b"PK\x01\x02");
    }
}

#[test]
fn numpy_and_safetensors_views_are_what_the_libraries_write() {
    let strided = sample("strided.pt");
    assert!(npy_view(&strided, "t") == sample("want-t.npy"));
    assert!(npy_view(&strided, "window") == sample("want-window.npy"));
    assert!(npy_view(&strided, "perm") == sample("want-perm.npy"));
    for name in ["c.npy", "fortran.npy", "scalar.npy"] {
        assert!(npy_view(&sample(name), "array") == sample(name), "{name}");
    }
    let gather = sample("gather.pt");
    assert!(read(&safetensors_file(&parsed(&gather)).unwrap(), &gather) == sample("want-gather.safetensors"));
    let same = sample("some.safetensors");
    let view = safetensors_file(&parsed(&same)).unwrap();
    assert_eq!(
        view.pieces,
        [(
            0,
            Piece::File {
                offset: 0,
                len: same.len() as u64
            }
        )]
    );
    let npz = sample("some.npz");
    let view = read(&safetensors_file(&parsed(&npz)).unwrap(), &npz);
    assert_eq!(parsed(&view).metadata, [("format".to_owned(), "np".to_owned())]);
    let names: Vec<String> = parsed(&view).tensors.iter().map(|t| true_name(&t.name)).collect();
    assert_eq!(names, ["b", "x/y", "arr_0"]);
}

#[test]
fn every_torch_view_is_a_torch_file_of_that_tensor() {
    for source in [
        "strided.pt",
        "dtypes.pt",
        "train.pt",
        "some.npz",
        "some.safetensors",
        "fortran.npy",
    ] {
        let file = sample(source);
        let layout = parsed(&file);
        for t in &layout.tensors {
            let view = torch_view(&file, &t.name);
            let again = parsed(&view);
            let [u] = again.tensors.as_slice() else {
                panic!("{}", t.name)
            };
            assert_eq!(
                (&u.name, u.byte_offset, u.dtype),
                (&"tensor".to_owned(), 0, t.dtype)
            );
            assert_eq!((&u.shape, &u.strides), (&t.shape, &t.strides));
            let bytes = |l: &Layout, t: &Tensor, f: &[u8]| {
                let (at, len) = l.tensor_span(t);
                f[at as usize..(at + len) as usize].to_vec()
            };
            assert!(bytes(&again, u, &view) == bytes(&layout, t, &file));
            assert_eq!(again.regions[0].offset % 64, 0);
        }
    }
}

/// The bytes of every view of every sample, by their SHA-256: what is served must never change.
#[test]
fn view_bytes_are_pinned() {
    let mut lines = String::new();
    for (name, file) in samples() {
        let Split::Parsed(layout) = split(&file).unwrap() else {
            continue;
        };
        let mut all = Sha256::new();
        for (i, crc) in crcs(&layout, &file).into_iter().enumerate() {
            all.update(read(&torch_file(&layout, i, crc).unwrap(), &file));
            if let Ok(view) = npy_file(&layout, i) {
                all.update(read(&view, &file));
            }
        }
        if let Ok(view) = safetensors_file(&layout) {
            all.update(read(&view, &file));
        }
        lines += &format!("{} {name}\n", &hex(&all.finalize())[..32]);
    }
    let pinned = include_str!("views.sha256");
    assert!(lines == pinned, "views changed:\n{lines}");
}

#[test]
fn what_would_expand_is_refused() {
    let layout = parsed(&sample("strided.pt"));
    let refused = |r: Result<Virtual>| {
        let e = r.unwrap_err();
        assert_eq!(e.kind(), Kind::Refused);
        assert!(e.to_string().contains("expanded"), "{e}");
    };
    refused(npy_file(&layout, find(&layout, "expanded")));
    refused(safetensors_file(&layout));
    assert!(torch_file(&layout, find(&layout, "expanded"), 0).unwrap().len < 2000);
    assert_eq!(npy_file(&layout, 99).unwrap_err().kind(), Kind::NotFound);
    let complex = safetensors_file(&parsed(&sample("dtypes.pt"))).unwrap_err();
    assert_eq!(complex.kind(), Kind::Refused);
    let none = safetensors_file(&parsed(&torch(&pickle(&[b"N"]), &[]))).unwrap_err();
    assert_eq!(none.kind(), Kind::Refused);
    let reserved = torch(
        &pickle(&[b"}", &text("__metadata__"), &tensor(0, 1), b"s"]),
        &[&[0; 4]],
    );
    assert_eq!(
        safetensors_file(&parsed(&reserved)).unwrap_err().kind(),
        Kind::Refused
    );
}

#[test]
fn equal_true_names_stay_apart() {
    let file = sample("names.pt");
    let view = read(&safetensors_file(&parsed(&file)).unwrap(), &file);
    let again = parsed(&view);
    assert_eq!(again.tensors.len(), 21);
    // "a/b" is a key and a way: both keep their encoded names.
    let names: Vec<String> = again.tensors.iter().map(|t| true_name(&t.name)).collect();
    assert!(names.contains(&"a%2Fb".to_owned()) && names.contains(&"a/b".to_owned()));
}

/// Tensors of 4 GiB and more need zip64 fields, as torch 2.15 writes them (lengths and offsets checked against a real one).
#[test]
fn zip64() {
    use crate::tensor::{Dtype, Number};
    struct Zeros(u64);
    impl Source for Zeros {
        fn len(&self) -> u64 {
            self.0
        }
        fn read_at(&self, _: u64, buf: &mut [u8]) -> Result<()> {
            buf.fill(0);
            Ok(())
        }
    }
    struct View<'a>(&'a Virtual, Zeros);
    impl Source for View<'_> {
        fn len(&self) -> u64 {
            self.0.len
        }
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
            self.0.read_at(&self.1, offset, buf)
        }
    }
    for len in [0xffff_fffe, 0xffff_ffff, (1u64 << 32) + 5, 1 << 50] {
        let (dtype, name) = (Dtype::U8, "t".to_owned());
        let layout = Layout {
            format: Format::Npy,
            len,
            chunks: vec![ChunkPlan {
                len: 1,
                number: Number::I8,
            }],
            extents: vec![],
            regions: vec![Region {
                offset: 0,
                len,
                dtype,
                name: name.clone(),
            }],
            tensors: vec![Tensor {
                name,
                region: 0,
                byte_offset: 0,
                dtype,
                shape: vec![len],
                strides: vec![1],
            }],
            metadata: vec![],
        };
        let view = torch_file(&layout, 0, 7).unwrap();
        assert_eq!(view.pieces.len(), 3);
        let src = View(&view, Zeros(len));
        assert_eq!(completeness(&src, "x").unwrap(), Completeness::Complete);
        if len > 1 << 40 {
            continue;
        }
        if len == (1 << 32) + 5 {
            // The pieces around the data, compared with torch's own file when this was written.
            let mut h = Sha256::new();
            for (_, piece) in &view.pieces {
                if let Piece::Bytes(b) = piece {
                    h.update(b);
                }
            }
            assert_eq!(
                hex(&h.finalize()),
                "e5e29855bb631270fd74d45ff6a527c9c5a5b4b01a8dd9b5159e1fd1db97ff79"
            );
        }
        let Split::Parsed(again) = split(&src).unwrap() else {
            panic!("{len} is opaque")
        };
        assert_eq!((again.tensors[0].shape[0], again.regions[0].len), (len, len));
        assert_eq!(again.regions[0].offset % 64, 0);
    }
}

proptest! {
    /// A gathered range is what picking elements one by one gives.
    #[test]
    fn gathering_equals_picking(
        dims in prop::collection::vec((0u64..7, 0u64..40), 0..5),
        item in prop::sample::select(vec![1u32, 2, 4, 8, 16]),
        offset in 0u64..50,
        cut: (prop::sample::Index, prop::sample::Index),
    ) {
        let (shape, strides): (Vec<u64>, Vec<u64>) = dims.into_iter().unzip();
        let count: u64 = shape.iter().product();
        let last: u64 = shape.iter().zip(&strides).map(|(d, s)| d.saturating_sub(1) * s).sum();
        let file: Vec<u8> = (0..offset + (last + 1) * u64::from(item)).map(|i| ((i * 37) >> 2) as u8).collect();
        let mut want = Vec::new();
        for i in 0..count {
            let (mut rest, mut at) = (i, 0);
            for (d, s) in shape.iter().zip(&strides).rev() {
                at += rest % d * s;
                rest /= d;
            }
            let from = (offset + at * u64::from(item)) as usize;
            want.extend_from_slice(&file[from..from + item as usize]);
        }
        let mut view = Virtual::default();
        view.push_bytes(b"head".to_vec());
        view.push(want.len() as u64, Piece::Gather { offset, item, shape, strides });
        view.push_bytes(b"tail".to_vec());
        let want = [b"head".as_slice(), &want, b"tail"].concat();
        prop_assert_eq!(read(&view, &file), want.clone());
        let (a, b) = (cut.0.index(want.len() + 1), cut.1.index(want.len() + 1));
        let (a, b) = (a.min(b), a.max(b));
        let mut part = vec![0; b - a];
        view.read_at(&file, a as u64, &mut part).unwrap();
        prop_assert_eq!(part, &want[a..b]);
        prop_assert!(view.read_at(&file, view.len, &mut [0]).is_err());
    }
}

#[test]
fn a_large_transposed_tensor_is_gathered_in_long_reads() {
    struct Counting<'a>(&'a [u8], std::cell::Cell<usize>);
    impl Source for Counting<'_> {
        fn len(&self) -> u64 {
            self.0.len() as u64
        }
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
            self.1.set(self.1.get() + 1);
            self.0.read_at(offset, buf)
        }
    }
    let file: Vec<u8> = (0..1_000_000u32).flat_map(u32::to_le_bytes).collect();
    let gather = Piece::Gather {
        offset: 0,
        item: 4,
        shape: vec![1000, 1000],
        strides: vec![1, 1000],
    };
    let mut view = Virtual::default();
    view.push(file.len() as u64, gather);
    let src = Counting(&file, 0.into());
    let mut out = vec![0; file.len()];
    view.read_at(&src, 0, &mut out).unwrap();
    assert_eq!(src.1.get(), 1000);
    assert_eq!(out[4 * 1001..4 * 1001 + 4], 1001u32.to_le_bytes());
    assert_eq!(out[4..8], 1000u32.to_le_bytes());
}

//! Chunk planning, keys, and the encoded form.

use super::build::*;
use super::*;
use crate::error::{Error, Kind};
use crate::tensor::{Dtype, Number};
use proptest::prelude::*;

const KIB: usize = 1 << 10;

fn lens(layout: &Layout) -> Vec<(usize, Number)> {
    layout.chunks.iter().map(|c| (c.len as usize, c.number)).collect()
}

#[test]
fn large_regions_have_chunks_of_their_own_and_small_ones_share() {
    let at_limit = 64 * KIB / 4;
    let file = vectors(&[
        at_limit,
        at_limit + 1,
        10,
        0,
        at_limit,
        at_limit,
        at_limit,
        256 * KIB + 64 * KIB / 4 - 1,
    ]);
    let layout = parsed(&file);
    let header = file.len() - layout.regions.iter().map(|r| r.len as usize).sum::<usize>();
    assert_eq!(
        lens(&layout),
        [
            (header, Number::Bytes),
            // After t0 and t5 a chunk is closed, as their names have it.
            (64 * KIB, Number::F32),
            (64 * KIB + 4, Number::F32),
            (128 * KIB + 40, Number::F32),
            (64 * KIB, Number::F32),
            // A tail below 64 KiB joins the chunk before it.
            (1024 * KIB + 64 * KIB - 4, Number::F32),
        ]
    );
    let file = vectors(&[(2048 + 64) * KIB / 4]);
    assert_eq!(
        lens(&parsed(&file))[1..].iter().map(|c| c.0).collect::<Vec<_>>(),
        [1 << 20, 1 << 20, 64 * KIB]
    );
}

#[test]
fn structural_bytes_are_cut_at_256_kib() {
    let long = format!("{{\"__metadata__\":{{\"k\":\"{}\"}}}}", "v".repeat(600 * KIB));
    let layout = parsed(&safetensors(&long, 0));
    assert_eq!(lens(&layout)[..2], [(256 * KIB, Number::Bytes); 2]);
    assert_eq!((layout.chunks.len(), layout.extents.len()), (3, 3));
    assert_eq!(layout.metadata[0].1.len(), 600 * KIB);
}

#[test]
fn keys_follow_the_tensor_not_the_file() {
    let of = |name| {
        let layout = parsed(&sample(name));
        let keys = layout.chunk_keys();
        layout
            .chunks
            .iter()
            .zip(keys)
            .filter(|(c, _)| c.number == Number::F32)
            .map(|(_, k)| k)
            .collect::<Vec<_>>()
    };
    let a = of("prefix-a.pt");
    assert_eq!(a.len(), 1);
    assert_eq!(a, of("prefix-sub-ckpt-with-a-longer-name.pt"));
    assert_eq!(a, of("rewritten.pt"));
    // Another dtype, name, place or length is another key.
    let f32s = parsed(&vectors(&[300 * KIB, 3])).chunk_keys();
    let other = parsed(&vectors(&[300 * KIB, 4])).chunk_keys();
    assert_eq!(f32s[..3], other[..3]);
    assert_ne!(f32s[3], other[3]);
    assert_eq!(std::collections::HashSet::<_>::from_iter(&f32s).len(), f32s.len());
    // Structural chunks are known by their order alone, so a header may grow.
    assert_eq!(f32s[0], parsed(&safetensors("{}", 0)).chunk_keys()[0]);
    // Pinned: keys are looked up across versions of this program.
    assert_eq!(crate::id::hex(&f32s[1]), "e50dcc3f880fe2b6cddf2d6b1e914dc3");
}

#[test]
fn opaque_layouts() {
    let layout = Layout::opaque(&[5, 1, 7]).unwrap();
    assert_eq!((layout.len, layout.format), (13, Format::Opaque));
    check(&layout, &[9; 13]);
    check(&Layout::opaque(&[]).unwrap(), &[]);
    assert!(Layout::opaque(&[0]).is_err() && Layout::opaque(&[(16 << 20) + 1]).is_err());
}

#[test]
fn the_encoded_form_is_pinned() {
    let bytes = parsed(&sample("some.safetensors")).encode();
    assert_eq!(
        crate::id::hex(&bytes),
        "7a6c617901019004030007060300980201f4010204049802040c0000f0010c0000000c0000040b0004017300000c00017701000c02060a047a65726f02000c02000305612532466203000b010202016b017606666f726d6174027074"
    );
    let mut newer = bytes;
    newer[4] = 2;
    assert_eq!(Layout::decode(&newer).unwrap_err().kind(), Kind::Unsupported);
}

/// Breaks one thing about a valid layout; each must be refused.
#[test]
fn contradictions_are_damage() {
    let good = parsed(&vectors(&[20, 30]));
    let breaks: [fn(&mut Layout); 14] = [
        |l| l.len += 1,
        |l| l.extents.swap(0, 1),
        |l| l.extents[1].chunk = 7,
        |l| l.extents.truncate(1),
        |l| {
            l.chunks.push(ChunkPlan {
                len: 0,
                number: Number::Bytes,
            })
        },
        |l| l.regions[1].offset -= 4,
        |l| l.regions[1].len += 1,
        |l| l.tensors[1].byte_offset = 4,
        |l| l.tensors[1].region = 2,
        |l| l.tensors[1].shape[0] = u64::MAX,
        |l| l.tensors[1].name = "t0".to_owned(),
        |l| l.tensors[1].name = "a//b".to_owned(),
        |l| l.regions[1].name = "a\n".to_owned(),
        |l| l.tensors[1].strides[0] = 1 << 60,
    ];
    assert!(Layout::decode(&good.encode()).is_ok());
    for (i, break_it) in breaks.iter().enumerate() {
        let mut bad = good.clone();
        break_it(&mut bad);
        // Some cannot even be written down as broken; those that can must not be read.
        assert!(bad.check().is_err(), "{i}");
        let read = std::panic::catch_unwind(|| bad.encode()).map(|bytes| Layout::decode(&bytes));
        assert!(!matches!(read, Ok(Ok(l)) if l == bad), "{i}");
    }
}

#[test]
fn errors_of_the_source_are_never_opaque() {
    struct Failing(Vec<u8>, std::cell::Cell<usize>);
    impl Source for Failing {
        fn len(&self) -> u64 {
            Source::len(&self.0)
        }
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
            match self.1.get() {
                0 => Err(Error::new(Kind::Io, "unreadable")),
                n => {
                    self.1.set(n - 1);
                    self.0.read_at(offset, buf)
                }
            }
        }
    }
    for (name, file) in samples() {
        let mut reads = 0;
        while split(&Failing(file.clone(), reads.into())).is_err() {
            reads += 1;
        }
        assert!(reads > 0, "{name}");
        assert_eq!(
            split(&Failing(file.clone(), reads.into())).unwrap(),
            split(&file).unwrap()
        );
    }
}

fn any_tensors() -> impl Strategy<Value = Vec<(usize, Vec<u64>)>> {
    let shape = prop::collection::vec(0u64..40, 0..4);
    prop::collection::vec((0usize..19, shape), 0..20)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_safetensors_file_is_covered(tensors in any_tensors(), seed: u8) {
        let mut header = String::from("{\"__metadata__\":{\"a\":\"b\"}");
        let mut at = 0;
        for (i, (dtype, shape)) in tensors.iter().enumerate() {
            let dtype = Dtype::ALL[*dtype];
            let name = if dtype.safetensors().is_empty() { "U8" } else { dtype.safetensors() };
            let size = Dtype::from_safetensors(name).unwrap().size() as u64;
            let end = at + shape.iter().product::<u64>() * size;
            header += &format!(",\"x/{i}\":{{\"shape\":{shape:?},\"dtype\":\"{name}\",\"data_offsets\":[{at},{end}]}}");
            at = end;
        }
        header.push('}');
        let mut file = safetensors(&header, at as usize);
        file.iter_mut().rev().take(at as usize).for_each(|b| *b = seed);
        let layout = parsed(&file);
        prop_assert_eq!(layout.tensors.len(), tensors.len());
        let named: std::collections::HashSet<String> = layout.tensors.iter().map(|t| true_name(&t.name)).collect();
        let all_named = (0..tensors.len()).all(|i| named.contains(&format!("x/{i}")));
        prop_assert!(all_named);
        prop_assert!(layout.tensors.iter().all(Tensor::is_contiguous));
    }

    #[test]
    fn whatever_decodes_encodes_to_the_same_bytes(
        pick: prop::sample::Index,
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let sources = ["strided.pt", "some.npz", "some.safetensors", "fortran.npy", "names.pt"];
        let mut bytes = parsed(&sample(sources[pick.index(sources.len())])).encode();
        for (at, b) in edits {
            let at = at.index(bytes.len());
            bytes[at] = b;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(layout) = Layout::decode(&bytes) {
            prop_assert_eq!(layout.encode(), bytes);
            layout.chunk_keys();
        }
    }

    #[test]
    fn arbitrary_bytes_never_decode_badly(bytes: Vec<u8>) {
        let framed = [b"zlay\x01\x02".as_slice(), &bytes].concat();
        if let Ok(layout) = Layout::decode(&framed) {
            prop_assert_eq!(layout.encode(), framed);
        }
    }
}

//! Files made to do harm: nothing may panic, run, hang or take memory that the file's size does not justify.

use super::build::*;
use super::*;
use proptest::prelude::*;
use std::time::{Duration, Instant};

/// Runs `f`, which must not take long even here.
fn quick<T>(f: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let out = f();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    out
}

#[test]
fn nothing_is_executed() {
    let call = [
        b"cos\nsystem\n(".as_slice(),
        &text("touch /tmp/zspace-was-here"),
        b"tR",
    ]
    .concat();
    let attack = pickle(&[b"}(", &text("evil"), &call, &text("w"), &tensor(0, 2), b"u"]);
    // Nobody's checkpoint: kept as the bytes it is, its good tensor not shown.
    assert!(opaque(&torch(&attack, &[&[0; 8]])).contains("runs programs"));
    // What merely is unknown does not matter.
    let harmless = pickle(&[
        b"}(",
        &text("args"),
        b"cmy.module\nArgs\n(tR",
        &text("w"),
        &tensor(0, 2),
        b"u",
    ]);
    assert_eq!(names(&parsed(&torch(&harmless, &[&[0; 8]]))), ["w"]);
    assert!(!Path::new("/tmp/zspace-was-here").exists());
}

#[test]
fn pickles_that_nest_or_expand() {
    // A million lists, one in the other.
    let deep = pickle(&[&vec![b']'; 1 << 20], &vec![b'a'; (1 << 20) - 1]]);
    assert_eq!(quick(|| names(&parsed(&torch(&deep, &[]))).len()), 0);
    let deep = pickle(&[&vec![b']'; 1000], &tensor(0, 2), &vec![b'a'; 1000]]);
    assert!(quick(|| opaque(&torch(&deep, &[&[0; 8]]))).contains("deep"));
    // Each of 100 tuples holds the one before twice: 2^100 ways, cheap as long as no tensor is at their end.
    let double = [b'2', 0x86].repeat(100);
    let bomb = pickle(&[b")", &double]);
    assert_eq!(names(&quick(|| parsed(&torch(&bomb, &[])))).len(), 0);
    let bomb = pickle(&[&tensor(0, 2), &double]);
    assert!(quick(|| opaque(&torch(&bomb, &[&[0; 8]]))).contains("too many"));
    // A list in itself, with a tensor beside.
    let cycle = pickle(&[b"]q\x07(h\x07", &tensor(0, 2), b"e"]);
    assert_eq!(names(&parsed(&torch(&cycle, &[&[0; 8]]))), ["1"]);
    // A long key on every one of many ways.
    let long = text(&"k".repeat(1 << 20));
    let wide = [b"h\x01h\x02".as_slice(); 20_000].concat();
    let bomb = pickle(&[&long, b"q\x01", &tensor(0, 2), b"q\x02}(", &wide, b"u\x86\x86"]);
    assert!(quick(|| opaque(&torch(&bomb, &[&[0; 8]]))).contains("too many"));
    let many = pickle(&[&vec![b'N'; 5 << 20]]);
    assert!(quick(|| opaque(&torch(&many, &[]))).contains("opcodes"));
}

#[test]
fn pickles_that_are_malformed() {
    let ops: [&[u8]; 16] = [
        b"",
        b"t",
        b"R",
        b"a",
        b"N]aN",
        b"(",
        b"}NNsN",
        b"}(Nu",
        b"h\x01",
        b"K",
        b"X\xff\xff\xff\xffa",
        b"cos",
        b"Nb",
        b"I1\n",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x97",
    ];
    for op in ops {
        assert!(
            opaque(&torch(&pickle(&[op]), &[])).starts_with("pickle: "),
            "{op:?}"
        );
    }
    assert!(opaque(&torch(b"\x80\x01N.", &[])).contains("protocol"));
    assert!(opaque(&torch(b"\x80\x02N.N", &[])).contains("left over"));
    assert!(opaque(&torch(b"\x80\x02N", &[])).contains("cut short"));
}

#[test]
fn tensors_that_leave_their_storage() {
    let file = |offset, shape: &[u8], strides: &[u8]| {
        torch(&pickle(&[&tensor_of(0, 10, offset, shape, strides)]), &[&[0; 40]])
    };
    parsed(&file(0, &[10], &[1]));
    parsed(&file(1, &[3, 3], &[3, 1]));
    parsed(&file(10, &[0, 255], &[255, 255]));
    for bad in [
        file(1, &[10], &[1]),
        file(0, &[3, 3], &[4, 2]),
        file(11, &[0], &[1]),
        file(0, &[2], &[1, 1]),
    ] {
        opaque(&bad);
    }
    // Negative and immense strides.
    for stride in [[0xff; 8], [0, 0, 0, 0, 0, 0, 0, 0x7f]] {
        let t = tensor_of(0, 10, 0, &[2], &[9]);
        let at = t.len() - 7;
        assert_eq!(t[at..at + 2], [b'K', 9]);
        let wide = [&t[..at], &[0x8a, 8], &stride, &t[at + 2..]].concat();
        opaque(&torch(&pickle(&[&wide]), &[&[0; 40]]));
    }
    // A storage of another size, described in two ways, compressed, or not there.
    opaque(&torch(&pickle(&[&tensor(0, 10)]), &[&[0; 36]]));
    opaque(&torch(
        &pickle(&[&tensor(0, 10), &tensor(0, 9), b"\x86"]),
        &[&[0; 40]],
    ));
    opaque(&torch(&pickle(&[&tensor(1, 10)]), &[&[0; 40]]));
    let packed = Member {
        method: 8,
        ..member("x/data/0", &[0; 40])
    };
    opaque(&zip(&[member("x/data.pkl", &pickle(&[&tensor(0, 10)])), packed]));
    // Two pickles, a packed one.
    opaque(&zip(&[
        member("x/data.pkl", &pickle(&[b"N"])),
        member("y/data.pkl", &pickle(&[b"N"])),
    ]));
    opaque(&zip(&[Member {
        method: 8,
        ..member("x/data.pkl", &pickle(&[b"N"]))
    }]));
}

#[test]
fn zips_that_lie() {
    let npy = sample("c.npy");
    let (a, b) = (member("a.npy", &npy), member("b.npy", &npy));
    let with = |change: &dyn Fn(&mut Member)| {
        let mut m = b.clone();
        change(&mut m);
        zip(&[a.clone(), m])
    };
    assert_eq!(names(&parsed(&with(&|_| ()))), ["a", "b"]);
    opaque(&with(&|m| m.name = b"a.npy".to_vec()));
    opaque(&with(&|m| m.local_name = Some(b"c.npy".to_vec())));
    opaque(&with(&|m| m.offset_lie = -1));
    opaque(&with(&|m| m.offset_lie = i64::from(u32::MAX) / 2));
    opaque(&with(&|m| m.size_lie = 1));
    opaque(&with(&|m| m.size_lie = i64::from(u32::MAX) - 1000));
    // Both entries name the first member's bytes.
    opaque(&with(&|m| m.offset_lie = -(30 + 5 + npy.len() as i64)));
    // A bomb is never inflated; the stored member beside it is still found.
    let bomb = with(&|m| (m.method, m.data) = (8, vec![0; 1000]));
    assert_eq!(names(&parsed(&bomb)), ["a"]);
    // A zip within the zip's comment, and bytes before or after.
    let one = |m: &Member| zip(std::slice::from_ref(m));
    opaque(&[one(&a), one(&b)].concat());
    opaque(&[one(&a), vec![0]].concat());
    let count = |n: u16| {
        let mut z = zip(&[a.clone(), b.clone()]);
        let at = z.len() - 14;
        z[at..at + 2].copy_from_slice(&n.to_le_bytes());
        z[at + 2..at + 4].copy_from_slice(&n.to_le_bytes());
        z
    };
    parsed(&count(2));
    opaque(&count(1));
    opaque(&count(3));
    opaque(&count(u16::MAX));
}

#[test]
fn claims_of_immense_sizes_allocate_nothing() {
    let head = [&(1u64 << 63).to_le_bytes()[..], b"{}"].concat();
    opaque(&head);
    assert!(matches!(
        completeness(&head, "x.safetensors").unwrap(),
        Completeness::Torn(_)
    ));
    assert_eq!(completeness(&head, "x.bin").unwrap(), Completeness::Complete);
    opaque(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}");
    opaque(b"\x93NUMPY\x09\x00\xff\xff\xff\xff{}");
    let huge = "{'descr': '<f8', 'fortran_order': False, 'shape': (9223372036854775807, 3), }\n";
    let npy = [
        b"\x93NUMPY\x01\x00".as_slice(),
        &(huge.len() as u16).to_le_bytes(),
        huge.as_bytes(),
    ]
    .concat();
    opaque(&npy);
}

/// Everything that can be done with a file, whatever it holds.
fn exercise(file: &[u8]) {
    let src = &file.to_vec();
    completeness(src, "x.safetensors").unwrap();
    let Split::Parsed(layout) = split(src).unwrap() else {
        return;
    };
    check(&layout, file);
    let mut views = vec![safetensors_file(&layout)];
    for i in 0..layout.tensors.len() {
        views.push(torch_file(&layout, i, 0));
        views.push(npy_file(&layout, i));
        file_name(&layout.tensors[i].name, ".pt");
    }
    for view in views.into_iter().flatten() {
        let ends = view.pieces.iter().skip(1).map(|p| p.0).chain([view.len]);
        assert!(view.pieces.iter().zip(ends).all(|(p, end)| p.0 < end));
        read(&view, file);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn arbitrary_bytes(bytes: Vec<u8>, start in 0usize..5) {
        let starts: [&[u8]; 5] = [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"\x20\0\0\0\0\0\0\0{", b"PK\x05\x06"];
        exercise(&[starts[start], &bytes].concat());
    }

    #[test]
    fn arbitrary_pickles(ops in prop::collection::vec(0usize..24, 0..60)) {
        let pieces: [&[u8]; 24] = [
            b"(", b"t", b"]", b"}", b")", b"a", b"e", b"s", b"u", b"R", b"b", b"Q", b"0", b"1", b"2", b"K\x01", b"q\x01",
            b"h\x01", b"X\x01\0\0\0a", b"ctorch._utils\n_rebuild_tensor_v2\n", b"\x86", b"N", b"\x81", b"\x94",
        ];
        let list: Vec<&[u8]> = ops.iter().map(|i| pieces[*i]).collect();
        let t = tensor(0, 2);
        exercise(&torch(&pickle(&[&t, &list.concat(), &t, b"\x86"]), &[&[0; 8]]));
        exercise(&torch(&pickle(&[&t, &list.concat()]), &[&[0; 8]]));
    }

    #[test]
    fn mutated_samples(
        pick: prop::sample::Index,
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0u8..3), 1..5),
        cut in prop::option::weighted(0.1, any::<prop::sample::Index>()),
    ) {
        let all = samples();
        let (_, mut file) = all[pick.index(all.len())].clone();
        for (at, b, how) in edits {
            let at = at.index(file.len());
            match how {
                0 => file[at] = b,
                1 => file[at] ^= 1 << (b & 7),
                _ => file.splice(at..at, [b; 3]).for_each(drop),
            }
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        exercise(&file);
    }
}

#[test]
fn every_byte_of_small_samples_mutated() {
    for name in ["prefix-a.pt", "zero-size.safetensors", "fortran.npy", "some.npz"] {
        let file = sample(name);
        for i in 0..file.len() {
            for b in [0, 1, 0x7f, 0xff] {
                let mut file = file.clone();
                file[i] = b;
                exercise(&file);
            }
        }
    }
}

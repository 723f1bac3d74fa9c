//! Sample files and the cases of public bug reports: what they are taken for.

use super::build::*;
use super::*;
use crate::tensor::Dtype;

#[test]
fn samples_are_understood_or_opaque_as_they_should_be() {
    let is_opaque = [
        "big-endian.npy",
        "big-endian.pt",
        "legacy.pt",
        "make.py",
        "negative.pt",
        "object.npy",
        "packed.npz",
    ];
    let more = [
        "record-removed.pt",
        "structured.npy",
        "want-empty.pt.start",
        "want-float8.pt.start",
        "want-window.pt.start",
    ];
    for (name, file) in samples() {
        if is_opaque.contains(&name.as_str()) || more.contains(&name.as_str()) {
            opaque(&file);
        } else {
            parsed(&file);
        }
    }
}

#[test]
fn a_training_checkpoint() {
    let layout = parsed(&sample("train.pt"));
    assert_eq!(layout.format, Format::Torch);
    let want = [
        "model/0.weight",
        "model/1.num_batches_tracked",
        "optimizer/state/0/exp_avg",
        "optimizer/state/3/step",
    ];
    assert!(
        want.iter().all(|w| names(&layout).contains(w)),
        "{:?}",
        names(&layout)
    );
    let t = &layout.tensors[find(&layout, "model/0.weight")];
    assert_eq!(
        (t.dtype, t.shape.as_slice(), t.strides.as_slice()),
        (Dtype::F32, &[3, 2][..], &[2, 1][..])
    );
    assert_eq!(
        true_name("optimizer/state/0/exp_avg"),
        "optimizer/state/0/exp_avg"
    );
}

#[test]
fn other_things_torch_saves() {
    let layout = parsed(&sample("module.pt"));
    assert_eq!(names(&layout)[0], "_modules/0/_parameters/weight");
    assert_eq!(names(&parsed(&sample("root.pt"))), ["tensor"]);
    assert_eq!(names(&parsed(&sample("protocol5.pt"))), ["0", "6/0"]);
    assert_eq!(names(&parsed(&sample("script.pt"))), ["weight", "bias"]);
    assert_eq!(names(&parsed(&sample("sparse.pt"))), ["s/%@1/0", "s/%@1/1"]);
    let dtypes = parsed(&sample("dtypes.pt"));
    assert_eq!(dtypes.tensors.len(), Dtype::ALL.len());
    for t in &dtypes.tensors {
        assert_eq!(t.name, t.dtype.torch());
        assert_eq!(dtypes.regions[t.region as usize].dtype, t.dtype);
    }
}

#[test]
fn ties_share_a_region_and_strides_stay() {
    let file = sample("strided.pt");
    let layout = parsed(&file);
    let of = |name: &str| &layout.tensors[find(&layout, name)];
    for name in ["tied", "t", "window", "ends"] {
        assert_eq!(of(name).region, of("base").region);
    }
    assert_eq!(layout.regions[of("base").region as usize].name, "base");
    let window = of("window");
    assert_eq!(
        (window.byte_offset, window.strides.as_slice()),
        (48, &[10, 3][..])
    );
    let (at, len) = layout.tensor_span(window);
    assert_eq!(len, 37 * 4);
    assert_eq!(file[at as usize..at as usize + 4], 12f32.to_le_bytes());
    assert!(of("t").is_fortran() && !of("t").is_contiguous() && of("base").is_contiguous());
    assert_eq!(layout.tensor_span(of("empty")).1, 0);
    assert!(of("empty").is_contiguous() && of("scalar").is_contiguous() && of("scalar").shape.is_empty());
}

/// C12: odd names.
#[test]
fn odd_keys_have_names() {
    let layout = parsed(&sample("names.pt"));
    let k = "k".repeat(300);
    let want = [
        "a%2Fb",
        "%",
        "..",
        ".hidden",
        "100%25",
        "nl%0A",
        "é漢😀",
        "%ED%A0%80x",
        "-x",
        &k,
        "0",
        "0%#2",
        "None",
        "True",
        "%@14",
        // Protocol 2 writes bytes as a call.
        "%@15",
        "a/b",
        "a/c.pt/q",
        "list/0",
        "list/1/0",
        "list/1/1/x",
    ];
    assert_eq!(names(&layout), want);
    assert_eq!(
        true_name("nl%0A/100%25/%/%ED%A0%80x/0%#2"),
        "nl\n/100%//%ED%A0%80x/0%#2"
    );
}

/// C01: zero-size tensors, a file of metadata only, an empty file.
#[test]
fn nothing_much() {
    let layout = parsed(&sample("zero-size.safetensors"));
    assert_eq!(names(&layout), ["a", "b", "c"]);
    assert_eq!(layout.regions[0].len, 0);
    let layout = parsed(&sample("metadata-only.safetensors"));
    assert_eq!(layout.metadata, [("k".to_owned(), "v".to_owned())]);
    opaque(b"");
    assert_eq!(
        completeness(&Vec::new(), "x.safetensors").unwrap(),
        Completeness::Complete
    );
    parsed(&safetensors("{}", 0));
}

/// C03: files the loader refuses.
#[test]
fn what_the_reference_refuses_is_opaque() {
    let good = r#""a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
    parsed(&safetensors(&format!("{{{good}}}   "), 8));
    let bad = [
        (format!("{{{good},{good}}}"), 8),
        (format!("{{{good}}}"), 8 + 1024),
        (format!("{{{good}}}"), 7),
        (format!("{{{good}}} x"), 8),
        (format!("{{{good},\"__metadata__\":{{\"n\":1}}}}"), 8),
        (
            format!("{{{good},\"__metadata__\":{{\"n\":\"1\",\"n\":\"2\"}}}}"),
            8,
        ),
        (
            format!("{{{good},\"__metadata__\":{{}},\"__metadata__\":{{}}}}"),
            8,
        ),
        (
            format!("{{{good},\"b\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[12,16]}}}}"),
            16,
        ),
        (
            format!("{{{good},\"b\":{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}}}"),
            8,
        ),
        (good.replace("[2]", "[3]").replace("\"a\"", "{\"a\"") + "}", 8),
        (format!("{{{}}}", good.replace("F32", "F4")), 8),
        (
            format!("{{{}}}", good.replace("[2]", "[4294967296,4294967296,4]")),
            8,
        ),
        (format!("{{{}}}", good.replace("[2]", "[-2]")), 8),
        (format!("{{{}}}", good.replace("[0,8]", "[0,8,8]")), 8),
        (format!("{{{}}}", good.replace("[0,8]", "[8,0]")), 8),
        (format!("{{{}}}", good.replace("\"shape\":[2],", "")), 8),
        (
            format!(
                "{{{}}}",
                good.replace("\"shape\":[2],", "\"shape\":[2],\"shape\":[2],")
            ),
            8,
        ),
        (
            format!(
                "{{{}}}",
                good.replace("\"shape\":[2],", "\"shape\":[2],\"more\":[[[]]],")
            ),
            8,
        ),
        ("{\"a\":".repeat(5000), 0),
    ];
    for (header, data) in bad {
        opaque(&safetensors(&header, data));
    }
    opaque(&[u8::MAX, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f, b'{', b'}']);
    let mut not_utf8 = safetensors(&format!("{{{}}}", good.replace('a', "é")), 8);
    let at = not_utf8.iter().position(|b| *b == 0xc3).unwrap();
    not_utf8[at] = 0xff;
    opaque(&not_utf8);
}

/// C03: a header of 108 MB with 900,000 tensors, and one just below the limit, made up as they are read.
#[test]
fn huge_headers_take_bounded_memory() {
    const ENTRY: u64 = 110;
    struct Generated {
        header: u64,
    }
    impl Source for Generated {
        fn len(&self) -> u64 {
            8 + self.header
        }
        fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
            let entry = |i: u64| {
                let e = format!("\"t{i:09}\":{{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}},");
                format!("{e:width$}", width = ENTRY as usize)
            };
            let (mut at, mut filled) = (offset, 0);
            while filled < buf.len() {
                let part = match at {
                    0..8 => self.header.to_le_bytes()[at as usize..].to_vec(),
                    8 => b"{".to_vec(),
                    _ => entry((at - 9) / ENTRY).as_bytes()[((at - 9) % ENTRY) as usize..].to_vec(),
                };
                let n = part.len().min(buf.len() - filled);
                buf[filled..filled + n].copy_from_slice(&part[..n]);
                (at, filled) = (at + n as u64, filled + n);
            }
            Ok(())
        }
    }
    for header in [108_000_000, 99_000_000] {
        match split(&Generated { header }).unwrap() {
            Split::Opaque(_) => {}
            Split::Parsed(_) => panic!("{header}"),
        }
    }
}

/// C05: the same weights under other prefixes, which move the data by 128 bytes and more.
#[test]
fn prefixes_do_not_matter() {
    let file = |n: &str| sample(&format!("prefix-{n}.pt"));
    let (a, c) = (file("a"), file("sub-ckpt-with-a-longer-name"));
    let (la, lc) = (parsed(&a), parsed(&c));
    let data = |l: &Layout, f: &[u8]| -> Vec<Vec<u8>> {
        l.regions
            .iter()
            .map(|r| f[r.offset as usize..(r.offset + r.len) as usize].to_vec())
            .collect()
    };
    assert_eq!(data(&la, &a), data(&lc, &c));
    assert_ne!(la.regions[0].offset, lc.regions[0].offset);
    assert_eq!(la.tensors, lc.tensors);
}

/// C07: legacy, big-endian and damaged torch files.
#[test]
fn old_and_odd_torch_files_are_opaque() {
    assert!(opaque(&sample("big-endian.pt")).contains("byte order"));
    assert!(opaque(&sample("record-removed.pt")).contains("missing"));
    opaque(&sample("legacy.pt"));
    opaque(&sample("negative.pt"));
}

#[test]
fn npy_and_npz() {
    let layout = parsed(&sample("fortran.npy"));
    assert_eq!(
        (layout.tensors[0].strides.as_slice(), names(&layout)),
        (&[1, 6][..], vec!["array"])
    );
    let layout = parsed(&sample("some.npz"));
    assert_eq!(names(&layout), ["b", "x%2Fy", "arr_0"]);
    assert_eq!(layout.format, Format::Npz);
    let header = |text: &str| {
        [
            b"\x93NUMPY\x01\x00".as_slice(),
            &(text.len() as u16).to_le_bytes(),
            text.as_bytes(),
        ]
        .concat()
    };
    let data = |text: &str, n: usize| [header(text), vec![0; n]].concat();
    let good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }  \n";
    parsed(&data(good, 24));
    parsed(&data("{'shape':(),\"descr\":'|b1','fortran_order':True}", 1));
    opaque(&data(good, 23));
    opaque(&data(good, 25));
    let bad = [
        ("(2, 3)", "(6)"),
        ("(2, 3)", "(2 3)"),
        ("(2, 3)", "(2, 03)"),
        ("(2, 3)", "(2, -3)"),
        ("(2, 3)", "(4294967296, 4294967296)"),
        ("(2, 3)", "[2, 3]"),
        ("<f4", ">f4"),
        ("<f4", "<U6"),
        ("False", "0"),
        (", }", "}, "),
        ("'shape'", "'form'"),
        ("'descr': '<f4', ", ""),
        ("'descr': '<f4', ", "'descr': '<f4', 'descr': '<f4', "),
    ];
    for (from, to) in bad {
        let text = good.replace(from, to);
        assert_ne!(text, good);
        // One of these only moves a comma, which Python would read too, and then something follows the dict.
        opaque(&data(&text, 24));
    }
}

#[test]
fn what_is_cut_short_is_torn() {
    let torn = |f: &[u8], name: &str| completeness(&f.to_vec(), name).unwrap() != Completeness::Complete;
    for (name, file) in samples() {
        let whole = !name.ends_with(".start");
        assert_ne!(torn(&file, &name), whole, "{name}");
        let known = [".pt", ".npz", ".npy", ".safetensors"]
            .iter()
            .any(|s| name.ends_with(s));
        if known && name != "legacy.pt" && !name.starts_with("object") && !name.starts_with("big-endian.npy")
        {
            let header = if name.ends_with(".npy") { 11 } else { 4 };
            for n in header..file.len() {
                let odd = name == "structured.npy" && n >= 128;
                assert_eq!(torn(&file[..n], &name), !odd, "{name} cut to {n}");
            }
        }
    }
    let file = sample("some.safetensors");
    assert!(
        torn(&file[..100], "no-suffix")
            && !torn(&file[..8], "no-suffix")
            && torn(&file[..8], "x.safetensors")
    );
    // Odd files are whole.
    assert!(!torn(&[file.clone(), vec![0; 99]].concat(), "x.safetensors"));
    assert!(!torn(&[sample("some.npz"), b"more".to_vec()].concat(), "x"));
    // Nothing but a name says what these are, and by it they are cut short.
    assert!(torn(&[0xff; 30], "x.safetensors") && !torn(&[0xff; 30], "x.bin"));
    assert!(!torn(&zip(&[]), "x"));
    let mut beyond = member("a", b"b");
    beyond.size_lie = 5000;
    assert!(torn(&zip(&[beyond]), "x"));
}

#[test]
fn distributed_checkpoints_name_their_parts() {
    let pickle = b"\x80\x04\x8c\x0c__0_0.distcp\x94\x8c\x0d__13_2.distcp\x94\x8c\x0c__0_0.distcp\x94X\x07\0\0\0.distcp_1_.distcp";
    assert_eq!(distributed_parts(pickle), ["__0_0.distcp", "__13_2.distcp"]);
    assert!(distributed_parts(b"").is_empty());
    assert!(is_distributed_part(b"__0_0.distcp") && is_distributed_part(b"__12_34.distcp"));
    for name in [
        "__0.distcp",
        "__0_.distcp",
        "a__0_0.distcp",
        "__0_0.distcp.tmp",
        ".distcp",
        "0_0.distcp",
        "",
    ] {
        assert!(!is_distributed_part(name.as_bytes()), "{name}");
    }
}

#[test]
fn indexes_name_their_shards() {
    let json = br#"{"metadata":{"total_size":1},"weight_map":{"a":"2.safetensors","b":"1.safetensors","c":"2.safetensors"}}"#;
    assert_eq!(index_shards(json).unwrap(), ["1.safetensors", "2.safetensors"]);
    assert_eq!(index_shards(br#"{"weight_map":{}}"#).unwrap(), [""; 0]);
    for bad in [
        "",
        "{}",
        "[]",
        r#"{"weight_map":["a"]}"#,
        r#"{"weight_map":{"a":1}}"#,
    ] {
        assert_eq!(index_shards(bad.as_bytes()), None);
    }
}

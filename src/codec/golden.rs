//! Payloads of the first version of each format, which must decode for ever. An encoder may come to write others; these stay.

use super::*;
use crate::tensor::Number;

struct Golden {
    codec: Codec,
    number: Number,
    raw: Vec<u8>,
    base: Vec<u8>,
    payload: &'static str,
}

/// `n` elements, each the `width` lowest bytes of what `f` gives, and a tail that is part of no element.
fn elements(n: u64, width: usize, tail: &[u8], f: impl Fn(u64) -> u64) -> Vec<u8> {
    (0..n)
        .flat_map(|i| f(i).to_le_bytes()[..width].to_vec())
        .chain(tail.iter().copied())
        .collect()
}

/// Noise of 32 bits (a multiplicative hash).
fn noise(i: u64) -> u64 {
    i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
}

fn all() -> Vec<Golden> {
    let golden = |codec, number, raw: &[u8], base: &[u8], payload| {
        let (raw, base) = (raw.to_vec(), base.to_vec());
        Golden {
            codec,
            number,
            raw,
            base,
            payload,
        }
    };
    let names = b"layers.0.mlp.weight layers.0.mlp.bias layers.1.mlp.weight layers.1.mlp.bias";
    let later = b"step 40: layers.0.mlp.weight layers.0.mlp.bias layers.1.mlp.weight layers.1.mlp.bias";
    // bf16 between 0.001 and 1, either sign.
    let bf16 = |i| (noise(i) & 0x807f) | (0x3f80 - ((noise(i) >> 20 & 7) << 7));
    // f32 whose exponents repeat, with -0, infinity and a NaN among them.
    let f32 = |i| match i {
        5 => 1 << 31,
        6 => 0x7f80_0000,
        7 => 0xffc0_1234,
        _ => 0x3c00_0000 | (noise(i) & 0x807f_ffff),
    };
    let nearly = |i: u64| if i.is_multiple_of(9) { noise(i) % 4 } else { 0 };
    let moved = move |i: u64| f32(i) + nearly(i);
    let rare =
        move |i: u64| bf16(i) + u64::from(i == 3 || i == 4) + 2 * u64::from(i == 400) - u64::from(i == 1000);
    // f16 of every kind, and the same as f32.
    let f16 = |i: u64| {
        let bits = [0, 1, 0x3ff, 0x400, 0x3c01, 0x7bff, 0x7c00, 0x7e01, 0x8000, 0xfc00][i as usize % 10]
            ^ (i / 10) << 15;
        let wide = half::f16::from_bits(bits as u16).to_f32().to_bits();
        (bits, u64::from(wide))
    };
    // A step of equal size for all, and one that changes the sign.
    let stepped = move |i: u64| match bf16(i) {
        x if i == 9 => x ^ 0x8000,
        x => x + noise(i + 1) % (1 << ((0x3f80 - (x & 0x7f80)).clamp(0, 5 << 7) / 128)),
    };
    // Every other block moves further.
    let uneven = move |i: u64| bf16(i) + noise(i + 7) % if (i / 64).is_multiple_of(2) { 2 } else { 9 };
    // Most blocks became smaller by one factor.
    let decayed = move |i: u64| match f32(i + 8) {
        x if i < 576 => u64::from((std::primitive::f32::from_bits(x as u32) * 0.9).to_bits()),
        x => x + nearly(i),
    };
    let (b, f) = (Number::BF16, Number::F32);
    #[rustfmt::skip]
    let all = vec![
        golden(Codec::Raw, Number::Bytes, b"zspace", b"", "7a7370616365"),
        golden(Codec::Raw, Number::F64, b"", b"", ""),
        golden(Codec::Zstd, Number::Bytes, names, b"", "00004d0100d06c61796572732e302e6d6c702e776569676874206269617331310500a090a42400716b12c41d9309"),
        golden(Codec::Planes, Number::I8, &elements(300, 1, b"", |i| 5 * nearly(i)), b"", "03380fab1d00037b00037b00035f0f7f0b00723b832bf2641f045b8963012a2a24028a271800b12848018499980364ca806a8dc01d011f6c8607"),
        golden(Codec::Planes, Number::I32, &elements(9, 4, b"abc", |i| 1000 + i), b"", "01000100010300e8e9eaebecedeeeff0616263"),
        golden(Codec::Planes, b, &elements(100, 2, b"t", bf16), b"", "022e00004d0100887c797d7a7e7b7f7c787d797e7a7f7b787d0b00200320003200022003200032000220834e028828750072e558cb3eb124970a7df063d649bc2fa21588fb6fe055c63bac21920778ed5ed344b92a9f1085f66add50c336a91c8f0275e85bce41b4279a0d80f366d84dbe33a4198aff70e556cb3cb12297087dee63d548bb2ea11487fa6de053c639ac1f920578eb74"),
        golden(Codec::Planes, f, &elements(40, 4, b"", f32), b"", "021400007d000048787878787800ffff7801000d3802006edd4cbb2a000080e655c433a21180ef5ecd3cab1988f766d544b32291006fde4dbc2b9a0978e75600f3e6dacdc10000248f8275695c5043372a1e1104f8ebdfd2c6b9ada094877a6e6155483c2f2316090073e459ca3e0100690b7cf162d649bc2fa31489fa6fe154c73aac21920779ec5fd244b92a9f1084f7"),
        golden(Codec::Planes, Number::F64, &elements(12, 8, b"tail", |i| (i % 2) << 63 | 0x3ff << 52 | i), b"", "017f01e0010001000100010001000000030407080b0c0f101314177461696c"),
        golden(Codec::Constant, f, &elements(5, 4, &[0, 0], |_| 0x3f80_0000), b"", "0000803f"),
        golden(Codec::Same, Number::F16, b"base", b"base", ""),
        golden(Codec::DiffPlanes, Number::I64, &elements(5, 8, b"", |i| 7 * i), &elements(5, 8, b"", |i| 8 * i), "0100010001000100010001000100000001030507"),
        golden(Codec::DiffPlanes, b, &elements(60, 2, b"!", |i| bf16(i) ^ (i & 1)), &elements(60, 2, b"?", bf16), "0100021a0000ad00004800010002020001000204004002c020a60c9e1d1121"),
        golden(Codec::DiffPlanes, f, &elements(200, 4, b"", moved), &elements(200, 4, b"", f32), "010001000100022c00003d010082cc0885422111f5ff1ffef7ff3ffef53ffff1ff7ffef5ff1ffef72ffff0ff5ffef7ff3ffe1500"),
        golden(Codec::XorPlanes, Number::I16, &elements(9, 2, b"", |i| i ^ 0x100), &elements(9, 2, b"", |i| i), "01010100"),
        golden(Codec::XorPlanes, f, &elements(200, 4, b"ab", moved), &elements(200, 4, b"cd", f32), "010001000100023800009d010024020600fc0006003a000c007a0006000c0006000a001c000a0006001c0006001c0006001050020028433967284339672843596162"),
        golden(Codec::ZstdRef, Number::Bytes, later, names, "0000f5000060737465702034303a303031310700a010902e2912a0b8a86400719b985c"),
        golden(Codec::Rounded, b, &elements(10, 2, b"", |i| 0x3f81 + i), &elements(15, 4, b"", |i| (0x3f80 + i - if i < 8 { 1 } else { 3 }) << 16 | 0x7fff), "0702041420140501000102"),
        golden(Codec::Widened, f, &elements(10, 4, b"", |i| ((bf16(i) & 0x7fff) << 16) + 3), &elements(10, 2, b"", |i| bf16(i) & 0x7fff), "06010014050100010001000106"),
        golden(Codec::Widened, f, &elements(20, 4, b"", |i| f16(i).1), &elements(20, 2, b"", |i| f16(i).0), "0501002804"),
        golden(Codec::DiffSparse, b, &elements(1001, 2, b"x", rare), &elements(1001, 2, b"y", bf16), "0407000300ff8cffff590100000102030278"),
        golden(Codec::DiffSparse, f, &elements(900, 4, b"", moved), &elements(900, 4, b"", f32), "4a4a02150000850000380008110811080802008d7940e26204010001000100022600000d0100a24407850211218b10e8b98b16769981d6332ec2d053067ad84506bb67a0081b00"),
        golden(Codec::DiffBuckets, b, &elements(1001, 2, b"x", rare), &elements(1001, 2, b"y", bf16), "0000017e8100ee000fe907006f030520d80fa915c86101004a241b03c8610100c86101008a801e03c8610100c8610100002000040400000802000000040000080200000001000000010000000100000001000078"),
        golden(Codec::DiffBuckets, b, &elements(300, 2, b"", stepped), &elements(300, 2, b"", bf16), "017d7d02699700ceeeefedececcedeeffefeffeffefeefdeeeecfedeecee0e02018300090f0f0f0f0f0f0faadbdfbb0000b401d9889b0000932000aede10003480f30bb49b10005eb60d004dc466032d05020000e0ba857882568ff7ad061919be5a14e3db480d74ec410c6bf6741ecd79d8bef8daf4df9b0240fbd03560a8473cb7036200530b07e3aa97b939d5ffcaa40d25512aa44d160b2a1c541dd1c50466da6dd826c82147a9920ee8f3fb901d808bc4ec2387b78938360237535b31a2ad151c3759d7e281fbf3be860d46da7231db6847a37a5c41ca148cc56d1a1217c50991a66d2d4b08f94e632e6ee63472"),
        golden(Codec::DiffBuckets, f, &elements(900, 4, b"", moved), &elements(900, 4, b"", f32), "0000017d8300ff0ff0ff840700df60405cb65e038c175b037433d50d7a39d6007dcb5003a1425503742e900defdfc60df8b2a3d1265ec4710f6709d8350a754d4ef6e63702c46eebcb07ddea2cfcffe3003006d6a303007d930348189c005190980027459c00a42098008fba9c003134990010b9fa64969518405e3668ffacab0a2000"),
        golden(Codec::DiffBuckets, Number::F64, &elements(70, 8, b"abc", |i| (noise(i) << 29) + nearly(i)), &elements(70, 8, b"cba", |i| noise(i) << 29), "000001818300ff0f4600bf6020069b2300b09b230020340200049d2300ae9d230020340200029f2300ac9f2300002036f502006605030036f50200bb0a030066050300bb0a0300000001000000010000616263"),
        golden(Codec::DiffBuckets, Number::I8, &elements(500, 1, b"", |i| noise(i) + nearly(i)), &elements(500, 1, b"", noise), "000001818300ff0ff40300df60308e05670029e7640094229c01ab2966005d9b66008da46600db1d6400dd0f96017dc344822f1e5814c6a045498419f41b00204bd5cf021477e30273a2ee00fddcf5006605ee000dddf70012e1f200b907f80000"),
        golden(Codec::DiffMagnitudes, b, &elements(1001, 2, b"x", rare), &elements(1001, 2, b"y", bf16), "0000017f82000ef00ee907006f030520d80fa915c86101004a241b03c8610100c86101008a801e03c8610100c861010000200004020000040200000c040000000400000001000000010000000100000001000078"),
        golden(Codec::DiffMagnitudes, b, &elements(300, 2, b"", stepped), &elements(300, 2, b"", bf16), "017d7d02809700feefefffeeedceeeeeeeeeee02018300090f0f0f0f0f0f0ffdce0c00009601e8313303c9b90834268c0a00d7df91cf8a021c00d8617701e891c0012785c200c6da28a599bdf140b969a6067fe7b253e3c186ec25c8b6cf167e61ae8a75ed3638b989a8a79cc7c40eb3614e0dc4ec4e2c857235777dbd3187bba127306753a33703c3e6a36297ecdf6de7e9c19f5fe9aae6f76b89434380fc8ca214c00aae8062065bece825e26f0a989863938bc9044ec3685377dd08f94e632e6ee63472"),
        golden(Codec::DiffMagnitudes, f, &elements(900, 4, b"", moved), &elements(900, 4, b"", f32), "000001818300ff0f840700df60405cb65e038c175b037433d50d7a39d6007dcb5003a1425503742e900defdfc60df8b2a3d1265ec4710f6709d8350a754d4ef6e63702c46eebcb07ddea2cfcffe30020714053e64d78bceb67d1574d2ebf934e4f67f14bf6aa0c4e55153a4b0528594e00"),
        golden(Codec::DiffMagnitudes, Number::F64, &elements(70, 8, b"abc", |i| (noise(i) << 29) + nearly(i)), &elements(70, 8, b"cba", |i| noise(i) << 29), "000001818300ff0f4600bf6020069b2300b09b230020340200049d2300ae9d230020340200029f2300ac9f2300002036f502006605030036f50200bb0a030066050300bb0a0300000001000000010000616263"),
        golden(Codec::DiffBands, b, &elements(400, 2, b"z", uneven), &elements(400, 2, b"!", bf16), "030000803f0000803f0000803f0000020002010201600000018181011f800100700f200000010000000100000001000000010000000100000001000000010000000100103333333333333333333333333393999920000001000000010000000100000001000000010000000100000001000000010000590000018181000f50000ef620ec3f0200ec3f0200f87f0400f87f0400f87f0400f87f0400f87f0400f87f04000a9999999999999999cccc200000010000000100000001000000010000000100000001000000010000000100006f000002808800efefffff0f0000604df503107c2a5b106ae50321e02a6b108af50321f02a6b108a3f9010f02a6b10f998a83ea83ea83e083e1fa21fa203a2306459c046adcbc06c2dcbc06ce5cbc0c640801b3108062c31c8062c0bc8066d00aa003e00b2000600b20006002a0006007a"),
        golden(Codec::DiffBands, f, &elements(700, 4, b"ab", decayed), &elements(700, 4, b"cd", |i| f32(i + 8)), "060000803f0000803f0000803f0000803f0000803f6666663f00050505050505050505000050000001818300ff0f7c00df602098852300476790009c78900042022400ec8a23009bac9000e9102400eb8e23000020ec1a0900d8d408009725090036f50200bb0a030066050300bb0a030036f50200000000000007000000000000006162"),
    ];
    all
}

#[test]
fn payloads_of_the_first_version_decode() {
    for (i, g) in all().iter().enumerate() {
        let payload: Vec<u8> = (0..g.payload.len() / 2)
            .map(|k| u8::from_str_radix(&g.payload[2 * k..2 * k + 2], 16).unwrap())
            .collect();
        let mut buf = g.base.clone();
        decode(g.codec, g.number, &payload, g.raw.len(), &mut buf)
            .unwrap_or_else(|e| panic!("golden {i}: {e}"));
        assert!(
            buf == g.raw,
            "golden {i} ({}) decodes to other bytes",
            g.codec.name()
        );
    }
    let covered: std::collections::HashSet<Codec> = all().iter().map(|g| g.codec).collect();
    assert_eq!(
        covered.len(),
        Codec::ALL.len(),
        "a codec without a golden payload"
    );
}

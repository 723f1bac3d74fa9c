//! Compares rules for what a version's chunks are deltas against, on a real series: size, and the work of a rebuild.
//!
//!     cargo run --release --example chain_bench -- [--number f32] FILE…
//!
//! Each FILE is a version. For each rule: bytes stored / bytes raw, the most deltas and the most stored bytes / raw bytes that a rebuild
//! of any version reads, and MB/s (of processor time) of rebuilding each version by itself on one thread, hashing not counted: of the last and on average.

#[path = "common/chunks.rs"]
mod chunks;

use chunks::{Chunk, Failure, cpu_seconds, read};
use std::collections::HashMap;
use zspace::codec::{Encoded, decode, encode};
use zspace::tensor::Dtype;

/// A name, and the version that version `n` above 0 is a delta against; none for a full copy.
type Rule = (&'static str, fn(usize) -> Option<usize>);

const RULES: [Rule; 8] = [
    ("full copies", |_| None),
    ("plain chain", |n| Some(n - 1)),
    ("full copy every 8", |n| (!n.is_multiple_of(8)).then(|| n - 1)),
    ("two levels: anchor every 8, then chains", |n| {
        Some(if n.is_multiple_of(8) { 0 } else { n - 1 })
    }),
    ("two levels: all against the anchor", |n| {
        Some(if n.is_multiple_of(8) { n - 8 } else { n / 8 * 8 })
    }),
    ("skip-deltas in twos (FSFS)", |n| Some(n & (n - 1))),
    ("skip-deltas 4, 4, 2, …", |n| Some(digits(n, &[4, 4]))),
    ("skip-deltas 8, 4, 2, … (zspace)", |n| Some(digits(n, &[8, 4]))),
];

/// Takes one off the lowest digit that is not 0; digits count to these, the higher ones to 2.
fn digits(n: usize, radices: &[usize]) -> usize {
    let mut unit = 1;
    for radix in radices.iter().copied().chain(std::iter::repeat(2)) {
        if !(n / unit).is_multiple_of(radix) {
            break;
        }
        unit *= radix;
    }
    n - unit
}

fn main() -> Result<(), Failure> {
    let mut number = None;
    let mut files = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        if arg == "--number" {
            let name = args.next().unwrap_or_default().to_uppercase();
            let dtype = Dtype::from_safetensors(&name).ok_or("--number wants f32, bf16, i64, …")?;
            number = Some(dtype.number());
        } else {
            files.push(arg);
        }
    }
    let versions = files
        .iter()
        .map(|f| read(f, number, (0, 1)))
        .collect::<Result<Vec<_>, _>>()?;
    if versions.windows(2).any(|w| w[0].len() != w[1].len()) {
        return Err("the files have not the same tensors".into());
    }
    let raw: usize = versions.iter().flatten().map(|c| c.raw.len()).sum();
    println!(
        "{:42} {:>8} {:>7} {:>8} {:>10} {:>10}",
        "", "stored", "deltas", "read", "last MB/s", "mean MB/s"
    );
    let mut encoded = HashMap::new();
    for (name, rule) in RULES {
        let base = |n: usize| if n == 0 { None } else { rule(n) };
        let mut stored = 0;
        let (mut depths, mut costs) = (vec![0], vec![0]);
        for n in 0..versions.len() {
            let own = size(&mut encoded, &versions, n, base(n))?;
            stored += own;
            let (depth, cost) = base(n).map_or((0, 0), |b| (depths[b] + 1, costs[b]));
            depths.insert(n, depth);
            costs.insert(n, cost + own);
        }
        let one = raw / versions.len();
        let seconds = (0..versions.len())
            .map(|n| rebuild(&encoded, &versions, n, &base))
            .collect::<Result<Vec<_>, _>>()?;
        let speed = |seconds: f64| one as f64 / seconds / 1e6;
        println!(
            "{name:42} {:8.4} {:7} {:8.2} {:10.0} {:10.0}",
            stored as f64 / raw as f64,
            depths.iter().max().unwrap_or(&0),
            costs.iter().max().copied().unwrap_or(0) as f64 / one as f64,
            speed(seconds.last().copied().unwrap_or(1.0)),
            speed(seconds.iter().sum::<f64>() / seconds.len() as f64),
        );
    }
    Ok(())
}

type Codes = HashMap<(usize, Option<usize>), Vec<Encoded>>;

fn size(codes: &mut Codes, versions: &[Vec<Chunk>], n: usize, base: Option<usize>) -> Result<usize, Failure> {
    let encoded = codes.entry((n, base)).or_insert_with(|| {
        let chunks = versions[n].iter().enumerate();
        chunks
            .map(|(i, c)| encode(&c.raw, c.number, base.map(|b| &versions[b][i].raw[..])))
            .collect()
    });
    Ok(encoded.iter().map(|e| e.payload.len()).sum())
}

/// Rebuilds version `n` chunk by chunk, checks it, and gives the seconds that decoding took.
fn rebuild(
    codes: &Codes,
    versions: &[Vec<Chunk>],
    n: usize,
    base: &dyn Fn(usize) -> Option<usize>,
) -> Result<f64, Failure> {
    let mut chain = vec![n];
    while let Some(b) = chain.last().and_then(|n| base(*n)) {
        chain.push(b);
    }
    let mut seconds = 0.0;
    let mut buf = Vec::new();
    for (i, chunk) in versions[n].iter().enumerate() {
        let start = cpu_seconds();
        buf.clear();
        for v in chain.iter().rev() {
            let e = &codes[&(*v, base(*v))][i];
            decode(e.codec, chunk.number, &e.payload, chunk.raw.len(), &mut buf)?;
        }
        seconds += cpu_seconds() - start;
        if buf != chunk.raw {
            return Err("a rebuilt chunk differs".into());
        }
    }
    Ok(seconds)
}

//! Measures the chunk codecs on real checkpoints: size, and speed on one thread (of processor time).
//!
//!     cargo run --release --example codec_bench -- [--number f32] [--members N/M] [--codec NAME] FILE…
//!
//! Each file's base is the file before it. Files are safetensors, torch zip files (members `*/data/N`, read as `--number`; with
//! `--members N/M` only every M-th from the N-th on, which tells an Adam state's moments apart) or anything else (read as `--number`,
//! bytes if not given). A tensor of 32 KiB or more is a chunk, cut at 1 MiB; smaller neighbours share one. Every codec is measured on
//! each chunk it applies to, or only `--codec`; `chosen` is what `encode` picks, and the lines after it say how often it picked what.

#[path = "common/chunks.rs"]
mod chunks;

use chunks::{Chunk, Failure, cpu_seconds, read};
use std::time::Duration;
use zspace::codec::{Codec, Encoded, decode, encode, encode_as};
use zspace::tensor::Dtype;

#[derive(Default, Clone)]
struct Total {
    chunks: usize,
    raw: usize,
    stored: usize,
    encoding: Duration,
    decoding: Duration,
}

fn main() -> Result<(), Failure> {
    let mut number = None;
    let mut members = (0, 1);
    let mut files = Vec::new();
    let mut only = None;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--number" => {
                let name = args.next().unwrap_or_default().to_uppercase();
                number = Some(
                    Dtype::from_safetensors(&name)
                        .ok_or("--number wants f32, bf16, i64, …")?
                        .number(),
                );
            }
            "--members" => {
                let value = args.next().unwrap_or_default();
                let (n, m) = value.split_once('/').ok_or("--members wants N/M")?;
                members = (n.parse()?, m.parse()?);
            }
            "--codec" => {
                let name = args.next().unwrap_or_default();
                let found = Codec::ALL.iter().position(|c| c.name() == name);
                only = Some(found.ok_or("--codec wants raw, planes, diff-buckets, …")?);
            }
            _ => files.push(arg),
        }
    }
    let mut first = vec![Total::default(); Codec::ALL.len() + 1];
    let mut later = first.clone();
    let (mut picks_first, mut picks_later) = (
        vec![Total::default(); Codec::ALL.len()],
        vec![Total::default(); Codec::ALL.len()],
    );
    let mut before: Vec<Chunk> = Vec::new();
    for file in &files {
        let chunks = read(file, number, members)?;
        for (i, c) in chunks.iter().enumerate() {
            let base = before
                .get(i)
                .filter(|b| b.raw.len() == c.raw.len())
                .map(|b| &b.raw[..]);
            let (totals, picks) = if base.is_some() {
                (&mut later, &mut picks_later)
            } else {
                (&mut first, &mut picks_first)
            };
            for (i, (codec, total)) in Codec::ALL.iter().zip(totals.iter_mut()).enumerate() {
                if only.is_some_and(|only| only != i) {
                    continue;
                }
                measure(c, base, total, || encode_as(*codec, &c.raw, c.number, base))?;
            }
            if only.is_some() {
                continue;
            }
            let n = totals.len() - 1;
            if let Some(e) = measure(c, base, &mut totals[n], || Some(encode(&c.raw, c.number, base)))? {
                let pick = &mut picks[e.codec as usize];
                pick.chunks += 1;
                pick.raw += c.raw.len();
                pick.stored += e.payload.len();
            }
        }
        before = chunks;
    }
    report("without a base", &first, &picks_first);
    report("against the file before", &later, &picks_later);
    Ok(())
}

/// Runs and checks one encoding and its decoding, each twice, and counts the faster.
fn measure(
    c: &Chunk,
    base: Option<&[u8]>,
    total: &mut Total,
    f: impl Fn() -> Option<Encoded>,
) -> Result<Option<Encoded>, Failure> {
    let Some(e) = f() else { return Ok(None) };
    let again = cpu_seconds();
    let _ = f();
    let encoding = Duration::from_secs_f64((cpu_seconds() - again).max(0.0));
    let mut decoding = Duration::MAX;
    for _ in 0..2 {
        let mut buf = Vec::with_capacity(c.raw.len());
        if e.codec.needs_base() {
            buf.extend_from_slice(base.ok_or("a codec wanted a base that it was not given")?);
        }
        let start = cpu_seconds();
        decode(e.codec, c.number, &e.payload, c.raw.len(), &mut buf)?;
        decoding = decoding.min(Duration::from_secs_f64((cpu_seconds() - start).max(0.0)));
        if buf != c.raw {
            return Err(format!("{} changed a chunk", e.codec.name()).into());
        }
    }
    total.chunks += 1;
    total.raw += c.raw.len();
    total.stored += e.payload.len();
    total.encoding += encoding;
    total.decoding += decoding;
    Ok(Some(e))
}

fn report(title: &str, totals: &[Total], picks: &[Total]) {
    if totals.iter().all(|t| t.chunks == 0) {
        return;
    }
    println!(
        "{title}:\n{:14} {:>7} {:>11} {:>11} {:>7} {:>9} {:>9}",
        "", "chunks", "raw", "stored", "ratio", "enc MB/s", "dec MB/s"
    );
    let speed = |t: &Total, d: Duration| t.raw as f64 / d.as_secs_f64() / 1e6;
    let names = Codec::ALL.iter().map(|c| c.name()).chain(["chosen"]);
    for (name, t) in names.zip(totals).filter(|(_, t)| t.chunks > 0) {
        println!(
            "{name:14} {:7} {:11} {:11} {:7.4} {:9.0} {:9.0}",
            t.chunks,
            t.raw,
            t.stored,
            t.stored as f64 / t.raw as f64,
            speed(t, t.encoding),
            speed(t, t.decoding)
        );
    }
    for (codec, t) in Codec::ALL.iter().zip(picks).filter(|(_, t)| t.chunks > 0) {
        println!(
            "  {:12} {:7} {:11} {:11} {:7.4}",
            codec.name(),
            t.chunks,
            t.raw,
            t.stored,
            t.stored as f64 / t.raw as f64
        );
    }
}

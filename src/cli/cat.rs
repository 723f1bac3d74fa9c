//! `zspace cat`

use super::Context;
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::EntryKind;
use std::io::Write;

/// Write the bytes of a file to standard output
#[derive(clap::Args)]
pub(super) struct Args {
    /// REV:FILE
    file: String,
    /// Only the bytes from A up to, not including, B
    #[arg(long, value_name = "A..B", value_parser = parse_range)]
    range: Option<(u64, u64)>,
    /// Afterwards, say on standard error in JSON what had to be read
    #[arg(long)]
    json: bool,
}

/// Bytes written at a time, and rebuilt ahead of that.
const STEP: usize = 1 << 20;
const AHEAD: usize = 16 << 20;

#[derive(serde::Serialize)]
struct Cost {
    bytes: u64,
    /// Chunks asked for, bases not counted.
    chunks_read: u64,
    /// Encoded nodes read from packs, bases, manifest and layout included.
    nodes_read: u64,
    /// Payload bytes of those.
    bytes_read: u64,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = context.open()?;
    let (rev, path) = args
        .file
        .split_once(':')
        .ok_or_else(|| Error::new(Kind::Usage, "which file? zspace cat REV:FILE"))?;
    let version = store.resolve(rev)?;
    let entry = store.entry(&version, path.as_bytes())?;
    let EntryKind::File { hash, len, .. } = entry.kind else {
        return Err(Error::new(
            Kind::Usage,
            format!("{} is no regular file", args.file),
        ));
    };
    let file = store.file(&hash, len)?;
    let (from, to) = args.range.unwrap_or((0, len));
    if to > len {
        return Err(Error::new(
            Kind::Usage,
            format!("{} has {len} bytes, so there is no range {from}..{to}", args.file),
        ));
    }
    let mut out = std::io::stdout().lock();
    let mut at = from;
    while at < to {
        let ahead = AHEAD.min((to - at) as usize);
        if ahead > STEP {
            file.read_ahead(at, ahead);
        }
        let bytes = file.read(at, STEP.min((to - at) as usize))?;
        if bytes.is_empty() {
            return Err(Error::damage("file ends early"));
        }
        out.write_all(&bytes)
            .doing(|| "write to standard output".into())?;
        at += bytes.len() as u64;
    }
    out.flush().doing(|| "write to standard output".into())?;
    if args.json {
        let c = store.counters();
        let cost = Cost {
            bytes: to - from,
            chunks_read: c.asked,
            nodes_read: c.read,
            bytes_read: c.read_bytes,
        };
        let text = serde_json::to_string(&cost).map_err(|e| Error::new(Kind::Io, e.to_string()))?;
        eprintln!("{text}");
    }
    Ok(())
}

fn parse_range(text: &str) -> std::result::Result<(u64, u64), String> {
    let parse = || {
        let (a, b) = text.split_once("..")?;
        Some((a.parse().ok()?, b.parse().ok()?))
    };
    parse()
        .filter(|(a, b)| a <= b)
        .ok_or_else(|| "write A..B, as in 100..123".into())
}

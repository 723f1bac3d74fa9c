//! `zspace cat`

use super::Context;
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::EntryKind;
use std::fs::File;
use std::os::fd::AsFd;

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
    // Not through the standard library's buffer, which looks for ends of lines.
    let out = std::io::stdout().as_fd().try_clone_to_owned();
    let mut out = File::from(out.doing(|| "open standard output".into())?);
    file.copy_to(from..to, &mut out, &mut |_| Ok(()))
        .map_err(|e| e.context(format_args!("{} to standard output", args.file)))?;
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

/// `A..B`.
pub(super) fn parse_range(text: &str) -> std::result::Result<(u64, u64), String> {
    let parse = || {
        let (a, b) = text.split_once("..")?;
        Some((a.parse().ok()?, b.parse().ok()?))
    };
    parse()
        .filter(|(a, b)| a <= b)
        .ok_or_else(|| "write A..B, as in 100..123".into())
}

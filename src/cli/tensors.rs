//! `zspace tensors`

use super::{Context, show};
use crate::error::{Error, Kind, Result};
use crate::store::EntryKind;

/// List the tensors of a version with dtype, shape, depth (deltas to apply) and stored bytes
#[derive(clap::Args)]
pub(super) struct Args {
    /// REV or REV:FILE
    rev: String,
    /// One JSON object per tensor
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Line {
    file: String,
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
    depth: u8,
    stored: u64,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = context.open()?;
    let entries = store.select(&args.rev)?;
    let mut rows = Vec::new();
    for (path, e) in entries {
        let EntryKind::File { hash, len, .. } = e.kind else {
            continue;
        };
        let file = store.file(&hash, len)?;
        for t in file.tensors() {
            let (stored, depth) = file.stored_range(t.span.0, t.span.1)?;
            let line = Line {
                file: show::printable(&path),
                name: t.name,
                dtype: t.dtype.to_string(),
                shape: t.shape,
                bytes: t.span.1,
                depth,
                stored,
            };
            if args.json {
                show::print_json(&line)?;
                continue;
            }
            rows.push(vec![
                line.file,
                show::printable(line.name.as_bytes()),
                line.dtype,
                format!("{:?}", line.shape),
                show::bytes(line.bytes),
                format!("depth {}", line.depth),
                show::bytes(line.stored),
            ]);
        }
    }
    if rows.is_empty() && !args.json {
        return Err(Error::new(
            Kind::NotFound,
            format!("{} has no tensors that zspace can read", args.rev),
        ));
    }
    show::print(&show::table(&rows, &[4, 6]))
}

//! `zspace ls`

use super::{Context, show};
use crate::error::Result;
use crate::store::{Entry, EntryKind};

/// List the files of a version
#[derive(clap::Args)]
pub(super) struct Args {
    /// REV or REV:PATH
    rev: String,
    /// One JSON object per entry
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Line<'a> {
    path: &'a str,
    kind: &'static str,
    mode: String,
    mtime: f64,
    bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = context.open()?;
    let entries = store.select(&args.rev)?;
    let mut rows = Vec::new();
    for (path, e) in &entries {
        let (kind, mark) = kind(e);
        if args.json {
            let (sha256, target) = match &e.kind {
                EntryKind::File { hash, .. } => (Some(hash.to_string()), None),
                EntryKind::Symlink(t) => (None, Some(String::from_utf8_lossy(t).into_owned())),
                EntryKind::Dir { .. } => (None, None),
            };
            let mtime = e.mtime.seconds as f64 + f64::from(e.mtime.nanos) / 1e9;
            let path = &String::from_utf8_lossy(path);
            show::print_json(&Line {
                path,
                kind,
                mode: format!("{:04o}", e.mode),
                mtime,
                bytes: e.len(),
                sha256,
                target,
            })?;
            continue;
        }
        let mut name = format!("{}{mark}", show::printable(path));
        if let EntryKind::Symlink(t) = &e.kind {
            name = format!("{name} -> {}", show::printable(t));
        }
        rows.push(vec![
            format!("{:04o}", e.mode),
            e.len().to_string(),
            show::time(e.mtime),
            name,
        ]);
    }
    show::print(&show::table(&rows, &[1]))
}

fn kind(e: &Entry) -> (&'static str, &'static str) {
    match e.kind {
        EntryKind::File { .. } => ("file", ""),
        EntryKind::Dir { .. } => ("directory", "/"),
        EntryKind::Symlink(_) => ("link", ""),
    }
}

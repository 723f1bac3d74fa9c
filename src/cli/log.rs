//! `zspace log`

use super::{Context, show};
use crate::error::Result;
use crate::store::{MAIN, Numbered};

/// Show the history of a branch, newest first
#[derive(clap::Args)]
pub(super) struct Args {
    /// The branch
    #[arg(default_value = MAIN)]
    branch: String,
    /// One JSON object per version
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Line {
    version: String,
    id: String,
    parent: Option<String>,
    time: f64,
    entry: String,
    message: String,
    files: u64,
    bytes: u64,
    stored: u64,
    tags: Vec<String>,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = context.open()?;
    let versions = store.versions(&args.branch)?;
    if versions.is_empty() {
        match store.latest(&args.branch) {
            Some(v) => eprintln!(
                "zspace: {} has no version of its own yet; it follows {}",
                args.branch,
                v.name()
            ),
            None => eprintln!(
                "zspace: {} has no version yet (`zspace branch` lists the others)",
                args.branch
            ),
        }
    }
    let tags = store.tags();
    let line = |v: &Numbered| Line {
        version: v.name(),
        id: v.id.to_string(),
        parent: v.version.parents.first().map(ToString::to_string),
        time: v.version.time.seconds as f64 + f64::from(v.version.time.nanos) / 1e9,
        entry: String::from_utf8_lossy(&v.version.entry).into_owned(),
        message: v.version.message.clone(),
        files: v.files,
        bytes: v.version.len,
        stored: v.stored,
        tags: tags
            .iter()
            .filter(|(_, t)| t.id == v.id)
            .map(|(n, _)| n.clone())
            .collect(),
    };
    if args.json {
        return versions.iter().rev().try_for_each(|v| show::print_json(&line(v)));
    }
    let mut rows = Vec::new();
    for v in versions.iter().rev() {
        let l = line(v);
        let mut said: Vec<String> = l.tags.iter().map(|t| format!("[{t}]")).collect();
        said.push(show::printable(l.message.as_bytes()));
        rows.push(vec![
            l.version,
            v.id.short(),
            show::time(v.version.time),
            show::bytes(l.bytes),
            format!("+{}", show::bytes(l.stored)),
            show::printable(l.entry.as_bytes()),
            said.join(" "),
        ]);
    }
    show::print(&show::table(&rows, &[3, 4]))
}

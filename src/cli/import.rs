//! `zspace import`

mod run;
mod source;

use super::signals::Stop;
use super::{Context, show};
use crate::error::{Error, Kind, Result};
use crate::store::{CommitRequest, Committed, MAIN, Numbered, Options, Store};
use run::{Checkpoint, checkpoints};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// Take an existing run in: every checkpoint in a directory becomes a version, in natural order (step-9 before step-10)
///
/// A checkpoint is a directory with files that hold tensors, or such a file by itself; loose files that belong together (shards, a model and
/// its tokenizer) are one. What is torn or unfinished is left out, and told. A checkpoint whose files have the names, sizes and times of a
/// version of the branch is there already: an import that was broken off is simply begun again.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Directories of checkpoints
    #[arg(required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,
    /// The branch, made if absent
    #[arg(long, default_value = MAIN)]
    branch: String,
    /// Remove each checkpoint once its version is durable, has been read back, and both have the same SHA-256
    #[arg(long)]
    remove_source: bool,
    /// Show what would become a version, in order, and do nothing
    #[arg(long)]
    dry_run: bool,
    /// One JSON object per version
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Line {
    source: String,
    version: Option<String>,
    id: Option<String>,
    bytes: u64,
    stored: u64,
    /// Whether it was not there before.
    new: bool,
    removed: bool,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = match args.dry_run {
        true => context.open()?,
        false => context.open_or_init(&Options::default())?,
    };
    let stop = Stop::on_signals()?;
    let mut found = Vec::new();
    for dir in &args.dirs {
        found.extend(checkpoints(&store, dir)?);
    }
    if found.is_empty() {
        let why = "there is no checkpoint in it: no file or directory with tensors";
        return Err(Error::new(Kind::NotFound, why));
    }
    let known = known(&store, &args.branch)?;
    let total = found.len();
    for (n, checkpoint) in found.iter().enumerate() {
        stop.check().map_err(|_| {
            let why = format!("stopped after {n} of {total}: the same command goes on");
            Error::new(Kind::Stopped, why)
        })?;
        let line = match known.get(&source::listing(&checkpoint.entries)?) {
            Some(version) => there(&store, args, checkpoint, version, &stop)?,
            None if args.dry_run => line(checkpoint),
            None => {
                let what = format!("[{} of {total}] {}", n + 1, checkpoint.name);
                new(&store, args, checkpoint, &what, &stop)?
            }
        };
        match args.json {
            true => show::print_json(&line)?,
            false => show::print(&text(&line))?,
        }
    }
    if let Err(e) = store.close() {
        log::warn!("{e}");
    }
    Ok(())
}

/// The versions of a branch by what their files look like on a disk.
fn known(store: &Store, branch: &str) -> Result<HashMap<source::Listing, Arc<Numbered>>> {
    let versions = match store.has_branch(branch) {
        true => store.versions(branch)?,
        false => Vec::new(),
    };
    let mut known = HashMap::new();
    for version in versions {
        match source::stored(store, &version) {
            Ok(listing) => drop(known.insert(listing, version)),
            Err(e) => log::warn!("{}: {e}", version.name()),
        }
    }
    Ok(known)
}

fn line(checkpoint: &Checkpoint) -> Line {
    Line {
        source: checkpoint.path.display().to_string(),
        version: None,
        id: None,
        bytes: checkpoint.bytes,
        stored: 0,
        new: true,
        removed: false,
    }
}

fn there(
    store: &Store,
    args: &Args,
    checkpoint: &Checkpoint,
    version: &Arc<Numbered>,
    stop: &Stop,
) -> Result<Line> {
    let mut line = Line {
        version: Some(version.name()),
        id: Some(version.id.to_string()),
        new: false,
        ..line(checkpoint)
    };
    if args.remove_source && !args.dry_run {
        source::remove(store, version, &checkpoint.entries, stop)?;
        line.removed = true;
    }
    Ok(line)
}

fn new(store: &Store, args: &Args, checkpoint: &Checkpoint, what: &str, stop: &Stop) -> Result<Line> {
    let bar = show::bar(what, checkpoint.bytes);
    let asked = stop.clone();
    let request = CommitRequest {
        branch: args.branch.clone(),
        entries: checkpoint.entries.clone(),
        progress: show::progress(&bar),
        stop: Some(Arc::new(move || asked.is_asked())),
        ..CommitRequest::default()
    };
    let done = store.commit(&request);
    bar.finish_and_clear();
    let done: Committed = done.map_err(|e| e.context(checkpoint.path.display()))?;
    let mut line = Line {
        version: Some(format!("{}/{:06}", done.branch, done.number)),
        id: Some(done.id.to_string()),
        bytes: done.bytes,
        stored: done.stored,
        ..line(checkpoint)
    };
    if args.remove_source {
        let gone = || Error::new(Kind::NotFound, "the version that was just made is not there");
        let version = store.version(&done.id).ok_or_else(gone)?;
        source::remove(store, &version, &checkpoint.entries, stop)?;
        line.removed = true;
    }
    Ok(line)
}

fn text(line: &Line) -> String {
    let source = show::printable(line.source.as_bytes());
    let removed = if line.removed { ", source removed" } else { "" };
    match (&line.version, line.new) {
        (None, _) => format!("{source}  {}\n", show::bytes(line.bytes)),
        (Some(version), false) => format!("{version}  {source}  there already{removed}\n"),
        (Some(version), true) => format!(
            "{version}  {source}  {}, {} stored{removed}\n",
            show::bytes(line.bytes),
            show::bytes(line.stored)
        ),
    }
}

//! `zspace export`

use super::signals::Stop;
use super::{Context, show};
use crate::error::Result;
use indicatif::ProgressBar;
use std::path::PathBuf;

/// Write a whole version, or REV:PATH of it, to a directory
#[derive(clap::Args)]
pub(super) struct Args {
    /// REV or REV:PATH
    rev: String,
    /// The directory, made if absent; for REV:PATH the name it gets. Nothing there is overwritten
    dest: PathBuf,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = context.open()?;
    let stop = Stop::on_signals()?;
    let (rev, path) = args.rev.split_once(':').unwrap_or((&args.rev, ""));
    let version = store.resolve(rev)?;
    let path = path.trim_matches('/');
    if path.is_empty() {
        let bar = show::bar("export", version.version.len);
        store.export(&version, &args.dest, &mut told(&bar, &stop))?;
        bar.finish_and_clear();
        return Ok(());
    }
    let entry = store.entry(&version, path.as_bytes())?;
    let bar = show::bar("export", entry.len());
    store.export_entry(&entry, &args.dest, &mut told(&bar, &stop))?;
    bar.finish_and_clear();
    Ok(())
}

fn told(bar: &ProgressBar, stop: &Stop) -> impl FnMut(u64) -> Result<()> {
    move |bytes| {
        bar.inc(bytes);
        stop.check()
    }
}

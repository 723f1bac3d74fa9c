//! `zspace commit`

use super::signals::Stop;
use super::{Context, show};
use crate::error::{Error, Kind, Result};
use crate::fuse::control;
use crate::store::{CommitRequest, Committed, MAIN, Options};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Commit files or directories, each as a version of its own; prints BRANCH/NUMBER and the id of each
///
/// A PATH inside a mount's staging directory is committed by that mount, on the branch it lies in.
#[derive(clap::Args)]
pub(super) struct Args {
    /// What to commit, in this order (a shell's * puts checkpoint-10 before checkpoint-5: `ls -v` does not)
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// The branch, made if absent [default: main; in staging, the one it lies in]
    #[arg(long)]
    branch: Option<String>,
    /// What to say of it
    #[arg(short, long, default_value = "")]
    message: String,
    /// Store what symbolic links point at, in place of the links
    #[arg(long)]
    follow_links: bool,
    /// One JSON object per version
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Line {
    version: String,
    id: String,
    bytes: u64,
    stored: u64,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    // Before anything is committed: a typo in the last name should not leave half of it done.
    for path in &args.paths {
        std::fs::metadata(path).map_err(|e| Error::io(path.display().to_string(), e))?;
    }
    let mut stop = None;
    for path in &args.paths {
        let done = match control::staged(path)? {
            // The mount commits it, whatever becomes of this process.
            Some(staged) => in_staging(args, path, &staged)?,
            None => {
                let stop = match &stop {
                    Some(stop) => stop,
                    None => stop.insert(Stop::on_signals()?),
                };
                stop.check()?;
                from_disk(context, args, path, stop.clone())?
            }
        };
        if done.links_outside > 0 {
            eprintln!(
                "zspace: {}: {} symbolic links point outside of it; they are kept as links, what they point at is not in \
                 the version (--follow-links stores it)",
                path.display(),
                done.links_outside
            );
        }
        let version = format!("{}/{:06}", done.branch, done.number);
        match args.json {
            true => show::print_json(&Line {
                version,
                id: done.id.to_string(),
                bytes: done.bytes,
                stored: done.stored,
            })?,
            false => show::print(&format!("{version} {}\n", done.id))?,
        }
    }
    Ok(())
}

fn in_staging(args: &Args, path: &Path, staged: &control::Staged) -> Result<Committed> {
    if args.branch.as_deref().is_some_and(|b| b != staged.branch) || args.follow_links {
        let why = format!(
            "{} is staged on branch {:?}: it is committed there, as it is",
            path.display(),
            staged.branch
        );
        return Err(Error::new(Kind::Usage, why));
    }
    control::commit(staged, &args.message).map_err(|e| e.context(path.display()))
}

fn from_disk(context: &Context, args: &Args, path: &Path, stop: Stop) -> Result<Committed> {
    let whole = std::path::absolute(path).map_err(|e| Error::io(path.display().to_string(), e))?;
    // `dir/.` and `..` have no last name of their own.
    let whole = if path.ends_with("..") || path.ends_with(".") {
        std::fs::canonicalize(&whole).unwrap_or(whole)
    } else {
        whole
    };
    let name = whole.file_name().map(OsStr::as_bytes).map(<[u8]>::to_vec);
    let name = name.ok_or_else(|| {
        Error::new(
            Kind::Usage,
            format!("{} has no name to commit it under", path.display()),
        )
    })?;
    if control::is_whole_door(&whole) {
        let why = format!(
            "{} is a mount or a whole part of it: commit something inside",
            path.display()
        );
        return Err(Error::new(Kind::Refused, why));
    }
    let store = context.open_or_init(&Options::default())?;
    let bar = show::bar(&path.display().to_string(), 0);
    let request = CommitRequest {
        branch: args.branch.clone().unwrap_or_else(|| MAIN.to_owned()),
        entries: vec![(name, whole)],
        message: args.message.clone(),
        follow_links: args.follow_links,
        keep_links: false,
        background: false,
        progress: show::progress(&bar),
        stop: Some(Arc::new(move || stop.is_asked())),
    };
    let done = store.commit(&request);
    bar.finish_and_clear();
    let done = done?;
    // The version is durable; an index that could not be written costs the next opening time, no more.
    if let Err(e) = store.close() {
        log::warn!("{e}");
    }
    Ok(done)
}

//! `zspace commit`

use super::{Context, place, show};
use crate::error::{Error, Kind, Result};

use crate::store::{CommitRequest, MAIN, Options, Progress};
use serde_json::Value;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Commit files or directories, each as a version of its own; prints BRANCH/NUMBER and the id of each
///
/// A PATH inside a mount's staging directory is committed by that mount, on the branch it lies in.
#[derive(clap::Args)]
pub(super) struct Args {
    /// What to commit
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
    #[serde(skip)]
    links_outside: u64,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    for path in &args.paths {
        let staged = place::mounted(path).filter(|m| m.path.first().is_some_and(|door| door == "staging"));
        let done = match staged {
            Some(at) => in_staging(args, path, &at)?,
            None => from_disk(context, args, path)?,
        };
        if done.links_outside > 0 {
            eprintln!(
                "zspace: {}: {} symbolic links point outside of it; they are kept as links, what they point at is not in \
                 the version (--follow-links stores it)",
                path.display(),
                done.links_outside
            );
        }
        match args.json {
            true => show::print_json(&done)?,
            false => show::print(&format!("{} {}\n", done.version, done.id))?,
        }
    }
    Ok(())
}

fn in_staging(args: &Args, path: &Path, at: &place::Mounted) -> Result<Line> {
    let [_, branch, entry, ..] = &at.path[..] else {
        let why = format!("{} is no entry: name what lies in a branch's directory, staging/BRANCH/ENTRY", path.display());
        return Err(Error::new(Kind::Usage, why));
    };
    if args.branch.as_ref().is_some_and(|b| b != branch) || args.follow_links {
        let why = format!("{} is staged on branch {branch:?}: it is committed there, as it is", path.display());
        return Err(Error::new(Kind::Usage, why));
    }
    let answer = place::commit(&at.store, &format!("{branch}/{entry}"), &args.message)?;
    let text = |key: &str| answer.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let number = |key: &str| answer.get(key).and_then(Value::as_u64).unwrap_or_default();
    let (bytes, stored, links_outside) = (number("bytes"), number("stored"), number("links_outside"));
    Ok(Line { version: text("version"), id: text("id"), bytes, stored, links_outside })
}

fn from_disk(context: &Context, args: &Args, path: &Path) -> Result<Line> {
    let whole = std::path::absolute(path).map_err(|e| Error::io(path.display().to_string(), e))?;
    // `dir/.` and `..` have no last name of their own.
    let whole = if path.ends_with("..") || path.ends_with(".") { std::fs::canonicalize(&whole).unwrap_or(whole) } else { whole };
    let name = whole.file_name().map(OsStr::as_bytes).map(<[u8]>::to_vec);
    let name = name.ok_or_else(|| Error::new(Kind::Usage, format!("{} has no name to commit it under", path.display())))?;
    if let Err(e) = std::fs::metadata(&whole) {
        return Err(Error::io(path.display().to_string(), e));
    }
    let store = context.open_or_init(&Options::default())?;
    let bar = show::bar(&path.display().to_string(), 0);
    let shown = bar.clone();
    let progress = move |p: Progress| {
        shown.set_length(p.total);
        shown.set_position(p.done);
    };
    let request = CommitRequest {
        branch: args.branch.clone().unwrap_or_else(|| MAIN.to_owned()),
        entries: vec![(name, whole)],
        message: args.message.clone(),
        follow_links: args.follow_links,
        progress: (!bar.is_hidden()).then(|| Arc::new(progress) as _),
    };
    let done = store.commit(&request);
    bar.finish_and_clear();
    let done = done?;
    store.close()?;
    Ok(Line {
        version: format!("{}/{:06}", done.branch, done.number),
        id: done.id.to_string(),
        bytes: done.bytes,
        stored: done.stored,
        links_outside: done.links_outside,
    })
}

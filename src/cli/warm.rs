//! `zspace warm`

use super::{Context, show};
use crate::error::{Error, Kind, Result};
use crate::fuse::control;
use serde_json::{Value, json};

/// Have a version, a directory or a file of one kept whole in the cache of the mount, so that reads need no rebuilding
#[derive(clap::Args)]
pub(super) struct Args {
    /// REV or REV:PATH
    what: String,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let answer = control::ask(&context.dir()?, &json!({"do": "warm", "what": args.what}))?;
    let number = |key: &str| answer.get(key).and_then(Value::as_u64).unwrap_or(0);
    let (files, kept, small) = (number("files"), number("kept"), number("small"));
    if kept + small < files {
        let why = format!(
            "{} of {} files do not fit into the cache: `zspace mount --cache` sets its size, and the disk needs room",
            files - kept - small,
            files
        );
        return Err(Error::new(Kind::NoSpace, why));
    }
    let many = |n: u64, one: &str, more: &str| format!("{n} {}", if n == 1 { one } else { more });
    let of = show::bytes(number("bytes"));
    let kept = many(kept, &format!("file of {of} is"), &format!("files of {of} are"));
    let mut text = format!("{kept} whole in the cache");
    if small > 0 {
        text += &format!(
            "; {} rebuilt as fast",
            many(small, "small one is", "small ones are")
        );
    }
    show::print(&(text + "\n"))
}

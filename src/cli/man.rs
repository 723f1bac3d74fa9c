//! `zspace man DIR`.

use super::Cli;
use crate::error::{IoContext, Result};
use clap::CommandFactory;
use std::path::PathBuf;

/// Write the manual pages of all verbs into a directory
///
/// Such as /usr/local/share/man/man1: then `man zspace-commit` shows them.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Where to; made if absent
    dir: PathBuf,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let written =
        std::fs::create_dir_all(&args.dir).and_then(|()| clap_mangen::generate_to(Cli::command(), &args.dir));
    written.doing(|| format!("write manual pages to {}", args.dir.display()))
}

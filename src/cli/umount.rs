//! `zspace umount`

use super::show;
use crate::error::Result;
use crate::fuse;
use std::path::PathBuf;

/// Commit what has settled, wait, and unmount
#[derive(clap::Args)]
pub(super) struct Args {
    /// The mount point
    mnt: PathBuf,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let left = fuse::unmount(&args.mnt)?;
    left.iter().try_for_each(|line| show::print(&format!("{line}\n")))
}

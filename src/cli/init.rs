//! `zspace init`

use super::{Context, show};
use crate::error::Result;
use crate::store::Store;

/// Make a store (mount and commit make it too)
#[derive(clap::Args)]
pub(super) struct Args {}

pub(super) fn run(context: &Context, _: &Args) -> Result<()> {
    let dir = context.dir()?;
    Store::init(&dir)?;
    show::print(&format!("made a store in {}\n", dir.display()))
}

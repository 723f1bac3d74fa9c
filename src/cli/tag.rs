//! `zspace tag`

use super::{Context, show};
use crate::error::{Error, Kind, Result};

/// List the tags, or name a version
#[derive(clap::Args)]
pub(super) struct Args {
    /// The tag
    name: Option<String>,
    /// The version
    rev: Option<String>,
    /// Move a tag that exists
    #[arg(long)]
    force: bool,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = context.open()?;
    match (&args.name, &args.rev) {
        (Some(name), Some(rev)) => store.set_tag(name, rev, args.force),
        (Some(_), None) => Err(Error::new(Kind::Usage, "which version? zspace tag NAME REV")),
        (None, _) => {
            let row = |(name, v): (String, std::sync::Arc<crate::store::Numbered>)| {
                vec![name, v.name(), v.id.short()]
            };
            let rows: Vec<_> = store.tags().into_iter().map(row).collect();
            show::print(&show::table(&rows, &[]))
        }
    }
}

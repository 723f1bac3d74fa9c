//! `zspace branch`

use super::{Context, show};
use crate::error::Result;

/// List the branches, or make one (`branch NAME REV` forks it off REV)
#[derive(clap::Args)]
pub(super) struct Args {
    /// The new branch
    name: Option<String>,
    /// The version that its first one follows
    rev: Option<String>,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    if let Some(name) = &args.name {
        let store = context.open()?;
        return store.make_branch(name, args.rev.as_deref());
    }
    let store = context.open()?;
    let mut rows = Vec::new();
    for name in store.branches() {
        let own = store.versions(&name)?.len();
        let head = store
            .latest(&name)
            .map_or("empty".to_owned(), |v| match v.branch == name {
                true => format!("latest {} {}", v.name(), v.id.short()),
                false => format!("follows {} {}", v.name(), v.id.short()),
            });
        rows.push(vec![
            name,
            format!("{own} version{}", if own == 1 { "" } else { "s" }),
            head,
        ]);
    }
    show::print(&show::table(&rows, &[]))
}

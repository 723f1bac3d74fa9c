//! `zspace diff`

use super::{Context, show};
use crate::error::Result;

/// Show per tensor what changed between two versions, what changed most first
#[derive(clap::Args)]
pub(super) struct Args {
    /// The earlier version
    a: String,
    /// The later version
    b: String,
    /// Everything as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = context.open()?;
    let d = store.diff(&*store.resolve(&args.a)?, &*store.resolve(&args.b)?)?;
    if args.json {
        return show::print_json(&d);
    }
    let mut rows = Vec::new();
    let (changed, same): (Vec<_>, Vec<_>) = d
        .tensors
        .iter()
        .partition(|t| t.changed > 0.0 || t.differs_in.is_some());
    for t in changed {
        let number = |n: Option<f64>| n.map_or("-".to_owned(), |n| format!("{n:.3e}"));
        let why = t.differs_in.clone().unwrap_or_default();
        rows.push(vec![
            show::percent(t.changed),
            number(t.relative_norm),
            number(t.largest),
            show::printable(t.name.as_bytes()),
            why,
        ]);
    }
    let mut text = String::new();
    if !rows.is_empty() {
        rows.insert(
            0,
            ["changed", "|b-a|/|a|", "largest", "tensor", ""]
                .map(str::to_owned)
                .to_vec(),
        );
        text = show::table(&rows, &[0, 1, 2]);
    }
    text += &match same.len() {
        0 => String::new(),
        1 => "1 tensor is the same\n".to_owned(),
        n => format!("{n} tensors are the same\n"),
    };
    let named = [
        ("added", &d.added),
        ("removed", &d.removed),
        ("file added", &d.files_added),
        ("file removed", &d.files_removed),
        ("file changed", &d.files_changed),
    ];
    for (what, names) in named {
        for n in names {
            text += &format!("{what}: {}\n", show::printable(n.as_bytes()));
        }
    }
    show::print(&text)
}

//! `zspace stats`

use super::{Context, show};
use crate::error::Result;

/// Show what the store holds and what it takes
#[derive(clap::Args)]
pub(super) struct Args {
    /// Everything as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = context.open()?;
    let s = store.stats()?;
    if args.json {
        return show::print_json(&s);
    }
    let mut text = format!(
        "{} versions, {} raw, {} stored: {} of raw\npacks {}, journal {}, index {}\n\n",
        s.versions,
        show::bytes(s.raw),
        show::bytes(s.stored),
        show::percent(s.ratio),
        show::bytes(s.packs),
        show::bytes(s.journal),
        show::bytes(s.index),
    );
    if s.unused > 0 {
        text += &format!(
            "{} of the packs belong to no version: left by interrupted commits; `zspace repack` gives the space of whole packs \
             back\n\n",
            show::bytes(s.unused)
        );
    }
    if s.superseded > 0 {
        text += &format!(
            "{} of the packs are records that were written again since: `zspace repack` gives their space back\n\n",
            show::bytes(s.superseded)
        );
    }
    let ratio = |stored: u64, raw: u64| {
        if raw == 0 {
            "-".into()
        } else {
            show::percent(stored as f64 / raw as f64)
        }
    };
    let mut rows = vec![
        ["branch", "versions", "raw", "stored", "ratio"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for b in &s.branches {
        let (raw, stored) = (show::bytes(b.raw), show::bytes(b.stored));
        rows.push(vec![
            b.branch.clone(),
            b.versions.to_string(),
            raw,
            stored,
            ratio(b.stored, b.raw),
        ]);
    }
    text += &show::table(&rows, &[1, 2, 3, 4]);
    let mut rows = vec![
        ["kind", "codec", "nodes", "raw", "stored", "ratio"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for c in &s.codecs {
        let (raw, stored) = (show::bytes(c.raw), show::bytes(c.stored));
        rows.push(vec![
            c.kind.into(),
            c.codec.into(),
            c.nodes.to_string(),
            raw,
            stored,
            ratio(c.stored, c.raw),
        ]);
    }
    text += &format!("\n{}", show::table(&rows, &[2, 3, 4, 5]));
    if !s.depths.is_empty() {
        let mut rows = vec![vec!["deltas to apply".to_owned(), "chunks".to_owned()]];
        rows.extend(s.depths.iter().map(|(d, n)| vec![d.to_string(), n.to_string()]));
        text += &format!("\n{}", show::table(&rows, &[0, 1]));
    }
    show::print(&text)
}

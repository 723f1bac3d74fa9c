//! `zspace blame`

use super::log::short;
use super::signals::Stop;
use super::{Context, show};
use crate::error::Result;
use crate::store::{Blame, MAIN};

/// Show in which versions of a branch a tensor changed, and how much
///
/// All versions are read as far as they hold the tensor, the oldest first; its name is as `zspace tensors` prints it.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The tensor
    tensor: String,
    /// The branch
    #[arg(default_value = MAIN)]
    branch: String,
    /// One JSON object per version
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Line {
    version: String,
    id: String,
    step: Option<f64>,
    what: &'static str,
    changed: Option<f64>,
    relative_norm: Option<f64>,
    largest: Option<f64>,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = context.open()?;
    let versions = store.versions(&args.branch)?;
    let stop = Stop::on_signals()?;
    let bar = show::counting_bar("blame");
    bar.set_length(versions.len() as u64);
    let found = store.blame(&versions, &args.tensor, &mut || {
        bar.inc(1);
        stop.check()
    });
    bar.finish_and_clear();
    let found = found?;
    let mut rows = vec![
        ["version", "step", "changed", "|b-a|/|a|", "largest", ""]
            .map(str::to_owned)
            .to_vec(),
    ];
    for b in &found {
        let step = store.facts(&b.version).ok().and_then(|f| f.step);
        let line = line(b, step);
        if args.json {
            show::print_json(&line)?;
            continue;
        }
        let differs = b.change.as_ref().and_then(|c| c.differs_in.clone());
        let norm = |n: Option<f64>| n.map_or(String::new(), |n| format!("{n:.3e}"));
        rows.push(vec![
            line.version,
            step.map(short).unwrap_or_default(),
            line.changed.map(show::percent).unwrap_or_default(),
            norm(line.relative_norm),
            norm(line.largest),
            differs.unwrap_or_else(|| {
                if line.what == "changed" {
                    String::new()
                } else {
                    line.what.to_owned()
                }
            }),
        ]);
    }
    match args.json {
        true => Ok(()),
        false => show::print(&format!(
            "{}changed in {} of {} versions\n",
            show::table(&rows, &[1, 2, 3, 4]),
            found.len(),
            versions.len()
        )),
    }
}

fn line(b: &Blame, step: Option<f64>) -> Line {
    Line {
        version: b.version.name(),
        id: b.version.id.to_string(),
        step,
        what: match (&b.change, b.there) {
            (Some(_), _) => "changed",
            (None, true) => "added",
            (None, false) => "removed",
        },
        changed: b.change.as_ref().map(|c| c.changed),
        relative_norm: b.change.as_ref().and_then(|c| c.relative_norm),
        largest: b.change.as_ref().and_then(|c| c.largest),
    }
}

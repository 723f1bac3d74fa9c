//! `zspace verify`

use super::{Context, show};
use crate::error::{Kind, Result};
use std::process::ExitCode;

/// Check every hash, back to the files' own SHA-256; exit code 3 if something is damaged
#[derive(clap::Args)]
pub(super) struct Args {
    /// The version [default: all]
    rev: Option<String>,
    /// The report as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<ExitCode> {
    let store = context.open()?;
    let (mut versions, mut objects) = (Vec::new(), Vec::new());
    match &args.rev {
        Some(rev) => versions.push(store.resolve(rev)?),
        None => {
            for branch in store.branches() {
                versions.extend(store.versions(&branch)?);
            }
            objects = store.objects();
        }
    }
    let lens = versions
        .iter()
        .map(|v| v.version.len)
        .chain(objects.iter().map(|o| o.manifest.len));
    let bar = show::bar("verify", lens.sum());
    let mut report = store.verify(&versions, &mut |n| bar.inc(n));
    store.verify_objects(&objects, &mut report, &mut |n| bar.inc(n));
    if args.rev.is_none() {
        store.verify_packs(&mut report);
    }
    bar.finish_and_clear();
    let code = if report.damage.is_empty() {
        0
    } else {
        Kind::Damage.exit_code()
    };
    if args.json {
        show::print_json(&report)?;
        return Ok(ExitCode::from(code));
    }
    let mut text = String::new();
    for d in &report.damage {
        let file = show::printable(d.file.as_bytes());
        let place = [d.version.as_str(), &file]
            .into_iter()
            .filter(|part| !part.is_empty());
        let place = place.collect::<Vec<_>>().join(":");
        text += &match place.is_empty() {
            true => format!("damaged: {}\n", d.why),
            false => format!("damaged: {place}: {}\n", d.why),
        };
        for t in &d.tensors {
            text += &format!("  tensor {}\n", show::printable(t.as_bytes()));
        }
    }
    let (v, f, b) = (report.versions, report.files, show::bytes(report.bytes));
    let objects = match report.objects {
        0 => String::new(),
        n => format!("{n} objects, "),
    };
    text += &match report.damage.len() {
        0 => format!("{v} versions, {objects}{f} distinct files, {b}: every hash is right\n"),
        n => format!("{v} versions, {objects}{f} distinct files, {b}: {n} damaged\n"),
    };
    if code != 0 {
        text += "`zspace repair PEER` fetches what is damaged from another store that has it\n";
    }
    show::print(&text)?;
    Ok(ExitCode::from(code))
}

//! `zspace audit`

use super::peer::Reach;
use super::signals::Stop;
use super::{Context, show};
use crate::error::{IoContext, Result};
use crate::sync::{Standing, Verdict, audit, parse_checks};
use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

/// Ask replicas whether they have what they should have; exit code 0 all do, 3 one has not, 2 one could not be asked or proved nothing
///
/// CHECKS has a line for each thing: `object ID PEER…` or `version ID PEER…`, with all digits of the id; what follows a # is a
/// comment. Each replica reads all of it again, and must then prove parts of it that are chosen by chance: of an object atoms, of a
/// version whole files, for only their SHA-256 is pinned.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The file with the checks; - is standard input
    checks: PathBuf,
    /// So many bytes of a version's files are fetched and checked at most; larger files are not looked at
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = show::parse_size)]
    read: u64,
    /// Each verdict as one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn run(_: &Context, args: &Args) -> Result<ExitCode> {
    let mut text = Vec::new();
    match args.checks.as_os_str() == "-" {
        true => std::io::stdin()
            .read_to_end(&mut text)
            .doing(|| "read standard input".into())?,
        false => std::fs::File::open(&args.checks)
            .and_then(|mut f| f.read_to_end(&mut text))
            .doing(|| args.checks.display().to_string())?,
    };
    // What is no text shows as such in the line that is complained about.
    let text = String::from_utf8_lossy(&text);
    let checks =
        parse_checks(text.trim_start_matches('\u{feff}')).map_err(|e| e.context(args.checks.display()))?;
    let bar = show::counting_bar("audit");
    let stop = Stop::on_signals()?;
    let verdicts = audit(&checks, &args.reach.ways(&stop), args.read, &|_| bar.inc(1));
    bar.finish_and_clear();
    for verdict in &verdicts {
        match args.json {
            true => show::print_json(verdict)?,
            false => show::print(&line(verdict))?,
        }
    }
    stop.check()?;
    let any = |state| verdicts.iter().any(|v| v.state == state);
    Ok(ExitCode::from(
        match (any(Standing::Stale), any(Standing::Unknown)) {
            (true, _) => 3,
            (false, true) => 2,
            (false, false) => 0,
        },
    ))
}

fn line(v: &Verdict) -> String {
    let state = match v.state {
        Standing::Verified => "verified",
        Standing::Stale => "stale",
        Standing::Unknown => "unknown",
    };
    let why = match v.why.is_empty() {
        true => String::new(),
        false => format!("  {}", show::printable(v.why.as_bytes())),
    };
    format!("{state:<8}  {} {}  {}{why}\n", v.kind, &v.id[..8], v.replica)
}

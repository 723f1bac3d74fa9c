//! `zspace log`

use super::signals::Stop;
use super::{Context, plot, show};
use crate::error::{Error, Kind, Result};
use crate::store::{Facts, MAIN, Numbered, Store};
use std::path::PathBuf;
use std::sync::Arc;

/// Show the history of a branch, newest first
///
/// Step, epoch and loss are what the checkpoints say themselves: trainer_state.json, the metadata of safetensors files, plain numbers at the
/// top of torch files; the step may also be in the entry's name. --json has all such numbers.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The branch
    #[arg(default_value = MAIN)]
    branch: String,
    /// The newest N versions only
    #[arg(short = 'n', long, value_name = "N")]
    last: Option<usize>,
    /// Only versions whose message, entry, tags or id match this regular expression; (?i) at its start ignores case
    #[arg(long, value_name = "REGEX")]
    grep: Option<String>,
    /// Also the share of the weights that changed since the version before; both are read, the first time
    #[arg(long)]
    changed: bool,
    /// Draw stored size, change by layer and loss over the versions
    #[arg(long, value_name = "FILE.svg", conflicts_with = "json")]
    plot: Option<PathBuf>,
    /// One JSON object per version
    #[arg(long)]
    json: bool,
}

#[derive(serde::Serialize)]
struct Line {
    version: String,
    id: String,
    parent: Option<String>,
    time: f64,
    entry: String,
    message: String,
    files: u64,
    bytes: u64,
    stored: u64,
    tags: Vec<String>,
    #[serde(flatten)]
    facts: Facts,
    #[serde(skip_serializing_if = "Option::is_none")]
    changed: Option<f64>,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = context.open()?;
    let versions = chosen(&store, args)?;
    if let Some(path) = &args.plot {
        return plot::draw(&store, &args.branch, &versions, path);
    }
    let mut lines = Vec::new();
    let stop = Stop::on_signals()?;
    let bar = show::counting_bar("log");
    bar.set_length(versions.len() as u64);
    for version in versions.iter().rev() {
        stop.check()?;
        let line = line(&store, version, args.changed)?;
        bar.inc(1);
        match args.json {
            true => show::print_json(&line)?,
            false => lines.push(line),
        }
    }
    bar.finish_and_clear();
    show::print(&table(&lines))
}

/// The versions that are asked for, the oldest first.
fn chosen(store: &Store, args: &Args) -> Result<Vec<Arc<Numbered>>> {
    let mut versions = store.versions(&args.branch)?;
    if versions.is_empty() {
        let name = &args.branch;
        match store.latest(name) {
            Some(v) => eprintln!(
                "zspace: {name} has no version of its own yet; it follows {}",
                v.name()
            ),
            None => eprintln!("zspace: {name} has no version yet (`zspace branch` lists the others)"),
        }
    }
    if let Some(pattern) = &args.grep {
        let pattern = regex::Regex::new(pattern)
            .map_err(|e| Error::new(Kind::Usage, format!("--grep {pattern:?}: {e}")))?;
        versions.retain(|v| {
            let entry = String::from_utf8_lossy(&v.version.entry);
            let fits = |text: &str| pattern.is_match(text);
            fits(&v.version.message)
                || fits(&entry)
                || fits(&v.id.to_string())
                || tags(store, v).iter().any(|t| fits(t))
        });
    }
    if let Some(last) = args.last {
        versions.drain(..versions.len().saturating_sub(last));
    }
    Ok(versions)
}

fn tags(store: &Store, v: &Numbered) -> Vec<String> {
    let all = store.tags().into_iter();
    all.filter(|(_, t)| t.id == v.id).map(|(name, _)| name).collect()
}

fn line(store: &Store, v: &Numbered, changed: bool) -> Result<Line> {
    // A version that is damaged is listed all the same.
    let facts = store.facts(v).unwrap_or_else(|e| {
        log::warn!("{}: {e}", v.name());
        Facts::default()
    });
    let before = v.version.parents.first().filter(|_| changed);
    let before = before.and_then(|id| store.version(id));
    Ok(Line {
        version: v.name(),
        id: v.id.to_string(),
        parent: v.version.parents.first().map(ToString::to_string),
        time: v.version.time.seconds as f64 + f64::from(v.version.time.nanos) / 1e9,
        entry: String::from_utf8_lossy(&v.version.entry).into_owned(),
        message: v.version.message.clone(),
        files: v.files,
        bytes: v.version.len,
        stored: v.stored,
        tags: tags(store, v),
        facts,
        changed: before
            .map(|p| store.kept_diff(&p, v))
            .transpose()?
            .map(|d| d.share()),
    })
}

/// What a line has in a column.
type Cell<'a> = &'a dyn Fn(&Line) -> String;

fn table(lines: &[Line]) -> String {
    // Columns in which nobody has anything are left out.
    let number = |n: Option<f64>| n.map(short).unwrap_or_default();
    let optional: [(&str, Cell<'_>); 4] = [
        ("step", &|l| number(l.facts.step)),
        ("epoch", &|l| number(l.facts.epoch)),
        ("loss", &|l| number(l.facts.loss)),
        ("changed", &|l| l.changed.map(show::percent).unwrap_or_default()),
    ];
    let optional = optional.map(|(name, of)| (name, of, lines.iter().any(|l| !of(l).is_empty())));
    let mut head = vec!["version", "id", "time", "size", "stored"];
    head.extend(optional.iter().filter(|o| o.2).map(|o| o.0));
    head.extend(["entry", ""]);
    let mut rows = vec![head.into_iter().map(str::to_owned).collect::<Vec<_>>()];
    for l in lines {
        let mut said: Vec<String> = l.tags.iter().map(|t| format!("[{t}]")).collect();
        said.push(show::printable(l.message.as_bytes()));
        let time = crate::store::Timestamp {
            seconds: l.time.floor() as i64,
            nanos: 0,
        };
        let mut row = vec![
            l.version.clone(),
            l.id.chars().take(8).collect(),
            show::time(time),
            show::bytes(l.bytes),
            format!("+{}", show::bytes(l.stored)),
        ];
        row.extend(optional.iter().filter(|o| o.2).map(|o| o.1(l)));
        row.extend([show::printable(l.entry.as_bytes()), said.join(" ")]);
        rows.push(row);
    }
    match lines.is_empty() {
        true => String::new(),
        false => show::table(
            &rows,
            &[3, 4, 5, 6, 7, 8].map(|n| n.min(4 + optional.iter().filter(|o| o.2).count())),
        ),
    }
}

/// A number as people write it: six digits, no zeros at the end.
pub(super) fn short(n: f64) -> String {
    if n.fract() == 0.0 && n.abs() < 1e15 {
        return format!("{n}");
    }
    match n.abs() {
        a if (1e-4..1e6).contains(&a) => {
            let digits = (5 - a.log10().floor() as i32).clamp(0, 9) as usize;
            let text = format!("{n:.digits$}");
            text.trim_end_matches('0').trim_end_matches('.').to_owned()
        }
        _ => format!("{n:.3e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn numbers_are_short() {
        for (n, text) in [
            (20.0, "20"),
            (0.5, "0.5"),
            (2.345_678_9, "2.34568"),
            (-0.002_25, "-0.00225"),
            (1.25e-7, "1.250e-7"),
            (123_456.7, "123457"),
        ] {
            assert_eq!(short(n), text);
        }
    }
}

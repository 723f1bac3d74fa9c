//! `zspace repack`

use super::signals::Stop;
use super::{Context, show};
use crate::error::{Kind, Result};
use crate::store::{RepackProgress, RepackRequest, Repacked};
use std::process::ExitCode;
use std::sync::Arc;

/// Encode old versions anew where that is smaller, and gather small packs into large ones
///
/// Versions keep their ids and bytes; mounts and commits go on meanwhile. Ctrl-C finishes what is under way and keeps it. The
/// packs given up go when what takes their place is durable, so for a time both take up space.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Look at this branch only [default: all]
    #[arg(long)]
    branch: Option<String>,
    /// Say what would be gained, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// The result as one JSON object
    #[arg(long)]
    json: bool,
}

/// Damaged things that are named one by one.
const NAMED: usize = 20;

pub(super) fn run(context: &Context, args: &Args) -> Result<ExitCode> {
    let store = context.open()?;
    let stop = Stop::on_signals()?;
    let bar = show::counting_bar("repack");
    let shown = bar.clone();
    let progress = move |p: RepackProgress| {
        shown.set_length(p.total);
        shown.set_position(p.done);
        shown.set_message(format!(
            "repack {} -> {}",
            show::bytes(p.before),
            show::bytes(p.after)
        ));
    };
    let request = RepackRequest {
        branch: args.branch.clone(),
        dry_run: args.dry_run,
        progress: (!bar.is_hidden()).then(|| Arc::new(progress) as _),
        stop: Some(Arc::new(move || stop.is_asked())),
    };
    let done = store.repack(&request);
    bar.finish_and_clear();
    let done = done?;
    if !args.dry_run
        && let Err(e) = store.close()
    {
        log::warn!("{e}");
    }
    for why in done.damage.iter().take(NAMED) {
        eprintln!("zspace: damaged, left as it is: {why}");
    }
    if done.damage.len() > NAMED {
        eprintln!(
            "zspace: … and {} more; `zspace verify` tells what it is",
            done.damage.len() - NAMED
        );
    }
    if args.json {
        show::print_json(&done)?;
    } else {
        show::print(&text(&done, args.dry_run))?;
    }
    Ok(ExitCode::from(match (done.damage.is_empty(), done.stopped) {
        (false, _) => Kind::Damage.exit_code(),
        (true, true) => 130,
        (true, false) => 0,
    }))
}

fn text(r: &Repacked, dry_run: bool) -> String {
    let would = if dry_run { "would be " } else { "" };
    let mut text = format!(
        "{} of {} chunks and layouts {would}encoded anew: {} -> {}\n",
        r.rewritten,
        r.looked,
        show::bytes(r.rewritten_before),
        show::bytes(r.rewritten_after)
    );
    if r.moved > 0 {
        text += &format!("{} records moved as they are\n", r.moved);
    }
    if r.abandoned > 0 {
        text += &format!("{} packs that interrupted commits left are gone\n", r.abandoned);
    }
    // The rest of what is saved: records that were written again earlier, by this or by others, and what was never published.
    let others = (r.before + r.rewritten_after).saturating_sub(r.after + r.rewritten_before);
    if others > 0 {
        text += &format!(
            "{} {would}given back of what no version used any more\n",
            show::bytes(others)
        );
    }
    text += &format!(
        "packs {would}{} -> {}",
        show::bytes(r.before),
        show::bytes(r.after)
    );
    text += &match dry_run {
        true => "\n".to_owned(),
        false => format!(", {} -> {} files\n", r.packs_before, r.packs_after),
    };
    if r.busy > 0 {
        text += &format!(
            "{} packs are being written to and stay as they are: repack again later\n",
            r.busy
        );
    }
    if r.stopped {
        text += "stopped early; the rest is left for the next time\n";
    }
    text
}

//! `zspace repair`

use super::peer::Reach;
use super::signals::Stop;
use super::{Context, show};
use crate::error::{Kind, Result};
use crate::sync::{Address, repair};
use std::process::ExitCode;

/// Fetch what is damaged or missing here from other stores; exit code 3 if something remains
///
/// Exactly what `zspace verify` finds is fetched, from the first peer that has it, and checked. The damaged bytes are kept in
/// STORE/quarantine.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Stores that have the same; named as for `zspace pull`
    #[arg(required = true)]
    peers: Vec<String>,
    /// The outcome as one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<ExitCode> {
    let peers: Vec<Address> = args.peers.iter().map(|p| p.parse()).collect::<Result<_>>()?;
    let store = context.open().map_err(|e| match e.kind() {
        Kind::Damage => e.context(
            "the store cannot be opened to be repaired: move it away, and `zspace pull PEER` makes it anew",
        ),
        _ => e,
    })?;
    let bar = show::transfer_bar("repair");
    let done = repair(
        &store,
        &peers,
        &args.reach.ways(&Stop::on_signals()?),
        &mut |what| bar.set_message(what.to_owned()),
    );
    bar.finish_and_clear();
    let done = done?;
    if let Err(e) = store.close() {
        log::warn!("{e}");
    }
    if args.json {
        show::print_json(&done)?;
    } else {
        let mut text = format!(
            "{} damaged nodes repaired, {} received\n",
            done.repaired,
            show::bytes(done.received)
        );
        for what in &done.left {
            text += &format!("left: {what}\n");
        }
        if !done.left.is_empty() {
            text += "`zspace verify` names the versions and files that need what is left; a peer that has those can repair it\n";
        }
        show::print(&text)?;
    }
    Ok(ExitCode::from(match done.left.is_empty() {
        true => 0,
        false => Kind::Damage.exit_code(),
    }))
}

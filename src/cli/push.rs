//! `zspace push`

use super::peer::{Reach, branches, objects, traffic};
use super::signals::Stop;
use super::{Context, show};
use crate::error::{Kind, Result};
use crate::sync::{Peer, PushRequest, Ways, push};
use std::process::ExitCode;

/// Give another store what it has not: it checks every digest, and refuses a branch that went another way there
///
/// PEER is named as for `zspace pull`; where there is no store, one is made. Without branches or objects all branches are pushed, one
/// by one: if some are refused, the others are there all the same, and the exit code is 1. Tags are not pushed: who wants them pulls.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The other store
    peer: String,
    /// Branches; BRANCH:AS for another name there
    #[arg(value_name = "BRANCH")]
    branches: Vec<String>,
    /// An object, by the first 8 or more digits of its id
    #[arg(long = "object", value_name = "ID")]
    objects: Vec<String>,
    /// All objects too
    #[arg(long)]
    objects_too: bool,
    /// The outcome as one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<ExitCode> {
    let stop = Stop::on_signals()?;
    let store = context.open()?;
    let mut request = PushRequest {
        branches: branches(&args.branches),
        objects: objects(&store, &args.objects)?,
        all_branches: args.branches.is_empty() && args.objects.is_empty(),
    };
    if args.objects_too {
        request.objects.extend(store.objects().iter().map(|o| o.id));
    }
    // Where there is no store, one is made.
    let ways = Ways {
        make: true,
        ..args.reach.ways(&stop)
    };
    let bar = show::transfer_bar("push");
    let pushed = Peer::with(&args.peer.parse()?, &ways, |link| {
        push(&store, link, &request, &mut |bytes| {
            bar.set_position(bytes);
            stop.check()
        })
    });
    bar.finish_and_clear();
    let pushed = pushed?;
    let code = match pushed.refused.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(Kind::Refused.exit_code()),
    };
    if args.json {
        show::print_json(&pushed)?;
        return Ok(code);
    }
    let mut text = String::new();
    for (branch, head) in &pushed.branches {
        text += &format!("{branch}: at {}\n", &head[..head.len().min(16)]);
    }
    for id in &pushed.objects {
        text += &format!("object {id}\n");
    }
    for (what, why) in &pushed.refused {
        text += &format!("{what}: refused: {}\n", show::printable(why.as_bytes()));
    }
    text += &format!("{}\n", traffic(pushed.received, pushed.sent));
    show::print(&text)?;
    Ok(code)
}

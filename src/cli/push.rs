//! `zspace push`

use super::peer::{Reach, branches, objects, traffic};
use super::signals::Stop;
use super::{Context, show};
use crate::error::Result;
use crate::sync::{PushRequest, push};

/// Give another store what it has not: it checks every digest, and refuses a branch that went another way there
///
/// PEER is named as for `zspace pull`. Without branches or objects all branches are pushed. Tags are not: who wants them pulls.
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

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
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
    let mut peer = args.reach.connect_to_give(&args.peer)?;
    let bar = show::transfer_bar("push");
    let pushed = push(&store, peer.link()?, &request, &mut |bytes| {
        bar.set_position(bytes);
        stop.check()
    });
    bar.finish_and_clear();
    drop(peer);
    let pushed = pushed?;
    if args.json {
        return show::print_json(&pushed);
    }
    let mut text = String::new();
    for (branch, head) in &pushed.branches {
        text += &format!("{branch}: at {}\n", &head[..head.len().min(16)]);
    }
    for id in &pushed.objects {
        text += &format!("object {id}\n");
    }
    text += &format!("{}\n", traffic(pushed.received, pushed.sent));
    show::print(&text)
}

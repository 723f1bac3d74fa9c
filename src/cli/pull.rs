//! `zspace pull`

use super::peer::{Reach, branches, traffic, whole_id};
use super::signals::Stop;
use super::{Context, show};
use crate::error::Result;
use crate::store::{ObjectId, Options, VersionId};
use crate::sync::{Address, PullRequest, Pulled, Signers, pull_from_any};
use std::path::PathBuf;

/// Get what another store has and this one has not: every digest is checked, all of it becomes visible at once
///
/// PEER is a store's directory on this machine, HOST:DIR (over ssh), unix:SOCKET, tcp:127.0.0.1:PORT or tls:HOST:PORT (of `zspace
/// serve`). Without branches or objects all branches and their tags are pulled. A pull that was broken off goes on where it was.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The other store
    peer: String,
    /// Branches; BRANCH:AS to have it under another name here
    #[arg(value_name = "BRANCH")]
    branches: Vec<String>,
    /// Another store that has the same, asked if the first is down, slow or wrong; may be given several times
    #[arg(long = "or", value_name = "PEER")]
    or: Vec<String>,
    /// A peer that sends fewer bytes a second is slow, once it was waited for 20 seconds
    #[arg(long, value_name = "SIZE", default_value = "1K", value_parser = show::parse_size)]
    slowest: u64,
    /// An object, by all digits of its id
    #[arg(long = "object", value_name = "ID")]
    objects: Vec<String>,
    /// All objects too
    #[arg(long)]
    objects_too: bool,
    /// Pull nothing unless the newest version of the one branch that is named is this one
    #[arg(long, value_name = "ID")]
    expect: Option<String>,
    /// Take only branches that one of these signed, none that was rolled back, and no tags: an allowed-signers file of ssh
    #[arg(long, value_name = "FILE")]
    signers: Option<PathBuf>,
    /// Leave tags alone
    #[arg(long)]
    no_tags: bool,
    /// Nodes asked for before the first of them is here [default: as many as go into 32 KiB of requests]
    #[arg(long, value_name = "N")]
    in_flight: Option<usize>,
    /// The outcome as one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    reach: Reach,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let stop = Stop::on_signals()?;
    let objects: Vec<ObjectId> = args
        .objects
        .iter()
        .map(|id| whole_id(id))
        .collect::<Result<_>>()?;
    let expect: Option<VersionId> = args.expect.as_deref().map(whole_id).transpose()?;
    let peers = std::iter::once(&args.peer).chain(&args.or);
    let peers: Vec<Address> = peers.map(|p| p.parse()).collect::<Result<_>>()?;
    let mut ways = args.reach.ways(&stop);
    ways.patience.slowest = args.slowest;
    let store = context.open_or_init(&Options::default())?;
    let request = PullRequest {
        branches: branches(&args.branches),
        objects,
        all_objects: args.objects_too,
        expect,
        no_tags: args.no_tags,
        in_flight: args.in_flight,
        signers: args.signers.as_deref().map(Signers::read).transpose()?,
    };
    let bar = show::transfer_bar("pull");
    let pulled = pull_from_any(&store, &peers, &ways, &request, &mut |f| {
        bar.set_position(f.bytes);
        bar.set_message(format!("pull {} of {} versions", f.done.min(f.total), f.total));
        stop.check()
    });
    bar.finish_and_clear();
    let (pulled, from) = pulled?;
    if let Err(e) = store.close() {
        log::warn!("{e}");
    }
    match args.json {
        true => show::print_json(&pulled),
        false => {
            let from = match from {
                0 => String::new(),
                n => format!("from {}\n", peers[n]),
            };
            show::print(&(from + &text(&pulled, &request.objects)))
        }
    }
}

fn text(pulled: &Pulled, objects: &[ObjectId]) -> String {
    let mut text = String::new();
    for b in &pulled.branches {
        let what = match b.new {
            0 => "nothing new".to_owned(),
            1 => "1 new version".to_owned(),
            n => format!("{n} new versions"),
        };
        text += &format!("{}: {what}, at {}\n", b.branch, &b.head[..b.head.len().min(16)]);
    }
    for tag in &pulled.tags {
        text += &format!("tag {tag}\n");
    }
    for tag in &pulled.tags_kept {
        text += &format!(
            "tag {tag} left alone: here that name is another version's, or a branch's (`zspace log {tag}`)\n"
        );
    }
    for id in &pulled.objects {
        text += &format!("object {id}\n");
    }
    let here = objects.iter().map(ToString::to_string);
    for id in here.filter(|id| !pulled.objects.contains(id)) {
        text += &format!("object {id}: nothing new\n");
    }
    for id in &pulled.collisions {
        text += &format!("object {id} was pulled whole: two of its records have one id\n");
    }
    text += &format!(
        "{}; {} added to the store\n",
        traffic(pulled.received, pulled.sent),
        show::bytes(pulled.stored)
    );
    text
}

//! `zspace serve`

use super::peer::tls;
use super::signals::Stop;
use super::{Context, show};
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::{Options, Store};
use crate::sync::{Allowed, Link, Listen, Patience, Pipe, ServeOptions, Server, Signers, serve};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

/// Let other stores pull from this one and push to it
///
/// Pushes only ever add: nothing that is here is changed or removed. Plain TCP is for this machine alone; to others serve through
/// ssh, which runs `zspace serve --stdio` by itself, or with --tls-listen. What is refused, and why, goes to the log.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Serve one peer on standard input and output
    #[arg(long, conflicts_with_all = ["unix", "tcp", "tls_listen"])]
    stdio: bool,
    /// Listen on a Unix socket
    #[arg(long, value_name = "SOCKET")]
    unix: Vec<PathBuf>,
    /// Listen on a port of this machine, such as 127.0.0.1:7420
    #[arg(long, value_name = "HOST:PORT")]
    tcp: Vec<String>,
    /// Listen on a port with TLS 1.3; both sides show certificates
    #[arg(long, value_name = "HOST:PORT")]
    tls_listen: Vec<String>,
    /// The directory with cert.pem, key.pem and peers.pem [default: $ZSPACE_TLS]
    #[arg(long, value_name = "DIR")]
    tls: Option<PathBuf>,
    /// Make the store if there is none
    #[arg(long)]
    make: bool,
    /// Let nobody push
    #[arg(long)]
    read_only: bool,
    /// Let nobody push but branches that one of these signed, and no objects: an allowed-signers file of ssh
    #[arg(long, value_name = "FILE")]
    signers: Option<PathBuf>,
    /// Peers that are served at once
    #[arg(long, value_name = "N", default_value_t = 64)]
    peers: usize,
    /// Seconds that a peer may be silent between two requests
    #[arg(long, value_name = "S", default_value_t = 600)]
    timeout: u64,
    /// Memory for rebuilt chunks
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = show::parse_size)]
    memory: u64,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let allowed = Allowed {
        read_only: args.read_only,
        signers: args.signers.as_deref().map(Signers::read).transpose()?,
    };
    let idle = Duration::from_secs(args.timeout.max(1));
    let patience = Patience {
        frame: idle.min(Patience::default().frame),
        idle,
        hello: idle.min(Patience::default().hello),
        slowest: 0,
        ..Patience::default()
    };
    let options = Options {
        memory: args.memory,
        ..Options::default()
    };
    if args.stdio {
        let store = open(context, args.make, &options)?;
        let dup = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned();
        let pipe = dup(std::io::stdin().as_fd()).and_then(|i| Pipe::new(i, dup(std::io::stdout().as_fd())?));
        let pipe = pipe.doing(|| "take standard input and output".into())?;
        let stop = Stop::on_signals()?.of_transfer();
        let served = serve(&store, &mut Link::new(Box::new(pipe), patience, stop), &allowed);
        if let Err(e) = store.close() {
            log::warn!("{e}");
        }
        return served;
    }
    let listen: Vec<Listen> = args
        .unix
        .iter()
        .map(|p| Listen::Unix(p.clone()))
        .chain(args.tcp.iter().map(|at| Listen::Tcp(at.clone())))
        .chain(args.tls_listen.iter().map(|at| Listen::Tls(at.clone())))
        .collect();
    if listen.is_empty() {
        let why = "where? Give --stdio, --unix SOCKET, --tcp 127.0.0.1:PORT or --tls-listen HOST:PORT";
        return Err(Error::new(Kind::Usage, why));
    }
    let stop = Stop::on_signals()?;
    let store = open(context, args.make, &options)?;
    let server = Server::bind(
        &listen,
        ServeOptions {
            allowed,
            peers: args.peers,
            tls: tls(args.tls.as_ref()),
            patience,
        },
    )?;
    for name in server.names() {
        show::print(&format!("serving {} on {name}\n", store.dir().display()))?;
    }
    let done = server.run(&store, &stop.of_transfer());
    if let Err(e) = store.close() {
        log::warn!("{e}");
    }
    done
}

/// The store; that of another machine is not made by a peer that only looks for it.
fn open(context: &Context, make: bool, options: &Options) -> Result<Store> {
    match make {
        true => context.open_or_init(options),
        false => context.open_with(options).map_err(|e| match e.kind() {
            Kind::NotFound => Error::new(Kind::NotFound, format!("{e}; so does --make")),
            _ => e,
        }),
    }
}

//! `zspace mount`

use super::{Context, notify, show};
use crate::error::{Error, IoContext, Kind, Result};
use crate::fuse::{self, MountOptions};
use crate::store::{Options, Store};
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Mount the store: versions/, tensors/, arrays/ and safetensors/ to read, staging/ to write
#[derive(clap::Args)]
pub(super) struct Args {
    /// The mount point, made if absent
    pub(super) mnt: PathBuf,
    /// Seconds that a staged file must be left alone before it is committed
    #[arg(long, value_name = "S", default_value = "2", value_parser = parse_seconds)]
    pub(super) settle: Duration,
    /// Seconds that a staged directory must be left alone before it is committed
    #[arg(long, value_name = "S", default_value = "10", value_parser = parse_seconds)]
    pub(super) settle_dir: Duration,
    /// Memory for rebuilt chunks, in bytes or with K, M, G
    #[arg(long, value_name = "N", default_value = "256M", value_parser = show::parse_size)]
    pub(super) memory: u64,
    /// Disk space for files kept whole (STORE/cache), in bytes or with K, M, G; 0: none
    #[arg(long, value_name = "N", default_value = "8G", value_parser = show::parse_size)]
    pub(super) cache: u64,
    /// Threads that encode what settles, at low priority [default: half the cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub(super) threads: Option<u64>,
    /// Read and write every file through zspace, also where the kernel could do it by itself
    #[arg(long)]
    pub(super) no_passthrough: bool,
    /// Let other users in
    #[arg(long)]
    pub(super) allow_other: bool,
    /// Take no writes
    #[arg(long)]
    pub(super) read_only: bool,
    /// Let no program in it be run
    #[arg(long = "noexec")]
    pub(super) no_exec: bool,
    /// Return as soon as the mount is usable, and serve it in the background (log: mount.log in the store)
    #[arg(long)]
    pub(super) daemon: bool,
    /// Is the background process that `--daemon` started
    #[arg(long, hide = true, conflicts_with = "daemon")]
    background: bool,
}

impl Args {
    /// A mount in the background, all else as it is unless told otherwise.
    pub(super) fn background_of(mnt: PathBuf) -> Self {
        let usual = MountOptions::default();
        Args {
            mnt,
            settle: usual.settle,
            settle_dir: usual.settle_dir,
            memory: Options::default().memory,
            cache: usual.cache,
            threads: None,
            no_passthrough: false,
            allow_other: false,
            read_only: false,
            no_exec: false,
            daemon: true,
            background: false,
        }
    }
}

/// What the background process prints once the mount is usable.
const READY: &str = "ready";

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    // Before anything is written there.
    fuse::refuse_nested(&absolute(&context.dir()?)?)?;
    if args.daemon {
        return start(context, args);
    }
    let done = serve(context, args);
    if let (true, Err(e)) = (args.background, &done) {
        // To the process that waits for us; where it has left, the log has it all the same.
        let _ = show::print(&format!("{e}\n"));
    }
    done
}

fn serve(context: &Context, args: &Args) -> Result<()> {
    let mnt = absolute(&args.mnt)?;
    let usual = Options::default();
    let options = Options {
        memory: args.memory,
        background_threads: args.threads.map_or(usual.background_threads, |n| n as usize),
        ..usual
    };
    let dir = absolute(&context.dir()?)?;
    let store = Store::open_or_init(&dir, &options)?;
    let options = MountOptions {
        settle: args.settle,
        settle_dir: args.settle_dir,
        allow_other: args.allow_other,
        read_only: args.read_only,
        cache: args.cache,
        passthrough: !args.no_passthrough,
        no_exec: args.no_exec,
        ..MountOptions::default()
    };
    let background = args.background;
    if background {
        // A session of its own, in no directory that somebody might want to unmount.
        rustix::process::setsid().doing(|| "start a session".into())?;
        rustix::process::chdir("/").doing(|| "go to /".into())?;
    }
    let served = fuse::mount(store, &mnt, &options, move |note| {
        notify::tell("READY=1");
        if background {
            if let Some(note) = note {
                let _ = show::print(&format!("{note}\n"));
            }
            let _ = show::print(&format!("{READY}\n"));
            let detached = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty());
            if let Err(e) = detached.and_then(rustix::stdio::dup2_stdout) {
                log::warn!("cannot leave standard output: {e}");
            }
        }
    });
    notify::tell("STOPPING=1");
    served
}

/// Starts this program again in the background and waits until its mount is usable.
fn start(context: &Context, args: &Args) -> Result<()> {
    let dir = absolute(&context.dir()?)?;
    // Made here, so that there is a place for the log.
    match Store::init(&dir) {
        Err(e) if e.kind() != Kind::Exists => return Err(e),
        _ => {}
    }
    let log = dir.join("mount.log");
    // A store that cannot be written can still be served.
    let err = match OpenOptions::new().create(true).append(true).open(&log) {
        Ok(file) => Stdio::from(file),
        Err(e) if args.read_only => {
            eprintln!("zspace: without a log: {}: {e}", log.display());
            Stdio::null()
        }
        Err(e) => {
            let why = format!(
                "{} (a store that cannot be written is mounted with --read-only)",
                log.display()
            );
            return Err(Error::io(why, e));
        }
    };
    // Not by its name, which may be that of a link.
    let program = std::env::current_exe().doing(|| "find this program".into())?;
    let seconds = |d: Duration| d.as_secs_f64().to_string();
    let mut command = Command::new(program);
    command
        .arg("--store")
        .arg(&dir)
        .arg("mount")
        .arg(absolute(&args.mnt)?)
        .arg("--background");
    command.args([
        "--settle",
        &seconds(args.settle),
        "--settle-dir",
        &seconds(args.settle_dir),
    ]);
    command.args(["--memory", &args.memory.to_string()]);
    command.args(["--cache", &args.cache.to_string()]);
    if let Some(n) = args.threads {
        command.args(["--threads", &n.to_string()]);
    }
    command.args(
        [
            ("--no-passthrough", args.no_passthrough),
            ("--allow-other", args.allow_other),
            ("--read-only", args.read_only),
            ("--noexec", args.no_exec),
        ]
        .iter()
        .filter(|o| o.1)
        .map(|o| o.0),
    );
    command.env(
        "ZSPACE_LOG",
        std::env::var("ZSPACE_LOG").unwrap_or_else(|_| "zspace=info".into()),
    );
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(err)
        .spawn();
    let mut child = child.doing(|| "start the background process".into())?;
    let mut said = String::new();
    for line in BufReader::new(
        child
            .stdout
            .take()
            .ok_or_else(|| Error::new(Kind::Io, "no pipe"))?,
    )
    .lines()
    {
        let line = line.doing(|| "wait for the background process".into())?;
        if line == READY {
            // What it said before is no error then.
            said.lines().for_each(|note| eprintln!("zspace: {note}"));
            return Ok(());
        }
        if !said.is_empty() {
            said.push('\n');
        }
        said += &line;
    }
    let status = child.wait().doing(|| "wait for the background process".into())?;
    if said.is_empty() {
        said = format!(
            "the background process ended with {status} (see {})",
            log.display()
        );
    }
    let kind = if status.code() == Some(64) {
        Kind::Usage
    } else {
        Kind::Io
    };
    Err(Error::new(kind, said))
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).doing(|| path.display().to_string())
}

pub(super) fn parse_seconds(text: &str) -> std::result::Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "write a number of seconds".to_owned())?;
    Duration::try_from_secs_f64(seconds).map_err(|_| "write a number of seconds, not negative".into())
}

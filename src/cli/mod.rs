//! The command line: one file per verb.

mod audit;
mod blame;
mod branch;
mod cat;
mod commit;
mod completions;
mod diff;
mod export;
mod helper;
mod import;
mod init;
mod log;
mod ls;
mod man;
mod mount;
mod natural;
mod notify;
mod object;
mod peer;
mod plot;
mod pull;
mod push;
mod repack;
mod repair;
mod serve;
mod show;
mod sign;
mod signals;
mod stats;
mod status;
mod tag;
mod tensors;
mod umount;
mod verify;
mod warm;

use crate::error::{Error, Kind, Result};
use crate::store::{Options, Store};
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// A mountable, versioned, content-addressed store of model checkpoints.
///
/// REV is BRANCH (its latest version), BRANCH/NUMBER, a tag, or the first 8 or more digits of a version's id.
/// REV:PATH names a file of a version.
#[derive(Parser)]
#[command(name = "zspace", version, max_term_width = 110)]
struct Cli {
    /// The store [default: $ZSPACE_STORE, else zspace in the user's data directory]
    #[arg(long, global = true, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Say more (twice: everything)
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    Init(init::Args),
    Mount(mount::Args),
    Umount(umount::Args),
    Status(status::Args),
    Warm(warm::Args),
    Commit(commit::Args),
    Import(import::Args),
    Log(log::Args),
    Branch(branch::Args),
    Tag(tag::Args),
    Ls(ls::Args),
    Tensors(tensors::Args),
    Cat(cat::Args),
    Export(export::Args),
    Diff(diff::Args),
    Blame(blame::Args),
    Verify(verify::Args),
    Repack(repack::Args),
    Object(object::Args),
    Pull(pull::Args),
    Push(push::Args),
    Audit(audit::Args),
    Sign(sign::Args),
    Repair(repair::Args),
    Serve(serve::Args),
    Stats(stats::Args),
    Completions(completions::Args),
    Man(man::Args),
}

/// What every verb may need.
struct Context {
    store: Option<PathBuf>,
}

impl Context {
    /// The store's directory: `--store`, else `$ZSPACE_STORE`, else in the user's data directory.
    fn dir(&self) -> Result<PathBuf> {
        let var = |name| {
            std::env::var_os(name)
                .filter(|v| !v.is_empty())
                .map(PathBuf::from)
        };
        let data = || var("XDG_DATA_HOME").or_else(|| Some(var("HOME")?.join(".local/share")));
        let found = self
            .store
            .clone()
            .or_else(|| var("ZSPACE_STORE"))
            .or_else(|| Some(data()?.join("zspace")));
        found.ok_or_else(|| Error::new(Kind::Usage, "which store? Give --store DIR or set ZSPACE_STORE"))
    }

    /// The store, which must exist.
    fn open(&self) -> Result<Store> {
        self.open_with(&Options::default())
    }

    fn open_with(&self, options: &Options) -> Result<Store> {
        let dir = self.dir()?;
        Store::open(&dir, options).map_err(|e| match e.kind() {
            Kind::NotFound => Error::new(
                Kind::NotFound,
                format!("no store in {} (`zspace init` makes one)", dir.display()),
            ),
            _ => e,
        })
    }

    /// The store, made if absent.
    fn open_or_init(&self, options: &Options) -> Result<Store> {
        let dir = self.dir()?;
        match Store::init(&dir) {
            Ok(()) => eprintln!("zspace: made a store in {}", dir.display()),
            Err(e) if e.kind() == Kind::Exists => {}
            Err(e) => return Err(e),
        }
        Store::open(&dir, options)
    }
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let args: Vec<_> = std::env::args_os().collect();
    if helper::is_called(&args) {
        start_log("warn");
        return helper::main(&args);
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            let _ = e.print();
            return ExitCode::from(if e.use_stderr() {
                Kind::Usage.exit_code()
            } else {
                0
            });
        }
    };
    let level = match cli.verbose {
        0 => "warn",
        1 => "info",
        _ => "debug",
    };
    start_log(level);
    match run(cli) {
        Ok(code) => code,
        Err(e) if e.errno() == libc::EPIPE => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("zspace: {e}");
            ExitCode::from(e.kind().exit_code())
        }
    }
}

/// Messages of this level go to standard error, or those that `$ZSPACE_LOG` asks for.
fn start_log(level: &str) {
    let filter = env_logger::Env::new().filter_or("ZSPACE_LOG", format!("zspace={level}"));
    env_logger::Builder::from_env(filter).format_target(false).init();
}

fn run(cli: Cli) -> Result<ExitCode> {
    let context = Context { store: cli.store };
    let done = match cli.verb {
        Verb::Init(a) => init::run(&context, &a),
        Verb::Mount(a) => mount::run(&context, &a),
        Verb::Umount(a) => umount::run(&a),
        Verb::Status(a) => status::run(&context, &a),
        Verb::Warm(a) => warm::run(&context, &a),
        Verb::Commit(a) => commit::run(&context, &a),
        Verb::Import(a) => import::run(&context, &a),
        Verb::Log(a) => log::run(&context, &a),
        Verb::Branch(a) => branch::run(&context, &a),
        Verb::Tag(a) => tag::run(&context, &a),
        Verb::Ls(a) => ls::run(&context, &a),
        Verb::Tensors(a) => tensors::run(&context, &a),
        Verb::Cat(a) => cat::run(&context, &a),
        Verb::Export(a) => export::run(&context, &a),
        Verb::Diff(a) => diff::run(&context, &a),
        Verb::Blame(a) => blame::run(&context, &a),
        Verb::Verify(a) => return verify::run(&context, &a),
        Verb::Repack(a) => return repack::run(&context, &a),
        Verb::Object(a) => object::run(&context, &a),
        Verb::Pull(a) => pull::run(&context, &a),
        Verb::Push(a) => return push::run(&context, &a),
        Verb::Sign(a) => sign::run(&context, &a),
        Verb::Repair(a) => return repair::run(&context, &a),
        Verb::Audit(a) => return audit::run(&context, &a),
        Verb::Serve(a) => serve::run(&context, &a),
        Verb::Stats(a) => stats::run(&context, &a),
        Verb::Completions(a) => completions::run(&a),
        Verb::Man(a) => man::run(&a),
    };
    done.map(|()| ExitCode::SUCCESS)
}

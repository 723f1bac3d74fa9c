//! `zspace sign`

use super::{Context, show};
use crate::error::{Error, IoContext, Kind, Result};
use crate::sync::{NAMESPACE, is_signature, statement};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Sign a branch's newest version with an ssh key: who pulls with --signers takes it only so
///
/// ssh-keygen signs, so that keys with a passphrase, in an agent or on a token work too. The signature goes along when the branch is pulled
/// or pushed, and is good for this version only: sign again after the next one.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The branch
    branch: String,
    /// The key (ed25519): the file with the private key, or with the public one if an agent has it
    #[arg(long, value_name = "FILE")]
    key: PathBuf,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let store = context.open()?;
    let missing = || {
        Error::new(
            Kind::NotFound,
            format!("there is no version on a branch {:?}", args.branch),
        )
    };
    let head = store.latest(&args.branch).ok_or_else(missing)?.id;
    let mut child = Command::new("ssh-keygen")
        .args(["-q", "-Y", "sign", "-n", NAMESPACE, "-f"])
        .arg(&args.key)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .doing(|| "run ssh-keygen".into())?;
    if let Some(mut input) = child.stdin.take() {
        input
            .write_all(statement(&args.branch, &head).as_bytes())
            .doing(|| "tell ssh-keygen what to sign".into())?;
    }
    let done = child.wait_with_output().doing(|| "wait for ssh-keygen".into())?;
    if !done.status.success() || !done.stdout.starts_with(b"-----BEGIN SSH SIGNATURE-----") {
        return Err(Error::new(Kind::Io, "ssh-keygen did not sign: see what it said"));
    }
    if !is_signature(&args.branch, &head, &done.stdout) {
        let why = format!(
            "{} made a signature that nobody would take: only ed25519 keys are understood",
            args.key.display()
        );
        return Err(Error::new(Kind::Usage, why));
    }
    store.keep_signature(&args.branch, &head, &done.stdout)?;
    show::print(&format!("{} is {head}: signed\n", args.branch))
}

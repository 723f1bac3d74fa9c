//! `zspace completions SHELL`.

use super::Cli;
use crate::error::{IoContext, Result};
use clap::CommandFactory;
use std::io::Write;

/// Print what makes a shell complete zspace's words
///
/// bash: zspace completions bash > /etc/bash_completion.d/zspace (or, for yourself alone, in ~/.local/share/bash-completion/completions/).
/// zsh: into a file _zspace in a directory of $fpath. fish: into ~/.config/fish/completions/zspace.fish.
#[derive(clap::Args)]
pub(super) struct Args {
    /// The shell
    shell: clap_complete::Shell,
}

pub(super) fn run(args: &Args) -> Result<()> {
    // The generator panics where it cannot write.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "zspace", &mut script);
    std::io::stdout()
        .write_all(&script)
        .doing(|| "standard output".into())
}

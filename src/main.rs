//! The `zspace` command.

fn main() -> std::process::ExitCode {
    zspace::cli::main()
}

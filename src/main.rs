//! The `zspace` command.

fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}

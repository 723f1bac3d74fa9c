//! The `zspace` command.
fn main() {}

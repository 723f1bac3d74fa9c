//! The `zspace` command.

fn main() -> std::process::ExitCode {
    keep_freed_memory();
    zspace::cli::main()
}

/// Chunks of a mebibyte come and go all the time. Without this, the allocator gives each back to the system and asks for it again,
/// and filling in the pages takes a tenth of a commit.
#[cfg(target_env = "gnu")]
fn keep_freed_memory() {
    // SAFETY: mallopt only sets numbers, before there is another thread.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 32 << 20);
        libc::mallopt(libc::M_TRIM_THRESHOLD, 64 << 20);
        libc::mallopt(libc::M_ARENA_MAX, 4);
    }
}

#[cfg(not(target_env = "gnu"))]
fn keep_freed_memory() {}

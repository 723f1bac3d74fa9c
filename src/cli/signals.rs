//! Ctrl-C and SIGTERM as a request to stop.

use crate::error::{Error, IoContext, Kind, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Whether this process was asked to stop.
#[derive(Clone)]
pub(super) struct Stop(Arc<AtomicBool>);

impl Stop {
    /// From now on signals only ask; the second one ends the process at once, which loses nothing that is stored.
    pub(super) fn on_signals() -> Result<Self> {
        let asked = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM].into_iter().filter(|s| !is_ignored(*s)) {
            signal_hook::flag::register_conditional_shutdown(signal, 130, asked.clone())
                .and_then(|_| signal_hook::flag::register(signal, asked.clone()))
                .doing(|| "take signals".into())?;
        }
        Ok(Stop(asked))
    }

    /// Whether it was.
    pub(super) fn is_asked(&self) -> bool {
        self.0.load(Relaxed)
    }

    /// The same, for who waits for peers.
    pub(super) fn of_transfer(&self) -> crate::sync::Stop {
        let stop = self.clone();
        crate::sync::Stop::when(move || stop.check())
    }

    /// An error once it is asked.
    pub(super) fn check(&self) -> Result<()> {
        match self.is_asked() {
            true => Err(Error::new(Kind::Stopped, "stopped")),
            false => Ok(()),
        }
    }
}

/// Whether this process was started with the signal ignored, as shells start what runs in the background.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    let mask = mask
        .and_then(|m| u64::from_str_radix(m.trim(), 16).ok())
        .unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

//! The history behind a lock, fed by the journal.

use super::history::History;
use crate::error::Result;
use crate::pack::{Ledger, PackRange};
use parking_lot::{RwLock, RwLockReadGuard};

/// The history of an open store: what the journal has published so far.
#[derive(Default)]
pub struct LiveHistory(RwLock<State>);

#[derive(Default)]
struct State {
    history: History,
    ranges: Vec<PackRange>,
}

impl LiveHistory {
    /// The history as it is now.
    pub fn read(&self) -> impl std::ops::Deref<Target = History> + '_ {
        RwLockReadGuard::map(self.0.read(), |s| &s.history)
    }

    /// Where in the packs all published nodes lie.
    pub fn ranges(&self) -> Vec<PackRange> {
        self.0.read().ranges.clone()
    }

    /// Calls `f` with the history as it will be once `pending` bodies are applied.
    pub fn with_pending<T>(&self, pending: &[Vec<u8>], f: impl FnOnce(&History) -> Result<T>) -> Result<T> {
        if pending.is_empty() {
            return f(&self.read());
        }
        let mut history = self.read().clone();
        for body in pending {
            history.apply(body)?;
        }
        f(&history)
    }
}

impl Ledger for LiveHistory {
    fn apply(&self, _seq: u64, ranges: &[PackRange], body: &[u8]) -> Result<()> {
        let mut state = self.0.write();
        state.history.apply(body)?;
        state.ranges.extend_from_slice(ranges);
        Ok(())
    }
}

//! The history behind a lock, fed by the journal.

use super::history::History;
use crate::error::Result;
use crate::pack::{Ledger, PackRange};
use parking_lot::{RwLock, RwLockReadGuard};
use std::collections::BTreeSet;

/// The history of an open store: what the journal has published so far.
#[derive(Default)]
pub struct LiveHistory(RwLock<State>);

#[derive(Default)]
struct State {
    history: History,
    /// Of packs that are not retired, each with the sequence of its record.
    ranges: Vec<(u64, PackRange)>,
    seq: u64,
}

impl LiveHistory {
    /// The history as it is now.
    pub fn read(&self) -> impl std::ops::Deref<Target = History> + '_ {
        RwLockReadGuard::map(self.0.read(), |s| &s.history)
    }

    /// Where in the packs all published nodes lie.
    pub fn ranges(&self) -> Vec<PackRange> {
        self.ranges_since(0).1
    }

    /// Where what was published after journal record `seq` lies, oldest first, and the sequence of the newest record.
    pub fn ranges_since(&self, seq: u64) -> (u64, Vec<PackRange>) {
        let state = self.0.read();
        let newer = state.ranges.partition_point(|r| r.0 <= seq);
        (state.seq, state.ranges[newer..].iter().map(|r| r.1).collect())
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
    fn apply(&self, seq: u64, ranges: &[PackRange], body: &[u8]) -> Result<()> {
        let mut state = self.0.write();
        state.history.apply(body)?;
        state.seq = seq;
        let retired: BTreeSet<u32> = ranges.iter().filter(|r| r.is_retired()).map(|r| r.pack).collect();
        if !retired.is_empty() {
            state.ranges.retain(|(_, r)| !retired.contains(&r.pack));
        }
        let new = ranges.iter().filter(|r| !r.is_retired());
        state.ranges.extend(new.map(|r| (seq, *r)));
        Ok(())
    }
}

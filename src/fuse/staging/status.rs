//! What is staged and why it is still there.

use super::backing::Look;
use super::state::{Inner, Key, path_of};
use super::{Guard, Staging, names};
use crate::error::{Error, Kind, Result};
use crate::store::WholeFiles;
use serde::Serialize;
use std::fmt;

/// The state of the staging area.
#[derive(Clone, Debug, Serialize)]
pub struct Status {
    /// Entries by branch and name.
    pub entries: Vec<EntryStatus>,
    /// Bytes of rebuilt chunks in the store's cache.
    pub cached_bytes: u64,
    /// The most that may be there.
    pub cache_limit: u64,
    /// Bytes of whole files in STORE/cache.
    pub whole_bytes: u64,
    /// The most that may be there.
    pub whole_limit: u64,
    /// Memory that this process occupies.
    pub resident_bytes: u64,
}

/// One entry.
#[derive(Clone, Debug, Serialize)]
pub struct EntryStatus {
    /// Its branch.
    pub branch: String,
    /// Its name; bytes that are not UTF-8 are shown as U+FFFD.
    pub name: String,
    /// What is going on.
    #[serde(flatten)]
    pub state: State,
    /// Bytes of its files.
    pub bytes: u64,
    /// Handles open for writing.
    pub writers: usize,
}

/// What is going on with an entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum State {
    /// Somebody has it open for writing.
    Writing,
    /// Left alone, but not for long enough yet.
    Settling,
    /// Not committed unless asked.
    Waiting {
        /// Why.
        reason: String,
    },
    /// The store is reading it.
    Committing,
    /// Served from a version.
    Committed {
        /// BRANCH/NUMBER
        version: String,
    },
    /// The commit failed; it will be tried again.
    Failed {
        /// Why.
        reason: String,
    },
}

impl State {
    /// Whether it will be committed, or given up, if it is left alone.
    pub(crate) fn settles(&self) -> bool {
        matches!(self, State::Settling | State::Committing)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            State::Writing => f.write_str("being written"),
            State::Settling => f.write_str("settling"),
            State::Committing => f.write_str("being committed"),
            State::Waiting { reason } => write!(f, "waiting: {reason}"),
            State::Failed { reason } => write!(f, "failed: {reason}"),
            State::Committed { version } => write!(f, "committed as {version}"),
        }
    }
}

impl Staging {
    /// The state of every entry, and of unfinished work lying beside them. Only the owner knows it.
    pub fn status(&self) -> Result<Status> {
        if !self.is_owner() {
            let why = "another mount owns the staging area of this store: ask that one";
            return Err(Error::new(Kind::ReadOnly, why));
        }
        let mut entries = Vec::new();
        {
            let g = self.lock();
            for key in g.entries.keys() {
                entries.push((
                    key.clone(),
                    self.state_of(&g, key),
                    g.writers(&path_of(key)).count(),
                ));
            }
            self.unfinished(&g, &mut entries)?;
        }
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        let shown = entries.into_iter().map(|(key, state, writers)| EntryStatus {
            bytes: self.bytes_of(&key),
            branch: key.0,
            name: String::from_utf8_lossy(&key.1).into_owned(),
            state,
            writers,
        });
        let whole = self.repo.whole_files();
        Ok(Status {
            entries: shown.collect(),
            whole_bytes: whole.map_or(0, WholeFiles::bytes),
            whole_limit: whole.map_or(0, WholeFiles::quota),
            cached_bytes: self.repo.cached_bytes(),
            cache_limit: self.repo.cache_limit(),
            resident_bytes: resident().unwrap_or(0),
        })
    }

    fn unfinished(&self, g: &Inner, out: &mut Vec<(Key, State, usize)>) -> Result<()> {
        let backing = self.backing()?;
        for (branch, _) in backing.list(&[])? {
            let Some(text) = self.branch(&branch) else {
                continue;
            };
            for (name, _) in backing.list(&[branch])? {
                let key = (text.clone(), name);
                if !names::unfinished(&key.1) || g.entries.contains_key(&key) {
                    continue;
                }
                let writers = g.writers(&path_of(&key)).count();
                let state = match writers {
                    0 => State::Waiting {
                        reason: "its name marks unfinished work: rename it to commit it".into(),
                    },
                    _ => State::Writing,
                };
                out.push((key, state, writers));
            }
        }
        Ok(())
    }

    fn bytes_of(&self, key: &Key) -> u64 {
        let path = path_of(key);
        let here = self.backing().map(|b| b.path(&path));
        match here.and_then(|p| Look::at(&p, &mut |_| {})) {
            Ok(look) => look.bytes,
            Err(_) => self.attr(&path).map_or(0, |a| a.size),
        }
    }

    /// The state of one entry.
    pub(super) fn state_of(&self, g: &Guard<'_>, key: &Key) -> State {
        let Some(e) = g.entries.get(key) else {
            return State::Settling;
        };
        let path = path_of(key);
        let origin = e.mark.origin().filter(|_| e.committed());
        if let Some(origin) = origin {
            let version = self
                .version(origin)
                .map_or_else(|| origin.version.to_string(), |v| v.name());
            State::Committed { version }
        } else if e.committing || e.busy {
            State::Committing
        } else if g.writers(&path).next().is_some() {
            State::Writing
        } else if let Some(f) = &e.failed {
            State::Failed {
                reason: f.reason.clone(),
            }
        } else if let Some(reason) = g.doubt(key) {
            State::Waiting { reason }
        } else if names::unfinished(&key.1) {
            State::Waiting {
                reason: "its name marks unfinished work: rename it to commit it".into(),
            }
        } else {
            match &e.parked {
                Some((generation, reason)) if *generation == g.generation(&key.0) => State::Waiting {
                    reason: reason.clone(),
                },
                _ => State::Settling,
            }
        }
    }
}

/// A reason with the file inside the entry that it is about.
pub(super) fn at_and_why(inside: &names::Path, why: &str) -> String {
    match inside {
        [] => why.to_owned(),
        _ => format!("{}: {why}", names::show(inside)),
    }
}

/// proc_pid_status(5): `VmRSS:   1234 kB`.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

//! What staging knows in memory: entries, open writers, and files that are suspected to be torn.

use super::backing::Look;
use super::handle::Stamp;
use super::marks::{Mark, Origin};
use super::names;
use super::process::{Process, Processes};
use super::rotated::Rotated;
use super::status::at_and_why;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Branch and name of an entry.
pub(super) type Key = (String, Vec<u8>);

/// The entry that a path lies in, if it is in a branch whose name is text.
pub(super) fn key_of(path: &names::Path) -> Option<Key> {
    match path {
        [branch, entry, ..] => Some((String::from_utf8(branch.clone()).ok()?, entry.clone())),
        _ => None,
    }
}

/// The path of an entry.
pub(super) fn path_of(key: &Key) -> Vec<Vec<u8>> {
    vec![key.0.as_bytes().to_vec(), key.1.clone()]
}

/// A commit that failed.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    /// Why, for people.
    pub reason: String,
    /// When it is tried again.
    pub retry: Duration,
    /// How often it failed in a row.
    pub times: u32,
}

/// One entry. Times are the clock's.
#[derive(Debug)]
pub(super) struct Entry {
    /// As on disk.
    pub mark: Mark,
    /// Last change.
    pub changed: Duration,
    /// Place in the order of closing.
    pub closed: u64,
    /// Put there whole: it need not be left alone first.
    pub at_once: bool,
    /// The last change took something out of it: more may follow.
    pub thinning: bool,
    /// Its files are being moved in or out: everyone waits.
    pub busy: bool,
    /// The store is reading it.
    pub committing: bool,
    /// The last commit failed.
    pub failed: Option<Failure>,
    /// Why it is not committed, and the generation of the branch in which that was found.
    pub parked: Option<(u64, String)>,
    /// Who changed it since it was last seen settled.
    pub by: Vec<Work>,
    /// Where its files were linked aside before the first was removed.
    pub aside: Option<PathBuf>,
    /// What of it somebody can still write to without our hearing of it.
    pub held: Option<PathBuf>,
    /// It was written to without our hearing of it.
    pub behind: bool,
    /// What a loose file looked like when a writer last closed it.
    pub closed_as: Option<Stamp>,
    /// What was published while writers still had it open.
    pub published: Option<Published>,
}

/// A path below an entry, for comparisons.
fn place(path: &names::Path) -> u64 {
    let mut h = DefaultHasher::new();
    path.hash(&mut h);
    h.finish()
}

/// What one process did to an entry.
#[derive(Debug)]
pub(super) struct Work {
    /// Who.
    pub process: Arc<Process>,
    /// The paths below the entry that it was the last to change or remove.
    pub places: HashSet<u64>,
    /// Why that may be incomplete: it was killed, or failed, before the entry was left alone.
    pub failed: Option<String>,
}

/// A version that an entry became while it could still be written to.
#[derive(Clone, Debug)]
pub(super) struct Published {
    /// What the files looked like.
    pub look: Look,
    /// The version.
    pub origin: Origin,
    /// Somebody had them mapped: what is written then may show in no time or size.
    pub held: bool,
}

impl Entry {
    /// An entry with this mark, changed at `now`.
    pub(super) fn new(mark: Mark, now: Duration) -> Self {
        Entry {
            mark,
            changed: now,
            closed: 0,
            at_once: false,
            thinning: false,
            busy: false,
            committing: false,
            failed: None,
            parked: None,
            by: Vec::new(),
            aside: None,
            held: None,
            behind: false,
            closed_as: None,
            published: None,
        }
    }

    /// Whether files were removed from the committed entry since.
    pub(super) fn thinned(&self) -> bool {
        matches!(&self.mark, Mark::Committed { origin } if !origin.gone.is_empty())
    }

    /// Notes who of its writers was killed or failed.
    fn note_failures(&mut self) {
        for w in &mut self.by {
            w.failed = w.failed.take().or_else(|| w.process.failed());
        }
    }

    /// Notes that it has been left alone: from now on its writers may end as they like. Keeps those who were killed or failed before;
    /// what others have done over since is not their work any more. Who takes up what is there, without doing it over, is believed
    /// when that ends well: the answer is how what is said of such begins.
    pub(super) fn left_alone(&mut self) -> Option<String> {
        self.note_failures();
        let resumed = |w: &Work| w.failed.is_none() && w.process.resumes() && w.process.ended_well();
        let last = self.by.iter().rposition(resumed);
        let told = last.map(|last| {
            let told = self.by[last].process.told();
            let since = self.by.split_off(last);
            self.by.retain(|w| !w.process.resumes());
            self.by.extend(since);
            told
        });
        self.by.retain(|w| w.failed.is_some() && !w.places.is_empty());
        told
    }

    /// Whether one of those who changed it was killed or failed before it was left alone: then files may be missing, or be left
    /// from before.
    fn abandoned(&self) -> Option<&String> {
        let mut left = self.by.iter().filter(|w| !w.places.is_empty());
        left.find_map(|w| w.failed.as_ref())
    }

    /// Whether it is as its version has it.
    pub(super) fn committed(&self) -> bool {
        matches!(&self.mark, Mark::Committed { origin } if origin.gone.is_empty())
    }
}

/// A handle open for writing.
#[derive(Debug)]
pub(super) struct Open {
    /// Where its file is now; nowhere once it is unlinked.
    pub path: Option<Vec<Vec<u8>>>,
    /// Milliseconds of the clock at the last write.
    pub tick: Arc<AtomicU64>,
}

/// Everything under one lock.
#[derive(Debug, Default)]
pub(super) struct Inner {
    /// Entries by branch and name.
    pub entries: BTreeMap<Key, Entry>,
    /// Handles open for writing.
    pub opens: HashMap<u64, Open>,
    /// Files that may be torn, and why. An entry's own path stands for all of it.
    pub suspects: BTreeMap<Vec<Vec<u8>>, String>,
    /// Counts the changes of each branch.
    pub generations: HashMap<String, u64>,
    /// Nothing new may be changed.
    pub frozen: bool,
    /// Nothing is held back for the sake of files still open.
    pub draining: bool,
    /// The committer is to end.
    pub stopping: bool,
    /// What was removed before it was committed.
    pub rotated: Vec<Rotated>,
    /// Those who change entries.
    pub processes: Processes,
    /// There is something new for the committer.
    pub woken: bool,
    next: u64,
}

impl Inner {
    /// The next number: of a handle, or in the order of closing.
    pub(super) fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// The generation of a branch.
    pub(super) fn generation(&self, branch: &str) -> u64 {
        self.generations.get(branch).copied().unwrap_or(0)
    }

    /// Notes a change at `path`.
    pub(super) fn touch(&mut self, path: &names::Path, now: Duration) {
        let Some(key) = key_of(path) else { return };
        *self.generations.entry(key.0.clone()).or_default() += 1;
        if let Some(e) = self.entries.get_mut(&key) {
            e.changed = now;
            e.failed = None;
        }
    }

    /// Notes who changed `path`, if it is somebody's doing. What others did there, and that they made the directories above,
    /// counts no more.
    pub(super) fn sign(&mut self, path: &names::Path) {
        let Some(client) = self.processes.client() else {
            return;
        };
        let Some(e) = key_of(path).and_then(|key| self.entries.get_mut(&key)) else {
            return;
        };
        let inside = &path[2..];
        let mut own = None;
        for (at, work) in e.by.iter_mut().enumerate() {
            if work.process.id == client.id && work.failed.is_none() {
                own = Some(at);
                continue;
            }
            for len in 0..=inside.len() {
                work.places.remove(&place(&inside[..len]));
            }
        }
        let own = own.unwrap_or_else(|| {
            e.by.push(Work {
                process: client,
                places: HashSet::new(),
                failed: None,
            });
            e.by.len() - 1
        });
        e.by[own].places.insert(place(inside));
    }

    /// What was at `path` has another name in its entry now: nobody is to be held to the old one.
    pub(super) fn unsign(&mut self, path: &names::Path) {
        if let Some(e) = key_of(path).and_then(|key| self.entries.get_mut(&key)) {
            for work in &mut e.by {
                work.places.remove(&place(&path[2..]));
            }
        }
    }

    /// An entry has another name: so has what its writers did. With `exchange` also the reverse.
    pub(super) fn resign(&mut self, from: &Key, to: &Key, exchange: bool) {
        let mut take = |key: &Key| {
            let e = self.entries.get_mut(key);
            e.map(|e| std::mem::take(&mut e.by)).unwrap_or_default()
        };
        let (moved, mut replaced) = (take(from), take(to));
        if !exchange {
            replaced.clear();
        }
        for (key, by) in [(to, moved), (from, replaced)] {
            if let Some(e) = self.entries.get_mut(key) {
                e.by = by;
                // Once it is elsewhere, it may count as put there whole.
                e.note_failures();
            }
        }
    }

    /// What lies at `path` is about to leave its entry: why it may be incomplete, if one of those who worked on the entry was killed
    /// or failed.
    pub(super) fn leaves(&mut self, path: &names::Path) -> Option<String> {
        let e = self.entries.get_mut(&key_of(path)?)?;
        e.note_failures();
        e.abandoned().cloned()
    }

    /// Why the entry is not to be committed unasked: what of it may be torn.
    pub(super) fn doubt(&self, key: &Key) -> Option<String> {
        let torn = self.suspect(&path_of(key));
        let torn = torn.map(|(at, why)| at_and_why(&at[2..], why));
        let entry = || self.entries.get(key);
        let held = || {
            let file = entry()?.held.as_ref()?.display().to_string();
            let what = if file.is_empty() { "it" } else { &file };
            Some(format!("{what} is still mapped, or open under another name"))
        };
        torn.or_else(|| entry()?.abandoned().cloned()).or_else(held)
    }

    /// Handles open for writing below `path`.
    pub(super) fn writers<'a>(&'a self, path: &'a names::Path) -> impl Iterator<Item = &'a Open> {
        self.opens
            .values()
            .filter(move |o| o.path.as_ref().is_some_and(|p| p.starts_with(path)))
    }

    /// The last change of an entry, writes through open handles included.
    pub(super) fn last_change(&self, key: &Key) -> Duration {
        let path = path_of(key);
        let ticks = self
            .writers(&path)
            .map(|o| Duration::from_millis(o.tick.load(Ordering::Relaxed)));
        let changed = self.entries.get(key).map_or(Duration::ZERO, |e| e.changed);
        ticks.fold(changed, Duration::max)
    }

    /// Names directly in the branch that are being written.
    pub(super) fn writing(&self, branch: &str) -> Vec<Vec<u8>> {
        let loose = self.opens.values().filter_map(|o| match o.path.as_deref() {
            Some([b, name]) if b == branch.as_bytes() => Some(name.clone()),
            _ => None,
        });
        loose.collect()
    }

    /// The first suspicion at or below `path`: where, and why.
    pub(super) fn suspect(&self, path: &names::Path) -> Option<(&Vec<Vec<u8>>, &String)> {
        self.suspects
            .range(path.to_vec()..)
            .next()
            .filter(|(p, _)| p.starts_with(path))
    }

    /// Clears the suspicions at and below `path`: it was rewritten from scratch, removed, or committed as asked.
    pub(super) fn clear(&mut self, path: &names::Path) {
        while let Some(p) = self.suspect(path).map(|(p, _)| p.clone()) {
            self.suspects.remove(&p);
        }
        // What was found empty after a crash is no longer empty.
        if path.len() > 2 {
            self.suspects.remove(&path[..2]);
        }
    }

    /// Whatever was at `path` is gone: handles on it go on without a name.
    pub(super) fn orphan(&mut self, path: &names::Path) {
        for o in self.opens.values_mut() {
            if o.path.as_ref().is_some_and(|p| p.starts_with(path)) {
                o.path = None;
            }
        }
    }

    /// What was at or below `from` is now at `to`; with `exchange` also the reverse.
    pub(super) fn moved(&mut self, from: &names::Path, to: &names::Path, exchange: bool) {
        let place = |p: &Vec<Vec<u8>>| {
            let (old, new) = if p.starts_with(from) {
                (from, to)
            } else if exchange && p.starts_with(to) {
                (to, from)
            } else {
                return None;
            };
            Some([new, &p[old.len()..]].concat())
        };
        for o in self.opens.values_mut() {
            if let Some(new) = o.path.as_ref().and_then(place) {
                o.path = Some(new);
            }
        }
        let hits: Vec<_> = self
            .suspects
            .keys()
            .filter_map(|p| Some((p.clone(), place(p)?)))
            .collect();
        let taken: Vec<_> = hits
            .into_iter()
            .map(|(old, new)| (new, self.suspects.remove(&old)))
            .collect();
        for (new, why) in taken {
            self.suspects.extend(why.map(|w| (new, w)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(s: &str) -> Vec<Vec<u8>> {
        s.split('/').map(|c| c.as_bytes().to_vec()).collect()
    }

    #[test]
    fn suspicions_and_handles_move_with_their_files() {
        let mut inner = Inner::default();
        inner.suspects.insert(path("main/a/x"), "1".into());
        inner.suspects.insert(path("main/ab"), "2".into());
        inner.opens.insert(
            1,
            Open {
                path: Some(path("main/a/y")),
                tick: Arc::default(),
            },
        );
        inner.moved(&path("main/a"), &path("main/b"), false);
        assert_eq!(inner.suspect(&path("main/b")).unwrap().0, &path("main/b/x"));
        assert!(inner.suspect(&path("main/a")).is_none());
        assert!(inner.suspect(&path("main/ab")).is_some());
        assert_eq!(inner.writers(&path("main/b")).count(), 1);

        inner.moved(&path("main/ab"), &path("main/b"), true);
        assert_eq!(inner.suspect(&path("main/ab")).unwrap().1, "1");
        assert_eq!(inner.suspect(&path("main/b")).unwrap().1, "2");
        inner.orphan(&path("main/ab"));
        assert_eq!(inner.writers(&[]).count(), 0);
        inner.clear(&path("main/ab/x"));
        inner.clear(&path("main/b"));
        assert!(inner.suspects.is_empty());
    }
}

//! Committing: the committer thread, commits on request, and what follows a commit.

use super::backing::{Look, move_to, remove_all};
use super::marks::{Mark, Origin, missing};
use super::state::{Entry, Failure, Key, Published, key_of, path_of};
use super::status::{EntryStatus, State};
use super::{Guard, Staging, copyup, names};
use crate::error::{Error, IoContext, Kind, Result};
use crate::fuse::manners::stand_back;
use crate::store::{Committed, Numbered};
use parking_lot::MutexGuard;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Failures are retried after this long, doubled each time up to [`RETRY_LIMIT`].
const RETRY: Duration = Duration::from_secs(2);
pub(super) const RETRY_LIMIT: Duration = Duration::from_secs(120);
/// Changes that come in bursts are looked at together.
const PAUSE: Duration = Duration::from_millis(20);
/// No file system here tells times apart more coarsely.
const TICK: Duration = Duration::from_millis(20);

/// How often a commit on request starts again because something changed meanwhile.
const TRIES: usize = 3;

/// An entry to commit, and, unless it was asked for, when it last changed: if that moved, it has to settle again.
pub(super) type Item = (Key, Option<Duration>);

/// What is said of a version that was there already.
fn as_committed(v: &Numbered) -> Committed {
    Committed {
        id: v.id,
        branch: v.branch.clone(),
        number: v.number,
        bytes: v.version.len,
        stored: v.stored,
        links_outside: 0,
    }
}

impl Staging {
    /// Starts the thread that commits what settles.
    pub(super) fn run_committer(self: &Arc<Self>) -> Result<()> {
        if !self.is_owner() {
            return Ok(());
        }
        let (weak, shared) = (Arc::downgrade(self), self.shared.clone());
        let work = move || {
            stand_back();
            while let Some(staging) = weak.upgrade() {
                let next = staging.step();
                let wait = next.map(|t| t.saturating_sub(staging.clock.now()));
                drop(staging);
                std::thread::sleep(PAUSE);
                let mut g = shared.inner.lock();
                if !g.woken && !g.stopping {
                    let longest = Duration::from_secs(3600);
                    shared.wake.wait_for(&mut g, wait.unwrap_or(longest).min(longest));
                }
                if g.stopping {
                    return;
                }
                g.woken = false;
            }
        };
        let thread = std::thread::Builder::new()
            .name("zspace-commit".into())
            .spawn(work);
        *self.thread.lock() = Some(thread.doing(|| "start the committer".into())?);
        Ok(())
    }

    /// Has the committer look again.
    pub(super) fn wake(&self, g: &mut Guard<'_>) {
        g.woken = true;
        self.shared.wake.notify_all();
    }

    /// From now on nothing new may be opened for writing or changed (EROFS); handles that are open may finish.
    pub fn freeze(&self) {
        self.lock().frozen = true;
    }

    /// Nothing is waited for any more: the committer ends after the commit it is at.
    pub fn give_up(&self) {
        let mut g = self.lock();
        g.stopping = true;
        self.wake(&mut g);
    }

    /// Ends the committer, after the commit it is at. What is staged stays.
    pub fn stop(&self) {
        self.give_up();
        if let Some(thread) = self.thread.lock().take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }

    /// Commits all that settles within `limit`, and returns what stays, with why.
    pub fn drain(&self, limit: Duration) -> Result<Vec<EntryStatus>> {
        if !self.is_owner() {
            return Ok(Vec::new());
        }
        let end = self.clock.now() + limit;
        let mut g = self.lock();
        g.draining = true;
        for e in g.entries.values_mut() {
            // What was held back or failed gets its chance now.
            (e.parked, e.failed) = (None, None);
        }
        self.wake(&mut g);
        while self.clock.now() < end && !g.stopping {
            if !g.entries.keys().any(|key| self.state_of(&g, key).settles()) {
                break;
            }
            self.shared.wake.wait_for(&mut g, Duration::from_millis(50));
        }
        g.draining = false;
        drop(g);
        let all = self.status()?.entries;
        Ok(all
            .into_iter()
            .filter(|e| !matches!(e.state, State::Committed { .. }))
            .collect())
    }

    /// Commits the entry that `path` (branch, entry, anything inside it) lies in, whatever speaks against it, together with
    /// the shards or the index that belong to it. What is committed already is answered with its version.
    pub fn commit_now(&self, path: &[Vec<u8>], message: &str) -> Result<Committed> {
        names::check(path)?;
        if !self.is_owner() {
            return Err(Error::new(
                Kind::ReadOnly,
                "another mount owns the staging area of this store",
            ));
        }
        let key = key_of(path).ok_or_else(|| Error::new(Kind::Usage, "name an entry: BRANCH/ENTRY"))?;
        let mut tries = 0;
        loop {
            if let Some(done) = self.prepare_now(&key)? {
                return Ok(done);
            }
            let items: Vec<Item> = self.linked(&key).into_iter().map(|key| (key, None)).collect();
            match self.commit_group(&items, message) {
                // The kernel tells late that a file was closed, and the committer may be at it just now.
                Err(e) if e.kind() == Kind::Changed && tries < TRIES => tries += 1,
                done => return done,
            }
        }
    }

    /// Gets an entry ready to be committed on request, or finds that it is committed.
    fn prepare_now(&self, key: &Key) -> Result<Option<Committed>> {
        let mut g = self.lock();
        while g.entries.get(key).is_some_and(|e| e.busy || e.committing) {
            self.shared.wake.wait(&mut g);
        }
        let path = path_of(key);
        match g.entries.get(key) {
            None if self.branch(&path[0]).is_some() && self.backing()?.stat(&path)?.is_some() => {
                // Unfinished by its name, but asked for.
                self.marks.write(&key.0, &key.1, &Mark::NEW)?;
                g.entries
                    .insert(key.clone(), Entry::new(Mark::NEW, self.clock.now()));
            }
            None => return Err(missing().context(names::show(&path))),
            Some(e) if e.thinned() => self.copy_up(&mut g, key)?,
            Some(Entry {
                mark: Mark::Committed { origin },
                ..
            }) => {
                let v = self
                    .version(origin)
                    .ok_or_else(|| missing().context(names::show(&path)))?;
                return Ok(Some(as_committed(&v)));
            }
            Some(Entry {
                published: Some(p), ..
            }) => {
                let p = p.clone();
                drop(g);
                return self.published_as(key, &p);
            }
            Some(_) => {}
        }
        Ok(None)
    }

    /// What an entry is that was published while it could still be written to, if it has not changed since.
    fn published_as(&self, key: &Key, p: &Published) -> Result<Option<Committed>> {
        let look = Look::at(&self.disk_path(key), &mut |_| {})?;
        if p.look.differs(&look) || p.held && !self.holds_version(&self.disk_path(key), &p.origin)? {
            return Ok(None);
        }
        Ok(self.version(&p.origin).map(|v| as_committed(&v)))
    }

    /// Makes one version of these entries of one branch.
    pub(super) fn commit_group(&self, items: &[Item], message: &str) -> Result<Committed> {
        let started = self.clock.now();
        let changes;
        let moved = || Error::new(Kind::Changed, "the entry changed while it was to be committed");
        let branch = items.first().map(|i| i.0.0.clone()).ok_or_else(moved)?;
        {
            let mut g = self.lock();
            for (key, changed) in items {
                let same = changed
                    .is_none_or(|c| c == g.last_change(key) && g.writers(&path_of(key)).next().is_none());
                let ready = g
                    .entries
                    .get(key)
                    .is_some_and(|e| matches!(e.mark, Mark::Dirty { .. }) && !e.busy && !e.committing);
                if !same || !ready {
                    return Err(moved());
                }
            }
            for (key, _) in items {
                if let Some(e) = g.entries.get_mut(key) {
                    e.committing = true;
                }
            }
            changes = items
                .iter()
                .map(|(key, _)| g.last_change(key))
                .collect::<Vec<_>>();
        }
        let look = |item: &Item| Look::at(&self.disk_path(&item.0), &mut |_| {}).ok();
        let held: Vec<bool> = items.iter().map(|(key, _)| self.held(key).is_some()).collect();
        let mut before: Vec<_> = items.iter().map(look).collect();
        if before.iter().flatten().any(|l| self.just_changed(l)) {
            // Another change within one tick of the disk's clock would leave no trace.
            std::thread::sleep(TICK);
            before = items.iter().map(look).collect();
        }
        let entries = items
            .iter()
            .map(|(key, _)| (key.1.clone(), self.disk_path(key)))
            .collect();
        // What changed while it was read would be a version that never was: it is given up before it is published.
        let confirm = || {
            let now = items.iter().map(look);
            let same = before
                .iter()
                .zip(now)
                .all(|looks| matches!(looks, (Some(a), Some(b)) if !a.differs(&b)));
            let g = self.lock();
            let quiet = items.iter().zip(&changes).all(|((key, settled), change)| {
                g.last_change(key) == *change
                    && (settled.is_none() || g.writers(&path_of(key)).next().is_none())
            });
            if same && quiet { Ok(()) } else { Err(moved()) }
        };
        // Who asked for it waits for it.
        let background = items.iter().all(|(_, settled)| settled.is_some());
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.repo.commit(&branch, entries, message, background, &confirm)
        }))
        .unwrap_or_else(|_| Err(Error::new(Kind::Io, "the commit broke off by a fault in zspace")));

        // All are looked at before the first is moved away: hard links between them show in each other's times.
        let after: Vec<_> = items.iter().map(look).collect();
        match result {
            Ok(done) => {
                log::info!("committed {}/{:06} {}", done.branch, done.number, done.id);
                for (((key, _), held), looks) in items.iter().zip(held).zip(before.into_iter().zip(after)) {
                    if let (Some(look), Some(after)) = looks
                        && !look.differs(&after)
                    {
                        let origin = Origin::new(done.id, &key.1);
                        self.finish(key, Published { look, origin, held }, started, true);
                    }
                }
                self.end_committing(items);
                Ok(done)
            }
            Err(e) => {
                self.end_committing(items);
                for ((key, _), change) in items.iter().zip(changes) {
                    let mut g = self.lock();
                    // What is not found was removed meanwhile, or else is missing for good.
                    let changed = e.kind() == Kind::Changed
                        || e.kind() == Kind::NotFound && g.last_change(key) != change;
                    if changed {
                        // It settles once more.
                        g.touch(&path_of(key), self.clock.now());
                    } else {
                        drop(g);
                        self.failed(key, &e);
                    }
                }
                Err(e)
            }
        }
    }

    fn end_committing(&self, items: &[Item]) {
        let mut g = self.lock();
        for (key, _) in items {
            if let Some(e) = g.entries.get_mut(key) {
                e.committing = false;
            }
        }
        self.shared.wake.notify_all();
    }

    /// Notes a failure and says when to try again. A change of the entry clears it.
    pub(super) fn failed(&self, key: &Key, error: &Error) -> Duration {
        let now = self.clock.now();
        let mut g = self.lock();
        let Some(e) = g.entries.get_mut(key) else {
            return now + RETRY;
        };
        let times = e.failed.as_ref().map_or(0, |f| f.times);
        let retry = now + RETRY.saturating_mul(1 << times.min(10)).min(RETRY_LIMIT);
        log::warn!("{}: not committed: {error}", names::show(&path_of(key)));
        e.failed = Some(Failure {
            reason: error.to_string(),
            retry,
            times: times + 1,
        });
        self.shared.wake.notify_all();
        retry
    }

    /// What follows a commit: the durable mark, then the backing files go, or become whole files of the version. If the entry was
    /// touched since `started`, or somebody can still write to it, it stays as it is: new work. `own`: the commit that is under way
    /// is the one that this ends.
    pub(super) fn finish(&self, key: &Key, mut done: Published, started: Duration, own: bool) {
        let path = path_of(key);
        done.held = done.held || self.held(key).is_some();
        let mut g = self.lock();
        let touched = done.held || g.last_change(key) > started || g.writers(&path).next().is_some();
        let Some(e) = g
            .entries
            .get_mut(key)
            .filter(|e| !e.busy && (own || !e.committing) && matches!(e.mark, Mark::Dirty { .. }))
        else {
            return;
        };
        if touched {
            e.published = Some(done);
            return;
        }
        e.busy = true;
        done.origin.owner = self
            .backing()
            .and_then(|b| b.stat(&path))
            .ok()
            .flatten()
            .and_then(|s| {
                let (own, found) = (super::mounter(), (s.st_uid, s.st_gid));
                (found != own).then_some(found)
            });
        let origin = done.origin.clone();
        let mark = Mark::Committed { origin };
        let marked = MutexGuard::unlocked(&mut g, || self.marks.write(&key.0, &key.1, &mark));
        // In one step under the lock, so that nobody finds neither the files nor the version.
        let moved = marked.and_then(|()| {
            let number = g.number();
            self.trash(&path, number).inspect_err(|_| {
                // Without the move the files would count as leftovers at the next start.
                let _ = self.marks.write(&key.0, &key.1, &Mark::NEW);
            })
        });
        g.clear(&path);
        let now = self.clock.now();
        match moved {
            Ok(gone) => {
                g.entries.insert(
                    key.clone(),
                    Entry {
                        busy: true,
                        ..Entry::new(mark, now)
                    },
                );
                // Readers are served from the version meanwhile; who wants to change the entry waits for its files.
                MutexGuard::unlocked(&mut g, || self.keep_whole(key, &gone, &done.origin));
            }
            Err(error) => {
                if let Some(e) = g.entries.get_mut(key) {
                    e.published = Some(done);
                }
                let error = error.context("it is a version, but stays in staging");
                MutexGuard::unlocked(&mut g, || self.failed(key, &error));
            }
        }
        if let Some(e) = g.entries.get_mut(key) {
            e.busy = false;
        }
        self.wake(&mut g);
        drop(g);
        self.empty_trash();
    }

    /// Takes backing files out of sight in one step. The answer is where they are.
    pub(super) fn trash(&self, path: &names::Path, number: u64) -> Result<PathBuf> {
        let to = self.dir.join("trash").join(number.to_string());
        match move_to(&self.backing()?.path(path), &to) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(to),
            r => r
                .doing(|| format!("move {} to the trash", names::show(path)))
                .map(|()| to),
        }
    }

    fn empty_trash(&self) {
        let trash = fs::read_dir(self.dir.join("trash"));
        for file in trash.into_iter().flatten().flatten() {
            if let Err(e) = remove_all(&file.path()) {
                log::warn!("{e}");
            }
        }
    }

    /// Puts the files of a committed entry back on disk, without what was removed from it, and marks it dirty. Others wait
    /// for this entry meanwhile, and only for this one.
    pub(super) fn copy_up(&self, g: &mut Guard<'_>, key: &Key) -> Result<()> {
        let n = g.number();
        let Some(e) = g.entries.get_mut(key) else {
            return Err(missing());
        };
        let Mark::Committed { origin } = e.mark.clone() else {
            return Ok(());
        };
        e.busy = true;
        let temp = self.dir.join("copy").join(n.to_string());
        let dirty = Mark::Dirty {
            base: Some(origin.clone()),
        };
        let done = MutexGuard::unlocked(g, || {
            let version = self.version(&origin).ok_or_else(missing)?;
            copyup::export(self.repo.as_ref(), &version, &origin, &path_of(key), &temp)?;
            self.marks.write(&key.0, &key.1, &dirty)?;
            let to = self.disk_path(key);
            fs::create_dir_all(self.dir.join("tree").join(&key.0))
                .and_then(|()| move_to(&temp, &to))
                .doing(|| format!("move the copy to {}", to.display()))?;
            if !origin.gone.is_empty() {
                return Ok(None);
            }
            // Whoever changes nothing after all makes no version; a change must get another time than this.
            let look = Look::at(&to, &mut |_| {})?;
            std::thread::sleep(TICK);
            // Not every file system notes the time of what is written through a mapping.
            let (origin, held) = (origin.clone(), true);
            Ok(Some(Published { look, origin, held }))
        });
        if done.is_err() {
            let _ = remove_all(&temp);
        }
        let now = self.clock.now();
        if let Some(e) = g.entries.get_mut(key) {
            e.busy = false;
            if let Ok(published) = &done {
                *e = Entry {
                    published: published.clone(),
                    by: std::mem::take(&mut e.by),
                    ..Entry::new(dirty, now)
                };
            }
        }
        self.shared.wake.notify_all();
        done.map(|_| ()).map_err(|e: Error| {
            e.context(format!(
                "copy {} back from its version",
                names::show(&path_of(key))
            ))
        })
    }

    /// Does what of a change at `path` can take long, so that the change itself does not: brings a committed entry back to disk.
    /// Another change may come between the two, which then does it again.
    pub fn prepare(&self, path: &names::Path) -> Result<()> {
        let mut g = self.lock();
        self.check_writable(&g)?;
        self.wait_idle(&mut g, path);
        match key_of(path) {
            Some(key) => self.copy_up(&mut g, &key),
            None => Ok(()),
        }
    }

    /// Copies up a directory whose removals have settled, to be committed without further ado.
    pub(super) fn copy_up_settled(&self, key: &Key) -> Result<()> {
        let mut g = self.lock();
        self.copy_up(&mut g, key)?;
        if let Some(e) = g.entries.get_mut(key) {
            e.at_once = true;
        }
        Ok(())
    }
}

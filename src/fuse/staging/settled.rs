//! One pass of the committer: what has settled, what belongs together, what must wait.

use super::backing::{Look, components, kind_of};
use super::handle::stamp_of;
use super::marks::Mark;
use super::plan::{Member, divide, held_by, windows};
use super::state::{Key, Published, path_of};
use super::status::at_and_why;
use super::whole::below;
use super::{Staging, names};
use crate::error::{IoContext, Result};
use crate::fuse::attr::FileKind;
use crate::store::Probe;
use std::collections::{BTreeMap, HashMap};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How soon what is still mapped is looked at again.
const HELD: Duration = Duration::from_secs(1);

/// So many times as long as else a directory must be left alone from which something was removed: whoever removes a checkpoint
/// file by file may be slow, and nobody waits for a version of what is left.
const REMOVALS: u32 = 5;

/// An entry that may be due, as it was when the pass began.
#[derive(Clone)]
pub(super) struct Candidate {
    pub(super) key: Key,
    /// Its last change: if that moves, what was found out about it is void.
    pub(super) changed: Duration,
    closed: u64,
    at_once: bool,
    thinned: bool,
    thinning: bool,
    /// The last change took something out of it.
    emptied: bool,
    /// Not before this, after a failure.
    retry: Duration,
    published: Option<Published>,
}

/// A candidate that was looked into.
struct Probed {
    candidate: Candidate,
    member: Member,
}

/// The soonest of the moments at which something becomes due.
#[derive(Default)]
struct Next(Option<Duration>);

impl Next {
    fn at(&mut self, t: Duration) {
        self.0 = Some(self.0.map_or(t, |n| n.min(t)));
    }
}

impl Staging {
    /// Commits what is due and says when to look again, unless something changes before.
    pub(super) fn step(&self) -> Option<Duration> {
        let mut next = Next(self.commit_rotated());
        for (branch, candidates) in self.candidates() {
            let mut loose = Vec::new();
            for c in candidates {
                match self.kind(&c.key) {
                    _ if c.thinned => self.directory(c, &mut next),
                    Some(FileKind::Dir) => self.directory(c, &mut next),
                    Some(FileKind::File | FileKind::Symlink) => loose.push(c),
                    Some(_) => self.park(&c, "is no file that can be committed".into()),
                    None => self.vanished(&c),
                }
            }
            self.loose(&branch, loose, &mut next);
        }
        next.0
    }

    fn kind(&self, key: &Key) -> Option<FileKind> {
        let stat = self.backing().and_then(|b| b.stat(&path_of(key)));
        stat.ok().flatten().map(|s| kind_of(s.st_mode))
    }

    /// Somebody removed the backing files past the mount.
    fn vanished(&self, c: &Candidate) {
        let mut g = self.lock();
        let path = path_of(&c.key);
        let gone = self
            .backing()
            .and_then(|b| b.stat(&path))
            .is_ok_and(|s| s.is_none());
        let same = g
            .entries
            .get(&c.key)
            .is_some_and(|e| !e.busy && !e.thinned() && e.changed == c.changed);
        if gone && same {
            self.forget(&mut g, &c.key);
        }
    }

    /// Work without writers or suspicions that was not already found wanting.
    fn candidates(&self) -> BTreeMap<String, Vec<Candidate>> {
        let g = self.lock();
        let mut out: BTreeMap<String, Vec<Candidate>> = BTreeMap::new();
        for (key, e) in &g.entries {
            let path = path_of(key);
            let parked = e.parked.as_ref().is_some_and(|(n, _)| *n == g.generation(&key.0));
            let idle = e.committed() || e.busy || e.committing || parked || names::unfinished(&key.1);
            if idle || g.writers(&path).next().is_some() {
                continue;
            }
            out.entry(key.0.clone()).or_default().push(Candidate {
                key: key.clone(),
                changed: g.last_change(key),
                closed: e.closed,
                at_once: e.at_once,
                thinned: e.thinned(),
                thinning: e.thinning && !g.draining,
                emptied: e.thinning,
                retry: e.failed.as_ref().map_or(Duration::ZERO, |f| f.retry),
                published: e.published.clone(),
            });
        }
        out
    }

    /// Notes why an entry is left alone until something in its branch changes.
    fn park(&self, c: &Candidate, why: String) {
        let mut g = self.lock();
        let generation = g.generation(&c.key.0);
        if g.last_change(&c.key) == c.changed
            && let Some(e) = g.entries.get_mut(&c.key)
        {
            log::info!("{}: waits: {why}", names::show(&path_of(&c.key)));
            e.parked = Some((generation, why));
        }
    }

    /// The entry has been left alone: whether it is in doubt all the same. Of a loose file that was closed in peace its writers
    /// may end as they like, unless they wrote to it afterwards.
    fn abandoned(&self, c: &Candidate, dir: bool) -> Option<String> {
        let mut g = self.lock();
        self.drop_aside(&mut g, &c.key);
        let e = g.entries.get_mut(&c.key)?;
        e.thinning = false;
        let now = || {
            std::fs::symlink_metadata(self.disk_path(&c.key))
                .map(|m| stamp_of(&m))
                .ok()
        };
        e.behind |= !dir && e.closed_as.is_some() && e.closed_as != now();
        if !c.at_once && (dir || e.behind) {
            let resumed = e.left_alone();
            let path = path_of(&c.key);
            if let Some(told) = resumed {
                g.suspects
                    .retain(|at, why| !(at.starts_with(&path) && why.starts_with(&told)));
            }
        }
        g.doubt(&c.key)
    }

    fn directory(&self, c: Candidate, next: &mut Next) {
        let quiet = match (c.at_once, c.thinning) {
            (true, _) => Duration::ZERO,
            (false, true) => self.settle.dirs * REMOVALS,
            (false, false) => self.settle.dirs,
        };
        let due = (c.changed + quiet).max(c.retry);
        if due > self.clock.now() {
            return next.at(due);
        }
        if self.still_held(&c, next) {
            return;
        }
        if let Some(why) = self.abandoned(&c, true) {
            return self.park(&c, why);
        }
        if c.thinned {
            // Removals made it something new: it is committed in the next round.
            match self.copy_up_settled(&c.key) {
                Ok(()) => next.at(self.clock.now()),
                Err(e) => next.at(self.failed(&c.key, &e)),
            }
            return;
        }
        let path = self.disk_path(&c.key);
        let mut files = Vec::new();
        let look = match Look::at(&path, &mut |f| files.push(f.to_owned())) {
            Ok(look) => look,
            Err(e) => return next.at(self.failed(&c.key, &e)),
        };
        match self.already(&c, &look) {
            Ok(true) => return,
            Ok(false) => {}
            Err(e) => return next.at(self.failed(&c.key, &e)),
        }
        if c.emptied && files.is_empty() {
            // Nobody wants a version of what is left of a checkpoint that was taken away.
            if let Some(e) = self.lock().entries.get_mut(&c.key) {
                e.thinning = true;
            }
            return self.park(&c, "all files in it were removed".into());
        }
        if let Some(name) = &look.unfinished {
            return self.park(&c, format!("{}: its name marks unfinished work", name.display()));
        }
        if let Some(name) = &look.special {
            let why = format!("{}: is no file that can be committed", name.display());
            return self.park(&c, why);
        }
        if !c.at_once
            && let Some(later) = self.changed_behind(&c.key, &look, self.settle.dirs)
        {
            return next.at(later);
        }
        let torn = match self.torn_under_another_name(&c.key, &files) {
            None => self.torn_inside(&path, &files),
            why => Ok(why),
        };
        match torn {
            Err(e) => next.at(self.failed(&c.key, &e)),
            Ok(Some(why)) => self.park(&c, why),
            Ok(None) => self.commit_settled(&[c], next),
        }
    }

    fn commit_settled(&self, group: &[Candidate], next: &mut Next) {
        let keys: Vec<_> = group.iter().map(|c| (c.key.clone(), Some(c.changed))).collect();
        if self.commit_group(&keys, "").is_err() {
            let g = self.lock();
            for c in group {
                if let Some(e) = g.entries.get(&c.key) {
                    next.at(e
                        .failed
                        .as_ref()
                        .map_or(e.changed + self.settle.files, |f| f.retry));
                }
            }
        }
    }

    pub(super) fn disk_path(&self, key: &Key) -> PathBuf {
        self.dir.join("tree").join(names::join(&path_of(key)))
    }

    /// Whether just this content was published already, while a writer had it open: then it only has to be marked.
    fn already(&self, c: &Candidate, look: &Look) -> Result<bool> {
        let Some(p) = c.published.clone().filter(|p| !p.look.differs(look)) else {
            return Ok(false);
        };
        if p.held && !self.holds_version(&self.disk_path(&c.key), &p.origin)? {
            return Ok(false);
        }
        self.finish(&c.key, Published { held: false, ..p }, c.changed, false);
        Ok(true)
    }

    /// Whether somebody can still write to the entry without our hearing of it; then it is looked at again later.
    fn still_held(&self, c: &Candidate, next: &mut Next) -> bool {
        let held = self.held(&c.key);
        let mut g = self.lock();
        let Some(e) = g.entries.get_mut(&c.key) else {
            return false;
        };
        if let Some(file) = &held {
            log::debug!(
                "{}: {} is still mapped",
                names::show(&path_of(&c.key)),
                file.display()
            );
            e.behind = true;
        }
        e.held = held;
        if e.held.is_some() {
            next.at(self.clock.now() + HELD);
        }
        e.held.is_some()
    }

    /// Whether the entry changed so lately that the next change may get the same time.
    pub(super) fn just_changed(&self, look: &Look) -> bool {
        let newest = Duration::from_nanos(u64::try_from(look.newest).unwrap_or(0));
        let age = self.clock.wall().checked_sub(newest);
        age.is_none_or(|age| age < Duration::from_millis(20))
    }

    /// A change that came past the mount (a mapping, say): then the entry is younger than it seemed. Says when it is due.
    fn changed_behind(&self, key: &Key, look: &Look, quiet: Duration) -> Option<Duration> {
        let wall = self.clock.wall();
        let newest = Duration::from_nanos(u64::try_from(look.newest).unwrap_or(0));
        // A time to come says nothing: the clock was set back.
        let age = wall.checked_sub(newest)?;
        if age >= quiet {
            return None;
        }
        let changed = self.clock.now().saturating_sub(age);
        let mut g = self.lock();
        let e = g.entries.get_mut(key)?;
        e.changed = e.changed.max(changed);
        Some(e.changed + quiet)
    }

    /// Why one of these files of the entry, or it itself, may be torn: it is a hard link of one that is.
    fn torn_under_another_name(&self, key: &Key, files: &[PathBuf]) -> Option<String> {
        let (at, root) = (&path_of(key)[..], &self.disk_path(key));
        let suspects: Vec<_> = self
            .lock()
            .suspects
            .iter()
            .map(|(p, why)| (p.clone(), why.clone()))
            .collect();
        let inode = |m: &std::fs::Metadata| (m.nlink() > 1 && m.is_file()).then(|| (m.dev(), m.ino()));
        let of = |path: &Path| inode(&std::fs::symlink_metadata(path).ok()?);
        let backing = self.backing().ok()?;
        let torn: HashMap<_, _> = suspects
            .iter()
            .filter_map(|(path, why)| Some((of(&backing.path(path))?, (path, why))))
            .collect();
        if torn.is_empty() {
            return None;
        }
        let mut found = files
            .iter()
            .filter_map(|file| Some((file, torn.get(&of(&below(root, file))?)?)));
        let (file, (path, why)) = found.next()?;
        let inside = components(file);
        let why = format!("is the same file as {}: {why}", names::show(path));
        // It stays so when the other name is gone.
        self.lock().suspects.insert([at, &inside].concat(), why.clone());
        Some(at_and_why(&inside, &why))
    }

    /// Why a directory is incomplete by the structure of its files.
    pub(super) fn torn_inside(&self, root: &Path, files: &[PathBuf]) -> Result<Option<String>> {
        if let Some(why) = names::without_metadata(files) {
            return Ok(Some(why));
        }
        for file in files {
            let probe = self.repo.probe(&root.join(file))?;
            if let Some(why) = probe.torn {
                return Ok(Some(format!("{}: {why}", file.display())));
            }
            let dir = root.join(file.parent().unwrap_or(Path::new("")));
            let missing = probe
                .shards
                .iter()
                .flatten()
                .find(|s| is_plain(s) && !dir.join(s).exists());
            if let Some(shard) = missing {
                return Ok(Some(format!(
                    "{}: names {shard}, which is not there",
                    file.display()
                )));
            }
        }
        Ok(None)
    }

    /// Loose files of one branch.
    fn loose(&self, branch: &str, files: Vec<Candidate>, next: &mut Next) {
        let changed: Vec<Duration> = files.iter().map(|c| c.changed).collect();
        let mut groups: Vec<Vec<Probed>> = Vec::new();
        let mut young: Vec<Vec<u8>> = Vec::new();
        for group in windows(&changed, self.settle.files) {
            let of = || group.iter().map(|i| &files[*i]);
            let due = of()
                .map(|c| (c.changed + self.settle.files).max(c.retry))
                .max()
                .unwrap_or_default();
            let mut probed = Vec::new();
            if due > self.clock.now() {
                next.at(due);
            } else {
                probed = of().filter_map(|c| self.probe(c, next)).collect();
            }
            if probed.len() == group.len() {
                groups.push(probed);
            } else {
                young.extend(of().map(|c| c.key.1.clone()));
            }
        }
        self.join_by_index(branch, &mut groups, &mut young, next);
        for group in groups {
            self.divide_and_commit(branch, group, next);
        }
    }

    fn probe(&self, c: &Candidate, next: &mut Next) -> Option<Probed> {
        let path = self.disk_path(&c.key);
        if self.still_held(c, next) {
            return None;
        }
        let looked = Look::at(&path, &mut |_| {}).and_then(|look| {
            let already = self.already(c, &look)?;
            let probe = if already {
                Probe::default()
            } else {
                self.probe_file(&path)?
            };
            Ok((look, already, probe))
        });
        let (look, already, probe) = match looked {
            Ok(found) => found,
            Err(e) => {
                next.at(self.failed(&c.key, &e));
                return None;
            }
        };
        if already {
            return None;
        }
        if let Some(later) = self.changed_behind(&c.key, &look, self.settle.files) {
            next.at(later);
            return None;
        }
        let shards = probe.shards.map(|s| {
            s.into_iter()
                .filter(|s| is_plain(s))
                .map(String::into_bytes)
                .collect()
        });
        let elsewhere = || self.torn_under_another_name(&c.key, &[PathBuf::new()]);
        let torn = self.abandoned(c, false).or_else(elsewhere).or(probe.torn);
        let (name, closed, tensors) = (c.key.1.clone(), c.closed, probe.tensors);
        Some(Probed {
            candidate: c.clone(),
            member: Member {
                name,
                closed,
                tensors,
                shards,
                torn,
            },
        })
    }

    /// Looks into a regular file; anything else (a link, a pipe) holds nothing, and opening it could hang.
    fn probe_file(&self, path: &Path) -> Result<Probe> {
        let meta = std::fs::symlink_metadata(path).doing(|| format!("stat {}", path.display()))?;
        match meta.is_file() {
            true => self.repo.probe(path),
            false => Ok(Probe {
                tensors: false,
                shards: None,
                torn: None,
            }),
        }
    }

    /// Brings together an index and the shards it names, however far apart they were written. Where a shard is still young or
    /// being written, the index and its group are put off; where one is missing, the index is torn.
    fn join_by_index(
        &self,
        branch: &str,
        groups: &mut Vec<Vec<Probed>>,
        young: &mut Vec<Vec<u8>>,
        next: &mut Next,
    ) {
        young.extend(self.lock().writing(branch));
        let mut at = 0;
        while at < groups.len() {
            let named: Vec<Vec<u8>> = groups[at]
                .iter()
                .filter_map(|p| p.member.shards.as_ref())
                .flatten()
                .cloned()
                .collect();
            let wanted = |g: &[Probed]| g.iter().any(|p| named.contains(&p.member.name));
            let other = (0..groups.len()).find(|i| *i != at && wanted(&groups[*i]));
            if let Some(other) = other {
                let moved = groups.remove(other);
                at -= usize::from(other < at);
                groups[at].extend(moved);
                continue;
            }
            if named.iter().any(|n| young.contains(n)) {
                // What is young may settle without a change that would have it looked at again.
                next.at(self.clock.now() + self.settle.files);
                groups.remove(at);
                continue;
            }
            for p in &mut groups[at] {
                let missing = |s: &&Vec<u8>| self.locate(&[branch.as_bytes().to_vec(), s.to_vec()]).is_err();
                if let Some(shard) = p.member.shards.iter().flatten().find(missing) {
                    let why = format!("names {}, which is not there", String::from_utf8_lossy(shard));
                    p.member.torn.get_or_insert(why);
                }
            }
            at += 1;
        }
    }

    fn divide_and_commit(&self, branch: &str, group: Vec<Probed>, next: &mut Next) {
        let writing = {
            let g = self.lock();
            if g.draining { Vec::new() } else { g.writing(branch) }
        };
        let any_tensors = group.iter().any(|p| p.member.tensors);
        let held = group
            .iter()
            .find_map(|p| held_by(&p.member.name, any_tensors, &writing));
        if let Some(held) = held {
            let why = format!(
                "waits for {}, which is being written",
                String::from_utf8_lossy(held)
            );
            return group.iter().for_each(|p| self.park(&p.candidate, why.clone()));
        }
        let members: Vec<Member> = group.iter().map(|p| p.member.clone()).collect();
        let division = divide(&members);
        for (i, why) in division.waits {
            self.park(&group[i].candidate, why);
        }
        for version in division.versions {
            let of: Vec<_> = version.iter().map(|i| group[*i].candidate.clone()).collect();
            self.commit_settled(&of, next);
        }
    }

    /// For `zspace commit`: the loose entries that go with this one because an index says so, itself first.
    pub(super) fn linked(&self, key: &Key) -> Vec<Key> {
        if self.kind(key) == Some(FileKind::Dir) {
            return vec![key.clone()];
        }
        let loose: Vec<Key> = {
            let g = self.lock();
            let dirty = g
                .entries
                .iter()
                .filter(|(k, e)| k.0 == key.0 && matches!(e.mark, Mark::Dirty { .. }));
            dirty.map(|(k, _)| k.clone()).collect()
        };
        let shards_of = |k: &Key| {
            let probe = self.probe_file(&self.disk_path(k)).ok();
            probe
                .and_then(|p| p.shards)
                .unwrap_or_default()
                .into_iter()
                .map(String::into_bytes)
                .collect::<Vec<_>>()
        };
        // Only a file called an index is looked into for its shards.
        let indexes = loose.iter().filter(|k| k.1.ends_with(b".index.json"));
        let found = indexes
            .map(|k| (k.clone(), shards_of(k)))
            .find(|(k, shards)| k == key || shards.contains(&key.1));
        let mut all = vec![key.clone()];
        if let Some((index, shards)) = found {
            let goes = |k: &&Key| **k != *key && (**k == index || shards.contains(&k.1));
            all.extend(loose.iter().filter(goes).cloned());
        }
        all
    }
}

/// Whether an index names a file beside it or below, and not some place elsewhere.
fn is_plain(shard: &str) -> bool {
    let path = Path::new(shard);
    path.components()
        .all(|c| matches!(c, std::path::Component::Normal(n) if !n.as_bytes().is_empty()))
}

//! The index: nodes published since the newest run in memory, and a few sorted runs on disk that cover the rest.
//!
//! A run covers a span of journal sequences: it holds every node of their records. What no run covers is found by scanning
//! packs, so that a run that is missing or damaged costs time and nothing else. Of several records of one node the one that was
//! published last counts.

use super::parse::StoreId;
use super::run::{self, Run, Source};
use super::{Place, store};
use crate::disk::Disk;
use crate::error::{Error, Kind, Result};
use crate::id::{NodeId, hex};
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Takes a node with the sequence it was published at.
pub(super) type Add<'a> = dyn FnMut(u64, NodeId, Place) -> Result<()> + 'a;

/// The most entries that runs are merged into one for.
const MAX_MERGED: u64 = 1 << 31;

pub(super) struct Index {
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    store: StoreId,
    live: RwLock<Live>,
    /// Held while runs are written or left out.
    maintenance: Mutex<()>,
    /// Sequences and packs of which not all nodes could be found. No run ever covers them, so that every opening looks again.
    damaged: Mutex<BTreeMap<(u64, u32), Unread>>,
    /// The last sequence known to be in the journal: runs that reach beyond it are not used.
    horizon: AtomicU64,
}

/// What could not be read of a pack.
struct Unread {
    offset: u64,
    why: String,
    told: bool,
}

/// Where a record is, and the sequence that published it.
type Found = (Place, u64);

#[derive(Default)]
struct Live {
    table: HashMap<NodeId, Found>,
    /// Newest first.
    runs: Arc<Vec<Arc<Run>>>,
}

impl Live {
    fn put(&mut self, seq: u64, id: NodeId, place: Place) {
        let entry = self.table.entry(id).or_insert((place, seq));
        if entry.1 <= seq {
            *entry = (place, seq);
        }
    }
}

impl Index {
    pub(super) fn new(disk: Arc<dyn Disk>, root: &Path, store: StoreId) -> Self {
        let (live, maintenance, damaged) = (RwLock::default(), Mutex::default(), Mutex::default());
        Self {
            disk,
            dir: root.join("index"),
            store,
            live,
            maintenance,
            damaged,
            horizon: AtomicU64::new(0),
        }
    }

    /// Opens the runs on disk that lie within the sequences `1..=last`.
    pub(super) fn load(&self, last: u64) -> Result<()> {
        self.horizon.fetch_max(last, Ordering::Relaxed);
        let runs = self.choose()?;
        self.live.write().runs = Arc::new(runs);
        Ok(())
    }

    pub(super) fn covers(&self, seq: u64) -> bool {
        self.live.read().runs.iter().any(|r| r.covers(seq))
    }

    /// Nodes in memory.
    pub(super) fn pending(&self) -> usize {
        self.live.read().table.len()
    }

    /// Takes in the nodes of one record, all at once: no reader sees some of them only.
    pub(super) fn add(&self, seq: u64, nodes: Vec<(NodeId, Place)>) {
        let mut live = self.live.write();
        for (id, place) in nodes {
            live.put(seq, id, place);
        }
    }

    pub(super) fn note_damaged(&self, seq: u64, pack: u32, offset: u64, why: &Error) {
        let unread = Unread {
            offset,
            why: why.to_string(),
            told: false,
        };
        self.damaged.lock().insert((seq, pack), unread);
    }

    /// Forgets what could not be read of a pack of which nothing is served.
    pub(super) fn forget_damaged(&self, pack: u32) {
        self.damaged.lock().retain(|(_, p), _| *p != pack);
    }

    /// Logs what could not be read, once.
    pub(super) fn tell_damage(&self) {
        for ((_, pack), unread) in self.damaged.lock().iter_mut().filter(|(_, u)| !u.told) {
            log::warn!("pack {pack:08x} is damaged at {}: {}", unread.offset, unread.why);
            unread.told = true;
        }
    }

    /// The error for a node that is not to be found.
    pub(super) fn missing(&self, id: &NodeId) -> Error {
        match self.damaged.lock().iter().next() {
            Some(((_, pack), unread)) => Error::damage(format!(
                "node {id} is not to be found, and pack {pack:08x} is damaged at {}",
                unread.offset
            )),
            None => Error::new(Kind::NotFound, format!("no node {id}")),
        }
    }

    fn snapshot(&self, id: &NodeId) -> (Option<Found>, Arc<Vec<Arc<Run>>>) {
        let live = self.live.read();
        (live.table.get(id).copied(), live.runs.clone())
    }

    /// Where a node lies, if memory or a run that reaches beyond `since` has it. An error is a run that has become bad: heal, and ask
    /// again.
    pub(super) fn find_since(&self, id: &NodeId, since: u64) -> Result<Option<Place>> {
        let (known, runs) = self.snapshot(id);
        let known = known.filter(|(_, seq)| *seq > since);
        // Memory is newer than all runs but for what was found again in the place of a bad one.
        let since = known.map_or(since, |(_, seq)| seq);
        for run in runs.iter().filter(|r| r.header.last > since) {
            if let Some(place) = run.find(id)? {
                return Ok(Some(place));
            }
        }
        Ok(known.map(|(place, _)| place))
    }

    /// Every place where a node lies, as far as the runs can be read.
    pub(super) fn all(&self, id: &NodeId) -> Vec<Place> {
        let (known, runs) = self.snapshot(id);
        known
            .map(|(place, _)| place)
            .into_iter()
            .chain(runs.iter().filter_map(|r| r.find(id).ok().flatten()))
            .collect()
    }

    /// Leaves out bad runs, or with `all` everything. `scan` is asked for the nodes of the sequences up to `last` that no
    /// good run covers.
    pub(super) fn heal(
        &self,
        last: u64,
        all: bool,
        scan: impl FnOnce(&dyn Fn(u64) -> bool, &mut Add) -> Result<()>,
    ) -> Result<()> {
        let _maintenance = self.maintenance.lock();
        let runs = self.live.read().runs.clone();
        let (bad, good): (Vec<_>, Vec<_>) = runs.iter().cloned().partition(|r| all || r.is_bad());
        if bad.is_empty() && !all {
            return Ok(()); // another thread was faster
        }
        if all {
            self.damaged.lock().clear();
        }
        let left_out = |seq| bad.iter().any(|r| r.covers(seq)) && !good.iter().any(|r| r.covers(seq));
        let wanted = |seq| seq <= last && (all || left_out(seq));
        let mut found = HashMap::new();
        scan(&wanted, &mut |seq, id, place| {
            found.insert(id, (place, seq));
            Ok(())
        })?;
        self.tell_damage();
        let mut live = self.live.write();
        live.table.retain(|_, (_, seq)| !all || *seq > last);
        for (id, (place, seq)) in found {
            live.put(seq, id, place);
        }
        live.runs = Arc::new(good);
        drop(live);
        for run in &bad {
            let _ = self.disk.remove(&self.dir.join(&run.name)); // on a read-only store it is found bad again
        }
        Ok(())
    }

    /// Opens the runs on disk up to the horizon and chooses few that cover much: newest first.
    fn choose(&self) -> Result<Vec<Arc<Run>>> {
        let known = self.live.read().runs.clone();
        let mut all: Vec<Arc<Run>> = Vec::new();
        'list: for attempt in 0.. {
            all.clear();
            for name in store::list(&*self.disk, &self.dir)?
                .iter()
                .filter(|n| n.ends_with(".run"))
            {
                if let Some(run) = known.iter().find(|r| r.name == *name) {
                    all.push(run.clone());
                    continue;
                }
                match Run::open(&*self.disk, &self.dir, name, &self.store) {
                    Ok(run) => all.push(Arc::new(run)),
                    // Merged into another by another process: look which.
                    Err(e) if e.kind() == Kind::NotFound && attempt < 10 => continue 'list,
                    Err(e) => log::warn!("ignored, its nodes are found by scanning packs: {e}"),
                }
            }
            break;
        }
        let horizon = self.horizon.load(Ordering::Relaxed);
        all.retain(|r| !r.is_bad() && r.header.last <= horizon);
        let mut chosen: Vec<Arc<Run>> = Vec::new();
        let mut covered = 0;
        loop {
            // Of the runs that go on from here without a gap, or else begin next, the one that reaches farthest.
            let next = all
                .iter()
                .filter(|r| r.header.last > covered)
                .map(|r| r.header.first.max(covered + 1))
                .min();
            let Some(next) = next else { break };
            let best = all
                .iter()
                .filter(|r| r.covers(next))
                .max_by_key(|r| r.header.last);
            let Some(best) = best else { break };
            covered = best.header.last;
            chosen.push(best.clone());
        }
        chosen.reverse();
        Ok(chosen)
    }

    /// The spans of `1..=last` that no run covers and that can be covered.
    fn gaps(&self, runs: &[Arc<Run>], last: u64) -> Vec<(u64, u64)> {
        let mut taken: Vec<(u64, u64)> = runs.iter().map(|r| (r.header.first, r.header.last)).collect();
        taken.extend(self.damaged.lock().keys().map(|(seq, _)| (*seq, *seq)));
        taken.sort_unstable();
        let (mut gaps, mut next) = (Vec::new(), 1);
        for (first, end) in taken.into_iter().filter(|t| t.0 <= last) {
            if first > next {
                gaps.push((next, first - 1));
            }
            next = next.max(end + 1);
        }
        if next <= last {
            gaps.push((next, last));
        }
        gaps
    }

    /// Writes what is in memory of the sequences `1..=last` as runs, merging each with the runs before it that are less than
    /// twice as long: so there are never more than about log2(nodes / threshold), and a node is written as often.
    ///
    /// Run writers of all processes take turns by a lock; with `wait` false, a busy one means nothing is done.
    pub(super) fn flush(&self, last: u64, wait: bool) -> Result<()> {
        let maintenance = match wait {
            true => Some(self.maintenance.lock()),
            false => self.maintenance.try_lock(),
        };
        if maintenance.is_none() || self.live.read().table.is_empty() {
            return Ok(());
        }
        self.disk.create_dir_all(&self.dir)?;
        let _lock = match self.disk.lock(&self.dir.join("lock"), wait) {
            Ok(lock) => lock,
            Err(e) if e.kind() == Kind::Busy => return Ok(()),
            Err(e) => return Err(e),
        };
        self.clean_temporaries();
        // With what other processes wrote meanwhile, and without what they merged.
        self.horizon.fetch_max(last, Ordering::Relaxed);
        let mut runs = self.choose()?;
        for gap in self.gaps(&runs, last) {
            self.flush_gap(&mut runs, gap)?;
        }
        self.disk.sync_dir(&self.dir)?;
        let mut live = self.live.write();
        live.table
            .retain(|_, (_, seq)| !runs.iter().any(|r| r.covers(*seq)));
        live.runs = Arc::new(runs);
        let runs = live.runs.clone();
        drop(live);
        self.remove_merged(&runs);
        Ok(())
    }

    fn flush_gap(&self, runs: &mut Vec<Arc<Run>>, (mut first, last): (u64, u64)) -> Result<()> {
        let live = self.live.read();
        let within = live
            .table
            .iter()
            .filter(|(_, (_, seq))| (first..=last).contains(seq));
        let mut entries: Vec<(NodeId, Place)> = within.map(|(id, (place, _))| (*id, *place)).collect();
        drop(live);
        if entries.is_empty() {
            return Ok(());
        }
        entries.sort_unstable_by_key(|e| e.0);
        let mut total = entries.len() as u64;
        let mut sources = vec![Source::memory(entries)];
        while let Some(i) = runs.iter().position(|r| r.covers(first - 1)) {
            let count = runs[i].header.count;
            if count >= 2 * total || total + count > MAX_MERGED {
                break;
            }
            let run = runs.remove(i);
            total += count;
            first = run.header.first;
            sources.push(Source::run(run));
        }
        let mut random = [0; 4];
        store::random(&mut random)?;
        let name = format!("{first:016x}-{last:016x}-{}.run", hex(&random));
        let temporary = self.dir.join(format!("{name}.tmp"));
        let written = run::write(
            &*self.disk,
            &temporary,
            &self.store,
            (first, last),
            total,
            sources,
        )
        .and_then(|()| self.disk.rename(&temporary, &self.dir.join(&name)));
        if let Err(e) = written {
            let _ = self.disk.remove(&temporary); // else the next writer cleans it up
            return Err(e);
        }
        runs.push(Arc::new(Run::open(&*self.disk, &self.dir, &name, &self.store)?));
        runs.sort_by_key(|r| std::cmp::Reverse(r.header.last));
        Ok(())
    }

    /// Files that a run writer left when it died; none is writing now.
    fn clean_temporaries(&self) {
        for name in store::list(&*self.disk, &self.dir).unwrap_or_default() {
            if name.ends_with(".tmp") {
                let _ = self.disk.remove(&self.dir.join(name));
            }
        }
    }

    /// Removes runs that lie within another that is in use. Processes that have them open keep them.
    fn remove_merged(&self, runs: &[Arc<Run>]) {
        for name in store::list(&*self.disk, &self.dir).unwrap_or_default() {
            let span = name.strip_suffix(".run").and_then(|n| {
                let (first, rest) = n.split_once('-')?;
                let (last, _) = rest.split_once('-')?;
                Some((
                    u64::from_str_radix(first, 16).ok()?,
                    u64::from_str_radix(last, 16).ok()?,
                ))
            });
            let Some((first, last)) = span else { continue };
            let used = runs.iter().any(|r| r.name == name);
            if !used && runs.iter().any(|r| r.covers(first) && r.covers(last)) {
                let _ = self.disk.remove(&self.dir.join(name));
            }
        }
    }

    /// Removes runs that claim to cover records the journal does not have; called when its end is certain.
    pub(super) fn remove_beyond(&self, last: u64) {
        for name in store::list(&*self.disk, &self.dir).unwrap_or_default() {
            if let Ok(run) = Run::open(&*self.disk, &self.dir, &name, &self.store)
                && name.ends_with(".run")
                && run.header.last > last
            {
                log::warn!("index run {name} covers records that the journal does not have; removed");
                let _ = self.disk.remove(&self.dir.join(name));
            }
        }
    }
}

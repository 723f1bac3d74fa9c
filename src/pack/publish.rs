//! Publishing: many threads, one leader, one write and one fsync for all who wait (group commit).

use super::parse::{self, Pos};
use super::{PackRange, Packs, Place, store};
use crate::error::{Error, Kind, Result};
use crate::id::NodeId;
use std::collections::{HashMap, HashSet};

/// Makes a record's body when its place in the order is known; sees the bodies of its batch before it.
pub(super) type Build = Box<dyn FnOnce(&[Vec<u8>]) -> Result<Vec<u8>> + Send>;

/// Who waits for a publish, and what came of it.
#[derive(Default)]
pub(super) struct Queue {
    next: u64,
    leading: bool,
    pub(super) waiting: Vec<Job>,
    done: HashMap<u64, Result<u64>>,
}

pub(super) struct Job {
    ticket: u64,
    /// The last record known when the nodes were chosen, if nobody else may have published any of them since.
    since: Option<u64>,
    ranges: Vec<PackRange>,
    nodes: Vec<(NodeId, Place)>,
    build: Build,
}

/// A job whose record has been built.
struct Built {
    ticket: u64,
    ranges: Vec<PackRange>,
    nodes: Vec<(NodeId, Place)>,
    body: Vec<u8>,
    pos: Pos,
}

impl Packs {
    /// Publishes finished ranges (none is fine too) with a body for the ledger, and returns the record's sequence once it
    /// is durable and applied.
    ///
    /// `build` runs under the store's lock after everything published before has reached the ledger; it gets the bodies of
    /// the earlier records of the same batch, which have not. If it fails, only this call does. `NoSpace` leaves the store
    /// as it was; after a failed fsync this and every later publish of this instance is `Poisoned`.
    pub fn publish(&self, mut ranges: Vec<PackRange>, build: Build) -> Result<u64> {
        ranges.retain(|r| r.count > 0);
        self.publish_all(ranges, None, build)
    }

    /// As [`Packs::publish`], but `Changed` if one of the nodes was published by somebody else in a record after `since`.
    pub fn publish_new(&self, mut ranges: Vec<PackRange>, since: u64, build: Build) -> Result<u64> {
        ranges.retain(|r| r.count > 0);
        self.publish_all(ranges, Some(since), build)
    }

    /// Publishes ranges that hold records, or that retire packs.
    pub(super) fn publish_all(
        &self,
        ranges: Vec<PackRange>,
        since: Option<u64>,
        build: Build,
    ) -> Result<u64> {
        let mut nodes = Vec::new();
        for range in ranges.iter().filter(|r| !r.is_retired()) {
            self.files.scan(range, &mut |id, place, _| {
                nodes.push((id, place));
                Ok(())
            })?;
        }
        let mut queue = self.queue.lock();
        let ticket = queue.next;
        queue.next += 1;
        queue.waiting.push(Job {
            ticket,
            since,
            ranges,
            nodes,
            build,
        });
        loop {
            if let Some(result) = queue.done.remove(&ticket) {
                drop(queue);
                if self.index.pending() >= self.limits.table {
                    self.flush_soon();
                }
                return result;
            }
            if queue.leading {
                self.wake.wait(&mut queue);
            } else {
                queue.leading = true;
                drop(queue);
                self.lead();
                queue = self.queue.lock();
            }
        }
    }

    /// Publishes for everyone who waits.
    fn lead(&self) {
        let mut batch = Batch {
            packs: self,
            open: Vec::new(),
        };
        if let Err(e) = self.publish_batch(&mut batch) {
            if batch.open.is_empty() {
                let waiting = std::mem::take(&mut self.queue.lock().waiting);
                batch.open.extend(waiting.iter().map(|job| job.ticket));
            }
            batch.fail(&e);
        }
    }

    fn publish_batch(&self, batch: &mut Batch<'_>) -> Result<()> {
        self.check_poison()?;
        self.journal.sync_copy();
        let lock = self.disk.lock(&store::lock_path(&self.root), true)?;
        let known = self.applied.lock().pos;
        let end = self.journal.settle(known).inspect_err(|e| self.poison_if(e))?;
        self.catch_up(end)?;
        let jobs = std::mem::take(&mut self.queue.lock().waiting);
        batch.open.extend(jobs.iter().map(|job| job.ticket));
        let start = self.journal.ready(end).inspect_err(|e| self.poison_if(e))?;

        let (mut bodies, mut built, mut bytes) = (Vec::new(), Vec::new(), Vec::new());
        let mut pos = start;
        for Job {
            ticket,
            since,
            ranges,
            nodes,
            build,
        } in jobs
        {
            let new = match since {
                Some(since) => self.are_new(&nodes, since, end.seq, &built),
                None => Ok(()),
            };
            let made = new.and_then(|()| build(&bodies)).and_then(|body| {
                parse::write_journal(&mut bytes, pos.seq + 1, start.seq + 1, &ranges, &body)?;
                Ok(body)
            });
            match made {
                Ok(body) => {
                    pos.seq += 1;
                    pos.offset = start.offset + bytes.len() as u64;
                    bodies.push(body.clone());
                    built.push(Built {
                        ticket,
                        ranges,
                        nodes,
                        body,
                        pos,
                    });
                }
                Err(e) => batch.done(ticket, Err(e)),
            }
        }
        if built.is_empty() {
            return Ok(());
        }
        self.journal
            .append(start, &bytes)
            .inspect_err(|e| self.poison_if(e))?;
        self.journal.raise(pos);
        self.journal.mirror(pos);
        drop(lock);

        // A refresh in another thread may have read some of them from the journal already.
        let _reading = self.reading.lock();
        for Built {
            ticket,
            ranges,
            nodes,
            body,
            pos,
        } in built
        {
            if pos.seq > self.applied.lock().pos.seq {
                self.index.add(pos.seq, nodes);
                self.apply(pos, &ranges, &body)
                    .map_err(|e| e.context(format!("record {} is durable, but was not taken in", pos.seq)))?;
            }
            self.finished.lock().retain(|(range, _)| !ranges.contains(range));
            batch.done(ticket, Ok(pos.seq));
        }
        Ok(())
    }

    /// Fails if one of the nodes is in a record after `since` and up to `end`, or in an earlier one of this batch.
    fn are_new(&self, nodes: &[(NodeId, Place)], since: u64, end: u64, batch: &[Built]) -> Result<()> {
        let changed = || Error::new(Kind::Changed, "another process stored some of the same meanwhile");
        if end > since {
            for (id, _) in nodes {
                if self.published_since(id, since)?.is_some() {
                    return Err(changed());
                }
            }
        }
        let before: HashSet<&NodeId> = batch.iter().flat_map(|b| &b.nodes).map(|n| &n.0).collect();
        match nodes.iter().any(|(id, _)| before.contains(id)) {
            true => Err(changed()),
            false => Ok(()),
        }
    }

    fn check_poison(&self) -> Result<()> {
        match &*self.poisoned.lock() {
            Some(why) => Err(Error::new(
                Kind::Poisoned,
                format!("nothing more is published here: {why}"),
            )),
            None => Ok(()),
        }
    }

    fn poison_if(&self, e: &Error) {
        if e.kind() == Kind::Poisoned {
            self.poisoned.lock().get_or_insert(e.to_string());
        }
    }
}

/// The tickets a leader owes an answer, once it has taken them. Dropping it gives up the lead and answers what is left, even if `build` panicked.
struct Batch<'a> {
    packs: &'a Packs,
    open: Vec<u64>,
}

impl Batch<'_> {
    fn done(&mut self, ticket: u64, result: Result<u64>) {
        self.open.retain(|t| *t != ticket);
        self.packs.queue.lock().done.insert(ticket, result);
    }

    fn fail(&mut self, e: &Error) {
        for ticket in std::mem::take(&mut self.open) {
            self.packs.queue.lock().done.insert(ticket, Err(e.share()));
        }
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.fail(&Error::new(
            Kind::Io,
            "the thread that published for this one ended early",
        ));
        self.packs.queue.lock().leading = false;
        self.packs.wake.notify_all();
    }
}

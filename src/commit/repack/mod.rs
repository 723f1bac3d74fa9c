//! Repack: encodes old chains anew, with the codecs and the chain policy of today, and gathers what is left of old packs.
//!
//! The versions are gone through as if each was committed again, and a record that is clearly smaller takes the place of the one
//! there is. A node's id never changes. Units of whole chains become visible at once, each with one journal record; whoever
//! reads meanwhile sees the records before or after it, and either rebuilds the same bytes (docs/FORMAT.md, "Repacking").

mod code;
mod gather;
mod survey;
mod table;
mod unit;

use super::Parts;
use crate::error::Result;
use crate::pack::Retiring;
use code::{Coder, Done};
use parking_lot::Mutex;
use std::sync::Arc;
use survey::{Item, Survey};
use unit::Repack;

/// Bytes of old records after which a unit is published.
const UNIT: u64 = 256 << 20;

/// How far a repack is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RepackProgress {
    /// Nodes looked at, and how many there are to look at.
    pub done: u64,
    /// Nodes to look at.
    pub total: u64,
    /// Bytes of their records before.
    pub before: u64,
    /// Bytes of their records now.
    pub after: u64,
}

/// What to repack.
#[derive(Clone, Default)]
pub struct RepackRequest {
    /// Look at the versions of this branch only.
    pub branch: Option<String>,
    /// Change nothing.
    pub dry_run: bool,
    /// Told how far it is.
    pub progress: Option<Arc<dyn Fn(RepackProgress) + Send + Sync>>,
    /// Asked whether to stop: what is under way is finished and kept.
    pub stop: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
}

/// What a repack did, or would do.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Repacked {
    /// Chunks and layouts looked at.
    pub looked: u64,
    /// Of these, those encoded anew.
    pub rewritten: u64,
    /// Bytes of their records before.
    pub rewritten_before: u64,
    /// Bytes of their records after.
    pub rewritten_after: u64,
    /// Nodes moved as they are, out of packs that were given up.
    pub moved: u64,
    /// Bytes of all packs before.
    pub before: u64,
    /// Bytes of all packs after. In a dry run what they would be at least.
    pub after: u64,
    /// Packs before.
    pub packs_before: u64,
    /// Packs after.
    pub packs_after: u64,
    /// Packs given up, or cut, in which interrupted commits and pulls left something that nobody needs.
    pub abandoned: u64,
    /// Packs that would have been given up, if nobody were writing to them.
    pub busy: u64,
    /// What could not be read, and was left as it is.
    pub damage: Vec<String>,
    /// Whether it was told to stop before the end.
    pub stopped: bool,
}

/// Repacks a store. What was published when it fails or is stopped stays.
pub fn repack(parts: &Parts, request: &RepackRequest) -> Result<Repacked> {
    let _only = match request.dry_run {
        true => None,
        false => Some(parts.packs.lock_for_rewriting()?),
    };
    parts.packs.refresh()?;
    let mut repack = Repack::new(parts, request.dry_run)?;
    let groups = survey(parts, request, &mut repack)?;
    let total = groups.iter().map(|g| g.len() as u64).sum();
    let sum = Mutex::new(Done::default());
    let told = |done: Done| {
        let mut sum = sum.lock();
        sum.looked += done.looked;
        sum.before += done.before;
        sum.written += done.written;
        sum.replaced += done.replaced;
        sum.stored += done.stored;
        if let Some(tell) = &request.progress {
            tell(RepackProgress {
                done: sum.looked,
                total,
                before: sum.before,
                after: sum.before - sum.replaced + sum.stored,
            });
        }
    };
    let stop = || request.stop.as_ref().is_some_and(|stop| stop());
    let mut rest = &groups[..];
    while !rest.is_empty() && !stop() {
        let (unit, more) = rest.split_at(unit_len(rest, &repack));
        rest = more;
        let coder = Coder::new(parts, &repack.table, repack.writer()?, &told, &stop);
        let damage = coder.run(unit)?;
        let writer = coder.writer.into_inner();
        repack.report.damage.extend(damage);
        if let Some(writer) = writer {
            repack.publish(vec![writer.finish()?], Retiring::default())?;
        }
    }
    let sum = *sum.lock();
    let report = &mut repack.report;
    report.looked = sum.looked;
    report.rewritten = sum.written;
    (report.rewritten_before, report.rewritten_after) = (sum.replaced, sum.stored);
    report.stopped = stop();
    repack.gather(&stop)?;
    repack.finish()
}

fn survey(parts: &Parts, request: &RepackRequest, repack: &mut Repack<'_>) -> Result<Vec<Vec<Item>>> {
    let versions = survey::versions(&parts.history.read(), request.branch.as_deref())?;
    let mut survey = Survey::new(parts, &repack.table);
    for version in &versions {
        if request.stop.as_ref().is_some_and(|stop| stop()) {
            break;
        }
        survey.version(version);
    }
    repack.report.damage.append(&mut survey.damage);
    Ok(survey.groups())
}

/// How many groups make a unit.
fn unit_len(groups: &[Vec<Item>], repack: &Repack<'_>) -> usize {
    let mut bytes = 0;
    let full = groups.iter().position(|group| {
        let len = |i: &Item| u64::from(repack.table.rows[i.row as usize].place.len);
        bytes += group.iter().map(len).sum::<u64>();
        bytes >= UNIT
    });
    full.map_or(groups.len(), |last| last + 1)
}

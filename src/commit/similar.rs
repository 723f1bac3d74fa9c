//! Looks for tensors that are close, where no earlier version has one of the same name: renamed ones, those of another branch's
//! model; and for those that are the rounding of a tensor, or that it is the rounding of. Tensors of the right dtype and length
//! are found by likeness of name, and taken only if a sample of the bytes shows that a delta will be small.

use super::base::{ChunkKey, FileBases};
use super::index::{Candidate, Form, Index, Renaming};
use super::known::{Known, Plan};
use super::relative;
use super::sample::{Closeness, Probe};
use crate::format::{Region, Source};
use crate::rebuild::{NodeSource, Rebuilder};
use crate::tensor::Dtype;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// Tensors tried for each tensor and version.
const TRIED: usize = 4;
/// Samples taken for one file: this many, and one for so many bytes of it.
const SAMPLES: u64 = 160;
const BYTES_PER_SAMPLE: u64 = 4 << 20;
/// A version is left when as many samples showed nothing close.
const PATIENCE: u32 = 4;
/// Samples taken for one file whatever the names, besides; and how many regions of a form without a base end that for the form.
const FURTHER: u64 = 160;
const LOST: u32 = 2;
/// A way of renaming that held this often, and as many times for each time it did not, is believed without a sample.
const BELIEVED: u32 = 4;

#[derive(Clone, Copy, Default)]
struct Tally {
    hits: u32,
    misses: u32,
}

impl Tally {
    fn is_believed(&self) -> bool {
        self.hits >= BELIEVED && self.hits / BELIEVED >= self.misses
    }
}

/// A region that wants a base.
struct Want {
    region: usize,
    /// Its place among the regions of its form.
    ordinal: usize,
    /// Whether it has none of its own name.
    orphan: bool,
}

/// A region that is stored.
type Match = (Arc<Known>, usize);

/// What the samples of one version showed so far: in all, and by renaming.
#[derive(Default)]
struct Tallies {
    all: Tally,
    renamings: HashMap<Renaming, Tally>,
}

/// The search for one file.
pub(super) struct Search<'a> {
    probe: Probe<'a>,
    plan: &'a Plan,
    /// Regions without a base, the largest first; of a chunk that gathers many, the first decides for all.
    wanted: Vec<Want>,
    matches: HashMap<usize, Match>,
    /// Regions that may be the rounding of another or have one, the largest first.
    unrelated: Vec<Want>,
    relatives: HashMap<usize, Match>,
    samples: u64,
    /// The same for those taken whatever the names.
    further: u64,
}

impl<'a> Search<'a> {
    /// A search for the regions whose chunks have no base yet, and for the relatives of all.
    pub(super) fn new(
        rebuilder: &'a Rebuilder,
        source: &'a dyn NodeSource,
        file: &'a dyn Source,
        plan: &'a Plan,
        found: &FileBases,
    ) -> Self {
        let mut seen: HashMap<Form, usize> = HashMap::new();
        let ordinals = plan.regions.iter().map(|r| {
            let n = seen.entry((r.dtype, r.len)).or_default();
            *n += 1;
            *n - 1
        });
        let ordinals: Vec<usize> = ordinals.collect();
        let (mut wanted, mut unrelated) = (Vec::<Want>::new(), Vec::<Want>::new());
        let mut chunk_seen = vec![false; plan.lens.len()];
        for p in &plan.places {
            let Some((region, _)) = p.region else { continue };
            let (chunk, region) = (p.chunk as usize, region as usize);
            let orphan = found.chunks.get(chunk).is_some_and(Option::is_none);
            let first = !std::mem::replace(&mut chunk_seen[chunk], true);
            let want = || Want {
                region,
                ordinal: ordinals[region],
                orphan,
            };
            if first && orphan && wanted.last().is_none_or(|w| w.region != region) {
                wanted.push(want());
            }
            match unrelated.last_mut() {
                Some(w) if w.region == region => w.orphan |= orphan,
                _ if related_forms(plan, region).next().is_some() => unrelated.push(want()),
                _ => {}
            }
        }
        for list in [&mut wanted, &mut unrelated] {
            list.sort_by_key(|w| Reverse(plan.regions[w.region].len));
        }
        Search {
            probe: Probe::new(rebuilder, source, file, plan),
            plan,
            wanted,
            matches: HashMap::new(),
            unrelated,
            relatives: HashMap::new(),
            samples: SAMPLES + file.len() / BYTES_PER_SAMPLE,
            further: FURTHER + file.len() / BYTES_PER_SAMPLE,
        }
    }

    /// Whether there is nothing left to look for, or no more may be done.
    pub(super) fn is_done(&self) -> bool {
        self.wanted.is_empty() && self.unrelated.is_empty() || self.samples == 0
    }

    /// Looks for no relatives.
    pub(super) fn without_relatives(&mut self) {
        self.unrelated.clear();
    }

    /// From here on looks for relatives of those only that have no base at all.
    pub(super) fn orphans_only(&mut self) {
        self.unrelated.retain(|w| w.orphan);
    }

    /// Looks among the regions of one version.
    pub(super) fn visit(&mut self, index: &Index) {
        let mut tallies = Tallies::default();
        let mut left = Vec::new();
        for want in std::mem::take(&mut self.unrelated) {
            let forms = related_forms(self.plan, want.region).collect();
            match self.find(index, &want, forms, !want.orphan, &mut tallies) {
                Some(found) => {
                    self.relatives.insert(want.region, found);
                }
                None => left.push(want),
            }
        }
        self.unrelated = left;
        let (mut tallies, mut left) = (Tallies::default(), Vec::new());
        for want in std::mem::take(&mut self.wanted) {
            let r = &self.plan.regions[want.region];
            match self.find(index, &want, vec![(r.dtype, r.len)], false, &mut tallies) {
                Some(found) => {
                    self.matches.insert(want.region, found);
                }
                None => left.push(want),
            }
        }
        self.wanted = left;
    }

    /// Looks again among the regions of one version for what is left, whatever the names: around the same place among those of
    /// its form, for one that is nobody's base so far.
    pub(super) fn visit_all(&mut self, index: &Index) {
        let taken = |file: &Arc<Known>, region: usize| (Arc::as_ptr(file), region);
        let mut used: HashSet<_> = self.matches.values().map(|(file, r)| taken(file, *r)).collect();
        // One of these may be new: the next one of its form may still have a base, but not many will.
        let mut misses: HashMap<Form, u32> = HashMap::new();
        let mut left = Vec::new();
        for want in std::mem::take(&mut self.wanted) {
            let r = &self.plan.regions[want.region];
            let form = (r.dtype, r.len);
            let mut found = None;
            for c in index.beside(form, &r.name, want.ordinal) {
                if self.further == 0 || misses.get(&form).is_some_and(|n| *n > LOST) {
                    break;
                }
                if used.contains(&taken(c.file, c.region)) {
                    continue;
                }
                self.further -= 1;
                let close = match self.probe.compare(want.region, c.file, c.region) {
                    Closeness::Exact => true,
                    Closeness::Close { with, alone } => with * 2 <= alone,
                    Closeness::Idle => break,
                    Closeness::Far => false,
                };
                if close {
                    found = Some((c.file.clone(), c.region));
                    break;
                }
            }
            match found {
                Some(found) => {
                    used.insert(taken(&found.0, found.1));
                    self.matches.insert(want.region, found);
                }
                None => {
                    *misses.entry(form).or_default() += 1;
                    left.push(want);
                }
            }
        }
        self.wanted = left;
    }

    /// The closest of the candidates of these forms; with `exact`, only one that leaves nothing to encode.
    fn find(
        &mut self,
        index: &Index,
        want: &Want,
        forms: Vec<Form>,
        exact: bool,
        tallies: &mut Tallies,
    ) -> Option<Match> {
        if tallies.all.hits == 0 && tallies.all.misses >= PATIENCE {
            return None;
        }
        let name = &self.plan.regions[want.region].name;
        let mut candidates: Vec<Candidate<'_>> = forms
            .into_iter()
            .flat_map(|form| index.candidates(form, name, want.ordinal))
            .collect();
        candidates.sort_by_key(|c| Reverse((c.same_numbers, c.common)));
        let renamings = &mut tallies.renamings;
        let believed = |c: &&Candidate<'_>| renamings.get(&c.renaming).is_some_and(Tally::is_believed);
        if let Some(c) = candidates.iter().find(believed) {
            return Some((c.file.clone(), c.region));
        }
        let mut best: Option<(usize, Match)> = None;
        for c in candidates.into_iter().take(TRIED) {
            if self.samples == 0 || tallies.all.hits == 0 && tallies.all.misses >= PATIENCE {
                break;
            }
            self.samples -= 1;
            let tally = renamings.entry(c.renaming).or_default();
            let this = (c.file.clone(), c.region);
            match self.probe.compare(want.region, c.file, c.region) {
                // Not worth a base, this or another.
                Closeness::Idle => return None,
                Closeness::Exact => {
                    tallies.all.hits += 1;
                    tally.hits += 1;
                    return Some(this);
                }
                Closeness::Close { with, alone } if !exact => {
                    tallies.all.hits += 1;
                    tally.hits += 1;
                    // A name that only lost or won a prefix, and a small difference: there will be no better one.
                    let other = &c.file.plan.regions[c.region].name;
                    if c.common == name.len().min(other.len()) || with * 2 <= alone {
                        return Some(this);
                    }
                    if best.as_ref().is_none_or(|(b, _)| with < *b) {
                        best = Some((with, this));
                    }
                }
                Closeness::Close { .. } | Closeness::Far => {
                    tallies.all.misses += 1;
                    tally.misses += 1;
                    if c.common == name.len() {
                        break;
                    }
                }
            }
        }
        best.map(|(_, found)| found)
    }

    /// Fills in what was found.
    pub(super) fn finish(self, keys: &[ChunkKey], found: &mut FileBases) {
        for p in &self.plan.places {
            let Some(slot) = found.chunks.get_mut(p.chunk as usize).filter(|s| s.is_none()) else {
                continue;
            };
            let matched = p
                .region
                .and_then(|(r, at)| Some((self.matches.get(&(r as usize))?, at)));
            let Some(((file, region), at)) = matched else {
                continue;
            };
            let old = file.plan.stretches(*region, at, u64::from(p.len)).next();
            // Chunks must line up from end to end.
            *slot = old
                .filter(|o| o.at == p.at && o.len == p.len)
                .map(|o| o.chunk as usize)
                .filter(|c| file.plan.lens.get(*c) == self.plan.lens.get(p.chunk as usize))
                .and_then(|c| file.chunks.get(c).copied());
        }
        found.relatives = relative::of_chunks(self.plan, &self.relatives);
        // The file that the first match is in has the structure most like it.
        let first = self.matches.iter().min_by_key(|(region, _)| **region);
        let Some((_, (file, _))) = first else { return };
        found.layout = found.layout.or(file.layout);
        for (slot, key) in found.chunks.iter_mut().zip(keys).filter(|(s, _)| s.is_none()) {
            *slot = file.chunk(key);
        }
    }
}

/// What the rounding of a region, or what it is the rounding of, may look like.
fn related_forms(plan: &Plan, region: usize) -> impl Iterator<Item = Form> {
    let Region { dtype, len, .. } = plan.regions[region];
    let forms = match dtype {
        Dtype::BF16 | Dtype::F16 => [len.checked_mul(2).map(|n| (Dtype::F32, n)), None],
        Dtype::F32 => [Dtype::BF16, Dtype::F16].map(|d| Some((d, len / 2))),
        _ => [None, None],
    };
    forms.into_iter().flatten()
}

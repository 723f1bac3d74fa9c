//! Warm objects: one that has much in common with objects that are here is put together from their bytes and the records that
//! differ, asked for level by level. Nothing of that is stored: what is here is folded, and what comes is checked.

use super::ask::Asker;
use super::message::{Answer, MAX_PLACES, MAX_READ, Readable, Request, Target};
use crate::error::{Error, IoContext, Kind, Result};
use crate::id::{FileHash, RecordId};
use crate::store::{
    Block, CommitRequest, Fold, ObjectFile, ObjectManifest, ObjectRecord, ObjectSource, Patched, Place,
    ProvenObject, Store, Stored, Width, hash_file,
};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The highest scale there is.
const MAX_SCALE: u8 = 37;
/// Below this scale, trees are looked into however much of them is new; …
const LOW: u8 = 4;
/// … if all of this many neighbours of that scale are, below one record, their bytes are asked for instead.
const NEIGHBOURS: u64 = 9;
/// The scale at which it shows whether an object has enough in common with those that are here.
const TELLING: u8 = 6;
/// Objects that are looked at for what they have in common with a new one.
const BASES: usize = 4;
/// Smaller objects are not worth it.
const LEAST: u64 = 4096;
/// Bytes copied at once.
const STEP: u64 = 1 << 20;

/// What became of an object that could be put together.
pub(super) enum Warmth {
    /// It is stored, and not published yet.
    Stored(ProvenObject, Stored, Taken),
    /// It has too little in common with what is here.
    Cold,
    /// Two records have one id: only all of its bytes tell which is meant.
    Collision,
}

/// What a warm object took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Taken {
    /// Records that came.
    pub(super) records: u64,
    /// Their bytes.
    pub(super) record_bytes: u64,
}

/// An object that is here, and its records.
struct Base<'a> {
    source: &'a dyn ObjectSource,
    fold: &'a Fold,
    block: Option<Block>,
}

impl Base<'_> {
    /// Whether it has this record at this place.
    fn has(&mut self, place: Place, id: RecordId) -> Result<bool> {
        match self.fold.id(self.source, &mut self.block, place) {
            Ok(found) => Ok(found == id),
            Err(e) if e.kind() == Kind::NotFound => Ok(false),
            Err(e) => Err(e),
        }
    }
}

/// Pulls an object by its records, if one that is here, or one of `more`, has enough in common with it. Ids have `width` bits.
///
/// # Errors
/// Damage, if what the peer sent is wrong; what the store and the link report.
pub(super) fn pull(
    store: &Store,
    asker: &mut Asker<'_>,
    manifest: &ObjectManifest,
    more: &[ObjectManifest],
    width: Width,
) -> Result<Warmth> {
    let near = |len: u64| len / 2 <= manifest.len && manifest.len <= len.saturating_mul(2);
    let mut here: Vec<ObjectManifest> = more.iter().rev().cloned().collect();
    here.extend(store.objects().iter().rev().map(|o| o.manifest.clone()));
    here.retain(|o| near(o.len));
    if manifest.len < LEAST || here.is_empty() {
        return Ok(Warmth::Cold);
    }
    // Of those that are as near the newest.
    here.sort_by_key(|o| o.len.abs_diff(manifest.len));
    here.truncate(BASES);
    let files: Vec<ObjectFile> = here.iter().map(|o| store.object_file(o)).collect::<Result<_>>()?;
    let folds: Vec<Cow<'_, Fold>> = asker.link().while_busy(|stop| {
        let fold = |file| match width == Width::FULL {
            true => Ok(Cow::Borrowed(store.fold_of(file, stop)?)),
            false => Ok(Cow::Owned(Fold::of(file, width, 1)?)),
        };
        files.iter().map(fold).collect()
    })?;
    let bases = files.iter().zip(&folds).map(|(file, fold)| Base {
        source: file,
        fold,
        block: None,
    });
    let spool = spool(store)?;
    let mut warm = Warm {
        asker,
        manifest,
        width,
        bases: bases.collect(),
        spool: &spool,
        copies: Vec::new(),
        taken: Taken::default(),
    };
    if !warm.put_together()? {
        return Ok(Warmth::Cold);
    }
    let (copies, taken) = (warm.copies, warm.taken);
    // One of them has most of it; what others have, or what comes, is changed there.
    let shared = |n: usize| {
        copies
            .iter()
            .filter(|c| c.base == n)
            .map(|c| len(&c.bytes))
            .sum::<u64>()
    };
    let Some(most) = (0..files.len()).max_by_key(|n| shared(*n)) else {
        return Ok(Warmth::Cold);
    };
    let Some(old) = files.get(most) else {
        return Ok(Warmth::Cold);
    };
    let fill = |of: &dyn Fn(&Copy) -> bool| {
        let mut wanted = copies.iter().filter(|c| of(c));
        wanted.try_for_each(|c| match files.get(c.base) {
            Some(file) => copy(file, c.bytes.clone(), &spool),
            None => Ok(()),
        })
    };
    fill(&|c| c.base != most)?;
    let changed = between(
        copies.iter().filter(|c| c.base == most).map(|c| c.bytes.clone()),
        manifest.len,
    );
    let new = Changed {
        old,
        spool: &spool,
        changed: &changed,
        len: manifest.len,
    };
    // Narrow ids, which only tests have, are not those of any object that could be put.
    let put = match width == Width::FULL {
        true => asker
            .link()
            .while_busy(|stop| store.put_patched(old, manifest, &new, &changed, stop))?,
        false => Patched::Unfit,
    };
    match put {
        Patched::Stored(proven, stored, _) => return Ok(Warmth::Stored(proven, stored, taken)),
        Patched::Wrong => return Ok(collision(manifest)),
        Patched::Unfit => {}
    }
    fill(&|c| c.base == most)?;
    let mut whole = spool.try_clone().doing(|| "read what was pulled".into())?;
    let found = hash_file(&mut whole, &|| true).doing(|| "read what was pulled".into())?;
    if found != Some((manifest.hash, manifest.len)) {
        return Ok(collision(manifest));
    }
    let request = CommitRequest {
        entries: vec![(
            b"object".to_vec(),
            format!("/proc/self/fd/{}", spool.as_raw_fd()).into(),
        )],
        ..CommitRequest::default()
    };
    let (proven, stored) = store.store_object(&request)?;
    match proven.manifest() == manifest {
        true => Ok(Warmth::Stored(proven, stored, taken)),
        false => Err(Error::damage("what was put together is another object")),
    }
}

/// The records were right one by one: one that is here, or that came twice, has the id of another.
fn collision(manifest: &ObjectManifest) -> Warmth {
    log::warn!(
        "object {}: every record is right, but its SHA-256 is not: two records have one id, and all of it is pulled",
        manifest.id().short()
    );
    Warmth::Collision
}

/// Bytes that a base has at the same place.
struct Copy {
    base: usize,
    bytes: Range<u64>,
}

/// What lies between sorted-out ranges, up to `end`.
fn between(ranges: impl Iterator<Item = Range<u64>>, end: u64) -> Vec<Range<u64>> {
    let mut ranges: Vec<_> = ranges.collect();
    ranges.sort_unstable_by_key(|r| r.start);
    let (mut gaps, mut at) = (Vec::new(), 0);
    for range in ranges.into_iter().chain(std::iter::once(end..end)) {
        if range.start > at {
            gaps.push(at..range.start);
        }
        at = at.max(range.end);
    }
    gaps
}

/// An object that is another one with some bytes from the spool.
struct Changed<'a> {
    old: &'a ObjectFile,
    spool: &'a File,
    changed: &'a [Range<u64>],
    len: u64,
}

impl ObjectSource for Changed<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let end = offset + buf.len() as u64;
        read_padded(self.old, offset, buf)?;
        let next = self.changed.partition_point(|c| c.end <= offset);
        for range in self.changed[next..].iter().take_while(|c| c.start < end) {
            let (from, to) = (range.start.max(offset), range.end.min(end));
            let part = &mut buf[(from - offset) as usize..(to - offset) as usize];
            self.spool
                .read_exact_at(part, from)
                .doing(|| "read what was pulled".into())?;
        }
        Ok(())
    }
}

/// One object that is put together.
struct Warm<'a, 'l> {
    asker: &'a mut Asker<'l>,
    manifest: &'a ObjectManifest,
    width: Width,
    bases: Vec<Base<'a>>,
    /// Where the bytes go that come.
    spool: &'a File,
    /// Where the others are.
    copies: Vec<Copy>,
    taken: Taken,
}

/// Records that are new, in the object's order.
type Level = Vec<(Place, RecordId)>;

impl Warm<'_, '_> {
    /// Writes the object's bytes; false if too much of it is new.
    fn put_together(&mut self) -> Result<bool> {
        let shape = self.manifest.shape();
        let mut roots: HashMap<u8, Level> = HashMap::new();
        for (place, id) in shape.roots().zip(&self.manifest.roots) {
            roots.entry(place.scale).or_default().push((place, *id));
        }
        let mut above: Level = Vec::new();
        for scale in (0..=MAX_SCALE).rev() {
            // Roots come after everything that has a parent.
            above.extend(roots.remove(&scale).unwrap_or_default());
            let mut new = self.not_here(std::mem::take(&mut above))?;
            if scale == TELLING
                && new.iter().map(|(p, _)| len(&p.bytes(shape))).sum::<u64>() > self.manifest.len / 2
            {
                return Ok(false);
            }
            if scale == LOW {
                new = self.whole_trees(new)?;
            }
            above = self.records(new)?;
        }
        Ok(true)
    }

    /// Those that no base has at the same place.
    fn not_here(&mut self, level: Level) -> Result<Level> {
        let shape = self.manifest.shape();
        let mut new = Vec::new();
        for (place, id) in level {
            let mut found = None;
            for (at, base) in self.bases.iter_mut().enumerate() {
                if base.has(place, id)? {
                    found = Some(at);
                    break;
                }
            }
            match found {
                Some(base) => self.copies.push(Copy {
                    base,
                    bytes: place.bytes(shape),
                }),
                None => new.push((place, id)),
            }
        }
        Ok(new)
    }

    /// Asks for the bytes of trees all of whose neighbours are new too; the others come back.
    fn whole_trees(&mut self, new: Level) -> Result<Level> {
        let shape = self.manifest.shape();
        let mut rest = Vec::new();
        let mut whole: Vec<Level> = Vec::new();
        for family in new.chunk_by(|a, b| a.0.index / NEIGHBOURS == b.0.index / NEIGHBOURS) {
            match family.len() as u64 == NEIGHBOURS {
                true => whole.push(family.to_vec()),
                false => rest.extend_from_slice(family),
            }
        }
        // Families that follow each other are asked for together.
        let span = |family: &Level| {
            let (first, last) = (family.first(), family.last());
            let ends = first
                .zip(last)
                .map(|(a, b)| a.0.bytes(shape).start..b.0.bytes(shape).end);
            ends.unwrap_or(0..0)
        };
        let mut runs: Vec<(Range<u64>, Level)> = Vec::new();
        for family in whole {
            let bytes = span(&family);
            match runs.last_mut() {
                Some((run, all)) if run.end == bytes.start && bytes.end - run.start <= MAX_READ => {
                    run.end = bytes.end;
                    all.extend(family);
                }
                _ => runs.push((bytes, family)),
            }
        }
        let of = Target::Object(self.manifest.id());
        let mut requests = runs.iter().map(|(bytes, _)| Request::Read {
            of: Readable::Whole(of),
            bytes: bytes.clone(),
            packed: true,
        });
        let (spool, width) = (self.spool, self.width);
        let mut answered = runs.iter();
        self.asker.many(&mut requests, &mut |answer| {
            let Some((at, level)) = answered.next() else {
                return Err(Error::damage("the peer answered more than it was asked"));
            };
            let Answer::Bytes { bytes, .. } = answer else {
                return Err(Error::damage("the peer answered with something else than bytes"));
            };
            if bytes.len() as u64 != len(at) {
                return Err(Error::damage(
                    "the peer sent another number of bytes than it was asked for",
                ));
            }
            for (place, id) in level {
                let own = place.bytes(shape);
                let part = &bytes[(own.start - at.start) as usize..(own.end - at.start) as usize];
                let fold = Fold::of(part, width, 1)?.manifest(FileHash([0; 32]));
                if fold.roots != [*id] {
                    return Err(wrong(*place));
                }
            }
            write(spool, at.start, &bytes)
        })?;
        Ok(rest)
    }

    /// Asks for records, each once; the children of inner ones come back, the bytes of leaves are written.
    fn records(&mut self, new: Level) -> Result<Level> {
        let (shape, width, spool) = (self.manifest.shape(), self.width, self.spool);
        let mut once: Level = Vec::new();
        let mut places: HashMap<RecordId, Vec<Place>> = HashMap::new();
        for (place, id) in new {
            let all = places.entry(id).or_default();
            if all.is_empty() {
                once.push((place, id));
            }
            all.push(place);
        }
        let of = Target::Object(self.manifest.id());
        let mut requests = once.chunks(MAX_PLACES).map(|part| Request::Records {
            of,
            places: part.iter().map(|(place, _)| *place).collect(),
        });
        let mut answered = once.chunks(MAX_PLACES);
        let (mut children, mut taken) = (Vec::new(), self.taken);
        self.asker.many(&mut requests, &mut |answer| {
            let (Some(asked), Answer::Records(bytes)) = (answered.next(), answer) else {
                return Err(Error::damage(
                    "the peer answered with something else than records",
                ));
            };
            let records = ObjectRecord::decode_all(width, &bytes)?;
            if records.len() != asked.len() {
                return Err(Error::damage(
                    "the peer sent another number of records than it was asked for",
                ));
            }
            taken.records += records.len() as u64;
            taken.record_bytes += bytes.len() as u64;
            for ((first, id), (found, record)) in asked.iter().zip(records) {
                if found != *id || record.scale() != first.scale {
                    return Err(wrong(*first));
                }
                for place in places.get(id).into_iter().flatten() {
                    match &record {
                        ObjectRecord::Leaf(atom) => {
                            let at = place.bytes(shape);
                            write(spool, at.start, &atom[..len(&at) as usize])?;
                        }
                        ObjectRecord::Inner { children: ids, .. } => {
                            children.extend(place.children().into_iter().zip(*ids));
                        }
                    }
                }
            }
            Ok(())
        })?;
        self.taken = taken;
        children.sort_unstable_by_key(|(place, _)| *place);
        Ok(children)
    }
}

fn len(range: &Range<u64>) -> u64 {
    range.end - range.start
}

fn wrong(place: Place) -> Error {
    Error::damage(format!(
        "what the peer sent for record {} of scale {} has another id",
        place.index, place.scale
    ))
}

/// Reads bytes of an object; after its end there are zeros, as in its last atom.
fn read_padded(from: &dyn ObjectSource, at: u64, buf: &mut [u8]) -> Result<()> {
    let there = from.len().saturating_sub(at).min(buf.len() as u64) as usize;
    from.read_at(at, &mut buf[..there])?;
    buf[there..].fill(0);
    Ok(())
}

/// Copies a range of an object, padded.
fn copy(from: &dyn ObjectSource, at: Range<u64>, to: &File) -> Result<()> {
    let mut start = at.start;
    while start < at.end {
        let end = at.end.min(start + STEP);
        let mut bytes = vec![0; (end - start) as usize];
        read_padded(from, start, &mut bytes)?;
        write(to, start, &bytes)?;
        start = end;
    }
    Ok(())
}

fn write(to: &File, at: u64, bytes: &[u8]) -> Result<()> {
    to.write_all_at(bytes, at).doing(|| "write what is pulled".into())
}

/// A file in the store's directory that has no name: it goes with us.
fn spool(store: &Store) -> Result<File> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Relaxed);
    let path = store
        .dir()
        .join(format!("incoming-{}-{number}", std::process::id()));
    let what = || path.display().to_string();
    let file = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .doing(what)?;
    std::fs::remove_file(&path).doing(what)?;
    Ok(file)
}

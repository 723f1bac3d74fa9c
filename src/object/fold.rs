//! Folding: the ids of an object's records, computed from its bytes.

use super::lanes::{ID, Lanes};
use super::manifest::ObjectManifest;
use super::record::{ATOM, MAX_SCALE, Record, Width};
use super::shape::{Place, Shape, atoms_of};
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Interrupt, Kind, Result};
use crate::id::{FileHash, RecordId};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The bytes of an object. Read by several threads at once.
#[allow(clippy::len_without_is_empty)] // nobody asks
pub trait Source: Sync {
    /// Bytes of the object.
    fn len(&self) -> u64;
    /// Fills `buf` with the bytes from `offset` on.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()>;
}

impl Source for [u8] {
    fn len(&self) -> u64 {
        <[u8]>::len(self) as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let from = usize::try_from(offset)
            .ok()
            .and_then(|at| self.get(at..)?.get(..buf.len()));
        buf.copy_from_slice(from.ok_or_else(|| Error::damage("read past the end of an object"))?);
        Ok(())
    }
}

/// Bytes that are read until somebody wants no more.
pub struct Interruptible<'a, S: ?Sized>(pub &'a S, pub Interrupt<'a>);

impl<S: Source + ?Sized> Source for Interruptible<'_, S> {
    fn len(&self) -> u64 {
        self.0.len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        (self.1)()?;
        self.0.read_at(offset, buf)
    }
}

/// The scale whose ids are kept, in all but very large objects: a block of 3⁶ atoms is 23,328 bytes.
const BLOCK: u8 = 6;
/// Blocks that are kept: more, and blocks are larger.
const MOST_BLOCKS: u64 = 1 << 20;
/// Bytes that a thread takes at a time, or one block.
const PORTION: u64 = 1 << 20;

/// What a kept fold begins with.
const TAG: &[u8] = b"zspace.fold.1\0";

/// Whether a range has something in common with sorted others.
pub fn touches(others: &[Range<u64>], range: &Range<u64>) -> bool {
    let next = others.partition_point(|o| o.end <= range.start);
    others.get(next).is_some_and(|o| o.start < range.end)
}

/// The scale of the blocks of an object.
fn block_scale(shape: Shape) -> u8 {
    (BLOCK..MAX_SCALE)
        .find(|s| shape.count(*s) <= MOST_BLOCKS)
        .unwrap_or(MAX_SCALE)
}

/// The ids of a run of atoms and of all full trees above them: level `s` has those of scale `s`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Levels(Vec<Vec<[u8; ID]>>);

impl Levels {
    /// Adds the levels above the last one, which is of scale `scale`.
    fn grow(&mut self, lanes: Lanes, width: Width, mut scale: u8) {
        while let Some(top) = self.0.last()
            && top.len() >= 3
            && scale < MAX_SCALE
        {
            scale += 1;
            let mut next = lanes.parents(scale, top);
            width.cut(&mut next);
            self.0.push(next);
        }
    }

    /// Folds bytes, the last atom filled up with zeros.
    fn of(lanes: Lanes, width: Width, bytes: &[u8]) -> Self {
        let (whole, rest) = bytes.split_at(bytes.len() / ATOM * ATOM);
        let mut leaves = lanes.leaves(whole);
        if !rest.is_empty() {
            let mut last = [0; ATOM];
            last[..rest.len()].copy_from_slice(rest);
            leaves.extend(lanes.leaves(&last));
        }
        width.cut(&mut leaves);
        let mut levels = Levels(vec![leaves]);
        levels.grow(lanes, width, 0);
        levels
    }

    fn get(&self, scale: u8, index: u64) -> Option<RecordId> {
        let level = self.0.get(usize::from(scale))?;
        Some(RecordId(*level.get(usize::try_from(index).ok()?)?))
    }
}

/// What folding an object gives: the ids of its larger trees, from which any record is found by folding one block again.
///
/// It takes 0.08 % of the object's bytes, and 18 MiB at most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fold {
    shape: Shape,
    width: Width,
    /// Scale of a block.
    block: u8,
    /// Of the blocks and above.
    upper: Levels,
    /// Of what is left over after the last whole block, all levels.
    tail: Levels,
}

/// One block, or what is left over after the last, folded anew.
pub struct Block {
    number: u64,
    bytes: Vec<u8>,
    levels: Levels,
}

impl Fold {
    /// Folds an object, on as many threads as are allowed.
    ///
    /// # Errors
    /// What the source reports.
    pub fn of<S: Source + ?Sized>(source: &S, width: Width, threads: usize) -> Result<Self> {
        let shape = Shape::new(source.len());
        let block = block_scale(shape);
        let lanes = Lanes::best();
        let bytes = atoms_of(block) * ATOM as u64;
        let blocks = shape.count(block);
        let portion = (PORTION / bytes).max(1);
        let ids = Mutex::new(vec![[0; ID]; blocks as usize]);
        let next = AtomicU64::new(0);
        let work = || -> Result<()> {
            let mut buf = Vec::new();
            loop {
                let first = next.fetch_add(portion, Relaxed);
                let count = portion.min(blocks.saturating_sub(first));
                if count == 0 {
                    return Ok(());
                }
                // The last atom may be short.
                let end = ((first + count) * bytes).min(shape.len());
                buf.resize((end - first * bytes) as usize, 0);
                source.read_at(first * bytes, &mut buf)?;
                let tops: Vec<_> = buf
                    .chunks(bytes as usize)
                    .filter_map(|b| Levels::of(lanes, width, b).get(block, 0))
                    .collect();
                for (to, top) in ids.lock().iter_mut().skip(first as usize).zip(tops) {
                    *to = top.0;
                }
            }
        };
        let threads = (threads as u64).clamp(1, blocks.div_ceil(portion).max(1));
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mine = work();
            let died = || Err(Error::damage("a thread that folds ended early"));
            others
                .into_iter()
                .fold(mine, |so_far, o| so_far.and(o.join().unwrap_or_else(|_| died())))
        })?;
        Self::above(source, shape, width, block, ids.into_inner())
    }

    /// The fold of an object that is this one but for bytes in `changed` (sorted ranges), and maybe longer or shorter: only blocks that
    /// these touch are read.
    ///
    /// # Errors
    /// What the source reports.
    pub fn patched<S: Source + ?Sized>(&self, source: &S, changed: &[Range<u64>]) -> Result<Self> {
        let shape = Shape::new(source.len());
        if block_scale(shape) != self.block {
            return Self::of(source, self.width, 1);
        }
        let lanes = Lanes::best();
        let bytes = atoms_of(self.block) * ATOM as u64;
        let both = shape.len().min(self.shape.len());
        let mut ids = Vec::with_capacity(shape.count(self.block) as usize);
        let mut buf = Vec::new();
        for n in 0..shape.count(self.block) {
            let range = n * bytes..((n + 1) * bytes);
            let kept = match range.end <= both && !touches(changed, &range) {
                true => self.upper.get(0, n),
                false => None,
            };
            ids.push(match kept {
                Some(id) => id.0,
                None => {
                    buf.resize((range.end.min(shape.len()) - range.start) as usize, 0);
                    source.read_at(range.start, &mut buf)?;
                    let top = Levels::of(lanes, self.width, &buf).get(self.block, 0);
                    top.ok_or_else(|| Error::damage("a block without a top"))?.0
                }
            });
        }
        Self::above(source, shape, self.width, self.block, ids)
    }

    /// What is worth keeping of it (docs/FORMAT.md, "Folds"): `hash` is the object's SHA-256.
    pub fn encode(&self, hash: FileHash) -> Vec<u8> {
        let mut w = Writer::new();
        w.raw(TAG).u64(self.shape.len()).raw(&hash.0).u8(self.block);
        for id in self.upper.0.first().into_iter().flatten() {
            w.raw(id);
        }
        let mut bytes = w.finish();
        let sum = Sha256::digest(&bytes);
        bytes.extend_from_slice(&sum);
        bytes
    }

    /// The fold that was kept; what is left over after the last whole block is folded anew.
    ///
    /// # Errors
    /// Damage, if it is not that of this object; what the source reports.
    pub fn decode<S: Source + ?Sized>(bytes: &[u8], hash: FileHash, source: &S) -> Result<Self> {
        let damaged = || Error::damage("a kept fold is damaged, or another object's");
        let (body, sum) = bytes.split_last_chunk::<32>().ok_or_else(damaged)?;
        let mut r = Reader::new(body, "fold");
        let (tag, len, of, block) = (r.raw(TAG.len())?, r.u64()?, r.fixed()?, r.u8()?);
        let shape = Shape::new(len);
        let right = tag == TAG && len == source.len() && of == hash.0 && block == block_scale(shape);
        if !right || Sha256::digest(body)[..] != sum[..] {
            return Err(damaged());
        }
        let ids = (0..shape.count(block))
            .map(|_| r.fixed())
            .collect::<Result<_>>()?;
        r.finish()?;
        Self::above(source, shape, Width::FULL, block, ids)
    }

    /// The fold whose blocks have these ids.
    fn above<S: Source + ?Sized>(
        source: &S,
        shape: Shape,
        width: Width,
        block: u8,
        ids: Vec<[u8; ID]>,
    ) -> Result<Self> {
        let lanes = Lanes::best();
        let start = (ids.len() as u64) * atoms_of(block) * ATOM as u64;
        let mut rest = vec![0; shape.len().saturating_sub(start) as usize];
        if !rest.is_empty() {
            source.read_at(start, &mut rest)?;
        }
        let mut upper = Levels(vec![ids]);
        upper.grow(lanes, width, block);
        let tail = Levels::of(lanes, width, &rest);
        Ok(Fold {
            shape,
            width,
            block,
            upper,
            tail,
        })
    }

    /// The shape of what was folded.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// How many bits of the ids count.
    pub fn width(&self) -> Width {
        self.width
    }

    /// The manifest, if the object's SHA-256 is this.
    pub fn manifest(&self, hash: FileHash) -> ObjectManifest {
        let roots = self.shape.roots().filter_map(|root| self.kept(root)).collect();
        ObjectManifest {
            len: self.shape.len(),
            hash,
            roots,
        }
    }

    /// The id of a record, if it is kept.
    fn kept(&self, place: Place) -> Option<RecordId> {
        match place.scale.checked_sub(self.block) {
            Some(above) => self.upper.get(above, place.index),
            None => {
                let before = self.shape.count(self.block) * atoms_of(self.block - place.scale);
                self.tail.get(place.scale, place.index.checked_sub(before)?)
            }
        }
    }

    /// The id of a record of the object. `block` is what was folded for it last, and is used again where it can be.
    ///
    /// # Errors
    /// What the source reports; `NotFound` if the object has no such record.
    pub fn id<S: Source + ?Sized>(
        &self,
        source: &S,
        block: &mut Option<Block>,
        place: Place,
    ) -> Result<RecordId> {
        if let Some(id) = self.kept(place) {
            return Ok(id);
        }
        let block = self.block_of(source, block, place)?;
        let first = block.number * atoms_of(self.block) / atoms_of(place.scale);
        block
            .levels
            .get(place.scale, place.index - first)
            .ok_or_else(|| no_record(place))
    }

    /// A record of the object; `block` as for [`Fold::id`].
    ///
    /// # Errors
    /// As of [`Fold::id`].
    pub fn record<S: Source + ?Sized>(
        &self,
        source: &S,
        block: &mut Option<Block>,
        place: Place,
    ) -> Result<Record> {
        if place.index >= self.shape.count(place.scale) {
            return Err(no_record(place));
        }
        if place.scale > 0 {
            let mut children = [RecordId([0; ID]); 3];
            for (id, child) in children.iter_mut().zip(place.children()) {
                *id = self.id(source, block, child)?;
            }
            return Ok(Record::Inner {
                scale: place.scale,
                children,
            });
        }
        let block = self.block_of(source, block, place)?;
        let from = ((place.index - block.number * atoms_of(self.block)) as usize) * ATOM;
        let bytes = block.bytes.get(from..).ok_or_else(|| no_record(place))?;
        let mut atom = [0; ATOM];
        let len = bytes.len().min(ATOM);
        atom[..len].copy_from_slice(&bytes[..len]);
        Ok(Record::Leaf(atom))
    }

    /// The block that a record lies in, folded.
    fn block_of<'a, S: Source + ?Sized>(
        &self,
        source: &S,
        block: &'a mut Option<Block>,
        place: Place,
    ) -> Result<&'a Block> {
        let number = Place {
            scale: self.block,
            index: place.index * atoms_of(place.scale) / atoms_of(self.block),
        };
        let at = number.bytes(self.shape);
        if place.scale >= self.block || at.is_empty() {
            return Err(no_record(place));
        }
        if block.as_ref().is_none_or(|b| b.number != number.index) {
            let mut bytes = vec![0; (at.end - at.start) as usize];
            source.read_at(at.start, &mut bytes)?;
            let levels = Levels::of(Lanes::best(), self.width, &bytes);
            *block = Some(Block {
                number: number.index,
                bytes,
                levels,
            });
        }
        block.as_ref().ok_or_else(|| no_record(place))
    }
}

fn no_record(place: Place) -> Error {
    Error::new(
        Kind::NotFound,
        format!(
            "the object has no record {} of scale {}",
            place.index, place.scale
        ),
    )
}

//! A set of records, from which a range or the whole object is rebuilt, every record checked on the way.

use super::fold::{Fold, Source};
use super::manifest::ObjectManifest;
use super::record::{ATOM, Record, Width};
use super::shape::{Counts, Place, Shape};
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Kind, Result};
use crate::id::{FileHasher, RecordId};
use std::collections::HashMap;
use std::ops::Range;

/// Records by their id, each once.
#[derive(Clone, Debug)]
pub struct Records {
    width: Width,
    records: HashMap<RecordId, Record>,
}

impl Records {
    /// None yet. Ids have `width` bits.
    pub fn new(width: Width) -> Self {
        Records {
            width,
            records: HashMap::new(),
        }
    }

    /// Adds a record.
    ///
    /// # Errors
    /// Damage, if there is another record with the same id.
    pub fn add(&mut self, record: Record) -> Result<RecordId> {
        let id = record.id(self.width);
        match self.records.insert(id, record) {
            Some(other) if other != record => {
                self.records.insert(id, other);
                Err(collision(&id))
            }
            _ => Ok(id),
        }
    }

    /// The record with this id.
    pub fn get(&self, id: &RecordId) -> Option<&Record> {
        self.records.get(id)
    }

    /// Takes a record out.
    pub fn remove(&mut self, id: &RecordId) -> Option<Record> {
        self.records.remove(id)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// How many there are, and their bytes.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        self.records.values().for_each(|r| counts.add(r.scale(), 1));
        counts
    }

    /// All records of an object.
    ///
    /// # Errors
    /// What the source reports, or a collision.
    pub fn of<S: Source + ?Sized>(fold: &Fold, source: &S) -> Result<Self> {
        let mut all = Records::new(fold.width());
        all.collect(fold, source, 0..fold.shape().len(), &mut |_| {})?;
        Ok(all)
    }

    /// Adds the records that a range of an object touches, from the highest scale down; `told` hears of those that are new, in order.
    fn collect<S: Source + ?Sized>(
        &mut self,
        fold: &Fold,
        source: &S,
        bytes: Range<u64>,
        told: &mut dyn FnMut(&Record),
    ) -> Result<()> {
        let mut block = None;
        for place in fold.shape().path(bytes) {
            let record = fold.record(source, &mut block, place)?;
            let before = self.len();
            self.add(record)?;
            if self.len() > before {
                told(&record);
            }
        }
        Ok(())
    }

    /// Reads records that follow one another, to the end.
    ///
    /// # Errors
    /// Damage, as of [`Record::decode`] and [`Records::add`].
    pub fn decode(width: Width, reader: &mut Reader<'_>) -> Result<Self> {
        let mut out = Records::new(width);
        let bytes = reader.raw(reader.remaining())?;
        for (_, record) in Record::decode_all(width, bytes)? {
            out.add(record)?;
        }
        Ok(out)
    }

    /// The bytes of a range of the object that a manifest pins. Only the records that the range touches are looked at, and each of
    /// them is checked, up to the manifest's roots.
    ///
    /// # Errors
    /// `NotFound`, naming the place, if a record is missing; damage if one is not of the scale that its parent says; `Usage` if the
    /// range is not within the object.
    pub fn range(&self, manifest: &ObjectManifest, bytes: Range<u64>) -> Result<Vec<u8>> {
        let shape = manifest.shape();
        if bytes.end > shape.len() || bytes.start > bytes.end {
            return Err(outside(&bytes, shape));
        }
        let mut expected: HashMap<Place, RecordId> =
            shape.roots().zip(manifest.roots.iter().copied()).collect();
        let mut out = Vec::new();
        for place in shape.path(bytes.clone()) {
            let at = || {
                format!(
                    "record {} of scale {}, bytes {:?}",
                    place.index,
                    place.scale,
                    place.bytes(shape)
                )
            };
            let id = expected
                .remove(&place)
                .ok_or_else(|| Error::damage(format!("{} has no parent", at())))?;
            let missing = || Error::new(Kind::NotFound, format!("{} is missing ({id})", at()));
            match self.get(&id).ok_or_else(missing)? {
                Record::Leaf(atom) if place.scale == 0 => {
                    let covers = place.bytes(shape);
                    let (from, to) = (bytes.start.max(covers.start), bytes.end.min(covers.end));
                    out.extend_from_slice(
                        &atom[(from - covers.start) as usize..(to - covers.start) as usize],
                    );
                    if covers.end - covers.start < ATOM as u64
                        && atom[(covers.end - covers.start) as usize..]
                            .iter()
                            .any(|b| *b != 0)
                    {
                        return Err(Error::damage(format!("{} is not filled up with zeros", at())));
                    }
                }
                Record::Inner { scale, children } if *scale == place.scale => {
                    expected.extend(place.children().into_iter().zip(*children));
                }
                other => {
                    return Err(Error::damage(format!(
                        "{}: found one of scale {}",
                        at(),
                        other.scale()
                    )));
                }
            }
        }
        Ok(out)
    }

    /// The whole object that a manifest pins, its SHA-256 checked.
    ///
    /// # Errors
    /// As of [`Records::range`]; damage if the SHA-256 is another.
    pub fn rebuild(&self, manifest: &ObjectManifest) -> Result<Vec<u8>> {
        let bytes = self.range(manifest, 0..manifest.len)?;
        check_whole(manifest, &bytes)?;
        Ok(bytes)
    }
}

/// What proves a range of an object: its manifest, and the records that the range touches (docs/FORMAT.md, "Proofs").
#[derive(Clone, Debug)]
pub struct Proof {
    /// Of the object.
    pub manifest: ObjectManifest,
    /// What the range touches.
    pub records: Records,
    /// The records' bytes, from the highest scale down, each scale's in the object's order, none twice.
    encoded: Vec<u8>,
}

impl Proof {
    /// Proves a range of an object.
    ///
    /// # Errors
    /// What the source reports; `Usage` if the range is not within the object; a collision.
    pub fn of<S: Source + ?Sized>(
        manifest: &ObjectManifest,
        fold: &Fold,
        source: &S,
        bytes: Range<u64>,
    ) -> Result<Self> {
        if bytes.end > manifest.len || bytes.start > bytes.end {
            return Err(outside(&bytes, manifest.shape()));
        }
        let mut records = Records::new(fold.width());
        let mut encoded = Writer::new();
        records.collect(fold, source, bytes, &mut |r| r.encode(fold.width(), &mut encoded))?;
        Ok(Proof {
            manifest: manifest.clone(),
            records,
            encoded: encoded.finish(),
        })
    }

    /// The proof's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let manifest = self.manifest.encode();
        let mut w = Writer::new();
        w.blob(&manifest).raw(&self.encoded);
        w.finish()
    }

    /// Reads a proof, all of whose records have the ids that they should have. Whether it proves anything is for the id of its
    /// manifest, and [`Records::range`], to say.
    ///
    /// # Errors
    /// Damage.
    pub fn decode(width: Width, bytes: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(bytes, "proof");
        let manifest = ObjectManifest::decode(reader.blob()?)?;
        let encoded = &bytes[bytes.len() - reader.remaining()..];
        let records = Records::decode(width, &mut reader)?;
        Ok(Proof {
            manifest,
            records,
            encoded: encoded.to_vec(),
        })
    }
}

/// Fails unless the bytes have the SHA-256 that the manifest pins.
fn check_whole(manifest: &ObjectManifest, bytes: &[u8]) -> Result<()> {
    let mut hasher = FileHasher::default();
    hasher.update(bytes);
    let found = hasher.finish();
    if found != manifest.hash {
        return Err(Error::damage(format!(
            "every record is right, but the object's SHA-256 is {found} and not {}: two records have one id",
            manifest.hash
        )));
    }
    Ok(())
}

fn outside(bytes: &Range<u64>, shape: Shape) -> Error {
    Error::new(
        Kind::Usage,
        format!(
            "bytes {}..{} are not within the object's {}",
            bytes.start,
            bytes.end,
            shape.len()
        ),
    )
}

fn collision(id: &RecordId) -> Error {
    Error::damage(format!(
        "two records with different content have the id {id}: a collision"
    ))
}

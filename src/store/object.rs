//! Exact byte objects: those that were put, and any file of any version.

use super::whole::Hashing;
use super::{CommitRequest, FileView, Store};
use crate::commit::{self, Old, Patched, ProvenObject, PutObject, Stored};
use crate::error::{Error, Interrupt, Kind, Result, never};
use crate::graph::{EntryKind, Object};
use crate::id::{FileHash, FileHasher, ObjectId};
use crate::object::{Fold, Interruptible, ObjectManifest, Proof, Source, Width};
use std::io::Write;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// An object that can be read.
pub struct ObjectFile {
    /// What pins it.
    pub manifest: ObjectManifest,
    /// Its bytes.
    pub file: Arc<FileView>,
    fold: OnceLock<Fold>,
}

impl ObjectFile {
    pub(super) fn new(manifest: ObjectManifest, file: Arc<FileView>) -> Self {
        ObjectFile {
            manifest,
            file,
            fold: OnceLock::new(),
        }
    }

    /// Its fold, made when it is asked for first.
    pub(super) fn fold_with(&self, make: impl FnOnce() -> Result<Fold>) -> Result<&Fold> {
        match self.fold.get() {
            Some(fold) => Ok(fold),
            None => {
                let fold = make()?;
                Ok(self.fold.get_or_init(|| fold))
            }
        }
    }

    /// Its id.
    pub fn id(&self) -> ObjectId {
        self.manifest.id()
    }

    /// Writes the whole object; `told` hears of the bytes written.
    ///
    /// # Errors
    /// Damage, if what was written has not the SHA-256 that is pinned; what `told` and the writer report.
    pub fn copy_to(&self, out: &mut dyn Write, told: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
        let hasher = FileHasher::default();
        let mut hashing = Hashing { to: out, hasher };
        self.file.copy_to(0..self.manifest.len, &mut hashing, told)?;
        match hashing.hasher.finish() == self.manifest.hash {
            true => Ok(()),
            false => Err(Error::damage(
                "what was written has not the object's SHA-256: do not use it",
            )),
        }
    }
}

impl Source for FileView {
    fn len(&self) -> u64 {
        FileView::len(self)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        let mut at = 0;
        while at < buf.len() {
            let got = self.read(offset + at as u64, buf.len() - at)?;
            if got.is_empty() {
                return Err(Error::damage("read past the end of an object"));
            }
            buf[at..at + got.len()].copy_from_slice(&got);
            at += got.len();
        }
        Ok(())
    }
}

impl Store {
    /// Puts the one file that a request names as an exact byte object.
    pub fn put_object(&self, request: &CommitRequest) -> Result<PutObject> {
        let (put, fold) = commit::put_object(&self.0.parts, request)?;
        self.keep_fold(&fold, &put.manifest.hash);
        Ok(put)
    }

    /// Stores an object that is one of this store's with some of its bytes changed, under no name yet.
    ///
    /// # Errors
    /// As of [`commit::put_patched`].
    pub fn put_patched(
        &self,
        old: &ObjectFile,
        manifest: &ObjectManifest,
        new: &dyn Source,
        changed: &[Range<u64>],
        interrupt: Interrupt<'_>,
    ) -> Result<Patched> {
        let of = Old {
            hash: old.manifest.hash,
            len: old.manifest.len,
            fold: self.fold_of(old, interrupt)?,
        };
        let done = commit::put_patched(&self.0.parts, &of, manifest, new, changed, interrupt)?;
        if let Patched::Stored(_, _, fold) = &done {
            self.keep_fold(fold, &manifest.hash);
        }
        Ok(done)
    }

    /// Stores the one file that a request names as an exact byte object, under no name yet.
    ///
    /// # Errors
    /// As of [`Store::put_object`].
    pub fn store_object(&self, request: &CommitRequest) -> Result<(ProvenObject, Stored)> {
        let (object, fold, stored) = commit::store_object(&self.0.parts, request)?;
        self.keep_fold(&fold, &object.manifest().hash);
        Ok((object, stored))
    }

    /// All objects that were put, the oldest first.
    pub fn objects(&self) -> Vec<Arc<Object>> {
        let mut all: Vec<_> = self.0.parts.history.read().objects().values().cloned().collect();
        all.sort_by_key(|o| (o.time, o.id));
        all
    }

    /// The object that an id, the start of one (8 hex digits or more), or REV:FILE names.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn object(&self, name: &str) -> Result<ObjectFile> {
        if let Some((rev, path)) = name.split_once(':') {
            let version = self.resolve(rev)?;
            let EntryKind::File { hash, len, .. } = self.entry(&version, path.as_bytes())?.kind else {
                return Err(Error::new(Kind::Usage, format!("{name} is no regular file")));
            };
            return self.file_object(&hash, len, &never);
        }
        let object = self.0.parts.history.read().object_by_prefix(name)?.cloned();
        let missing = || {
            let why = format!(
                "no object {name} (`zspace object ls` lists them; REV:FILE names a file of a version)"
            );
            Error::new(Kind::NotFound, why)
        };
        self.object_file(&object.ok_or_else(missing)?.manifest)
    }

    /// Proves a range of an object.
    ///
    /// # Errors
    /// `Usage` if the range is not within it; `Limit` if it is longer than 64 MiB; damage if its bytes cannot be read.
    pub fn prove(&self, object: &ObjectFile, range: Range<u64>) -> Result<Proof> {
        if range.end.saturating_sub(range.start) > MOST_PROVED {
            let why = format!(
                "at most {} MiB of an object are proved at once: prove it in parts",
                MOST_PROVED >> 20
            );
            return Err(Error::new(Kind::Limit, why));
        }
        let fold = self.fold_of(object, &never)?;
        Proof::of(&object.manifest, fold, &*object.file, range)
    }

    /// The ids of an object's larger trees: kept ones, or computed from its bytes, and kept.
    pub(super) fn fold(&self, file: &FileView, hash: &FileHash, interrupt: Interrupt<'_>) -> Result<Fold> {
        let path = self.fold_path(hash, file.len());
        if let Ok(bytes) = std::fs::read(&path) {
            match Fold::decode(&bytes, *hash, file) {
                Err(e) if e.kind() == Kind::Damage => log::info!("{}: {e}; made again", path.display()),
                done => return done,
            }
        }
        let fold = Fold::of(&Interruptible(file, interrupt), Width::FULL, self.0.parts.threads)?;
        self.keep_fold(&fold, hash);
        Ok(fold)
    }

    /// Keeps the fold of an object with this SHA-256, if it is worth it. Nothing is lost without it.
    fn keep_fold(&self, fold: &Fold, hash: &FileHash) {
        let len = fold.shape().len();
        let path = self.fold_path(hash, len);
        if len >= WORTH_KEEPING
            && !path.exists()
            && let Err(e) = keep(&path, &fold.encode(*hash))
        {
            log::info!("{} is not kept: {e}", path.display());
        }
    }

    fn fold_path(&self, hash: &FileHash, len: u64) -> PathBuf {
        self.dir().join("folds").join(format!("{hash}-{len}"))
    }
}

/// The most bytes that one proof is about: it takes four times as many in memory.
const MOST_PROVED: u64 = 64 << 20;
/// Smaller objects are folded in less time than a file is opened in.
const WORTH_KEEPING: u64 = 1 << 20;

/// Puts a file in its place in one step. It is not made durable: it says itself whether it is whole.
pub(super) fn keep(path: &std::path::Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let new = path.with_extension(format!("new-{}", std::process::id()));
    std::fs::write(&new, bytes)
        .and_then(|()| std::fs::rename(&new, path))
        .inspect_err(|_| {
            let _ = std::fs::remove_file(&new);
        })
}

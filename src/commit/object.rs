//! Puts an exact byte object: its bytes are stored as a file's are, and its records' ids are computed from what was stored.

use super::import::ProvenObject;
use super::{Commit, CommitRequest, Parts, Stored, store};
use crate::error::{Error, Kind, Result};
use crate::graph::{Change, now};
use crate::id::{FileHash, ObjectId};
use crate::object::{Fold, ObjectManifest, Width};
use crate::rebuild::StoredFile;
use std::path::Path;

/// An object that is durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutObject {
    /// Its id.
    pub id: ObjectId,
    /// What pins it.
    pub manifest: ObjectManifest,
    /// Bytes it added to the packs.
    pub stored: u64,
    /// Whether it was not there before.
    pub new: bool,
}

/// Puts the one file that a request names as an exact byte object; also gives its fold. Its branch, message and links mean nothing.
///
/// # Errors
/// As of a commit; `Usage` if it is no regular file.
pub fn put_object(parts: &Parts, request: &CommitRequest) -> Result<(PutObject, Fold)> {
    let (ProvenObject(manifest), fold, stored) = store_object(parts, request)?;
    Ok((publish(parts, stored, manifest)?, fold))
}

/// The same, but it is not published.
///
/// # Errors
/// As of [`put_object`].
pub fn store_object(parts: &Parts, request: &CommitRequest) -> Result<(ProvenObject, Fold, Stored)> {
    let [(_, path)] = &request.entries[..] else {
        return Err(Error::new(Kind::Usage, "an object is one file"));
    };
    if !std::fs::metadata(path)
        .map_err(|e| Error::io(path.display().to_string(), e))?
        .is_file()
    {
        let why = format!(
            "{} is no regular file: an object is the bytes of one",
            path.display()
        );
        return Err(Error::new(Kind::Usage, why));
    }
    parts.packs.refresh()?;
    let ((manifest, fold), stored) = store(parts, request, |commit| {
        let (hash, len) = bytes(commit, path)?;
        let source = StoredFile::load(
            commit.encoder.rebuilder(),
            commit.encoder.source.clone(),
            &hash,
            len,
        )?;
        let fold = Fold::of(&source, Width::FULL, parts.threads)?;
        Ok((fold.manifest(hash), fold))
    })?;
    Ok((ProvenObject(manifest), fold, stored))
}

/// Publishes an object whose bytes are stored.
fn publish(parts: &Parts, stored: Stored, manifest: ObjectManifest) -> Result<PutObject> {
    let (id, pinned) = (manifest.id(), manifest.clone());
    let (new, stored) = stored.publish(parts, move |history, _| {
        let new = !history.objects().contains_key(&id);
        let manifest = pinned.clone();
        Ok((
            Vec::from_iter(new.then(|| Change::Object {
                manifest,
                time: now(),
            })),
            new,
        ))
    })?;
    Ok(PutObject {
        id,
        manifest,
        stored,
        new,
    })
}

/// Stores the file's bytes.
fn bytes(commit: &Commit<'_>, path: &Path) -> Result<(FileHash, u64)> {
    let name = path.file_name().unwrap_or_default();
    match commit.file(path, name.as_encoded_bytes(), false)? {
        Some((hash, len, _)) => Ok((hash, len)),
        None => Err(Error::new(Kind::Io, "a file that was not to wait was left out")),
    }
}

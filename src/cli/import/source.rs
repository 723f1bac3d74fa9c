//! What a checkpoint looks like on a disk, and its removal once it is safe in the store.

use crate::cli::signals::Stop;
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::{Entry, EntryKind, Numbered, Store, hash_file};
use std::collections::BTreeMap;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Paths of regular files with length, and time of modification in seconds and nanoseconds.
pub(super) type Listing = BTreeMap<Vec<u8>, (u64, i64, u32)>;

/// The files of a checkpoint on disk.
///
/// # Errors
/// What the system reports.
pub(super) fn listing(entries: &[(Vec<u8>, PathBuf)]) -> Result<Listing> {
    let mut found = Listing::new();
    let mut todo: Vec<_> = entries.to_vec();
    while let Some((name, path)) = todo.pop() {
        let what = || path.display().to_string();
        // A loose link is followed, as by a commit; links within a directory are links.
        let top = entries.iter().any(|e| e.1 == path);
        let meta = match top {
            true => std::fs::metadata(&path),
            false => std::fs::symlink_metadata(&path),
        }
        .doing(what)?;
        if meta.is_dir() {
            for entry in std::fs::read_dir(&path).doing(what)? {
                let entry = entry.doing(what)?;
                let below = [&name[..], b"/", entry.file_name().as_bytes()].concat();
                todo.push((below, entry.path()));
            }
        } else if meta.is_file() {
            found.insert(name, (meta.len(), meta.mtime(), meta.mtime_nsec() as u32));
        }
    }
    Ok(found)
}

/// The files of a version.
///
/// # Errors
/// Damage.
pub(super) fn stored(store: &Store, version: &Numbered) -> Result<Listing> {
    let files = store.walk(version)?.into_iter();
    let file = |(path, entry): (Vec<u8>, Entry)| match entry.kind {
        EntryKind::File { len, .. } => Some((path, (len, entry.mtime.seconds, entry.mtime.nanos))),
        _ => None,
    };
    Ok(files.filter_map(file).collect())
}

/// Removes a checkpoint that is a version now: every hash of the version is right, and what is on disk has the same SHA-256s. What is in
/// its directories beside that stays.
///
/// # Errors
/// Damage, if the version is not right; `Changed` if the checkpoint is another by now: then nothing is removed.
pub(super) fn remove(
    store: &Store,
    version: &std::sync::Arc<Numbered>,
    entries: &[(Vec<u8>, PathBuf)],
    stop: &Stop,
) -> Result<()> {
    let report = store.verify(std::slice::from_ref(version), &mut |_| {});
    if let Some(damage) = report.damage.first() {
        let why = format!(
            "{} {}: {}: its source stays",
            damage.version, damage.file, damage.why
        );
        return Err(Error::damage(why));
    }
    let all = store.walk(version)?;
    let mut paths = Vec::new();
    for (name, entry) in &all {
        let path = on_disk(entries, name)?;
        let meta = std::fs::symlink_metadata(&path).doing(|| path.display().to_string())?;
        let same = match &entry.kind {
            EntryKind::Dir { .. } => meta.is_dir(),
            EntryKind::Symlink(_) => meta.is_symlink(),
            EntryKind::File { hash, len, .. } => {
                let mut file = std::fs::File::open(&path).doing(|| path.display().to_string())?;
                let found =
                    hash_file(&mut file, &|| !stop.is_asked()).doing(|| path.display().to_string())?;
                stop.check()?;
                meta.is_file() && found == Some((*hash, *len))
            }
        };
        if !same {
            let why = format!("{} has changed since it was stored: it stays", path.display());
            return Err(Error::new(Kind::Changed, why));
        }
        paths.push((path, meta.is_dir()));
    }
    // What is in a directory before the directory.
    paths.sort();
    for (path, is_dir) in paths.iter().rev() {
        match is_dir {
            false => std::fs::remove_file(path).doing(|| format!("remove {}", path.display()))?,
            true => match std::fs::remove_dir(path) {
                Err(e) if e.kind() == std::io::ErrorKind::DirectoryNotEmpty => {
                    log::warn!("{} stays: something else is in it", path.display());
                }
                done => done.doing(|| format!("remove {}", path.display()))?,
            },
        }
    }
    Ok(())
}

/// Where a file of the version lies.
fn on_disk(entries: &[(Vec<u8>, PathBuf)], name: &[u8]) -> Result<PathBuf> {
    let (top, below) = match name.iter().position(|b| *b == b'/') {
        Some(at) => (&name[..at], Some(&name[at + 1..])),
        None => (name, None),
    };
    let entry = entries.iter().find(|e| e.0 == top);
    let (_, path) = entry.ok_or_else(|| Error::damage("the version has an entry that was not imported"))?;
    Ok(match below {
        Some(below) => path.join(Path::new(&std::ffi::OsString::from_vec(below.to_vec()))),
        None => path.clone(),
    })
}

//! The checkpoints of a run, as they lie in a directory.

use crate::cli::natural::natural;
use crate::error::{Error, IoContext, Kind, Result};
use crate::fuse::unfinished;
use crate::store::Store;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Directories below a checkpoint's own that are looked into for tensors.
const MAX_DEPTH: usize = 3;

/// What becomes a version.
#[derive(Debug)]
pub(super) struct Checkpoint {
    /// What people call it.
    pub(super) name: String,
    /// Where it is: a file, a directory, or the directory of several files.
    pub(super) path: PathBuf,
    /// Names and paths of its files and directories.
    pub(super) entries: Vec<(Vec<u8>, PathBuf)>,
    pub(super) bytes: u64,
}

/// What a file or directory holds.
#[derive(Default)]
struct Content {
    tensors: bool,
    /// It says that it belongs together with others.
    shards: bool,
    torn: Option<String>,
    bytes: u64,
}

/// The checkpoints in a directory, in natural order; those of loose files last.
pub(super) fn checkpoints(store: &Store, dir: &Path) -> Result<Vec<Checkpoint>> {
    let (mut dirs, mut loose) = (Vec::new(), Vec::new());
    for (name, path) in children(dir)? {
        if unfinished(name.as_bytes()) {
            log::info!(
                "{}: left out: its name says that it is unfinished",
                path.display()
            );
            continue;
        }
        let meta = std::fs::metadata(&path).doing(|| path.display().to_string())?;
        if !meta.is_dir() && !meta.is_file() {
            continue;
        }
        let content = content(store, &path, MAX_DEPTH)?;
        if let Some(why) = &content.torn {
            log::warn!("{}: left out, it is torn: {why}", path.display());
            continue;
        }
        match meta.is_dir() {
            true if content.tensors => dirs.push((name, path, content)),
            true => log::info!("{}: left out: there are no tensors in it", path.display()),
            false => loose.push((name, path, content)),
        }
    }
    let own = |(name, path, content): (String, PathBuf, Content)| Checkpoint {
        entries: vec![(file_name(&path), path.clone())],
        name,
        path,
        bytes: content.bytes,
    };
    let with_tensors = loose.iter().filter(|l| l.2.tensors).count();
    let mut found: Vec<Checkpoint> = dirs.into_iter().map(own).collect();
    if with_tensors > 1 && !loose.iter().any(|l| l.2.shards) {
        let (single, rest): (Vec<_>, Vec<_>) = loose.into_iter().partition(|l| l.2.tensors);
        for (_, path, _) in rest {
            log::info!("{}: left out: there are no tensors in it", path.display());
        }
        found.extend(single.into_iter().map(own));
        found.sort_by_key(|c| natural(&c.name));
        return Ok(found);
    }
    found.sort_by_key(|c| natural(&c.name));
    // A model's own directory: what lies loose in it belongs together.
    if with_tensors > 0 {
        let entries = loose.iter().map(|(_, path, _)| (file_name(path), path.clone()));
        found.push(Checkpoint {
            name: dir.display().to_string(),
            path: dir.to_owned(),
            entries: entries.collect(),
            bytes: loose.iter().map(|l| l.2.bytes).sum(),
        });
    }
    Ok(found)
}

/// Names and paths of what is in a directory.
fn children(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let what = || dir.display().to_string();
    let dir = std::path::absolute(dir).doing(what)?;
    if !std::fs::metadata(&dir).doing(what)?.is_dir() {
        let why = format!(
            "{} is no directory: `zspace commit` takes single files",
            dir.display()
        );
        return Err(Error::new(Kind::Usage, why));
    }
    let mut all = Vec::new();
    for entry in std::fs::read_dir(&dir).doing(what)? {
        let entry = entry.doing(what)?;
        all.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
    }
    Ok(all)
}

fn file_name(path: &Path) -> Vec<u8> {
    path.file_name()
        .map(|n| n.as_bytes().to_vec())
        .unwrap_or_default()
}

fn content(store: &Store, path: &Path, depth: usize) -> Result<Content> {
    let meta = std::fs::metadata(path).doing(|| path.display().to_string())?;
    let mut all = Content::default();
    if meta.is_file() {
        let probe = store.probe(path)?;
        return Ok(Content {
            tensors: probe.tensors,
            shards: probe.shards.is_some(),
            torn: probe.torn,
            bytes: meta.len(),
        });
    }
    if !meta.is_dir() {
        return Ok(all);
    }
    for (name, path) in children(path)? {
        // A link to a directory may lead back here.
        let is_link = std::fs::symlink_metadata(&path).is_ok_and(|m| m.is_symlink());
        if is_link && path.is_dir() || !path.exists() {
            continue;
        }
        if depth == 0 && path.is_dir() {
            continue;
        }
        let one = content(store, &path, depth.saturating_sub(1))?;
        all.tensors |= one.tensors;
        all.bytes += one.bytes;
        all.torn = all.torn.or(one.torn.map(|why| format!("{name}: {why}")));
    }
    Ok(all)
}

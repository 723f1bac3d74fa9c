//! A whole version, or a part of one, written to a directory.

use super::{Entry, EntryKind, Numbered, Store, Timestamp};
use crate::error::{Error, IoContext, Kind, Result};
use rustix::fs::{AtFlags, CWD, RenameFlags, Timespec, Timestamps, XattrFlags};
use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{File, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Hears of the bytes written, and ends the export with an error.
type Told<'a> = &'a mut dyn FnMut(u64) -> Result<()>;

impl Store {
    /// Writes a version's entries below `dest`, which is made if absent; nothing there is overwritten. Bytes, names, modes,
    /// times, links and `user.*` attributes come back as they were; `told` hears of the bytes written, and ends it with an error.
    /// A file has its name once it is whole.
    pub fn export(&self, version: &Numbered, dest: &Path, told: Told<'_>) -> Result<()> {
        std::fs::create_dir_all(dest).doing(|| format!("create {}", dest.display()))?;
        let tree = self.tree(&version.version.tree)?;
        self.export_entries(tree.entries(), dest, told)
    }

    /// Writes one entry of a version as `dest`.
    pub fn export_entry(&self, entry: &Entry, dest: &Path, told: Told<'_>) -> Result<()> {
        let dir = dest.parent().unwrap_or_else(|| Path::new("."));
        let mut entry = entry.clone();
        entry.name = dest.file_name().unwrap_or_default().as_bytes().to_vec();
        self.export_entries(&[entry], dir, told)
    }

    fn export_entries(&self, entries: &[Entry], dest: &Path, told: Told<'_>) -> Result<()> {
        let mut links: HashMap<u32, PathBuf> = HashMap::new();
        let mut todo: Vec<(PathBuf, Entry)> = entries
            .iter()
            .rev()
            .map(|e| (dest.to_owned(), e.clone()))
            .collect();
        // Directories get their modes and times last, innermost first: what is made in them would change these.
        let mut dirs: Vec<(PathBuf, Entry)> = Vec::new();
        while let Some((dir, entry)) = todo.pop() {
            told(0)?;
            let path = dir.join(OsStr::from_bytes(&entry.name));
            match &entry.kind {
                EntryKind::Dir { tree, .. } => {
                    std::fs::create_dir(&path).doing(|| format!("create {}", path.display()))?;
                    let below = self.tree(tree)?;
                    todo.extend(below.entries().iter().rev().map(|e| (path.clone(), e.clone())));
                    dirs.push((path, entry));
                }
                EntryKind::Symlink(target) => {
                    let target = OsStr::from_bytes(target);
                    std::os::unix::fs::symlink(target, &path)
                        .doing(|| format!("create link {}", path.display()))?;
                    set_times(&path, entry.mtime)?;
                }
                EntryKind::File { hash, len, link } => {
                    if let Some(first) = links.get(link).filter(|_| *link > 0) {
                        std::fs::hard_link(first, &path)
                            .doing(|| format!("create link {}", path.display()))?;
                        continue;
                    }
                    if std::fs::symlink_metadata(&path).is_ok() {
                        return Err(Error::new(Kind::Exists, format!("{} exists", path.display())));
                    }
                    let (part, file) = new_part(&dir)?;
                    let done = self
                        .export_file(hash, *len, file, told)
                        .and_then(|()| dress(&part, &entry))
                        .and_then(|()| put(&part, &path));
                    if let Err(e) = done {
                        let _ = std::fs::remove_file(&part);
                        return Err(e.context(path.display()));
                    }
                    links.insert(*link, path);
                }
            }
        }
        for (path, entry) in dirs.iter().rev() {
            dress(path, entry)?;
        }
        Ok(())
    }

    fn export_file(&self, hash: &super::FileHash, len: u64, mut file: File, told: Told<'_>) -> Result<()> {
        let view = self.file(hash, len)?;
        view.copy_to(0..len, &mut file, told)
    }
}

/// A file for what is not whole yet. An export that was killed may have left one of the same number.
fn new_part(dir: &Path) -> Result<(PathBuf, File)> {
    let process = std::process::id();
    let mut n = 0u32;
    loop {
        let path = dir.join(format!(".zspace-export-{process}-{n}"));
        match File::create_new(&path) {
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => n += 1,
            made => {
                let file = made.doing(|| format!("create {}", path.display()))?;
                return Ok((path, file));
            }
        }
    }
}

/// Gives a whole file its name, which nothing has.
fn put(part: &Path, path: &Path) -> Result<()> {
    let renamed = match rustix::fs::renameat_with(CWD, part, CWD, path, RenameFlags::NOREPLACE) {
        // Not every file system can: an empty file takes the name then, and is replaced.
        Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => File::create_new(path)
            .and_then(|_| std::fs::rename(part, path).inspect_err(|_| drop(std::fs::remove_file(path)))),
        done => done.map_err(Into::into),
    };
    renamed.doing(|| "give it its name".to_owned())
}

/// Gives a file or directory its attributes, mode and time.
fn dress(path: &Path, entry: &Entry) -> Result<()> {
    for (name, value) in &entry.xattrs {
        match rustix::fs::setxattr(path, OsStr::from_bytes(name), value, XattrFlags::empty()) {
            // A file system without attributes still gets the bytes.
            Ok(()) | Err(Errno::NOTSUP) => {}
            Err(e) => {
                return Err(Error::io(
                    format!("set attributes of {}", path.display()),
                    e.into(),
                ));
            }
        }
    }
    std::fs::set_permissions(path, Permissions::from_mode(entry.mode))
        .doing(|| format!("chmod {}", path.display()))?;
    set_times(path, entry.mtime)
}

fn set_times(path: &Path, t: Timestamp) -> Result<()> {
    let time = Timespec {
        tv_sec: t.seconds,
        tv_nsec: i64::from(t.nanos),
    };
    let times = Timestamps {
        last_access: time,
        last_modification: time,
    };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)
        .doing(|| format!("set times of {}", path.display()))
}

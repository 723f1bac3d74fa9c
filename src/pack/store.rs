//! Making and opening a store's directory, and putting right what a crash left.

use super::files::{PackFiles, pack_number};
use super::index::Index;
use super::journal::Journal;
use super::parse::{self, FORMAT_MAGIC, PACK_HEADER, PROLOGUE, Pos, SEGMENT_HEADER, SegmentHeader, StoreId};
use super::{Applied, Ledger, Limits, Packs};
use crate::disk::{Disk, read_exact_at};
use crate::error::{Error, Kind, Result};
use parking_lot::{Condvar, Mutex};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const DIRS: [&str; 3] = ["packs", "journal", "index"];

pub(super) fn lock_path(root: &Path) -> PathBuf {
    root.join("lock")
}

/// The names in a directory; none if it does not exist.
pub(super) fn list(disk: &dyn Disk, dir: &Path) -> Result<Vec<String>> {
    match disk.list(dir) {
        Err(e) if e.kind() == Kind::NotFound => Ok(Vec::new()),
        names => names,
    }
}

/// Whether the store cannot be written, by this user or by anyone.
pub(super) fn is_read_only(e: &Error) -> bool {
    e.kind() == Kind::ReadOnly || matches!(e.errno(), libc::EACCES | libc::EPERM)
}

/// Fills `buf` with random bytes.
pub(super) fn random(buf: &mut [u8]) -> Result<()> {
    let mut done = 0;
    while done < buf.len() {
        done += rustix::rand::getrandom(&mut buf[done..], rustix::rand::GetRandomFlags::empty())
            .map_err(|e| Error::io("get random bytes", e.into()))?;
    }
    Ok(())
}

/// The store id that pack or journal headers agree on, for want of STORE/FORMAT.
fn id_from_headers(disk: &dyn Disk, root: &Path) -> Result<Option<StoreId>> {
    for dir in ["journal", "packs"] {
        for name in list(disk, &root.join(dir))? {
            let read = |len| {
                disk.open(&root.join(dir).join(&name), false)
                    .and_then(|f| read_exact_at(&*f, 0, len))
            };
            let found = match dir {
                "packs" if pack_number(&name).is_none() => continue,
                "packs" => read(PACK_HEADER).and_then(|b| Ok(parse::read_pack_header(&b)?.0)),
                _ if name == "durable" => continue,
                _ => read(SEGMENT_HEADER).and_then(|b| Ok(SegmentHeader::decode(&b)?.store)),
            };
            match found {
                Ok(id) => return Ok(Some(id)),
                Err(e) if e.kind() == Kind::Unsupported => return Err(e),
                Err(_) => {}
            }
        }
    }
    Ok(None)
}

/// Writes STORE/FORMAT so that it is there whole or not at all.
fn write_format(disk: &dyn Disk, root: &Path, id: &StoreId) -> Result<()> {
    let temporary = root.join("FORMAT.tmp");
    match disk.remove(&temporary) {
        Err(e) if e.kind() != Kind::NotFound => return Err(e),
        _ => {}
    }
    let file = disk.create_new(&temporary)?;
    file.write_at(0, &parse::prologue(FORMAT_MAGIC, id))?;
    file.sync()?;
    disk.rename(&temporary, &root.join("FORMAT"))?;
    disk.sync_dir(root)
}

pub(super) fn create(disk: &dyn Disk, root: &Path) -> Result<()> {
    let exists = || Error::new(Kind::Exists, format!("{} is a store already", root.display()));
    disk.create_dir_all(root)?;
    let names = disk.list(root)?;
    if names.iter().any(|n| n == "FORMAT") {
        return Err(exists());
    }
    let ours = |n: &String| DIRS.contains(&n.as_str()) || n == "lock" || n == "FORMAT.tmp";
    if !names.iter().all(ours) {
        let text = format!("{} is not empty and not a store", root.display());
        return Err(Error::new(Kind::Refused, text));
    }
    let _lock = disk.lock(&lock_path(root), true)?;
    // What an earlier attempt left is taken up, unless it went so far that opening completes it.
    if disk.list(root)?.iter().any(|n| n == "FORMAT") || id_from_headers(disk, root)?.is_some() {
        return Err(exists());
    }
    for dir in DIRS {
        let dir = root.join(dir);
        disk.create_dir_all(&dir)?;
        if !dir.ends_with("journal") && !disk.list(&dir)?.is_empty() {
            let text = format!("{} is not empty and belongs to no store", dir.display());
            return Err(Error::new(Kind::Refused, text));
        }
    }
    let journal = root.join("journal");
    for name in disk.list(&journal)? {
        if name != "00000001" && name != "durable" {
            let text = format!("{} is not empty and belongs to no store", journal.display());
            return Err(Error::new(Kind::Refused, text));
        }
        disk.remove(&journal.join(name))?;
    }
    let mut id = [0; 16];
    random(&mut id)?;
    let header = SegmentHeader {
        store: id,
        segment: 1,
        previous_len: 0,
        previous_seq: 0,
    };
    for (name, bytes) in [
        ("durable", Pos::START.encode_mark(&id)),
        ("00000001", header.encode()),
    ] {
        let file = disk.create_new(&journal.join(name))?;
        file.write_at(0, &bytes)?;
        file.sync()?;
    }
    disk.sync_dir(&journal)?;
    disk.sync_dir(root)?;
    write_format(disk, root, &id)?;
    match root.parent() {
        Some(parent) if parent.as_os_str().is_empty() => disk.sync_dir(Path::new(".")),
        Some(parent) => disk.sync_dir(parent),
        None => Ok(()),
    }
}

/// The store's id from FORMAT, or from other files if that is lost; then it is written again if that can be done now.
fn identify(disk: &dyn Disk, root: &Path) -> Result<StoreId> {
    let read = disk
        .open(&root.join("FORMAT"), false)
        .and_then(|f| read_exact_at(&*f, 0, PROLOGUE));
    let lost = match read.and_then(|b| parse::read_prologue(&b, FORMAT_MAGIC, "FORMAT")) {
        Err(e) if matches!(e.kind(), Kind::Damage | Kind::NotFound) => e,
        known => return known.map_err(|e| e.context(root.display())),
    };
    let Some(id) = id_from_headers(disk, root)? else {
        let kind = if lost.kind() == Kind::NotFound {
            Kind::NotFound
        } else {
            Kind::Damage
        };
        return Err(Error::new(
            kind,
            format!("{} is not a store: {lost}", root.display()),
        ));
    };
    log::warn!(
        "{}: FORMAT is lost, taking the store's id from other files: {lost}",
        root.display()
    );
    if let Ok(_lock) = disk.lock(&lock_path(root), false)
        && let Err(e) = write_format(disk, root, &id)
    {
        log::warn!("FORMAT could not be written again: {e}");
    }
    Ok(id)
}

pub(super) fn open(
    disk: Arc<dyn Disk>,
    root: &Path,
    ledger: Arc<dyn Ledger>,
    limits: Limits,
) -> Result<Arc<Packs>> {
    let store = identify(&*disk, root)?;
    let packs = Arc::new(Packs {
        root: root.to_owned(),
        store,
        ledger,
        limits,
        files: PackFiles::new(disk.clone(), root, store),
        index: Index::new(disk.clone(), root, store),
        journal: Journal::new(disk.clone(), root, store, limits.segment),
        reading: Mutex::new(()),
        applied: Mutex::new(Applied {
            pos: Pos::START,
            nodes: 0,
            last_pack: 0,
        }),
        queue: Mutex::default(),
        wake: Condvar::new(),
        poisoned: Mutex::new(None),
        idle: Mutex::default(),
        published: Mutex::default(),
        retired: Mutex::default(),
        finished: Mutex::default(),
        disk,
    });
    let (end, certain) = find_end(&packs)?;
    if certain {
        packs.index.remove_beyond(end.seq);
    }
    packs.index.load(end.seq)?;
    packs.catch_up(end)?;
    if packs.index.pending() >= limits.table {
        packs.flush_soon();
    }
    Ok(packs)
}

/// Where the journal ends, and whether that was settled under the lock.
fn find_end(packs: &Packs) -> Result<(Pos, bool)> {
    let journal = &packs.journal;
    let mark = match journal.read_mark() {
        Ok(mark) if journal.ends_at(mark)? => return Ok((mark, false)),
        Ok(mark) => Some(mark),
        Err(e) if matches!(e.kind(), Kind::Damage | Kind::NotFound) => None,
        Err(e) => return Err(e),
    };
    // Without a mark there is nothing to go by, so wait for whoever holds the lock.
    let lock = packs.disk.lock(&lock_path(&packs.root), mark.is_none());
    let read_only = match lock {
        Ok(_lock) => match journal.settle(Pos::START) {
            Ok(end) => {
                if let Err(e) = journal.restore_copies(end) {
                    log::warn!("copies of journal segments could not be made: {e}");
                }
                return Ok((end, true));
            }
            Err(e) if e.kind() == Kind::Damage || e.kind() == Kind::Unsupported => return Err(e),
            Err(e) => e,
        },
        Err(e) if e.kind() == Kind::Busy => match mark {
            Some(mark) => return Ok((mark, false)),
            None => return Err(e),
        },
        Err(e) => e,
    };
    log::warn!("{}: opened for reading only: {read_only}", packs.root.display());
    match mark {
        // Someone else may be writing: what lies beyond the mark may not be durable yet.
        Some(mark) if read_only.kind() != Kind::ReadOnly => Ok((mark, false)),
        // Nobody can be writing.
        _ => Ok((journal.locate(mark.unwrap_or(Pos::START))?.end, false)),
    }
}

//! An open staged file.

use super::attributes::{SetAttr, apply_to_fd};
use super::backing::{attr_of, read_at};
use super::names::errno;

use super::{Staging, torn};
use crate::error::{Error, IoContext, Result};
use crate::fuse::attr::Attr;
use crate::store::disk_is_full;
use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, SeekFrom};
use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What `status` says of a file that was written to while the disk was full.
const FULL: &str = "no space was left on the disk while it was being written";

/// An open staged file. Dropping it is its RELEASE: what ends a writer.
pub struct Handle {
    pub(super) staging: Arc<Staging>,
    pub(super) file: File,
    /// The number under which writers are registered; readers have none.
    pub(super) writer: Option<u64>,
    /// Milliseconds of the clock at the last write; shared with the register.
    pub(super) tick: Arc<AtomicU64>,
    /// Whether what the file holds is this handle's work: opened with O_TRUNC or empty, or written to.
    pub(super) wrote: AtomicBool,
    /// What the file looked like when it was opened. The kernel may write to it by itself.
    pub(super) opened: Stamp,
    /// The kernel writes to it by itself: what fails then, we do not hear of.
    pub(super) unheard: AtomicBool,
    /// A descriptor of it was closed by its process.
    pub(super) flushed: AtomicBool,
    /// How often the cache had made room on a full disk by then.
    pub(super) rescues: u64,
    /// What was put on record when a process died holding it, and what the file looked like then.
    pub(super) killed: Mutex<Option<(String, Stamp)>>,
}

/// What shows that a file was written to: length, and time of the last change in seconds and nanoseconds.
pub(super) type Stamp = (u64, i64, i64);

/// What a file looks like now.
pub(super) fn stamp(file: &File) -> Stamp {
    file.metadata().map_or((0, 0, 0), |m| stamp_of(&m))
}

pub(super) fn stamp_of(m: &Metadata) -> Stamp {
    (m.len(), m.mtime(), m.mtime_nsec())
}

impl Handle {
    /// The backing file.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// From now on the kernel writes to it by itself.
    pub(crate) fn left_to_the_kernel(&self) {
        self.unheard.store(true, Ordering::Relaxed);
    }

    /// Up to `len` bytes at `offset`, fewer only at the end of the file.
    pub fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        read_at(&self.file, offset, len)
    }

    /// Writes all of `data` at `offset` (the kernel knows where O_APPEND appends). A failure leaves the file suspect: it is
    /// not committed unasked until it is written again from scratch.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<usize> {
        self.touch();
        match self.file.write_all_at(data, offset) {
            Ok(()) => Ok(data.len()),
            Err(e) => {
                self.suspect(format!("writing it failed: {e}"));
                Err(Error::io("write staged file", e))
            }
        }
    }

    /// A descriptor of the file was closed by process `pid`. A process that is dying by a signal leaves the file suspect,
    /// unless another process that shares the handle goes on writing and closes it in peace. So does a full disk: a write that
    /// failed in the kernel is not told to us.
    pub fn flush(&self, pid: u32) -> Result<()> {
        if self.writer.is_none() {
            return Ok(());
        }
        self.flushed.store(true, Ordering::Relaxed);
        let now = stamp(&self.file);
        self.note_close(now);
        if !self.wrote.load(Ordering::Acquire) && now == self.opened {
            return Ok(());
        }
        let full = || disk_is_full(&self.staging.dir) || self.staging.rescues() != self.rescues;
        if self.unheard.load(Ordering::Relaxed) && full() {
            self.suspect(FULL.to_owned());
        }
        let mut killed = self.killed.lock();
        match torn::dying(pid) {
            Some(why) => {
                let noted = self.suspect(why.clone());
                *killed = noted.then_some((why, now));
            }
            None if killed.as_ref().is_some_and(|(_, then)| *then != now) => {
                if let Some((why, _)) = killed.take() {
                    self.clear(|w| *w == why);
                }
            }
            None => {}
        }
        Ok(())
    }

    /// The kernel lets go of the handle. If no process ever closed it, none ever had it: who made or emptied the file was killed
    /// before it got to write.
    pub(crate) fn released(&self) {
        if self.wrote.load(Ordering::Acquire) && !self.flushed.load(Ordering::Relaxed) {
            self.suspect("its writer was killed while it opened it".to_owned());
        }
    }

    /// fsync or fdatasync of the backing file.
    pub fn fsync(&self, datasync: bool) -> Result<()> {
        let done = if datasync {
            self.file.sync_data()
        } else {
            self.file.sync_all()
        };
        if let Err(e) = &done {
            self.suspect(format!("fsync of it failed: {e}"));
        }
        done.doing(|| "fsync staged file".into())
    }

    /// Attributes, also of a file that has no name any more.
    pub fn attr(&self) -> Result<Attr> {
        Ok(attr_of(
            &rustix::fs::fstat(&self.file).doing(|| "stat staged file".into())?,
        ))
    }

    /// Changes attributes through the handle.
    pub fn setattr(&self, change: &SetAttr) -> Result<Attr> {
        if let Some(len) = change.size {
            self.truncate(len)?;
        }
        apply_to_fd(&self.file, change)?;
        self.touch();
        self.attr()
    }

    /// Cuts or extends the file.
    pub fn truncate(&self, len: u64) -> Result<()> {
        self.touch();
        self.file.set_len(len).doing(|| "truncate staged file".into())?;
        if len == 0 {
            self.clear(|_| true);
        }
        Ok(())
    }

    /// fallocate(2) with its mode bits.
    pub fn fallocate(&self, mode: i32, offset: u64, len: u64) -> Result<()> {
        self.touch();
        let mode = FallocateFlags::from_bits(mode as u32)
            .ok_or_else(|| errno(libc::EOPNOTSUPP, "fallocate mode"))?;
        rustix::fs::fallocate(&self.file, mode, offset, len).doing(|| "fallocate staged file".into())
    }

    /// The next data (SEEK_DATA) or hole (SEEK_HOLE) at or after `offset`.
    pub fn lseek(&self, offset: i64, whence: i32) -> Result<u64> {
        let at = u64::try_from(offset).map_err(|_| errno(libc::ENXIO, "offset below 0"))?;
        let seek = match whence {
            libc::SEEK_DATA => SeekFrom::Data(at),
            libc::SEEK_HOLE => SeekFrom::Hole(at),
            _ => return Err(errno(libc::EINVAL, "whence")),
        };
        rustix::fs::seek(&self.file, seek).doing(|| "seek staged file".into())
    }

    /// copy_file_range(2): bytes copied, which may be fewer than asked for.
    pub fn copy_to(&self, offset: u64, to: &Handle, to_offset: u64, len: u64) -> Result<u64> {
        to.touch();
        let (mut from_at, mut to_at) = (offset, to_offset);
        let len = usize::try_from(len).unwrap_or(usize::MAX).min(1 << 30);
        rustix::fs::copy_file_range(&self.file, Some(&mut from_at), &to.file, Some(&mut to_at), len)
            .map(|n| n as u64)
            .doing(|| "copy_file_range".into())
    }

    fn touch(&self) {
        self.wrote.store(true, Ordering::Release);
        self.tick
            .store(self.staging.clock.now().as_millis() as u64, Ordering::Relaxed);
    }

    /// Notes what the file looked like when it was closed: what a mapping writes from now on, nobody closes.
    fn note_close(&self, now: Stamp) {
        let mut g = self.staging.lock();
        let path = self.writer.and_then(|id| g.opens.get(&id)?.path.clone());
        if let Some(e) = path.and_then(|p| g.entries.get_mut(&super::key_of(&p)?)) {
            e.closed_as = Some(now);
        }
    }

    /// Puts a suspicion on record, unless there is an older one. Whether it was new.
    fn suspect(&self, why: String) -> bool {
        let Some(id) = self.writer else { return false };
        let mut g = self.staging.lock();
        let Some(path) = g.opens.get(&id).and_then(|o| o.path.clone()) else {
            return false;
        };
        let new = !g.suspects.contains_key(&path);
        g.suspects.entry(path).or_insert(why);
        new
    }

    /// Takes the suspicion against the file back, if it is this one.
    fn clear(&self, which: impl Fn(&String) -> bool) {
        let Some(id) = self.writer else { return };
        let mut g = self.staging.lock();
        if let Some(path) = g.opens.get(&id).and_then(|o| o.path.clone())
            && g.suspects.get(&path).is_some_and(which)
        {
            g.clear(&path);
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Some(id) = self.writer else { return };
        let mut g = self.staging.lock();
        let Some(path) = g.opens.remove(&id).and_then(|o| o.path) else {
            return;
        };
        let closed = g.number();
        g.touch(&path, self.staging.clock.now());
        if let Some(e) = super::key_of(&path).and_then(|key| g.entries.get_mut(&key)) {
            e.closed = closed;
        }
        self.staging.wake(&mut g);
    }
}

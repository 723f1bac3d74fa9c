//! Open files: reading, writing and what else is done through a handle.

use super::attr::FileKind;
use super::errno::{os, read_only};
use super::files::Files;
use super::handles::{Backing, Open, Reader, Staged};
use super::modes::{Register, Through};
use super::place::Place;
use super::staging::{Handle, Located, home_of};
use crate::error::Result;
use std::sync::Arc;

/// Bytes that one `copy_file_range` request moves at most, so that it can be interrupted.
const COPY: u64 = 8 << 20;

/// An open file, for the kernel.
pub(super) struct Opened {
    pub(super) fh: u64,
    /// Its bytes never change: what the kernel has cached stays right.
    pub(super) fixed: bool,
    /// It may be written through this handle.
    pub(super) writes: bool,
    /// The kernel reads and writes this by itself.
    pub(super) through: Option<Through>,
}

impl Files {
    /// Opens a file with the flags of `open`. Where its bytes lie in a file, `register` may make that known to the kernel.
    pub(super) fn open(&self, ino: u64, flags: i32, register: Register<'_>) -> Result<Opened> {
        let writes = flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0;
        let place = self.place(ino)?;
        if matches!(place, Place::Staged(_)) {
            return self.open_staged(ino, flags, writes, register);
        }
        if writes {
            return Err(read_only());
        }
        let key = self.space.file_key(&place);
        let whole = key.and_then(|key| self.warm.open(&key, None));
        let through = match self
            .handles
            .modes
            .open(ino, whole.as_ref().map(|w| &w.file), register)
        {
            // The kernel has it open on a file that is no longer here.
            Err(e) if e.errno() == libc::ESTALE => {
                self.inodes.detach(ino);
                return Err(e);
            }
            through => through?,
        };
        let reader = match whole {
            Some(whole) => Ok(Arc::new(Reader::Whole(whole))),
            None => self.handles.reader(ino, || self.space.view(&place)),
        };
        let reader = reader.inspect_err(|_| self.handles.modes.close(ino))?;
        Ok(Opened {
            fh: self.handles.add(Open::Version(reader)),
            fixed: true,
            writes: false,
            through,
        })
    }

    fn open_staged(&self, ino: u64, flags: i32, writes: bool, register: Register<'_>) -> Result<Opened> {
        if writes {
            let emptied = flags & libc::O_TRUNC != 0;
            let prepare = |path: &[Vec<u8>]| match path.len() {
                2 if emptied => Ok(()),
                _ => self.staging.prepare(path),
            };
            self.ahead(|| self.staged_path(ino), prepare)?;
        }
        let _names = self.names.read();
        let path = self.staged_path(ino)?;
        // The kernel gives every write its offset and aligns direct I/O by itself.
        let flags = flags & (libc::O_ACCMODE | libc::O_TRUNC);
        let backing = self.settled(|| {
            if let (
                false,
                Located::Version {
                    version,
                    path: inside,
                },
            ) = (writes, self.staging.locate(&path)?)
            {
                let place = self.space.walk(&version, &inside)?;
                let home = || home_of(&path);
                let key = self.space.file_key(&place);
                let reader = match key.and_then(|key| self.warm.open(&key, Some(home()))) {
                    Some(whole) => Reader::Whole(whole),
                    None => self.handles.new_reader(self.space.view(&place)?),
                };
                return Ok(Backing::Version(Arc::new(reader), self.space.attr(&place)?));
            }
            Ok(Backing::Disk(Arc::new(self.staging.open_file(&path, flags)?)))
        })?;
        if writes {
            self.follow(ino, &path);
        }
        self.add_staged(ino, writes, backing, register)
    }

    /// A handle for a staged file that was opened.
    pub(super) fn add_staged(
        &self,
        ino: u64,
        writes: bool,
        backing: Backing,
        register: Register<'_>,
    ) -> Result<Opened> {
        let file = match &backing {
            Backing::Disk(handle) => Some(handle.file()),
            Backing::Version(reader, _) => reader.file(),
        };
        let through = self.handles.modes.open(ino, file, register).inspect_err(|_| {
            // The name gets an inode of its own, and the kernel opens that.
            self.inodes.detach(ino);
        })?;
        if let (Some(_), Backing::Disk(handle)) = (&through, &backing) {
            handle.left_to_the_kernel();
        }
        let staged = Staged::new(ino, writes, backing);
        Ok(Opened {
            fh: self.handles.add(Open::Staged(staged)),
            fixed: false,
            writes,
            through,
        })
    }

    /// The entry is being changed: handles that read it from its version go on with the backing file.
    pub(super) fn follow(&self, ino: u64, path: &[Vec<u8>]) {
        for open in self.handles.of(ino) {
            let Open::Staged(staged) = &*open else { continue };
            if staged.writes {
                continue;
            }
            match self.staging.open_file(path, libc::O_RDONLY) {
                Ok(handle) => staged.move_to(Arc::new(handle)),
                Err(e) => log::warn!("a reader goes on with what was committed: {e}"),
            }
        }
    }

    /// What is open under a handle.
    pub(super) fn opened(&self, fh: u64) -> Result<Arc<Open>> {
        self.handles.get(fh).ok_or_else(|| os(libc::EBADF, "not open"))
    }

    /// The backing file of a handle.
    pub(super) fn disk(&self, fh: u64) -> Result<Arc<Handle>> {
        match &*self.opened(fh)? {
            Open::Staged(staged) => staged
                .disk()
                .ok_or_else(|| os(libc::EBADF, "not open for writing")),
            Open::Version(_) => Err(read_only()),
            Open::Dir(_) => Err(os(libc::EISDIR, "is a directory")),
        }
    }

    /// Reads; `answer` gets the bytes where they lie. Fewer than asked for means the end of the file.
    pub(super) fn read<T>(
        &self,
        fh: u64,
        offset: u64,
        len: usize,
        answer: impl FnOnce(&[u8]) -> T,
    ) -> Result<T> {
        match &*self.opened(fh)? {
            Open::Version(reader) => Ok(answer(&reader.read(offset, len)?)),
            Open::Staged(staged) => match staged.backing() {
                Backing::Disk(handle) => Ok(answer(&handle.read(offset, len)?)),
                Backing::Version(reader, _) => Ok(answer(&reader.read(offset, len)?)),
            },
            Open::Dir(_) => Err(os(libc::EISDIR, "is a directory")),
        }
    }

    /// Writes all of `data`. `strip`: the writer may not keep set-user-id bits, as any write by another than root.
    pub(super) fn write(&self, fh: u64, offset: u64, data: &[u8], strip: bool) -> Result<usize> {
        let handle = self.disk(fh)?;
        let written = handle.write(offset, data)?;
        if strip {
            self.strip(&handle)?;
        }
        Ok(written)
    }

    fn strip(&self, handle: &Handle) -> Result<()> {
        let attr = handle.attr()?;
        let group = if attr.mode & 0o010 != 0 { 0o2000 } else { 0 };
        let mode = attr.mode & !(0o4000 | group);
        if attr.kind == FileKind::File && mode != attr.mode {
            let change = super::staging::SetAttr {
                mode: Some(mode),
                ..Default::default()
            };
            handle.setattr(&change)?;
        }
        Ok(())
    }

    /// One descriptor of the handle is closed, by the process `pid`.
    pub(super) fn flush(&self, fh: u64, pid: u32) -> Result<()> {
        match &*self.opened(fh)? {
            Open::Staged(staged) if staged.writes => staged.disk().map_or(Ok(()), |h| h.flush(pid)),
            _ => Ok(()),
        }
    }

    /// Makes the contents durable.
    pub(super) fn sync(&self, fh: u64, datasync: bool) -> Result<()> {
        match &*self.opened(fh)? {
            Open::Staged(staged) => staged.disk().map_or(Ok(()), |h| h.fsync(datasync)),
            Open::Version(_) | Open::Dir(_) => Ok(()),
        }
    }

    /// The last descriptor of the handle is gone.
    pub(super) fn release(&self, ino: u64, fh: u64) {
        let Some(open) = self.handles.close(fh) else {
            return;
        };
        match &*open {
            Open::Dir(_) => return,
            Open::Staged(staged) => {
                if let (true, Some(handle)) = (staged.writes, staged.disk()) {
                    handle.released();
                }
            }
            Open::Version(reader) => {
                if let Reader::Rebuilt { .. } = &**reader
                    && let Some(read) = self.handles.close_reader(ino)
                    && let Some(key) = self.place(ino).ok().and_then(|p| self.space.file_key(&p))
                {
                    self.warm.read(&key, read);
                }
            }
        }
        self.handles.modes.close(ino);
    }

    /// Reserves or frees space.
    pub(super) fn allocate(&self, fh: u64, mode: i32, offset: u64, len: u64) -> Result<()> {
        self.disk(fh)?.fallocate(mode, offset, len)
    }

    /// The next data or hole at or after an offset. Files of versions have no holes.
    pub(super) fn seek(&self, fh: u64, offset: i64, whence: i32) -> Result<u64> {
        let size = match &*self.opened(fh)? {
            Open::Version(reader) => reader.len(),
            Open::Staged(staged) => match staged.backing() {
                Backing::Disk(handle) => return handle.lseek(offset, whence),
                Backing::Version(reader, _) => reader.len(),
            },
            Open::Dir(_) => return Err(os(libc::EISDIR, "is a directory")),
        };
        let beyond = || os(libc::ENXIO, "beyond the end of the file");
        let at = u64::try_from(offset)
            .ok()
            .filter(|at| *at < size)
            .ok_or_else(beyond)?;
        match whence {
            libc::SEEK_DATA => Ok(at),
            libc::SEEK_HOLE => Ok(size),
            _ => Err(os(libc::EINVAL, "the kernel seeks otherwise by itself")),
        }
    }

    /// Copies from one open file to another; the answer is how much, which may be less than asked for.
    pub(super) fn copy(&self, from: (u64, u64), to: (u64, u64), len: u64) -> Result<u64> {
        let target = self.disk(to.0)?;
        if let Open::Staged(staged) = &*self.opened(from.0)?
            && let Some(source) = staged.disk()
        {
            return source.copy_to(from.1, &target, to.1, len.min(COPY));
        }
        let end = len.min(COPY);
        let mut done = 0;
        while done < end {
            let want = (end - done).min(1 << 20) as usize;
            let at = from.1.saturating_add(done);
            let n = self.read(from.0, at, want, |bytes| {
                target.write(to.1.saturating_add(done), bytes)
            })??;
            if n == 0 {
                break;
            }
            done += n as u64;
        }
        Ok(done)
    }
}

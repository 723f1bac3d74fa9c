//! The Disk trait: every byte of a store's packs, journal and index goes through it, so that a faulty disk can stand in.
//!
//! Errors carry the path. Durability is explicit: file contents are durable after [`DiskFile::sync`], names after
//! [`Disk::sync_dir`] of their directory.

pub mod faulty;

use crate::error::{Error, IoContext, Kind, Result};
use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file system, as far as a store needs one.
pub trait Disk: Send + Sync {
    /// Opens an existing file for reading, or for reading and writing.
    fn open(&self, path: &Path, write: bool) -> Result<Arc<dyn DiskFile>>;
    /// Makes a new file for reading and writing; fails with `Exists` if the name is taken.
    fn create_new(&self, path: &Path) -> Result<Arc<dyn DiskFile>>;
    /// Renames a file over whatever has the new name.
    fn rename(&self, from: &Path, to: &Path) -> Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> Result<()>;
    /// The names in a directory, in no order.
    fn list(&self, dir: &Path) -> Result<Vec<String>>;
    /// Makes a directory and its parents, if absent. Durable once this and the parents are synced.
    fn create_dir_all(&self, dir: &Path) -> Result<()>;
    /// Makes the names in a directory durable.
    fn sync_dir(&self, dir: &Path) -> Result<()>;
    /// Takes the advisory exclusive lock of a file (made if absent), waiting or, with `wait` false, failing with `Busy`.
    /// Dropping the guard gives it back; so does the end of the process.
    fn lock(&self, path: &Path, wait: bool) -> Result<Box<dyn Send + Sync>>;
}

/// An open file: positioned reads and writes, shared by threads.
pub trait DiskFile: Send + Sync {
    /// Reads up to `buf.len()` bytes at `offset`; fewer only at the end of the file.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize>;
    /// Reads up to `len` bytes at `offset`; fewer only at the end of the file.
    fn read_vec(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        let mut buf = vec![0; len];
        let n = self.read_at(offset, &mut buf)?;
        buf.truncate(n);
        Ok(buf)
    }
    /// Writes all of `data` at `offset`.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()>;
    /// Length in bytes.
    fn len(&self) -> Result<u64>;
    /// Whether the file is empty.
    fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Cuts or extends the file.
    fn truncate(&self, len: u64) -> Result<()>;
    /// Makes the contents durable.
    fn sync(&self) -> Result<()>;
}

/// Reads exactly `len` bytes at `offset`; a file that ends before is damage.
pub fn read_exact_at(file: &dyn DiskFile, offset: u64, len: usize) -> Result<Vec<u8>> {
    let bytes = file.read_vec(offset, len)?;
    if bytes.len() < len {
        let missing = len - bytes.len();
        return Err(Error::damage(format!("file ends {missing} bytes early")));
    }
    Ok(bytes)
}

/// Reads up to `len` bytes at `offset` into memory that is not zeroed first; fewer only at the end of the file.
pub fn read_vec(file: &File, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    let mut buf = Vec::with_capacity(len);
    while buf.len() < len {
        let at = offset + buf.len() as u64;
        match rustix::io::pread(file, rustix::buffer::spare_capacity(&mut buf), at) {
            Ok(0) => break,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    // There may have been room for more.
    buf.truncate(len);
    Ok(buf)
}

/// Makes a directory that only its owner may enter, and takes it for this process: its lock is held until what is returned is
/// dropped. Nothing if another process has it.
pub fn take_dir(dir: &Path) -> Result<Option<File>> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.doing(|| format!("make {}", dir.display()))?;
    let path = dir.join("lock");
    let what = || format!("lock {}", path.display());
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = options
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(&path)
        .doing(what)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(e)) => Err(Error::io(what(), e)),
    }
}

/// The machine's own file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

struct RealFile {
    file: File,
    path: PathBuf,
}

impl Disk for RealDisk {
    fn open(&self, path: &Path, write: bool) -> Result<Arc<dyn DiskFile>> {
        let file = OpenOptions::new().read(true).write(write).open(path);
        let file = file.doing(|| format!("open {}", path.display()))?;
        Ok(Arc::new(RealFile {
            file,
            path: path.to_owned(),
        }))
    }

    fn create_new(&self, path: &Path) -> Result<Arc<dyn DiskFile>> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path);
        let file = file.doing(|| format!("create {}", path.display()))?;
        Ok(Arc::new(RealFile {
            file,
            path: path.to_owned(),
        }))
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        std::fs::rename(from, to).doing(|| format!("rename {} to {}", from.display(), to.display()))
    }

    fn remove(&self, path: &Path) -> Result<()> {
        std::fs::remove_file(path).doing(|| format!("remove {}", path.display()))
    }

    fn list(&self, dir: &Path) -> Result<Vec<String>> {
        let what = || format!("list {}", dir.display());
        let mut names = Vec::new();
        for entry in std::fs::read_dir(dir).doing(what)? {
            // A name that is not UTF-8 is none of ours.
            if let Ok(name) = entry.doing(what)?.file_name().into_string() {
                names.push(name);
            }
        }
        Ok(names)
    }

    fn create_dir_all(&self, dir: &Path) -> Result<()> {
        std::fs::create_dir_all(dir).doing(|| format!("create directory {}", dir.display()))
    }

    fn sync_dir(&self, dir: &Path) -> Result<()> {
        File::open(dir)
            .and_then(|d| d.sync_all())
            .doing(|| format!("fsync directory {}", dir.display()))
    }

    fn lock(&self, path: &Path, wait: bool) -> Result<Box<dyn Send + Sync>> {
        let what = || format!("lock {}", path.display());
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        let file = file.doing(what)?;
        if wait {
            file.lock().doing(what)?;
        } else {
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::new(
                        Kind::Busy,
                        format!("{} is held by another process", path.display()),
                    ));
                }
                Err(TryLockError::Error(e)) => return Err(Error::io(what(), e)),
            }
        }
        Ok(Box::new(file))
    }
}

impl DiskFile for RealFile {
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            match self.file.read_at(&mut buf[done..], offset + done as u64) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io(format!("read {} at {offset}", self.path.display()), e)),
            }
        }
        Ok(done)
    }

    /// Into fresh memory, which need not be zeroed first.
    fn read_vec(&self, offset: u64, len: usize) -> Result<Vec<u8>> {
        read_vec(&self.file, offset, len).doing(|| format!("read {} at {offset}", self.path.display()))
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.file
            .write_all_at(data, offset)
            .doing(|| format!("write {} at {offset}", self.path.display()))
    }

    fn len(&self) -> Result<u64> {
        Ok(self
            .file
            .metadata()
            .doing(|| format!("stat {}", self.path.display()))?
            .len())
    }

    fn truncate(&self, len: u64) -> Result<()> {
        self.file
            .set_len(len)
            .doing(|| format!("truncate {}", self.path.display()))
    }

    fn sync(&self) -> Result<()> {
        self.file
            .sync_all()
            .doing(|| format!("fsync {}", self.path.display()))
    }
}

//! Whether a file can still be written by somebody.

use rustix::fs::OFlags;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Once};

/// Whether anybody has the file open for writing, or mapped by a descriptor that was: such a file cannot be leased for reading
/// (fcntl(2), F_SETLEASE). Where a file system has no leases, the answer is no.
pub(super) fn writable(path: &Path) -> bool {
    refused(path, libc::F_RDLCK)
}

/// Whether anybody has the file open or mapped at all.
pub(super) fn in_use(path: &Path) -> bool {
    refused(path, libc::F_WRLCK)
}

fn refused(path: &Path, kind: i32) -> bool {
    // Who opens the file for writing in the moment of the lease waits for its end, and we are sent SIGIO, which must not end us.
    static IGNORE: Once = Once::new();
    IGNORE.call_once(|| {
        let noted = Arc::new(AtomicBool::new(false));
        if let Err(e) = signal_hook::flag::register(libc::SIGIO, noted) {
            log::warn!("cannot take SIGIO: {e}");
        }
    });
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32;
    let Ok(file) = OpenOptions::new().read(true).custom_flags(flags).open(path) else {
        return false;
    };
    match lease(&file, kind) {
        Ok(()) => {
            let _ = lease(&file, libc::F_UNLCK);
            false
        }
        Err(e) => e.raw_os_error() == Some(libc::EAGAIN),
    }
}

fn lease(file: &File, kind: i32) -> std::io::Result<()> {
    // SAFETY: fcntl(2) with F_SETLEASE takes a number and touches no memory of ours; neither rustix nor std has it.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, kind) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_is_writable_while_a_writer_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "1").unwrap();
        assert!(!writable(&path));
        assert!(!in_use(&path));
        let reader = File::open(&path).unwrap();
        assert!(!writable(&path) && in_use(&path));
        let writer = OpenOptions::new().append(true).open(&path).unwrap();
        assert!(writable(&path));
        drop(writer);
        assert!(!writable(&path));
        drop(reader);
        assert!(!writable(&dir.path().join("absent")));
    }
}

//! How the kernel reads and writes an open file: through us and its cache, or by itself on a backing file (passthrough).
//!
//! An inode that is open has one mode, and in passthrough one backing file; the kernel refuses (EIO) an open that differs. A name
//! whose file must be served otherwise gets another inode instead: open answers ESTALE, and the kernel looks the name up again.

use super::errno::os;
use crate::error::Result;
use parking_lot::Mutex;
use std::any::Any;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

/// What the door keeps of a backing file that the kernel knows; dropping it makes the kernel forget.
pub(super) type Token = Arc<dyn Any + Send + Sync>;

/// Makes a backing file known to the kernel; nothing if that cannot be.
pub(super) type Register<'a> = &'a dyn Fn(&File) -> Option<Token>;

/// A backing file that the kernel reads and writes by itself.
#[derive(Clone)]
pub(super) struct Through {
    pub(super) token: Token,
    same: (u64, u64),
}

enum Mode {
    Cached,
    Through(Through),
}

/// The modes of the inodes that are open, and by how many handles.
#[derive(Default)]
pub(super) struct Modes(Mutex<HashMap<u64, (Mode, usize)>>);

impl Modes {
    /// One handle more for the inode, whose bytes are in `file` if they are in one at all. The answer is how the kernel does it by
    /// itself, or nothing if it asks us. `register` is called at most once, for the first handle.
    ///
    /// Errors: ESTALE if the inode is open on another backing file.
    pub(super) fn open(
        &self,
        ino: u64,
        file: Option<&File>,
        register: Register<'_>,
    ) -> Result<Option<Through>> {
        let same = file.and_then(|f| f.metadata().ok()).map(|m| (m.dev(), m.ino()));
        let mut modes = self.0.lock();
        let (mode, handles) = modes.entry(ino).or_insert_with(|| {
            let through = file.zip(same).and_then(|(file, same)| {
                let token = register(file)?;
                Some(Mode::Through(Through { token, same }))
            });
            (through.unwrap_or(Mode::Cached), 0)
        });
        let through = match mode {
            Mode::Cached => None,
            Mode::Through(through) if Some(through.same) == same => Some(through.clone()),
            Mode::Through(_) => return Err(os(libc::ESTALE, "open on another file")),
        };
        *handles += 1;
        Ok(through)
    }

    /// One handle less.
    pub(super) fn close(&self, ino: u64) {
        let mut modes = self.0.lock();
        if let Some((_, handles)) = modes.get_mut(&ino) {
            *handles -= 1;
            if *handles == 0 {
                modes.remove(&ino);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_keeps_its_mode_while_it_is_open() {
        let (a, b) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
        let modes = Modes::default();
        let known: Register<'_> = &|_| Some(Arc::new(()));
        let unknown: Register<'_> = &|_| None;
        assert!(modes.open(7, Some(&a), known).unwrap().is_some());
        assert!(
            modes.open(7, Some(&a), unknown).unwrap().is_some(),
            "known already"
        );
        assert_eq!(
            modes.open(7, Some(&b), known).err().unwrap().errno(),
            libc::ESTALE
        );
        assert_eq!(modes.open(7, None, known).err().unwrap().errno(), libc::ESTALE);
        modes.close(7);
        assert!(
            modes.open(7, Some(&b), known).is_err(),
            "one handle is still open"
        );
        modes.close(7);
        assert!(modes.open(7, None, known).unwrap().is_none());
        assert!(
            modes.open(7, Some(&b), known).unwrap().is_none(),
            "the kernel asks us already"
        );
        modes.close(7);
        modes.close(7);
        assert!(modes.open(7, Some(&b), known).unwrap().is_some());
        assert!(modes.open(8, Some(&b), unknown).unwrap().is_none());
    }
}

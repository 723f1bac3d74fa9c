//! Which versions' files are kept whole: those that are read again and again.

use super::manners::stand_back;
use crate::error::{IoContext, Kind, Result};
use crate::store::{FileKey, Home, Store, Whole};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use lru::LruCache;
use parking_lot::Mutex;
use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// A file is kept whole when it is opened once more after being rebuilt so many times over.
const OFTEN: u64 = 2;
/// Files of which it is known how much was read.
const KNOWN: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
/// How often the disk is looked at.
const WATCH: Duration = Duration::from_secs(1);

/// The whole files, seen from the mount.
pub(super) struct Warm {
    store: Store,
    /// Bytes read of each file that is not kept whole.
    read: Mutex<LruCache<FileKey, u64>>,
    /// Files to build, and those asked for already.
    jobs: Sender<FileKey>,
    queue: Receiver<FileKey>,
    asked: Arc<Mutex<HashSet<FileKey>>>,
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Warm {
    pub(super) fn new(store: Store) -> Self {
        let (jobs, queue) = unbounded();
        Warm {
            store,
            read: Mutex::new(LruCache::new(KNOWN)),
            jobs,
            queue,
            asked: Arc::default(),
            stop: Arc::default(),
            thread: Mutex::default(),
        }
    }

    /// Starts the thread that builds files, and gives space back when the disk fills up.
    pub(super) fn start(&self) -> Result<()> {
        let (store, queue, asked, stop) = (
            self.store.clone(),
            self.queue.clone(),
            self.asked.clone(),
            self.stop.clone(),
        );
        let work = move || {
            stand_back();
            while !stop.load(Ordering::Relaxed) {
                match queue.recv_timeout(WATCH) {
                    Ok(key) => {
                        build(&store, &key, &stop);
                        asked.lock().remove(&key);
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                if let Some(whole) = store.whole_files() {
                    whole.yield_space();
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("zspace-whole".into())
            .spawn(work);
        *self.thread.lock() = Some(thread.doing(|| "start thread zspace-whole".into())?);
        Ok(())
    }

    /// The file, if it lies whole in the cache. If it does not, and was read often, it soon will.
    pub(super) fn open(&self, key: &FileKey, home: Option<Home>) -> Option<Whole> {
        let files = self.store.whole_files()?;
        if let Some(whole) = files.get(key, home.as_ref()) {
            return Some(whole);
        }
        let often = || {
            self.read
                .lock()
                .get(key)
                .is_some_and(|n| *n >= key.1.saturating_mul(OFTEN))
        };
        if files.worth(key.1) && (files.has(key) || often()) {
            self.ask(key);
        }
        None
    }

    /// Has the file kept whole as soon as may be.
    pub(super) fn ask(&self, key: &FileKey) {
        if self.asked.lock().insert(*key) {
            // Fails only when the mount ends.
            let _ = self.jobs.send(*key);
        }
    }

    /// So many bytes of the file were read chunk by chunk.
    pub(super) fn read(&self, key: &FileKey, bytes: u64) {
        let mut read = self.read.lock();
        let total = read.get_or_insert_mut(*key, || 0);
        *total = total.saturating_add(bytes);
    }

    /// Ends the thread.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }
}

fn build(store: &Store, key: &FileKey, stop: &AtomicBool) {
    let Some(files) = store.whole_files() else { return };
    let go_on = || !stop.load(Ordering::Relaxed);
    match store
        .file(&key.0, key.1)
        .and_then(|view| files.build(key, &view, &go_on))
    {
        Ok(true) => log::debug!("file {} lies whole in the cache", key.0),
        Ok(false) => log::debug!("file {} does not fit into the cache", key.0),
        Err(e) if e.kind() == Kind::Stopped => {}
        Err(e) => log::warn!("file {} is not kept whole: {e}", key.0),
    }
}

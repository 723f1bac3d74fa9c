//! Worker threads: the event threads parse a request and hand it over, so that one that takes long delays no other.

use crate::error::{IoContext, Result};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that run jobs in order of arrival. Dropping it lets them finish what was handed over.
pub(super) struct Pool {
    name: &'static str,
    send: Sender<Job>,
    receive: Receiver<Job>,
    /// Jobs handed over and not done.
    open: Arc<AtomicUsize>,
    threads: AtomicUsize,
    most: usize,
}

impl Pool {
    /// Starts `threads` threads, to which more are added, `most` in all, when every one is busy. The queue needs no bound of its
    /// own: the kernel limits the requests under way.
    pub(super) fn new(name: &'static str, threads: usize, most: usize) -> Result<Self> {
        let (send, receive) = unbounded::<Job>();
        let pool = Pool {
            name,
            send,
            receive,
            open: Arc::default(),
            threads: AtomicUsize::new(0),
            most,
        };
        for _ in 0..threads {
            pool.grow()?;
        }
        Ok(pool)
    }

    fn grow(&self) -> Result<()> {
        let n = self.threads.fetch_add(1, Ordering::Relaxed);
        let (receive, open) = (self.receive.clone(), self.open.clone());
        let builder = std::thread::Builder::new().name(format!("{}-{n}", self.name));
        let run = move || {
            for job in receive {
                // The reply that the job held is dropped on the way and answers EIO.
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    log::error!("a request failed by a bug in zspace; it was answered with an I/O error");
                }
                open.fetch_sub(1, Ordering::Relaxed);
            }
        };
        builder
            .spawn(run)
            .doing(|| format!("start thread {}-{n}", self.name))?;
        Ok(())
    }

    /// Hands a job over.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let open = self.open.fetch_add(1, Ordering::Relaxed) + 1;
        let threads = self.threads.load(Ordering::Relaxed);
        if open > threads && threads < self.most {
            // Without one more thread the job waits its turn.
            let _ = self.grow();
        }
        // Fails only if every thread is gone, which they are not while the pool lives; the job's reply then answers EIO.
        let _ = self.send.send(Box::new(job));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_panic_ends_one_job_only() {
        let pool = Pool::new("test", 1, 1).unwrap();
        let (send, receive) = mpsc::channel();
        pool.run(|| panic!("for the test"));
        pool.run(move || send.send(7).unwrap());
        assert_eq!(receive.recv().unwrap(), 7);
    }

    #[test]
    fn who_waits_keeps_nobody_else_waiting() {
        let pool = Pool::new("test", 1, 3).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        let (send, receive) = mpsc::channel();
        pool.run(move || drop(wait.recv()));
        pool.run(move || send.send(7).unwrap());
        assert_eq!(receive.recv().unwrap(), 7);
        drop(go);
    }
}

//! Worker threads: the event threads parse a request and hand it over, so that one that takes long delays no other.

use crate::error::{IoContext, Result};
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that run jobs in order of arrival. Dropping it lets them finish what was handed over.
///
/// They sleep at once where there is nothing to do: a queue that spins first (crossbeam's does) takes the processor from the very
/// program that waits for the answer.
pub(super) struct Pool(Arc<Queue>);

#[derive(Default)]
struct Queue {
    /// The jobs, and whether no more will come. It needs no bound of its own: the kernel limits the requests under way.
    jobs: Mutex<(VecDeque<Job>, bool)>,
    wake: Condvar,
}

impl Queue {
    fn next(&self) -> Option<Job> {
        let mut jobs = self.jobs.lock();
        loop {
            match jobs.0.pop_front() {
                None if !jobs.1 => self.wake.wait(&mut jobs),
                next => return next,
            }
        }
    }
}

impl Pool {
    /// Starts `threads` threads.
    pub(super) fn new(name: &str, threads: usize) -> Result<Self> {
        let pool = Pool(Arc::default());
        for i in 0..threads {
            let queue = pool.0.clone();
            let builder = std::thread::Builder::new().name(format!("{name}-{i}"));
            let run = move || {
                while let Some(job) = queue.next() {
                    // The reply that the job held is dropped on the way and answers EIO.
                    if catch_unwind(AssertUnwindSafe(job)).is_err() {
                        log::error!("a request failed by a bug in zspace; it was answered with an I/O error");
                    }
                }
            };
            builder.spawn(run).doing(|| format!("start thread {name}-{i}"))?;
        }
        Ok(pool)
    }

    /// Hands a job over.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        self.0.jobs.lock().0.push_back(Box::new(job));
        self.0.wake.notify_one();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.0.jobs.lock().1 = true;
        self.0.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn a_panic_ends_one_job_only() {
        let pool = Pool::new("test", 1).unwrap();
        let (send, receive) = mpsc::channel();
        pool.run(|| panic!("for the test"));
        pool.run(move || send.send(7).unwrap());
        assert_eq!(receive.recv().unwrap(), 7);
    }
}

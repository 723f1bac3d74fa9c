//! Worker threads: the event threads parse a request and hand it over, so that one that takes long delays no other.

use crate::error::{IoContext, Result};
use crossbeam_channel::{Sender, unbounded};
use std::panic::{AssertUnwindSafe, catch_unwind};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that run jobs in order of arrival. Dropping it lets them finish what was handed over.
pub(super) struct Pool(Sender<Job>);

impl Pool {
    /// Starts `threads` threads. The queue needs no bound of its own: the kernel limits the requests under way.
    pub(super) fn new(name: &str, threads: usize) -> Result<Self> {
        let (send, receive) = unbounded::<Job>();
        for i in 0..threads {
            let receive = receive.clone();
            let builder = std::thread::Builder::new().name(format!("{name}-{i}"));
            let run = move || {
                for job in receive {
                    // The reply that the job held is dropped on the way and answers EIO.
                    if catch_unwind(AssertUnwindSafe(job)).is_err() {
                        log::error!("a request failed by a bug in zspace; it was answered with an I/O error");
                    }
                }
            };
            builder.spawn(run).doing(|| format!("start thread {name}-{i}"))?;
        }
        Ok(Pool(send))
    }

    /// Hands a job over.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        // Fails only if every thread is gone, which they are not while the pool lives; the job's reply then answers EIO.
        let _ = self.0.send(Box::new(job));
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

//! Worker threads: the event threads parse a request and hand it over, so that one that takes long delays no other.

use crate::error::{IoContext, Result};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that run jobs in order of arrival. Dropping it lets them finish what was handed over.
pub(super) struct Pool(Arc<Queue>);

/// Jobs that wait. No channel: its receivers yield the processor several times before they sleep, which for requests of some
/// microseconds each costs more than the requests.
#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    /// Threads that sleep and that nobody has woken yet.
    idle: usize,
    closed: bool,
}

impl Queue {
    // Nothing that panics runs under the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, job: Job) {
        let mut state = self.lock();
        state.jobs.push_back(job);
        let sleeper = state.idle > 0;
        state.idle -= usize::from(sleeper);
        // Before it is told, as whoever is woken needs the lock.
        drop(state);
        if sleeper {
            self.wake.notify_one();
        }
    }

    /// The next job; none once the queue is closed and empty.
    fn receive(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            state.idle += 1;
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Pool {
    /// Starts `threads` threads. The queue needs no bound of its own: the kernel limits the requests under way.
    pub(super) fn new(name: &str, threads: usize) -> Result<Self> {
        let pool = Pool(Arc::default());
        for i in 0..threads {
            let queue = pool.0.clone();
            let builder = std::thread::Builder::new().name(format!("{name}-{i}"));
            let run = move || {
                while let Some(job) = queue.receive() {
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
        self.0.send(Box::new(job));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.0.lock().closed = true;
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

    #[test]
    fn every_job_is_run_also_those_that_wait_when_the_pool_ends() {
        let (send, receive) = mpsc::channel();
        let pool = Pool::new("test", 3).unwrap();
        for round in 0..200 {
            // Pauses of all lengths between jobs, so that threads are found asleep, about to sleep, and at work.
            std::thread::sleep(std::time::Duration::from_micros(round % 7 * 20));
            for _ in 0..round % 5 {
                let send = send.clone();
                pool.run(move || send.send(()).unwrap());
            }
        }
        drop((pool, send));
        // Ends only once every thread has dropped what it had.
        assert_eq!(receive.iter().count(), 400);
    }
}

//! Worker threads: the event threads parse a request and hand it over, so that one that takes long delays no other.

use crate::error::{IoContext, Result};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that run jobs in order of arrival. Dropping it lets them finish what was handed over.
pub(super) struct Pool {
    name: &'static str,
    queue: Arc<Queue>,
    /// Threads at most.
    most: usize,
}

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
    threads: usize,
    closed: bool,
}

impl Queue {
    // Nothing that panics runs under the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The answer is how many threads there are, if each of them has something to do.
    fn send(&self, job: Job) -> Option<usize> {
        let mut state = self.lock();
        state.jobs.push_back(job);
        let sleeper = state.idle > 0;
        let threads = state.threads;
        state.idle -= usize::from(sleeper);
        // Before it is told, as whoever is woken needs the lock.
        drop(state);
        if sleeper {
            self.wake.notify_one();
        }
        (!sleeper).then_some(threads)
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
    /// Starts `threads` threads, to which more are added, `most` in all, when every one is busy. The queue needs no bound of its
    /// own: the kernel limits the requests under way.
    pub(super) fn new(name: &'static str, threads: usize, most: usize) -> Result<Self> {
        let queue = Arc::default();
        let pool = Pool { name, queue, most };
        for _ in 0..threads {
            pool.grow()?;
        }
        Ok(pool)
    }

    fn grow(&self) -> Result<()> {
        let queue = self.queue.clone();
        let run = move || {
            while let Some(job) = queue.receive() {
                // The reply that the job held is dropped on the way and answers EIO.
                if catch_unwind(AssertUnwindSafe(job)).is_err() {
                    log::error!("a request failed by a bug in zspace; it was answered with an I/O error");
                }
            }
        };
        let thread = std::thread::Builder::new().name(self.name.to_owned()).spawn(run);
        thread.doing(|| format!("start thread {}", self.name))?;
        self.queue.lock().threads += 1;
        Ok(())
    }

    /// Hands a job over.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let busy = self.queue.send(Box::new(job));
        if busy.is_some_and(|threads| threads < self.most) {
            // Without one more thread the job waits its turn.
            let _ = self.grow();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.wake.notify_all();
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
    fn every_job_is_run_also_those_that_wait_when_the_pool_ends() {
        let (send, receive) = mpsc::channel();
        let pool = Pool::new("test", 1, 3).unwrap();
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

    #[test]
    fn who_waits_keeps_nobody_else_waiting() {
        let pool = Pool::new("test", 1, 3).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        let (send, receive) = mpsc::channel();
        pool.run(move || {
            let _ = wait.recv();
        });
        pool.run(move || send.send(7).unwrap());
        assert_eq!(receive.recv().unwrap(), 7);
        drop(go);
    }
}

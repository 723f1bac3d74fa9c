//! A small pool of threads that rebuild chunks before they are asked for.

use crossbeam_channel::{Sender, bounded};

/// Threads with a short queue: work that finds it full is dropped, for whoever needs the chunk rebuilds it then.
pub(super) struct Pool(Sender<Box<dyn FnOnce() + Send>>);

impl Pool {
    pub(super) fn new(threads: usize) -> Self {
        let (send, receive) = bounded::<Box<dyn FnOnce() + Send>>(threads.max(1) * 16);
        for i in 0..threads.max(1) {
            let receive = receive.clone();
            let spawned = std::thread::Builder::new()
                .name(format!("ahead-{i}"))
                .spawn(move || {
                    for work in receive {
                        // A failure shows again, with its reason, to whoever reads the chunk.
                        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
                    }
                });
            if let Err(e) = spawned {
                log::warn!("cannot start a read-ahead thread: {e}");
            }
        }
        Pool(send)
    }

    pub(super) fn try_run(&self, work: Box<dyn FnOnce() + Send>) -> bool {
        self.0.try_send(work).is_ok()
    }
}

//! A small pool of threads that rebuild chunks before they are asked for.

use super::{NodeSource, Rebuilder};
use crate::id::{NodeId, WORTH_TOGETHER};
use crossbeam_channel::{Receiver, Sender, bounded};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Chunks that a thread takes at once, if there are as many: hashed together they cost a third.
const BATCH: usize = 24;
/// Chunks that may wait their turn.
const QUEUE: usize = 512;

/// A chunk to rebuild.
pub(super) struct Ahead {
    pub(super) rebuilder: Arc<Rebuilder>,
    pub(super) source: Arc<dyn NodeSource>,
    pub(super) id: NodeId,
}

/// Threads with a queue: what finds it full is dropped, for whoever needs the chunk rebuilds it then.
pub(super) struct Pool {
    queue: Sender<Ahead>,
    pub(super) threads: usize,
}

impl Pool {
    pub(super) fn new(threads: usize) -> Self {
        let threads = threads.max(1);
        let (send, receive) = bounded::<Ahead>(QUEUE);
        for i in 0..threads {
            let receive = receive.clone();
            let spawned = std::thread::Builder::new()
                .name(format!("ahead-{i}"))
                .spawn(move || work(&receive, threads));
            if let Err(e) = spawned {
                log::warn!("cannot start a read-ahead thread: {e}");
            }
        }
        Pool { queue: send, threads }
    }

    pub(super) fn try_run(&self, chunk: Ahead) -> bool {
        self.queue.try_send(chunk).is_ok()
    }
}

fn work(queue: &Receiver<Ahead>, threads: usize) {
    while let Ok(first) = queue.recv() {
        // The other threads get their share. Of a few, each is wanted soon, and together they would be no faster.
        let more = match (queue.len() / threads).min(BATCH - 1) {
            few if few < WORTH_TOGETHER => 0,
            more => more,
        };
        let rebuilder = first.rebuilder.clone();
        let batch: Vec<Ahead> = std::iter::once(first)
            .chain(queue.try_iter().take(more))
            .collect();
        // A failure shows again, with its reason, to whoever reads the chunk.
        let _ = catch_unwind(AssertUnwindSafe(|| rebuilder.rebuild_ahead(&batch)));
    }
}

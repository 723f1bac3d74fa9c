//! Clients that are killed, or get Ctrl-C, while they wait for an answer.
//!
//! Once the kernel has handed a request over, its client can do nothing but wait, not even die: the kernel asks with FUSE_INTERRUPT,
//! which fuser does not pass on. What may take long is therefore answered through a [`Held`] reply: if the client is found to be
//! on its way out, it is answered EINTR at once, and the work, which goes on, learns that nobody waits any more.

use crate::error::{IoContext, Result};
use fuser::{Errno, ReplyAttr, ReplyCreate, ReplyEmpty, ReplyEntry, ReplyOpen};
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often clients are looked at, and how long they wait before they are.
const LOOK: Duration = Duration::from_millis(50);

/// A reply that can say that the request was interrupted.
pub(super) trait Interrupt: Send + 'static {
    /// Answers EINTR.
    fn interrupt(self);
}

macro_rules! interrupt {
    ($($reply:ty),*) => {$(
        impl Interrupt for $reply {
            fn interrupt(self) {
                self.error(Errno::EINTR);
            }
        }
    )*};
}
interrupt!(ReplyAttr, ReplyCreate, ReplyEmpty, ReplyEntry, ReplyOpen);

type Slot<R> = Arc<Mutex<Option<R>>>;

struct Client {
    thread: u32,
    since: Instant,
    interrupt: Box<dyn Fn() + Send>,
}

#[derive(Default)]
struct Clients {
    next: u64,
    waiting: HashMap<u64, Client>,
    ended: bool,
}

#[derive(Default)]
struct Shared {
    clients: Mutex<Clients>,
    some: Condvar,
}

/// Looks after the clients that wait.
pub(super) struct Watch(Arc<Shared>);

impl Watch {
    /// Starts the thread that looks.
    pub(super) fn new() -> Result<Self> {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        std::thread::Builder::new()
            .name("zspace-killed".into())
            .spawn(move || theirs.look())
            .doing(|| "start thread zspace-killed".into())?;
        Ok(Watch(shared))
    }

    /// Holds the reply to a request of this thread until [`Held::take`].
    pub(super) fn hold<R: Interrupt>(&self, thread: u32, reply: R) -> Held<R> {
        let slot: Slot<R> = Arc::new(Mutex::new(Some(reply)));
        let weak: Weak<_> = Arc::downgrade(&slot);
        let interrupt = move || {
            if let Some(reply) = weak.upgrade().and_then(|slot| slot.lock().take()) {
                reply.interrupt();
            }
        };
        let mut clients = self.0.clients.lock();
        clients.next += 1;
        let id = clients.next;
        let client = Client {
            thread,
            since: Instant::now(),
            interrupt: Box::new(interrupt),
        };
        clients.waiting.insert(id, client);
        if clients.waiting.len() == 1 {
            self.0.some.notify_one();
        }
        Held {
            slot,
            id,
            shared: self.0.clone(),
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.clients.lock().ended = true;
        self.0.some.notify_one();
    }
}

impl Shared {
    fn look(&self) {
        let mut clients = self.clients.lock();
        while !clients.ended {
            if clients.waiting.is_empty() {
                self.some.wait(&mut clients);
                continue;
            }
            self.some.wait_for(&mut clients, LOOK);
            let now = Instant::now();
            let long = |c: &&Client| c.thread != 0 && now.duration_since(c.since) >= LOOK;
            for client in clients.waiting.values().filter(long) {
                if leaves(client.thread) {
                    (client.interrupt)();
                }
            }
        }
    }
}

/// A reply that waits for its answer.
pub(super) struct Held<R> {
    slot: Slot<R>,
    id: u64,
    shared: Arc<Shared>,
}

impl<R> Held<R> {
    /// Does something with the reply, unless its client is gone.
    pub(super) fn with<T>(&self, work: impl FnOnce(&R) -> T) -> Option<T> {
        self.slot.lock().as_ref().map(work)
    }

    /// The reply; none if its client is gone and was answered.
    pub(super) fn take(self) -> Option<R> {
        self.slot.lock().take()
    }
}

impl<R> Drop for Held<R> {
    fn drop(&mut self) {
        self.shared.clients.lock().waiting.remove(&self.id);
    }
}

/// Whether a thread has a signal that ends it or interrupts what its user waits for. What cannot be looked at (another user's
/// process where /proc hides those) goes on waiting.
fn leaves(thread: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{thread}/status")).is_ok_and(|status| interrupted(&status))
}

/// Whether SIGKILL is pending, which any signal that ends a process becomes, or a SIGINT that is not held back (a program that
/// handles it is told once its system call is over).
fn interrupted(status: &str) -> bool {
    let field = |name: &str| {
        let value = status.lines().find_map(|l| l.strip_prefix(name))?;
        u64::from_str_radix(value.trim(), 16).ok()
    };
    let pending = field("SigPnd:").unwrap_or(0) | field("ShdPnd:").unwrap_or(0);
    let bit = |signal: i32| 1u64 << (signal - 1);
    let held_back = field("SigBlk:").unwrap_or(0);
    pending & bit(libc::SIGKILL) != 0 || pending & !held_back & bit(libc::SIGINT) != 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::process::Signal;
    use std::io::Read;
    use std::process::{Command, Stdio};
    use std::sync::mpsc::{Sender, channel};

    struct Told(Sender<&'static str>);

    impl Interrupt for Told {
        fn interrupt(self) {
            self.0.send("interrupted").unwrap();
        }
    }

    #[test]
    fn who_is_interrupted_is_answered_and_who_waits_is_not() {
        let watch = Watch::new().unwrap();
        // A signal that a program handles stays pending while it is stopped. (A shell cannot handle one that is ignored from
        // outside, as it is for whatever runs in the background.)
        let mut child = Command::new("env")
            .args(["--default-signal=INT", "sh", "-c", "trap : INT; echo go; read x"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut go = [0; 3];
        child.stdout.as_mut().unwrap().read_exact(&mut go).unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let kill = |signal| rustix::process::kill_process(pid, signal).unwrap();
        kill(Signal::STOP);
        let (send, receive) = channel();
        let held = watch.hold(child.id(), Told(send.clone()));
        let other = watch.hold(std::process::id(), Told(send));
        assert!(receive.recv_timeout(LOOK * 4).is_err());
        kill(Signal::INT);
        assert_eq!(receive.recv_timeout(Duration::from_secs(20)), Ok("interrupted"));
        assert!(held.take().is_none());
        assert!(other.take().is_some());
        assert!(watch.0.clients.lock().waiting.is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn signals_that_count() {
        let status = |own: u64, shared: u64, blocked: u64| {
            format!(
                "Name:\tx\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\nSigIgn:\t0\n"
            )
        };
        assert!(!interrupted(&status(0, 0, 0)));
        assert!(interrupted(&status(0x100, 0, 0)));
        assert!(interrupted(&status(0, 0x100, 0)));
        assert!(interrupted(&status(0, 2, 0)));
        assert!(!interrupted(&status(0, 2, 2)), "held back");
        assert!(
            !interrupted(&status(0x2000, 0x10000, 0)),
            "an alarm, a child that ended"
        );
    }
}

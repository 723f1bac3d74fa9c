//! The processes that change entries, and whether one of them was killed or failed: what it left may be half of what it meant to
//! write.

use super::torn::{ended_badly, its_writer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::cell::Cell;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

/// Threads whose process is remembered.
const KNOWN: usize = 256;

thread_local! {
    /// The thread of a client for whom this one works.
    static CLIENT: Cell<u32> = const { Cell::new(0) };
}

/// Works for a client: what changes meanwhile is its doing.
pub(crate) fn for_client<T>(thread: u32, work: impl FnOnce() -> T) -> T {
    CLIENT.set(thread);
    let done = work();
    CLIENT.set(0);
    done
}

/// A process, which keeps its identity after its end.
#[derive(Debug)]
pub(super) struct Process {
    /// Its number.
    pub id: u32,
    name: String,
    /// Nothing if it was gone before we could look.
    fd: Option<OwnedFd>,
}

impl Process {
    fn of_thread(thread: u32) -> Option<Process> {
        let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
        let field = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
        let id: u32 = field("Tgid:")?.parse().ok()?;
        let fd = pidfd_open(Pid::from_raw(i32::try_from(id).ok()?)?, PidfdFlags::empty()).ok()?;
        Some(Process {
            id,
            name: field("Name:")?.to_owned(),
            fd: Some(fd),
        })
    }

    /// What is left of a process that asked for something and was gone when we got to it: it was killed as it waited. Nothing if the
    /// thread is there and only cannot be looked at.
    fn gone(thread: u32) -> Option<Process> {
        let id = Pid::from_raw(i32::try_from(thread).ok()?)?;
        let gone = rustix::process::test_kill_process(id) == Err(rustix::io::Errno::SRCH);
        gone.then(|| Process {
            id: thread,
            name: "unknown".to_owned(),
            fd: None,
        })
    }

    /// Whether it has ended, whoever has been told of that.
    fn ended(&self) -> bool {
        let Some(fd) = &self.fd else { return true };
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|n| n > 0)
    }

    /// Why what it left may be incomplete: a signal ended it, or it ended with an error.
    pub(super) fn failed(&self) -> Option<String> {
        let status = if self.ended() { self.status()? } else { return None };
        Some(its_writer(&self.name, self.id, &ended_badly(status)?))
    }

    /// Whether it is a program that takes up what one of its kind left, and leaves alone what is finished: it is done when it says so.
    pub(super) fn resumes(&self) -> bool {
        self.name == "rsync"
    }

    /// How begins what is said of those of its kind that failed.
    pub(super) fn told(&self) -> String {
        format!("its writer ({}, process ", self.name)
    }

    /// Whether it ended, and without an error.
    pub(super) fn ended_well(&self) -> bool {
        self.ended() && self.status() == Some(0)
    }

    /// Its exit status as wait(2) tells it.
    fn status(&self) -> Option<i32> {
        let Some(fd) = &self.fd else {
            return Some(libc::SIGKILL);
        };
        let mut info = PidfdInfo {
            mask: INFO_EXIT,
            ..PidfdInfo::default()
        };
        // SAFETY: the kernel writes at most the bytes whose number is part of the request's number, which are those of `info`.
        let done = unsafe { libc::ioctl(fd.as_raw_fd(), GET_INFO, &mut info) };
        if done == 0 && info.mask & INFO_EXIT != 0 {
            return Some(info.exit_code);
        }
        // Nobody has waited for it yet, or the kernel is older than Linux 6.15.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.id)).ok()?;
        let (_, tail) = stat.rsplit_once(')')?;
        let mut fields = tail.split_ascii_whitespace();
        match fields.next()? {
            "Z" | "X" => fields.nth(52 - 4)?.parse().ok(),
            _ => None,
        }
    }
}

/// pidfd_info of linux/pidfd.h, as it was first.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    ids: [u32; 11],
    exit_code: i32,
}

const INFO_EXIT: u64 = 1 << 3;
/// _IOWR(0xff, 11, struct pidfd_info)
const GET_INFO: libc::Ioctl = (3 << 30 | (size_of::<PidfdInfo>() << 16) | 0xff << 8 | 11) as libc::Ioctl;

/// Processes by the threads of theirs that asked for something.
#[derive(Debug, Default)]
pub(super) struct Processes(HashMap<u32, Arc<Process>>);

impl Processes {
    /// The process for which this thread works, if it works for one.
    pub(super) fn client(&mut self) -> Option<Arc<Process>> {
        let thread = Some(CLIENT.get()).filter(|t| *t != 0)?;
        let known = self.0.get(&thread);
        if let Some(known) = known.filter(|p| !p.ended()) {
            return Some(known.clone());
        }
        let new = match (Process::of_thread(thread), known) {
            (Some(new), _) => Arc::new(new),
            // It was killed while it waited for this, and somebody has waited for it since.
            (None, Some(known)) => return Some(known.clone()),
            (None, None) => Arc::new(Process::gone(thread)?),
        };
        if self.0.len() >= KNOWN {
            self.0.clear();
        }
        self.0.insert(thread, new.clone());
        Some(new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::process::{Child, Command, Stdio};

    /// A shell that has said that it runs: until it has, it may still bear the name of the thread that started it.
    fn child(script: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("echo; {script}")]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut said = [0];
        child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
        child
    }

    #[test]
    fn who_was_killed_is_told_from_who_ended() {
        let mut processes = Processes::default();
        let mut killed = child("read x; true");
        let mut failed = child("read x; exit 9");
        let of = |c: &Child, p: &mut Processes| for_client(c.id(), || p.client()).unwrap();
        let first = of(&killed, &mut processes);
        assert!(Arc::ptr_eq(&first, &of(&killed, &mut processes)));
        assert_eq!(first.failed(), None, "it runs");
        let second = Process::of_thread(failed.id());
        killed.kill().unwrap();
        while !first.ended() {
            std::thread::yield_now();
        }
        let zombie = first.failed();
        killed.wait().unwrap();
        drop(failed.stdin.take());
        failed.wait().unwrap();
        assert!(
            zombie.is_some_and(|why| why.contains("(sh")),
            "before anybody waited for it"
        );
        assert!(second.is_some_and(|p| p.failed().is_some_and(|why| why.contains("exit status 9"))));
        assert!(processes.client().is_none(), "nobody asked");
        // Who was killed while it waited is still the one who asked, known or not.
        assert!(Arc::ptr_eq(&first, &of(&killed, &mut processes)));
        let unknown = of(&killed, &mut Processes::default());
        assert!(unknown.failed().is_some_and(|why| why.contains("was killed")));
    }
}

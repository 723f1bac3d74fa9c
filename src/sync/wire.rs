//! Ways to a peer: pipes and sockets, read and written with deadlines.

use super::link::Wire;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::OFlags;
use std::io;
use std::time::Instant;

/// A descriptor to read and one to write, which may be the same socket.
pub struct Pipe {
    input: OwnedFd,
    output: OwnedFd,
}

impl Pipe {
    /// Takes both descriptors, which will not block any more.
    ///
    /// # Errors
    /// What the system reports.
    pub fn new(input: OwnedFd, output: OwnedFd) -> io::Result<Self> {
        for fd in [&input, &output] {
            let flags = rustix::fs::fcntl_getfl(fd)?;
            rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
        }
        Ok(Pipe { input, output })
    }

    /// A socket, both ways.
    ///
    /// # Errors
    /// What the system reports.
    pub fn socket(socket: OwnedFd) -> io::Result<Self> {
        let output = socket.try_clone()?;
        Self::new(socket, output)
    }
}

/// Waits until something can be done with a descriptor.
fn wait(fd: BorrowedFd<'_>, what: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::from_borrowed_fd(fd, what)], Some(&left)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(e) => return Err(e.into()),
        }
    }
}

impl Wire for Pipe {
    fn read(&mut self, buf: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            match rustix::io::read(&self.input, &mut *buf) {
                Err(rustix::io::Errno::AGAIN) => wait(self.input.as_fd(), PollFlags::IN, deadline)?,
                Err(rustix::io::Errno::INTR) => {}
                done => return Ok(done?),
            }
        }
    }

    fn write(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<usize> {
        loop {
            match rustix::io::write(&self.output, bytes) {
                Err(rustix::io::Errno::AGAIN) => wait(self.output.as_fd(), PollFlags::OUT, deadline)?,
                Err(rustix::io::Errno::INTR) => {}
                done => return Ok(done?),
            }
        }
    }
}

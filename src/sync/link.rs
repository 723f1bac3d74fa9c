//! Frames over a pair of byte streams, with limits and deadlines (PROTOCOL.md, "Frames").

use super::stop::Stop;
use crate::error::{Error, Interrupt, Kind, Result};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// The most bytes of a frame, its type included, its length not.
pub const MAX_FRAME: usize = 1 << 20;
/// How long a peer is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// A frame that began must be whole within this, …
    pub frame: Duration,
    /// … and the next must begin, or somebody take what was sent, within this.
    pub idle: Duration,
    /// The first frame must be whole within this.
    pub hello: Duration,
    /// Who sends fewer bytes a second, while they are waited for, is given up; 0 for nobody.
    pub slowest: u64,
    /// Who works on something that is waited for here says so this often.
    pub still: Duration,
}

/// The type of the frame that says so; there is nothing in it.
pub(super) const STILL: u8 = 0x02;
/// Who says so is waited for this many times as long as who is silent.
const AT_WORK: u32 = 30;
/// How long somebody must have been waited for before they are called slow.
const SLOW: Duration = Duration::from_secs(20);

impl Default for Patience {
    fn default() -> Self {
        Patience {
            frame: Duration::from_secs(120),
            idle: Duration::from_secs(600),
            hello: Duration::from_secs(120),
            slowest: 0,
            still: Duration::from_secs(2),
        }
    }
}

/// How often it is asked whether to stop, while a peer is waited for.
const TICK: Duration = Duration::from_millis(200);

/// Bytes read or collected at once.
const BUFFER: usize = 256 << 10;

/// A way to a peer and back.
pub trait Wire: Send {
    /// Reads some bytes; none if the peer has closed its side. `TimedOut` at the deadline.
    fn read(&mut self, buf: &mut [u8], deadline: Instant) -> io::Result<usize>;
    /// Writes some bytes. `TimedOut` at the deadline.
    fn write(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<usize>;
}

/// Frames to and from a peer.
pub struct Link {
    wire: Box<dyn Wire>,
    patience: Patience,
    input: Vec<u8>,
    /// Of `input`, what was not taken yet.
    rest: std::ops::Range<usize>,
    output: Vec<u8>,
    sent: u64,
    received: u64,
    turns: u64,
    asking: bool,
    /// Why nothing more can be sent. What the peer said before may say more.
    gone: Option<Error>,
    /// For so long something was waited for lately, and so much came.
    waited: (Duration, u64),
    stop: Stop,
    waiting: Waiting,
    greeted: bool,
}

/// Since when a link waits for the peer to begin with something, for others to see.
#[derive(Clone)]
pub(super) struct Waiting {
    began: Instant,
    /// Milliseconds after that, and one; 0 if it does not wait.
    since: Arc<AtomicU64>,
}

impl Waiting {
    /// What waits for so long already.
    #[cfg(test)]
    pub(super) fn of(time: Duration) -> Self {
        Waiting {
            began: Instant::now() - time,
            since: Arc::new(AtomicU64::new(1)),
        }
    }

    fn set(&self, waits: bool) {
        let now = self.began.elapsed().as_millis() as u64 + 1;
        self.since.store(if waits { now } else { 0 }, Relaxed);
    }

    /// For how long it waits by now; nothing if it does not.
    pub(super) fn time(&self) -> Option<Duration> {
        let since = self.since.load(Relaxed).checked_sub(1)?;
        self.began.elapsed().checked_sub(Duration::from_millis(since))
    }
}

/// A frame: its type and what is in it.
pub type Frame = (u8, Vec<u8>);

impl Link {
    /// Frames over a wire, until it is to stop.
    pub fn new(wire: Box<dyn Wire>, patience: Patience, stop: Stop) -> Self {
        Link {
            wire,
            patience,
            input: vec![0; BUFFER],
            rest: 0..0,
            output: Vec::new(),
            sent: 0,
            received: 0,
            turns: 0,
            asking: false,
            gone: None,
            waited: (Duration::ZERO, 0),
            stop,
            greeted: false,
            waiting: Waiting {
                began: Instant::now(),
                since: Arc::default(),
            },
        }
    }

    /// The peer has said hello.
    pub(super) fn greeted(&mut self) {
        self.greeted = true;
    }

    /// Whether the peer has said hello.
    pub(super) fn is_greeted(&self) -> bool {
        self.greeted
    }

    /// Since when it waits for the peer, for other threads to see.
    pub(super) fn waiting(&self) -> Waiting {
        self.waiting.clone()
    }

    /// Bytes sent so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Bytes received so far.
    pub fn received(&self) -> u64 {
        self.received
    }

    /// How often something was awaited after something was sent: what a slow way costs.
    pub fn rounds(&self) -> u64 {
        self.turns
    }

    /// Puts a frame behind those that are to be sent.
    ///
    /// # Errors
    /// `Limit` if it is too large; what the wire reports.
    pub fn put(&mut self, kind: u8, body: &[&[u8]]) -> Result<()> {
        let len = 1 + body.iter().map(|b| b.len()).sum::<usize>();
        if len > MAX_FRAME {
            let why = format!("a frame of {len} bytes: at most {MAX_FRAME} are allowed");
            return Err(Error::new(Kind::Limit, why));
        }
        self.output.extend_from_slice(&(len as u32).to_le_bytes());
        self.output.push(kind);
        body.iter().for_each(|b| self.output.extend_from_slice(b));
        match self.output.len() >= BUFFER {
            true => self.flush(),
            false => Ok(()),
        }
    }

    /// Sends all that was put. To a peer that hung up nothing is sent: that is told once all that it said has been heard.
    ///
    /// # Errors
    /// What the wire reports.
    pub fn flush(&mut self) -> Result<()> {
        let mut from = 0;
        while let Some(rest) = self
            .output
            .get(from..)
            .filter(|r| !r.is_empty() && self.gone.is_none())
        {
            let deadline = Instant::now() + self.patience.idle;
            match sliced(&self.stop, deadline, |slice| self.wire.write(rest, slice))? {
                Ok(0) => return Err(lost("send to", io::ErrorKind::WriteZero.into())),
                Ok(n) => {
                    from += n;
                    self.sent += n as u64;
                    self.asking = true;
                }
                Err(e) if hung_up(&e) => self.gone = Some(lost("send to", e)),
                Err(e) => return Err(lost("send to", e)),
            }
        }
        self.output.clear();
        Ok(())
    }

    /// The next frame; nothing if the peer closed its side between two. That the peer is still at work is passed over.
    ///
    /// # Errors
    /// `Io` if the peer is gone or too slow; damage if what it sent is no frame.
    pub(super) fn next(&mut self) -> Result<Option<Frame>> {
        let start = Instant::now();
        loop {
            let frame = self.next_of_all()?;
            if frame
                .as_ref()
                .is_none_or(|(kind, body)| *kind != STILL || !body.is_empty())
            {
                return Ok(frame);
            }
            if start.elapsed() > self.patience.idle.saturating_mul(AT_WORK) {
                return Err(Error::new(Kind::Io, "the peer has been at work for too long"));
            }
            // Who works is not slow.
            self.waited = Default::default();
        }
    }

    /// Does what may take long and is waited for at the other side, which is told so from time to time. The work is to ask whether to
    /// stop.
    pub(super) fn while_busy<T>(&mut self, work: impl FnOnce(Interrupt<'_>) -> Result<T>) -> Result<T> {
        let stop = self.stop.clone();
        let (done, ended) = std::sync::mpsc::channel::<()>();
        let every = self.patience.still;
        std::thread::scope(|scope| {
            let tell = move || {
                while ended.recv_timeout(every) == Err(RecvTimeoutError::Timeout) {
                    // If the peer is gone, that shows with the next frame.
                    if self.put(STILL, &[]).and_then(|()| self.flush()).is_err() {
                        return;
                    }
                }
            };
            // Without the thread the work is as good.
            let _ = std::thread::Builder::new().spawn_scoped(scope, tell);
            // Dropped when the work ends, however it does: the thread ends then.
            let _done = done;
            work(&|| stop.check())
        })
    }

    fn next_of_all(&mut self) -> Result<Option<Frame>> {
        self.flush()?;
        if self.rest.is_empty() {
            if std::mem::take(&mut self.asking) {
                self.turns += 1;
            }
            // Who just came has something to say.
            let patience = match self.received {
                0 => self.patience.hello,
                _ => self.patience.idle,
            };
            self.waiting.set(true);
            let more = self.fill(Instant::now() + patience);
            self.waiting.set(false);
            if !more? {
                return self.gone.take().map_or(Ok(None), Err);
            }
        }
        let deadline = Instant::now() + self.patience.frame;
        let mut head = [0; 5];
        self.take(&mut head, deadline)?;
        let [a, b, c, d, kind] = head;
        let len = u32::from_le_bytes([a, b, c, d]) as usize;
        if !(1..=MAX_FRAME).contains(&len) {
            let why = format!("the peer sent a frame of {len} bytes: 1 to {MAX_FRAME} are allowed");
            return Err(Error::damage(why));
        }
        let mut body = vec![0; len - 1];
        self.take(&mut body, deadline)?;
        Ok(Some((kind, body)))
    }

    /// Fills a slice with the next bytes.
    fn take(&mut self, to: &mut [u8], deadline: Instant) -> Result<()> {
        let mut at = 0;
        while at < to.len() {
            if self.rest.is_empty() && !self.fill(deadline)? {
                return Err(Error::new(Kind::Io, "the peer hung up in the middle of a frame"));
            }
            let n = self.rest.len().min(to.len() - at);
            let from = self.rest.start;
            to[at..at + n].copy_from_slice(&self.input[from..from + n]);
            self.rest.start += n;
            at += n;
        }
        Ok(())
    }

    /// Reads more; false at the end.
    fn fill(&mut self, deadline: Instant) -> Result<bool> {
        let start = Instant::now();
        self.stop.check()?;
        let (wire, input) = (&mut self.wire, &mut self.input);
        let n = sliced(&self.stop, deadline, |slice| wire.read(input, slice))?;
        let n = n.map_err(|e| lost("hear from", e))?;
        self.waited.0 += start.elapsed();
        self.waited.1 += n as u64;
        if self.waited.0 >= SLOW {
            let (time, bytes) = std::mem::take(&mut self.waited);
            if (bytes as f64) < self.patience.slowest as f64 * time.as_secs_f64() {
                let why = format!("the peer is slow: {bytes} bytes in {} seconds", time.as_secs());
                return Err(Error::new(Kind::Io, why));
            }
        }
        self.rest = 0..n.min(BUFFER);
        self.received += n as u64;
        Ok(n > 0)
    }
}

/// Waits for something until a deadline, or until it is to stop.
fn sliced<T>(
    stop: &Stop,
    deadline: Instant,
    mut step: impl FnMut(Instant) -> io::Result<T>,
) -> Result<io::Result<T>> {
    loop {
        match step(deadline.min(Instant::now() + TICK)) {
            Err(e) if e.kind() == io::ErrorKind::TimedOut && Instant::now() < deadline => stop.check()?,
            done => return Ok(done),
        }
    }
}

fn hung_up(e: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
    matches!(e.kind(), ConnectionReset | BrokenPipe | ConnectionAborted)
}

fn lost(what: &str, e: io::Error) -> Error {
    match e.kind() {
        io::ErrorKind::TimedOut => {
            Error::new(Kind::Io, format!("{what} the peer: it was silent for too long"))
        }
        _ if hung_up(&e) => Error::new(Kind::Io, format!("the peer hung up: {e}")),
        // Without its errno: a broken pipe here is not that of who reads what we print.
        _ => Error::new(Kind::Io, format!("{what} the peer: {e}")),
    }
}

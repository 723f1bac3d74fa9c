//! Serves many peers at once, on sockets.

use super::address::loopback;
use super::address::resolve;
use super::link::{Link, Patience, Waiting, Wire};
use super::serve::{Allowed, refuse, serve};
use super::stop::Stop;
use super::tls::{self, Identity};
use super::wire::Pipe;
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::Store;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use std::collections::HashMap;
use std::net::{TcpListener, ToSocketAddrs};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Who connected must have said hello within this.
const HELLO: Duration = Duration::from_secs(20);
/// How often it is asked whether to stop.
const TICK: Duration = Duration::from_millis(200);
/// Who has said nothing for so long gives their place to others.
const YIELDS: Duration = Duration::from_secs(10);
/// So many complaints are logged in so much time.
const COMPLAINTS: (u64, Duration) = (20, Duration::from_secs(10));
/// So many are told at once that there is no place for them.
const REFUSED: u64 = 16;

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// On a Unix socket, which only this user can connect to.
    Unix(PathBuf),
    /// On a port of this machine, for this machine.
    Tcp(String),
    /// On a port, with TLS.
    Tls(String),
}

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// What peers may do.
    pub allowed: Allowed,
    /// The most peers at once; others are told that it is busy.
    pub peers: usize,
    /// Where `cert.pem`, `key.pem` and `peers.pem` are.
    pub tls: Option<PathBuf>,
    /// How long peers are waited for.
    pub patience: Patience,
}

/// One socket to listen on.
struct Socket {
    fd: Listener,
    tls: Option<Arc<rustls::ServerConfig>>,
    name: String,
}

enum Listener {
    Unix(UnixListener, PathBuf),
    Tcp(TcpListener),
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Listener::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Those that are served.
struct Places {
    most: usize,
    taken: HashMap<u64, (Waiting, Arc<AtomicBool>)>,
}

impl Places {
    /// A place for one more, if need be that of who has been silent for longest.
    fn take(&mut self, id: u64, waiting: Waiting, gone: Arc<AtomicBool>) -> bool {
        if self.taken.len() >= self.most {
            let silent = self
                .taken
                .iter()
                .filter_map(|(id, place)| Some((place.0.time()?, *id)));
            let Some((_, longest)) = silent.max().filter(|(time, _)| *time >= YIELDS) else {
                return false;
            };
            if let Some((_, gone)) = self.taken.remove(&longest) {
                gone.store(true, Relaxed);
            }
        }
        self.taken.insert(id, (waiting, gone));
        true
    }
}

/// What the log hears of peers: some at a time, so that who comes in crowds does not fill it.
#[derive(Default)]
struct Complaints(Mutex<(Option<Instant>, u64)>);

impl Complaints {
    fn add(&self, what: std::fmt::Arguments<'_>) {
        let (since, count) = &mut *self.0.lock();
        if since.is_none_or(|t| t.elapsed() > COMPLAINTS.1) {
            if *count > COMPLAINTS.0 {
                log::warn!("and {} times more like that", *count - COMPLAINTS.0);
            }
            (*since, *count) = (Some(Instant::now()), 0);
        }
        *count += 1;
        if *count <= COMPLAINTS.0 {
            log::warn!("{what}");
        }
    }
}

/// Sockets that are bound.
pub struct Server {
    sockets: Vec<Socket>,
    options: ServeOptions,
}

impl Server {
    /// Binds sockets.
    ///
    /// # Errors
    /// Why one cannot be had; `Refused` for plain TCP on an address that others can reach.
    pub fn bind(at: &[Listen], options: ServeOptions) -> Result<Server> {
        let mut sockets = Vec::new();
        for listen in at {
            sockets.push(match listen {
                Listen::Unix(path) => Socket {
                    fd: Listener::Unix(unix(path)?, path.clone()),
                    tls: None,
                    name: format!("unix:{}", path.display()),
                },
                Listen::Tcp(at) => {
                    let listener = bind(&loopback(at)?[..], at)?;
                    let name = format!("tcp:{}", local(&listener, at)?);
                    Socket {
                        fd: Listener::Tcp(listener),
                        tls: None,
                        name,
                    }
                }
                Listen::Tls(at) => {
                    let why = "TLS needs a directory with cert.pem, key.pem and peers.pem: --tls DIR";
                    let dir = options.tls.as_ref().ok_or_else(|| Error::new(Kind::Usage, why))?;
                    let config = Identity::read(dir)?.server()?;
                    let listener = bind(&resolve(at)?[..], at)?;
                    let name = format!("tls:{}", local(&listener, at)?);
                    Socket {
                        fd: Listener::Tcp(listener),
                        tls: Some(config),
                        name,
                    }
                }
            });
        }
        Ok(Server { sockets, options })
    }

    /// What a peer calls each.
    pub fn names(&self) -> Vec<String> {
        self.sockets.iter().map(|s| s.name.clone()).collect()
    }

    /// Serves until it is to stop.
    ///
    /// # Errors
    /// What the system reports of the sockets.
    pub fn run(&self, store: &Store, stop: &Stop) -> Result<()> {
        let places = Mutex::new(Places {
            most: self.options.peers,
            taken: HashMap::new(),
        });
        let (number, refused) = (AtomicU64::new(0), AtomicU64::new(0));
        let complaints = Complaints::default();
        std::thread::scope(|scope| {
            while stop.check().is_ok() {
                for socket in self.waiting()? {
                    let gone = Arc::new(AtomicBool::new(false));
                    let link = socket.accept().and_then(|fd| self.link(socket, fd, stop, &gone));
                    let mut link = match link {
                        Ok(link) => link,
                        Err(e) => {
                            log::warn!("{}: {e}", socket.name);
                            std::thread::sleep(TICK);
                            continue;
                        }
                    };
                    let id = number.fetch_add(1, Relaxed);
                    if places.lock().take(id, link.waiting(), gone) {
                        let (places, complaints) = (&places, &complaints);
                        scope.spawn(move || {
                            let done = serve(store, &mut link, &self.options.allowed);
                            places.lock().taken.remove(&id);
                            match done {
                                Ok(()) => log::info!("{}: peer {id} is done", socket.name),
                                Err(e) if e.kind() == Kind::Stopped => {}
                                Err(e) => {
                                    complaints.add(format_args!("{}: peer {id}: hung up: {e}", socket.name))
                                }
                            }
                        });
                        continue;
                    }
                    let most = self.options.peers;
                    complaints.add(format_args!(
                        "{}: refused: {most} peers are served already",
                        socket.name
                    ));
                    // Who comes in crowds is not told.
                    if refused.load(Relaxed) < REFUSED {
                        refused.fetch_add(1, Relaxed);
                        let refused = &refused;
                        scope.spawn(move || {
                            let _ = refuse(store, &mut link, most);
                            refused.fetch_sub(1, Relaxed);
                        });
                    }
                }
            }
            Ok(())
        })
    }

    /// A link to who connected; it ends when `gone` says so.
    fn link(
        &self,
        socket: &Socket,
        fd: OwnedFd,
        stop: &Stop,
        gone: &Arc<AtomicBool>,
    ) -> std::io::Result<Link> {
        let pipe = Pipe::socket(fd)?;
        let wire: Box<dyn Wire> = match &socket.tls {
            Some(config) => Box::new(tls::accept(config, pipe).map_err(std::io::Error::other)?),
            None => Box::new(pipe),
        };
        // Whoever keeps a place must show soon what for.
        let patience = Patience {
            hello: HELLO.min(self.options.patience.hello),
            ..self.options.patience
        };
        let (stop, gone) = (stop.clone(), gone.clone());
        let stop = Stop::when(move || match gone.load(Relaxed) {
            true => Err(Error::new(
                Kind::Busy,
                "its place was needed, and it had nothing to say",
            )),
            false => stop.check(),
        });
        Ok(Link::new(wire, patience, stop))
    }

    /// The sockets on which somebody waits.
    fn waiting(&self) -> Result<Vec<&Socket>> {
        let mut fds: Vec<_> = self
            .sockets
            .iter()
            .map(|s| PollFd::from_borrowed_fd(s.as_fd(), PollFlags::IN))
            .collect();
        let tick = Timespec {
            tv_sec: 0,
            tv_nsec: TICK.as_nanos() as i64,
        };
        match poll(&mut fds, Some(&tick)) {
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            done => done.doing(|| "wait for peers".into())?,
        };
        let ready = fds.iter().map(|fd| !fd.revents().is_empty());
        Ok(self
            .sockets
            .iter()
            .zip(ready)
            .filter(|s| s.1)
            .map(|s| s.0)
            .collect())
    }
}

impl Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        match &self.fd {
            Listener::Unix(l, _) => l.as_fd(),
            Listener::Tcp(l) => l.as_fd(),
        }
    }

    fn accept(&self) -> std::io::Result<OwnedFd> {
        match &self.fd {
            Listener::Unix(l, _) => Ok(l.accept()?.0.into()),
            Listener::Tcp(l) => {
                let socket = l.accept()?.0;
                socket.set_nodelay(true)?;
                Ok(socket.into())
            }
        }
    }
}

fn bind(at: impl ToSocketAddrs, name: &str) -> Result<TcpListener> {
    let listener = TcpListener::bind(at).doing(|| format!("listen on {name}"))?;
    listener
        .set_nonblocking(true)
        .doing(|| format!("listen on {name}"))?;
    Ok(listener)
}

/// `HOST:PORT`, with the port that was given out where 0 was asked for.
fn local(listener: &TcpListener, at: &str) -> Result<String> {
    let port = listener.local_addr().doing(|| format!("listen on {at}"))?.port();
    let host = at.rsplit_once(':').map_or(at, |h| h.0);
    Ok(format!("{host}:{port}"))
}

/// A Unix socket in the place of one that nobody listens on any more.
fn unix(path: &Path) -> Result<UnixListener> {
    let what = || format!("listen on {}", path.display());
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => {
            let why = format!("{} is there, and is no socket: name another path", path.display());
            return Err(Error::new(Kind::Exists, why));
        }
        _ => {}
    }
    if UnixStream::connect(path).is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused) {
        std::fs::remove_file(path).doing(what)?;
    }
    // Nobody else may connect in between either.
    let old = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let bound = UnixListener::bind(path);
    rustix::process::umask(old);
    let listener = bound.doing(what)?;
    listener.set_nonblocking(true).doing(what)?;
    Ok(listener)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_silent_for_longest_gives_their_place() {
        let mut places = Places {
            most: 2,
            taken: HashMap::new(),
        };
        let gone = [(); 5].map(|()| Arc::new(AtomicBool::new(false)));
        let mut take = |n: usize, silent| {
            let waiting = Waiting::of(Duration::from_secs(silent));
            places.take(n as u64, waiting, gone[n].clone())
        };
        assert!(take(0, 11) && take(1, 30));
        // The second one has been silent for longest, and then the first.
        assert!(take(2, 3) && take(3, 4));
        let gone: Vec<_> = gone.iter().map(|g| g.load(Relaxed)).collect();
        assert_eq!(gone, [true, true, false, false, false]);
        let nobody = Arc::new(AtomicBool::new(false));
        assert!(!places.take(4, Waiting::of(Duration::ZERO), nobody));
        assert_eq!(places.taken.len(), 2);
    }
}

//! Ways to a peer, by its address.

use super::address::{Address, loopback, resolve};
use super::link::{Link, Patience, Wire};
use super::serve::{Allowed, serve};
use super::stop::Stop;
use super::tls::Identity;
use super::wire::Pipe;
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::{Options, Store};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long ssh may take to end.
const GRACE: Duration = Duration::from_secs(2);
/// How long a host may take to answer.
const CONNECT: Duration = Duration::from_secs(20);

/// What is needed to reach peers.
#[derive(Clone, Debug, Default)]
pub struct Ways {
    /// Where `cert.pem`, `key.pem` and `peers.pem` are.
    pub tls: Option<PathBuf>,
    /// What to call instead of `ssh`, and its first arguments.
    pub ssh: Vec<String>,
    /// How `zspace` is called on other machines.
    pub remote: Option<String>,
    /// How long peers are waited for.
    pub patience: Patience,
    /// Where there is no store, one is made.
    pub make: bool,
    /// Asked while a peer is waited for.
    pub stop: Stop,
}

/// A connection to a peer; dropped, it is ended.
pub struct Peer {
    link: Option<Link>,
    process: Option<Child>,
    thread: Option<JoinHandle<()>>,
}

impl Peer {
    /// Connects to a peer and does something with it. What goes wrong then says which peer it was.
    ///
    /// # Errors
    /// Why it cannot be reached; what `work` gives.
    pub fn with<T>(address: &Address, ways: &Ways, work: impl FnOnce(&mut Link) -> Result<T>) -> Result<T> {
        let mut peer = Self::connect(address, ways)?;
        work(peer.link()?).map_err(|e| match is_the_peers(e.kind()) {
            true => peer.explained(e, address).context(address),
            false => e,
        })
    }

    /// Connects to a peer.
    ///
    /// # Errors
    /// Why it cannot be reached.
    pub(super) fn connect(address: &Address, ways: &Ways) -> Result<Peer> {
        let at = |e: Error| e.context(address);
        match address {
            Address::Local(dir) => Self::local(dir.clone(), ways).map_err(at),
            Address::Ssh { host, port, dir } => Self::ssh(host, *port, dir, ways).map_err(at),
            Address::Unix(path) => {
                let socket = UnixStream::connect(path).doing(|| "connect".into()).map_err(at)?;
                Self::over(Pipe::socket(socket.into()), ways).map_err(at)
            }
            Address::Tcp(host) => Self::over(tcp(&loopback(host)?), ways).map_err(at),
            Address::Tls(host) => {
                let dir = ways.tls.as_ref().ok_or_else(|| {
                    let why = "TLS needs a directory with cert.pem, key.pem and peers.pem: --tls DIR or $ZSPACE_TLS";
                    Error::new(Kind::Usage, why)
                })?;
                let identity = Identity::read(dir)?;
                let pipe = tcp(&resolve(host)?).doing(|| "connect".into()).map_err(at)?;
                let name = host.rsplit_once(':').map_or(host.as_str(), |h| h.0);
                Ok(Self::wired(
                    Box::new(identity.connect(name, pipe).map_err(at)?),
                    ways,
                ))
            }
        }
    }

    /// The link to it.
    ///
    /// # Errors
    /// None while the peer lives.
    pub(super) fn link(&mut self) -> Result<&mut Link> {
        self.link
            .as_mut()
            .ok_or_else(|| Error::new(Kind::Io, "the connection is over"))
    }

    /// Ends the connection, and ssh, if that is the way; its exit code.
    fn hang_up(&mut self) -> Option<i32> {
        // The other side sees that it is over, and ends.
        self.link = None;
        let mut child = self.process.take()?;
        let end = Instant::now() + GRACE;
        loop {
            match child.try_wait() {
                Ok(Some(status)) => return status.code(),
                Ok(None) if Instant::now() < end => std::thread::sleep(GRACE / 200),
                // The host does not answer any more.
                _ => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return None;
                }
            }
        }
    }

    /// What may be the matter if the two never came to speak.
    pub(super) fn explained(&mut self, e: Error, address: &Address) -> Error {
        let greeted = self.link.as_ref().is_none_or(Link::is_greeted);
        if greeted || !matches!(e.kind(), Kind::Io | Kind::Damage) {
            return e;
        }
        let hint = match (address, self.hang_up()) {
            (_, Some(127)) => {
                "there is no `zspace` in the PATH of that machine: $ZSPACE_REMOTE says how it is called there"
            }
            (Address::Ssh { .. }, _) => {
                "see what ssh and the other machine said; its shell must print nothing at login"
            }
            (Address::Tcp(_), _) => "is `zspace serve --tcp` there? With TLS it is tls:HOST:PORT",
            (Address::Tls(_), _) => {
                "is `zspace serve --tls-listen` there? Without TLS it is tcp:127.0.0.1:PORT"
            }
            _ => return e,
        };
        Error::new(e.kind(), format!("{e} ({hint})"))
    }

    fn wired(wire: Box<dyn Wire>, ways: &Ways) -> Peer {
        Peer {
            link: Some(Link::new(wire, ways.patience, ways.stop.clone())),
            process: None,
            thread: None,
        }
    }

    fn over(pipe: std::io::Result<Pipe>, ways: &Ways) -> Result<Peer> {
        Ok(Self::wired(Box::new(pipe.doing(|| "connect".into())?), ways))
    }

    /// A store of this machine, served by a thread.
    fn local(dir: PathBuf, ways: &Ways) -> Result<Peer> {
        if ways.make && Store::init(&dir).is_ok() {
            log::warn!("made a store in {}", dir.display());
        }
        let store = Store::open(&dir, &Options::default())?;
        let (ours, theirs) = UnixStream::pair().doing(|| "make a pair of sockets".into())?;
        let mut peer = Self::over(Pipe::socket(ours.into()), ways)?;
        let mut link = Link::new(
            Box::new(Pipe::socket(theirs.into()).doing(|| "make a pair of sockets".into())?),
            ways.patience,
            ways.stop.clone(),
        );
        peer.thread = Some(std::thread::spawn(move || {
            if let Err(e) = serve(&store, &mut link, &Allowed::default()) {
                // The asking side heard it.
                log::debug!("{}: {e}", dir.display());
            }
            drop(link);
            if let Err(e) = store.close() {
                log::warn!("{e}");
            }
        }));
        Ok(peer)
    }

    fn ssh(host: &str, port: Option<u16>, dir: &str, ways: &Ways) -> Result<Peer> {
        let default = ["ssh".to_owned()];
        let ssh = if ways.ssh.is_empty() {
            &default[..]
        } else {
            &ways.ssh
        };
        let (program, first) = ssh.split_first().unwrap_or((&default[0], &[]));
        let mut command = Command::new(program);
        command.args(first);
        if let Some(port) = port {
            command.args(["-p", &port.to_string()]);
        }
        let zspace = ways.remote.as_deref().unwrap_or("zspace");
        let store = match dir {
            "" => String::new(),
            dir => format!(" --store {}", quoted(dir)),
        };
        let make = if ways.make { " --make" } else { "" };
        command.args(["--", host, &format!("{zspace}{store} serve --stdio{make}")]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .doing(|| format!("run {program}"))?;
        let (Some(input), Some(output)) = (child.stdout.take(), child.stdin.take()) else {
            return Err(Error::new(Kind::Io, "ssh has no pipes"));
        };
        let mut peer = Self::over(Pipe::new(input.into(), output.into()), ways)?;
        peer.process = Some(child);
        Ok(peer)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.hang_up();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Whether it may be a peer's fault: another one may do better.
pub(super) fn is_the_peers(kind: Kind) -> bool {
    match kind {
        Kind::NotFound
        | Kind::Damage
        | Kind::Unsupported
        | Kind::Io
        | Kind::Busy
        | Kind::Limit
        | Kind::Refused => true,
        Kind::Exists
        | Kind::Usage
        | Kind::NoSpace
        | Kind::ReadOnly
        | Kind::Poisoned
        | Kind::Changed
        | Kind::Stopped => false,
    }
}

fn tcp(addresses: &[SocketAddr]) -> std::io::Result<Pipe> {
    let mut last = std::io::Error::from(std::io::ErrorKind::NotFound);
    for address in addresses {
        match TcpStream::connect_timeout(address, CONNECT) {
            Ok(socket) => {
                socket.set_nodelay(true)?;
                return Pipe::socket(socket.into());
            }
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// A word for a POSIX shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

//! Ways to a peer, by its address.

use super::address::{Address, loopback, resolve};
use super::link::{Link, Patience, Wire};
use super::serve::{Allowed, serve};
use super::tls::Identity;
use super::wire::Pipe;
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::{Options, Store};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

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
}

/// A connection to a peer; dropped, it is ended.
pub struct Peer {
    link: Option<Link>,
    process: Option<Child>,
    thread: Option<JoinHandle<()>>,
}

impl Peer {
    /// Connects to a peer.
    ///
    /// # Errors
    /// Why it cannot be reached.
    pub fn connect(address: &Address, ways: &Ways) -> Result<Peer> {
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
                Ok(Self::with(
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
    pub fn link(&mut self) -> Result<&mut Link> {
        self.link
            .as_mut()
            .ok_or_else(|| Error::new(Kind::Io, "the connection is over"))
    }

    fn with(wire: Box<dyn Wire>, ways: &Ways) -> Peer {
        Peer {
            link: Some(Link::new(wire, ways.patience)),
            process: None,
            thread: None,
        }
    }

    fn over(pipe: std::io::Result<Pipe>, ways: &Ways) -> Result<Peer> {
        Ok(Self::with(Box::new(pipe.doing(|| "connect".into())?), ways))
    }

    /// A store of this machine, served by a thread.
    fn local(dir: PathBuf, ways: &Ways) -> Result<Peer> {
        let store = match ways.make {
            true => Store::open_or_init(&dir, &Options::default())?,
            false => Store::open(&dir, &Options::default())?,
        };
        let (ours, theirs) = UnixStream::pair().doing(|| "make a pair of sockets".into())?;
        let mut peer = Self::over(Pipe::socket(ours.into()), ways)?;
        let mut link = Link::new(
            Box::new(Pipe::socket(theirs.into()).doing(|| "make a pair of sockets".into())?),
            ways.patience,
        );
        peer.thread = Some(std::thread::spawn(move || {
            if let Err(e) = serve(&store, &mut link, &Allowed::default(), &|| Ok(())) {
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
        // The other side sees that it is over, and ends.
        self.link = None;
        if let Some(mut child) = self.process.take()
            && let Err(e) = child.wait()
        {
            log::warn!("ssh: {e}");
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
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

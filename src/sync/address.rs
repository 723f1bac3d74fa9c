//! How a peer is named.

use crate::error::{Error, Kind, Result};
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

/// Where a peer is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A store in a directory of this machine.
    Local(PathBuf),
    /// A store in a directory of another machine, over ssh.
    Ssh {
        /// `[USER@]HOST`.
        host: String,
        /// Another port than 22.
        port: Option<u16>,
        /// The store's directory there; the user's default if empty.
        dir: String,
    },
    /// `zspace serve` on a Unix socket.
    Unix(PathBuf),
    /// `zspace serve` on this machine, over TCP.
    Tcp(String),
    /// `zspace serve` anywhere, over TLS.
    Tls(String),
}

impl std::str::FromStr for Address {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |why: &str| Err(Error::new(Kind::Usage, format!("{text:?} is no peer: {why}")));
        if let Some(path) = text.strip_prefix("unix:") {
            return Ok(Address::Unix(path.into()));
        }
        if let Some(at) = text.strip_prefix("tcp:") {
            loopback(at)?;
            return Ok(Address::Tcp(at.to_owned()));
        }
        if let Some(at) = text.strip_prefix("tls:") {
            return match at.rsplit_once(':') {
                Some((host, port)) if !host.is_empty() && port.parse::<u16>().is_ok() => {
                    Ok(Address::Tls(at.to_owned()))
                }
                _ => bad("write tls:HOST:PORT"),
            };
        }
        let ssh = |host: &str, port, dir: &str| {
            // Such a host would be an option of ssh.
            let odd = |c: char| c.is_whitespace() || c.is_control() || "'\"\\$`;&|<>()".contains(c);
            if host.is_empty() || host.starts_with('-') || host.contains(odd) {
                return bad("there is no host of that name");
            }
            Ok(Address::Ssh {
                host: host.to_owned(),
                port,
                dir: dir.to_owned(),
            })
        };
        if let Some(rest) = text.strip_prefix("ssh://") {
            let (host, dir) = rest.split_once('/').unwrap_or((rest, ""));
            // ssh://HOST/DIR is absolute, ssh://HOST/~/DIR is not.
            let dir = match dir.strip_prefix("~/") {
                Some(dir) => dir.to_owned(),
                None if dir.is_empty() => String::new(),
                None => format!("/{dir}"),
            };
            return match host.rsplit_once(':') {
                Some((host, port)) => match port.parse() {
                    Ok(port) => ssh(host, Some(port), &dir),
                    Err(_) => bad("write ssh://[USER@]HOST[:PORT]/DIR"),
                },
                None => ssh(host, None, &dir),
            };
        }
        if text.contains("://") {
            return bad("of URLs only ssh://[USER@]HOST[:PORT]/DIR is understood");
        }
        match text.split_once(':') {
            // As with scp and rsync, a colon before any slash ends a host.
            Some((host, dir)) if !host.contains('/') => ssh(host, None, dir),
            _ if text.is_empty() => bad("it is empty"),
            _ => Ok(Address::Local(text.into())),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Local(dir) => write!(f, "{}", dir.display()),
            Address::Ssh {
                host,
                port: None,
                dir,
            } => write!(f, "{host}:{dir}"),
            Address::Ssh {
                host,
                port: Some(port),
                dir,
            } => write!(f, "ssh://{host}:{port}/{}", dir.trim_start_matches('/')),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp(at) => write!(f, "tcp:{at}"),
            Address::Tls(at) => write!(f, "tls:{at}"),
        }
    }
}

/// The addresses of this machine that `HOST:PORT` means.
///
/// # Errors
/// `Refused` if one of them is another machine's: over plain TCP anybody on the way could read and change what is sent.
pub(super) fn loopback(at: &str) -> Result<Vec<SocketAddr>> {
    let found = resolve(at)?;
    match found.iter().all(|a| a.ip().to_canonical().is_loopback()) {
        true => Ok(found),
        false => Err(Error::new(
            Kind::Refused,
            format!(
                "{at} is not this machine: plain TCP is for 127.0.0.1 and [::1] only; others use ssh, or TLS (`serve --tls-listen`, tls:HOST:PORT)"
            ),
        )),
    }
}

/// The addresses that `HOST:PORT` means.
pub(super) fn resolve(at: &str) -> Result<Vec<SocketAddr>> {
    let found: Vec<_> = at
        .to_socket_addrs()
        .map_err(|e| {
            Error::new(
                Kind::Usage,
                format!("{at:?} is no HOST:PORT that can be found, such as 127.0.0.1:7420: {e}"),
            )
        })?
        .collect();
    match found.is_empty() {
        true => Err(Error::new(Kind::NotFound, format!("{at}: no such host"))),
        false => Ok(found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_named_as_with_scp() {
        let ssh = |host: &str, port, dir: &str| Address::Ssh {
            host: host.into(),
            port,
            dir: dir.into(),
        };
        for (text, want) in [
            ("gpu1:runs/store", ssh("gpu1", None, "runs/store")),
            ("me@gpu1:", ssh("me@gpu1", None, "")),
            (
                "ssh://me@gpu1:2222/data/store",
                ssh("me@gpu1", Some(2222), "/data/store"),
            ),
            ("ssh://gpu1/~/store", ssh("gpu1", None, "store")),
            ("/data/store", Address::Local("/data/store".into())),
            ("./a:b", Address::Local("./a:b".into())),
            ("unix:/run/z.sock", Address::Unix("/run/z.sock".into())),
            ("tcp:127.0.0.1:7000", Address::Tcp("127.0.0.1:7000".into())),
            ("tls:gpu1:7000", Address::Tls("gpu1:7000".into())),
        ] {
            assert_eq!(text.parse::<Address>().unwrap(), want, "{text}");
        }
        for text in [
            "",
            "http://host/dir",
            "file:///dir",
            "-oProxyCommand=x:dir",
            "ssh://-x/dir",
            "ssh://h:x/dir",
            "tls:gpu1",
            "a b:dir",
            "$(x):d",
        ] {
            assert_eq!(text.parse::<Address>().unwrap_err().kind(), Kind::Usage, "{text}");
        }
        for text in ["tcp:192.0.2.1:7000", "tcp:0.0.0.0:7000", "tcp:[2001:db8::1]:7000"] {
            assert_eq!(
                text.parse::<Address>().unwrap_err().kind(),
                Kind::Refused,
                "{text}"
            );
        }
        for text in ["tcp:[::1]:7000", "tcp:[::ffff:127.0.0.1]:1"] {
            assert!(text.parse::<Address>().is_ok(), "{text}");
        }
    }
}

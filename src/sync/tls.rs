//! TLS 1.3 where both sides show certificates.

use super::link::Wire;
use super::wire::Pipe;
use crate::error::{Error, IoContext, Kind, Result};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// What is agreed on to be spoken inside.
const ALPN: &[u8] = b"zspace/1";

/// Who we are, and whom we believe.
pub(super) struct Identity {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    peers: Arc<RootCertStore>,
}

impl Identity {
    /// Reads `cert.pem`, `key.pem` and, for the certificates of those who may be a peer, or of who signed them, `peers.pem`.
    ///
    /// # Errors
    /// What cannot be read, and why.
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let at = |name: &str| dir.join(name);
        let bad = |name: &str, e: &dyn std::fmt::Display| {
            let why = format!(
                "{}: {e} (a TLS peer needs cert.pem, key.pem and peers.pem in one directory)",
                at(name).display()
            );
            Error::new(Kind::Usage, why)
        };
        let certs = |name: &str| -> Result<Vec<CertificateDer<'static>>> {
            let all = CertificateDer::pem_file_iter(at(name)).map_err(|e| bad(name, &e))?;
            let all: Vec<_> = all
                .collect::<std::result::Result<_, _>>()
                .map_err(|e| bad(name, &e))?;
            match all.is_empty() {
                true => Err(bad(name, &"there is no certificate in it")),
                false => Ok(all),
            }
        };
        let mut peers = RootCertStore::empty();
        for cert in certs("peers.pem")? {
            peers.add(cert).map_err(|e| bad("peers.pem", &e))?;
        }
        Ok(Identity {
            chain: certs("cert.pem")?,
            key: PrivateKeyDer::from_pem_file(at("key.pem")).map_err(|e| bad("key.pem", &e))?,
            peers: Arc::new(peers),
        })
    }

    /// How a server takes connections.
    ///
    /// # Errors
    /// `Usage` if the certificate and key do not go together.
    pub(super) fn server(&self) -> Result<Arc<ServerConfig>> {
        let clients = WebPkiClientVerifier::builder_with_provider(self.peers.clone(), provider())
            .build()
            .map_err(|e| Error::new(Kind::Usage, format!("peers.pem: {e}")))?;
        let config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|c| {
                c.with_client_cert_verifier(clients)
                    .with_single_cert(self.chain.clone(), self.key.clone_key())
            });
        let mut config = config.map_err(wrong)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(Arc::new(config))
    }

    /// A connection to the server called `host`, over a pipe that leads to it.
    pub(super) fn connect(&self, host: &str, pipe: Pipe) -> Result<Tls> {
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .and_then(|c| {
                c.with_root_certificates(self.peers.clone())
                    .with_client_auth_cert(self.chain.clone(), self.key.clone_key())
            });
        let mut config = config.map_err(wrong)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(host.to_owned())
            .map_err(|_| Error::new(Kind::Usage, format!("{host:?} is no name of a host")))?;
        let conn = ClientConnection::new(Arc::new(config), name).map_err(wrong)?;
        Ok(Tls {
            conn: conn.into(),
            pipe,
        })
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn wrong(e: rustls::Error) -> Error {
    Error::new(Kind::Usage, format!("cert.pem and key.pem: {e}"))
}

/// Takes a client's connection.
pub(super) fn accept(config: &Arc<ServerConfig>, pipe: Pipe) -> Result<Tls> {
    let conn = ServerConnection::new(config.clone())
        .map_err(io::Error::other)
        .doing(|| "start TLS".into())?;
    Ok(Tls {
        conn: conn.into(),
        pipe,
    })
}

/// A pipe within which TLS is spoken.
pub(super) struct Tls {
    conn: Connection,
    pipe: Pipe,
}

/// The pipe until a deadline.
struct Until<'a>(&'a mut Pipe, Instant);

impl Read for Until<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.0.read(buf, self.1)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.0.write(buf, self.1)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Tls {
    fn flush(&mut self, deadline: Instant) -> io::Result<()> {
        while self.conn.wants_write() {
            self.conn.write_tls(&mut Until(&mut self.pipe, deadline))?;
        }
        Ok(())
    }
}

impl Wire for Tls {
    fn read(&mut self, buf: &mut [u8], deadline: Instant) -> io::Result<usize> {
        loop {
            match self.conn.reader().read(buf) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                // A side that hangs up without saying so: frames tell whether that was in the middle of one.
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(0),
                done => return done,
            }
            self.flush(deadline)?;
            self.conn.read_tls(&mut Until(&mut self.pipe, deadline))?;
            let done = self.conn.process_new_packets().map_err(io::Error::other);
            // The other side is told why.
            let told = self.flush(deadline);
            done?;
            told?;
        }
    }

    fn write(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<usize> {
        // What was taken is not given again: it goes out with the next bytes, or before something is read.
        self.flush(deadline)?;
        let n = self.conn.writer().write(bytes)?;
        match self.flush(deadline) {
            Err(e) if e.kind() == ErrorKind::TimedOut && n > 0 => return Ok(n),
            flushed => flushed?,
        }
        if n == 0 && !bytes.is_empty() {
            // What is to be sent waits for the other side's hello.
            self.conn.read_tls(&mut Until(&mut self.pipe, deadline))?;
            self.conn.process_new_packets().map_err(io::Error::other)?;
            self.flush(deadline)?;
            return self.write(bytes, deadline);
        }
        Ok(n)
    }
}

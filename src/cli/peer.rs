//! What the verbs that speak with peers have in common.

use super::show;
use super::signals::Stop;
use crate::error::{Error, Kind, Result};
use crate::store::{ObjectId, Store};
use crate::sync::{Patience, Ways};
use std::path::PathBuf;
use std::time::Duration;

/// How a peer is reached.
#[derive(clap::Args)]
pub(super) struct Reach {
    /// For tls: peers, the directory with cert.pem, key.pem and peers.pem [default: $ZSPACE_TLS]
    #[arg(long, value_name = "DIR")]
    tls: Option<PathBuf>,
    /// Seconds that a peer may be silent
    #[arg(long, value_name = "S", default_value_t = 120)]
    timeout: u64,
}

impl Reach {
    /// `$ZSPACE_SSH` is what is called instead of ssh, `$ZSPACE_REMOTE` how zspace is called over there.
    pub(super) fn ways(&self, stop: &Stop) -> Ways {
        let time = Duration::from_secs(self.timeout.max(1));
        let words = std::env::var("ZSPACE_SSH").unwrap_or_default();
        Ways {
            tls: tls(self.tls.as_ref()),
            ssh: words.split_whitespace().map(str::to_owned).collect(),
            remote: std::env::var("ZSPACE_REMOTE").ok().filter(|r| !r.is_empty()),
            patience: Patience {
                frame: time,
                idle: time,
                hello: time,
                slowest: 0,
                ..Patience::default()
            },
            make: false,
            stop: stop.of_transfer(),
        }
    }
}

/// Where the certificates are.
pub(super) fn tls(given: Option<&PathBuf>) -> Option<PathBuf> {
    let set = || {
        std::env::var_os("ZSPACE_TLS")
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    given.cloned().or_else(set)
}

/// `BRANCH`, or `BRANCH:AS` where it has another name on the side that receives it.
pub(super) fn branches(texts: &[String]) -> Vec<(String, String)> {
    let pair = |t: &String| match t.split_once(':') {
        Some((from, to)) => (from.to_owned(), to.to_owned()),
        None => (t.clone(), t.clone()),
    };
    texts.iter().map(pair).collect()
}

/// The objects of this store that are named.
pub(super) fn objects(store: &Store, names: &[String]) -> Result<Vec<ObjectId>> {
    names.iter().map(|name| Ok(store.object(name)?.id())).collect()
}

/// A whole id.
pub(super) fn whole_id<T: std::str::FromStr<Err = Error>>(text: &str) -> Result<T> {
    text.parse().map_err(|_| {
        let why = format!("{text:?} is not all 64 hex digits of an id");
        Error::new(Kind::Usage, why)
    })
}

/// What went over the way to a peer.
pub(super) fn traffic(received: u64, sent: u64) -> String {
    format!("{} received, {} sent", show::bytes(received), show::bytes(sent))
}

//! One of several replicas: if one is down, slow or wrong, the next is asked.

use super::address::Address;
use super::connect::{Peer, Ways};
use super::pull::{OnFetched, PullRequest, Pulled, pull};
use crate::error::{Error, Kind, Result};
use crate::store::Store;

/// Does something with the first peer with which it can be done; also gives that one's place. What a peer that failed had sent and
/// was right need not be sent by the next.
///
/// # Errors
/// The last peer's; at once, if it is not the peer's fault.
pub(super) fn first_that_can<T>(
    peers: &[Address],
    ways: &Ways,
    mut work: impl FnMut(&mut Peer) -> Result<T>,
) -> Result<(T, usize)> {
    let mut failed = Error::new(Kind::Usage, "no peer is named");
    for (n, address) in peers.iter().enumerate() {
        let done = Peer::connect(address, ways).and_then(|mut peer| work(&mut peer));
        match done {
            Ok(done) => return Ok((done, n)),
            Err(e) if n + 1 < peers.len() && is_the_peers(e.kind()) => {
                log::warn!("{address}: {e}; the next one is asked");
                failed = e;
            }
            Err(e) => return Err(e),
        }
    }
    Err(failed)
}

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

/// Pulls from the first peer that can give what is asked for; which one that was.
///
/// # Errors
/// As of [`pull`], from the last peer.
pub fn pull_from_any(
    store: &Store,
    peers: &[Address],
    ways: &Ways,
    request: &PullRequest,
    told: OnFetched<'_>,
) -> Result<(Pulled, usize)> {
    first_that_can(peers, ways, |peer| pull(store, peer.link()?, request, told))
}

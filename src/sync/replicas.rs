//! One of several replicas: if one is down, slow or wrong, the next is asked.

use super::address::Address;
use super::connect::{Peer, Ways, is_the_peers};
use super::pull::{OnFetched, PullRequest, Pulled, pull};
use crate::error::{Error, Kind, Result};
use crate::store::Store;

/// Pulls from the first peer that can give what is asked for; which one that was. What a peer that failed had sent and was right need
/// not be sent by the next.
///
/// # Errors
/// As of [`pull`], from the last peer; at once, if it is not the peer's fault.
pub fn pull_from_any(
    store: &Store,
    peers: &[Address],
    ways: &Ways,
    request: &PullRequest,
    told: OnFetched<'_>,
) -> Result<(Pulled, usize)> {
    let mut failed = Error::new(Kind::Usage, "no peer is named");
    for (n, address) in peers.iter().enumerate() {
        match Peer::with(address, ways, |link| pull(store, link, request, told)) {
            Ok(done) => return Ok((done, n)),
            Err(e) if n + 1 < peers.len() && is_the_peers(e.kind()) => {
                log::warn!("{e}; the next one is asked");
                failed = e;
            }
            Err(e) => return Err(e),
        }
    }
    Err(failed)
}

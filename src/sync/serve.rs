//! Serves one peer: answers what it asks, and takes what it pushes.

use super::answer::{Recent, answer, say};
use super::ask::{greet, hello};
use super::link::Link;
use super::message::{Answer, Request};
use super::push::take;
use super::signers::Signers;
use crate::error::{Error, Kind, Result};
use crate::store::Store;

/// What a served store allows.
#[derive(Clone, Debug, Default)]
pub struct Allowed {
    /// Nothing may be pushed.
    pub read_only: bool,
    /// Only branches that one of these signed may be pushed.
    pub signers: Option<Signers>,
}

/// Serves a peer until it hangs up, or the link is to stop. What went wrong is told to the peer, as far as it can be.
///
/// # Errors
/// Why the peer was hung up on.
pub fn serve(store: &Store, link: &mut Link, allowed: &Allowed) -> Result<()> {
    let served: Result<()> = (|| {
        let Some(peer) = greet(link, store.id()).map_err(malformed)? else {
            log::info!("somebody came and said nothing");
            return Ok(());
        };
        log::info!("peer {} with store {}", peer.agent, crate::id::hex(&peer.store));
        let mut recent = Recent::default();
        while let Some(frame) = link.next().map_err(malformed)? {
            let request = Request::decode(&frame).map_err(malformed)?;
            let request = request.ok_or_else(|| {
                let why = format!("a frame of type {:#04x} where a request is due", frame.0);
                Error::new(Kind::Usage, why)
            })?;
            match request {
                Request::Push { .. } | Request::PushObject(_) => {
                    let taken = match allowed.read_only {
                        true => Err(Error::new(
                            Kind::Refused,
                            "this store is served read-only: nothing can be pushed",
                        )),
                        false => take(store, link, request, allowed.signers.as_ref(), &mut |_| Ok(())),
                    };
                    match taken {
                        // The peer may have more that is not.
                        Err(e) if e.kind() == Kind::Refused => {
                            log::warn!("refused: {e}");
                            say(link, &Answer::Failed(e))?;
                            link.flush()?;
                        }
                        taken => {
                            for branch in taken?.branches {
                                log::info!("took {} versions of {}", branch.new, branch.branch);
                            }
                        }
                    }
                }
                request => answer(store, link, &mut recent, request)?,
            }
        }
        Ok(())
    })();
    if let Err(e) = &served {
        let _ = say(link, &Answer::Failed(e.share())).and_then(|()| link.flush());
    }
    served
}

/// Tells a peer for whom there is no place that it is so.
pub(super) fn refuse(store: &Store, link: &mut Link, served: usize) -> Result<()> {
    hello(link, store.id()).map_err(malformed)?;
    let why = format!("{served} peers are served already: try again later");
    say(link, &Answer::Failed(Error::new(Kind::Busy, why)))?;
    link.flush()
}

/// What a peer sent is no damage here.
fn malformed(e: Error) -> Error {
    match e.kind() {
        Kind::Damage => Error::new(Kind::Usage, e.to_string()),
        _ => e,
    }
}

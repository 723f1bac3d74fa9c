//! Peers: stores that send each other what is missing, every digest checked (PROTOCOL.md).
//!
//! Who receives asks and who sends answers; a push is the same with the roles exchanged.

mod address;
mod answer;
mod ask;
mod audit;
mod connect;
mod encoding;
mod fetch;
mod link;
mod listen;
mod message;
mod object;
mod pull;
mod push;
mod repair;
mod replicas;
mod serve;
mod signers;
mod stop;
#[cfg(test)]
mod tests;
mod tls;
mod wire;

pub use address::Address;
pub use audit::{Check, Standing, Verdict, audit, parse_checks};
pub use connect::{Peer, Ways};
pub use encoding::encoded_again;
pub use fetch::Fetched;
pub use link::{Frame, Link, MAX_FRAME, Patience, Wire};
pub use listen::{Listen, ServeOptions, Server};
pub use pull::{OnFetched, PullRequest, Pulled, PulledBranch, pull};
pub use push::{PushRequest, Pushed, push};
pub use repair::{Repaired, repair};
pub use replicas::pull_from_any;
pub use serve::{Allowed, serve};
pub use signers::{NAMESPACE, Signers, is_signature, statement};
pub use stop::Stop;
pub use wire::Pipe;

//! Repairs a store from its peers: exactly what is damaged or missing is fetched, from whichever peer has it, and checked.

use super::address::Address;
use super::ask::{Asker, Sent, hello};
use super::connect::{Peer, Ways};
use super::message::MAX_IDS;
use crate::error::{Error, Kind, Result};
use crate::id::NodeId;
use crate::store::{Added, Broken, Import, ImportedFile, NodeKind, RawNode, Store, manifest_id};
use std::collections::BTreeSet;

/// Below a directory that is repaired there may be more: so often it is looked again.
const PASSES: usize = 64;

/// Bytes of nodes that wait for what they are encoded against; what is more is asked for again in the next pass.
const MAX_HELD: usize = 64 << 20;

/// What a repair did.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Repaired {
    /// Nodes that were damaged or missing and are right now.
    pub repaired: u64,
    /// Those that no peer has.
    pub left: Vec<String>,
    /// Bytes received.
    pub received: u64,
}

/// Fetches what is damaged or missing from peers, the first one first. `told` hears of what is done, for people.
///
/// # Errors
/// If no peer can be reached; what this store reports.
pub fn repair(store: &Store, peers: &[Address], ways: &Ways, told: &mut dyn FnMut(&str)) -> Result<Repaired> {
    let mut done = Repaired::default();
    for _ in 0..PASSES {
        let broken = store.broken(&mut |_| {}, &|| ways.stop.check())?;
        let mut left = broken.clone();
        let mut reached: Result<()> = Err(Error::new(Kind::Usage, "no peer is named"));
        for address in peers {
            if left.is_empty() {
                break;
            }
            match from_peer(store, address, ways, &mut left, &mut done) {
                Ok(()) => reached = Ok(()),
                Err(e) if e.kind() == Kind::NoSpace || e.kind() == Kind::Poisoned => return Err(e),
                Err(e) => {
                    log::warn!("{address}: {e}");
                    if reached.is_err() {
                        reached = Err(e);
                    }
                }
            }
            let now = broken.len() - left.len();
            told(&format!("{now} of {} damaged nodes repaired", broken.len()));
        }
        done.left = left.iter().map(name).collect();
        let progress = broken.len() - left.len();
        if !broken.is_empty() && progress == 0 {
            reached?;
        }
        if progress == 0 {
            break;
        }
    }
    Ok(done)
}

/// Repairs what one peer has of it. What is repaired is durable before what was damaged goes into quarantine.
fn from_peer(
    store: &Store,
    address: &Address,
    ways: &Ways,
    left: &mut BTreeSet<Broken>,
    done: &mut Repaired,
) -> Result<()> {
    let mut peer = Peer::connect(address, ways)?;
    let link = peer.link()?;
    hello(link, store.id())?;
    let mut import = store.import()?;
    let mut asker = Asker::new(link, None);
    let mut repaired = Vec::new();
    let result = fetch(&mut asker, &mut import, left, &mut repaired);
    done.received += asker.link().received();
    done.repaired += repaired.len() as u64;
    for what in repaired {
        store.quarantine(&what)?;
        left.remove(&what);
    }
    result
}

fn fetch(
    asker: &mut Asker<'_>,
    import: &mut Import<'_>,
    left: &BTreeSet<Broken>,
    repaired: &mut Vec<Broken>,
) -> Result<()> {
    let nodes: Vec<(u8, NodeId)> = left
        .iter()
        .filter_map(|what| match what {
            Broken::Node(tag, id) if *tag != NodeKind::Manifest as u8 => Some((*tag, *id)),
            // A manifest is taken with its file only.
            _ => None,
        })
        .collect();
    let mended = mend(asker, import, &nodes, repaired);
    // What came before something failed is right all the same.
    import.save()?;
    mended?;
    for what in left {
        let Broken::File(hash, len) = *what else { continue };
        let Sent::Node(node) = asker.manifest(manifest_id(&hash, len))? else {
            continue;
        };
        let file = ImportedFile::new(hash, len, &node)?;
        // What it is made of could not be looked at before.
        let missing: BTreeSet<(u8, NodeId)> = file
            .nodes()
            .filter(|(kind, id)| !import.is_whole(*kind, id))
            .map(|(kind, id)| (kind as u8, id))
            .collect();
        let missing: Vec<_> = missing.into_iter().collect();
        // Until the file is proven nobody knows that these belong to it.
        let mut mended = Vec::new();
        mend(asker, import, &missing, &mut mended)?;
        if mended.len() == missing.len() {
            asker.link().while_busy(|stop| import.file(&file, stop))?;
            import.save()?;
            repaired.append(&mut mended);
            repaired.push(*what);
        }
    }
    Ok(())
}

/// Fetches nodes, those that the peer has. `repaired` gets them.
fn mend(
    asker: &mut Asker<'_>,
    import: &mut Import<'_>,
    nodes: &[(u8, NodeId)],
    repaired: &mut Vec<Broken>,
) -> Result<()> {
    let mut rest = Vec::new();
    asker.plains(nodes, &mut |tag, id, raw| {
        let (Some(raw), Some(kind)) = (raw, NodeKind::from_tag(tag)) else {
            rest.extend(NodeKind::from_tag(tag).map(|kind| (kind, id)));
            return Ok(());
        };
        import.mend(kind, id, &raw)?;
        repaired.push(Broken::Node(tag, id));
        Ok(())
    })?;
    // What the peer cannot rebuild it may have all the same, encoded against what is here.
    for some in rest.chunks(MAX_IDS) {
        let ids: Vec<NodeId> = some.iter().map(|(_, id)| *id).collect();
        asker.nodes(&ids)?;
        let (mut waiting, mut held) = (Vec::new(), 0);
        for (kind, id) in some {
            let Sent::Node(node) = asker.node()? else { continue };
            let len = node.payload.len();
            if add(import, *kind, *id, &node, repaired)? {
                while take_waiting(import, &mut waiting, repaired)? {}
            } else if held + len <= MAX_HELD {
                held += len;
                waiting.push((*kind, *id, node));
            }
        }
    }
    Ok(())
}

/// Tries what waits for bases once more; true if any found them.
fn take_waiting(
    import: &mut Import<'_>,
    waiting: &mut Vec<(NodeKind, NodeId, RawNode)>,
    repaired: &mut Vec<Broken>,
) -> Result<bool> {
    let mut still = Vec::new();
    let before = waiting.len();
    for (kind, id, node) in waiting.drain(..) {
        if !add(import, kind, id, &node, repaired)? {
            still.push((kind, id, node));
        }
    }
    *waiting = still;
    Ok(waiting.len() < before)
}

/// Takes a node if what it is encoded against is here and right.
fn add(
    import: &mut Import<'_>,
    kind: NodeKind,
    id: NodeId,
    node: &RawNode,
    repaired: &mut Vec<Broken>,
) -> Result<bool> {
    match import.add(kind, id, node) {
        Ok(Added::Kept) => {
            repaired.push(Broken::Node(kind as u8, id));
            Ok(true)
        }
        Ok(Added::Needs(_)) => Ok(false),
        // A base is damaged here too, or the peer sent something else.
        Err(e) if e.kind() == Kind::Damage => {
            log::debug!("{e}");
            Ok(false)
        }
        Err(e) => Err(e),
    }
}

fn name(what: &Broken) -> String {
    match what {
        Broken::Node(tag, id) => {
            let kind = NodeKind::from_tag(*tag).map_or("node", NodeKind::name);
            format!("{kind} {id}")
        }
        Broken::File(hash, len) => format!("manifest of file {hash}, {len} bytes"),
    }
}

//! The side that is asked: answers each request from a store, one after the other.

use super::link::{Link, MAX_FRAME};
use super::message::{Answer, Checked, Readable, Ref, Request, State, Target, page};
use crate::error::{Error, Interrupt, Kind, Result, never};
use crate::id::{NodeId, VersionId};
use crate::store::{Numbered, ObjectFile, ObjectSource, Place, RawNode, Store};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;

/// Payload bytes of one frame: a node's first also has its meta.
const PIECE: usize = MAX_FRAME - 512;

/// Sends an answer, or what else has the form of one.
pub(super) fn say(link: &mut Link, answer: &Answer) -> Result<()> {
    let (kind, body) = answer.encode();
    link.put(kind, &[&body])
}

/// What a peer asked for last: it will ask for more of it.
#[derive(Default)]
pub(super) struct Recent {
    object: Option<(Target, ObjectFile)>,
    node: Option<(u8, NodeId, Vec<u8>)>,
}

impl Recent {
    fn object(&mut self, store: &Store, of: Target, interrupt: Interrupt<'_>) -> Result<Option<&ObjectFile>> {
        if !self.has(of) {
            self.object = None;
            let mut found = find(store, of, interrupt)?;
            if found.is_none() && store.refresh()? {
                found = find(store, of, interrupt)?;
            }
            self.object = found.map(|o| (of, o));
        }
        Ok(self.object.as_ref().map(|o| &o.1))
    }

    fn has(&self, of: Target) -> bool {
        self.object.as_ref().is_some_and(|o| o.0 == of)
    }

    /// Records of an object; nothing if it is not here.
    fn records(
        &mut self,
        store: &Store,
        of: Target,
        places: &[Place],
        interrupt: Interrupt<'_>,
    ) -> Result<Option<Vec<u8>>> {
        let object = self.object(store, of, interrupt)?;
        object
            .map(|object| store.records(object, places, interrupt))
            .transpose()
    }

    /// Bytes of something; nothing if it is not here.
    fn read(
        &mut self,
        store: &Store,
        of: Readable,
        bytes: Range<u64>,
        interrupt: Interrupt<'_>,
    ) -> Result<Option<Vec<u8>>> {
        match of {
            Readable::Whole(of) => {
                let Some(object) = self.object(store, of, interrupt)? else {
                    return Ok(None);
                };
                if bytes.end > object.manifest.len {
                    let why = "bytes that are not within the object were asked for";
                    return Err(Error::new(Kind::Usage, why));
                }
                let mut buf = vec![0; (bytes.end - bytes.start) as usize];
                object.read_at(bytes.start, &mut buf)?;
                Ok(Some(buf))
            }
            Readable::Node(kind, id) => {
                if self.node.as_ref().is_none_or(|n| (n.0, n.1) != (kind, id)) {
                    self.node = match store.plain_node(kind, &id) {
                        Err(e) if e.kind() == Kind::NotFound => None,
                        found => Some((kind, id, found?)),
                    };
                }
                let all = self.node.as_ref().map(|n| &n.2);
                let part = |all: &Vec<u8>| {
                    let at = |n: u64| usize::try_from(n).map_or(all.len(), |n| n.min(all.len()));
                    all[at(bytes.start)..at(bytes.end)].to_vec()
                };
                Ok(all.map(part))
            }
        }
    }
}

fn find(store: &Store, of: Target, interrupt: Interrupt<'_>) -> Result<Option<ObjectFile>> {
    let found = match of {
        Target::Object(id) => store.object_of(&id).map(|o| store.object_file(&o.manifest)),
        Target::File(hash, len) => match store.file_object(&hash, len, interrupt) {
            Err(e) if e.kind() == Kind::NotFound => None,
            found => Some(found),
        },
    };
    found.transpose()
}

/// Answers a request that asks for something.
///
/// # Errors
/// What the link reports; what the store reports, if it is more than one node that cannot be had; `Usage` if the request asks
/// for nothing but tells to take something.
pub(super) fn answer(store: &Store, link: &mut Link, recent: &mut Recent, request: Request) -> Result<()> {
    match request {
        Request::Refs { after } => {
            store.refresh()?;
            say(link, &refs(store, &after))
        }
        Request::Log { head, known } => {
            store.refresh()?;
            say(link, &log(store, head, &known))
        }
        Request::Nodes(ids) => ids.iter().try_for_each(|id| node(store, link, id)),
        // The file of a version is folded for it.
        Request::Object(of) => match link.while_busy(|stop| recent.object(store, of, stop))? {
            Some(object) => say(link, &Answer::Object(object.manifest.encode())),
            None => say(link, &Answer::Missing { damaged: false }),
        },
        Request::Objects { after } => {
            store.refresh()?;
            let mut ids: Vec<_> = store
                .objects()
                .iter()
                .map(|o| o.id)
                .filter(|id| *id > after)
                .collect();
            ids.sort();
            let (ids, more) = page(ids, |_| 32);
            say(link, &Answer::Objects { more, ids })
        }
        Request::Records { of, places } => {
            // Folded for the first of them.
            let records = match recent.has(of) {
                true => recent.records(store, of, &places, &never)?,
                false => link.while_busy(|stop| recent.records(store, of, &places, stop))?,
            };
            match records {
                None => say(link, &Answer::Missing { damaged: false }),
                Some(records) => say(link, &Answer::Records(records)),
            }
        }
        Request::Read { of, bytes, packed } => {
            let read = match of {
                Readable::Whole(of) if !recent.has(of) => {
                    link.while_busy(|stop| recent.read(store, Readable::Whole(of), bytes, stop))
                }
                of => recent.read(store, of, bytes, &never),
            };
            match read {
                Ok(None) => say(link, &Answer::Missing { damaged: false }),
                Ok(Some(bytes)) => say(link, &Answer::Bytes { bytes, packed }),
                Err(e) if e.kind() == Kind::Damage => {
                    log::info!("asked for what is damaged: {e}");
                    say(link, &Answer::Missing { damaged: true })
                }
                Err(e) => Err(e),
            }
        }
        Request::Check(what) => {
            let state = link.while_busy(|stop| check(store, what, stop))?;
            say(link, &Answer::State(state))
        }
        Request::Push { .. } | Request::PushObject(_) => Err(Error::new(
            Kind::Usage,
            "something was to be pushed in the middle of something else",
        )),
    }
}

fn refs(store: &Store, after: &str) -> Answer {
    let branches = store.branches().into_iter().map(|name| {
        let head = store.latest(&name).map(|v| v.id);
        let signature = head.and_then(|head| store.signature(&name, &head));
        Ref {
            tag: false,
            head,
            count: store.versions(&name).map_or(0, |v| v.len() as u64),
            signature: signature.unwrap_or_default(),
            name,
        }
    });
    let tags = store.tags().into_iter().map(|(name, v)| Ref {
        tag: true,
        name,
        head: Some(v.id),
        count: 0,
        signature: Vec::new(),
    });
    // A tag and a branch never have the same name.
    let mut all: Vec<Ref> = branches.chain(tags).filter(|r| r.name.as_str() > after).collect();
    all.sort_by(|a, b| a.name.cmp(&b.name));
    let (refs, more) = page(all, |r| r.name.len() + r.signature.len() + 45);
    Answer::Refs { more, refs }
}

fn log(store: &Store, head: VersionId, known: &[VersionId]) -> Answer {
    let Some(first) = store.version(&head) else {
        return Answer::Missing { damaged: false };
    };
    let known: HashSet<_> = known.iter().collect();
    let next = |v: &Arc<Numbered>| {
        let parent = v.version.parents.first()?;
        store.version(parent).filter(|_| !known.contains(parent))
    };
    let line = std::iter::successors(Some(first).filter(|_| !known.contains(&head)), next);
    let len = |v: &crate::store::Version| v.message.len() + v.entry.len() + 200;
    let (versions, more) = page(line.map(|v| v.version.clone()), len);
    Answer::Log { more, versions }
}

/// Sends a node, in several frames if it is large. One that is damaged or not there is told as such.
fn node(store: &Store, link: &mut Link, id: &NodeId) -> Result<()> {
    let node = match store.raw_node(id) {
        Ok(node) => node,
        Err(e) if matches!(e.kind(), Kind::NotFound | Kind::Damage) => {
            let damaged = e.kind() == Kind::Damage;
            if damaged {
                log::info!("asked for a node that is damaged: {e}");
            }
            return say(link, &Answer::Missing { damaged });
        }
        Err(e) => return Err(e),
    };
    send(link, &node)
}

fn send(link: &mut Link, node: &RawNode) -> Result<()> {
    let mut pieces = node.payload.chunks(PIECE);
    let first = Answer::Node {
        kind: node.kind,
        meta: node.meta.clone(),
        len: node.payload.len() as u64,
        first: pieces.next().unwrap_or_default().to_vec(),
    };
    say(link, &first)?;
    pieces.try_for_each(|piece| say(link, &Answer::More(piece.to_vec())))
}

/// Checks something from end to end.
fn check(store: &Store, what: Checked, interrupt: Interrupt<'_>) -> Result<State> {
    store.refresh()?;
    let mut verifier = store.verifier(interrupt);
    match what {
        Checked::Version(id) => match store.version(&id) {
            None => return Ok(State::Absent),
            Some(version) => verifier.version(&version, &mut |_| {})?,
        },
        Checked::Object(id) => match store.object_of(&id) {
            None => return Ok(State::Absent),
            Some(object) => verifier.object(&object, &mut |_| {})?,
        },
    }
    Ok(match verifier.report.damage.first() {
        None => State::Right,
        Some(d) => State::Damaged(format!("{} {}: {}", d.version, d.file, d.why)),
    })
}

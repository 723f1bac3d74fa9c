//! The side that asks: many requests on their way, answered in their order.

use super::link::Link;
use super::message::{
    Answer, Checked, Hello, MAX_IDS, MAX_READ, Readable, Ref, Request, SPOKEN, State, Target,
};
use crate::error::{Error, Kind, Result};
use crate::id::{NodeId, ObjectId, RecordId, VersionId};
use crate::store::{NodeKind, ObjectRecord, Place, RawNode, Version, Width};
use std::collections::VecDeque;

/// Bytes of requests that may be on their way without an answer: as much as every pipe and socket takes, so that asking never waits
/// for who answers.
const UNANSWERED: usize = 32 << 10;
/// The most bytes of a payload: the largest node there is, and what encoding may add.
const MAX_PAYLOAD: u64 = (256 << 20) + 1024;
/// The most versions of one line.
const MAX_VERSIONS: usize = 1 << 20;
/// The most bytes of what is said of the versions of one line, and of all refs.
const MAX_SAID: usize = 256 << 20;
/// The most branches and tags of a store, and objects.
const MAX_REFS: usize = 1 << 20;

/// A node that was asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Sent {
    Node(RawNode),
    /// The peer has not got it.
    Absent,
    /// The peer has it and cannot read it.
    Damaged,
}

/// Says hello and hears it.
///
/// # Errors
/// `Unsupported` if the two speak no version in common; what the link reports.
pub(super) fn hello(link: &mut Link, store: [u8; 16]) -> Result<Hello> {
    // What is no peer has damaged nothing.
    let greeted = greet(link, store).map_err(|e| match e.kind() {
        Kind::Damage => Error::new(Kind::Io, e.to_string()),
        _ => e,
    })?;
    greeted.ok_or_else(|| Error::new(Kind::Io, "the peer hung up before it said hello"))
}

/// The same; nothing if the peer hangs up without a word.
///
/// # Errors
/// As of [`hello`].
pub(super) fn greet(link: &mut Link, store: [u8; 16]) -> Result<Option<Hello>> {
    let mine = Hello {
        spoken: SPOKEN,
        store,
        agent: concat!("zspace ", env!("CARGO_PKG_VERSION")).into(),
    };
    let (kind, body) = mine.encode();
    link.put(kind, &[&body])?;
    link.flush()?;
    let no_hello = |e: Error| match e.kind() {
        Kind::Damage => Error::damage("the other side began with something that is no zspace hello"),
        _ => e,
    };
    let Some(frame) = link.next().map_err(no_hello)? else {
        return Ok(None);
    };
    if let Ok(Answer::Failed(e)) = Answer::decode(&frame) {
        return Err(e);
    }
    let theirs = Hello::decode(&frame).map_err(no_hello)?;
    link.greeted();
    if theirs.spoken.0 > SPOKEN.1 || theirs.spoken.1 < SPOKEN.0 {
        let why = format!(
            "the other side ({}) speaks versions {} to {} of the protocol, this one {} to {}",
            theirs.agent, theirs.spoken.0, theirs.spoken.1, SPOKEN.0, SPOKEN.1
        );
        return Err(Error::new(Kind::Unsupported, why));
    }
    Ok(Some(theirs))
}

/// Asks over a link.
pub(super) struct Asker<'a> {
    link: &'a mut Link,
    /// Bytes and ids of the requests on their way, the oldest first.
    flying: VecDeque<(usize, usize)>,
    bytes: usize,
    /// The most answers that may be awaited.
    most: usize,
}

impl<'a> Asker<'a> {
    pub(super) fn new(link: &'a mut Link, most: Option<usize>) -> Self {
        Asker {
            link,
            flying: VecDeque::new(),
            bytes: 0,
            most: most.unwrap_or(usize::MAX).max(1),
        }
    }

    /// The link, for its figures.
    pub(super) fn link(&mut self) -> &mut Link {
        self.link
    }

    /// Sends a request that is answered with one frame, and its answer.
    fn ask(&mut self, request: &Request) -> Result<Answer> {
        debug_assert!(self.flying.is_empty());
        let (kind, body) = request.encode();
        self.link.put(kind, &[&body])?;
        self.hear()
    }

    fn hear(&mut self) -> Result<Answer> {
        let Some(frame) = self.link.next()? else {
            return Err(Error::new(Kind::Io, "the peer hung up before it had answered"));
        };
        match Answer::decode(&frame)? {
            Answer::Failed(e) => Err(e),
            answer => Ok(answer),
        }
    }

    /// All branches and tags.
    pub(super) fn refs(&mut self) -> Result<Vec<Ref>> {
        let mut all: Vec<Ref> = Vec::new();
        let mut said = 0;
        loop {
            let after = all.last().map_or(String::new(), |r| r.name.clone());
            let Answer::Refs { more, refs } = self.ask(&Request::Refs { after })? else {
                return Err(unexpected("refs"));
            };
            // Otherwise it could go on for ever.
            let last = all.last().map(|r| &r.name);
            let ordered = refs.is_sorted_by(|a, b| a.name < b.name);
            if !ordered
                || refs.first().is_some_and(|r| last.is_some_and(|l| r.name <= *l))
                || more && refs.is_empty()
            {
                return Err(Error::damage("the peer lists refs out of order"));
            }
            said += refs
                .iter()
                .map(|r| r.name.len() + r.signature.len() + 100)
                .sum::<usize>();
            all.extend(refs);
            if !more {
                return Ok(all);
            }
            if all.len() > MAX_REFS || said > MAX_SAID {
                return Err(Error::new(Kind::Limit, "the peer has too many refs"));
            }
        }
    }

    /// The ids of all objects.
    pub(super) fn objects(&mut self) -> Result<Vec<ObjectId>> {
        let mut all: Vec<ObjectId> = Vec::new();
        loop {
            let after = all.last().copied().unwrap_or(ObjectId([0; 32]));
            let Answer::Objects { more, ids } = self.ask(&Request::Objects { after })? else {
                return Err(unexpected("objects"));
            };
            if !ids.is_sorted_by(|a, b| a < b)
                || ids.first().is_some_and(|id| *id <= after)
                || more && ids.is_empty()
            {
                return Err(Error::damage("the peer lists objects out of order"));
            }
            all.extend(ids);
            if !more {
                return Ok(all);
            }
            if all.len() > MAX_REFS {
                return Err(Error::new(Kind::Limit, "the peer has too many objects"));
            }
        }
    }

    /// An object's manifest, as it came; nothing if the peer has not got it.
    pub(super) fn object(&mut self, id: ObjectId) -> Result<Option<Vec<u8>>> {
        match self.ask(&Request::Object(Target::Object(id)))? {
            Answer::Object(bytes) => Ok(Some(bytes)),
            Answer::Missing { .. } => Ok(None),
            _ => Err(unexpected("an object")),
        }
    }

    /// Whether the peer has something, and all of it is right, as it says itself.
    pub(super) fn check(&mut self, what: Checked) -> Result<State> {
        match self.ask(&Request::Check(what))? {
            Answer::State(state) => Ok(state),
            _ => Err(unexpected("a state")),
        }
    }

    /// Records of an object with their ids.
    pub(super) fn records(&mut self, of: Target, places: &[Place]) -> Result<Vec<(RecordId, ObjectRecord)>> {
        let places = places.to_vec();
        match self.ask(&Request::Records { of, places })? {
            Answer::Records(bytes) => ObjectRecord::decode_all(Width::FULL, &bytes),
            Answer::Missing { .. } => Err(Error::new(Kind::NotFound, "the peer has not got these records")),
            _ => Err(unexpected("records")),
        }
    }

    /// A version, checked against its id.
    pub(super) fn version(&mut self, id: VersionId) -> Result<Version> {
        let request = Request::Log {
            head: id,
            known: Vec::new(),
        };
        let versions = match self.ask(&request)? {
            Answer::Log { versions, .. } => versions,
            Answer::Missing { .. } => return Err(no_version(id)),
            _ => return Err(unexpected("versions")),
        };
        let first = versions.into_iter().next().filter(|v| v.id() == id);
        first.ok_or_else(|| {
            Error::damage(format!(
                "what the peer sent for version {} has another id",
                id.short()
            ))
        })
    }

    /// All bytes of a node, decoded; not checked. `Limit` if there are more than `most`.
    pub(super) fn plain(&mut self, node: Readable, most: u64) -> Result<Vec<u8>> {
        let mut all = Vec::new();
        loop {
            let from = all.len() as u64;
            match self.ask(&read(node, from))? {
                Answer::Bytes { bytes, .. } => all.extend_from_slice(&bytes),
                Answer::Missing { .. } => {
                    return Err(Error::new(Kind::NotFound, "the peer has not got this node"));
                }
                _ => return Err(unexpected("bytes")),
            }
            let got = all.len() as u64 - from;
            if got < MAX_READ {
                return Ok(all);
            }
            if all.len() as u64 > most {
                return Err(Error::new(
                    Kind::Limit,
                    "the peer sent more of a node than it may have",
                ));
            }
        }
    }

    /// A file's manifest, as it lies in a pack.
    pub(super) fn manifest(&mut self, id: NodeId) -> Result<Sent> {
        self.nodes(&[id])?;
        self.node()
    }

    /// The decoded bytes of many nodes, not checked; `take` gets each, or nothing if the peer has not got it.
    pub(super) fn plains(
        &mut self,
        nodes: &[(u8, NodeId)],
        take: &mut dyn FnMut(u8, NodeId, Option<Vec<u8>>) -> Result<()>,
    ) -> Result<()> {
        // Most chunks take two.
        let reads = |(kind, id): &(u8, NodeId)| {
            let of = Readable::Node(*kind, *id);
            [0, MAX_READ].map(|from| read(of, from))
        };
        let mut halves = Vec::new();
        let mut left = nodes.iter();
        let mut longer = Vec::new();
        self.many(&mut nodes.iter().flat_map(reads), &mut |answer| {
            halves.push(match answer {
                Answer::Bytes { bytes, .. } => Some(bytes),
                Answer::Missing { .. } => None,
                _ => return Err(unexpected("bytes")),
            });
            let [first, second] = &mut halves[..] else {
                return Ok(());
            };
            let all = first.take().zip(second.take()).map(|(mut a, b)| {
                a.extend_from_slice(&b);
                a
            });
            halves.clear();
            let (kind, id) = left.next().ok_or_else(|| unexpected("bytes"))?;
            match all {
                Some(all) if all.len() as u64 == 2 * MAX_READ => {
                    longer.push((*kind, *id));
                    Ok(())
                }
                all => take(*kind, *id, all),
            }
        })?;
        for (kind, id) in longer {
            let most = NodeKind::from_tag(kind).map_or(0, |k| u64::from(k.max_len()));
            let all = self.plain(Readable::Node(kind, id), most)?;
            take(kind, id, Some(all))?;
        }
        Ok(())
    }

    /// The line of versions that leads to `head`, the oldest first, from the first that `known` does not hold, and what that one
    /// follows. Each is checked against the id that names it. `named` are told to the peer.
    pub(super) fn line(
        &mut self,
        head: VersionId,
        named: &[VersionId],
        known: &dyn Fn(&VersionId) -> bool,
    ) -> Result<(Vec<Version>, Option<VersionId>)> {
        let (mut line, mut next) = (Vec::new(), Some(head));
        let mut said = 0;
        while let Some(at) = next.filter(|id| !known(id)) {
            let request = Request::Log {
                head: at,
                known: named.to_vec(),
            };
            let (more, versions) = match self.ask(&request)? {
                Answer::Log { more, versions } => (more, versions),
                Answer::Missing { .. } => return Err(no_version(at)),
                _ => return Err(unexpected("versions")),
            };
            if versions.is_empty() {
                return Err(Error::damage(format!("the peer left version {} out", at.short())));
            }
            for version in versions {
                let Some(id) = next.filter(|id| !known(id)) else {
                    break;
                };
                if version.id() != id {
                    let why = format!("what the peer sent for version {} has another id", id.short());
                    return Err(Error::damage(why));
                }
                next = version.parents.first().copied();
                said += version.message.len() + version.entry.len() + 32 * version.parents.len() + 200;
                line.push(version);
            }
            if line.len() > MAX_VERSIONS || said > MAX_SAID {
                return Err(Error::new(Kind::Limit, "more versions than one line may have"));
            }
            if !more && next.is_some_and(|id| !known(&id)) {
                return Err(Error::damage(
                    "the peer does not have all versions before what it names",
                ));
            }
        }
        line.reverse();
        Ok((line, next))
    }

    /// Sends requests that are answered with one frame each, many at a time, and has each answer taken, in their order.
    pub(super) fn many(
        &mut self,
        requests: &mut dyn Iterator<Item = Request>,
        take: &mut dyn FnMut(Answer) -> Result<()>,
    ) -> Result<()> {
        let mut waiting = None;
        loop {
            while let Some((kind, body)) = waiting.take().or_else(|| requests.next().map(|r| r.encode())) {
                let full = self.bytes + body.len() + 5 > UNANSWERED || self.flying.len() >= self.most;
                if full && !self.flying.is_empty() {
                    waiting = Some((kind, body));
                    break;
                }
                self.link.put(kind, &[&body])?;
                self.flying.push_back((body.len() + 5, 1));
                self.bytes += body.len() + 5;
            }
            if self.flying.is_empty() {
                return Ok(());
            }
            let answer = self.hear()?;
            self.landed();
            take(answer)?;
        }
    }

    /// One of what the oldest request asks for is here.
    fn landed(&mut self) {
        if let Some((bytes, left)) = self.flying.front_mut() {
            *left -= 1;
            if *left == 0 {
                self.bytes -= *bytes;
                self.flying.pop_front();
            }
        }
    }

    /// How many more nodes can be asked for now.
    pub(super) fn room(&self) -> usize {
        let flying = self.flying.iter().map(|(_, left)| left).sum();
        let ids = UNANSWERED.saturating_sub(self.bytes + 16) / 32;
        ids.min(self.most.saturating_sub(flying))
    }

    /// Asks for nodes: at most as many as there is room for.
    pub(super) fn nodes(&mut self, ids: &[NodeId]) -> Result<()> {
        for ids in ids.chunks(MAX_IDS) {
            let (kind, body) = Request::Nodes(ids.to_vec()).encode();
            self.link.put(kind, &[&body])?;
            self.flying.push_back((body.len() + 5, ids.len()));
            self.bytes += body.len() + 5;
        }
        Ok(())
    }

    /// The next node of those that were asked for.
    pub(super) fn node(&mut self) -> Result<Sent> {
        let answer = self.hear()?;
        self.landed();
        let (kind, meta, len, mut payload) = match answer {
            Answer::Missing { damaged: true } => return Ok(Sent::Damaged),
            Answer::Missing { damaged: false } => return Ok(Sent::Absent),
            Answer::Node {
                kind,
                meta,
                len,
                first,
            } => (kind, meta, len, first),
            _ => return Err(unexpected("a node")),
        };
        if len > MAX_PAYLOAD || meta.len() > 255 {
            return Err(Error::damage(format!("the peer announces a node of {len} bytes")));
        }
        while (payload.len() as u64) < len {
            match self.hear()? {
                Answer::More(more) if !more.is_empty() => payload.extend_from_slice(&more),
                _ => return Err(unexpected("the rest of a node")),
            }
        }
        if payload.len() as u64 != len {
            return Err(Error::damage("the peer sent more of a node than it announced"));
        }
        Ok(Sent::Node(RawNode {
            kind,
            meta,
            payload: payload.into(),
        }))
    }
}

/// Asks for as many bytes as may be asked for at once.
fn read(of: Readable, from: u64) -> Request {
    Request::Read {
        of,
        bytes: from..from + MAX_READ,
        packed: true,
    }
}

fn no_version(id: VersionId) -> Error {
    Error::new(Kind::NotFound, format!("the peer has no version {id}"))
}

fn unexpected(what: &str) -> Error {
    Error::damage(format!("the peer answered with something else than {what}"))
}

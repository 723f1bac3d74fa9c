//! Messages as bytes, and back (PROTOCOL.md, "Messages").

use super::link::{Frame, MAX_FRAME};
use super::message::*;
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Kind, Result};
use crate::id::{FileHash, NodeId, ObjectId, VersionId};
use crate::store::{Place, Version};
use std::borrow::Cow;

/// What a hello begins with.
const MAGIC: &[u8; 12] = b"zspace.peer\0";
/// The longest signature, in bytes.
const MAX_SIGNATURE: usize = 4096;
/// How hard bytes of objects are compressed.
const ZSTD: i32 = 3;
/// The longest text of an error, in bytes.
const MAX_TEXT: usize = 1000;

/// Kinds of errors by their numbers, from 1 on.
pub(super) const CODES: [Kind; 9] = [
    Kind::Usage,
    Kind::Unsupported,
    Kind::NotFound,
    Kind::Refused,
    Kind::Damage,
    Kind::Busy,
    Kind::Limit,
    Kind::NoSpace,
    Kind::Io,
];

/// The types of frames.
mod kind {
    pub(super) const HELLO: u8 = 0x01;
    pub(super) const REFS: u8 = 0x10;
    pub(super) const LOG: u8 = 0x11;
    pub(super) const NODES: u8 = 0x12;
    pub(super) const OBJECT: u8 = 0x13;
    pub(super) const OBJECTS: u8 = 0x14;
    pub(super) const RECORDS: u8 = 0x15;
    pub(super) const READ: u8 = 0x16;
    pub(super) const CHECK: u8 = 0x17;
    pub(super) const PUSH: u8 = 0x18;
    pub(super) const PUSH_OBJECT: u8 = 0x19;
    pub(super) const REFS_ARE: u8 = 0x20;
    pub(super) const LOG_IS: u8 = 0x21;
    pub(super) const NODE: u8 = 0x22;
    pub(super) const MORE: u8 = 0x23;
    pub(super) const MISSING: u8 = 0x24;
    pub(super) const OBJECT_IS: u8 = 0x25;
    pub(super) const OBJECTS_ARE: u8 = 0x26;
    pub(super) const RECORDS_ARE: u8 = 0x27;
    pub(super) const TAKEN: u8 = 0x28;
    pub(super) const BYTES: u8 = 0x29;
    pub(super) const STATE: u8 = 0x2a;
    pub(super) const FAILED: u8 = 0x2f;
}

/// What a frame says, encoded again, for each kind of message that it can be: what the fuzz targets compare. Texts lose what cannot be
/// printed, and bytes may be packed in many ways, so of those there is nothing to compare.
pub fn encoded_again(kind: u8, body: &[u8]) -> Vec<Frame> {
    let frame = (kind, body.to_vec());
    let hello = Hello::decode(&frame).ok().map(|hello| hello.encode());
    let request = Request::decode(&frame)
        .ok()
        .flatten()
        .map(|request| request.encode());
    let answer = match Answer::decode(&frame) {
        Ok(Answer::Failed(_) | Answer::State(_) | Answer::Bytes { .. }) | Err(_) => None,
        Ok(answer) => Some(answer.encode()),
    };
    [hello, request, answer].into_iter().flatten().collect()
}

impl Hello {
    /// As a frame.
    pub(super) fn encode(&self) -> Frame {
        let mut w = Writer::new();
        w.raw(MAGIC)
            .u16(self.spoken.0)
            .u16(self.spoken.1)
            .raw(&self.store);
        w.blob(self.agent.as_bytes());
        (kind::HELLO, w.finish())
    }

    /// From a frame.
    ///
    /// # Errors
    /// Damage, if it is none; `Failed`'s error, if the other side says hello with one.
    pub(super) fn decode((kind, body): &Frame) -> Result<Self> {
        if *kind == kind::FAILED {
            return Err(failed(&mut Reader::new(body, "an error"))?);
        }
        let mut r = Reader::new(body, "the peer's hello");
        if *kind != kind::HELLO || r.raw(MAGIC.len())? != MAGIC {
            return Err(Error::damage("the other side is no zspace peer"));
        }
        let hello = Hello {
            spoken: (r.u16()?, r.u16()?),
            store: r.fixed()?,
            agent: short(r.text()?)?,
        };
        r.finish()?;
        if hello.spoken.0 > hello.spoken.1 {
            return Err(Error::damage("the other side speaks no version at all"));
        }
        Ok(hello)
    }
}

impl Request {
    /// As a frame.
    pub(super) fn encode(&self) -> Frame {
        let mut w = Writer::new();
        let kind = match self {
            Request::Refs { after } => {
                w.blob(after.as_bytes());
                kind::REFS
            }
            Request::Log { head, known } => {
                w.raw(&head.0).varint(known.len() as u64);
                known.iter().for_each(|id| {
                    w.raw(&id.0);
                });
                kind::LOG
            }
            Request::Nodes(ids) => {
                w.varint(ids.len() as u64);
                ids.iter().for_each(|id| {
                    w.raw(&id.0);
                });
                kind::NODES
            }
            Request::Object(of) => {
                of.encode(&mut w);
                kind::OBJECT
            }
            Request::Objects { after } => {
                w.raw(&after.0);
                kind::OBJECTS
            }
            Request::Records { of, places } => {
                of.encode(&mut w);
                w.varint(places.len() as u64);
                places.iter().for_each(|p| {
                    w.u8(p.scale).varint(p.index);
                });
                kind::RECORDS
            }
            Request::Read { of, bytes, packed } => {
                match of {
                    Readable::Whole(target) => target.encode(&mut w),
                    Readable::Node(kind, id) => {
                        w.u8(NODE).u8(*kind).raw(&id.0);
                    }
                }
                w.varint(bytes.start)
                    .varint(bytes.end - bytes.start)
                    .u8(u8::from(*packed));
                kind::READ
            }
            Request::Check(what) => {
                match what {
                    Checked::Object(id) => w.u8(0).raw(&id.0),
                    Checked::Version(id) => w.u8(1).raw(&id.0),
                };
                kind::CHECK
            }
            Request::Push {
                branch,
                head,
                signature,
            } => {
                w.blob(branch.as_bytes()).raw(&head.0).blob(signature);
                kind::PUSH
            }
            Request::PushObject(id) => {
                w.raw(&id.0);
                kind::PUSH_OBJECT
            }
        };
        (kind, w.finish())
    }

    /// From a frame; nothing if it is no request.
    ///
    /// # Errors
    /// Damage, if it is malformed.
    pub(super) fn decode((kind, body): &Frame) -> Result<Option<Self>> {
        let mut r = Reader::new(body, "a peer's request");
        let request = match *kind {
            kind::REFS => Request::Refs {
                after: short(r.text()?)?,
            },
            kind::LOG => Request::Log {
                head: VersionId(r.id()?),
                known: ids(&mut r, MAX_KNOWN)?.into_iter().map(VersionId).collect(),
            },
            kind::NODES => Request::Nodes(ids(&mut r, MAX_IDS)?.into_iter().map(NodeId).collect()),
            kind::OBJECT => Request::Object(Target::decode(&mut r)?),
            kind::OBJECTS => Request::Objects {
                after: ObjectId(r.id()?),
            },
            kind::RECORDS => {
                let (of, n) = (Target::decode(&mut r)?, r.count(2)?);
                if n > MAX_PLACES {
                    let why = format!("a peer asked for {n} records: at most {MAX_PLACES} are allowed");
                    return Err(Error::damage(why));
                }
                let mut place = || {
                    Ok(Place {
                        scale: r.u8()?,
                        index: r.varint()?,
                    })
                };
                let places = (0..n).map(|_| place()).collect::<Result<_>>()?;
                Request::Records { of, places }
            }
            kind::READ => {
                let of = match r.u8()? {
                    NODE => Readable::Node(r.u8()?, NodeId(r.id()?)),
                    tag => Readable::Whole(Target::rest(tag, &mut r)?),
                };
                let (from, len, packed) = (r.varint()?, r.varint()?, flag(&mut r)?);
                let to = from.checked_add(len).filter(|_| len <= MAX_READ);
                let to = to.ok_or_else(|| {
                    let why = format!("a peer asked for {len} bytes at once: at most {MAX_READ} are allowed");
                    Error::damage(why)
                })?;
                Request::Read {
                    of,
                    bytes: from..to,
                    packed,
                }
            }
            kind::CHECK => {
                let version = flag(&mut r)?;
                Request::Check(match version {
                    false => Checked::Object(ObjectId(r.id()?)),
                    true => Checked::Version(VersionId(r.id()?)),
                })
            }
            kind::PUSH => Request::Push {
                branch: short(r.text()?)?,
                head: VersionId(r.id()?),
                signature: signature(&mut r)?,
            },
            kind::PUSH_OBJECT => Request::PushObject(ObjectId(r.id()?)),
            _ => return Ok(None),
        };
        r.finish()?;
        Ok(Some(request))
    }
}

impl Answer {
    /// As a frame.
    pub(super) fn encode(&self) -> Frame {
        let mut w = Writer::new();
        let kind = match self {
            Answer::Refs { more, refs } => {
                w.u8(u8::from(*more)).varint(refs.len() as u64);
                refs.iter().for_each(|r| r.encode(&mut w));
                kind::REFS_ARE
            }
            Answer::Log { more, versions } => {
                w.u8(u8::from(*more)).varint(versions.len() as u64);
                versions.iter().for_each(|v| {
                    w.blob(&v.encode());
                });
                kind::LOG_IS
            }
            Answer::Node {
                kind,
                meta,
                len,
                first,
            } => {
                w.u8(*kind).blob(meta).varint(*len).raw(first);
                kind::NODE
            }
            Answer::More(bytes) => {
                w.raw(bytes);
                kind::MORE
            }
            Answer::Missing { damaged } => {
                w.u8(u8::from(*damaged));
                kind::MISSING
            }
            Answer::Object(manifest) => {
                w.raw(manifest);
                kind::OBJECT_IS
            }
            Answer::Objects { more, ids } => {
                w.u8(u8::from(*more)).varint(ids.len() as u64);
                ids.iter().for_each(|id| {
                    w.raw(&id.0);
                });
                kind::OBJECTS_ARE
            }
            Answer::Records(records) => {
                w.raw(records);
                kind::RECORDS_ARE
            }
            Answer::Bytes { bytes, packed } => {
                let (coding, bytes) = match packed {
                    true => pack(bytes),
                    false => (0, Cow::Borrowed(&bytes[..])),
                };
                w.u8(coding).raw(&bytes);
                kind::BYTES
            }
            Answer::State(state) => {
                match state {
                    State::Right => w.u8(0),
                    State::Absent => w.u8(1),
                    State::Damaged(why) => w.u8(2).blob(cut(why).as_bytes()),
                };
                kind::STATE
            }
            Answer::Taken => kind::TAKEN,
            Answer::Failed(e) => {
                let code = CODES
                    .iter()
                    .position(|k| *k == e.kind())
                    .unwrap_or(CODES.len() - 1);
                w.u8(code as u8 + 1).blob(cut(&e.to_string()).as_bytes());
                kind::FAILED
            }
        };
        (kind, w.finish())
    }

    /// From a frame.
    ///
    /// # Errors
    /// Damage, if it is no answer or malformed.
    pub(super) fn decode((kind, body): &Frame) -> Result<Self> {
        let mut r = Reader::new(body, "a peer's answer");
        let answer = match *kind {
            kind::REFS_ARE => {
                let (more, n) = (flag(&mut r)?, r.count(4)?);
                Answer::Refs {
                    more,
                    refs: (0..n).map(|_| Ref::decode(&mut r)).collect::<Result<_>>()?,
                }
            }
            kind::LOG_IS => {
                let (more, n) = (flag(&mut r)?, r.count(40)?);
                Answer::Log {
                    more,
                    versions: (0..n)
                        .map(|_| Version::decode(r.blob()?))
                        .collect::<Result<_>>()?,
                }
            }
            kind::NODE => {
                let (kind, meta, len) = (r.u8()?, r.blob()?.to_vec(), r.varint()?);
                let first = r.raw(r.remaining())?.to_vec();
                Answer::Node {
                    kind,
                    meta,
                    len,
                    first,
                }
            }
            kind::MORE => Answer::More(r.raw(r.remaining())?.to_vec()),
            kind::MISSING => Answer::Missing {
                damaged: flag(&mut r)?,
            },
            kind::OBJECT_IS => Answer::Object(r.raw(r.remaining())?.to_vec()),
            kind::OBJECTS_ARE => {
                let more = flag(&mut r)?;
                Answer::Objects {
                    more,
                    ids: ids(&mut r, MAX_FRAME / 32)?.into_iter().map(ObjectId).collect(),
                }
            }
            kind::RECORDS_ARE => Answer::Records(r.raw(r.remaining())?.to_vec()),
            kind::BYTES => {
                let coding = r.u8()?;
                Answer::Bytes {
                    bytes: unpack(coding, r.raw(r.remaining())?)?,
                    packed: coding != 0,
                }
            }
            kind::STATE => Answer::State(match r.u8()? {
                0 => State::Right,
                1 => State::Absent,
                2 => State::Damaged(printable(r.text()?)),
                n => {
                    return Err(Error::damage(format!(
                        "the peer sent a state {n}, which does not exist"
                    )));
                }
            }),
            kind::TAKEN => Answer::Taken,
            kind::FAILED => Answer::Failed(failed(&mut r)?),
            other => {
                let why = format!("the peer sent a frame of type {other:#04x} where an answer is due");
                return Err(Error::damage(why));
            }
        };
        r.finish()?;
        Ok(answer)
    }
}

/// What says that a target is an object, a file, or, to be read only, a node.
const OBJECT: u8 = 0;
const FILE: u8 = 1;
const NODE: u8 = 2;

impl Target {
    fn encode(&self, w: &mut Writer) {
        match self {
            Target::Object(id) => w.u8(OBJECT).raw(&id.0),
            Target::File(hash, len) => w.u8(FILE).raw(&hash.0).varint(*len),
        };
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        let tag = r.u8()?;
        Self::rest(tag, r)
    }

    fn rest(tag: u8, r: &mut Reader<'_>) -> Result<Self> {
        match tag {
            OBJECT => Ok(Target::Object(ObjectId(r.id()?))),
            FILE => Ok(Target::File(FileHash(r.id()?), r.varint()?)),
            n => Err(Error::damage(format!(
                "a peer asked for a thing of kind {n}, which does not exist"
            ))),
        }
    }
}

impl Ref {
    fn encode(&self, w: &mut Writer) {
        w.u8(u8::from(self.tag)).blob(self.name.as_bytes());
        w.u8(u8::from(self.head.is_some()));
        if let Some(id) = &self.head {
            w.raw(&id.0);
        }
        w.varint(self.count).blob(&self.signature);
    }

    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        Ok(Ref {
            tag: flag(r)?,
            name: short(r.text()?)?,
            head: match flag(r)? {
                true => Some(VersionId(r.id()?)),
                false => None,
            },
            count: r.varint()?,
            signature: signature(r)?,
        })
    }
}

fn flag(r: &mut Reader<'_>) -> Result<bool> {
    match r.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        n => Err(Error::damage(format!("the peer sent {n} where 0 or 1 is due"))),
    }
}

fn ids(r: &mut Reader<'_>, most: usize) -> Result<Vec<[u8; 32]>> {
    let n = r.count(32)?;
    if n > most {
        return Err(Error::damage(format!(
            "the peer sent {n} ids: at most {most} are allowed"
        )));
    }
    (0..n).map(|_| r.id()).collect()
}

fn signature(r: &mut Reader<'_>) -> Result<Vec<u8>> {
    let signature = r.blob()?;
    match signature.len() <= MAX_SIGNATURE {
        true => Ok(signature.to_vec()),
        false => Err(Error::damage("the peer sent a signature that is too long")),
    }
}

/// A text of at most 255 bytes.
fn short(text: &str) -> Result<String> {
    match text.len() {
        0..=255 => Ok(text.to_owned()),
        n => Err(Error::damage(format!(
            "the peer sent a name of {n} bytes: at most 255 are allowed"
        ))),
    }
}

/// The error that the other side tells of.
fn failed(r: &mut Reader<'_>) -> Result<Error> {
    let (code, text) = (r.u8()?, r.text()?);
    let kind = usize::from(code).checked_sub(1).and_then(|at| CODES.get(at));
    let kind = match kind {
        // What it could not do with what it was told, or for want of room, is nothing that is wrong here.
        None | Some(Kind::Usage | Kind::NoSpace) => Kind::Io,
        Some(kind) => *kind,
    };
    Ok(Error::new(kind, format!("the peer says: {}", printable(text))))
}

/// The beginning of a text, if it is long.
fn cut(text: &str) -> String {
    text.chars().take(MAX_TEXT / 4).collect()
}

/// What can be printed of a text from elsewhere.
fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_TEXT).collect()
}

/// Bytes as they are sent: 0 as they are, 1 as one zstd frame, if that is smaller.
fn pack(bytes: &[u8]) -> (u8, Cow<'_, [u8]>) {
    match zstd::bulk::compress(bytes, ZSTD) {
        Ok(packed) if packed.len() < bytes.len() => (1, packed.into()),
        _ => (0, bytes.into()),
    }
}

fn unpack(coding: u8, bytes: &[u8]) -> Result<Vec<u8>> {
    match coding {
        0 => Ok(bytes.to_vec()),
        1 => zstd::bulk::decompress(bytes, MAX_READ as usize)
            .map_err(|e| Error::damage(format!("the peer sent bytes that do not unpack: {e}"))),
        n => Err(Error::damage(format!(
            "the peer sent bytes in a coding {n}, which does not exist"
        ))),
    }
}

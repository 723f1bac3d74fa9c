//! Audits: whether replicas have what they should have, pinned by its id. None is believed: what it says is right is challenged.

use super::address::Address;
use super::ask::{Asker, hello};
use super::connect::{Peer, Ways};
use super::link::Link;
use super::message::{Answer, Checked, MAX_READ, Readable, Request, State, Target};
use crate::error::{Error, Kind, Result};
use crate::id::{FileHash, FileHasher, NodeId, ObjectId, VersionId};
use crate::store::{EntryKind, NodeKind, ObjectManifest, ObjectRecords, Tree, Width, tree_id};
use parking_lot::Mutex;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};

/// Atoms of an object that a replica must prove.
const CHALLENGES: u64 = 4;
/// Files of a version that it must show, if they are not too large.
const FILES: u64 = 16;
/// Replicas that are asked at once.
const AT_ONCE: usize = 32;

/// Something that replicas should have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    what: Checked,
    replicas: Vec<Address>,
}

/// What came of a check at one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    /// It has it, and proved parts of it.
    Verified,
    /// It has not got it, or not as it should be.
    Stale,
    /// It could not be asked, or says that it has it and nothing of it could be proved.
    Unknown,
}

/// One line of an audit.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Verdict {
    /// `object` or `version`.
    pub kind: &'static str,
    /// Its id.
    pub id: String,
    /// Who was asked.
    pub replica: String,
    /// What came of it.
    pub state: Standing,
    /// Why; what was proved, if it is verified.
    pub why: String,
    /// Bytes that were proved.
    pub proved: u64,
    /// Bytes that there are, if it could be told.
    pub bytes: Option<u64>,
}

/// Reads checks: lines of `object ID PEER…` and `version ID PEER…`; what follows `#` is a comment.
///
/// # Errors
/// `Usage`, with the number of the line.
pub fn parse_checks(text: &str) -> Result<Vec<Check>> {
    let mut checks = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let at = |e: Error| Error::new(Kind::Usage, format!("line {}: {e}", n + 1));
        let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
        let Some(kind) = words.next() else { continue };
        let form = || {
            at(Error::new(
                Kind::Usage,
                "write `object ID PEER…` or `version ID PEER…`",
            ))
        };
        let id = words.next().ok_or_else(form)?;
        let what = match kind {
            "object" => Checked::Object(id.parse::<ObjectId>().map_err(at)?),
            "version" => Checked::Version(id.parse::<VersionId>().map_err(at)?),
            _ => return Err(form()),
        };
        let replicas: Vec<Address> = words.map(str::parse).collect::<Result<_>>().map_err(at)?;
        if replicas.is_empty() {
            return Err(form());
        }
        checks.push(Check { what, replicas });
    }
    match checks.is_empty() {
        true => Err(Error::new(Kind::Usage, "there is nothing to check in it")),
        false => Ok(checks),
    }
}

/// Asks every replica, all at once; the verdicts in the order of the checks. Of each version at most `read` bytes of files are read.
/// `told` hears of each verdict as it comes.
pub fn audit(checks: &[Check], ways: &Ways, read: u64, told: &(dyn Fn(&Verdict) + Sync)) -> Vec<Verdict> {
    let mut by_replica: BTreeMap<String, (Address, Vec<(usize, Checked)>)> = BTreeMap::new();
    let mut order = 0;
    for check in checks {
        for replica in &check.replicas {
            let entry = by_replica.entry(replica.to_string());
            let (_, all) = entry.or_insert_with(|| (replica.clone(), Vec::new()));
            all.push((order, check.what));
            order += 1;
        }
    }
    let todo = Mutex::new(by_replica.into_iter().collect::<Vec<_>>());
    let done: Mutex<Vec<(usize, Verdict)>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(todo.lock().len()) {
            scope.spawn(|| {
                loop {
                    let Some((name, (address, checks))) = todo.lock().pop() else {
                        break;
                    };
                    replica(&address, ways, read, &checks, &mut |at, what, came| {
                        let (kind, id) = match what {
                            Checked::Object(id) => ("object", id.to_string()),
                            Checked::Version(id) => ("version", id.to_string()),
                        };
                        let verdict = Verdict {
                            kind,
                            id,
                            replica: name.clone(),
                            state: came.0,
                            why: came.1,
                            proved: came.2.as_ref().map_or(0, |p| p.proved),
                            bytes: came.2.map(|p| p.bytes),
                        };
                        told(&verdict);
                        done.lock().push((at, verdict));
                    });
                }
            });
        }
    });
    let mut done = done.into_inner();
    done.sort_by_key(|d| d.0);
    done.into_iter().map(|d| d.1).collect()
}

/// Asks one replica everything.
fn replica(
    address: &Address,
    ways: &Ways,
    read: u64,
    checks: &[(usize, Checked)],
    told: &mut dyn FnMut(usize, Checked, (Standing, String, Option<Proved>)),
) {
    let mut peer: Option<Peer> = None;
    for (at, what) in checks {
        let mut judge = || {
            if peer.is_none() {
                let mut new = Peer::connect(address, ways)?;
                hello(new.link()?, [0; 16]).map_err(|e| new.explained(e, address))?;
                peer = Some(new);
            }
            match peer.as_mut() {
                Some(peer) => judge(peer.link()?, *what, read),
                None => Err(Error::new(Kind::Io, "there is no connection")),
            }
        };
        match judge() {
            Ok(Judged::Proved(proved)) if proved.proved == 0 && proved.bytes > 0 => {
                let why = format!(
                    "says it has it; {}: each file is larger, --read more",
                    proved.text
                );
                told(*at, *what, (Standing::Unknown, why, Some(proved)));
            }
            Ok(Judged::Proved(proved)) => {
                let text = proved.text.clone();
                told(*at, *what, (Standing::Verified, text, Some(proved)));
            }
            Ok(Judged::Told(why)) => told(*at, *what, (Standing::Stale, why, None)),
            Ok(Judged::Caught(why)) => {
                peer = None;
                told(*at, *what, (Standing::Stale, why, None));
            }
            Err(e) => {
                // Nothing more can be said over that connection.
                peer = None;
                told(*at, *what, (Standing::Unknown, e.to_string(), None));
            }
        }
    }
}

/// What came of asking for one thing.
enum Judged {
    /// It proved so much of it.
    Proved(Proved),
    /// It has it not as it should, and says so.
    Told(String),
    /// It says that it has it as it should, and that is not so. Nothing that it says after that is listened to.
    Caught(String),
}

/// What a replica proved.
struct Proved {
    text: String,
    proved: u64,
    bytes: u64,
}

/// Has a replica check something, and then prove parts of it.
fn judge(link: &mut Link, what: Checked, read: u64) -> Result<Judged> {
    let mut asker = Asker::new(link, None);
    match asker.check(what)? {
        State::Absent => return Ok(Judged::Told("is not there".into())),
        State::Damaged(why) => return Ok(Judged::Told(format!("is damaged: {why}"))),
        State::Right => {}
    }
    let challenged = match what {
        Checked::Object(id) => object(&mut asker, id),
        Checked::Version(id) => version(&mut asker, id, read),
    };
    match challenged {
        Err(e) if e.kind() == Kind::Damage || e.kind() == Kind::NotFound => {
            Ok(Judged::Caught(format!("is said to be right, but {e}")))
        }
        done => done.map(Judged::Proved),
    }
}

/// Has a replica prove some atoms of an object.
fn object(asker: &mut Asker<'_>, id: ObjectId) -> Result<Proved> {
    let missing = || Error::new(Kind::NotFound, "its manifest is not there");
    let bytes = asker.object(id)?.ok_or_else(missing)?;
    let manifest = ObjectManifest::decode(&bytes)?;
    if manifest.id() != id {
        return Err(Error::damage("its manifest has another id"));
    }
    let shape = manifest.shape();
    let mut proved = BTreeMap::new();
    for n in 0..CHALLENGES.min(shape.atoms()) {
        let at = chance(n, manifest.len);
        let places: Vec<_> = shape.path(at..at + 1).collect();
        let records = asker.records(Target::Object(id), &places)?;
        let mut all = ObjectRecords::new(Width::FULL);
        for (_, record) in records {
            all.add(record)?;
        }
        all.range(&manifest, at..at + 1)?;
        let atom = places.iter().find(|p| p.scale == 0).map(|p| p.bytes(shape));
        proved.extend(atom.map(|bytes| (bytes.start, bytes.end - bytes.start)));
    }
    Ok(Proved {
        text: format!("{} of {} atoms proved", proved.len(), shape.atoms()),
        proved: proved.values().sum(),
        bytes: manifest.len,
    })
}

/// A number below `end`, by chance.
fn chance(n: u64, end: u64) -> u64 {
    RandomState::new().hash_one(n) % end.max(1)
}

/// Has a replica show a version, the directories on the way to files that are chosen by chance, and those files, of `read` bytes at most.
fn version(asker: &mut Asker<'_>, id: VersionId, read: u64) -> Result<Proved> {
    let version = asker.version(id)?;
    let mut left = read;
    let mut proved = HashMap::new();
    let mut trees = HashMap::new();
    for n in 0..FILES {
        let Some((hash, len)) = file(asker, &mut trees, version.tree, n)? else {
            // There are no files, or none on that way.
            continue;
        };
        if len <= left && proved.insert(hash, len).is_none() {
            left -= len;
            whole(asker, hash, len)?;
        }
    }
    let bytes: u64 = proved.values().sum();
    Ok(Proved {
        text: format!(
            "{bytes} of {} bytes proved, in {} files",
            version.len,
            proved.len()
        ),
        proved: bytes,
        bytes: version.len,
    })
}

/// Goes down a version's directories to a file; each file is as likely as it is large.
fn file(
    asker: &mut Asker<'_>,
    trees: &mut HashMap<NodeId, Tree>,
    root: NodeId,
    n: u64,
) -> Result<Option<(FileHash, u64)>> {
    let mut at = root;
    loop {
        if let Entry::Vacant(new) = trees.entry(at) {
            let kind = NodeKind::Tree;
            let bytes = asker.plain(Readable::Node(kind as u8, at), u64::from(kind.max_len()))?;
            if tree_id(&bytes) != at {
                return Err(Error::damage(format!("directory {} has another id", at.short())));
            }
            new.insert(Tree::decode(&bytes)?);
        }
        let Some(tree) = trees.get(&at) else {
            return Ok(None);
        };
        let weight = |e: &EntryKind| match e {
            EntryKind::File { len, .. } | EntryKind::Dir { len, .. } => *len,
            EntryKind::Symlink(_) => 0,
        };
        let mut chosen = chance(n, tree.len());
        let entry = tree.entries().iter().find(|e| {
            let skipped = chosen.checked_sub(weight(&e.kind));
            chosen = skipped.unwrap_or(chosen);
            skipped.is_none()
        });
        match entry.map(|e| &e.kind) {
            Some(EntryKind::File { hash, len, .. }) => return Ok(Some((*hash, *len))),
            Some(EntryKind::Dir { tree, .. }) => at = *tree,
            _ => return Ok(None),
        }
    }
}

/// Reads a whole file, and checks its SHA-256.
fn whole(asker: &mut Asker<'_>, hash: FileHash, len: u64) -> Result<()> {
    let of = Readable::Whole(Target::File(hash, len));
    let mut requests = (0..len).step_by(MAX_READ as usize).map(|from| Request::Read {
        of,
        bytes: from..len.min(from + MAX_READ),
        packed: true,
    });
    let (mut hasher, mut got) = (FileHasher::default(), 0);
    asker.many(&mut requests, &mut |answer| match answer {
        Answer::Bytes { bytes, .. } => {
            got += bytes.len() as u64;
            hasher.update(&bytes);
            Ok(())
        }
        _ => Err(Error::new(
            Kind::NotFound,
            format!("file {} cannot be had", hash.short()),
        )),
    })?;
    match got == len && hasher.finish() == hash {
        true => Ok(()),
        false => Err(Error::damage(format!(
            "file {} has another SHA-256",
            hash.short()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_read_line_by_line() {
        let id = "ab".repeat(32);
        let text = format!("# all of them\n\nobject {id} /a unix:/b # two\n version {id} host:dir\n");
        let checks = parse_checks(&text).unwrap();
        assert_eq!(
            checks.iter().map(|c| c.replicas.len()).collect::<Vec<_>>(),
            [2, 1]
        );
        assert_eq!(parse_checks("# none\n").unwrap_err().kind(), Kind::Usage);
        for bad in [
            "object",
            "object 12 /a",
            &format!("object {id}"),
            &format!("thing {id} /a"),
            &format!("object {id} tls:x"),
        ] {
            let e = parse_checks(&format!("\n{bad}")).unwrap_err();
            assert!(
                e.kind() == Kind::Usage && e.to_string().starts_with("line 2: "),
                "{e}"
            );
        }
    }
}

//! Audits: whether replicas have what they should have, pinned by its id. None is believed: what it says is right is challenged.

use super::address::Address;
use super::ask::{Asker, hello};
use super::connect::{Peer, Ways};
use super::link::Link;
use super::message::{Checked, Readable, State, Target};
use crate::error::{Error, Kind, Result};
use crate::id::{ObjectId, VersionId};
use crate::store::{NodeKind, ObjectManifest, ObjectRecords, Width, tree_id};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, RandomState};

/// Atoms of an object that a replica must prove.
const CHALLENGES: u64 = 4;
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
    /// It has it, and proved it.
    Verified,
    /// It has not got it, or not as it should be.
    Stale,
    /// It could not be asked.
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
    /// Why, unless it is verified.
    pub why: String,
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
    Ok(checks)
}

/// Asks every replica, all at once; the verdicts in the order of the checks. `told` hears of each as it comes.
pub fn audit(checks: &[Check], ways: &Ways, told: &(dyn Fn(&Verdict) + Sync)) -> Vec<Verdict> {
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
                    replica(&address, ways, &checks, &mut |at, what, state, why| {
                        let (kind, id) = match what {
                            Checked::Object(id) => ("object", id.to_string()),
                            Checked::Version(id) => ("version", id.to_string()),
                        };
                        let verdict = Verdict {
                            kind,
                            id,
                            replica: name.clone(),
                            state,
                            why,
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
    checks: &[(usize, Checked)],
    told: &mut dyn FnMut(usize, Checked, Standing, String),
) {
    let mut peer: Option<Peer> = None;
    for (at, what) in checks {
        let mut judge = || {
            if peer.is_none() {
                let mut new = Peer::connect(address, ways)?;
                hello(new.link()?, [0; 16])?;
                peer = Some(new);
            }
            match peer.as_mut() {
                Some(peer) => judge(peer.link()?, *what),
                None => Err(Error::new(Kind::Io, "there is no connection")),
            }
        };
        match judge() {
            Ok(None) => told(*at, *what, Standing::Verified, String::new()),
            Ok(Some(why)) => told(*at, *what, Standing::Stale, why),
            Err(e) => {
                // Nothing more can be said over that connection.
                peer = None;
                told(*at, *what, Standing::Unknown, e.to_string());
            }
        }
    }
}

/// Why a replica does not have something as it should; nothing if it has.
fn judge(link: &mut Link, what: Checked) -> Result<Option<String>> {
    let mut asker = Asker::new(link, None);
    match asker.check(what)? {
        State::Absent => return Ok(Some("is not there".into())),
        State::Damaged(why) => return Ok(Some(format!("is damaged: {why}"))),
        State::Right => {}
    }
    let challenged = match what {
        Checked::Object(id) => object(&mut asker, id),
        Checked::Version(id) => version(&mut asker, id),
    };
    match challenged {
        Err(e) if e.kind() == Kind::Damage || e.kind() == Kind::NotFound => {
            Ok(Some(format!("is said to be right, but {e}")))
        }
        done => done.map(|()| None),
    }
}

/// Has a replica prove some atoms of an object.
fn object(asker: &mut Asker<'_>, id: ObjectId) -> Result<()> {
    let missing = || Error::new(Kind::NotFound, "its manifest is not there");
    let bytes = asker.object(id)?.ok_or_else(missing)?;
    let manifest = ObjectManifest::decode(&bytes)?;
    if manifest.id() != id {
        return Err(Error::damage("its manifest has another id"));
    }
    let shape = manifest.shape();
    let random = RandomState::new();
    for n in 0..CHALLENGES.min(shape.atoms()) {
        let at = random.hash_one(n) % manifest.len;
        let places: Vec<_> = shape.path(at..at + 1).collect();
        let records = asker.records(Target::Object(id), &places)?;
        let mut all = ObjectRecords::new(Width::FULL);
        for (_, record) in records {
            all.add(record)?;
        }
        all.range(&manifest, at..at + 1)?;
    }
    Ok(())
}

/// Has a replica show a version and its root.
fn version(asker: &mut Asker<'_>, id: VersionId) -> Result<()> {
    let version = asker.version(id)?;
    let tree = asker.plain(
        Readable::Node(NodeKind::Tree as u8, version.tree),
        u64::from(NodeKind::Tree.max_len()),
    )?;
    match tree_id(&tree) == version.tree {
        true => Ok(()),
        false => Err(Error::damage("its root directory has another id")),
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

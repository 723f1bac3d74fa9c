//! Pulls branches, tags and objects: what is not here is fetched, and all of it is published at once, or nothing.

use super::ask::{Asker, hello};
use super::fetch::{Fetch, Fetched, Root};
use super::link::Link;
use super::message::Ref;
use super::object::{self, Warmth};
use super::signers::{Signers, is_signature};
use crate::error::{Error, Kind, Result};
use crate::id::{ObjectId, VersionId};
use crate::store::{Adopt, Follow, Import, ObjectManifest, ProvenObject, Store, Version, Width, is_name};
use std::collections::{HashMap, HashSet};

/// What to pull.
#[derive(Clone, Debug, Default)]
pub struct PullRequest {
    /// Branches there, and what they are called here; all, under their names, if neither branches nor objects are named.
    pub branches: Vec<(String, String)>,
    /// Objects.
    pub objects: Vec<ObjectId>,
    /// All objects that the peer has.
    pub all_objects: bool,
    /// The one branch's newest version must be this.
    pub expect: Option<VersionId>,
    /// Leave tags alone.
    pub no_tags: bool,
    /// Take only branches whose newest version one of these signed, and none that is older than one that was taken. Tags, which nobody
    /// signs, are left alone then.
    pub signers: Option<Signers>,
    /// The most nodes to be asked for before the first of them is here; as many as there may be if not told.
    pub in_flight: Option<usize>,
}

/// What became of a branch.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct PulledBranch {
    /// Its name here.
    pub branch: String,
    /// Its newest version at the peer.
    pub head: String,
    /// How many versions came.
    pub new: u64,
}

/// What a pull did.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Pulled {
    /// Each branch.
    pub branches: Vec<PulledBranch>,
    /// Tags set.
    pub tags: Vec<String>,
    /// Tags left alone, for here they name something else.
    pub tags_kept: Vec<String>,
    /// Objects that came.
    pub objects: Vec<String>,
    /// Of these, those that were pulled whole because two records had one id.
    pub collisions: Vec<String>,
    /// Bytes that were added to the packs.
    pub stored: u64,
    /// Nodes received.
    pub nodes: u64,
    /// Records of objects received.
    pub records: u64,
    /// Their bytes.
    pub record_bytes: u64,
    /// Bytes received and sent, and how often one side waited for the other.
    pub received: u64,
    /// Bytes sent.
    pub sent: u64,
    /// Times that an answer was awaited.
    pub rounds: u64,
}

/// Hears how far a transfer is; its error ends it.
pub type OnFetched<'a> = &'a mut dyn FnMut(Fetched) -> Result<()>;

/// Pulls over a link that nothing was said on yet.
///
/// # Errors
/// `Refused` if a branch has gone another way here, or what is expected is not there; `NotFound` for what the peer has not got;
/// damage if what it sent is wrong: then nothing is imported.
pub fn pull(store: &Store, link: &mut Link, request: &PullRequest, told: OnFetched<'_>) -> Result<Pulled> {
    hello(link, store.id())?;
    let mut asker = Asker::new(link, request.in_flight);
    let mut pulled = Pulled::default();
    let result = again_if_moved(store, || attempt(store, &mut asker, request, told, &mut pulled));
    (pulled.received, pulled.sent, pulled.rounds) = (link.received(), link.sent(), link.rounds());
    result.map(|()| pulled)
}

/// Does what may be refused; again, if somebody else brought versions meanwhile, these or others.
pub(super) fn again_if_moved(store: &Store, mut attempt: impl FnMut() -> Result<()>) -> Result<()> {
    let mut tries = 0;
    loop {
        let before = heads(store);
        match attempt() {
            Err(e)
                if e.kind() == Kind::Refused
                    && tries < 3
                    && store.refresh().is_ok()
                    && heads(store) != before =>
            {
                tries += 1
            }
            done => return done,
        }
    }
}

/// The newest version of each branch.
fn heads(store: &Store) -> Vec<(String, Option<VersionId>)> {
    let named = |name: String| {
        let head = store.latest(&name).map(|v| v.id);
        (name, head)
    };
    store.branches().into_iter().map(named).collect()
}

fn attempt(
    store: &Store,
    asker: &mut Asker<'_>,
    request: &PullRequest,
    told: OnFetched<'_>,
    pulled: &mut Pulled,
) -> Result<()> {
    let refs = match request.branches.is_empty() && !request.objects.is_empty() {
        true => Vec::new(),
        false => asker.refs()?,
    };
    let wanted = wanted(&refs, request)?;
    let mut plan = Plan::default();
    for Wanted {
        theirs,
        branch,
        head,
        signature,
    } in &wanted
    {
        let several = |e: Error| match (e.kind(), wanted.len()) {
            (Kind::Refused, 2..) => Error::new(
                Kind::Refused,
                format!("{e}; nothing was pulled: name the other branches to pull them without this one"),
            ),
            _ => e,
        };
        plan.signed(store, request.signers.as_ref(), theirs, *head, signature.clone())
            .and_then(|()| plan.branch(store, asker, branch.clone(), *head))
            .map_err(several)?;
    }
    let mut objects = request.objects.clone();
    if request.all_objects {
        objects.extend(asker.objects()?);
    }
    for id in objects {
        plan.object(store, asker, id)?;
    }
    if !request.no_tags && request.signers.is_none() {
        plan.tags(store, &refs, request)?;
    }
    *pulled = Pulled::default();
    plan.carry_out(store, asker, told, pulled)
}

/// A branch to pull.
struct Wanted {
    theirs: String,
    branch: String,
    head: VersionId,
    signature: Vec<u8>,
}

impl Wanted {
    fn new(found: &Ref, branch: &str) -> Option<Self> {
        Some(Wanted {
            theirs: found.name.clone(),
            branch: branch.to_owned(),
            head: found.head?,
            signature: found.signature.clone(),
        })
    }
}

/// The branches to pull. Names are checked before anything is done with them.
fn wanted(refs: &[Ref], request: &PullRequest) -> Result<Vec<Wanted>> {
    let mut wanted = Vec::new();
    let all: HashMap<&str, &Ref> = refs
        .iter()
        .filter(|r| !r.tag)
        .map(|r| (r.name.as_str(), r))
        .collect();
    if let Some(bad) = refs.iter().find(|r| !is_name(&r.name)) {
        let why = format!("the peer calls a branch or tag {:?}: that is no name", bad.name);
        return Err(Error::damage(why));
    }
    let named = !request.branches.is_empty();
    if named || !request.objects.is_empty() {
        for (theirs, ours) in &request.branches {
            let found = all.get(theirs.as_str()).ok_or_else(|| {
                let why = format!("the peer has no branch {theirs:?}");
                Error::new(Kind::NotFound, why)
            })?;
            wanted.extend(Wanted::new(found, ours));
        }
    } else {
        // Branches that begin with the first versions come first: others fork off them.
        let mut branches: Vec<&Ref> = all.values().copied().collect();
        branches.sort_by_key(|r| (r.name != crate::store::MAIN, r.name.clone()));
        wanted.extend(branches.iter().filter_map(|r| Wanted::new(r, &r.name)));
    }
    if let Some(id) = request.expect {
        let found = match &wanted[..] {
            [one] if one.head == id => return Ok(wanted),
            [one] => one.head.to_string(),
            [] => "no version".to_owned(),
            _ => {
                let why = "what is expected is the newest version of one branch: name that branch";
                return Err(Error::new(Kind::Usage, why));
            }
        };
        let why = format!("version {id} is expected and the peer has {found}: nothing was imported");
        return Err(Error::new(Kind::Refused, why));
    }
    Ok(wanted)
}

/// What is to be fetched and published.
#[derive(Default)]
pub(super) struct Plan {
    adopt: Vec<(String, Option<VersionId>, Vec<Version>)>,
    heads: Vec<(String, VersionId)>,
    objects: Vec<ObjectManifest>,
    tags: Vec<(String, VersionId)>,
    kept: Vec<String>,
    signatures: Vec<(String, VersionId, Vec<u8>)>,
    /// Versions that the plan brings.
    planned: HashSet<VersionId>,
}

impl Plan {
    /// Checks who signed a branch of the peer's, if that matters, and plans to keep the signature, under the name that it is about. A
    /// branch may not fall behind a version of it that was signed and taken.
    pub(super) fn signed(
        &mut self,
        store: &Store,
        signers: Option<&Signers>,
        branch: &str,
        head: VersionId,
        signature: Vec<u8>,
    ) -> Result<()> {
        match signers {
            Some(signers) => {
                let by = signers.check(branch, &head, &signature)?;
                log::info!("branch {branch} at {} is signed by {by}", head.short());
                if let Some(newer) = store
                    .signed(branch)
                    .into_iter()
                    .find(|id| follows(store, id, &head))
                {
                    let why = format!(
                        "branch {branch:?} at {} was rolled back: {} after it was signed, and is here",
                        head.short(),
                        newer.short()
                    );
                    return Err(Error::new(Kind::Refused, why));
                }
            }
            // Nobody can say whose it is: it takes no other's place.
            None if store.signature(branch, &head).is_some() || !is_signature(branch, &head, &signature) => {
                return Ok(());
            }
            None => {}
        }
        self.signatures.push((branch.to_owned(), head, signature));
        Ok(())
    }

    /// Plans that a branch here becomes one whose head is `head`.
    pub(super) fn branch(
        &mut self,
        store: &Store,
        asker: &mut Asker<'_>,
        branch: String,
        head: VersionId,
    ) -> Result<()> {
        let named = known_to_name(store, &branch);
        let known = |id: &VersionId| store.version(id).is_some() || self.planned.contains(id);
        let (line, at) = asker.line(head, &named, &known)?;
        self.heads.push((branch.clone(), head));
        // What another branch of this plan brings is not here yet, so it is this one's base only if it is new itself.
        let planned = at.filter(|id| store.version(id).is_none());
        let (base, mut versions) = match planned {
            Some(_) if store.latest(&branch).is_none() => (at, Vec::new()),
            Some(_) => {
                let why = format!(
                    "branch {branch:?} has gone another way on either side ({branch}:NAME pulls or pushes it under another name)"
                );
                return Err(Error::new(Kind::Refused, why));
            }
            None => match store.follow(&branch, head, at)? {
                Follow::Done => return Ok(()),
                Follow::After { base, known } => {
                    let known = known.iter().filter_map(|id| store.version(id));
                    (base, known.map(|v| v.version.clone()).collect())
                }
            },
        };
        versions.extend(line);
        self.planned.extend(versions.iter().map(Version::id));
        self.adopt.push((branch, base, versions));
        Ok(())
    }

    /// Plans to take an object.
    pub(super) fn object(&mut self, store: &Store, asker: &mut Asker<'_>, id: ObjectId) -> Result<()> {
        if store.object_of(&id).is_some() {
            return Ok(());
        }
        let bytes = asker.object(id)?.ok_or_else(|| {
            let why = format!("the peer has no object {id}");
            Error::new(Kind::NotFound, why)
        })?;
        let manifest = ObjectManifest::decode(&bytes)?;
        if manifest.id() != id {
            let why = format!("what the peer sent for object {id} has another id: nothing was imported");
            return Err(Error::damage(why));
        }
        self.objects.push(manifest);
        Ok(())
    }

    /// Plans those tags of the peer that name a version that is here then.
    fn tags(&mut self, store: &Store, refs: &[Ref], request: &PullRequest) -> Result<()> {
        if request.branches.is_empty() && !request.objects.is_empty() {
            return Ok(());
        }
        for (name, id) in refs
            .iter()
            .filter(|r| r.tag)
            .filter_map(|r| Some((&r.name, r.head?)))
        {
            if !self.planned.contains(&id) && store.version(&id).is_none() {
                continue;
            }
            let taken = store.has_branch(name) || self.adopt.iter().any(|a| a.0 == *name);
            match store.tag_target(name) {
                Some(ours) if ours.id == id => {}
                None if !taken => self.tags.push((name.clone(), id)),
                _ => self.kept.push(name.clone()),
            }
        }
        Ok(())
    }

    /// Fetches and publishes what was planned.
    pub(super) fn carry_out(
        self,
        store: &Store,
        asker: &mut Asker<'_>,
        told: OnFetched<'_>,
        pulled: &mut Pulled,
    ) -> Result<()> {
        let mut import = store.import()?;
        let (mut cold, mut objects) = (Vec::new(), Vec::new());
        for manifest in &self.objects {
            // The next one may have much in common with it.
            if import.unsaved() > 0 {
                import.save()?;
            }
            let new: Vec<_> = objects.iter().map(ProvenObject::manifest).cloned().collect();
            let warmth = match object::pull(store, asker, manifest, &new, Width::FULL) {
                Ok(warmth) => warmth,
                Err(e) => return Err(broken_off(import, e)),
            };
            match warmth {
                Warmth::Stored(proven, stored, taken) => {
                    pulled.records += taken.records;
                    pulled.record_bytes += taken.record_bytes;
                    import.include(stored);
                    objects.push(proven);
                }
                Warmth::Cold => cold.push(manifest.clone()),
                Warmth::Collision => {
                    pulled.collisions.push(manifest.id().to_string());
                    cold.push(manifest.clone());
                }
            }
        }
        let warm = import.appended();
        let lines = self.adopt.iter().flat_map(|a| a.2.iter());
        let mut roots: Vec<Root> = lines.map(|v| Root::Tree(v.tree)).collect();
        roots.extend(cold.iter().map(|o| Root::File(o.hash, o.len)));
        let mut nodes = 0;
        let fetched = Fetch::new(asker, &mut import, &mut |f| {
            nodes = f.nodes;
            told(f)
        })
        .all(&roots);
        pulled.nodes = nodes;
        let stored = match fetched {
            Ok(stored) => stored,
            Err(e) => return Err(broken_off(import, e)),
        };
        pulled.stored = warm + stored.iter().sum::<u64>();
        let mut stored = stored.into_iter();
        let mut adopt = Vec::new();
        for (branch, base, versions) in self.adopt {
            let versions: Vec<_> = versions.into_iter().zip(&mut stored).collect();
            pulled.branches.push(PulledBranch {
                branch: branch.clone(),
                head: String::new(),
                new: versions.len() as u64,
            });
            adopt.push(Adopt {
                branch,
                base,
                versions,
            });
        }
        for (branch, head) in self.heads {
            let head = head.to_string();
            match pulled.branches.iter_mut().find(|b| b.branch == branch) {
                Some(b) => b.head = head,
                None => pulled.branches.push(PulledBranch { branch, head, new: 0 }),
            }
        }
        pulled.tags = self.tags.iter().map(|t| t.0.clone()).collect();
        pulled.tags_kept = self.kept;
        pulled.objects = self.objects.iter().map(|o| o.id().to_string()).collect();
        // A signature without its version harms nobody; a version that lost its signature would.
        for (branch, head, signature) in self.signatures {
            store.keep_signature(&branch, &head, &signature)?;
        }
        if adopt.is_empty() && self.tags.is_empty() && self.objects.is_empty() {
            return Ok(());
        }
        let kept = asker.link().while_busy(|stop| {
            for manifest in cold {
                objects.push(import.object(manifest, stop)?);
            }
            import.publish(adopt, self.tags, objects)
        })?;
        pulled.tags.retain(|tag| !kept.contains(tag));
        pulled.tags_kept.extend(kept);
        Ok(())
    }
}

/// Whether a version comes after another on its line.
fn follows(store: &Store, id: &VersionId, earlier: &VersionId) -> bool {
    let parent = |id: &VersionId| store.version(id)?.version.parents.first().copied();
    std::iter::successors(parent(id), parent).any(|id| id == *earlier)
}

/// A transfer that was cut off is gone on with: what came is kept, under no name. Not so if the peer sent what is wrong.
fn broken_off(mut import: Import<'_>, e: Error) -> Error {
    if e.kind() != Kind::Damage
        && import.unsaved() > 0
        && let Err(why) = import.save()
    {
        log::warn!("what was received could not be kept: {why}");
    }
    e
}

/// Versions that a peer is told are known: of a branch more and more sparsely the older they are, and the newest of others.
fn known_to_name(store: &Store, branch: &str) -> Vec<VersionId> {
    let mut ids = Vec::new();
    if let Ok(versions) = store.versions(branch) {
        let mut back = 1;
        while let Some(v) = versions.len().checked_sub(back).and_then(|at| versions.get(at)) {
            ids.push(v.id);
            back *= 2;
        }
    }
    let others = store.branches().into_iter().filter_map(|b| store.latest(&b));
    for other in others {
        if ids.len() < super::message::MAX_KNOWN && !ids.contains(&other.id) {
            ids.push(other.id);
        }
    }
    ids.truncate(super::message::MAX_KNOWN);
    ids
}

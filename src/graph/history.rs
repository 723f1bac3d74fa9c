//! The history as the journal tells it: every version, branch and tag of the store, in memory.

use super::names::{Rev, check_branch, check_tag, is_id_prefix};
use super::record::{Change, Record};
use super::tree::Timestamp;
use super::version::{Numbered, Version};
use crate::error::{Error, Kind, Result};
use crate::id::{ObjectId, VersionId};
use crate::object::ObjectManifest;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The branch that always exists.
pub const MAIN: &str = "main";

/// A named line of versions.
#[derive(Clone, Debug, Default)]
pub struct Branch {
    /// The version the first own one follows, if the branch was forked off.
    pub from: Option<VersionId>,
    /// Its versions, oldest first.
    pub versions: Vec<Arc<Numbered>>,
    /// Bytes of all files of these.
    pub len: u64,
}

impl Branch {
    /// The newest version: its own, else the one it was forked off.
    pub fn head(&self) -> Option<VersionId> {
        self.versions.last().map(|v| v.id).or(self.from)
    }

    pub(super) fn next_number(&self) -> u64 {
        self.versions.last().map_or(1, |v| v.number + 1)
    }
}

/// Every version, branch and tag. Changes only by applying journal records in order.
#[derive(Clone, Debug)]
pub struct History {
    branches: BTreeMap<String, Branch>,
    tags: BTreeMap<String, VersionId>,
    by_id: BTreeMap<VersionId, Arc<Numbered>>,
    objects: BTreeMap<ObjectId, Arc<Object>>,
    repacks: u64,
}

/// An exact byte object that was put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    /// Its id: that of its manifest.
    pub id: ObjectId,
    /// What pins it.
    pub manifest: ObjectManifest,
    /// When it was put first.
    pub time: Timestamp,
}

impl Default for History {
    fn default() -> Self {
        let branches = BTreeMap::from([(MAIN.to_owned(), Branch::default())]);
        History {
            branches,
            tags: BTreeMap::new(),
            by_id: BTreeMap::new(),
            objects: BTreeMap::new(),
            repacks: 0,
        }
    }
}

impl History {
    /// Applies one journal body.
    pub fn apply(&mut self, body: &[u8]) -> Result<()> {
        for change in Record::decode(body)?.changes {
            self.apply_change(change)?;
        }
        Ok(())
    }

    fn apply_change(&mut self, change: Change) -> Result<()> {
        match change {
            Change::Commit {
                branch,
                number,
                version,
                files,
                stored,
            } => {
                let b = self.branches.entry(branch.clone()).or_default();
                if number < b.next_number() {
                    return Err(Error::damage(format!(
                        "journal gives number {number} of {branch} twice"
                    )));
                }
                let id = version.id();
                let v = Arc::new(Numbered {
                    id,
                    branch,
                    number,
                    version,
                    files,
                    stored,
                });
                b.len = b.len.saturating_add(v.version.len);
                b.versions.push(v.clone());
                // One that a peer's branch brought here before keeps its first place.
                self.by_id.entry(id).or_insert(v);
            }
            Change::Branch { name, from } => {
                // One that has a head keeps it, whatever the journal says.
                let branch = self.branches.entry(name).or_default();
                if branch.head().is_none() {
                    branch.from = from;
                }
            }
            Change::Tag { name, version } => {
                self.tags.insert(name, version);
            }
            Change::Repack => self.repacks += 1,
            Change::Object { manifest, time } => {
                let id = manifest.id();
                let object = || Arc::new(Object { id, manifest, time });
                self.objects.entry(id).or_insert_with(object);
            }
        }
        Ok(())
    }

    /// How often nodes were encoded anew: what was read of their encoding before may not hold any more.
    pub fn repacks(&self) -> u64 {
        self.repacks
    }

    /// All branches by name.
    pub fn branches(&self) -> &BTreeMap<String, Branch> {
        &self.branches
    }

    /// All tags by name.
    pub fn tags(&self) -> &BTreeMap<String, VersionId> {
        &self.tags
    }

    /// The branch with this name.
    pub fn branch(&self, name: &str) -> Result<&Branch> {
        self.branches.get(name).ok_or_else(|| {
            Error::new(
                Kind::NotFound,
                format!("no branch {name:?} (`zspace branch` lists them)"),
            )
        })
    }

    /// The version with this id.
    pub fn version(&self, id: &VersionId) -> Option<&Arc<Numbered>> {
        self.by_id.get(id)
    }

    /// The version with this number on a branch.
    pub fn numbered(&self, branch: &str, number: u64) -> Option<&Arc<Numbered>> {
        let versions = &self.branches.get(branch)?.versions;
        let at = versions.binary_search_by_key(&number, |v| v.number).ok()?;
        versions.get(at)
    }

    /// The one version whose id starts with `prefix` (8 or more hex digits).
    pub fn by_prefix(&self, prefix: &str) -> Result<Option<&Arc<Numbered>>> {
        only(&self.by_id, prefix, "version")
    }

    /// All objects by id.
    pub fn objects(&self) -> &BTreeMap<ObjectId, Arc<Object>> {
        &self.objects
    }

    /// The one object whose id starts with `prefix` (8 or more hex digits).
    pub fn object_by_prefix(&self, prefix: &str) -> Result<Option<&Arc<Object>>> {
        only(&self.objects, prefix, "object")
    }

    /// The version a REV names. A word is a branch first, then a tag, then the start of an id.
    pub fn resolve(&self, text: &str) -> Result<Arc<Numbered>> {
        let missing = |why: &str| Error::new(Kind::NotFound, format!("no version {text}: {why}"));
        match Rev::parse(text)? {
            Rev::Number(branch, n) => {
                self.branch(&branch)?;
                self.numbered(&branch, n)
                    .cloned()
                    .ok_or_else(|| missing("`zspace log` lists what there is"))
            }
            Rev::Latest(branch) => self.latest(&branch),
            Rev::Word(word) if self.branches.contains_key(&word) => self.latest(&word),
            Rev::Word(word) => match self.tags.get(&word) {
                Some(id) => self
                    .version(id)
                    .cloned()
                    .ok_or_else(|| missing("the tag names a version that is gone")),
                None => self
                    .by_prefix(&word)?
                    .cloned()
                    .ok_or_else(|| missing("no branch, tag or id of that name")),
            },
        }
    }

    /// A branch's newest version, or the one it was forked off.
    ///
    /// # Errors
    /// `NotFound` if there is none.
    pub fn latest(&self, branch: &str) -> Result<Arc<Numbered>> {
        let b = self.branch(branch)?;
        let forked = || self.version(&b.from?);
        let found = b.versions.last().or_else(forked).cloned();
        found.ok_or_else(|| Error::new(Kind::NotFound, format!("branch {branch:?} has no version yet")))
    }

    /// The change that commits `version` as the next of a branch, with its parent set, its id and its number.
    /// Times are taken as they come: clocks may be skewed, and order is the parents'.
    pub fn next(
        &self,
        branch: &str,
        mut version: Version,
        files: u64,
        stored: u64,
    ) -> Result<(Change, VersionId, u64)> {
        if !self.branches.contains_key(branch) {
            check_branch(branch)?;
        }
        if self.tags.contains_key(branch) {
            return Err(Error::new(
                Kind::Exists,
                format!("{branch:?} is a tag: a branch cannot have its name"),
            ));
        }
        let (head, number) = self
            .branches
            .get(branch)
            .map_or((None, 1), |b| (b.head(), b.next_number()));
        version.parents = head.into_iter().collect();
        let id = version.id();
        Ok((
            Change::Commit {
                branch: branch.to_owned(),
                number,
                version,
                files,
                stored,
            },
            id,
            number,
        ))
    }

    /// The change that makes a branch.
    pub fn new_branch(&self, name: &str, from: Option<VersionId>) -> Result<Change> {
        check_branch(name)?;
        if self.branches.contains_key(name) || self.tags.contains_key(name) {
            return Err(Error::new(
                Kind::Exists,
                format!("there is a branch or tag {name:?} already"),
            ));
        }
        Ok(Change::Branch {
            name: name.to_owned(),
            from,
        })
    }

    /// The change that sets a tag, or moves it with `force`.
    pub fn new_tag(&self, name: &str, version: VersionId, force: bool) -> Result<Change> {
        check_tag(name)?;
        if self.branches.contains_key(name) {
            return Err(Error::new(
                Kind::Exists,
                format!("{name:?} is a branch: a tag cannot have its name"),
            ));
        }
        if self.tags.contains_key(name) && !force {
            return Err(Error::new(
                Kind::Exists,
                format!("there is a tag {name:?} already (--force moves it)"),
            ));
        }
        Ok(Change::Tag {
            name: name.to_owned(),
            version,
        })
    }

    /// Up to `limit` versions before and including `head`, newest first, along first parents.
    pub fn ancestors(&self, head: Option<VersionId>, limit: usize) -> Vec<Arc<Numbered>> {
        let mut out = Vec::new();
        let mut at = head;
        while let Some(v) = at.and_then(|id| self.version(&id)).filter(|_| out.len() < limit) {
            out.push(v.clone());
            at = v.version.parents.first().copied();
        }
        out
    }
}

/// The one thing whose id starts with `prefix`, if that is the start of an id.
fn only<'a, K, V>(all: &'a BTreeMap<K, V>, prefix: &str, what: &str) -> Result<Option<&'a V>>
where
    K: Ord + std::fmt::Display + std::str::FromStr<Err = Error>,
{
    if !is_id_prefix(prefix) {
        return Ok(None);
    }
    let mut low = prefix.to_owned();
    while low.len() < 64 {
        low.push('0');
    }
    let low: K = low.parse()?;
    let mut hits = all
        .range(low..)
        .take_while(|(id, _)| id.to_string().starts_with(prefix));
    match (hits.next(), hits.next()) {
        (Some(_), Some(_)) => Err(Error::new(
            Kind::Usage,
            format!("{prefix} is the start of more than one {what}'s id"),
        )),
        (found, _) => Ok(found.map(|(_, v)| v)),
    }
}

/// The present time of the machine's clock.
pub fn now() -> Timestamp {
    let d = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    Timestamp {
        seconds: d.as_secs() as i64,
        nanos: d.subsec_nanos(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::NodeId;

    fn version(n: u8) -> Version {
        Version {
            parents: vec![],
            entry: vec![b'e', n],
            time: Timestamp::default(),
            message: String::new(),
            tree: NodeId([n; 32]),
            len: 0,
        }
    }

    fn commit(h: &mut History, branch: &str, n: u8) -> VersionId {
        let (c, ..) = h.next(branch, version(n), 1, 1).unwrap();
        h.apply(&Record { changes: vec![c] }.encode()).unwrap();
        h.branch(branch).unwrap().head().unwrap()
    }

    #[test]
    fn numbers_run_without_gaps_and_parents_follow() {
        let mut h = History::default();
        let a = commit(&mut h, "main", 1);
        let b = commit(&mut h, "main", 2);
        assert_eq!(h.version(&b).unwrap().version.parents, [a]);
        assert_eq!(h.resolve("main").unwrap().id, b);
        assert_eq!(h.resolve("main/1").unwrap().id, a);
        assert_eq!(h.resolve(&a.to_string()[..8]).unwrap().id, a);
        assert_eq!(h.resolve("main/3").unwrap_err().kind(), Kind::NotFound);
        assert_eq!(h.ancestors(Some(b), 9).len(), 2);
    }

    #[test]
    fn forks_start_at_one_and_follow_where_they_left() {
        let mut h = History::default();
        let a = commit(&mut h, "main", 1);
        let fork = h.new_branch("exp", Some(a)).unwrap();
        h.apply(&Record { changes: vec![fork] }.encode()).unwrap();
        assert_eq!(h.resolve("exp").unwrap().id, a);
        let b = commit(&mut h, "exp", 2);
        assert_eq!(h.version(&b).unwrap().name(), "exp/000001");
        assert_eq!(h.version(&b).unwrap().version.parents, [a]);
    }

    #[test]
    fn tags_move_only_by_force_and_never_take_a_branch_name() {
        let mut h = History::default();
        let a = commit(&mut h, "main", 1);
        let t = h.new_tag("best", a, false).unwrap();
        h.apply(&Record { changes: vec![t] }.encode()).unwrap();
        assert_eq!(h.resolve("best").unwrap().id, a);
        assert_eq!(h.new_tag("best", a, false).unwrap_err().kind(), Kind::Exists);
        assert!(h.new_tag("best", a, true).is_ok());
        assert_eq!(h.new_tag("main", a, false).unwrap_err().kind(), Kind::Exists);
        assert_eq!(h.new_branch("best", None).unwrap_err().kind(), Kind::Exists);
        for shadow in ["latest", "deadbeef", &a.to_string()[..9]] {
            assert_eq!(
                h.new_branch(shadow, None).unwrap_err().kind(),
                Kind::Usage,
                "{shadow}"
            );
        }
        assert_eq!(h.next("best", version(3), 1, 1).unwrap_err().kind(), Kind::Exists);
    }
}

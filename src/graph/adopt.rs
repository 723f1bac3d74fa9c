//! Versions that were committed in another store become versions of a branch here.

use super::history::{Branch, History};
use super::names::check_branch;
use super::record::Change;
use super::version::Version;
use crate::error::{Error, Kind, Result};
use crate::id::VersionId;

/// A version from elsewhere, whose nodes are here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adopted {
    /// The version, under the id that it has everywhere.
    pub version: Version,
    /// Regular files in it.
    pub files: u64,
    /// Bytes it added to the packs.
    pub stored: u64,
}

/// How a branch here goes on to be as it is elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Follow {
    /// It is there already, or farther.
    Done,
    /// Versions are to be adopted.
    After {
        /// What they follow: the branch's head or, for a new branch, where it forks off.
        base: Option<VersionId>,
        /// Those of them that are known here, by another branch, oldest first.
        known: Vec<VersionId>,
    },
}

impl History {
    /// How `branch` here becomes one whose head is `head`, if what is not known of that head's ancestors begins after `at`: a
    /// version that is known here, or nothing.
    ///
    /// # Errors
    /// `Refused` if the two have gone different ways.
    pub fn follow(&self, branch: &str, head: VersionId, at: Option<VersionId>) -> Result<Follow> {
        let own = self.branches().get(branch).and_then(Branch::head);
        let Some(own) = own else {
            return Ok(Follow::After {
                base: at,
                known: Vec::new(),
            });
        };
        let (mut known, mut next) = (Vec::new(), at);
        while let Some(id) = next {
            if id == own {
                known.reverse();
                return Ok(match (known.is_empty(), at == Some(head)) {
                    (true, true) => Follow::Done,
                    _ => Follow::After {
                        base: Some(own),
                        known,
                    },
                });
            }
            known.push(id);
            next = self.version(&id).and_then(|v| v.version.parents.first().copied());
        }
        match at == Some(head) && self.is_ancestor(&head, own) {
            true => Ok(Follow::Done),
            false => Err(diverged(branch)),
        }
    }

    /// Whether `id` is on the line of first parents that ends in `of`.
    fn is_ancestor(&self, id: &VersionId, of: VersionId) -> bool {
        let mut next = Some(of);
        while let Some(at) = next {
            if at == *id {
                return true;
            }
            next = self.version(&at).and_then(|v| v.version.parents.first().copied());
        }
        false
    }

    /// The changes that put versions, oldest first, at the end of a branch, which is made if absent; without any, a branch that forks off
    /// `head`.
    ///
    /// # Errors
    /// `Refused` if the first does not follow the branch's head, or one the other, or if its name is taken.
    pub fn adopt(&self, branch: &str, base: Option<VersionId>, all: Vec<Adopted>) -> Result<Vec<Change>> {
        if !self.branches().contains_key(branch) {
            check_branch(branch)?;
        }
        if self.tags().contains_key(branch) {
            let why = format!("{branch:?} is a tag here: a branch cannot have its name");
            return Err(Error::new(Kind::Refused, why));
        }
        let own = self.branches().get(branch);
        let (head, mut number) = own.map_or((None, 1), |b| (b.head(), b.next_number()));
        if head.is_some() && head != base {
            return Err(diverged(branch));
        }
        let mut changes = Vec::new();
        if let Some(from) = base.filter(|_| head.is_none()) {
            if self.version(&from).is_none() {
                return Err(diverged(branch));
            }
            changes.push(Change::Branch {
                name: branch.to_owned(),
                from: Some(from),
            });
        }
        let mut last = base;
        for Adopted {
            version,
            files,
            stored,
        } in all
        {
            if version.parents.first().copied() != last {
                return Err(diverged(branch));
            }
            last = Some(version.id());
            changes.push(Change::Commit {
                branch: branch.to_owned(),
                number,
                version,
                files,
                stored,
            });
            number += 1;
        }
        Ok(changes)
    }
}

fn diverged(branch: &str) -> Error {
    let why = format!(
        "branch {branch:?} has gone another way on either side: neither follows the other ({branch}:NAME pulls or pushes it under another name)"
    );
    Error::new(Kind::Refused, why)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Record, Timestamp};
    use crate::id::NodeId;

    fn line(parent: Option<VersionId>, from: u8, n: u8) -> Vec<Adopted> {
        let mut last = parent;
        let mut next = |i| {
            let version = Version {
                parents: last.into_iter().collect(),
                entry: vec![b'e', i],
                time: Timestamp::default(),
                message: String::new(),
                tree: NodeId([i; 32]),
                len: 0,
            };
            last = Some(version.id());
            Adopted {
                version,
                files: 1,
                stored: 1,
            }
        };
        (from..from + n).map(&mut next).collect()
    }

    fn ids(all: &[Adopted]) -> Vec<VersionId> {
        all.iter().map(|a| a.version.id()).collect()
    }

    fn adopt(h: &mut History, branch: &str, base: Option<VersionId>, all: &[Adopted]) -> Result<()> {
        let changes = h.adopt(branch, base, all.to_vec())?;
        h.apply(&Record { changes }.encode())
    }

    #[test]
    fn a_branch_follows_only_what_it_led_to() {
        let mut h = History::default();
        let all = line(None, 1, 5);
        let ids = ids(&all);
        adopt(&mut h, "main", None, &all[..2]).unwrap();
        assert_eq!(h.resolve("main/2").unwrap().id, ids[1]);
        // Known to the end, ahead, behind, and elsewhere.
        assert_eq!(h.follow("main", ids[1], Some(ids[1])).unwrap(), Follow::Done);
        assert_eq!(h.follow("main", ids[0], Some(ids[0])).unwrap(), Follow::Done);
        let after = |base, known| Follow::After { base, known };
        assert_eq!(
            h.follow("main", ids[4], Some(ids[1])).unwrap(),
            after(Some(ids[1]), vec![])
        );
        for at in [Some(ids[0]), None] {
            assert_eq!(h.follow("main", ids[4], at).unwrap_err().kind(), Kind::Refused);
        }
        assert_eq!(
            h.follow("new", ids[4], Some(ids[1])).unwrap(),
            after(Some(ids[1]), vec![])
        );
        assert!(adopt(&mut h, "main", Some(ids[0]), &all[1..]).is_err());
        assert!(adopt(&mut h, "main", Some(ids[1]), &all[3..]).is_err());
        adopt(&mut h, "main", Some(ids[1]), &all[2..]).unwrap();
        assert_eq!(h.resolve("main").unwrap().name(), "main/000005");
    }

    #[test]
    fn what_another_branch_brought_here_is_adopted_again() {
        let mut h = History::default();
        let all = line(None, 1, 4);
        let ids = ids(&all);
        adopt(&mut h, "main", None, &all[..2]).unwrap();
        adopt(&mut h, "copy", Some(ids[1]), &all[2..3]).unwrap();
        assert_eq!(h.resolve("copy").unwrap().name(), "copy/000001");
        let Follow::After { base, known } = h.follow("main", ids[3], Some(ids[2])).unwrap() else {
            panic!("nothing to do");
        };
        assert_eq!((base, &known[..]), (Some(ids[1]), &ids[2..3]));
        adopt(&mut h, "main", base, &all[2..]).unwrap();
        assert_eq!(h.resolve("main").unwrap().name(), "main/000004");
        assert_eq!(h.resolve("main/3").unwrap().id, ids[2]);
        assert_eq!(h.version(&ids[2]).unwrap().name(), "copy/000001");
        // A branch without versions takes one that is known as where it forks off.
        let mut h = History::default();
        adopt(&mut h, "exp", None, &all).unwrap();
        let known = h.follow("main", ids[3], Some(ids[3])).unwrap();
        assert_eq!(
            known,
            Follow::After {
                base: Some(ids[3]),
                known: vec![]
            }
        );
        adopt(&mut h, "main", Some(ids[3]), &[]).unwrap();
        assert_eq!(h.resolve("main").unwrap().id, ids[3]);
    }

    #[test]
    fn names_are_checked() {
        let mut h = History::default();
        let all = line(None, 1, 1);
        assert_eq!(
            h.adopt("latest", None, all.clone()).unwrap_err().kind(),
            Kind::Usage
        );
        assert_eq!(
            h.adopt("../x", None, all.clone()).unwrap_err().kind(),
            Kind::Usage
        );
        adopt(&mut h, "main", None, &all).unwrap();
        let tag = h.new_tag("best", all[0].version.id(), false).unwrap();
        h.apply(&Record { changes: vec![tag] }.encode()).unwrap();
        assert_eq!(h.adopt("best", None, all).unwrap_err().kind(), Kind::Refused);
    }
}

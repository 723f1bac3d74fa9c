//! Branches, versions, the names that lead to them, and the files of a version.

use super::attr::Attr;
use super::attr::FileKind;
use super::errno::os;
use super::namespace::{Listed, Namespace, entry_of};
use super::place::{At, Commit, Door, Links, Name, Place};
use crate::error::Result;
use crate::id::NodeId;
use crate::store::{EntryKind, Numbered, Timestamp, Tree};
use std::sync::Arc;

impl Namespace {
    /// The branches, sorted.
    pub(super) fn list_branches(&self, door: Door) -> Vec<Listed> {
        self.refresh();
        let names = self.store.branches().into_iter();
        names
            .map(|b| (b.clone().into_bytes(), Place::Branch(door, b.into())))
            .collect()
    }

    /// A branch; else, unlisted, a tag or an id's first digits: a link into a branch.
    pub(super) fn find_branch(&self, door: Door, name: &[u8]) -> Result<Option<Place>> {
        let Ok(name) = std::str::from_utf8(name) else {
            return Ok(None);
        };
        self.refresh();
        if self.store.has_branch(name) {
            return Ok(Some(Place::Branch(door, name.into())));
        }
        let link = Name::Word(name.to_owned());
        Ok(self.named(None, &link).map(|_| Place::Link(None, link)))
    }

    /// The versions of a branch, oldest first, then `latest`.
    pub(super) fn list_versions(&self, door: Door, branch: &Arc<str>) -> Result<Vec<Listed>> {
        self.refresh();
        let versions = self.store.versions(branch)?;
        let place = |v: &Arc<Numbered>| (number(v).into_bytes(), Place::Version(door, self.commit(v)));
        let mut names: Vec<Listed> = versions.iter().map(place).collect();
        if self.store.latest(branch).is_some() {
            names.push((
                b"latest".to_vec(),
                Place::Link(Some(branch.clone()), Name::Latest),
            ));
        }
        Ok(names)
    }

    /// A version by its number; else, unlisted, by a tag, an id's first digits, or its number without the zeros.
    pub(super) fn find_version(&self, door: Door, branch: &Arc<str>, name: &[u8]) -> Result<Option<Place>> {
        let Ok(name) = std::str::from_utf8(name) else {
            return Ok(None);
        };
        let exact = |v: &Arc<Numbered>| number(v) == name;
        let known = || {
            digits(name)
                .and_then(|n| self.store.numbered(branch, n))
                .filter(exact)
        };
        // A number that is known stays what it is: only what is not known is worth asking the disk for.
        if let Some(v) = known() {
            return Ok(Some(Place::Version(door, self.commit(&v))));
        }
        self.refresh();
        if let Some(v) = known() {
            return Ok(Some(Place::Version(door, self.commit(&v))));
        }
        let link = match name {
            "latest" => Name::Latest,
            word => Name::Word(word.to_owned()),
        };
        Ok(self
            .named(Some(branch), &link)
            .map(|_| Place::Link(Some(branch.clone()), link)))
    }

    /// The version that a link leads to at present.
    fn named(&self, branch: Option<&str>, name: &Name) -> Option<Arc<Numbered>> {
        match (branch, name) {
            (Some(branch), Name::Latest) => self.store.latest(branch),
            (None, Name::Latest) => None,
            (Some(branch), Name::Word(word)) => {
                let number = digits(word).and_then(|n| self.store.numbered(branch, n));
                let tag = || self.store.tag_target(word).filter(|v| v.branch == branch);
                number.or_else(tag).or_else(|| self.store.by_prefix(word))
            }
            (None, Name::Word(word)) => self.store.tag_target(word).or_else(|| self.store.by_prefix(word)),
        }
    }

    /// Where a link to a version points, relative to where it stands, and the time of that version.
    pub(super) fn link_target(&self, branch: Option<&str>, name: &Name) -> Result<(Vec<u8>, Timestamp)> {
        self.refresh();
        let v = self
            .named(branch, name)
            .ok_or_else(|| os(libc::ENOENT, "the link leads nowhere now"))?;
        let target = match branch {
            Some(b) if b == v.branch => number(&v),
            Some(_) => format!("../{}/{}", v.branch, number(&v)),
            None => format!("{}/{}", v.branch, number(&v)),
        };
        Ok((target.into_bytes(), v.version.time))
    }

    /// A branch changes when a version is added to it.
    pub(super) fn branch_attr(&self, branch: &str) -> Attr {
        self.refresh();
        let size = self.store.branch_len(branch);
        let time = self.store.latest(branch).map(|v| v.version.time);
        let none = self.plain(FileKind::Dir, 0o755, size, Timestamp::default());
        match time {
            Some(time) => self.plain(FileKind::Dir, 0o755, size, time),
            None => Attr {
                ..self.attr(&Place::Root).unwrap_or(none)
            },
        }
    }

    /// The directories to the root of a version: that root alone.
    pub(super) fn root_of(&self, commit: &Commit) -> Result<Arc<[Arc<Tree>]>> {
        Ok([self.store.tree(&commit.numbered.version.tree)?].into())
    }

    /// The directories down to the directory that the entry is; `None` if it is none.
    pub(super) fn below(&self, at: &At) -> Result<Option<Arc<[Arc<Tree>]>>> {
        match &entry_of(at)?.kind {
            EntryKind::Dir { tree, .. } => {
                let tree = self.store.tree(tree)?;
                Ok(Some(at.dirs.iter().cloned().chain([tree]).collect()))
            }
            EntryKind::File { .. } | EntryKind::Symlink(_) => Ok(None),
        }
    }

    /// The place of a path below a version's root, as `versions/` shows it; the root itself for no components.
    pub(super) fn walk(&self, version: &Arc<Numbered>, path: &[Vec<u8>]) -> Result<Place> {
        let missing = || os(libc::ENOENT, "no such file in the version");
        let mut place = Place::Version(Door::Versions, self.commit(version));
        for name in path {
            place = self.find(&place, name)?.ok_or_else(missing)?;
        }
        Ok(place)
    }

    /// The paths in a version that are links to the file with this link number.
    pub(super) fn names_of<'a>(&self, commit: &'a Commit, link: u32) -> Result<&'a [Vec<Vec<u8>>]> {
        let links = match commit.links.get() {
            Some(links) => links,
            None => {
                let found = self.find_links(commit.numbered.version.tree)?;
                commit.links.get_or_init(|| found)
            }
        };
        Ok(links.get(&link).map_or(&[], Vec::as_slice))
    }

    fn find_links(&self, tree: NodeId) -> Result<Links> {
        let mut links = Links::new();
        let mut pending = vec![(Vec::new(), tree)];
        while let Some((at, id)) = pending.pop() {
            for e in self.store.tree(&id)?.entries() {
                let path = || at.iter().chain([&e.name]).cloned().collect();
                match &e.kind {
                    EntryKind::File { link, .. } if *link > 0 => links.entry(*link).or_default().push(path()),
                    EntryKind::Dir { tree, .. } => pending.push((path(), *tree)),
                    EntryKind::File { .. } | EntryKind::Symlink(_) => {}
                }
            }
        }
        Ok(links)
    }
}

/// The name of a version in its branch.
fn number(v: &Numbered) -> String {
    format!("{:06}", v.number)
}

fn digits(name: &str) -> Option<u64> {
    let all = !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit());
    name.parse().ok().filter(|_| all)
}

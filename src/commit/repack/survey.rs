//! Finds the revisions of each place of each tensor: what commit would have found as their bases, version by version.

use super::table::{NONE, Table};
use crate::commit::Parts;
use crate::commit::base::{ANCESTORS, Bases};
use crate::error::{Kind, Result};
use crate::format::Layout;
use crate::graph::{EntryKind, History, Manifest, NodeKind, Numbered, Shape, Tree};
use crate::id::{NodeId, VersionId};
use crate::rebuild::StoredFile;
use std::collections::HashSet;
use std::sync::Arc;

/// A chunk or layout to look at, and its revision before.
#[derive(Clone, Copy)]
pub(super) struct Item {
    pub(super) row: u32,
    pub(super) previous: u32,
}

/// Not an item so far.
const UNSEEN: u32 = NONE - 1;

/// What the versions tell, as it is found.
pub(super) struct Survey<'a> {
    parts: &'a Parts,
    table: &'a Table,
    /// For each row its revision before, once it is an item.
    previous: Vec<u32>,
    order: Vec<u32>,
    /// Rows of manifests and trees that were looked at.
    visited: Vec<bool>,
    pub(super) damage: Vec<String>,
}

impl<'a> Survey<'a> {
    pub(super) fn new(parts: &'a Parts, table: &'a Table) -> Self {
        Survey {
            parts,
            table,
            previous: vec![UNSEEN; table.rows.len()],
            order: Vec::new(),
            visited: vec![false; table.rows.len()],
            damage: Vec::new(),
        }
    }

    /// Looks through a version, which must come after its parent.
    pub(super) fn version(&mut self, version: &Numbered) {
        let parent = version.version.parents.first().copied();
        let ancestors = self.parts.history.read().ancestors(parent, ANCESTORS);
        let source = self.parts.packs.clone();
        let count = ancestors.len();
        let mut bases = Bases::new(self.parts, source, (ancestors, count));
        let mut dirs = vec![(Vec::new(), version.version.tree)];
        while let Some((prefix, id)) = dirs.pop() {
            if !self.visit(&id) {
                continue;
            }
            let tree = match self.node(NodeKind::Tree, &id).and_then(|b| Tree::decode(&b)) {
                Ok(tree) => tree,
                Err(e) => {
                    self.damage.push(format!("{}: {e}", version.name()));
                    continue;
                }
            };
            let mut below = Vec::new();
            for e in tree.entries() {
                let path = [&prefix[..], &e.name].concat();
                match &e.kind {
                    EntryKind::Dir { tree, .. } => below.push(([&path[..], b"/"].concat(), *tree)),
                    EntryKind::File { hash, len, .. } if self.visit(&Manifest::id(hash, *len)) => {
                        if let Err(e) = self.file(&mut bases, &path, &Manifest::id(hash, *len)) {
                            let path = String::from_utf8_lossy(&path).into_owned();
                            self.damage.push(format!("{}:{path}: {e}", version.name()));
                        }
                        bases.stored(&path, (*hash, *len));
                    }
                    _ => {}
                }
            }
            // In the order of their names, as a commit does.
            dirs.extend(below.into_iter().rev());
        }
    }

    /// True the first time that a manifest or tree is asked for.
    fn visit(&mut self, id: &NodeId) -> bool {
        let seen = self.table.find(id).and_then(|i| self.visited.get_mut(i as usize));
        // One that is nowhere is looked at, so that its loss is told.
        seen.is_none_or(|seen| !std::mem::replace(seen, true))
    }

    fn node(&self, kind: NodeKind, id: &NodeId) -> Result<Vec<u8>> {
        self.parts.rebuilder.node(&*self.parts.packs, kind, id)
    }

    fn file(&mut self, bases: &mut Bases, path: &[u8], manifest: &NodeId) -> Result<()> {
        let manifest = Manifest::decode(&self.node(NodeKind::Manifest, manifest)?)?;
        match manifest.shape {
            Shape::Layout(id) => {
                let layout = Arc::new(Layout::decode(&self.node(NodeKind::Layout, &id)?)?);
                let (rebuilder, source) = (&self.parts.rebuilder, self.parts.packs.clone());
                let chunks = manifest.chunks.clone();
                let file = StoredFile::new(rebuilder, source, layout.clone(), chunks, Vec::new())?;
                let found = bases.revisions(path, &layout, &file);
                self.item(&id, found.layout);
                for (chunk, previous) in manifest.chunks.iter().zip(found.chunks) {
                    self.item(chunk, previous);
                }
            }
            Shape::Opaque(_) => {
                let mut base = bases.of_opaque(path);
                for chunk in &manifest.chunks {
                    self.item(chunk, base.take());
                }
            }
        }
        Ok(())
    }

    /// Notes a node where it is first seen. A revision before it that comes later in this order is none.
    fn item(&mut self, id: &NodeId, previous: Option<NodeId>) {
        let Some(row) = self.table.find(id) else { return };
        if self.previous.get(row as usize) != Some(&UNSEEN) {
            return;
        }
        let previous = previous.and_then(|p| self.table.find(&p)).filter(|p| *p != row);
        self.previous[row as usize] = previous.unwrap_or(NONE);
        self.order.push(row);
    }

    /// The items of each place and what grew from it, oldest first: no item has its revision before in another group, unless it
    /// is none of the items.
    pub(super) fn groups(self) -> Vec<Vec<Item>> {
        let mut group_of = vec![NONE; self.previous.len()];
        let mut groups: Vec<Vec<Item>> = Vec::new();
        for row in self.order {
            let previous = self.previous[row as usize];
            let before = group_of.get(previous as usize).copied().unwrap_or(NONE);
            let group = if before == NONE {
                groups.push(Vec::new());
                groups.len() as u32 - 1
            } else {
                before
            };
            group_of[row as usize] = group;
            groups[group as usize].push(Item { row, previous });
        }
        groups
    }
}

/// The versions of a branch or of all, each after its parent.
pub(super) fn versions(history: &History, branch: Option<&str>) -> Result<Vec<Arc<Numbered>>> {
    let wanted: Vec<Arc<Numbered>> = match branch {
        Some(name) => history.branch(name)?.versions.clone(),
        None => history
            .branches()
            .values()
            .flat_map(|b| b.versions.clone())
            .collect(),
    };
    let all: HashSet<VersionId> = wanted.iter().map(|v| v.id).collect();
    let (mut done, mut out) = (HashSet::new(), Vec::new());
    for version in wanted {
        let mut line = vec![version];
        while let Some(parent) = line.last().and_then(|v| v.version.parents.first()) {
            match history.version(parent) {
                Some(p) if all.contains(parent) && !done.contains(parent) => line.push(p.clone()),
                _ => break,
            }
        }
        for v in line.into_iter().rev() {
            if done.insert(v.id) {
                out.push(v);
            }
        }
    }
    Ok(out)
}

/// Whether an error is of the stored bytes, so that it costs one node and not the repack.
pub(super) fn is_local(kind: Kind) -> bool {
    matches!(kind, Kind::NotFound | Kind::Damage)
}

//! The inode table: which number stands for what, under which names, and how often the kernel was told.
//!
//! Numbers are never used twice within a mount. A node lives as long as the kernel remembers it or something below it. Nodes of
//! `staging/` are found again by their names, so a rename moves a directory with all that is in it by changing one name.

use super::place::Place;
use parking_lot::Mutex;
use std::collections::HashMap;

/// The inode number of the mount's root.
pub(super) const ROOT: u64 = 1;

/// What several names of one file have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Identity {
    /// A hard-linked file of a version: the version's id and the link number.
    Version([u8; 32], u32),
    /// A hard-linked file in `staging/`: device and inode number of the backing file.
    Disk(u64, u64),
    /// A hard-linked file in `staging/` that is served from the version it was committed as.
    Committed([u8; 32], u32),
}

struct Node {
    /// The names it has now, as parent and name. None: removed, but still open or remembered.
    names: Vec<(u64, Box<[u8]>)>,
    place: Place,
    lookups: u64,
    identity: Option<Identity>,
}

/// The table.
pub(super) struct Inodes(Mutex<Table>);

struct Table {
    next: u64,
    nodes: HashMap<u64, Node>,
    names: HashMap<u64, HashMap<Box<[u8]>, u64>>,
    identities: HashMap<Identity, u64>,
}

impl Inodes {
    /// A table with nothing but the root.
    pub(super) fn new() -> Self {
        let root = Node {
            names: Vec::new(),
            place: Place::Root,
            lookups: 1,
            identity: None,
        };
        Inodes(Mutex::new(Table {
            next: ROOT + 1,
            nodes: HashMap::from([(ROOT, root)]),
            names: HashMap::new(),
            identities: HashMap::new(),
        }))
    }

    /// What the inode stands for.
    pub(super) fn place(&self, ino: u64) -> Option<Place> {
        self.0.lock().nodes.get(&ino).map(|n| n.place.clone())
    }

    /// The names from the root down to the inode; `None` if it has none any more.
    pub(super) fn path(&self, ino: u64) -> Option<Vec<Vec<u8>>> {
        let table = self.0.lock();
        let mut path = Vec::new();
        let mut at = ino;
        while at != ROOT {
            let (parent, name) = table.nodes.get(&at)?.names.first()?;
            path.push(name.to_vec());
            at = *parent;
        }
        path.reverse();
        Some(path)
    }

    /// The inode that the kernel is being told of under this name, made if need be; it counts as looked up once more.
    /// Inodes of one identity are one, and a node of another kind under that name is something that is gone.
    pub(super) fn look_up(&self, parent: u64, name: &[u8], place: Place, identity: Option<Identity>) -> u64 {
        let mut table = self.0.lock();
        let known = table.names.get(&parent).and_then(|n| n.get(name)).copied();
        let shared = identity.and_then(|i| table.identities.get(&i).copied());
        let same = |ino: &u64| {
            table
                .nodes
                .get(ino)
                .is_some_and(|n| n.place.kind() == place.kind())
        };
        let ino = match (known.filter(same), shared.filter(same)) {
            (Some(ino), Some(other)) if ino == other => ino,
            (Some(ino), None) => ino,
            (_, Some(other)) => {
                table.unname(parent, name);
                table.name(other, parent, name);
                other
            }
            (None, None) => {
                table.unname(parent, name);
                let ino = table.next;
                table.next += 1;
                let node = Node {
                    names: Vec::new(),
                    place: place.clone(),
                    lookups: 0,
                    identity: None,
                };
                table.nodes.insert(ino, node);
                table.name(ino, parent, name);
                ino
            }
        };
        table.identify(ino, identity);
        if let Some(node) = table.nodes.get_mut(&ino) {
            node.lookups += 1;
            node.place = place;
        }
        ino
    }

    /// The kernel forgets the inode `count` times.
    pub(super) fn forget(&self, ino: u64, count: u64) {
        let mut table = self.0.lock();
        if let Some(node) = table.nodes.get_mut(&ino) {
            node.lookups = node.lookups.saturating_sub(count);
        }
        table.drop_unused(ino);
    }

    /// The name is gone; the inode stays while the kernel remembers it.
    pub(super) fn remove(&self, parent: u64, name: &[u8]) {
        self.0.lock().unname(parent, name);
    }

    /// Other names of the inode that is known under this one, unless it is of this identity: they may be other files by now.
    pub(super) fn others(
        &self,
        parent: u64,
        name: &[u8],
        identity: Option<Identity>,
    ) -> Vec<(u64, Box<[u8]>)> {
        let table = self.0.lock();
        let known = table.names.get(&parent).and_then(|n| n.get(name));
        match known.and_then(|ino| table.nodes.get(ino)) {
            Some(node) if node.names.len() > 1 && (identity.is_none() || node.identity != identity) => {
                let other = |n: &&(u64, Box<[u8]>)| n.0 != parent || *n.1 != *name;
                node.names.iter().filter(other).cloned().collect()
            }
            _ => Vec::new(),
        }
    }

    /// The inode's names are another inode's from now on: the one that is made when the kernel looks them up again.
    pub(super) fn detach(&self, ino: u64) {
        let mut table = self.0.lock();
        table.identify(ino, None);
        let names = table.nodes.get(&ino).map(|n| n.names.clone()).unwrap_or_default();
        for (parent, name) in names {
            table.unname(parent, &name);
        }
    }

    /// One more name for the inode, of which the kernel is being told.
    pub(super) fn link(&self, ino: u64, parent: u64, name: &[u8]) {
        let mut table = self.0.lock();
        table.unname(parent, name);
        table.name(ino, parent, name);
        if let Some(node) = table.nodes.get_mut(&ino) {
            node.lookups += 1;
        }
    }

    /// The inode of this identity.
    pub(super) fn identified(&self, identity: Identity) -> Option<u64> {
        self.0.lock().identities.get(&identity).copied()
    }

    /// The inode is no longer what had this identity.
    pub(super) fn unidentify(&self, ino: u64) {
        self.0.lock().identify(ino, None);
    }

    /// The directory that holds the inode; the root holds itself.
    pub(super) fn parent(&self, ino: u64) -> u64 {
        let table = self.0.lock();
        let name = table.nodes.get(&ino).and_then(|n| n.names.first());
        name.map_or(ROOT, |(parent, _)| *parent)
    }

    /// A name moves, over another one if that is taken; with `exchange`, the two swap.
    pub(super) fn rename(&self, from: (u64, &[u8]), to: (u64, &[u8]), exchange: bool) {
        if from == to {
            return;
        }
        let mut table = self.0.lock();
        let moved = table.take(from.0, from.1);
        let other = table.take(to.0, to.1);
        if let Some(ino) = moved {
            table.name(ino, to.0, to.1);
        }
        match other {
            Some(ino) if exchange => table.name(ino, from.0, from.1),
            Some(ino) => table.drop_unused(ino),
            None => {}
        }
        // `from` may have been the last name that kept its directory alive.
        table.drop_unused(from.0);
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.0.lock().nodes.len()
    }
}

impl Table {
    fn name(&mut self, ino: u64, parent: u64, name: &[u8]) {
        self.names.entry(parent).or_default().insert(name.into(), ino);
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.names.push((parent, name.into()));
        }
    }

    /// Takes the name away, without dropping the inode.
    fn take(&mut self, parent: u64, name: &[u8]) -> Option<u64> {
        let names = self.names.get_mut(&parent)?;
        let ino = names.remove(name)?;
        if names.is_empty() {
            self.names.remove(&parent);
        }
        if let Some(node) = self.nodes.get_mut(&ino) {
            node.names.retain(|(p, n)| *p != parent || **n != *name);
        }
        Some(ino)
    }

    fn identify(&mut self, ino: u64, identity: Option<Identity>) {
        let Some(node) = self.nodes.get_mut(&ino) else {
            return;
        };
        let old = std::mem::replace(&mut node.identity, identity);
        if let Some(old) = old.filter(|o| self.identities.get(o) == Some(&ino)) {
            self.identities.remove(&old);
        }
        if let Some(identity) = identity {
            self.identities.insert(identity, ino);
        }
    }

    fn unname(&mut self, parent: u64, name: &[u8]) {
        if let Some(ino) = self.take(parent, name) {
            self.drop_unused(ino);
        }
    }

    /// Drops the inode if nobody remembers it, then its parents if it was all that kept them.
    fn drop_unused(&mut self, ino: u64) {
        let mut pending = vec![ino];
        while let Some(ino) = pending.pop() {
            let unused = |n: &Node| ino != ROOT && n.lookups == 0 && !self.names.contains_key(&ino);
            if !self.nodes.get(&ino).is_some_and(unused) {
                continue;
            }
            let Some(node) = self.nodes.remove(&ino) else {
                continue;
            };
            if let Some(identity) = node.identity
                && self.identities.get(&identity) == Some(&ino)
            {
                self.identities.remove(&identity);
            }
            for (parent, name) in node.names {
                if let Some(names) = self.names.get_mut(&parent) {
                    names.remove(&name);
                    if names.is_empty() {
                        self.names.remove(&parent);
                        pending.push(parent);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuse::attr::FileKind;
    use proptest::prelude::*;

    fn staged(kind: FileKind) -> Place {
        Place::Staged(kind)
    }

    fn look(t: &Inodes, parent: u64, name: &str, kind: FileKind) -> u64 {
        t.look_up(parent, name.as_bytes(), staged(kind), None)
    }

    fn path(t: &Inodes, ino: u64) -> Option<String> {
        let p = t.path(ino)?;
        Some(
            p.iter()
                .map(|c| String::from_utf8_lossy(c).into_owned())
                .collect::<Vec<_>>()
                .join("/"),
        )
    }

    #[test]
    fn a_rename_moves_what_is_below() {
        let t = Inodes::new();
        let a = look(&t, ROOT, "a", FileKind::Dir);
        let f = look(&t, a, "f", FileKind::File);
        t.rename((ROOT, b"a"), (ROOT, b"b"), false);
        assert_eq!(path(&t, f).unwrap(), "b/f");
        let c = look(&t, ROOT, "c", FileKind::Dir);
        t.rename((ROOT, b"b"), (ROOT, b"c"), true);
        assert_eq!(
            (path(&t, f).unwrap(), path(&t, c).unwrap()),
            ("c/f".into(), "b".into())
        );
    }

    #[test]
    fn what_was_replaced_has_no_path_and_its_number_never_returns() {
        let t = Inodes::new();
        let old = look(&t, ROOT, "model.pt", FileKind::File);
        let new = look(&t, ROOT, "tmp", FileKind::File);
        t.rename((ROOT, b"tmp"), (ROOT, b"model.pt"), false);
        assert_eq!(path(&t, old), None);
        assert_eq!(path(&t, new).unwrap(), "model.pt");
        assert_eq!(look(&t, ROOT, "model.pt", FileKind::File), new);
        t.forget(old, 1);
        assert!(t.place(old).is_none());
        assert!(look(&t, ROOT, "other", FileKind::File) > new);
    }

    #[test]
    fn a_name_that_changed_its_kind_is_another_inode() {
        let t = Inodes::new();
        let file = look(&t, ROOT, "x", FileKind::File);
        let dir = look(&t, ROOT, "x", FileKind::Dir);
        assert_ne!(file, dir);
        assert_eq!(path(&t, file), None);
    }

    #[test]
    fn hard_links_share_an_inode_and_outlive_one_name() {
        let t = Inodes::new();
        let id = Some(Identity::Disk(1, 2));
        let a = t.look_up(ROOT, b"a", staged(FileKind::File), id);
        assert_eq!(t.look_up(ROOT, b"b", staged(FileKind::File), id), a);
        t.remove(ROOT, b"a");
        assert_eq!(path(&t, a).unwrap(), "b");
        t.forget(a, 2);
        assert!(t.place(a).is_none());
        assert_ne!(t.look_up(ROOT, b"b", staged(FileKind::File), id), a);
    }

    #[test]
    fn a_directory_stays_while_something_below_is_remembered() {
        let t = Inodes::new();
        let d = look(&t, ROOT, "d", FileKind::Dir);
        let f = look(&t, d, "f", FileKind::File);
        t.forget(d, 1);
        assert_eq!(path(&t, f).unwrap(), "d/f");
        t.forget(f, 1);
        assert_eq!(t.len(), 1);
    }

    proptest! {
        /// Whatever happens, paths end (no cycles), and once all is forgotten nothing is left.
        #[test]
        fn nothing_leaks(ops in proptest::collection::vec((0u8..5, 0u64..6, 0u8..4, 0u64..6, 0u8..4), 0..80)) {
            let t = Inodes::new();
            let mut dirs = vec![ROOT];
            let mut told: HashMap<u64, u64> = HashMap::new();
            for (op, p, n, q, m) in ops {
                let p = dirs[p as usize % dirs.len()];
                let q = dirs[q as usize % dirs.len()];
                let (n, m) = ([b'a' + n], [b'a' + m]);
                if t.path(p).is_none() || t.path(q).is_none() {
                    continue;
                }
                match op {
                    0 | 1 => {
                        let kind = if op == 0 { FileKind::Dir } else { FileKind::File };
                        let ino = t.look_up(p, &n, staged(kind), None);
                        *told.entry(ino).or_default() += 1;
                        if op == 0 && !dirs.contains(&ino) {
                            dirs.push(ino);
                        }
                    }
                    2 => t.remove(p, &n),
                    3 => {
                        // The kernel never moves a directory below itself.
                        let mut from = t.path(p).unwrap();
                        from.push(n.to_vec());
                        let mut to = t.path(q).unwrap();
                        to.push(m.to_vec());
                        if !to.starts_with(&from) && !from.starts_with(&to) {
                            t.rename((p, &n), (q, &m), false);
                        }
                    }
                    _ => {
                        if let Some((ino, count)) = told.iter().next().map(|(a, b)| (*a, *b)) {
                            // A directory is forgotten after what is in it, as the kernel does.
                            if !dirs.contains(&ino) {
                                t.forget(ino, count);
                                told.remove(&ino);
                            }
                        }
                    }
                }
                for ino in told.keys() {
                    let _ = t.path(*ino);
                }
            }
            for (ino, count) in told {
                t.forget(ino, count);
            }
            prop_assert_eq!(t.len(), 1);
        }
    }
}

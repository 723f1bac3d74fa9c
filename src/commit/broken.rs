//! What of a store cannot be read and has to be fetched again, and where the damaged bytes go: into STORE/quarantine, never away.

use super::Parts;
use super::stamp::kind_of;
use crate::error::{Interrupt, IoContext, Kind, Result};
use crate::graph::{EntryKind, Manifest, NodeKind, NodeMeta, Numbered, Object, Shape, Tree};
use crate::id::{FileHash, NodeId};
use crate::rebuild::{NodeSource, StoredFile};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::sync::Arc;

/// Something that is damaged or missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Broken {
    /// A chunk, a layout or a tree, by the number of its kind.
    Node(u8, NodeId),
    /// The manifest of a file with this SHA-256 and length.
    File(FileHash, u64),
}

/// Looks for everything in versions and objects, and in the packs, that is damaged or missing. Below a directory that is missing
/// nothing can be told: look again once it is there. `told` hears of the bytes that were read.
///
/// # Errors
/// What is no damage.
pub fn broken(
    parts: &Parts,
    versions: &[Arc<Numbered>],
    objects: &[Arc<Object>],
    told: &mut dyn FnMut(u64),
    interrupt: Interrupt<'_>,
) -> Result<BTreeSet<Broken>> {
    let mut search = Search {
        parts,
        found: BTreeSet::new(),
        trees: HashSet::new(),
        files: HashSet::new(),
        told,
        interrupt,
    };
    for version in versions {
        search.tree(version.version.tree)?;
    }
    for object in objects {
        search.file(object.manifest.hash, object.manifest.len)?;
    }
    search.packs()?;
    Ok(search.found)
}

struct Search<'a> {
    parts: &'a Parts,
    found: BTreeSet<Broken>,
    trees: HashSet<NodeId>,
    files: HashSet<(FileHash, u64)>,
    told: &'a mut dyn FnMut(u64),
    interrupt: Interrupt<'a>,
}

impl Search<'_> {
    fn tree(&mut self, root: NodeId) -> Result<()> {
        let mut todo = vec![root];
        while let Some(id) = todo.pop() {
            if !self.trees.insert(id) {
                continue;
            }
            let packs = &*self.parts.packs;
            let tree = self.parts.rebuilder.node(packs, NodeKind::Tree, &id);
            let Ok(tree) = tree.and_then(|bytes| Tree::decode(&bytes)) else {
                self.culprits(NodeKind::Tree, id);
                continue;
            };
            for entry in tree.entries() {
                match &entry.kind {
                    EntryKind::File { hash, len, .. } => self.file(*hash, *len)?,
                    EntryKind::Dir { tree, .. } => todo.push(*tree),
                    EntryKind::Symlink(_) => {}
                }
            }
        }
        Ok(())
    }

    fn file(&mut self, hash: FileHash, len: u64) -> Result<()> {
        if !self.files.insert((hash, len)) {
            return Ok(());
        }
        (self.told)(len);
        let packs = &self.parts.packs;
        let raw = self
            .parts
            .rebuilder
            .node(&**packs, NodeKind::Manifest, &Manifest::id(&hash, len));
        let Ok(manifest) = raw.and_then(|raw| Manifest::decode(&raw)) else {
            self.found.insert(Broken::File(hash, len));
            return Ok(());
        };
        let mut wrong = false;
        if let Shape::Layout(id) = manifest.shape
            && self
                .parts
                .rebuilder
                .node(&**packs, NodeKind::Layout, &id)
                .is_err()
        {
            wrong = true;
            self.culprits(NodeKind::Layout, id);
        }
        let source: Arc<dyn NodeSource> = packs.clone();
        let file = StoredFile::load(&self.parts.rebuilder, source, &hash, len);
        // Most files are right: only of one that is not each chunk is looked at.
        match file.and_then(|f| f.digest(self.interrupt)) {
            Ok(found) if found == hash => return Ok(()),
            Err(e) if e.kind() == Kind::Stopped => return Err(e),
            _ => {}
        }
        for id in &manifest.chunks {
            if self.parts.rebuilder.chunk(&**packs, id).is_err() {
                wrong = true;
                self.culprits(NodeKind::Chunk, *id);
            }
        }
        // All of its parts are right, and they make another file.
        if !wrong {
            self.found.insert(Broken::File(hash, len));
        }
        Ok(())
    }

    /// Those nodes on the chain of one that cannot be rebuilt which cannot be read; if all can, the node itself is wrong.
    fn culprits(&mut self, kind: NodeKind, id: NodeId) {
        let mut todo = vec![id];
        let mut seen = HashSet::new();
        let mut any = false;
        while let Some(at) = todo.pop() {
            if !seen.insert(at) {
                continue;
            }
            let node = self.parts.packs.get(&at);
            match node.and_then(|n| NodeMeta::decode(kind, &n.meta)) {
                Ok(meta) => todo.extend(meta.delta.iter().flat_map(|d| d.bases())),
                Err(_) => {
                    any = true;
                    self.found.insert(Broken::Node(kind as u8, at));
                }
            }
        }
        if !any {
            self.found.insert(Broken::Node(kind as u8, id));
        }
    }

    /// Nodes that no version needs now may be needed by one to come.
    fn packs(&mut self) -> Result<()> {
        let replaced = replaced(self.parts);
        for range in self.parts.history.ranges() {
            (self.interrupt)()?;
            let mut ids = Vec::new();
            let known = replaced.get(&range.pack);
            let none = BTreeMap::new();
            self.parts
                .packs
                .check(&range, known.unwrap_or(&none), &mut |id, _| ids.extend(id));
            for id in ids {
                match self.parts.packs.get(&id) {
                    // There is another copy.
                    Ok(_) => quarantine(self.parts, &id)?,
                    Err(_) => {
                        let kind = self.parts.packs.meta(&id).and_then(|m| kind_of(m.kind));
                        match kind {
                            // It is found by its file.
                            Ok(NodeKind::Manifest) | Err(_) => {}
                            Ok(kind) => drop(self.found.insert(Broken::Node(kind as u8, id))),
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Keeps the bytes of a node's damaged records beside the packs, under names that say where they lie. What is kept there and can be
/// read elsewhere is not told as damage any more.
///
/// # Errors
/// What the system reports.
pub fn quarantine(parts: &Parts, id: &NodeId) -> Result<()> {
    let dir = parts.dir.join("quarantine");
    for place in parts.packs.places(id)? {
        if parts.packs.get_at(id, &place).is_ok() {
            continue;
        }
        let name = format!("{:08x}-{}-{}-{id}", place.pack, place.offset, place.len);
        let path = dir.join(name);
        fs::create_dir_all(&dir)
            .and_then(|()| fs::write(&path, parts.packs.raw_at(&place)))
            .doing(|| format!("write {}", path.display()))?;
        log::info!("kept {}", path.display());
    }
    Ok(())
}

/// By pack and offset, the lengths of damaged records that are in quarantine and whose nodes can be read elsewhere.
pub fn replaced(parts: &Parts) -> BTreeMap<u32, BTreeMap<u64, u32>> {
    let mut all: BTreeMap<u32, BTreeMap<u64, u32>> = BTreeMap::new();
    let names = fs::read_dir(parts.dir.join("quarantine"))
        .into_iter()
        .flatten()
        .flatten();
    for name in names.filter_map(|e| e.file_name().into_string().ok()) {
        let parsed = (|| {
            let mut words = name.split('-');
            let pack = u32::from_str_radix(words.next()?, 16).ok()?;
            let (offset, len) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            Some((pack, offset, len, words.next()?.parse::<NodeId>().ok()?))
        })();
        if let Some((pack, offset, len, id)) = parsed
            && parts.packs.get(&id).is_ok()
        {
            all.entry(pack).or_default().insert(offset, len);
        }
    }
    all
}

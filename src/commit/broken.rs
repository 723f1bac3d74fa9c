//! What of a store cannot be read and has to be fetched again, and where the damaged bytes go: into STORE/quarantine, never away.

use super::Parts;
use super::stamp::kind_of;
use crate::error::{Interrupt, IoContext, Kind, Result};
use crate::graph::{EntryKind, Manifest, NodeKind, NodeMeta, Numbered, Object, Shape, Tree};
use crate::id::{FileHash, NodeId};
use crate::pack::Stretches;
use crate::rebuild::{NodeSource, StoredFile};
use std::collections::{BTreeSet, HashSet};
use std::fs::{self, File};
use std::ops::Range;
use std::sync::Arc;

/// Something that is damaged or missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Broken {
    /// A chunk, a layout or a tree, by the number of its kind; or the manifest of a file that no version has: nobody can tell which.
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

    /// Nodes that no version needs now may be needed by one to come. What is damaged and not needed, or lies elsewhere as well, is kept
    /// in quarantine and not told again.
    fn packs(&mut self) -> Result<()> {
        let replaced = replaced(self.parts);
        let mut nameless = Vec::new();
        let files: HashSet<NodeId> = self.files.iter().map(|(h, len)| Manifest::id(h, *len)).collect();
        for range in self.parts.history.ranges() {
            (self.interrupt)()?;
            self.parts
                .packs
                .check(&range, &replaced, &mut |damaged| match damaged.node {
                    Some((_, id)) if self.parts.packs.get(&id).is_ok() => {
                        keep(self.parts, damaged.pack, &damaged.stretch, &id.to_string())
                    }
                    // It is found by its file.
                    Some((_, id)) if files.contains(&id) => Ok(()),
                    Some((kind, id)) => {
                        self.found.insert(Broken::Node(kind, id));
                        Ok(())
                    }
                    None if damaged.stretch.is_empty() => Err(damaged.why),
                    None => {
                        nameless.push(damaged);
                        Ok(())
                    }
                })?;
        }
        if nameless.is_empty() || !self.found.is_empty() {
            return Ok(());
        }
        // What lay there is known by nobody now, or is somewhere else: all that any node needs is.
        self.parts.packs.rebuild_index()?;
        self.bases()?;
        if self.found.is_empty() {
            for damaged in nameless {
                keep(self.parts, damaged.pack, &damaged.stretch, NAMELESS)?;
            }
        }
        Ok(())
    }

    /// Looks for bases that are missing, of whatever node: somebody may store it again, and then it is needed.
    fn bases(&mut self) -> Result<()> {
        let packs = &self.parts.packs;
        for range in self.parts.history.ranges() {
            (self.interrupt)()?;
            packs.scan_lossy(&range, &mut |_, _, meta| {
                let Ok(kind) = kind_of(meta.kind) else {
                    return Ok(());
                };
                let Ok(node) = NodeMeta::decode(kind, &meta.meta) else {
                    return Ok(());
                };
                for base in node.delta.iter().flat_map(|d| d.bases()) {
                    if !packs.contains(&base)? {
                        self.found.insert(Broken::Node(meta.kind, base));
                    }
                }
                Ok(())
            })?;
        }
        Ok(())
    }
}

/// Says in a name in quarantine that the bytes' header could not be read, and that nothing they may have been is missing.
const NAMELESS: &str = "nameless";

/// Keeps the bytes of a node's damaged records beside the packs, under names that say where they lie. What is kept there and can be
/// read elsewhere is not told as damage any more.
///
/// # Errors
/// What the system reports.
pub fn quarantine(parts: &Parts, id: &NodeId) -> Result<()> {
    for place in parts.packs.places(id)? {
        if parts.packs.get_at(id, &place).is_err() {
            keep(parts, place.pack, &place.stretch(), &id.to_string())?;
        }
    }
    Ok(())
}

fn keep(parts: &Parts, pack: u32, stretch: &Range<u64>, what: &str) -> Result<()> {
    let dir = parts.dir.join("quarantine");
    let (from, len) = (stretch.start, stretch.end - stretch.start);
    let path = dir.join(format!("{pack:08x}-{from}-{len}-{what}"));
    fs::create_dir_all(&dir)
        .and_then(|()| parts.packs.copy_raw(pack, stretch, &mut File::create(&path)?))
        .doing(|| format!("write {}", path.display()))?;
    log::info!("kept {}", path.display());
    Ok(())
}

/// The stretches of packs that are in quarantine and of which nothing is missing: their nodes can be read elsewhere.
pub fn replaced(parts: &Parts) -> Stretches {
    let mut all = Stretches::default();
    let names = fs::read_dir(parts.dir.join("quarantine"))
        .into_iter()
        .flatten()
        .flatten();
    for name in names.filter_map(|e| e.file_name().into_string().ok()) {
        let parsed = (|| {
            let mut words = name.splitn(4, '-');
            let pack = u32::from_str_radix(words.next()?, 16).ok()?;
            let (from, len): (u64, u64) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
            let here = match words.next()? {
                NAMELESS => true,
                id => parts.packs.get(&id.parse::<NodeId>().ok()?).is_ok(),
            };
            here.then_some((pack, from..from.checked_add(len)?))
        })();
        if let Some((pack, stretch)) = parsed {
            all.add(pack, stretch);
        }
    }
    all
}

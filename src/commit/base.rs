//! Finds what each chunk of a file is best encoded against: the chunk at the same place of the same tensor in an earlier version,
//! else one of another tensor that is close (`similar.rs`).

use super::Parts;
use super::index::Index;
use super::known::{Known, Plan};
use super::listing::{FileKey, LARGE, Listing, SMALL};
use super::relative::Relative;
use super::similar::Search;
use crate::error::{Kind, Result};
use crate::format::{Layout, Region, Source};
use crate::graph::{EntryKind, History, Manifest, NodeKind, Numbered, Tree};
use crate::id::NodeId;
use crate::rebuild::{NodeSource, Rebuilder};
use crate::tensor::{Dtype, Number};
use std::collections::HashMap;
use std::sync::Arc;

/// How many versions back a tensor is looked for: a run that saves model and optimizer as versions of their own needs more
/// than one.
pub(super) const ANCESTORS: usize = 16;
/// How many versions back a tensor of another name is looked for …
const NEAR: usize = 4;
/// … and in how many other branches' newest versions.
const HEADS: usize = 32;
/// Files that are listed, of all versions together, and regions and chunks of files that are held, once by file and once by name:
/// what bounds the memory, to some 60 MB each, and the work.
const LISTED: usize = 300_000;
const HELD: usize = 300_000;

/// Names a chunk by the tensors it holds (see `Layout::chunk_keys`).
pub(super) type ChunkKey = [u8; 16];

/// A version that may have bases, and its files once they are listed.
struct Place {
    version: Arc<Numbered>,
    files: Option<Arc<Listing>>,
}

/// What earlier versions, and the commit itself, have to offer as bases.
pub(super) struct Bases {
    source: Arc<dyn NodeSource>,
    rebuilder: Arc<Rebuilder>,
    /// Ancestors, the nearest first, then other branches' newest versions, the latest first.
    versions: Vec<Place>,
    ancestors: usize,
    listed: usize,
    /// Files of this commit that are stored.
    own: Listing,
    loaded: HashMap<FileKey, Arc<Known>>,
    held: usize,
    /// By version; none for the commit itself.
    indexes: HashMap<Option<usize>, Arc<Index>>,
    /// What the versions' indexes hold.
    indexed: usize,
}

/// The bases of one file.
#[derive(Default)]
pub(super) struct FileBases {
    /// For each chunk asked for.
    pub(super) chunks: Vec<Option<NodeId>>,
    /// For the layout.
    pub(super) layout: Option<NodeId>,
    /// By chunk: the tensor of another float width that it may be encoded against.
    pub(super) relatives: HashMap<usize, Relative>,
}

/// The versions in which a commit onto `head` looks for bases, and how many of them are ancestors.
pub(super) fn versions(history: &History, head: Option<crate::id::VersionId>) -> (Vec<Arc<Numbered>>, usize) {
    let mut versions = history.ancestors(head, ANCESTORS);
    let ancestors = versions.len();
    let newest = history.branches().values().filter_map(|b| b.versions.last());
    let mut others: Vec<_> = newest
        .filter(|v| versions.iter().all(|a| a.id != v.id))
        .cloned()
        .collect();
    others.sort_by_key(|v| std::cmp::Reverse((v.version.time.seconds, v.version.time.nanos)));
    versions.extend(others.into_iter().take(HEADS));
    (versions, ancestors)
}

impl Bases {
    /// Bases in these versions, of which the first `ancestors` are the branch's own. `source` has the nodes of the commit, too.
    pub(super) fn new(
        parts: &Parts,
        source: Arc<dyn NodeSource>,
        (versions, ancestors): (Vec<Arc<Numbered>>, usize),
    ) -> Self {
        let versions = versions.into_iter().map(|version| Place { version, files: None });
        Bases {
            source,
            rebuilder: parts.rebuilder.clone(),
            versions: versions.collect(),
            ancestors,
            listed: 0,
            own: Listing::default(),
            loaded: HashMap::new(),
            held: 0,
            indexes: HashMap::new(),
            indexed: 0,
        }
    }

    /// Tells of a file of this commit that is stored.
    pub(super) fn stored(&mut self, path: &[u8], file: FileKey) {
        if file.1 > 0 && self.own.len() < LISTED {
            self.own.add(path.to_vec(), file);
        }
    }

    /// Bases for the chunks of a parsed file at `path` in the new version, whose bytes `file` reads.
    pub(super) fn of_layout(&mut self, path: &[u8], layout: &Layout, file: &dyn Source) -> FileBases {
        self.search(path, layout, file, true)
    }

    /// The same without relatives.
    pub(super) fn revisions(&mut self, path: &[u8], layout: &Layout, file: &dyn Source) -> FileBases {
        self.search(path, layout, file, false)
    }

    fn search(&mut self, path: &[u8], layout: &Layout, file: &dyn Source, relatives: bool) -> FileBases {
        let keys = layout.chunk_keys();
        let mut found = self.same_place(path, layout, &keys);
        let missing = found.chunks.iter().any(Option::is_none);
        let floats = |r: &Region| matches!(r.dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32);
        let relatives = relatives && layout.regions.iter().any(floats);
        if layout.len < SMALL || !missing && !relatives {
            return found;
        }
        let (rebuilder, source) = (self.rebuilder.clone(), self.source.clone());
        let plan = Plan::new(layout);
        let mut search = Search::new(&rebuilder, &*source, file, &plan, &found);
        if !relatives {
            search.without_relatives();
        }
        let versions = (0..self.ancestors.min(NEAR)).chain(self.ancestors..self.versions.len());
        for (i, v) in std::iter::once(None).chain(versions.map(Some)).enumerate() {
            // What has a base may still be the very rounding of a tensor beside it, or in the version before.
            if i > 1 {
                search.orphans_only();
            }
            if search.is_done() {
                break;
            }
            let index = self.index(v);
            search.visit(&index);
            if i <= 1 {
                search.visit_all(&index);
            }
        }
        search.finish(&keys, &mut found);
        found
    }

    /// The chunks of the same key, of the nearest version that has any.
    fn same_place(&mut self, path: &[u8], layout: &Layout, keys: &[ChunkKey]) -> FileBases {
        let mut found = FileBases {
            chunks: vec![None; keys.len()],
            ..FileBases::default()
        };
        // Structure alone is alike in many files.
        let is_tensor: Vec<bool> = layout.chunks.iter().map(|c| c.number != Number::Bytes).collect();
        for v in 0..self.ancestors.max(1) {
            for file in self.ancestor(v).candidates(&self.own, path, layout.len) {
                let known = self.known(file);
                found.layout = found.layout.or(known.layout);
                for (slot, key) in found.chunks.iter_mut().zip(keys).filter(|(s, _)| s.is_none()) {
                    *slot = known.chunk(key);
                }
                if found.chunks.iter().all(Option::is_some) {
                    return found;
                }
            }
            let mut bases = found.chunks.iter().zip(&is_tensor);
            if bases.any(|(base, tensor)| base.is_some() && *tensor) {
                break;
            }
        }
        found
    }

    /// The base for a small file without structure: the one of a like name before it.
    pub(super) fn of_opaque(&mut self, path: &[u8]) -> Option<NodeId> {
        (0..self.ancestors.max(1)).find_map(|v| {
            let near = self.ancestor(v).candidates(&self.own, path, 0);
            near.into_iter().find_map(|f| self.known(f).whole())
        })
    }

    /// The files of an ancestor; none where there is none.
    fn ancestor(&mut self, v: usize) -> Arc<Listing> {
        if v < self.ancestors {
            self.list(v)
        } else {
            Arc::default()
        }
    }

    fn list(&mut self, v: usize) -> Arc<Listing> {
        let Some(Place { version, files }) = self.versions.get(v) else {
            return Arc::default();
        };
        if let Some(files) = files {
            return files.clone();
        }
        let root = version.version.tree;
        let files = self.list_tree(root).unwrap_or_else(|e| {
            log::warn!("no bases from {}: {e}", version.name());
            Listing::default()
        });
        self.listed += files.len();
        let files = Arc::new(files);
        self.versions[v].files = Some(files.clone());
        files
    }

    fn list_tree(&self, root: NodeId) -> Result<Listing> {
        let mut out = Listing::default();
        let mut dirs = vec![(Vec::new(), root)];
        while let Some((prefix, id)) = dirs.pop() {
            let tree = Tree::decode(&self.rebuilder.node(&*self.source, NodeKind::Tree, &id)?)?;
            for e in tree.entries() {
                let mut path: Vec<u8> = prefix.clone();
                path.extend_from_slice(&e.name);
                match e.kind {
                    EntryKind::File { hash, len, .. } if len > 0 => out.add(path, (hash, len)),
                    EntryKind::Dir { tree, .. } => {
                        path.push(b'/');
                        dirs.push((path, tree));
                    }
                    EntryKind::File { .. } | EntryKind::Symlink(_) => {}
                }
            }
            if self.listed + out.len() >= LISTED {
                break;
            }
        }
        Ok(out)
    }

    fn known(&mut self, (hash, len): FileKey) -> Arc<Known> {
        if let Some(o) = self.loaded.get(&(hash, len)) {
            return o.clone();
        }
        let id = Manifest::id(&hash, len);
        let known = Known::load(&self.rebuilder, &*self.source, &id).unwrap_or_else(|e| {
            // A base that cannot be had costs space, not the commit.
            if e.kind() != Kind::NotFound {
                log::warn!("no bases from file {}: {e}", hash.short());
            }
            Known::default()
        });
        if self.held + known.weight() > HELD {
            self.loaded.clear();
            self.held = 0;
        }
        self.held += known.weight();
        let known = Arc::new(known);
        self.loaded.insert((hash, len), known.clone());
        known
    }

    /// The large files of a version, or of this commit, by what their regions look like; no more of them than may be held.
    fn index(&mut self, v: Option<usize>) -> Arc<Index> {
        let files = match v {
            Some(v) => self.list(v).large().to_vec(),
            None => self.own.large().to_vec(),
        };
        let mut index = self.indexes.remove(&v).unwrap_or_default();
        let before = index.weight();
        // Nobody else has it, so nothing is copied.
        let grown = Arc::make_mut(&mut index);
        for file in files.get(grown.seen()..).unwrap_or_default() {
            if v.is_none() && grown.weight() > HELD / 2 {
                // The latest files of a commit are the likeliest.
                *grown = grown.emptied();
            }
            let full = grown.seen() == LARGE || self.indexed + grown.weight() > HELD;
            if v.is_some() && full {
                break;
            }
            grown.add(self.known(*file));
        }
        if v.is_some() {
            self.indexed += index.weight() - before;
        }
        self.indexes.insert(v, index.clone());
        index
    }
}

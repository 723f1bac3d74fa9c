//! Finds the chunk at the same place of the same tensor in an earlier version.

use super::Parts;
use crate::error::{Kind, Result};
use crate::format::Layout;
use crate::graph::{EntryKind, Manifest, NodeKind, Numbered, Shape, Tree};
use crate::id::{FileHash, NodeId};
use crate::pack::Packs;
use crate::rebuild::Rebuilder;
use crate::tensor::Number;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// How many versions back a tensor is looked for: a run that saves model and optimizer as versions of their own needs more
/// than one.
pub(super) const ANCESTORS: usize = 16;
/// Files of one version that are looked at because their path is alike, and because they are large.
const ALIKE: usize = 64;
const LARGE: usize = 64;
/// The same for files that are themselves too small to be worth a long search.
const SMALL: u64 = 64 << 10;
const ALIKE_SMALL: usize = 4;
/// Files that are listed, of all versions together, and files whose chunks are held: what bounds the memory.
const LISTED: usize = 300_000;
const LOADED: usize = 50_000;

/// Names a chunk by the tensors it holds (see `Layout::chunk_keys`).
pub(super) type ChunkKey = [u8; 16];

/// What earlier versions have to offer as bases.
pub(super) struct Bases {
    packs: Arc<Packs>,
    rebuilder: Arc<Rebuilder>,
    versions: Vec<(Arc<Numbered>, Option<Arc<Listing>>)>,
    listed: usize,
    loaded: HashMap<FileKey, Arc<Offer>>,
}

/// A file's hash and length.
type FileKey = (FileHash, u64);

/// The files of one version, found by path, by likeness, and the largest kind for the rest.
#[derive(Default)]
struct Listing {
    paths: HashMap<Vec<u8>, FileKey>,
    alike: HashMap<Vec<u8>, Vec<FileKey>>,
    large: Vec<FileKey>,
}

impl Listing {
    fn add(&mut self, path: Vec<u8>, file: FileKey) {
        let same = self.alike.entry(alike(&path)).or_default();
        if same.len() < ALIKE {
            same.push(file);
        }
        if file.1 >= SMALL && self.large.len() < LARGE {
            self.large.push(file);
        }
        self.paths.insert(path, file);
    }

    /// Files worth a look as bases: the same path first, then those alike but for numbers, then large ones.
    fn candidates(&self, path: &[u8], len: u64) -> Vec<FileKey> {
        let (near, far) = if len < SMALL {
            (ALIKE_SMALL, 0)
        } else {
            (ALIKE, LARGE)
        };
        let alike = self.alike.get(&alike(path)).into_iter().flatten().take(near);
        let mut seen = HashSet::new();
        let all = self
            .paths
            .get(path)
            .into_iter()
            .chain(alike)
            .chain(self.large.iter().take(far));
        all.copied().filter(|f| seen.insert(*f)).collect()
    }
}

/// What one file of an earlier version has to offer.
#[derive(Default)]
struct Offer {
    chunks: HashMap<ChunkKey, NodeId>,
    layout: Option<NodeId>,
    /// The chunk of a file that is one chunk without structure.
    whole: Option<NodeId>,
}

/// The bases of one file.
#[derive(Default)]
pub(super) struct FileBases {
    /// For each chunk asked for.
    pub(super) chunks: Vec<Option<NodeId>>,
    /// For the layout.
    pub(super) layout: Option<NodeId>,
}

impl Bases {
    pub(super) fn new(parts: &Parts, ancestors: Vec<Arc<Numbered>>) -> Self {
        let versions = ancestors.into_iter().map(|v| (v, None)).collect();
        Bases {
            packs: parts.packs.clone(),
            rebuilder: parts.rebuilder.clone(),
            versions,
            listed: 0,
            loaded: HashMap::new(),
        }
    }

    /// Bases for the chunks of a parsed file at `path` in the new version: of the nearest version that has any.
    pub(super) fn of_layout(&mut self, path: &[u8], layout: &Layout) -> FileBases {
        let keys = layout.chunk_keys();
        let mut found = FileBases {
            chunks: vec![None; keys.len()],
            layout: None,
        };
        for v in 0..self.versions.len() {
            for file in self.list(v).candidates(path, layout.len) {
                let offer = self.offer(file);
                found.layout = found.layout.or(offer.layout);
                for (slot, key) in found.chunks.iter_mut().zip(&keys).filter(|(s, _)| s.is_none()) {
                    *slot = offer.chunks.get(key).copied();
                }
                if found.chunks.iter().all(Option::is_some) {
                    return found;
                }
            }
            // Structure alone is alike in many files.
            let tensors = layout.chunks.iter().map(|c| c.number != Number::Bytes);
            if found
                .chunks
                .iter()
                .zip(tensors)
                .any(|(base, tensor)| base.is_some() && tensor)
            {
                break;
            }
        }
        found
    }

    /// The base for a small file without structure: the one of a like name before it.
    pub(super) fn of_opaque(&mut self, path: &[u8]) -> Option<NodeId> {
        (0..self.versions.len()).find_map(|v| {
            let near = self.list(v).candidates(path, 0);
            near.into_iter().find_map(|f| self.offer(f).whole)
        })
    }

    fn list(&mut self, v: usize) -> Arc<Listing> {
        let Some((version, listed)) = self.versions.get(v) else {
            return Arc::default();
        };
        if let Some(files) = listed {
            return files.clone();
        }
        let root = version.version.tree;
        let files = self.list_tree(root).unwrap_or_else(|e| {
            log::warn!("no bases from {}: {e}", version.name());
            Listing::default()
        });
        self.listed += files.paths.len();
        let files = Arc::new(files);
        self.versions[v].1 = Some(files.clone());
        files
    }

    fn list_tree(&self, root: NodeId) -> Result<Listing> {
        let mut out = Listing::default();
        let mut dirs = vec![(Vec::new(), root)];
        while let Some((prefix, id)) = dirs.pop() {
            let tree = Tree::decode(&self.rebuilder.node(&*self.packs, NodeKind::Tree, &id)?)?;
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
            if self.listed + out.paths.len() >= LISTED {
                break;
            }
        }
        Ok(out)
    }

    fn offer(&mut self, (hash, len): FileKey) -> Arc<Offer> {
        if let Some(o) = self.loaded.get(&(hash, len)) {
            return o.clone();
        }
        let offer = Arc::new(self.load(&hash, len).unwrap_or_else(|e| {
            // A base that cannot be had costs space, not the commit.
            if e.kind() != Kind::NotFound {
                log::warn!("no bases from file {}: {e}", hash.short());
            }
            Offer::default()
        }));
        if self.loaded.len() >= LOADED {
            self.loaded.clear();
        }
        self.loaded.insert((hash, len), offer.clone());
        offer
    }

    fn load(&self, hash: &FileHash, len: u64) -> Result<Offer> {
        let id = Manifest::id(hash, len);
        let manifest = Manifest::decode(&self.rebuilder.node(&*self.packs, NodeKind::Manifest, &id)?)?;
        Ok(match manifest.shape {
            Shape::Opaque(_) => match manifest.chunks[..] {
                [only] => Offer {
                    whole: Some(only),
                    ..Offer::default()
                },
                _ => Offer::default(),
            },
            Shape::Layout(id) => {
                let layout = Layout::decode(&self.rebuilder.node(&*self.packs, NodeKind::Layout, &id)?)?;
                let chunks = layout.chunk_keys().into_iter().zip(manifest.chunks).collect();
                Offer {
                    chunks,
                    layout: Some(id),
                    whole: None,
                }
            }
        })
    }
}

/// The path with every run of digits made one `#`: `checkpoint-20/model-00001-of-00003` and `checkpoint-40/…` are alike.
fn alike(path: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(path.len());
    for b in path {
        match b {
            b'0'..=b'9' if out.last() == Some(&b'#') => {}
            b'0'..=b'9' => out.push(b'#'),
            _ => out.push(*b),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_do_not_make_a_path_another() {
        assert_eq!(alike(b"step-000020.safetensors"), alike(b"step-7.safetensors"));
        assert_eq!(
            alike(b"checkpoint-20/model-00001-of-00003"),
            b"checkpoint-#/model-#-of-#"
        );
        assert_ne!(alike(b"a/model.pt"), alike(b"b/model.pt"));
    }
}

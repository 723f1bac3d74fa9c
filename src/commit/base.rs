//! Finds the chunk at the same place of the same tensor in an earlier version.

use super::Parts;
use crate::error::{Kind, Result};
use crate::format::Layout;
use crate::graph::{EntryKind, Manifest, NodeKind, Numbered, Shape, Tree};
use crate::id::{FileHash, NodeId};
use crate::pack::Packs;
use crate::rebuild::Rebuilder;
use std::collections::HashMap;
use std::sync::Arc;

/// How many versions back a tensor is looked for: a run that saves model and optimizer as versions of their own needs more
/// than one.
pub(super) const ANCESTORS: usize = 16;
/// Files of one version that are looked at, beside those of a like name.
const OTHER_FILES: usize = 64;
/// Files of one version that are listed at all.
const LISTED: usize = 200_000;

/// Names a chunk by the tensors it holds (see `Layout::chunk_keys`).
pub(super) type ChunkKey = [u8; 16];

/// What earlier versions have to offer as bases.
pub(super) struct Bases {
    packs: Arc<Packs>,
    rebuilder: Arc<Rebuilder>,
    versions: Vec<(Arc<Numbered>, Option<Arc<Vec<Listed>>>)>,
    loaded: HashMap<(FileHash, u64), Arc<Offer>>,
}

struct Listed {
    like: Vec<u8>,
    path: Vec<u8>,
    hash: FileHash,
    len: u64,
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
            loaded: HashMap::new(),
        }
    }

    /// Bases for the chunks of a parsed file at `path` in the new version.
    pub(super) fn of_layout(&mut self, path: &[u8], layout: &Layout) -> FileBases {
        let keys = layout.chunk_keys();
        let mut found = FileBases {
            chunks: vec![None; keys.len()],
            layout: None,
        };
        let like = alike(path);
        for v in 0..self.versions.len() {
            for file in self.candidates(v, path, &like) {
                let offer = self.offer(file);
                found.layout = found.layout.or(offer.layout);
                for (slot, key) in found.chunks.iter_mut().zip(&keys).filter(|(s, _)| s.is_none()) {
                    *slot = offer.chunks.get(key).copied();
                }
                if found.chunks.iter().all(Option::is_some) {
                    return found;
                }
            }
        }
        found
    }

    /// The base for a small file without structure: the one of a like name before it.
    pub(super) fn of_opaque(&mut self, path: &[u8]) -> Option<NodeId> {
        let like = alike(path);
        for v in 0..self.versions.len().min(4) {
            let files = self.list(v);
            let same = files
                .iter()
                .filter(|f| f.path == path)
                .chain(files.iter().filter(|f| f.like == like));
            let near: Vec<_> = same.take(4).map(|f| (f.hash, f.len)).collect();
            if let Some(base) = near.into_iter().find_map(|f| self.offer(f).whole) {
                return Some(base);
            }
        }
        None
    }

    /// Files of version `v` worth a look: the same path first, then those alike but for numbers, then the large others.
    fn candidates(&mut self, v: usize, path: &[u8], like: &[u8]) -> Vec<(FileHash, u64)> {
        let files = self.list(v);
        let rank = |f: &Listed| match () {
            () if f.path == path => 0,
            () if f.like == like => 1,
            () => 2,
        };
        let mut chosen: Vec<_> = files.iter().filter(|f| rank(f) < 2).collect();
        let rest = files.iter().filter(|f| rank(f) == 2 && f.len >= 4096);
        chosen.extend(rest.take(OTHER_FILES));
        chosen.sort_by_key(|f| rank(f));
        chosen.into_iter().map(|f| (f.hash, f.len)).collect()
    }

    fn list(&mut self, v: usize) -> Arc<Vec<Listed>> {
        let Some((version, listed)) = self.versions.get(v) else {
            return Arc::default();
        };
        if let Some(files) = listed {
            return files.clone();
        }
        let root = version.version.tree;
        let files = self.list_tree(root).unwrap_or_else(|e| {
            log::warn!("no bases from {}: {e}", version.name());
            Vec::new()
        });
        let files = Arc::new(files);
        self.versions[v].1 = Some(files.clone());
        files
    }

    fn list_tree(&self, root: NodeId) -> Result<Vec<Listed>> {
        let mut out = Vec::new();
        let mut dirs = vec![(Vec::new(), root)];
        while let Some((prefix, id)) = dirs.pop() {
            let tree = Tree::decode(&self.rebuilder.node(&*self.packs, NodeKind::Tree, &id)?)?;
            for e in tree.entries() {
                let mut path: Vec<u8> = prefix.clone();
                path.extend_from_slice(&e.name);
                match e.kind {
                    EntryKind::File { hash, len, .. } if len > 0 => out.push(Listed {
                        like: alike(&path),
                        path,
                        hash,
                        len,
                    }),
                    EntryKind::Dir { tree, .. } => {
                        path.push(b'/');
                        dirs.push((path, tree));
                    }
                    EntryKind::File { .. } | EntryKind::Symlink(_) => {}
                }
            }
            if out.len() > LISTED {
                break;
            }
        }
        Ok(out)
    }

    fn offer(&mut self, (hash, len): (FileHash, u64)) -> Arc<Offer> {
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

//! What peers need of a store: nodes as they lie in the packs, and a way for those of others to come in.

use super::object::keep;
use super::{ObjectFile, Store};
use crate::bytes::Writer;
use crate::commit::{self, Broken, Import, RawNode};
use crate::error::{Error, Interrupt, IoContext, Kind, Result};
use crate::graph::{Follow, Manifest, NodeKind, Object, Tree};
use crate::id::{FileHash, NodeId, ObjectId, VersionId};
use crate::object::{Fold, ObjectManifest, Place, Source, Width};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

/// What the manifest of a file is found by.
pub fn manifest_id(hash: &FileHash, len: u64) -> NodeId {
    Manifest::id(hash, len)
}

/// The id of a directory with these bytes.
pub fn tree_id(bytes: &[u8]) -> NodeId {
    Tree::id(bytes)
}

impl Store {
    /// The random id of the store.
    pub fn id(&self) -> [u8; 16] {
        self.0.parts.packs.store_id()
    }

    /// A node's record as it lies in a pack.
    ///
    /// # Errors
    /// `NotFound`, or damage.
    pub fn raw_node(&self, id: &NodeId) -> Result<RawNode> {
        let node = self.0.parts.packs.get(id)?;
        Ok(RawNode {
            kind: node.kind,
            meta: node.meta,
            payload: node.payload,
        })
    }

    /// Begins to take in what was made in another store.
    ///
    /// # Errors
    /// What the packs report.
    pub fn import(&self) -> Result<Import<'_>> {
        Import::new(&self.0.parts)
    }

    /// The signature that a branch's newest version is this one, if there is one.
    pub fn signature(&self, branch: &str, head: &VersionId) -> Option<Vec<u8>> {
        std::fs::read(self.signature_path(branch, head)).ok()
    }

    /// The versions of which a branch of this name has such a signature here.
    pub fn signed(&self, branch: &str) -> Vec<VersionId> {
        let names = std::fs::read_dir(self.dir().join("signatures"))
            .into_iter()
            .flatten();
        let id = |name: std::ffi::OsString| {
            let (of, id) = name.to_str()?.rsplit_once('-')?;
            id.parse().ok().filter(|_| of == branch)
        };
        names.filter_map(|e| id(e.ok()?.file_name())).collect()
    }

    /// Keeps such a signature, to be passed on.
    ///
    /// # Errors
    /// What the system reports.
    pub fn keep_signature(&self, branch: &str, head: &VersionId, signature: &[u8]) -> Result<()> {
        let path = self.signature_path(branch, head);
        keep(&path, signature).doing(|| format!("write {}", path.display()))
    }

    fn signature_path(&self, branch: &str, head: &VersionId) -> PathBuf {
        self.dir().join("signatures").join(format!("{branch}-{head}"))
    }

    /// Everything here that is damaged or missing, as far as it can be told before that is repaired. `told` hears of the bytes read.
    ///
    /// # Errors
    /// What is no damage; what `interrupt` gives.
    pub fn broken(&self, told: &mut dyn FnMut(u64), interrupt: Interrupt<'_>) -> Result<BTreeSet<Broken>> {
        let mut versions = Vec::new();
        for branch in self.branches() {
            versions.extend(self.versions(&branch)?);
        }
        commit::broken(&self.0.parts, &versions, &self.objects(), told, interrupt)
    }

    /// Keeps the bytes of what is damaged beside the packs: what replaces it is here.
    ///
    /// # Errors
    /// What the system reports.
    pub fn quarantine(&self, what: &Broken) -> Result<()> {
        let id = match what {
            Broken::Node(_, id) => *id,
            Broken::File(hash, len) => Manifest::id(hash, *len),
        };
        commit::quarantine(&self.0.parts, &id)
    }

    /// How a branch here becomes one whose head is `head`, if what is not known here begins after `at`.
    ///
    /// # Errors
    /// `Refused` if the two have gone different ways.
    pub fn follow(&self, branch: &str, head: VersionId, at: Option<VersionId>) -> Result<Follow> {
        self.0.parts.history.read().follow(branch, head, at)
    }

    /// The version that a branch's first own one follows.
    pub fn forked_from(&self, branch: &str) -> Option<VersionId> {
        self.0.parts.history.read().branch(branch).ok()?.from
    }

    /// The object with this id.
    pub fn object_of(&self, id: &ObjectId) -> Option<Arc<Object>> {
        self.0.parts.history.read().objects().get(id).cloned()
    }

    /// An object of this store, to be read.
    ///
    /// # Errors
    /// Damage or `NotFound`.
    pub fn object_file(&self, manifest: &ObjectManifest) -> Result<ObjectFile> {
        Ok(ObjectFile::new(
            manifest.clone(),
            self.file(&manifest.hash, manifest.len)?,
        ))
    }

    /// A file of a version as an exact object.
    ///
    /// # Errors
    /// Damage or `NotFound`; what `interrupt` gives.
    pub fn file_object(&self, hash: &FileHash, len: u64, interrupt: Interrupt<'_>) -> Result<ObjectFile> {
        let file = self.file(hash, len)?;
        let fold = self.fold(&file, hash, interrupt)?;
        let object = ObjectFile::new(fold.manifest(*hash), file);
        object.fold_with(|| Ok(fold))?;
        Ok(object)
    }

    /// The decoded bytes of a node, which have the hash that names it.
    ///
    /// # Errors
    /// Damage, `NotFound`, or `Usage` if there is no such kind.
    pub fn plain_node(&self, kind: u8, id: &NodeId) -> Result<Vec<u8>> {
        let kind = NodeKind::from_tag(kind)
            .ok_or_else(|| Error::new(Kind::Usage, format!("there are no nodes of kind {kind}")))?;
        self.0.parts.rebuilder.node(&*self.0.parts.packs, kind, id)
    }

    /// What an object's records are found by.
    ///
    /// # Errors
    /// Damage; what `interrupt` gives.
    pub fn fold_of<'a>(&self, object: &'a ObjectFile, interrupt: Interrupt<'_>) -> Result<&'a Fold> {
        object.fold_with(|| self.fold(&object.file, &object.manifest.hash, interrupt))
    }

    /// Records of an object, encoded one after the other.
    ///
    /// # Errors
    /// `NotFound` if it has no such record; damage; what `interrupt` gives.
    pub fn records(
        &self,
        object: &ObjectFile,
        places: &[Place],
        interrupt: Interrupt<'_>,
    ) -> Result<Vec<u8>> {
        let fold = self.fold_of(object, interrupt)?;
        let (mut block, mut out) = (None, Writer::new());
        for place in places {
            fold.record(object, &mut block, *place)?
                .encode(Width::FULL, &mut out);
        }
        Ok(out.finish())
    }
}

impl Source for ObjectFile {
    fn len(&self) -> u64 {
        self.manifest.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        Source::read_at(&*self.file, offset, buf)
    }
}

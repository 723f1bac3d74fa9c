//! Import: nodes, versions and objects that were made in another store become part of this one.
//!
//! Nothing is believed. A node is appended only once its bytes were rebuilt and have the hash that names it, a manifest only
//! once its file has its SHA-256 and is split as its layout says, and versions and objects are published, all at once, only if
//! everything in them is here. What a record says of its chain is computed anew, for bases may be stored in another way here.

use super::encode::{Against, Encoder};
use super::stamp::{Load, restamped};
use super::{Parts, Stored};
use crate::codec;
use crate::error::{Error, Interrupt, Kind, Result};
use crate::format::{Format, Layout, Source, SpanCrc, Split, crc_spans, split};
use crate::graph::{Adopted, Change, EntryKind, Manifest, NodeKind, NodeMeta, Shape, Tree, Version, now};
use crate::id::{FileHash, FileHasher, NodeId, VersionId};
use crate::object::{Fold, Interruptible, ObjectManifest, Width};
use crate::pack::{Meta, Node, PackRange};
use crate::rebuild::{NodeSource, StoredFile};
use crate::tensor::Number;
use ::bytes::Bytes;
use std::collections::HashMap;
use std::sync::Arc;

/// The most bytes of a manifest, decoded: of a file of 600 GB.
const MAX_MANIFEST: usize = 64 << 20;
/// A payload may be larger than what it stands for by this, which no codec needs.
const SLACK: usize = 64;

/// A node as another store has it: a record's kind, meta and payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawNode {
    /// The kind's number.
    pub kind: u8,
    /// What the record says of its encoding.
    pub meta: Vec<u8>,
    /// The encoded bytes.
    pub payload: Bytes,
}

/// What became of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Added {
    /// It was right, and is kept.
    Kept,
    /// It cannot be decoded without these nodes, which are not here. It was not kept.
    Needs(Vec<NodeId>),
}

/// A file whose manifest came from elsewhere.
#[derive(Clone, Debug)]
pub struct ImportedFile {
    hash: FileHash,
    len: u64,
    raw: Vec<u8>,
    manifest: Manifest,
}

impl ImportedFile {
    /// What the file is made of, decoded but not proven.
    ///
    /// # Errors
    /// Damage, if it is not the manifest of a file of such a length.
    pub fn new(hash: FileHash, len: u64, node: &RawNode) -> Result<Self> {
        let (meta, _) = checked(NodeKind::Manifest, node)?;
        if meta.raw_len as usize > MAX_MANIFEST {
            return Err(Error::new(Kind::Limit, "a manifest of more than 64 MiB"));
        }
        if meta.delta.is_some() {
            return Err(Error::damage("a manifest is encoded against another"));
        }
        let mut raw = Vec::new();
        codec::decode(
            meta.codec,
            meta.number,
            &node.payload,
            meta.raw_len as usize,
            &mut raw,
        )?;
        let manifest = Manifest::decode(&raw)?;
        let chunks = match &manifest.shape {
            Shape::Opaque(lens) => lens.iter().map(|len| u64::from(*len)).sum::<u64>() == len,
            Shape::Layout(_) => manifest.chunks.len() as u64 <= len,
        };
        if !chunks {
            return Err(Error::damage(format!("is no manifest of a file of {len} bytes")));
        }
        Ok(ImportedFile {
            hash,
            len,
            raw,
            manifest,
        })
    }

    /// Bytes of the manifest.
    pub fn size(&self) -> usize {
        self.raw.len()
    }

    /// Its layout, if it has one, and its chunks, in their order.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeKind, NodeId)> + '_ {
        let layout = match self.manifest.shape {
            Shape::Layout(id) => Some((NodeKind::Layout, id)),
            Shape::Opaque(_) => None,
        };
        let chunks = self.manifest.chunks.iter().map(|id| (NodeKind::Chunk, *id));
        layout.into_iter().chain(chunks)
    }
}

/// An object whose bytes are here, and are what its manifest says.
pub struct ProvenObject(pub(super) ObjectManifest);

impl ProvenObject {
    /// What pins it.
    pub fn manifest(&self) -> &ObjectManifest {
        &self.0
    }
}

/// What a branch is to become: see [`Import::publish`].
pub struct Adopt {
    /// The branch.
    pub branch: String,
    /// What the first version follows.
    pub base: Option<VersionId>,
    /// The versions, oldest first, with the bytes that each added.
    pub versions: Vec<(Version, u64)>,
}

/// An import under way. Dropped, it leaves what was saved, which nothing names.
pub struct Import<'a> {
    parts: &'a Parts,
    encoder: Encoder,
    /// Of the journal, when the encoder began.
    repacks: u64,
    since: u64,
    /// Where else is what it is to publish.
    included: Vec<PackRange>,
    /// Bytes appended, in all and since the last save.
    appended: u64,
    unsaved: u64,
}

impl<'a> Import<'a> {
    /// An import with nothing in it.
    ///
    /// # Errors
    /// What the packs report.
    pub fn new(parts: &'a Parts) -> Result<Self> {
        parts.packs.refresh()?;
        // Before the encoder, which may refresh: that writes to the history, and would wait for this guard for ever.
        let repacks = parts.history.read().repacks();
        let since = parts.packs.seq();
        Ok(Import {
            parts,
            repacks,
            since,
            encoder: Encoder::new(parts)?,
            included: Vec::new(),
            appended: 0,
            unsaved: 0,
        })
    }

    /// Whether a node is here, published or not.
    ///
    /// # Errors
    /// What the packs report.
    pub fn has(&self, id: &NodeId) -> Result<bool> {
        self.encoder.source.contains(id)
    }

    /// Whether a node is here and can be rebuilt.
    pub fn is_whole(&self, kind: NodeKind, id: &NodeId) -> bool {
        let (rebuilder, source) = (&self.parts.rebuilder, &*self.encoder.source);
        match kind {
            NodeKind::Chunk => rebuilder.chunk(source, id).is_ok(),
            kind => rebuilder.node(source, kind, id).is_ok(),
        }
    }

    /// Stores a node again whose record is damaged, by its decoded bytes. It stands alone: its chain may lead through other damage.
    ///
    /// # Errors
    /// Damage, if the bytes have not the hash that names it; what the packs report.
    pub fn mend(&mut self, kind: NodeKind, id: NodeId, raw: &[u8]) -> Result<()> {
        if kind.id_of(raw) != Some(id) {
            let why = format!(
                "what the peer sent for {} {} has another hash",
                kind.name(),
                id.short()
            );
            return Err(Error::damage(why));
        }
        let number = match self.encoder.meta_of(kind, &id) {
            Ok(Some((meta, _))) => meta.number,
            _ => Number::Bytes,
        };
        let (meta, payload) = self.encoder.best(kind, raw, number, &Against::default())?;
        self.append(kind, &id, &meta, &payload)
    }

    /// Bytes appended so far.
    pub fn appended(&self) -> u64 {
        self.appended
    }

    /// Bytes appended since the last save.
    pub fn unsaved(&self) -> u64 {
        self.unsaved
    }

    /// Takes what was stored in another way, to be saved and published with the rest.
    pub fn include(&mut self, stored: Stored) {
        self.appended += stored.len();
        self.unsaved += stored.len();
        self.since = self.since.min(stored.since);
        self.repacks = self.repacks.min(stored.repacks);
        self.included.extend(stored.ranges);
    }

    /// A directory that is here.
    ///
    /// # Errors
    /// Damage or `NotFound`.
    pub fn tree(&self, id: &NodeId) -> Result<Tree> {
        let bytes = self
            .parts
            .rebuilder
            .node(&*self.encoder.source, NodeKind::Tree, id)?;
        Tree::decode(&bytes)
    }

    /// Takes a chunk, a layout or a tree, if its bytes have the hash that names it.
    ///
    /// # Errors
    /// Damage, if they have not, or if it is of another kind; what the packs report.
    pub fn add(&mut self, kind: NodeKind, id: NodeId, node: &RawNode) -> Result<Added> {
        let named = |e: Error| e.context(format_args!("{} {}", kind.name(), id.short()));
        let (meta, payload_len) = checked(kind, node).map_err(named)?;
        if kind == NodeKind::Manifest {
            return Err(named(Error::damage("is taken with its file only")));
        }
        let mut loads = Vec::new();
        let mut missing = Vec::new();
        for base in meta.delta.iter().flat_map(|d| d.bases()) {
            match self.has(&base)? {
                false => missing.push(base),
                true => {
                    let found = self.encoder.source.meta(&base)?;
                    if found.kind != kind as u8 {
                        return Err(named(Error::damage("is encoded against a node of another kind")));
                    }
                    loads.push(Load::of(&NodeMeta::decode(kind, &found.meta)?, found.payload_len));
                }
            }
        }
        if !missing.is_empty() {
            return Ok(Added::Needs(missing));
        }
        let source = With {
            inner: &*self.encoder.source,
            id,
            node,
        };
        let raw = self.parts.rebuilder.node(&source, kind, &id)?;
        if kind == NodeKind::Tree {
            Tree::decode(&raw).map_err(named)?;
        }
        let kept = match meta.delta {
            None => Some(meta),
            Some(_) => restamped(&meta, payload_len, Load::together(loads)),
        };
        match kept {
            Some(meta) => self.append(kind, &id, &meta, &node.payload)?,
            // There is no room in the chain as it is here.
            None => {
                let (meta, payload) = self.encoder.best(kind, &raw, meta.number, &Against::default())?;
                self.append(kind, &id, &meta, &payload)?;
            }
        }
        if kind == NodeKind::Chunk {
            self.parts.rebuilder.keep(id, raw);
        }
        Ok(Added::Kept)
    }

    fn append(&mut self, kind: NodeKind, id: &NodeId, meta: &NodeMeta, payload: &[u8]) -> Result<()> {
        let len = self.encoder.source.append(kind, id, meta, payload)?;
        self.appended += u64::from(len);
        self.unsaved += u64::from(len);
        Ok(())
    }

    /// Takes the manifest of a file whose layout and chunks are here, if they make up the file with this SHA-256, and its tensors
    /// are where the layout says.
    ///
    /// # Errors
    /// Damage, if not; what the packs report; what `interrupt` gives.
    pub fn file(&mut self, file: &ImportedFile, interrupt: Interrupt<'_>) -> Result<()> {
        let stored = self.stored(file)?;
        prove(&stored, &file.hash, interrupt)
            .map_err(|e| e.context(format_args!("file {}", file.hash.short())))?;
        let id = Manifest::id(&file.hash, file.len);
        let (meta, payload) =
            self.encoder
                .best(NodeKind::Manifest, &file.raw, Number::Bytes, &Against::default())?;
        self.append(NodeKind::Manifest, &id, &meta, &payload)
    }

    fn stored(&self, file: &ImportedFile) -> Result<StoredFile> {
        let (rebuilder, source) = (&self.parts.rebuilder, self.encoder.source.clone());
        let layout = match &file.manifest.shape {
            Shape::Opaque(lens) => Layout::opaque(lens)?,
            Shape::Layout(id) => Layout::decode(&rebuilder.node(&*source, NodeKind::Layout, id)?)?,
        };
        if layout.len != file.len {
            return Err(Error::damage(format!(
                "the manifest of file {} is for {} bytes, not {}",
                file.hash.short(),
                layout.len,
                file.len
            )));
        }
        let Manifest { chunks, crcs, .. } = file.manifest.clone();
        StoredFile::new(rebuilder, source, Arc::new(layout), chunks, crcs)
    }

    /// Makes what was taken so far durable, under no name: who is cut off need not ask for it again.
    ///
    /// # Errors
    /// What the packs report.
    pub fn save(&mut self) -> Result<()> {
        let stored = self.finish()?;
        if stored.len() > 0 {
            stored.publish(self.parts, |_, _| Ok((Vec::new(), ())))?;
        }
        *self = Import {
            appended: self.appended,
            ..Import::new(self.parts)?
        };
        Ok(())
    }

    fn finish(&self) -> Result<Stored> {
        Ok(Stored {
            ranges: self
                .included
                .iter()
                .cloned()
                .chain([self.encoder.finish()?])
                .collect(),
            repacks: self.repacks,
            since: self.since,
        })
    }

    /// Publishes versions at the end of branches, tags on them, and objects: all at once, or nothing. The tags that are left alone,
    /// for meanwhile something else got their names.
    ///
    /// # Errors
    /// Damage, if anything in them is missing or contradicts itself; `Refused` if a branch has got another head meanwhile.
    pub fn publish(
        self,
        adopt: Vec<Adopt>,
        tags: Vec<(String, VersionId)>,
        objects: Vec<ProvenObject>,
    ) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        let mut seen = HashMap::new();
        for Adopt {
            branch,
            base,
            versions,
        } in adopt
        {
            let mut all = Vec::new();
            for (version, stored) in versions {
                let files = self.whole(&version, &mut seen)?;
                all.push(Adopted {
                    version,
                    files,
                    stored,
                });
            }
            lines.push((branch, base, all));
        }
        let build = move |history: &crate::graph::History, _: u64| {
            let mut history = history.clone();
            let (mut changes, mut kept) = (Vec::new(), Vec::new());
            for (branch, base, all) in &lines {
                let made = history.adopt(branch, *base, all.clone())?;
                let record = crate::graph::Record { changes: made };
                history.apply(&record.encode())?;
                changes.extend(record.changes);
            }
            for (name, version) in &tags {
                match history.new_tag(name, *version, false) {
                    Err(e) if e.kind() == Kind::Exists => {
                        let same = history.tags().get(name) == Some(version);
                        kept.extend((!same).then(|| name.clone()));
                    }
                    made => changes.push(made?),
                }
            }
            for ProvenObject(manifest) in &objects {
                if !history.objects().contains_key(&manifest.id()) {
                    changes.push(Change::Object {
                        manifest: manifest.clone(),
                        time: now(),
                    });
                }
            }
            Ok((changes, kept))
        };
        let stored = self.finish()?;
        stored.publish(self.parts, build).map(|done| done.0)
    }

    /// Whether everything in a version is here and says the same; how many files it has. `seen` holds the directories that were
    /// looked at.
    fn whole(&self, version: &Version, seen: &mut HashMap<NodeId, Seen>) -> Result<u64> {
        let name = |e: Error| e.context(format_args!("version {}", version.id().short()));
        // What one directory says of hard links must agree with the others of the same version.
        seen.retain(|_, known| !known.linked);
        let mut links = HashMap::new();
        let found = self.directory(&version.tree, seen, &mut links, 0).map_err(name)?;
        match found.len == version.len {
            true => Ok(found.files),
            false => Err(name(Error::damage("has another size than its files"))),
        }
    }

    fn directory(
        &self,
        id: &NodeId,
        seen: &mut HashMap<NodeId, Seen>,
        links: &mut HashMap<u32, (FileHash, u64)>,
        depth: usize,
    ) -> Result<Seen> {
        if let Some(known) = seen.get(id) {
            return Ok(*known);
        }
        if depth > MAX_TREE_DEPTH {
            return Err(Error::new(Kind::Limit, "directories are nested too deep"));
        }
        let tree = self.tree(id)?;
        let mut found = Seen {
            len: tree.len(),
            paths: tree.entries().len() as u64,
            ..Seen::default()
        };
        for entry in tree.entries() {
            let path = |e: Error| e.context(String::from_utf8_lossy(&entry.name).into_owned());
            match &entry.kind {
                EntryKind::File { hash, len, link } => {
                    found.files += 1;
                    if !self.has(&Manifest::id(hash, *len))? {
                        return Err(path(Error::damage("is not here")));
                    }
                    found.linked |= *link > 0;
                    if *link > 0 && *links.entry(*link).or_insert((*hash, *len)) != (*hash, *len) {
                        return Err(path(Error::damage("hard links differ")));
                    }
                }
                EntryKind::Dir { tree, len } => {
                    let below = self.directory(tree, seen, links, depth + 1).map_err(path)?;
                    if below.len != *len {
                        return Err(path(Error::damage("has another size than its files")));
                    }
                    found.files += below.files;
                    found.paths += below.paths;
                    found.linked |= below.linked;
                    // A directory in several places is there once, and everybody who walks through it goes there each time.
                    if found.paths > MAX_PATHS {
                        let why = format!("more than {MAX_PATHS} files and directories");
                        return Err(Error::new(Kind::Limit, why));
                    }
                }
                EntryKind::Symlink(_) => {}
            }
        }
        seen.insert(*id, found);
        Ok(found)
    }

    /// An object, if its bytes are here, and have the roots that its manifest says.
    ///
    /// # Errors
    /// Damage, if not; what `interrupt` gives.
    pub fn object(&self, object: ObjectManifest, interrupt: Interrupt<'_>) -> Result<ProvenObject> {
        let (rebuilder, source) = (&self.parts.rebuilder, self.encoder.source.clone());
        let file = StoredFile::load(rebuilder, source, &object.hash, object.len)?;
        let fold = Fold::of(&Interruptible(&file, interrupt), Width::FULL, self.parts.threads)?;
        match fold.manifest(object.hash) == object {
            true => Ok(ProvenObject(object)),
            false => Err(Error::damage(format!(
                "object {} has other roots than its manifest",
                object.id().short()
            ))),
        }
    }
}

/// A directory that was looked at.
#[derive(Clone, Copy, Default)]
struct Seen {
    /// Bytes of the files in it and below.
    len: u64,
    /// How many those are.
    files: u64,
    /// How many names there are in it and below.
    paths: u64,
    /// Whether any of them is a hard link.
    linked: bool,
}

/// Names in one version, at most.
const MAX_PATHS: u64 = 1 << 24;
/// Directories within one another, at most: as deep as a path can be.
const MAX_TREE_DEPTH: usize = 2048;

/// The meta of a node of this kind.
fn checked(kind: NodeKind, node: &RawNode) -> Result<(NodeMeta, u32)> {
    if node.kind != kind as u8 {
        return Err(Error::damage(format!("is a node of kind {}", node.kind)));
    }
    let meta = NodeMeta::decode(kind, &node.meta)?;
    let len = node.payload.len();
    if len > meta.raw_len as usize + SLACK {
        return Err(Error::damage("is larger encoded than it is"));
    }
    Ok((meta, len as u32))
}

/// Whether a file is what its hash says, and split as its layout says.
fn prove(file: &StoredFile, hash: &FileHash, interrupt: Interrupt<'_>) -> Result<()> {
    let layout = file.layout();
    let parsed = layout.format != Format::Opaque;
    let mut crc = SpanCrc::new(crc_spans(layout))?;
    let mut hasher = FileHasher::default();
    file.stream(&mut |bytes| {
        hasher.update(bytes);
        crc.update(bytes);
        interrupt()
    })?;
    if hasher.finish() != *hash {
        return Err(Error::damage("does not have the SHA-256 that names it"));
    }
    if parsed {
        if crc.finish()? != file.crcs() {
            return Err(Error::damage(
                "has other checksums of tensors than its manifest says",
            ));
        }
        match split(file as &dyn Source)? {
            Split::Parsed(again) if again == **layout => {}
            _ => {
                let why = "is not split as its layout says: the other side has another version of zspace, or is lying";
                return Err(Error::damage(why));
            }
        }
    }
    Ok(())
}

/// One node on top of others.
struct With<'a, S> {
    inner: &'a S,
    id: NodeId,
    node: &'a RawNode,
}

impl<S: NodeSource> NodeSource for With<'_, S> {
    fn get(&self, id: &NodeId) -> Result<Node> {
        if *id != self.id {
            return self.inner.get(id);
        }
        Ok(Node {
            kind: self.node.kind,
            meta: self.node.meta.clone(),
            payload: self.node.payload.clone(),
        })
    }

    fn meta(&self, id: &NodeId) -> Result<Meta> {
        self.inner.meta(id)
    }
}

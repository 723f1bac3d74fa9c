//! Checks every hash of a version, back to the files' own SHA-256, and names what is damaged.

use crate::error::{Error, Interrupt, Kind, Result};
use crate::graph::{EntryKind, NodeKind, Numbered, Object, Tree};
use crate::id::{FileHash, FileHasher, NodeId};
use crate::object::{Fold, Interruptible, Width};
use crate::pack::Packs;
use crate::rebuild::{NodeSource, Rebuilder, StoredFile};
use std::collections::HashSet;
use std::sync::Arc;

/// One damaged thing.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Damage {
    /// `BRANCH/000001`.
    pub version: String,
    /// Path in the version; empty for the version as a whole.
    pub file: String,
    /// Tensors that cannot be rebuilt; none if all, or if the file has no tensors.
    pub tensors: Vec<String>,
    /// What is wrong.
    pub why: String,
}

/// What was checked and what was found.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Report {
    /// Versions checked.
    pub versions: u64,
    /// Exact byte objects checked.
    pub objects: u64,
    /// Distinct files checked.
    pub files: u64,
    /// Bytes of those.
    pub bytes: u64,
    /// What is damaged, in the order it was found.
    pub damage: Vec<Damage>,
}

/// What is to be done with a directory.
enum Step {
    /// Look at it, at this path.
    Enter(Vec<u8>, NodeId),
    /// All below it was looked at; so much was damaged before.
    Leave(NodeId, usize),
}

/// Checks versions one by one; files and directories that several versions share are checked once, but reported for each.
pub struct Verifier<'a> {
    packs: Arc<Packs>,
    rebuilder: Arc<Rebuilder>,
    good_files: HashSet<(FileHash, u64)>,
    good_trees: HashSet<NodeId>,
    interrupt: Interrupt<'a>,
    /// What was checked and found.
    pub report: Report,
}

impl<'a> Verifier<'a> {
    /// A verifier with nothing checked yet. The error of `interrupt` ends it.
    pub fn new(packs: Arc<Packs>, rebuilder: Arc<Rebuilder>, interrupt: Interrupt<'a>) -> Self {
        Verifier {
            packs,
            rebuilder,
            good_files: HashSet::new(),
            good_trees: HashSet::new(),
            interrupt,
            report: Report::default(),
        }
    }

    /// Checks one version: its trees, and every file to its SHA-256. `told` hears of the bytes checked.
    ///
    /// # Errors
    /// What `interrupt` gives.
    pub fn version(&mut self, version: &Numbered, told: &mut dyn FnMut(u64)) -> Result<()> {
        self.report.versions += 1;
        let name = version.name();
        let mut steps = vec![Step::Enter(Vec::new(), version.version.tree)];
        while let Some(step) = steps.pop() {
            let (path, id) = match step {
                Step::Leave(id, damaged) if self.report.damage.len() == damaged => {
                    self.good_trees.insert(id);
                    continue;
                }
                Step::Leave(..) => continue,
                Step::Enter(_, id) if self.good_trees.contains(&id) => continue,
                Step::Enter(path, id) => (path, id),
            };
            // Good once all below it is.
            steps.push(Step::Leave(id, self.report.damage.len()));
            let read = self.rebuilder.node(&*self.packs, NodeKind::Tree, &id);
            let tree = match read.and_then(|bytes| Tree::decode(&bytes)) {
                Ok(tree) => tree,
                Err(e) => {
                    self.found(&name, &path, Vec::new(), &e);
                    continue;
                }
            };
            for entry in tree.entries() {
                let mut at: Vec<u8> = path.clone();
                if !at.is_empty() {
                    at.push(b'/');
                }
                at.extend_from_slice(&entry.name);
                match &entry.kind {
                    EntryKind::Dir { tree, .. } => steps.push(Step::Enter(at, *tree)),
                    EntryKind::File { hash, len, .. } => self.file(&name, &at, hash, *len, told)?,
                    EntryKind::Symlink(_) => {}
                }
            }
        }
        Ok(())
    }

    /// Checks an object: its bytes to their SHA-256, and its records to the roots.
    ///
    /// # Errors
    /// What `interrupt` gives.
    pub fn object(&mut self, object: &Object, told: &mut dyn FnMut(u64)) -> Result<()> {
        let (name, pinned) = (format!("object {}", object.id.short()), &object.manifest);
        self.report.objects += 1;
        self.file(&name, b"", &pinned.hash, pinned.len, told)?;
        if !self.good_files.contains(&(pinned.hash, pinned.len)) {
            return Ok(());
        }
        let source: Arc<dyn NodeSource> = self.packs.clone();
        let file = StoredFile::load(&self.rebuilder, source, &pinned.hash, pinned.len);
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let fold = file.and_then(|f| Fold::of(&Interruptible(&f, self.interrupt), Width::FULL, threads));
        match fold {
            Ok(fold) if fold.manifest(pinned.hash) == *pinned => {}
            Ok(_) => {
                let e =
                    Error::damage("its bytes are right, but its records have other roots than its manifest");
                self.found(&name, b"", Vec::new(), &e);
            }
            Err(e) if e.kind() == Kind::Stopped => return Err(e),
            Err(e) => self.found(&name, b"", Vec::new(), &e),
        }
        Ok(())
    }

    fn file(
        &mut self,
        version: &str,
        path: &[u8],
        hash: &FileHash,
        len: u64,
        told: &mut dyn FnMut(u64),
    ) -> Result<()> {
        if self.good_files.contains(&(*hash, len)) {
            return Ok(());
        }
        self.report.files += 1;
        self.report.bytes += len;
        let source: Arc<dyn NodeSource> = self.packs.clone();
        let file = match StoredFile::load(&self.rebuilder, source, hash, len) {
            Ok(f) => f,
            Err(e) => {
                self.found(version, path, Vec::new(), &e);
                return Ok(());
            }
        };
        let mut hasher = FileHasher::default();
        let read = file.stream(&mut |bytes| {
            hasher.update(bytes);
            told(bytes.len() as u64);
            (self.interrupt)()
        });
        match read {
            Err(e) if e.kind() == Kind::Stopped => return Err(e),
            Err(e) => {
                self.chunks(version, path, &file, &e);
                return Ok(());
            }
            Ok(()) => {}
        }
        if hasher.finish() == *hash {
            self.good_files.insert((*hash, len));
        } else {
            let e = Error::damage("rebuilt file does not have the SHA-256 that it was committed with");
            self.found(version, path, Vec::new(), &e);
        }
        Ok(())
    }

    /// A chunk failed: finds all that do, and the tensors in them.
    fn chunks(&mut self, version: &str, path: &[u8], file: &StoredFile, first: &Error) {
        let mut tensors = Vec::new();
        for (i, id) in file.chunks().iter().enumerate() {
            if self.rebuilder.chunk(&*self.packs, id).is_err() {
                tensors.extend(file.tensors_of_chunk(i));
            }
        }
        tensors.sort();
        tensors.dedup();
        self.found(version, path, tensors, first);
    }

    fn found(&mut self, version: &str, path: &[u8], tensors: Vec<String>, e: &Error) {
        let file = String::from_utf8_lossy(path).into_owned();
        self.report.damage.push(Damage {
            version: version.to_owned(),
            file,
            tensors,
            why: e.to_string(),
        });
    }
}

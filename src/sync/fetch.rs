//! Fetches all that versions are made of, and only what is not here: directories, then the manifests of files, then chunks and
//! layouts, with many requests on their way. Each file is proven as soon as all of it is here.

use super::ask::{Asker, Sent};
use crate::error::{Error, Kind, Result};
use crate::id::{FileHash, NodeId};
use crate::store::{Added, EntryKind, Import, ImportedFile, NodeKind, RawNode, Tree, manifest_id};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

/// What was fetched is saved, so that a broken transfer goes on from there, when it is so many bytes, …
const SAVE: u64 = 64 << 20;
/// … or so many, and so much time has passed.
const SAVE_LATE: u64 = 2 << 20;
const LATE: Duration = Duration::from_secs(2);
/// Bytes of nodes that wait for what they are encoded against; more are asked for again.
const HELD: usize = 64 << 20;
/// What a node takes beside its payload.
const OVERHEAD: usize = 512;
/// So many nodes at most wait one for the next: more than any rebuild reads.
const MAX_DEPTH: usize = 1024;
/// Bytes of manifests whose files are not whole; others are asked for again later.
const MANIFESTS: usize = 64 << 20;
/// Chunks that are known to be wanted before the next version is looked at.
const AHEAD: usize = 4096;

/// How far a fetch is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Versions and objects that are here, …
    pub done: u64,
    /// … of so many.
    pub total: u64,
    /// Nodes that came.
    pub nodes: u64,
    /// Bytes received, all told.
    pub bytes: u64,
}

/// What a wanted node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Want {
    /// A chunk, a layout or a tree, to be kept under its id.
    Node(NodeKind, NodeId),
    /// A file's manifest.
    Manifest(FileHash, u64),
}

impl Want {
    fn id(&self) -> NodeId {
        match self {
            Want::Node(_, id) => *id,
            Want::Manifest(hash, len) => manifest_id(hash, *len),
        }
    }
}

/// A node that is wanted, for the version at this place.
#[derive(Clone, Copy, Debug)]
struct Wanted {
    what: Want,
    version: usize,
    /// How many others wait for it, one for the next.
    depth: usize,
}

/// What is to be fetched: the root of a version, or the file of an object.
#[derive(Clone, Copy, Debug)]
pub(super) enum Root {
    Tree(NodeId),
    File(FileHash, u64),
}

/// A file of which something is missing.
struct Incomplete {
    file: ImportedFile,
    missing: usize,
}

/// A node that waits for another; without its bytes if too many waited.
struct Held {
    wanted: Wanted,
    node: Option<RawNode>,
}

/// One fetch under way.
pub(super) struct Fetch<'a, 'l, 's> {
    asker: &'a mut Asker<'l>,
    import: &'a mut Import<'s>,
    told: &'a mut dyn FnMut(Fetched) -> Result<()>,
    /// To be asked for: what leads to more, and then chunks.
    first: VecDeque<Wanted>,
    then: VecDeque<Wanted>,
    flying: VecDeque<Wanted>,
    /// What is asked for, or will be, or waits.
    wanted: HashSet<NodeId>,
    trees: HashSet<NodeId>,
    files: HashMap<NodeId, Incomplete>,
    /// Bytes of their manifests, and those for which there was no room.
    manifests: usize,
    later: VecDeque<Wanted>,
    /// Of a missing node, the manifests of the files that need it.
    needed: HashMap<NodeId, Vec<NodeId>>,
    /// Of a missing node, those that are encoded against it.
    held: HashMap<NodeId, Vec<Held>>,
    held_bytes: usize,
    /// Bytes that each version added.
    stored: Vec<u64>,
    state: Fetched,
    saved: Instant,
}

impl<'a, 'l, 's> Fetch<'a, 'l, 's> {
    pub(super) fn new(
        asker: &'a mut Asker<'l>,
        import: &'a mut Import<'s>,
        told: &'a mut dyn FnMut(Fetched) -> Result<()>,
    ) -> Self {
        Fetch {
            asker,
            import,
            told,
            first: VecDeque::new(),
            then: VecDeque::new(),
            flying: VecDeque::new(),
            wanted: HashSet::new(),
            trees: HashSet::new(),
            files: HashMap::new(),
            manifests: 0,
            later: VecDeque::new(),
            needed: HashMap::new(),
            held: HashMap::new(),
            held_bytes: 0,
            stored: Vec::new(),
            state: Fetched::default(),
            saved: Instant::now(),
        }
    }

    /// Fetches everything below these, in their order, so that bases come before what is encoded against them. The bytes that
    /// each added.
    ///
    /// # Errors
    /// Damage, if what came is not what was asked for; `NotFound` if the peer has not got it; what `told`, which hears of
    /// everything that comes, and the link and the packs report.
    pub(super) fn all(mut self, roots: &[Root]) -> Result<Vec<u64>> {
        self.stored = vec![0; roots.len()];
        self.state.total = roots.len() as u64;
        let mut next = 0;
        loop {
            while next < roots.len() && self.first.is_empty() && self.then.len() < AHEAD {
                match roots[next] {
                    Root::Tree(id) => self.tree(id, next)?,
                    Root::File(hash, len) => self.file(hash, len, next)?,
                }
                next += 1;
            }
            self.request()?;
            let Some(wanted) = self.flying.pop_front() else {
                if next < roots.len() {
                    continue;
                }
                break;
            };
            let node = match self.asker.node()? {
                Sent::Node(node) => node,
                missing => return Err(not_there(&wanted.what, missing)),
            };
            self.take(wanted, node)?;
            self.state.nodes += 1;
            self.state.done = next.saturating_sub(1) as u64;
            self.state.bytes = self.asker.link().received();
            (self.told)(self.state)?;
            let unsaved = self.import.unsaved();
            if unsaved > SAVE || unsaved > SAVE_LATE && self.saved.elapsed() > LATE {
                self.import.save()?;
                self.saved = Instant::now();
            }
        }
        if !self.held.is_empty() || !self.files.is_empty() {
            return Err(Error::damage(
                "the peer sent nodes that are encoded against each other in a circle",
            ));
        }
        Ok(self.stored)
    }

    /// Asks for as much as may be on its way.
    fn request(&mut self) -> Result<()> {
        let mut ids = Vec::new();
        let room = self.asker.room();
        while ids.len() < room {
            let next = self.first.pop_front().or_else(|| self.then.pop_front());
            // As many at once as would not fit again would only be sent in vain.
            let again = || {
                if self.flying.is_empty() {
                    self.later.pop_front()
                } else {
                    None
                }
            };
            let Some(wanted) = next.or_else(again) else {
                break;
            };
            ids.push(wanted.what.id());
            self.flying.push_back(wanted);
        }
        self.asker.nodes(&ids)
    }

    fn want(&mut self, what: Want, version: usize) {
        if self.wanted.insert(what.id()) {
            let queue = match what {
                Want::Node(NodeKind::Chunk, _) => &mut self.then,
                _ => &mut self.first,
            };
            queue.push_back(Wanted {
                what,
                version,
                depth: 0,
            });
        }
    }

    /// Looks at a directory, and at all below it that is here.
    fn tree(&mut self, id: NodeId, version: usize) -> Result<()> {
        let mut todo = vec![id];
        while let Some(id) = todo.pop() {
            if !self.trees.insert(id) {
                continue;
            }
            if !self.import.has(&id)? {
                self.want(Want::Node(NodeKind::Tree, id), version);
                continue;
            }
            let tree = self.import.tree(&id)?;
            todo.extend(self.below(&tree, version)?);
        }
        Ok(())
    }

    /// Looks at the files of a directory; the directories in it.
    fn below(&mut self, tree: &Tree, version: usize) -> Result<Vec<NodeId>> {
        let mut directories = Vec::new();
        for entry in tree.entries() {
            match &entry.kind {
                EntryKind::File { hash, len, .. } => self.file(*hash, *len, version)?,
                EntryKind::Dir { tree, .. } => directories.push(*tree),
                EntryKind::Symlink(_) => {}
            }
        }
        Ok(directories)
    }

    /// A file is here once its manifest is: only what was proven has one.
    fn file(&mut self, hash: FileHash, len: u64, version: usize) -> Result<()> {
        if !self.import.has(&manifest_id(&hash, len))? {
            self.want(Want::Manifest(hash, len), version);
        }
        Ok(())
    }

    /// Takes in what came.
    fn take(&mut self, wanted: Wanted, node: RawNode) -> Result<()> {
        match wanted.what {
            Want::Manifest(hash, len) => {
                let file = ImportedFile::new(hash, len, &node)?;
                if self.manifests + file.size() > MANIFESTS && self.manifests > 0 {
                    self.later.push_back(wanted);
                    return Ok(());
                }
                self.manifest(file, wanted)
            }
            Want::Node(kind, id) => {
                let mut todo = vec![(kind, id, wanted, node)];
                while let Some((kind, id, wanted, node)) = todo.pop() {
                    let before = self.import.appended();
                    match self.import.add(kind, id, &node)? {
                        Added::Needs(bases) => self.hold(kind, wanted, node, &bases)?,
                        Added::Kept => {
                            self.count(wanted.version, before);
                            self.kept(kind, id, wanted.version)?;
                            todo.extend(self.released(&id));
                        }
                    }
                }
                Ok(())
            }
        }
    }

    fn count(&mut self, version: usize, before: u64) {
        if let Some(stored) = self.stored.get_mut(version) {
            *stored += self.import.appended() - before;
        }
    }

    /// A node waits for the first of what it is encoded against that is not here; that one is fetched, if it was not to be.
    fn hold(&mut self, kind: NodeKind, wanted: Wanted, node: RawNode, bases: &[NodeId]) -> Result<()> {
        let Some(base) = bases.first() else { return Ok(()) };
        if wanted.depth >= MAX_DEPTH {
            return Err(Error::damage("the peer sent a chain that does not end"));
        }
        // Chains are followed depth first: what others wait for comes before new work.
        if self.wanted.insert(*base) {
            self.first.push_front(Wanted {
                what: Want::Node(kind, *base),
                version: wanted.version,
                depth: wanted.depth + 1,
            });
        }
        let bytes = self.held_bytes + node.payload.len() + OVERHEAD;
        let node = (bytes <= HELD).then_some(node);
        if node.is_some() {
            self.held_bytes = bytes;
        }
        self.held.entry(*base).or_default().push(Held { wanted, node });
        Ok(())
    }

    /// What waited for a node that is here now. What had to be let go is asked for again.
    fn released(&mut self, id: &NodeId) -> Vec<(NodeKind, NodeId, Wanted, RawNode)> {
        let mut out = Vec::new();
        for Held { wanted, node } in self.held.remove(id).unwrap_or_default() {
            match (wanted.what, node) {
                (Want::Node(kind, id), Some(node)) => {
                    self.held_bytes = self.held_bytes.saturating_sub(node.payload.len() + OVERHEAD);
                    out.push((kind, id, wanted, node));
                }
                _ => self.first.push_front(wanted),
            }
        }
        out
    }

    /// A node is here: looks at what is below it, and at the files that needed it.
    fn kept(&mut self, kind: NodeKind, id: NodeId, version: usize) -> Result<()> {
        self.wanted.remove(&id);
        if kind == NodeKind::Tree {
            let tree = self.import.tree(&id)?;
            for directory in self.below(&tree, version)? {
                self.tree(directory, version)?;
            }
        }
        for manifest in self.needed.remove(&id).unwrap_or_default() {
            if let Entry::Occupied(mut file) = self.files.entry(manifest) {
                file.get_mut().missing -= 1;
                if file.get().missing == 0 {
                    let file = file.remove().file;
                    self.manifests -= file.size();
                    self.whole(&file, manifest, version)?;
                }
            }
        }
        Ok(())
    }

    /// A manifest came: what it names is wanted.
    fn manifest(&mut self, file: ImportedFile, wanted: Wanted) -> Result<()> {
        let id = wanted.what.id();
        let mut seen = HashSet::new();
        let mut missing = 0;
        for (kind, node) in file.nodes() {
            if !seen.insert(node) || self.import.has(&node)? {
                continue;
            }
            missing += 1;
            self.needed.entry(node).or_default().push(id);
            self.want(Want::Node(kind, node), wanted.version);
        }
        match missing {
            0 => self.whole(&file, id, wanted.version),
            _ => {
                self.manifests += file.size();
                self.files.insert(id, Incomplete { file, missing });
                Ok(())
            }
        }
    }

    /// All of a file is here.
    fn whole(&mut self, file: &ImportedFile, id: NodeId, version: usize) -> Result<()> {
        let before = self.import.appended();
        let (import, link) = (&mut *self.import, self.asker.link());
        link.while_busy(|stop| import.file(file, stop))?;
        self.wanted.remove(&id);
        self.count(version, before);
        Ok(())
    }
}

fn not_there(what: &Want, sent: Sent) -> Error {
    let id = what.id();
    let why = match sent {
        Sent::Damaged => format!(
            "node {} is damaged at the peer: `zspace repair` there mends it from a store that has it, and --or names another to pull from",
            id.short()
        ),
        _ => format!(
            "the peer does not have all of what it names: node {} is missing",
            id.short()
        ),
    };
    Error::new(Kind::NotFound, why)
}

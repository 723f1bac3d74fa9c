//! What an inode stands for. Everything outside `staging/` is described by values that never change, so that an inode needs no
//! path to be served.

use super::attr::FileKind;
use crate::store::{Entry, EntryKind, Numbered, Tree, View};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// The read-only directories of the mount's root: four ways to look at the same versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Door {
    /// Each version as it was copied in.
    Versions,
    /// One torch file per tensor.
    Tensors,
    /// One NumPy file per tensor.
    Arrays,
    /// One safetensors file per checkpoint file.
    Safetensors,
}

impl Door {
    pub(super) const ALL: [Door; 4] = [Door::Versions, Door::Tensors, Door::Arrays, Door::Safetensors];

    /// Its name in the root.
    pub(super) fn name(self) -> &'static str {
        match self {
            Door::Versions => "versions",
            Door::Tensors => "tensors",
            Door::Arrays => "arrays",
            Door::Safetensors => "safetensors",
        }
    }

    /// How it spells single tensors, if it shows them.
    pub(super) fn view(self) -> Option<View> {
        match self {
            Door::Tensors => Some(View::Torch),
            Door::Arrays => Some(View::Npy),
            Door::Versions | Door::Safetensors => None,
        }
    }
}

/// The paths of hard-linked files in a version, by link number.
pub(super) type Links = HashMap<u32, Vec<Vec<Vec<u8>>>>;

/// A version and, once asked for, the names of its hard-linked files.
pub(super) struct Commit {
    pub(super) numbered: Arc<Numbered>,
    pub(super) links: OnceLock<Links>,
}

/// An entry of a version: its place among the entries of the last of `dirs`.
#[derive(Clone)]
pub(super) struct At {
    pub(super) commit: Arc<Commit>,
    /// The directories from the version's root down to the one that holds the entry; never empty.
    pub(super) dirs: Arc<[Arc<Tree>]>,
    pub(super) index: usize,
}

impl At {
    /// The entry, if the indices are sound (they come from the same tree, so they are).
    pub(super) fn entry(&self) -> Option<&Entry> {
        self.dirs.last()?.entries().get(self.index)
    }
}

/// What a name under `versions/` (or another door) refers to although it is no number: a link whose target may move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Name {
    /// `latest` of a branch.
    Latest,
    /// A tag, an id's first digits or a number without its zeros.
    Word(String),
}

/// What an inode stands for.
#[derive(Clone)]
pub(super) enum Place {
    /// The mount's root.
    Root,
    /// `versions/` and the like.
    Door(Door),
    /// `versions/BRANCH`.
    Branch(Door, Arc<str>),
    /// A link to a version: under a branch, or directly under the door.
    Link(Option<Arc<str>>, Name),
    /// A version's root directory.
    Version(Door, Arc<Commit>),
    /// A directory, file or link of a version; in the views, a directory or link only.
    Entry(Door, At),
    /// In `tensors/` and `arrays/`: the directory of a checkpoint file's tensors, or one below it.
    Group(Door, At, Group),
    /// In `tensors/` and `arrays/`: one tensor, by its place among the file's tensor paths.
    Tensor(Door, At, usize),
    /// In `safetensors/`: a checkpoint file.
    Whole(At),
    /// Anything in `staging/`, by its path.
    Staged(FileKind),
}

/// Some of a file's tensor paths: those from `low` up to `high`, which agree in their first `depth` components.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) low: usize,
    pub(super) high: usize,
    pub(super) depth: usize,
}

impl Place {
    /// What kind of file it shows as.
    pub(super) fn kind(&self) -> FileKind {
        match self {
            Place::Root | Place::Door(_) | Place::Branch(..) | Place::Version(..) | Place::Group(..) => {
                FileKind::Dir
            }
            Place::Link(..) => FileKind::Symlink,
            Place::Entry(_, at) => match at.entry().map(|e| &e.kind) {
                Some(EntryKind::Dir { .. }) => FileKind::Dir,
                Some(EntryKind::Symlink(_)) => FileKind::Symlink,
                Some(EntryKind::File { .. }) | None => FileKind::File,
            },
            Place::Tensor(..) | Place::Whole(_) => FileKind::File,
            Place::Staged(kind) => *kind,
        }
    }

    /// Whether its contents, and for a directory its names, can never change.
    pub(super) fn is_fixed(&self) -> bool {
        match self {
            Place::Version(..)
            | Place::Entry(..)
            | Place::Group(..)
            | Place::Tensor(..)
            | Place::Whole(_) => true,
            Place::Root | Place::Door(_) | Place::Branch(..) | Place::Link(..) | Place::Staged(_) => false,
        }
    }

    /// The number that makes hard links of a version one inode, if it is one of several names.
    pub(super) fn link(&self) -> Option<(Arc<Commit>, u32)> {
        match self {
            Place::Entry(_, at) => match at.entry().map(|e| &e.kind) {
                Some(EntryKind::File { link, .. }) if *link > 0 => Some((at.commit.clone(), *link)),
                _ => None,
            },
            _ => None,
        }
    }
}

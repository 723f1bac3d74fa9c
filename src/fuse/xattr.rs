//! Extended attributes: what a version and its files tell about themselves, as `user.zspace.*`, beside those that were committed.

use super::namespace::{Namespace, entry_of, place_at};
use super::place::{Door, Place};
use super::views::tensor_of;
use crate::error::{Kind, Result};
use crate::store::{EntryKind, TensorInfo};

/// Names under this prefix are the mount's own.
pub(super) const PREFIX: &[u8] = b"user.zspace.";

impl Namespace {
    /// The value of an attribute (`name` without the prefix) that the mount gives of itself.
    pub(super) fn own_xattr(&self, place: &Place, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let text = |s: String| Ok(Some(s.into_bytes()));
        match (place, name) {
            (Place::Version(_, c), b"id") => text(c.numbered.id.to_string()),
            (Place::Version(_, c), b"label") => {
                let message = &c.numbered.version.message;
                Ok((!message.is_empty()).then(|| message.clone().into_bytes()))
            }
            (Place::Version(_, c), b"stored") => text(c.numbered.stored.to_string()),
            (Place::Entry(..) | Place::Group(..) | Place::Tensor(..) | Place::Whole(_), b"id") => {
                text(place_at(place)?.commit.numbered.id.to_string())
            }
            (Place::Entry(..) | Place::Whole(_) | Place::Group(..), b"sha256" | b"format" | b"stored") => {
                self.file_xattr(place, name)
            }
            (Place::Tensor(door, at, index), b"name" | b"dtype" | b"shape") => {
                let source = self.source(at)?;
                let tensor = tensor_of(&source, *door, *index)?;
                let info = source.tensor(tensor);
                Ok(info.map(|t| tensor_xattr(t, name).into_bytes()))
            }
            (Place::Tensor(..) | Place::Whole(_), b"refused") => match self.view(place) {
                Err(e) if e.kind() == Kind::Refused => text(e.to_string()),
                Err(e) => Err(e),
                Ok(_) => Ok(None),
            },
            _ => Ok(None),
        }
    }

    fn file_xattr(&self, place: &Place, name: &[u8]) -> Result<Option<Vec<u8>>> {
        let at = place_at(place)?;
        let EntryKind::File { hash, .. } = &entry_of(at)?.kind else {
            return Ok(None);
        };
        let value = match (name, place) {
            // The hash is the committed file's, not its view's.
            (b"sha256", Place::Entry(..)) => hash.to_string(),
            (b"format", _) => self.source(at)?.format().to_owned(),
            (b"stored", Place::Entry(..)) => self.source(at)?.stored_bytes()?.to_string(),
            _ => return Ok(None),
        };
        Ok(Some(value.into_bytes()))
    }

    /// The value of an attribute that was committed with a file of `versions/`.
    pub(super) fn committed_xattr(&self, place: &Place, name: &[u8]) -> Option<Vec<u8>> {
        let Place::Entry(Door::Versions, at) = place else {
            return None;
        };
        let xattrs = &at.entry()?.xattrs;
        let index = xattrs.binary_search_by(|(n, _)| n.as_slice().cmp(name)).ok()?;
        Some(xattrs.get(index)?.1.clone())
    }

    /// The names of the attributes of a place.
    pub(super) fn xattr_names(&self, place: &Place) -> Result<Vec<Vec<u8>>> {
        let own: &[&str] = match place {
            Place::Version(_, c) if c.numbered.version.message.is_empty() => &["id", "stored"],
            Place::Version(..) => &["id", "label", "stored"],
            Place::Entry(_, at) => match entry_of(at)?.kind {
                EntryKind::File { .. } => &["format", "sha256", "stored"],
                EntryKind::Dir { .. } | EntryKind::Symlink(_) => &[],
            },
            Place::Group(_, _, group) if group.depth == 0 => &["format"],
            Place::Tensor(..) => match self.own_xattr(place, b"refused")? {
                Some(_) => &["dtype", "name", "refused", "shape"],
                None => &["dtype", "name", "shape"],
            },
            Place::Whole(_) => match self.own_xattr(place, b"refused")? {
                Some(_) => &["format", "refused"],
                None => &["format"],
            },
            Place::Root
            | Place::Door(_)
            | Place::Branch(..)
            | Place::Link(..)
            | Place::Group(..)
            | Place::Staged(_) => &[],
        };
        let mut names: Vec<Vec<u8>> = own.iter().map(|n| [PREFIX, n.as_bytes()].concat()).collect();
        if let Place::Entry(Door::Versions, at) = place {
            let committed = entry_of(at)?.xattrs.iter().map(|(n, _)| n);
            names.extend(committed.filter(|n| !n.starts_with(PREFIX)).cloned());
        }
        Ok(names)
    }
}

fn tensor_xattr(tensor: TensorInfo, name: &[u8]) -> String {
    match name {
        b"name" => tensor.true_name,
        b"dtype" => tensor.dtype.to_string(),
        _ => {
            let dims: Vec<String> = tensor.shape.iter().map(u64::to_string).collect();
            format!("[{}]", dims.join(", "))
        }
    }
}

//! What the doors make of a version's files: as they are in `versions/`, tensor by tensor in `tensors/` and `arrays/`, and as one
//! safetensors file each in `safetensors/`. Directories keep their names everywhere; links are kept where they lead to something
//! that the door shows.

use super::errno::os;
use super::namespace::{Listed, Namespace, entry_of};
use super::place::{At, Commit, Door, Group, Place};
use crate::error::Result;
use crate::id::FileHasher;
use crate::store::{EntryKind, FileView, Tree, View};
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

/// Links followed before a chain of them counts as a loop.
const LINKS: usize = 32;
const SUFFIX: &[u8] = b".safetensors";
/// The longest name of a file.
const NAME_MAX: usize = 255;

type Dirs = Arc<[Arc<Tree>]>;

impl Namespace {
    /// What a name in a directory of a version stands for. `dirs` lead to the directory.
    pub(super) fn find_below(
        &self,
        door: Door,
        dirs: Dirs,
        commit: &Arc<Commit>,
        name: &[u8],
    ) -> Result<Option<Place>> {
        let tree = dirs.last().ok_or_else(|| os(libc::ESTALE, "no directory"))?;
        let mut stored = name;
        if door == Door::Safetensors && tree.find(name).is_none() {
            match plain_name(name) {
                Some(plain) => stored = plain,
                // Told apart by a number or a hash: only the whole list says by which.
                None => {
                    let listed = self.list_below(door, dirs, commit)?;
                    return Ok(listed
                        .into_iter()
                        .find(|(n, _)| n == name)
                        .map(|(_, place)| place));
                }
            }
        }
        let Ok(index) = tree.entries().binary_search_by(|e| e.name.as_slice().cmp(stored)) else {
            return Ok(None);
        };
        let at = At {
            commit: commit.clone(),
            dirs,
            index,
        };
        let place = self.shown(door, at)?;
        // What is shown under another name is not there under its own.
        let moved = |p: &Place| !stored.ends_with(SUFFIX) && self.is_renamed(p);
        Ok(place.filter(|p| door != Door::Safetensors || moved(p) == (stored != name)))
    }

    /// The names of a directory of a version.
    pub(super) fn list_below(&self, door: Door, dirs: Dirs, commit: &Arc<Commit>) -> Result<Vec<Listed>> {
        let tree = dirs.last().cloned().unwrap_or_default();
        let mut names = Vec::with_capacity(tree.entries().len());
        for (index, entry) in tree.entries().iter().enumerate() {
            let at = At {
                commit: commit.clone(),
                dirs: dirs.clone(),
                index,
            };
            if let Some(place) = self.shown(door, at)? {
                names.push((entry.name.clone(), place));
            }
        }
        if door == Door::Safetensors {
            rename_all(&mut names, |place| self.is_renamed(place));
        }
        Ok(names)
    }

    /// What a door makes of an entry, if it shows it.
    fn shown(&self, door: Door, at: At) -> Result<Option<Place>> {
        if door == Door::Versions {
            return Ok(Some(Place::Entry(door, at)));
        }
        Ok(match &entry_of(&at)?.kind {
            EntryKind::Dir { .. } => Some(Place::Entry(door, at)),
            EntryKind::File { .. } => {
                let source = self.source(&at)?;
                match door.view() {
                    _ if !source.has_tensors() => None,
                    Some(view) => {
                        let high = source.tensor_paths(view).len();
                        let group = Group {
                            low: 0,
                            high,
                            depth: 0,
                        };
                        Some(Place::Group(door, at, group))
                    }
                    None => Some(Place::Whole(at)),
                }
            }
            EntryKind::Symlink(_) => match self.resolve(&at, true)? {
                Some(Reached::Dir) => Some(Place::Entry(door, at)),
                Some(Reached::Entry(to)) if self.source(&to)?.has_tensors() => Some(Place::Entry(door, at)),
                Some(Reached::Entry(_)) | None => None,
            },
        })
    }

    /// Whether `safetensors/` shows it under a name that ends in `.safetensors`: files, and links that lead to files.
    fn is_renamed(&self, place: &Place) -> bool {
        match place {
            Place::Whole(_) => true,
            Place::Entry(_, at) if entry_of(at).is_ok_and(|e| matches!(e.kind, EntryKind::Symlink(_))) => {
                matches!(self.resolve(at, true), Ok(Some(Reached::Entry(_))))
            }
            _ => false,
        }
    }

    /// Where a link of a version points, in the names of the door.
    pub(super) fn view_target(&self, door: Door, at: &At) -> Result<Vec<u8>> {
        let EntryKind::Symlink(target) = &entry_of(at)?.kind else {
            return Err(os(libc::EINVAL, "not a symbolic link"));
        };
        if door != Door::Safetensors {
            return Ok(target.clone());
        }
        // Only the last name differs: what it points at directly, which may be a link again, has a name of this door.
        let Some(Reached::Entry(to)) = self.resolve(at, false)? else {
            return Ok(target.clone());
        };
        let listed = self.list_below(door, to.dirs.clone(), &to.commit)?;
        let same = |place: &Place| match place {
            Place::Whole(x) | Place::Entry(_, x) => x.index == to.index,
            _ => false,
        };
        let Some((name, _)) = listed.into_iter().find(|(_, place)| same(place)) else {
            return Ok(target.clone());
        };
        let cut = target.iter().rposition(|b| *b == b'/').map_or(0, |i| i + 1);
        Ok([&target[..cut], &name].concat())
    }

    /// What a link of a version leads to within that version; `None` if it leads out of it or nowhere. With `follow`, a link that
    /// it leads to is followed in turn.
    fn resolve(&self, link: &At, follow: bool) -> Result<Option<Reached>> {
        let mut dirs: Vec<Arc<Tree>> = link.dirs.to_vec();
        let mut pending: VecDeque<Vec<u8>> = VecDeque::new();
        let EntryKind::Symlink(target) = &entry_of(link)?.kind else {
            return Ok(None);
        };
        if !push_front(&mut pending, target) {
            return Ok(None);
        }
        let mut budget = LINKS;
        while let Some(name) = pending.pop_front() {
            match name.as_slice() {
                b"" | b"." => continue,
                b".." if dirs.len() > 1 => {
                    dirs.pop();
                    continue;
                }
                b".." => return Ok(None),
                _ => {}
            }
            let Some(tree) = dirs.last().cloned() else {
                return Ok(None);
            };
            let Ok(index) = tree.entries().binary_search_by(|e| e.name.cmp(&name)) else {
                return Ok(None);
            };
            let last = pending.iter().all(|n| n.is_empty() || n == b".");
            match &tree.entries()[index].kind {
                EntryKind::Dir { tree, .. } => dirs.push(self.store.tree(tree)?),
                EntryKind::Symlink(target) if follow || !last => {
                    budget -= 1;
                    if budget == 0 || !push_front(&mut pending, target) {
                        return Ok(None);
                    }
                }
                EntryKind::File { .. } | EntryKind::Symlink(_) if last => {
                    return Ok(Some(Reached::Entry(At {
                        commit: link.commit.clone(),
                        dirs: dirs.into(),
                        index,
                    })));
                }
                EntryKind::File { .. } | EntryKind::Symlink(_) => return Ok(None),
            }
        }
        Ok(Some(Reached::Dir))
    }

    /// The names of a directory of tensors.
    pub(super) fn list_tensors(&self, door: Door, at: &At, group: Group) -> Result<Vec<Listed>> {
        let paths = self.source(at)?.tensor_paths(view_of(door)?);
        let mut names: Vec<Listed> = Vec::new();
        let mut index = group.low;
        while index < group.high {
            let Some((name, next)) = group_at(&paths, index, group) else {
                break;
            };
            names.push((
                name.as_bytes().to_vec(),
                tensor_place(door, at, &paths, index, next, group),
            ));
            index = next;
        }
        Ok(names)
    }

    /// What a name in a directory of tensors stands for.
    pub(super) fn find_tensor(
        &self,
        door: Door,
        at: &At,
        group: Group,
        name: &[u8],
    ) -> Result<Option<Place>> {
        let paths = self.source(at)?.tensor_paths(view_of(door)?);
        let range = paths.get(group.low..group.high).unwrap_or_default();
        let before = |(p, _): &(Vec<String>, usize)| p.get(group.depth).is_none_or(|c| c.as_bytes() < name);
        let index = group.low + range.partition_point(before);
        match group_at(&paths, index, group) {
            Some((found, next)) if found.as_bytes() == name => {
                Ok(Some(tensor_place(door, at, &paths, index, next, group)))
            }
            _ => Ok(None),
        }
    }

    /// One tensor of a file, as a file.
    pub(super) fn tensor_view(&self, door: Door, at: &At, index: usize) -> Result<Arc<FileView>> {
        let source = self.source(at)?;
        let tensor = tensor_of(&source, door, index)?;
        match view_of(door)? {
            View::Torch => source.torch_view(tensor),
            View::Npy => source.npy_view(tensor),
        }
    }
}

/// The number, among a file's tensors, of the tensor with this place among its paths.
pub(super) fn tensor_of(source: &FileView, door: Door, index: usize) -> Result<usize> {
    let paths = source.tensor_paths(view_of(door)?);
    let tensor = paths.get(index).map(|(_, tensor)| *tensor);
    tensor.ok_or_else(|| os(libc::ESTALE, "no such tensor"))
}

/// What a link leads to.
enum Reached {
    Dir,
    Entry(At),
}

fn view_of(door: Door) -> Result<View> {
    door.view().ok_or_else(|| os(libc::ESTALE, "no tensors here"))
}

/// Puts the components of a link's target before the rest of the way; false if the target is absolute or empty.
fn push_front(pending: &mut VecDeque<Vec<u8>>, target: &[u8]) -> bool {
    if target.is_empty() || target.starts_with(b"/") {
        return false;
    }
    for name in target.split(|b| *b == b'/').rev() {
        pending.push_front(name.to_vec());
    }
    true
}

/// The name at `index` of a group and where the next name starts.
fn group_at(paths: &[(Vec<String>, usize)], index: usize, group: Group) -> Option<(&str, usize)> {
    let range = paths.get(index..group.high)?;
    let name = range.first()?.0.get(group.depth)?;
    let same = |(p, _): &(Vec<String>, usize)| p.get(group.depth) == Some(name);
    Some((name, index + range.partition_point(same)))
}

fn tensor_place(
    door: Door,
    at: &At,
    paths: &[(Vec<String>, usize)],
    low: usize,
    high: usize,
    group: Group,
) -> Place {
    let depth = group.depth + 1;
    if paths.get(low).is_some_and(|(p, _)| p.len() == depth) {
        return Place::Tensor(door, at.clone(), low);
    }
    Place::Group(door, at.clone(), Group { low, high, depth })
}

/// Gives files the names of `safetensors/`: a name that ends in `.safetensors` stays, others get it behind; a name taken already
/// gets `.2`, `.3` … before it, and one that would be too long is cut and told apart by a hash.
fn rename_all(names: &mut [Listed], is_renamed: impl Fn(&Place) -> bool) {
    let changes = |n: &[u8], p: &Place| !n.ends_with(SUFFIX) && is_renamed(p);
    let change: Vec<bool> = names.iter().map(|(n, p)| changes(n, p)).collect();
    let kept = names
        .iter()
        .zip(&change)
        .filter(|(_, c)| !**c)
        .map(|((n, _), _)| n.clone());
    let mut taken: HashSet<Vec<u8>> = kept.collect();
    for ((name, _), _) in names.iter_mut().zip(change).filter(|(_, c)| *c) {
        let mut new = with_suffix(name, b"");
        let mut count = 2u64;
        while !taken.insert(new.clone()) {
            new = with_suffix(name, format!(".{count}").as_bytes());
            count += 1;
        }
        *name = new;
    }
    names.sort_by(|a, b| a.0.cmp(&b.0));
}

/// The stored name of what `safetensors/` shows as `name`, where that is certain without seeing the other names.
fn plain_name(name: &[u8]) -> Option<&[u8]> {
    let plain = name
        .strip_suffix(SUFFIX)
        .filter(|p| !p.is_empty() && !p.ends_with(SUFFIX))?;
    let tail = plain.rsplit(|b| *b == b'.').next().unwrap_or_default();
    let numbered = tail.len() < plain.len() && !tail.is_empty() && tail.iter().all(u8::is_ascii_digit);
    (!numbered && !plain.contains(&b'~')).then_some(plain)
}

fn with_suffix(name: &[u8], infix: &[u8]) -> Vec<u8> {
    let whole = [name, infix, SUFFIX].concat();
    if whole.len() <= NAME_MAX {
        return whole;
    }
    let mut hasher = FileHasher::default();
    hasher.update(name);
    let hash = hasher.finish().short();
    let mut keep = NAME_MAX - SUFFIX.len() - infix.len() - hash.len() - 1;
    // Never cut a character of UTF-8 in half.
    while keep > 0 && name.get(keep).is_some_and(|b| b & 0xc0 == 0x80) {
        keep -= 1;
    }
    [
        &name[..keep.min(name.len())],
        b"~",
        hash.as_bytes(),
        infix,
        SUFFIX,
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuse::attr::FileKind;

    fn renamed(names: &[&str]) -> Vec<String> {
        let place = Place::Staged(FileKind::File);
        let mut names: Vec<Listed> = names
            .iter()
            .map(|n| (n.as_bytes().to_vec(), place.clone()))
            .collect();
        rename_all(&mut names, |_| true);
        names
            .into_iter()
            .map(|(n, _)| String::from_utf8(n).unwrap())
            .collect()
    }

    #[test]
    fn two_files_never_get_one_name() {
        assert_eq!(
            renamed(&["a.pt", "b.safetensors"]),
            ["a.pt.safetensors", "b.safetensors"]
        );
        assert_eq!(
            renamed(&["m", "m.2.safetensors", "m.safetensors"]),
            ["m.2.safetensors", "m.3.safetensors", "m.safetensors"]
        );
    }

    #[test]
    fn long_names_are_cut_between_characters_and_stay_apart() {
        let a = "ä".repeat(127);
        let b = format!("{}b", "ä".repeat(126));
        let names = renamed(&[&a, &b]);
        assert_ne!(names[0], names[1]);
        assert!(
            names
                .iter()
                .all(|n| n.len() <= NAME_MAX && n.ends_with(".safetensors"))
        );
    }

    #[test]
    fn groups_of_tensor_paths() {
        let paths: Vec<(Vec<String>, usize)> =
            [&["a.pt"][..], &["layers", "0.pt"], &["layers", "1.pt"], &["z.pt"]]
                .iter()
                .enumerate()
                .map(|(i, p)| (p.iter().map(|c| (*c).to_owned()).collect(), i))
                .collect();
        let top = Group {
            low: 0,
            high: 4,
            depth: 0,
        };
        assert_eq!(group_at(&paths, 0, top), Some(("a.pt", 1)));
        assert_eq!(group_at(&paths, 1, top), Some(("layers", 3)));
        assert_eq!(group_at(&paths, 3, top), Some(("z.pt", 4)));
        assert_eq!(group_at(&paths, 4, top), None);
    }
}

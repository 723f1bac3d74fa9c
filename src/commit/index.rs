//! The regions of many files, found by form and by likeness of name.

use super::known::Known;
use super::listing::alike;
use crate::tensor::Dtype;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

/// What two regions must have in common: dtype and bytes.
pub(super) type Form = (Dtype, u64);
/// What stands in either name before their common end.
pub(super) type Renaming = (Vec<u8>, Vec<u8>);
/// A region: the file's number in the index, and its own in the file.
type Ref = (u32, u32);

/// Regions on either side of one that are looked at whatever their names.
const BESIDE: usize = 16;

/// The regions of some files by form and name.
#[derive(Clone, Default)]
pub(super) struct Index {
    files: Vec<Arc<Known>>,
    /// Files added, those given up since included.
    seen: usize,
    /// Names backwards, so that those with the longest common end are neighbours; of one name, later files first.
    names: BTreeSet<(Form, Vec<u8>, Reverse<u32>, u32)>,
    forms: HashMap<Form, Vec<Ref>>,
}

impl Index {
    pub(super) fn add(&mut self, file: Arc<Known>) {
        let number = self.files.len() as u32;
        for (i, r) in file.plan.regions.iter().enumerate().filter(|(_, r)| r.len > 0) {
            let (form, name) = ((r.dtype, r.len), r.name.bytes().rev().collect());
            self.names.insert((form, name, Reverse(number), i as u32));
            self.forms.entry(form).or_default().push((number, i as u32));
        }
        self.files.push(file);
        self.seen += 1;
    }

    /// Empty, but for what it has seen.
    pub(super) fn emptied(&self) -> Self {
        Index {
            seen: self.seen,
            ..Index::default()
        }
    }

    /// Files added, those given up since included.
    pub(super) fn seen(&self) -> usize {
        self.seen
    }

    /// How much it holds, in regions.
    pub(super) fn weight(&self) -> usize {
        self.files.len() + self.names.len()
    }

    /// Regions of this form: those whose names share the longest end with `name`, then the one that comes as `ordinal`th.
    pub(super) fn candidates(&self, form: Form, name: &str, ordinal: usize) -> Vec<Candidate<'_>> {
        let Some(all) = self.forms.get(&form) else {
            return Vec::new();
        };
        let from = |backwards: Vec<u8>| {
            let range = self.names.range((form, backwards, Reverse(u32::MAX), 0)..);
            range.take_while(|n| n.0 == form).take(2)
        };
        let start = (
            form,
            name.bytes().rev().collect::<Vec<u8>>(),
            Reverse(u32::MAX),
            0,
        );
        let before = self.names.range(..&start).next_back().filter(|n| n.0 == form);
        let near = from(start.1).chain(before.into_iter().flat_map(|n| from(n.1.clone())));
        let mut refs: Vec<Ref> = near.map(|n| (n.2.0, n.3)).collect();
        refs.extend(all.get(ordinal));
        let mut found: Vec<Candidate<'_>> = Vec::new();
        for (file, region) in refs {
            let c = Candidate::new(&self.files[file as usize], region as usize, name);
            if found
                .iter()
                .all(|f| !(Arc::ptr_eq(f.file, c.file) && f.region == c.region))
            {
                found.push(c);
            }
        }
        found
    }

    /// Regions of this form around the one that comes as `ordinal`th, the nearest first, whatever their names.
    pub(super) fn beside(
        &self,
        form: Form,
        name: &str,
        ordinal: usize,
    ) -> impl Iterator<Item = Candidate<'_>> {
        let all = self.forms.get(&form).map_or(&[][..], Vec::as_slice);
        let end = all.len().min(ordinal.saturating_add(BESIDE));
        let mut near: Vec<usize> = (ordinal.saturating_sub(BESIDE).min(end)..end).collect();
        near.sort_by_key(|i| i.abs_diff(ordinal));
        let refs = near.into_iter().map(|i| all[i]);
        refs.map(move |(file, region)| Candidate::new(&self.files[file as usize], region as usize, name))
    }
}

impl<'a> Candidate<'a> {
    fn new(file: &'a Arc<Known>, region: usize, name: &str) -> Self {
        let other = file.plan.regions[region].name.as_str();
        let common = common_end(name, other);
        Candidate {
            file,
            region,
            common,
            same_numbers: alike(other.as_bytes()).1 == alike(name.as_bytes()).1,
            renaming: renaming(&name[..name.len() - common], &other[..other.len() - common]),
        }
    }
}

/// How one name becomes the other, by what stands before their common end; numbers are left out where they are the same, so
/// that what holds for one layer holds for all.
fn renaming(a: &str, b: &str) -> Renaming {
    let ((x, m), (y, n)) = (alike(a.as_bytes()), alike(b.as_bytes()));
    if m == n {
        (x, y)
    } else {
        (a.as_bytes().to_vec(), b.as_bytes().to_vec())
    }
}

/// A region that may be close.
pub(super) struct Candidate<'a> {
    pub(super) file: &'a Arc<Known>,
    pub(super) region: usize,
    /// Bytes of the names' common end.
    pub(super) common: usize,
    /// Whether the names hold the same numbers.
    pub(super) same_numbers: bool,
    pub(super) renaming: Renaming,
}

/// The length of the longest common end of two names that starts with a component in both.
fn common_end(a: &str, b: &str) -> usize {
    let equal = a.bytes().rev().zip(b.bytes().rev()).take_while(|(x, y)| x == y);
    let starts = |s: &str, n: usize| {
        let before = s.len().checked_sub(n + 1).map(|at| s.as_bytes()[at]);
        before.is_none_or(|b| b == b'.' || b == b'/')
    };
    (0..=equal.count())
        .rev()
        .find(|n| starts(a, *n) && starts(b, *n))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_share_ends_by_component() {
        assert_eq!(common_end("model.layers.3.w", "layers.3.w"), 10);
        assert_eq!(common_end("layers.13.w", "layers.3.w"), 1);
        assert_eq!(common_end("a.b", "a.b"), 3);
        assert_eq!(common_end("xa.b", "a.b"), 1);
        assert_eq!(common_end("a", "b"), 0);
        assert_eq!(common_end("é.é", "è.é"), 2);
    }
}

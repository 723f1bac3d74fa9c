//! The files of one version, as the search for bases asks for them: by path, by a path alike but for numbers, and the large ones.

use crate::id::FileHash;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};

/// Files looked at because their path is alike.
const ALIKE: usize = 64;
/// Files looked at because they are large.
pub(super) const LARGE: usize = 256;
/// Files shorter than this (bytes) are not worth a long search.
pub(super) const SMALL: u64 = 64 << 10;
const ALIKE_SMALL: usize = 4;

/// A file's hash and length.
pub(super) type FileKey = (FileHash, u64);

/// The numbers in a path, the last one first: what tells paths apart that are alike.
type Numbers = Vec<u64>;

#[derive(Default)]
pub(super) struct Listing {
    paths: HashMap<Vec<u8>, FileKey>,
    alike: HashMap<Vec<u8>, BTreeMap<Numbers, FileKey>>,
    large: Vec<FileKey>,
}

impl Listing {
    pub(super) fn add(&mut self, path: Vec<u8>, file: FileKey) {
        let (pattern, numbers) = alike(&path);
        self.alike.entry(pattern).or_default().insert(numbers, file);
        if file.1 >= SMALL {
            self.large.push(file);
        }
        self.paths.insert(path, file);
    }

    /// How many files there are.
    pub(super) fn len(&self) -> usize {
        self.paths.len()
    }

    /// Large files, in the order they were added.
    pub(super) fn large(&self) -> &[FileKey] {
        &self.large
    }

    /// Files worth a look as bases for a file of `len` bytes: the same path first, then those alike but for numbers (here and
    /// in `own`, the files of the same commit), the nearest first, then large ones.
    pub(super) fn candidates(&self, own: &Listing, path: &[u8], len: u64) -> Vec<FileKey> {
        let (near, far) = if len < SMALL {
            (ALIKE_SMALL, 0)
        } else {
            (ALIKE, LARGE)
        };
        let (pattern, numbers) = alike(path);
        let mut alike: Vec<_> = [own, self]
            .into_iter()
            .flat_map(|l| l.nearest(&pattern, &numbers, near))
            .collect();
        alike.sort_by_key(|(n, _)| distance(n, &numbers));
        let alike = alike.into_iter().map(|(_, f)| f).take(near);
        let same = self.paths.get(path).into_iter().copied();
        let mut seen = HashSet::new();
        let all = same.chain(alike).chain(self.large.iter().copied().take(far));
        all.filter(|f| seen.insert(*f)).collect()
    }

    /// Up to `limit` files of this pattern on either side of the numbers.
    fn nearest(&self, pattern: &[u8], numbers: &Numbers, limit: usize) -> Vec<(&Numbers, FileKey)> {
        let Some(files) = self.alike.get(pattern) else {
            return Vec::new();
        };
        let before = files.range(..numbers.clone()).rev().take(limit);
        let after = files.range(numbers.clone()..).take(limit);
        before.chain(after).map(|(n, f)| (n, *f)).collect()
    }
}

/// How far apart the numbers of two paths are, the last number first; of two as far, the lower comes first.
fn distance(a: &Numbers, b: &Numbers) -> (Vec<u64>, Reverse<bool>) {
    let apart = a.iter().zip(b).map(|(x, y)| x.abs_diff(*y)).collect();
    (apart, Reverse(a < b))
}

/// The path with every run of digits made one `#`, and the numbers: `checkpoint-20/model-00001-of-00003` and `checkpoint-40/…`
/// are alike. The last number comes first.
pub(super) fn alike(path: &[u8]) -> (Vec<u8>, Numbers) {
    let mut pattern = Vec::with_capacity(path.len());
    let mut numbers: Numbers = Vec::new();
    for b in path {
        if !b.is_ascii_digit() {
            pattern.push(*b);
            continue;
        }
        let digit = u64::from(b - b'0');
        match numbers.last_mut() {
            Some(n) if pattern.last() == Some(&b'#') => *n = n.saturating_mul(10).saturating_add(digit),
            _ => {
                pattern.push(b'#');
                numbers.push(digit);
            }
        }
    }
    numbers.reverse();
    (pattern, numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(n: u8) -> FileKey {
        (FileHash([n; 32]), SMALL)
    }

    #[test]
    fn steps_do_not_make_a_path_another() {
        let pattern = |p: &[u8]| alike(p).0;
        assert_eq!(
            pattern(b"step-000020.safetensors"),
            pattern(b"step-7.safetensors")
        );
        assert_eq!(
            alike(b"checkpoint-20/model-00001-of-00003"),
            (b"checkpoint-#/model-#-of-#".to_vec(), vec![3, 1, 20])
        );
        assert_ne!(pattern(b"a/model.pt"), pattern(b"b/model.pt"));
        assert_eq!(alike(b"#1").1, [1]);
    }

    #[test]
    fn the_nearest_of_the_like_come_first() {
        let (mut old, mut own) = (Listing::default(), Listing::default());
        for (i, path) in ["s100/rank0.pt", "s100/rank1.pt", "s150/rank1.pt"]
            .iter()
            .enumerate()
        {
            old.add(path.as_bytes().to_vec(), file(i as u8));
        }
        own.add(b"s200/rank0.pt".to_vec(), file(9));
        assert_eq!(
            old.candidates(&own, b"s200/rank1.pt", SMALL),
            [file(2), file(1), file(9), file(0)],
        );
        // Its own path comes before all others.
        old.add(b"s200/rank1.pt".to_vec(), file(7));
        assert_eq!(old.candidates(&own, b"s200/rank1.pt", SMALL)[0], file(7));
        // Between two as near, the one before.
        let mut steps = Listing::default();
        for n in [20, 10, 30] {
            steps.add(format!("step-{n}").into_bytes(), file(n));
        }
        assert_eq!(
            steps.candidates(&own, b"step-25", 1),
            [file(20), file(30), file(10)]
        );
    }
}

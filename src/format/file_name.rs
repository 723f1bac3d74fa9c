//! The path of a tensor's own file in a view (docs/FORMAT.md, "File names").

use crate::id::hex;
use sha2::{Digest, Sha256};

/// The longest file name, in bytes, that file systems take.
const MAX_NAME: usize = 255;
/// `%~` and 16 hex digits.
const MARK_LEN: usize = 18;

/// The path components of a tensor's file, `suffix` (".pt" or ".npy") included: those of its encoded name, the last one with
/// the suffix. No two names share a path, unless 64 bits of SHA-256 collide: a leading dot is `%2E`; so is the last dot of
/// a directory that ends with the suffix; and a component that would exceed 255 bytes is cut and ends in `%~` and the
/// first 16 hex digits of its SHA-256.
pub fn file_name(tensor_name: &str, suffix: &str) -> Vec<String> {
    let mut components: Vec<String> = tensor_name.split('/').map(str::to_owned).collect();
    let last = components.len() - 1;
    for (i, c) in components.iter_mut().enumerate() {
        let ending = if i == last { suffix } else { "" };
        let whole = c.clone();
        if i != last
            && let Some(stem) = c.strip_suffix(suffix)
        {
            *c = format!("{stem}%2E{}", &suffix[1..]);
        }
        if let Some(rest) = c.strip_prefix('.') {
            *c = format!("%2E{rest}");
        }
        if c.len() + ending.len() > MAX_NAME {
            c.truncate(cut(c, MAX_NAME - MARK_LEN - ending.len()));
            c.push_str("%~");
            c.push_str(&hex(&Sha256::digest(whole.as_bytes())[..8]));
        }
        c.push_str(ending);
    }
    components
}

/// The longest prefix of at most `max` bytes that splits neither a character nor an escape.
fn cut(s: &str, max: usize) -> usize {
    let end = (0..=max.min(s.len()))
        .rev()
        .find(|i| s.is_char_boundary(*i))
        .unwrap_or(0);
    match s[..end].rfind('%') {
        Some(escape) if escape + 3 > end => escape,
        _ => end,
    }
}

#[cfg(test)]
mod tests {
    use super::super::names::encode;
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_two_names_share_a_path(
            a in prop::collection::vec("[.pt%/~\\PC]{0,6}", 1..4),
            b in prop::collection::vec("[.pt%/~\\PC]{0,6}", 1..4),
        ) {
            let join = |c: &[String]| c.iter().map(|c| encode(c.as_bytes())).collect::<Vec<_>>().join("/");
            let (x, y) = (file_name(&join(&a), ".pt"), file_name(&join(&b), ".pt"));
            prop_assert_eq!(x == y, a == b);
            // Nor is a file ever a directory on the way to another.
            prop_assert!(!(x.len() < y.len() && y.starts_with(&x)));
            for c in x {
                prop_assert!(!c.is_empty() && c.len() <= MAX_NAME && !c.starts_with('.') && !c.contains(['/', '\0']));
            }
        }

        #[test]
        fn long_components_are_cut(n in 240usize..300, c: char, tail in "[a-z]{2}") {
            let name = encode(c.to_string().repeat(n).as_bytes()) + &tail;
            let path = file_name(&format!("{name}/{name}"), ".npy");
            prop_assert!(path.iter().all(|c| c.len() <= MAX_NAME));
            prop_assert_ne!(&path, &file_name(&format!("{name}/{name}x"), ".npy"));
            prop_assert!(path[1].ends_with(".npy") && path.iter().all(|c| std::str::from_utf8(c.as_bytes()).is_ok()));
        }
    }

    #[test]
    fn examples() {
        assert_eq!(file_name("a.b", ".pt"), ["a.b.pt"]);
        assert_eq!(file_name("m/n.pt/q.pt", ".pt"), ["m", "n%2Ept", "q.pt.pt"]);
        assert_eq!(file_name("../.x/.", ".npy"), ["%2E.", "%2Ex", "%2E.npy"]);
        assert_eq!(file_name(".pt/x", ".pt"), ["%2Ept", "x.pt"]);
        let k = "k".repeat(300);
        let want = format!("{}%~{}.pt", "k".repeat(234), "17b16d8ef494060f");
        assert_eq!(file_name(&k, ".pt"), [want]);
        // An escape is not cut in two.
        let name = "k".repeat(232) + "%0A" + &k;
        assert!(file_name(&name, ".pt")[0].starts_with(&("k".repeat(232) + "%~")));
    }
}

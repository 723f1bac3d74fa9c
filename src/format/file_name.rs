//! The path of a tensor's own file in a view (docs/format-layout.md, "File names").

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

//! What names mean: unfinished work, indexes and shards, and how any name is spelled in ASCII.

use crate::error::{Error, Kind, Result};
use crate::store::is_distributed_part;
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// The components of a path below staging/: branch, entry, names inside the entry.
pub(super) type Path = [Vec<u8>];

/// Refuses what is no file name, so that a path can never lead out of the staging tree.
pub(super) fn check(path: &Path) -> Result<()> {
    for name in path {
        let bad =
            name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0);
        if bad {
            return Err(Error::new(
                Kind::Usage,
                format!("{:?} is no file name", String::from_utf8_lossy(name)),
            ));
        }
        if name.len() > 255 {
            return Err(errno(libc::ENAMETOOLONG, "name of more than 255 bytes"));
        }
    }
    Ok(())
}

/// An error with the errno that a disk would give.
pub(super) fn errno(code: i32, what: &str) -> Error {
    Error::io(what.to_owned(), std::io::Error::from_raw_os_error(code))
}

/// Whether a name directly in a branch marks unfinished work: `*.tmp`, `*.part`, `*.incomplete`, `tmp-*`, a leading dot.
pub fn unfinished(name: &[u8]) -> bool {
    name.starts_with(b".") || unfinished_inside(name)
}

/// The same for a name inside an entry, where dotfiles are content, but for those that are given by chance.
pub(super) fn unfinished_inside(name: &[u8]) -> bool {
    name.starts_with(b"tmp-")
        || by_chance(name)
        || [&b".tmp"[..], b".part", b".incomplete"]
            .iter()
            .any(|s| name.ends_with(s))
}

/// The names that rsync (`.model.pt.Ab12Cd`, `.~tmp~` with --delay-updates) and save_file (`.tmpAb12Cd`) write under before they
/// rename: who is killed in between leaves a whole file of such a name, and none of the right one.
fn by_chance(name: &[u8]) -> bool {
    let random = |end: &[u8]| {
        // A word, as in `.model.config`, is none.
        end.len() == 6 && end.iter().all(u8::is_ascii_alphanumeric) && !end.iter().all(u8::is_ascii_lowercase)
    };
    let Some(rest) = name.strip_prefix(b".") else {
        return false;
    };
    let after_a_name = rest
        .iter()
        .rposition(|b| *b == b'.')
        .is_some_and(|dot| dot > 0 && random(&rest[dot + 1..]));
    after_a_name || rest.strip_prefix(b"tmp").is_some_and(random) || rest == b"~tmp~"
}

/// The name that unfinished work probably gets in the end: `model.pt.part` and rsync's `.model.pt.Ab12Cd` mean `model.pt`.
pub(super) fn intended(name: &[u8]) -> &[u8] {
    let mut name = name;
    if let Some(rest) = name.strip_prefix(b".") {
        name = match rest.iter().rposition(|b| *b == b'.') {
            Some(dot) if rest.len() - dot == 7 => &rest[..dot],
            _ => rest,
        };
    }
    let name = name.strip_prefix(b"tmp-").unwrap_or(name);
    [&b".tmp"[..], b".part", b".incomplete"]
        .iter()
        .find_map(|s| name.strip_suffix(*s))
        .unwrap_or(name)
}

/// Whether a file of this name may hold tensors; decides only what others wait for while it is being written.
pub(super) fn looks_like_tensors(name: &[u8]) -> bool {
    const ENDINGS: [&[u8]; 9] = [
        b".safetensors",
        b".pt",
        b".pth",
        b".bin",
        b".ckpt",
        b".npy",
        b".npz",
        b".distcp",
        b".gguf",
    ];
    ENDINGS.iter().any(|e| name.ends_with(e))
}

/// The set a shard belongs to: `model-00001-of-00003.safetensors` is of set `model-` … `-of-00003.safetensors`.
pub(super) fn shard_set(name: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let of = name.windows(4).rposition(|w| w == b"-of-")?;
    let (head, tail) = name.split_at(of);
    let digits = head.iter().rev().take_while(|b| b.is_ascii_digit()).count();
    let follows = tail.get(4).is_some_and(u8::is_ascii_digit);
    let head = &head[..head.len() - digits];
    (digits > 0 && follows && head.ends_with(b"-")).then(|| (head.to_vec(), tail.to_vec()))
}

/// Why one of these files is of a distributed checkpoint whose saving did not come to its end: `.metadata` is written last.
pub(super) fn without_metadata(files: &[PathBuf]) -> Option<String> {
    let name = |f: &std::path::Path| f.file_name().unwrap_or_default().as_bytes().to_vec();
    let finished: BTreeSet<_> = files
        .iter()
        .filter(|f| name(f).ends_with(b".metadata"))
        .map(|f| f.parent())
        .collect();
    let part = files
        .iter()
        .find(|f| is_distributed_part(&name(f)) && !finished.contains(&f.parent()))?;
    Some(format!("{}: has no .metadata beside it", part.display()))
}

/// A name in printable ASCII: all but `A-Z a-z 0-9 . _ -` as `%XX`.
pub(super) fn encode(name: &[u8]) -> String {
    let mut out = String::with_capacity(name.len());
    for b in name {
        if b.is_ascii_alphanumeric() || b"._-".contains(b) {
            out.push(char::from(*b));
        } else {
            out.push_str(&format!("%{b:02X}"));
        }
    }
    out
}

/// The name that was spelled so, or nothing if the escapes are malformed.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((b, tail)) = rest.split_first() {
        rest = tail;
        if *b == b'%' {
            let (digits, tail) = rest.split_at_checked(2)?;
            let digit = |i: usize| char::from(digits[i]).to_digit(16);
            out.push((digit(0)? << 4 | digit(1)?) as u8);
            rest = tail;
        } else {
            out.push(*b);
        }
    }
    Some(out)
}

/// A path as requests spell it: names encoded, joined by slashes.
pub(crate) fn path_text(path: &Path) -> String {
    path.iter().map(|c| encode(c)).collect::<Vec<_>>().join("/")
}

/// The inverse of [`path_text`]. Bytes that need no escape may stand for themselves.
pub(crate) fn text_path(text: &str) -> Option<Vec<Vec<u8>>> {
    text.split('/').map(decode).collect()
}

/// Components as one relative path.
pub(super) fn join(path: &Path) -> std::path::PathBuf {
    path.iter().map(|c| OsStr::from_bytes(c)).collect()
}

/// A path for people.
pub(super) fn show(path: &Path) -> String {
    join(path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_name_survives_its_spelling(name: Vec<u8>) {
            let text = encode(&name);
            prop_assert!(text.bytes().all(|b| b.is_ascii_graphic() && b != b'/'));
            prop_assert_eq!(decode(&text), Some(name));
        }

        #[test]
        fn decoding_never_panics(text: String) {
            let _ = decode(&text);
        }
    }

    #[test]
    fn a_distributed_checkpoint_is_finished_by_its_metadata() {
        let why = |names: &[&str]| without_metadata(&names.iter().map(PathBuf::from).collect::<Vec<_>>());
        assert!(why(&["step-1/__0_0.distcp", "step-2/.metadata", "step-2/__0_0.distcp"]).is_some());
        assert!(why(&["__0_0.distcp"]).is_some());
        assert!(why(&["__0_0.distcp", "__1_0.distcp", ".metadata"]).is_none());
        // Where each rank writes its own.
        assert!(why(&["a/__0_0.distcp", "a/__0.metadata"]).is_none());
        assert!(why(&["other.distcp", "model.pt"]).is_none());
    }

    #[test]
    fn unfinished_work_is_known_by_its_name() {
        for name in [
            "a.tmp",
            "m.pt.part",
            "x.incomplete",
            "tmp-checkpoint-5",
            ".model.pt.Ab12Cd",
            ".hidden",
        ] {
            assert!(unfinished(name.as_bytes()), "{name}");
        }
        for name in [
            "model.pt",
            "tmp",
            "tmpfile",
            "a.tmp.pt",
            "part",
            "checkpoint-5",
            "incomplete",
        ] {
            assert!(!unfinished(name.as_bytes()), "{name}");
        }
        for name in [".model.pt.Ab12Cd", ".part-0.bin.sziu5h", ".tmpAb12Cd", ".~tmp~"] {
            assert!(unfinished_inside(name.as_bytes()), "{name}");
        }
        for name in [
            ".model.config",
            ".gitattributes",
            ".tmpfiles",
            ".a.b",
            "..Ab12Cd",
            "model.Ab12Cd",
            ".x.Ab12Cd7",
        ] {
            assert!(!unfinished_inside(name.as_bytes()), "{name}");
        }
        assert!(!unfinished_inside(b".metadata"));
        assert!(unfinished_inside(b".metadata.tmp"));
    }

    #[test]
    fn shards_are_known_by_their_names() {
        let set = |n: &str| shard_set(n.as_bytes());
        assert_eq!(
            set("model-00001-of-00003.safetensors"),
            set("model-00003-of-00003.safetensors")
        );
        assert_ne!(
            set("model-00001-of-00003.safetensors"),
            set("model-00001-of-00004.safetensors")
        );
        assert!(set("model.safetensors").is_none() && set("best-of-7.pt").is_none() && set("-of-").is_none());
    }

    #[test]
    fn paths_never_lead_out() {
        for bad in ["", ".", "..", "a/b", "a\0b"] {
            assert_eq!(
                check(&[b"main".to_vec(), bad.as_bytes().to_vec()])
                    .unwrap_err()
                    .errno(),
                libc::EINVAL
            );
        }
        assert_eq!(check(&[vec![b'x'; 256]]).unwrap_err().errno(), libc::ENAMETOOLONG);
        assert!(check(&[b"main".to_vec(), vec![0xff; 255]]).is_ok());
    }
}

//! Who keeps a mount busy: a scan of /proc, for the message that says so.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Processes named in a message; more are counted.
const SHOWN: usize = 8;

/// What keeps `mnt` busy, one line each: other mounts inside it, and processes (number, program, what it uses) that this user may
/// look at.
pub(super) fn holders(mnt: &Path) -> Vec<String> {
    let mounts = fs::read("/proc/self/mountinfo").unwrap_or_default();
    let mut lines = inside(&mounts, mnt);
    let mut more = 0usize;
    let own = std::process::id();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name
            .to_str()
            .and_then(|n| n.parse::<u32>().ok())
            .filter(|p| *p != own)
        else {
            continue;
        };
        if let Some(what) = uses(&entry.path(), mnt) {
            if lines.len() == SHOWN {
                more += 1;
                continue;
            }
            let program = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
            lines.push(format!(
                "process {pid} ({}) uses {}",
                program.trim_end(),
                what.display()
            ));
        }
    }
    if more > 0 {
        lines.push(format!("and {more} more"));
    }
    lines
}

/// Mounts that lie inside `mnt`, from what /proc tells of all mounts.
fn inside(mountinfo: &[u8], mnt: &Path) -> Vec<String> {
    let places = mountinfo.split(|b| *b == b'\n').filter_map(|line| {
        let place = line.split(|b| *b == b' ').nth(4)?;
        Some(PathBuf::from(OsStr::from_bytes(&unescaped(place))))
    });
    places
        .filter(|p| p.starts_with(mnt) && p != mnt)
        .map(|p| format!("{} is mounted inside it", p.display()))
        .collect()
}

/// A path of /proc, where blanks and backslashes are written as octal numbers.
fn unescaped(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        let number = after.get(..3).and_then(|d| std::str::from_utf8(d).ok());
        match number.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                out.push(byte);
                rest = &after[3..];
            }
            _ => {
                out.push(*first);
                rest = after;
            }
        }
    }
    out
}

/// What a process uses below `mnt`: its directory or program, an open file, a mapping.
fn uses(process: &Path, mnt: &Path) -> Option<PathBuf> {
    let below = |p: PathBuf| p.starts_with(mnt).then_some(p);
    for link in ["cwd", "root", "exe"] {
        if let Some(path) = fs::read_link(process.join(link)).ok().and_then(below) {
            return Some(path);
        }
    }
    for fd in fs::read_dir(process.join("fd")).into_iter().flatten().flatten() {
        if let Some(path) = fs::read_link(fd.path()).ok().and_then(below) {
            return Some(path);
        }
    }
    let maps = fs::read(process.join("maps")).ok()?;
    maps.split(|b| *b == b'\n').find_map(|line| {
        let start = line.iter().position(|b| *b == b'/')?;
        below(PathBuf::from(OsStr::from_bytes(&line[start..])))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn finds_mounts_inside() {
        let mountinfo = b"1 0 0:1 / / rw - ext4 d rw\n2 1 0:2 / /a\\040b rw - fuse s rw\n3 2 0:3 / /a\\040b/c rw - tmpfs t rw\n";
        assert_eq!(
            inside(mountinfo, Path::new("/a b")),
            ["/a b/c is mounted inside it"]
        );
    }

    #[test]
    fn finds_a_process_by_its_directory() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap();
        let mut child = Command::new("sleep")
            .arg("30")
            .current_dir(&path)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let found = holders(&path);
        child.kill().unwrap();
        child.wait().unwrap();
        let want = format!("process {} (sleep) uses {}", child.id(), path.display());
        assert_eq!(found, [want]);
        assert!(holders(&path).is_empty());
    }
}

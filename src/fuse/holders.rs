//! Who keeps a mount busy: a scan of /proc, for the message that says so.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Processes named in a message; more are counted.
const SHOWN: usize = 8;

/// Processes that use something below `mnt`, one line each: number, program, what it uses. Only those that this user may look at.
pub(super) fn holders(mnt: &Path) -> Vec<String> {
    let mut lines = Vec::new();
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

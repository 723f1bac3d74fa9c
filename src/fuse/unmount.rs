//! Taking a mount away: on request, from under those who use it, or because its process has died.

use super::attach::helper;
use super::control;
use super::holders::holders;
use crate::error::{Error, IoContext, Kind, Result};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount as sys_unmount};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// Dead mounts on one mount point that are cleared before giving up.
const DEAD: usize = 16;
/// How long `unmount` says nothing while entries settle.
const LONG: Duration = Duration::from_secs(3);
/// How long `unmount` waits for the process behind a mount to end.
pub(super) const END: Duration = Duration::from_secs(60);

/// Unmounts what [`super::mount`] mounted, from any process: has what has settled committed, takes the mount away, and waits for its
/// process to end. The answer tells, line by line, what is left in staging and why.
///
/// Errors: `NotFound` if no store is mounted there, `Busy`, with who uses it, if it is in use.
pub fn unmount(mnt: &Path) -> Result<Vec<String>> {
    if is_dead(mnt) {
        clear_dead(mnt)?;
        return Ok(vec![format!(
            "{}: the process behind the mount had ended; the mount point is clear now",
            mnt.display()
        )]);
    }
    let none = || {
        Error::new(
            Kind::NotFound,
            format!("no store is mounted on {}", mnt.display()),
        )
    };
    if matches!(rustix::fs::statvfs(mnt), Err(Errno::ACCESS)) {
        let why = format!(
            "{} belongs to another user, who lets nobody else in: `zspace umount` it as that user",
            mnt.display()
        );
        return Err(Error::new(Kind::Refused, why));
    }
    let store = xattr(mnt, "user.zspace.store").ok_or_else(none)?;
    if xattr(mnt, "user.zspace.path").is_none_or(|p| !p.is_empty()) {
        return Err(none());
    }
    let mnt = mnt.canonicalize().doing(|| format!("find {}", mnt.display()))?;
    let mut left = Vec::new();
    if xattr(&mnt, "user.zspace.staging").as_deref() == Some(b"owner") {
        let store = PathBuf::from(OsStr::from_bytes(&store));
        let (done, waiting) = std::sync::mpsc::channel::<()>();
        let said = std::thread::spawn(move || {
            if waiting.recv_timeout(LONG) == Err(RecvTimeoutError::Timeout) {
                log::warn!(
                    "waiting for what is staged to settle and be committed (Ctrl-C leaves the mount as it is)"
                );
            }
        });
        let answer = control::ask(&store, &serde_json::json!({"do": "drain"}));
        drop(done);
        let _ = said.join();
        left = lines(&answer?);
    }
    let pid = xattr(&mnt, "user.zspace.pid").and_then(|p| String::from_utf8(p).ok());
    take_away(&mnt, false)?;
    let start = Instant::now();
    // Should it not end in time, the mount is gone all the same.
    while pid.as_deref().is_some_and(runs) && start.elapsed() < END {
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(left)
}

/// Whether it is the mount point of a mount whose process has ended. Asks with statfs, which the kernel always passes on: it
/// answers a stat of the root from what it remembers.
pub(super) fn is_dead(mnt: &Path) -> bool {
    matches!(rustix::fs::statvfs(mnt), Err(Errno::NOTCONN))
}

/// Whether a process of this user or another is running: neither gone nor a zombie.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|s| s != 'Z' && s != 'X')
}

pub(super) fn clear_dead(mnt: &Path) -> Result<()> {
    for _ in 0..DEAD {
        if !is_dead(mnt) {
            return Ok(());
        }
        take_away(mnt, true)?;
        log::info!(
            "cleared the mount point {} of a mount whose process had ended",
            mnt.display()
        );
    }
    Err(Error::new(
        Kind::Busy,
        format!("{} stays a dead mount point", mnt.display()),
    ))
}

/// Takes a mount away; with `detach`, even from under those who use it. A mount that is gone already is as good.
pub(super) fn take_away(mnt: &Path, detach: bool) -> Result<()> {
    let flags = if detach {
        UnmountFlags::DETACH
    } else {
        UnmountFlags::empty()
    };
    let what = || format!("unmount {}", mnt.display());
    match sys_unmount(mnt, flags) {
        Ok(()) | Err(Errno::INVAL) => return Ok(()),
        Err(Errno::BUSY) => return Err(busy(mnt)),
        // Not root: the set-user-id helper does it.
        Err(Errno::PERM) => {}
        Err(e) => return Err(e).doing(what),
    }
    let Some(helper) = helper() else {
        let why = format!("{}: needs root or fusermount3 (package fuse3)", what());
        return Err(Error::new(Kind::Unsupported, why));
    };
    let mut command = Command::new(helper);
    command.arg("-u").args(detach.then_some("-z")).arg("--").arg(mnt);
    let output = command
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .doing(what)?;
    // It tells what went wrong by its words alone.
    let message = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
    match output.status.success() || message.contains("not found in /etc/mtab") {
        true => Ok(()),
        false if message.contains("busy") => Err(busy(mnt)),
        false => Err(Error::new(Kind::Io, format!("{}: {message}", what()))),
    }
}

fn busy(mnt: &Path) -> Error {
    let mut message = format!("{} is in use", mnt.display());
    let mut lines = holders(mnt);
    if lines.is_empty() {
        lines.push(match rustix::process::geteuid().is_root() {
            true => "by a process that was between two files just now, or that runs elsewhere (a container)"
                .into(),
            false => {
                "by processes that this user may not look at (as root, `zspace umount` names them)".into()
            }
        });
    }
    for line in lines {
        message.push_str("\n  ");
        message.push_str(&line);
    }
    Error::new(Kind::Busy, message)
}

/// An extended attribute of a path.
pub(super) fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 4096];
    let len = rustix::fs::getxattr(path, name, &mut value[..]).ok()?;
    value.truncate(len);
    Some(value)
}

/// What stays in staging, as the owner of it told.
fn lines(answer: &serde_json::Value) -> Vec<String> {
    let entries = answer.get("left").and_then(|l| l.as_array());
    let text =
        |v: &serde_json::Value, key: &str| v.get(key).and_then(|s| s.as_str()).unwrap_or_default().to_owned();
    let line = |v: &serde_json::Value| {
        let (branch, name, state, reason) = (
            text(v, "branch"),
            text(v, "name"),
            text(v, "state"),
            text(v, "reason"),
        );
        let why = if reason.is_empty() {
            state
        } else {
            format!("{state}: {reason}")
        };
        format!("{branch}/{name} stays in staging, {why}")
    };
    entries.into_iter().flatten().map(line).collect()
}

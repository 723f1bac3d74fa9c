//! Getting a directory mounted: by mount(2) where this process may do so, else by the set-user-id helper fusermount3.

use super::session::MountOptions;
use crate::error::{Error, IoContext, Kind, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
};
use std::ffi::{CString, OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const DEVICE: &str = "/dev/fuse";
/// The helper under its name of today and that of FUSE 2.
const HELPERS: [&str; 2] = ["fusermount3", "fusermount"];

/// A mount that nobody serves yet.
pub(super) struct Attached {
    /// Where the kernel puts its requests.
    pub(super) device: OwnedFd,
    /// Whether this process can open the device by itself, which it takes to have a descriptor for each thread.
    pub(super) opens_device: bool,
}

/// Mounts on `mnt`, a directory. `store` is shown as the mount's source.
///
/// Errors say what is missing and how to get it.
pub(super) fn attach(mnt: &Path, store: &Path, options: &MountOptions) -> Result<Attached> {
    let opened = rustix::fs::open(DEVICE, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let opens_device = opened.is_ok();
    match opened {
        Ok(device) => match by_system_call(&device, mnt, store, options) {
            Ok(()) => {
                return Ok(Attached { device, opens_device });
            }
            Err(Errno::PERM) => {}
            Err(Errno::NODEV) => {
                return Err(failed(
                    mnt,
                    Kind::Unsupported,
                    "this kernel has no FUSE: `modprobe fuse`",
                ));
            }
            Err(e) => return Err(e).doing(|| format!("mount {}", mnt.display())),
        },
        Err(Errno::NOENT | Errno::NXIO | Errno::NODEV) => {
            let why = "there is no /dev/fuse. On a machine: `modprobe fuse`, as root; a container must be given it \
                       (docker run --device /dev/fuse --cap-add SYS_ADMIN)";
            return Err(failed(mnt, Kind::Unsupported, why));
        }
        Err(Errno::ACCESS | Errno::PERM) => {}
        Err(e) => return Err(e).doing(|| format!("open {DEVICE}")),
    }
    let device = by_helper(mnt, store, options, opens_device)?;
    Ok(Attached { device, opens_device })
}

fn failed(mnt: &Path, kind: Kind, why: impl std::fmt::Display) -> Error {
    Error::new(kind, format!("cannot mount {}: {why}", mnt.display()))
}

fn by_system_call(
    device: &OwnedFd,
    mnt: &Path,
    store: &Path,
    options: &MountOptions,
) -> rustix::io::Result<()> {
    let root = rustix::fs::stat(mnt)?;
    let mut data = format!(
        "fd={},rootmode={:o},user_id={},group_id={},default_permissions,subtype=zspace",
        device.as_raw_fd(),
        root.st_mode,
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
    );
    if options.allow_other {
        data += ",allow_other";
    }
    let data = CString::new(data).map_err(|_| Errno::INVAL)?;
    let mut flags = MountFlags::NODEV | MountFlags::NOSUID | MountFlags::NOATIME;
    if options.read_only {
        flags |= MountFlags::RDONLY;
    }
    if options.no_exec {
        flags |= MountFlags::NOEXEC;
    }
    rustix::mount::mount(store, mnt, "fuse", flags, data.as_c_str())
}

fn by_helper(mnt: &Path, store: &Path, options: &MountOptions, opens_device: bool) -> Result<OwnedFd> {
    let what = || format!("mount {}", mnt.display());
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .doing(what)?;
    let Some(helper) = helper() else {
        let why = "it takes fusermount3 for all but root: install the package fuse3";
        return Err(failed(mnt, Kind::Unsupported, why));
    };
    let mut arguments = OsString::from("nodev,nosuid,noatime,default_permissions,subtype=zspace,fsname=");
    arguments.push(escaped(store));
    for (set, option) in [
        (options.read_only, ",ro"),
        (options.no_exec, ",noexec"),
        (options.allow_other, ",allow_other"),
    ] {
        arguments.push(if set { option } else { "" });
    }
    // Inherited by the helper alone: this process starts no other meanwhile.
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty()).doing(what)?;
    let child = Command::new(&helper)
        .arg("-o")
        .arg(arguments)
        .arg("--")
        .arg(mnt)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .doing(|| format!("run {}", helper.display()))?;
    drop(theirs);
    let received = receive(&ours);
    let output = child.wait_with_output().doing(what)?;
    match received.doing(what)? {
        Some(device) => Ok(device),
        None => {
            let said = String::from_utf8_lossy(&output.stderr);
            Err(failed(mnt, Kind::Refused, explained(said.trim(), opens_device)))
        }
    }
}

/// The descriptor that the helper sends; none if it ended without.
fn receive(socket: &OwnedFd) -> rustix::io::Result<Option<OwnedFd>> {
    let mut byte = [0u8; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(
            socket,
            &mut [std::io::IoSliceMut::new(&mut byte)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
    })?;
    if message.bytes == 0 {
        return Ok(None);
    }
    Ok(control.drain().find_map(|m| match m {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    }))
}

/// What fusermount3 said, with what to do about it.
fn explained(said: &str, opens_device: bool) -> String {
    let advice = [
        (
            "user_allow_other",
            "--allow-other takes a line `user_allow_other` in /etc/fuse.conf, which root can write",
        ),
        (
            "no write access to mountpoint",
            "mount on a directory that is yours and that you may write",
        ),
        (
            "not owned by user",
            "mount on a directory that is yours and that you may write",
        ),
        (
            "too many FUSE filesystems",
            "unmount some, or raise mount_max in /etc/fuse.conf",
        ),
        (
            "device not found",
            "is there a /dev/fuse? `modprobe fuse`, as root; a container must be given it",
        ),
        (
            "ermission denied",
            "/dev/fuse is not for all users here: `chmod 666 /dev/fuse`, as root, as systems with udev have it",
        ),
        (
            "not permitted",
            "fusermount3 must be set-user-id root (package fuse3), and neither no_new_privs nor a container without \
             SYS_ADMIN in its way",
        ),
    ];
    let advice = advice.iter().find(|(part, _)| said.contains(part)).map(|a| a.1);
    match (said.is_empty(), advice) {
        (true, _) if !opens_device => {
            "fusermount3 gave up without a word, and /dev/fuse cannot be opened without it".into()
        }
        (true, _) => "fusermount3 gave up without a word".into(),
        (false, Some(advice)) => format!("{said}\n  ({advice})"),
        (false, None) => said.into(),
    }
}

/// The set-user-id helper: `$FUSERMOUNT_PATH`, else where `$PATH` has it, else where systems keep it.
pub(super) fn helper() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("FUSERMOUNT_PATH").filter(|p| !p.is_empty()) {
        return Some(PathBuf::from(path)).filter(|p| p.is_file());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let usual = ["/usr/bin", "/bin", "/usr/local/bin", "/run/wrappers/bin"].map(PathBuf::from);
    // A relative directory in the path would be another one in every place.
    let places: Vec<_> = std::env::split_paths(&path)
        .filter(|p| p.is_absolute())
        .chain(usual)
        .collect();
    let all = HELPERS
        .iter()
        .flat_map(|name| places.iter().map(move |p| p.join(name)));
    all.into_iter().find(|p| p.is_file())
}

/// A path for a list of options: the helper takes backslashes before commas and backslashes.
fn escaped(path: &Path) -> OsString {
    let mut out = Vec::new();
    for b in path.as_os_str().as_bytes() {
        if matches!(b, b',' | b'\\') {
            out.push(b'\\');
        }
        out.push(*b);
    }
    OsStr::from_bytes(&out).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commas_in_a_path_do_not_end_an_option() {
        assert_eq!(escaped(Path::new("/a,b\\c")), OsStr::new("/a\\,b\\\\c"));
    }

    #[test]
    fn a_refusal_comes_with_what_to_do() {
        let said =
            "fusermount3: option allow_other only allowed if 'user_allow_other' is set in /etc/fuse.conf";
        let got = explained(said, true);
        assert!(
            got.starts_with(said) && got.contains("a line `user_allow_other`"),
            "{got}"
        );
        assert_eq!(
            explained("fusermount3: something new", true),
            "fusermount3: something new"
        );
        assert!(!explained("", false).is_empty());
    }
}

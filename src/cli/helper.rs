//! What mount(8) calls for the type `fuse.zspace`: `mount.fuse.zspace STORE MNT [-sfnv] [-o OPTIONS]`, a link to this program, or,
//! by way of libfuse's mount.fuse3, `zspace STORE MNT -o OPTIONS`.

use super::{Context, mount, show};
use crate::error::{Error, Kind, Result};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit codes as mount(8) documents them.
const WRONG: u8 = 1;
const FAILED: u8 = 32;

/// Words that mount(8), systemd and others put among the options for themselves, and what is so anyway: a zspace mount is always
/// nosuid, nodev, noatime and default_permissions (libfuse's helper adds `dev,suid` of its own accord where root mounts).
const NOTHING: &[&str] = &[
    "rw",
    "defaults",
    "auto",
    "noauto",
    "user",
    "nouser",
    "users",
    "owner",
    "group",
    "_netdev",
    "nofail",
    "async",
    "exec",
    "suid",
    "nosuid",
    "dev",
    "nodev",
    "atime",
    "noatime",
    "diratime",
    "nodiratime",
    "relatime",
    "norelatime",
    "strictatime",
    "nostrictatime",
    "lazytime",
    "nolazytime",
    "silent",
    "loud",
    "default_permissions",
];
/// The same, with a value.
const NOTHING_WITH_VALUE: &[&str] = &["user", "comment", "fsname", "subtype"];

/// Whether this process was called as mount(8) does it.
pub(super) fn is_called(args: &[OsString]) -> bool {
    let name = args.first().and_then(|a| Path::new(a).file_name());
    let as_helper = name.is_some_and(|n| n.as_bytes().starts_with(b"mount."));
    // No verb is an absolute path.
    as_helper || args.get(1).is_some_and(|a| a.as_bytes().starts_with(b"/"))
}

/// Mounts in the background, as mount(8) expects it: done when the mount is usable.
pub(super) fn main(args: &[OsString]) -> ExitCode {
    match parse(&args[1..]).and_then(|call| if call.fake { Ok(()) } else { call.mount() }) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("mount.fuse.zspace: {e}");
            ExitCode::from(if e.kind() == Kind::Usage { WRONG } else { FAILED })
        }
    }
}

/// A call, taken apart.
struct Call {
    store: PathBuf,
    args: mount::Args,
    fake: bool,
}

impl Call {
    fn mount(&self) -> Result<()> {
        let context = Context {
            store: Some(self.store.clone()),
        };
        // Not made here: of a disk that is not mounted yet, or of a slip in fstab, an empty store would be made out of sight.
        drop(context.open()?);
        mount::run(&context, &self.args)
    }
}

fn wrong(why: impl Into<String>) -> Error {
    Error::new(Kind::Usage, why)
}

fn parse(args: &[OsString]) -> Result<Call> {
    let mut places: Vec<PathBuf> = Vec::new();
    let mut options: Vec<&OsStr> = Vec::new();
    let (mut sloppy, mut fake) = (false, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match arg.as_bytes() {
            b"-o" => options.push(rest.next().ok_or_else(|| wrong("-o takes options"))?),
            b"-t" => {
                rest.next();
            }
            b"-N" => return Err(wrong("mounting in another namespace (-N) is not supported")),
            [b'-', b'o', more @ ..] => options.push(OsStr::from_bytes(more)),
            [b'-', flags @ ..] if !flags.is_empty() => {
                for flag in flags {
                    match flag {
                        b's' => sloppy = true,
                        b'f' => fake = true,
                        b'n' | b'v' | b'r' | b'w' => {}
                        _ => return Err(wrong(format!("what is {}?", arg.display()))),
                    }
                    if *flag == b'r' {
                        options.push(OsStr::new("ro"));
                    }
                }
            }
            _ => places.push(PathBuf::from(arg)),
        }
    }
    let [store, mnt] = places.as_slice() else {
        return Err(wrong("usage: mount.fuse.zspace STORE MNT [-sfnv] [-o OPTIONS]"));
    };
    let mut mount = mount::Args::background_of(mnt.clone());
    for list in options {
        for option in list.as_bytes().split(|b| *b == b',').filter(|o| !o.is_empty()) {
            apply(&mut mount, &String::from_utf8_lossy(option), sloppy)?;
        }
    }
    Ok(Call {
        store: store.clone(),
        args: mount,
        fake,
    })
}

fn apply(args: &mut mount::Args, option: &str, sloppy: bool) -> Result<()> {
    let (name, value) = match option.split_once('=') {
        Some((name, value)) => (name, Some(value)),
        None => (option, None),
    };
    let bad = |why: String| wrong(format!("option {option}: {why}"));
    match (name, value) {
        ("ro", None) => args.read_only = true,
        ("noexec", None) => args.no_exec = true,
        ("allow_other", None) => args.allow_other = true,
        ("settle", Some(v)) => args.settle = mount::parse_seconds(v).map_err(bad)?,
        ("settle_dir" | "settle-dir", Some(v)) => args.settle_dir = mount::parse_seconds(v).map_err(bad)?,
        ("memory", Some(v)) => args.memory = show::parse_size(v).map_err(bad)?,
        ("cache", Some(v)) => args.cache = show::parse_size(v).map_err(bad)?,
        ("no_passthrough" | "no-passthrough", None) => args.no_passthrough = true,
        ("threads", Some(v)) => match v.parse() {
            Ok(n @ 1..=1024) => args.threads = Some(n),
            _ => return Err(bad("write a number from 1 to 1024".into())),
        },
        ("settle" | "settle_dir" | "settle-dir" | "memory" | "cache" | "threads", None) => {
            return Err(bad(format!("write {name}=…")));
        }
        ("remount", None) => {
            return Err(bad(
                "a zspace mount is changed by unmounting it and mounting it again".into(),
            ));
        }
        (_, None) if NOTHING.contains(&name) => {}
        (_, Some(_)) if NOTHING_WITH_VALUE.contains(&name) => {}
        _ if name.starts_with("x-") || name.starts_with("X-") || sloppy => {}
        _ => {
            return Err(bad(
                "not known. There are settle=S, settle_dir=S, memory=N, cache=N, threads=N, no_passthrough, allow_other, ro, noexec, \
                 and those that mount(8) itself understands"
                    .into(),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn call(line: &str) -> Result<Call> {
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        parse(&args)
    }

    #[test]
    fn takes_what_mount_passes() {
        let c = call(
            "/s /m -n -v -o ro,noexec,nosuid,nodev,settle=2,memory=1G,allow_other,nofail,_netdev,user,x-a=b",
        )
        .unwrap();
        assert_eq!(
            (c.store.as_path(), c.args.mnt.as_path()),
            (Path::new("/s"), Path::new("/m"))
        );
        assert!(c.args.read_only && c.args.no_exec && c.args.allow_other && c.args.daemon && !c.fake);
        assert_eq!((c.args.settle, c.args.memory), (Duration::from_secs(2), 1 << 30));
        assert!(!call("/s /m -o rw,dev,suid").unwrap().args.read_only);
        assert!(call("/s /m -f").unwrap().fake);
        assert!(call("/s /m -t fuse.zspace").is_ok());
        assert!(call("/s /m -s -o whatever=1").is_ok());
    }

    #[test]
    fn refuses_what_it_does_not_understand() {
        for line in [
            "/s",
            "/s /m /n",
            "/s /m -o",
            "/s /m -x",
            "/s /m -N 1",
            "/s /m -o whatever",
            "/s /m -o ro=1",
            "/s /m -o settle",
            "/s /m -o settle=x",
            "/s /m -o memory=x",
            "/s /m -o ro,remount",
        ] {
            assert_eq!(call(line).err().map(|e| e.kind()), Some(Kind::Usage), "{line}");
        }
    }

    #[test]
    fn knows_when_mount_calls() {
        let called = |line: &str| is_called(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        assert!(called("/sbin/mount.fuse.zspace s /m"));
        assert!(called("zspace /s /m -o rw"));
        assert!(!called("zspace mount /m") && !called("/usr/bin/zspace") && !called("zspace --store /s ls"));
    }
}

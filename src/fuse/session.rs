//! Mounting and unmounting: from a store and an empty directory to a served mount, and back.

use super::control::{self, Control};
use super::door::DoorFs;
use super::files::Files;
use super::holders::holders;
use super::staging::{Settle, Staging};
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::{Store, Timestamp};
use fuser::{Config, MountOption, Session, SessionACL};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount as sys_unmount};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Threads that take requests from the kernel.
const EVENT_THREADS: usize = 2;
/// The kernel's readahead of a file, in KiB. More would help sequential reads little and make the page faults of a scattered
/// reader rebuild more than it wants.
const READAHEAD_KIB: u32 = 4096;
/// Dead mounts on one mount point that are cleared before giving up.
const DEAD: usize = 16;
/// How long `unmount` waits for the process behind a mount to end.
const END: Duration = Duration::from_secs(60);

/// How a mount behaves.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// Quiet time after which a staged file is committed.
    pub settle: Duration,
    /// Quiet time after which a staged directory is committed.
    pub settle_dir: Duration,
    /// Let other users in.
    pub allow_other: bool,
    /// Take no writes: `staging/` only shows what is there.
    pub read_only: bool,
    /// Threads that serve reads.
    pub threads: usize,
    /// Bytes of whole files to keep in STORE/cache; 0: none.
    pub cache: u64,
    /// Let the kernel read and write files in `staging/` and the cache by itself, where it can.
    pub passthrough: bool,
}

impl Default for MountOptions {
    fn default() -> Self {
        MountOptions {
            settle: Duration::from_secs(2),
            settle_dir: Duration::from_secs(10),
            allow_other: false,
            read_only: false,
            threads: std::thread::available_parallelism().map_or(4, usize::from),
            cache: 8 << 30,
            passthrough: true,
        }
    }
}

/// Mounts a store on a directory (made if absent) and serves it until it is unmounted. `ready` is called once the mount is usable.
///
/// SIGINT, SIGTERM and SIGHUP end it in order: no new writes are taken in, what has settled is committed, the mount is taken away
/// as soon as nothing uses it. A second signal takes it away at once, from under whoever uses it.
///
/// Errors: `Usage` if mount point and store lie within each other, `Busy` if a store is mounted there already, else what the
/// system says. A mount point whose process died is cleared first.
pub fn mount(
    store: Store,
    mnt: &Path,
    options: &MountOptions,
    ready: impl FnOnce() + Send + 'static,
) -> Result<()> {
    let mnt = prepare(&store, mnt)?;
    let settle = Settle {
        files: options.settle,
        dirs: options.settle_dir,
    };
    let staging = open_staging(&store, settle, options.read_only)?;
    if !staging.is_owner() && !options.read_only {
        log::warn!("another mount owns this store's staging/: it is read-only here");
    }
    let control = if staging.is_owner() {
        Some(Control::serve(&staging)?)
    } else {
        None
    };
    let (uid, gid) = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    if options.cache > 0
        && !options.read_only
        && let Err(e) = store.keep_whole_files(options.cache)
    {
        log::warn!("no file is kept whole: {e}");
    }
    let files = Arc::new(Files::new(store.clone(), staging.clone(), uid, gid, now()));
    files.warm.start()?;
    let door = DoorFs::new(files.clone(), options.threads, options.passthrough)?;
    let alone = only_here(&mnt)?;
    let session = Session::new(door, &mnt, &config(options)).map_err(|e| {
        let hint = match e.kind() {
            std::io::ErrorKind::NotFound => " (is the fuse kernel module loaded?)",
            std::io::ErrorKind::PermissionDenied => {
                " (may you use /dev/fuse? --allow-other needs user_allow_other in /etc/fuse.conf)"
            }
            _ => "",
        };
        Error::io(format!("mount {}{hint}", mnt.display()), e)
    })?;
    drop(alone);
    let signals = end_on_signals(mnt.clone(), staging.clone(), options)?;
    let at = mnt.clone();
    let announce = move || {
        // Answered by the session below: from then on the mount is usable.
        match rustix::fs::stat(&at) {
            Ok(stat) => set_readahead(stat.st_dev),
            Err(e) => log::warn!("the new mount {} cannot be read: {e}", at.display()),
        }
        ready();
    };
    spawn("zspace-ready", announce)?;
    log::info!("{} is mounted on {}", store.dir().display(), mnt.display());
    let served = session.run().doing(|| format!("serve {}", mnt.display()));
    signals.close();
    // Without it a new mount knows that this one is ending, and waits.
    drop(control);
    // Unmounted by other means than ours, what was written in time is committed all the same.
    drain(&staging, options);
    staging.stop();
    files.warm.stop();
    served.and(store.close())
}

/// Unmounts what [`mount`] mounted, from any process: has what has settled committed, takes the mount away, and waits for its
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
    let store = xattr(mnt, "user.zspace.store").ok_or_else(none)?;
    if xattr(mnt, "user.zspace.path").is_none_or(|p| !p.is_empty()) {
        return Err(none());
    }
    let mnt = mnt.canonicalize().doing(|| format!("find {}", mnt.display()))?;
    let mut left = Vec::new();
    if xattr(&mnt, "user.zspace.staging").as_deref() == Some(b"owner") {
        let store = PathBuf::from(OsStr::from_bytes(&store));
        let answer = control::ask(&store, &serde_json::json!({"do": "drain"}))?;
        left = lines(&answer);
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

fn config(options: &MountOptions) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("zspace".into()),
        // fuser's own Subtype does not reach the kernel when root mounts.
        MountOption::CUSTOM("subtype=zspace".into()),
        MountOption::DefaultPermissions,
        MountOption::NoAtime,
        MountOption::NoDev,
        MountOption::NoSuid,
    ];
    if options.read_only {
        config.mount_options.push(MountOption::RO);
    }
    config.acl = if options.allow_other {
        SessionACL::All
    } else {
        SessionACL::Owner
    };
    config.n_threads = Some(EVENT_THREADS);
    config.clone_fd = true;
    config
}

/// Takes the mount point for as long as it is being mounted on: of several mounts made on it at once, one comes first and the
/// others find it taken.
fn only_here(mnt: &Path) -> Result<OwnedFd> {
    let what = || format!("take the mount point {}", mnt.display());
    let dir = rustix::fs::open(
        mnt,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )
    .doing(what)?;
    rustix::fs::flock(&dir, rustix::fs::FlockOperation::LockExclusive).doing(what)?;
    let (held, now) = (
        rustix::fs::fstat(&dir).doing(what)?,
        rustix::fs::stat(mnt).doing(what)?,
    );
    if (held.st_dev, held.st_ino) != (now.st_dev, now.st_ino) {
        return Err(Error::new(
            Kind::Busy,
            format!("{} was mounted on just now", mnt.display()),
        ));
    }
    Ok(dir)
}

/// Makes the mount point fit to be mounted on, and gives its true path.
fn prepare(store: &Store, mnt: &Path) -> Result<PathBuf> {
    if is_dead(mnt) {
        clear_dead(mnt)?;
    }
    std::fs::create_dir_all(mnt).doing(|| format!("make the mount point {}", mnt.display()))?;
    let mnt = mnt.canonicalize().doing(|| format!("find {}", mnt.display()))?;
    let dir = store.dir();
    let dir = dir.canonicalize().doing(|| format!("find {}", dir.display()))?;
    if mnt.starts_with(&dir) || dir.starts_with(&mnt) {
        let (mnt, dir) = (mnt.display(), dir.display());
        let why = format!("the mount point {mnt} and the store {dir} may not lie within each other");
        return Err(Error::new(Kind::Usage, why));
    }
    if xattr(&dir, "user.zspace.store").is_some() {
        let why = format!("the store {} lies inside the mount of a store", dir.display());
        return Err(Error::new(Kind::Usage, why));
    }
    if xattr(&mnt, "user.zspace.path").is_some_and(|p| p.is_empty()) {
        return Err(Error::new(
            Kind::Busy,
            format!("a store is mounted on {} already", mnt.display()),
        ));
    }
    Ok(mnt)
}

/// Whether it is the mount point of a mount whose process has ended. Asks with statfs, which the kernel always passes on: it
/// answers a stat of the root from what it remembers.
fn is_dead(mnt: &Path) -> bool {
    matches!(rustix::fs::statvfs(mnt), Err(Errno::NOTCONN))
}

/// Whether a process of this user or another is running: neither gone nor a zombie.
fn runs(pid: &str) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|s| s != 'Z' && s != 'X')
}

fn clear_dead(mnt: &Path) -> Result<()> {
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
fn take_away(mnt: &Path, detach: bool) -> Result<()> {
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
    for helper in ["fusermount3", "fusermount"] {
        let mut command = Command::new(helper);
        command.arg("-u").args(detach.then_some("-z")).arg("--").arg(mnt);
        let output = match command.stdin(Stdio::null()).output() {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            output => output.doing(what)?,
        };
        let message = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
        return match output.status.success() {
            true => Ok(()),
            false if message.contains("busy") => Err(busy(mnt)),
            false => Err(Error::new(Kind::Io, format!("{}: {message}", what()))),
        };
    }
    Err(Error::new(
        Kind::Unsupported,
        format!("{}: needs root or fusermount3", what()),
    ))
}

fn busy(mnt: &Path) -> Error {
    let mut message = format!("{} is in use", mnt.display());
    for line in holders(mnt) {
        message.push_str("\n  ");
        message.push_str(&line);
    }
    Error::new(Kind::Busy, message)
}

/// Ends the mount in order on the first signal, at once on the second, and the process on the third.
fn end_on_signals(
    mnt: PathBuf,
    staging: Arc<Staging>,
    options: &MountOptions,
) -> Result<signal_hook::iterator::Handle> {
    let what = || "watch for signals".to_owned();
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP]).doing(what)?;
    let handle = signals.handle();
    let options = options.clone();
    let watch = move || {
        let mut seen = 0u32;
        for signal in signals.forever() {
            seen += 1;
            match seen {
                1 => {
                    let (mnt, staging, options) = (mnt.clone(), staging.clone(), options.clone());
                    if let Err(e) = spawn("zspace-end", move || end(&mnt, &staging, &options)) {
                        log::error!("{e}");
                    }
                }
                2 => match take_away(&mnt, true) {
                    Ok(()) => log::warn!("{} is taken away from under those who use it", mnt.display()),
                    Err(e) => log::error!("{e}"),
                },
                _ => {
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                }
            }
        }
    };
    spawn("zspace-signals", watch)?;
    Ok(handle)
}

/// Opens the staging area. An owner that serves no mount any more is about to end: it is waited for.
fn open_staging(store: &Store, settle: Settle, read_only: bool) -> Result<Arc<Staging>> {
    let staging = Staging::open(store.clone(), settle, read_only)?;
    let Ok(lock) = File::open(staging.dir().join("lock")) else {
        return Ok(staging);
    };
    let start = Instant::now();
    let ending = || {
        let status = control::ask(store.dir(), &serde_json::json!({"do": "status"}));
        matches!(status, Err(e) if e.kind() == Kind::NotFound) && start.elapsed() < END
    };
    if read_only || staging.is_owner() || !ending() {
        return Ok(staging);
    }
    log::info!("waiting for an earlier mount of the store to end");
    drop(staging);
    while lock.try_lock_shared().is_err() && ending() {
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(lock);
    Staging::open(store.clone(), settle, read_only)
}

/// Commits what settles soon, and says what does not.
fn drain(staging: &Staging, options: &MountOptions) {
    match staging.drain(options.settle.max(options.settle_dir) + END) {
        Ok(left) => {
            for entry in left {
                log::warn!(
                    "{}/{} stays in staging: {:?}",
                    entry.branch,
                    entry.name,
                    entry.state
                );
            }
        }
        Err(e) => log::error!("what is in staging stays there: {e}"),
    }
}

/// Commits what has settled and unmounts, as soon as nobody uses the mount.
fn end(mnt: &Path, staging: &Staging, options: &MountOptions) {
    staging.freeze();
    drain(staging, options);
    let mut said = String::new();
    loop {
        match take_away(mnt, false) {
            Ok(()) => return,
            Err(e) if e.kind() == Kind::Busy => {
                if e.to_string() != said {
                    said = e.to_string();
                    log::warn!("{said}\nwaiting for that to end (another signal ends it at once)");
                }
            }
            Err(e) => {
                log::error!("{e}");
                return;
            }
        }
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn set_readahead(device: u64) {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let path = format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb");
    // Needs root; without it reads are slower, not wrong.
    if let Err(e) = std::fs::write(&path, READAHEAD_KIB.to_string()) {
        log::debug!("{path}: {e}");
    }
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<()> {
    let thread = std::thread::Builder::new().name(name.to_owned()).spawn(run);
    thread.map(|_| ()).doing(|| format!("start thread {name}"))
}

/// An extended attribute of a path.
fn xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
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

fn now() -> Timestamp {
    let d = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(d.as_secs()).unwrap_or(i64::MAX),
        nanos: d.subsec_nanos(),
    }
}

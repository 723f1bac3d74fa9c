//! Mounting and unmounting: from a store and an empty directory to a served mount, and back.

use super::attach::attach;
use super::control::{self, Control};
use super::door::DoorFs;
use super::files::Files;
use super::staging::{Settle, Staging};
use super::unmount::{END, clear_dead, is_dead, take_away, xattr};
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::{Store, Timestamp};
use fuser::{Config, Session, SessionACL};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::process::{Resource, Rlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Threads that take requests from the kernel.
const EVENT_THREADS: usize = 2;
/// The kernel's readahead of a file, in KiB. What is wanted next is rebuilt ahead anyway; more than this helps sequential reads
/// little, and a page fault asks for as much around it: a small tensor would take several times as long.
const READAHEAD_KIB: u32 = 512;

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
    /// Let no program in it be run.
    pub no_exec: bool,
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
            no_exec: false,
            threads: std::thread::available_parallelism().map_or(4, usize::from),
            cache: 8 << 30,
            passthrough: true,
        }
    }
}

/// Mounts a store on a directory (made if absent) and serves it until it is unmounted. `ready` is called once the mount is usable.
///
/// SIGINT, SIGTERM and SIGHUP end it in order: no new writes are taken in, what has settled is committed, the mount is taken away
/// as soon as nothing uses it. A second signal takes it away at once, from under whoever uses it, and waits for nothing to settle.
/// `ready` is told what a user should know of the mount.
///
/// Errors: `Usage` if mount point and store lie within each other, `Busy` if a store is mounted there already, else what the
/// system says. A mount point whose process died is cleared first.
pub fn mount(
    store: Store,
    mnt: &Path,
    options: &MountOptions,
    ready: impl FnOnce(Option<&str>) + Send + 'static,
) -> Result<()> {
    let mnt = prepare(&store, mnt)?;
    raise_open_files();
    let settle = Settle {
        files: options.settle,
        dirs: options.settle_dir,
    };
    let staging = open_staging(&store, settle, options.read_only)?;
    let note = (!staging.is_owner() && !options.read_only).then(|| why_read_only(&staging));
    if let Some(note) = &note {
        log::warn!("{note}");
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
    let attached = attach(&mnt, store.dir(), options)?;
    let served = Served {
        device: attached.device.try_clone().doing(|| "keep /dev/fuse".into())?,
        mnt: mnt.clone(),
    };
    let config = config(options, attached.opens_device);
    let session = Session::from_fd(door, attached.device, config.acl, config)
        .doing(|| format!("mount {}", mnt.display()))?;
    drop(alone);
    let signals = end_on_signals(mnt.clone(), staging.clone(), options)?;
    let at = mnt.clone();
    let announce = move || {
        // Answered by the session below: from then on the mount is usable.
        match rustix::fs::stat(&at) {
            Ok(stat) => set_readahead(stat.st_dev),
            Err(e) => log::warn!("the new mount {} cannot be read: {e}", at.display()),
        }
        ready(note.as_deref());
    };
    spawn("zspace-ready", announce)?;
    log::info!("{} is mounted on {}", store.dir().display(), mnt.display());
    let done = session.run().doing(|| format!("serve {}", mnt.display()));
    drop(served);
    // Without it a new mount knows that this one is ending, and waits.
    drop(control);
    // Unmounted by other means than ours, what was written in time is committed all the same.
    drain(&staging, options);
    staging.stop();
    files.warm.stop();
    signals.close();
    done.and(store.close())
}

/// Every file that is open in the mount is open here, too: as many as the system lets us.
fn raise_open_files() {
    let now = rustix::process::getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: now.maximum,
        ..now
    };
    if let Err(e) = rustix::process::setrlimit(Resource::Nofile, most) {
        log::debug!("no more files may be open than before: {e}");
    }
}

fn config(options: &MountOptions, clone_fd: bool) -> Config {
    let mut config = Config::default();
    config.acl = if options.allow_other {
        SessionACL::All
    } else {
        SessionACL::Owner
    };
    config.n_threads = Some(EVENT_THREADS);
    config.clone_fd = clone_fd;
    config
}

/// A mount of this process. When it is dropped it is taken away, if it is still there: nobody would answer any more.
struct Served {
    device: OwnedFd,
    mnt: PathBuf,
}

impl Drop for Served {
    fn drop(&mut self) {
        let mut poll = [PollFd::new(&self.device, PollFlags::empty())];
        let polled = rustix::event::poll(&mut poll, Some(&rustix::event::Timespec::default()));
        // The kernel answers with an error once the mount is gone.
        let gone = polled.is_ok() && poll[0].revents().contains(PollFlags::ERR);
        if !gone && let Err(e) = take_away(&self.mnt, true) {
            log::warn!("{e}");
        }
    }
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

/// The true path of what may not be there yet.
fn to_be(path: &Path) -> Result<PathBuf> {
    let mut there = path;
    loop {
        match there.canonicalize() {
            Ok(found) => {
                let rest = path.strip_prefix(there).unwrap_or(Path::new(""));
                // An empty rest would add a slash.
                return Ok(found.components().chain(rest.components()).collect());
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                there = there.parent().unwrap_or(Path::new("/"));
            }
            Err(e) => return Err(Error::io(format!("find {}", path.display()), e)),
        }
    }
}

/// Whether a store may lie at `dir`, which need not be there yet: not in the mount of another.
///
/// Errors: `Usage` if it may not.
pub fn refuse_nested(dir: &Path) -> Result<()> {
    let there = dir.ancestors().find(|d| d.is_dir());
    if there.is_some_and(|d| xattr(d, "user.zspace.path").is_some()) {
        let why = format!("the store {} lies inside the mount of a store", dir.display());
        return Err(Error::new(Kind::Usage, why));
    }
    Ok(())
}

/// Makes the mount point fit to be mounted on, and gives its true path.
fn prepare(store: &Store, mnt: &Path) -> Result<PathBuf> {
    if is_dead(mnt) {
        clear_dead(mnt)?;
    }
    if std::fs::metadata(mnt).is_ok_and(|m| !m.is_dir()) {
        let why = format!("the mount point {} is not a directory", mnt.display());
        return Err(Error::new(Kind::Usage, why));
    }
    let place = to_be(mnt)?;
    let dir = store.dir();
    let dir = dir.canonicalize().doing(|| format!("find {}", dir.display()))?;
    if place.starts_with(&dir) || dir.starts_with(&place) {
        let (mnt, dir) = (place.display(), dir.display());
        let why = format!("the mount point {mnt} and the store {dir} may not lie within each other");
        return Err(Error::new(Kind::Usage, why));
    }
    refuse_nested(&dir)?;
    std::fs::create_dir_all(mnt).doing(|| format!("make the mount point {}", mnt.display()))?;
    let mnt = mnt.canonicalize().doing(|| format!("find {}", mnt.display()))?;
    if xattr(&mnt, "user.zspace.path").is_some_and(|p| p.is_empty()) {
        return Err(Error::new(
            Kind::Busy,
            format!("a store is mounted on {} already", mnt.display()),
        ));
    }
    if std::fs::read_dir(&mnt).is_ok_and(|mut names| names.next().is_some()) {
        log::warn!(
            "{} is not empty: what it holds is out of sight while mounted",
            mnt.display()
        );
    }
    Ok(mnt)
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
                2 => {
                    staging.give_up();
                    match take_away(&mnt, true) {
                        Ok(()) => log::warn!("{} is taken away from under those who use it", mnt.display()),
                        Err(e) => log::error!("{e}"),
                    }
                }
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

/// Why nothing can be written to staging/ in a mount that should take writes.
fn why_read_only(staging: &Staging) -> String {
    let held = File::open(staging.dir().join("lock")).is_ok_and(|lock| lock.try_lock_shared().is_err());
    match held {
        true => "staging/ is read-only here: another mount of this store takes what is written".to_owned(),
        false => "staging/ is read-only here: this store cannot be written by this user".to_owned(),
    }
}

/// Commits what settles soon, and says what does not.
fn drain(staging: &Staging, options: &MountOptions) {
    match staging.drain(options.settle.max(options.settle_dir) + END) {
        Ok(left) => {
            for entry in left {
                log::warn!(
                    "{}/{} stays in staging: {}",
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
    if let Ok(status) = staging.status() {
        let waits = status.entries.iter().filter(|e| e.state.settles()).count();
        if waits > 0 {
            log::warn!(
                "ending once what was written has settled, {waits} entries (another signal ends it at once)"
            );
        }
    }
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

fn now() -> Timestamp {
    let d = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(d.as_secs()).unwrap_or(i64::MAX),
        nanos: d.subsec_nanos(),
    }
}

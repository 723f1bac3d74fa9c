//! The control socket of a store's staging area, by which a command line talks to the mount that owns it.
//!
//! STORE/staging/control.sock, mode 0600. One JSON object on a line asks, one on a line answers (docs/SEMANTICS.md,
//! "Control socket").

use super::staging::{Staging, path_text, text_path};
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::Committed;
use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use serde_json::{Value, json};
use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// The longest question: a path of 4,096 bytes, percent-encoded, and a message.
const LONGEST: u64 = 1 << 20;
/// How long a client may take to ask.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a drain waits for entries to settle and be committed.
const DRAIN: Duration = Duration::from_secs(24 * 3600);
/// Questions worked on at one time.
const CLIENTS: usize = 32;

/// A running control socket; dropping it stops it.
pub struct Control {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Control {
    /// Listens for a staging area that this process owns, and answers in threads of its own.
    pub fn serve(staging: &Arc<Staging>) -> Result<Control> {
        if !staging.is_owner() {
            return Err(Error::new(
                Kind::Busy,
                "another mount owns the staging area of this store",
            ));
        }
        let path = staging.dir().join("control.sock");
        // Whoever listened here before has ended: the staging area is ours.
        match std::fs::remove_file(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(format!("remove {}", path.display()), e));
            }
            _ => {}
        }
        let listener = with_short_path(&path, |p| UnixListener::bind(p))?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600))
            .doing(|| format!("set the mode of {}", path.display()))?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, staging) = (stop.clone(), staging.clone());
        let thread = std::thread::Builder::new()
            .name("zspace-control".into())
            .spawn(move || listen(&listener, &stopped, &staging))
            .doing(|| "start the control thread".into())?;
        Ok(Control {
            path,
            stop,
            thread: Mutex::new(Some(thread)),
        })
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // A connection wakes the listener.
        let _ = with_short_path(&self.path, |p| UnixStream::connect(p));
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

fn listen(listener: &UnixListener, stop: &AtomicBool, staging: &Arc<Staging>) {
    let clients = Arc::new(AtomicUsize::new(0));
    while !stop.load(Ordering::Acquire) {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(e) => {
                log::warn!("control socket: {e}");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if stop.load(Ordering::Acquire) {
            return;
        }
        if clients.load(Ordering::Acquire) >= CLIENTS {
            say(
                &stream,
                &failure(&Error::new(Kind::Busy, "too many commands at one time")),
            );
            continue;
        }
        clients.fetch_add(1, Ordering::AcqRel);
        let (staging, done) = (staging.clone(), clients.clone());
        let work = move || {
            answer(&stream, &staging);
            done.fetch_sub(1, Ordering::AcqRel);
        };
        if std::thread::Builder::new()
            .name("zspace-answer".into())
            .spawn(work)
            .is_err()
        {
            clients.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

fn answer(stream: &UnixStream, staging: &Staging) {
    let _ = stream.set_read_timeout(Some(PATIENCE));
    let mut line = String::new();
    let reply = match BufReader::new(stream.take(LONGEST)).read_line(&mut line) {
        Err(_) => return,
        Ok(_) => serde_json::from_str(&line)
            .map_err(|e| Error::new(Kind::Usage, format!("not a request: {e}")))
            .and_then(|request| respond(&request, staging)),
    };
    say(stream, &reply.unwrap_or_else(|e| failure(&e)));
}

fn say(mut stream: &UnixStream, answer: &Value) {
    let _ = stream.set_write_timeout(Some(PATIENCE));
    // Whoever asked may be gone by now.
    let _ = stream.write_all(format!("{answer}\n").as_bytes());
}

fn respond(request: &Value, staging: &Staging) -> Result<Value> {
    let word = |key: &str| request.get(key).and_then(Value::as_str);
    match word("do") {
        Some("status") => {
            let mut status = json!(staging.status()?);
            status["ok"] = json!(true);
            Ok(status)
        }
        Some("commit") => {
            let path = word("path").and_then(text_path);
            let path = path.ok_or_else(|| Error::new(Kind::Usage, "commit needs a path: BRANCH/ENTRY"))?;
            let done = staging.commit_now(&path, word("message").unwrap_or(""))?;
            Ok(json!({
                "ok": true, "id": done.id.to_string(), "branch": done.branch, "number": done.number,
                "bytes": done.bytes, "stored": done.stored, "links_outside": done.links_outside,
            }))
        }
        Some("warm") => {
            let what = word("what").ok_or_else(|| Error::new(Kind::Usage, "warm needs a REV or REV:PATH"))?;
            let mut done = json!(staging.warm(what)?);
            done["ok"] = json!(true);
            Ok(done)
        }
        Some("drain") => Ok(json!({"ok": true, "left": staging.drain(DRAIN)?})),
        _ => Err(Error::new(
            Kind::Usage,
            "a request says \"do\": \"status\", \"commit\", \"warm\" or \"drain\"",
        )),
    }
}

const KINDS: [Kind; 13] = [
    Kind::NotFound,
    Kind::Exists,
    Kind::Usage,
    Kind::Damage,
    Kind::Unsupported,
    Kind::Io,
    Kind::NoSpace,
    Kind::Busy,
    Kind::ReadOnly,
    Kind::Poisoned,
    Kind::Changed,
    Kind::Limit,
    Kind::Refused,
];

fn failure(e: &Error) -> Value {
    json!({"error": e.to_string(), "kind": format!("{:?}", e.kind())})
}

fn connect(store: &Path) -> Result<UnixStream> {
    let path = store.join("staging/control.sock");
    match with_short_path(&path, |p| UnixStream::connect(p)) {
        Err(e) if matches!(e.errno(), libc::ENOENT | libc::ENOTDIR | libc::ECONNREFUSED) => {
            let dir = store.display();
            // A wrong name should not lead to mounting a new store.
            let lock = std::fs::File::open(store.join("staging/lock"));
            let why = match store.join("FORMAT").exists() {
                true if lock.is_ok_and(|lock| lock.try_lock_shared().is_err()) => {
                    format!(
                        "the mount that owns the staging area of {dir} is beginning or ending: try again soon"
                    )
                }
                true => format!("no mount owns the staging area of {dir}: `zspace mount` it first"),
                false => format!("no store in {dir}"),
            };
            Err(Error::new(Kind::NotFound, why))
        }
        r => r,
    }
}

/// Asks the owner of the staging area of the store at `store`: `{"do":"status"}`,
/// `{"do":"commit","path":"BRANCH/ENTRY","message":"…"}`, `{"do":"warm","what":"REV:PATH"}` or `{"do":"drain"}`. An answer that is an error comes back as that
/// error; `NotFound` if nobody owns the staging area.
pub fn ask(store: &Path, request: &Value) -> Result<Value> {
    let mut stream = connect(store)?;
    let broken = || "talk to the mount that owns staging".to_owned();
    stream
        .write_all(format!("{request}\n").as_bytes())
        .doing(broken)?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).doing(broken)?;
    if line.is_empty() {
        return Err(Error::new(
            Kind::Busy,
            "the mount that owns staging ended before it answered",
        ));
    }
    let answer: Value = serde_json::from_str(&line)
        .map_err(|e| Error::damage(format!("the mount's answer cannot be read: {e}")))?;
    match answer.get("error").and_then(Value::as_str) {
        None => Ok(answer),
        Some(why) => {
            let name = answer.get("kind").and_then(Value::as_str).unwrap_or_default();
            let kind = KINDS
                .into_iter()
                .find(|k| format!("{k:?}") == name)
                .unwrap_or(Kind::Io);
            Err(Error::new(kind, why))
        }
    }
}

/// What a path in a mount's staging directory is there.
#[derive(Clone, Debug)]
pub struct Staged {
    /// The store's directory.
    pub store: PathBuf,
    /// The branch.
    pub branch: String,
    /// The path below staging/ as a request spells it.
    pub path: String,
}

/// The directory of the store that is mounted where `path` is, as the mount's own attribute tells.
pub fn store_of(path: &Path) -> Option<PathBuf> {
    attribute(path, "user.zspace.store").map(|b| PathBuf::from(std::ffi::OsString::from_vec(b)))
}

fn attribute(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = vec![0; 64 << 10];
    let n = rustix::fs::getxattr(path, name, &mut value[..]).ok()?;
    value.truncate(n);
    Some(value)
}

/// Whether `path` is a mount itself or one of the directories at its top.
pub fn is_whole_door(path: &Path) -> bool {
    attribute(path, "user.zspace.path").is_some_and(|inside| !inside.contains(&b'/'))
}

/// Where `path` lies in the mount that it is in. A file with several names tells any of them, and which one is meant may
/// decide between two entries: its directory, which has one, is asked.
fn path_inside(path: &Path) -> Option<Vec<u8>> {
    let of_directory = || {
        let whole = path.canonicalize().ok().filter(|whole| !whole.is_dir())?;
        let mut inside = attribute(whole.parent()?, "user.zspace.path")?;
        inside.push(b'/');
        inside.extend_from_slice(whole.file_name()?.as_bytes());
        Some(inside)
    };
    of_directory().or_else(|| attribute(path, "user.zspace.path"))
}

/// What `path` is in a mount's staging directory; none if it lies elsewhere.
pub fn staged(path: &Path) -> Result<Option<Staged>> {
    let (Some(store), Some(inside)) = (store_of(path), path_inside(path)) else {
        return Ok(None);
    };
    let mut parts = inside
        .split(|b| *b == b'/')
        .filter(|p| !p.is_empty())
        .map(<[u8]>::to_vec);
    if parts.next().as_deref() != Some(b"staging") {
        return Ok(None);
    }
    let rest: Vec<Vec<u8>> = parts.collect();
    let [branch, _, ..] = rest.as_slice() else {
        let why = format!("{} is no entry: commit what lies in a branch", path.display());
        return Err(Error::new(Kind::Usage, why));
    };
    let branch = String::from_utf8_lossy(branch).into_owned();
    Ok(Some(Staged {
        store,
        branch,
        path: path_text(&rest),
    }))
}

/// Has the owner of the staging area commit an entry.
pub fn commit(staged: &Staged, message: &str) -> Result<Committed> {
    let answer = ask(
        &staged.store,
        &json!({"do": "commit", "path": staged.path, "message": message}),
    )?;
    let text = |key: &str| answer.get(key).and_then(Value::as_str).unwrap_or_default();
    let count = |key: &str| answer.get(key).and_then(Value::as_u64).unwrap_or_default();
    Ok(Committed {
        id: text("id").parse()?,
        branch: text("branch").to_owned(),
        number: count("number"),
        bytes: count("bytes"),
        stored: count("stored"),
        links_outside: count("links_outside"),
    })
}

/// Socket addresses hold 107 bytes: a longer path is reached through its directory's descriptor.
fn with_short_path<T>(path: &Path, work: impl Fn(&Path) -> std::io::Result<T>) -> Result<T> {
    let what = || format!("reach {}", path.display());
    if path.as_os_str().as_bytes().len() <= 107 {
        return work(path).doing(what);
    }
    let dir = path.parent().unwrap_or(Path::new("/"));
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd: OwnedFd = rustix::fs::open(dir, flags, Mode::empty()).doing(what)?;
    let short = Path::new("/proc/self/fd").join(fd.as_raw_fd().to_string());
    work(&short.join(path.file_name().unwrap_or_default())).doing(what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuse::staging::Settle;
    use crate::store::{Options, Store};

    fn serve(dir: &Path) -> (Arc<Staging>, Control) {
        let store = Store::open_or_init(
            dir,
            &Options {
                memory: 1 << 20,
                threads: 1,
                background_threads: 1,
            },
        )
        .unwrap();
        let settle = Settle {
            files: Duration::from_millis(50),
            dirs: Duration::from_millis(50),
        };
        let staging = Staging::open(store, settle, false).unwrap();
        let control = Control::serve(&staging).unwrap();
        (staging, control)
    }

    #[test]
    fn questions_are_answered_however_long_the_path() {
        for depth in [0, 2] {
            let temp = tempfile::tempdir().unwrap();
            let mut dir = temp.path().to_owned();
            for _ in 0..depth {
                dir.push("d".repeat(100));
            }
            std::fs::create_dir_all(&dir).unwrap();
            assert_eq!(
                ask(&dir, &json!({"do": "status"})).unwrap_err().kind(),
                Kind::NotFound
            );
            let (staging, control) = serve(&dir);
            let mode = std::fs::metadata(dir.join("staging/control.sock"))
                .unwrap()
                .permissions()
                .mode();
            assert_eq!(mode & 0o777, 0o600);
            assert_eq!(ask(&dir, &json!({"do": "status"})).unwrap()["entries"], json!([]));
            assert_eq!(ask(&dir, &json!({"do": "drain"})).unwrap()["left"], json!([]));

            let path = [b"main".to_vec(), b"a b.txt".to_vec()];
            let (file, _) = staging.create(&path, 0o644, libc::O_WRONLY, 0, 0, 0).unwrap();
            file.write(0, b"hello").unwrap();
            drop(file);
            let asked = Staged {
                store: dir.clone(),
                branch: "main".into(),
                path: path_text(&path),
            };
            let done = commit(&asked, "by hand").unwrap();
            assert_eq!((done.branch.as_str(), done.number, done.bytes), ("main", 1, 5));
            assert_eq!(commit(&asked, "").unwrap().id, done.id);

            let e = ask(&dir, &json!({"do": "commit", "path": "main/none"})).unwrap_err();
            assert_eq!(e.kind(), Kind::NotFound);
            assert_eq!(
                ask(&dir, &json!({"do": "dance"})).unwrap_err().kind(),
                Kind::Usage
            );
            assert_eq!(ask(&dir, &json!([])).unwrap_err().kind(), Kind::Usage);
            drop(control);
            assert_eq!(
                ask(&dir, &json!({"do": "status"})).unwrap_err().kind(),
                Kind::NotFound
            );
        }
    }

    #[test]
    fn a_client_that_says_nothing_holds_nobody_up() {
        let temp = tempfile::tempdir().unwrap();
        let (_staging, _control) = serve(temp.path());
        let silent = UnixStream::connect(temp.path().join("staging/control.sock")).unwrap();
        assert!(ask(temp.path(), &json!({"do": "status"})).is_ok());
        drop(silent);
    }

    #[test]
    fn ordinary_paths_are_not_staged() {
        let temp = tempfile::tempdir().unwrap();
        assert!(staged(temp.path()).unwrap().is_none());
    }
}

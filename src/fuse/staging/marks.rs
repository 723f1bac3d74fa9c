//! Durable marks: what an entry's backing files are worth after a crash (docs/FORMAT.md, "Marks").

use super::names;
use crate::error::{Error, IoContext, Kind, Result};
use crate::id::{FileHasher, VersionId};
use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Where an entry is served from once it is committed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    /// The version.
    pub version: VersionId,
    /// The entry's name in it.
    pub name: Vec<u8>,
    /// What was removed from the entry since: paths below it.
    pub gone: BTreeSet<Vec<Vec<u8>>>,
    /// User and group of the entry when it was committed, if others than the mount's: versions do not keep them.
    pub owner: Option<Owner>,
}

/// A user and a group.
pub(super) type Owner = (u32, u32);

impl Origin {
    /// All of the entry `name` of a version.
    pub(super) fn new(version: VersionId, name: &[u8]) -> Self {
        Origin {
            version,
            name: name.to_vec(),
            gone: BTreeSet::new(),
            owner: None,
        }
    }

    /// Whether the path below the entry, or a directory above it, was removed.
    pub(super) fn lacks(&self, rel: &names::Path) -> bool {
        (1..=rel.len()).any(|n| self.gone.contains(&rel[..n]))
    }
}

/// What the mark of an entry says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// The backing files hold work that no version has. Without backing files the entry is what `base` says, or nothing.
    Dirty {
        /// What the entry was before.
        base: Option<Origin>,
    },
    /// The entry is served from a version; backing files are leftovers.
    Committed {
        /// The version.
        origin: Origin,
    },
}

impl Mark {
    /// Work that no version has yet.
    pub(super) const NEW: Mark = Mark::Dirty { base: None };

    /// The version behind the mark, if there is one.
    pub(super) fn origin(&self) -> Option<&Origin> {
        match self {
            Mark::Dirty { base } => base.as_ref(),
            Mark::Committed { origin } => Some(origin),
        }
    }
}

/// The first words of a mark file: what it is and its format version.
const MAGIC: &str = "zspace-mark 1";

/// The directory STORE/staging/state.
pub(super) struct Marks {
    state: PathBuf,
    scratch: PathBuf,
    next: AtomicU64,
}

impl Marks {
    /// Marks below `state`; new ones are written in `scratch` first, which is emptied at every start.
    pub(super) fn new(state: PathBuf, scratch: PathBuf) -> Self {
        Marks {
            state,
            scratch,
            next: AtomicU64::new(0),
        }
    }

    fn file(&self, branch: &str, entry: &[u8]) -> PathBuf {
        let mut name = names::encode(entry);
        if name.len() > 200 {
            let mut h = FileHasher::default();
            h.update(entry);
            name = format!("~{}", h.finish());
        }
        self.state.join(branch).join(name)
    }

    /// Makes the mark durable.
    pub(super) fn write(&self, branch: &str, entry: &[u8], mark: &Mark) -> Result<()> {
        let dir = self.state.join(branch);
        if !dir.is_dir() {
            fs::create_dir_all(&dir).doing(|| format!("make {}", dir.display()))?;
            sync_dir(&self.state)?;
        }
        let temp = self
            .scratch
            .join(format!("mark-{}", self.next.fetch_add(1, Ordering::Relaxed)));
        let to = self.file(branch, entry);
        let done = File::create(&temp)
            .and_then(|mut f| {
                f.write_all(encode(entry, mark).as_bytes())?;
                f.sync_all()
            })
            .and_then(|()| fs::rename(&temp, &to));
        if let Err(e) = done {
            let _ = fs::remove_file(&temp);
            return Err(Error::io(format!("write mark {}", to.display()), e));
        }
        sync_dir(&dir)
    }

    /// Adds a path to what is gone from a committed entry: as durable as a removal on an ordinary disk.
    pub(super) fn append_gone(&self, branch: &str, entry: &[u8], path: &names::Path) -> Result<()> {
        let to = self.file(branch, entry);
        let line = line(&gone_text(path));
        let write = || {
            let mut file = OpenOptions::new().read(true).append(true).open(&to)?;
            // A line that a crash left half-written is cut off, so that this one can be read. Only then is all of it read: to
            // do so each time would make `rm -r` of many files read as many times many lines.
            let len = file.metadata()?.len();
            let mut last = [b'\n'];
            if len > 0 {
                file.read_exact_at(&mut last, len - 1)?;
            }
            if last != [b'\n'] {
                let text = fs::read(&to)?;
                let whole = text.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
                file.set_len(whole as u64)?;
            }
            file.write_all(line.as_bytes())
        };
        write().doing(|| format!("write mark {}", to.display()))
    }

    /// Forgets an entry.
    pub(super) fn remove(&self, branch: &str, entry: &[u8]) -> Result<()> {
        let file = self.file(branch, entry);
        match fs::remove_file(&file) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(format!("remove {}", file.display()), e))
            }
            _ => Ok(()),
        }
    }

    /// The mark of one entry.
    pub(super) fn load(&self, branch: &str, entry: &[u8]) -> Result<Option<Mark>> {
        match read(&self.file(branch, entry))? {
            None => Ok(None),
            Some(text) => Ok(Some(decode(&text).map_or(Mark::NEW, |(_, mark)| mark))),
        }
    }

    /// Every mark of a branch. One that cannot be read counts as dirty, the cautious answer.
    pub(super) fn of_branch(&self, branch: &str) -> Result<Vec<(Vec<u8>, Mark)>> {
        let mut out = Vec::new();
        for name in list(&self.state.join(branch))? {
            let Some(text) = read(&self.state.join(branch).join(&name))? else {
                continue;
            };
            match decode(&text) {
                Some(found) => out.push(found),
                None => {
                    log::warn!(
                        "the mark staging/state/{branch}/{name} is damaged: its entry waits for `zspace commit`"
                    );
                    let entry = names::decode(&name).filter(|_| !name.starts_with('~'));
                    out.extend(entry.map(|e| (e, Mark::NEW)));
                }
            }
        }
        Ok(out)
    }

    /// The branches that have marks.
    pub(super) fn branches(&self) -> Result<Vec<String>> {
        list(&self.state)
    }
}

fn list(dir: &Path) -> Result<Vec<String>> {
    let what = || format!("list {}", dir.display());
    let entries = match fs::read_dir(dir) {
        // A stray file among them is none of ours.
        Err(e)
            if matches!(
                e.kind(),
                std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(Vec::new());
        }
        r => r.doing(what)?,
    };
    let mut names = Vec::new();
    for e in entries {
        names.extend(e.doing(what)?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

fn read(file: &Path) -> Result<Option<String>> {
    match fs::read(file) {
        Ok(bytes) => Ok(Some(String::from_utf8_lossy(&bytes).into_owned())),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(Error::io(format!("read {}", file.display()), e)),
    }
}

/// Makes the names in a directory durable.
pub(super) fn sync_dir(dir: &Path) -> Result<()> {
    File::open(dir)
        .and_then(|d| d.sync_all())
        .doing(|| format!("fsync directory {}", dir.display()))
}

fn line(text: &str) -> String {
    format!("{:08x} {text}\n", crc32fast::hash(text.as_bytes()))
}

fn gone_text(path: &names::Path) -> String {
    format!("gone {}", names::path_text(path))
}

fn encode(entry: &[u8], mark: &Mark) -> String {
    let head = format!("{MAGIC} {}", names::encode(entry));
    let words = match mark {
        Mark::Dirty { .. } => "dirty",
        Mark::Committed { .. } => "committed",
    };
    let Some(origin) = mark.origin() else {
        return line(&format!("{head} {words}"));
    };
    let owner = origin.owner.map(|(user, group)| format!(" {user} {group}"));
    let mut out = line(&format!(
        "{head} {words} {} {}{}",
        origin.version,
        names::encode(&origin.name),
        owner.unwrap_or_default()
    ));
    for path in &origin.gone {
        out.push_str(&line(&gone_text(path)));
    }
    out
}

fn decode(text: &str) -> Option<(Vec<u8>, Mark)> {
    let mut lines = text.split_inclusive('\n').map(|l| {
        let l = l.strip_suffix('\n')?;
        let (crc, rest) = l.split_once(' ')?;
        (u32::from_str_radix(crc, 16).ok()? == crc32fast::hash(rest.as_bytes())).then_some(rest)
    });
    let head = lines.next()??.strip_prefix(MAGIC)?.strip_prefix(' ')?;
    let words: Vec<&str> = head.split(' ').collect();
    let entry = names::decode(words.first()?)?;
    let mut origin = || {
        // A torn last line is a removal that did not happen.
        let gone = lines
            .by_ref()
            .map_while(|l| names::text_path(l?.strip_prefix("gone ")?));
        Some(Origin {
            version: words.get(2)?.parse().ok()?,
            name: names::decode(words.get(3)?)?,
            gone: gone.collect(),
            owner: match words.get(4..6) {
                Some([user, group]) => Some((user.parse().ok()?, group.parse().ok()?)),
                _ => None,
            },
        })
    };
    let mark = match (*words.get(1)?, words.len()) {
        ("dirty", 2) => Mark::NEW,
        ("dirty", 4 | 6) => Mark::Dirty {
            base: Some(origin()?),
        },
        ("committed", 4 | 6) => Mark::Committed { origin: origin()? },
        _ => return None,
    };
    names::check(std::slice::from_ref(&entry)).ok()?;
    Some((entry, mark))
}

/// The error of a mark that should be there.
pub(super) fn missing() -> Error {
    Error::new(Kind::NotFound, "no such entry in staging")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(
            any::<u8>().prop_filter("no slash or NUL", |b| *b != 0 && *b != b'/'),
            3..255,
        )
    }

    fn mark() -> impl Strategy<Value = Mark> {
        let gone = proptest::collection::btree_set(proptest::collection::vec(name(), 1..4), 0..4);
        let owner = proptest::option::of(any::<(u32, u32)>());
        let origin = (any::<[u8; 32]>(), name(), gone, owner)
            .prop_map(|(v, name, gone, owner)| Origin {
                version: VersionId(v),
                name,
                gone,
                owner,
            })
            .boxed();
        prop_oneof![
            proptest::option::of(origin.clone()).prop_map(|base| Mark::Dirty { base }),
            origin.prop_map(|origin| Mark::Committed { origin }),
        ]
    }

    proptest! {
        #[test]
        fn marks_round_trip(entry in name(), mark in mark()) {
            prop_assert_eq!(decode(&encode(&entry, &mark)), Some((entry, mark)));
        }

        #[test]
        fn a_damaged_first_line_is_never_believed(entry in name(), at: prop::sample::Index, flip in 1u8..128) {
            let mark = Mark::Committed { origin: Origin::new(VersionId([3; 32]), &entry) };
            let mut bytes = encode(&entry, &mark).into_bytes();
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            let read = decode(&String::from_utf8_lossy(&bytes));
            // A digit of the checksum in capitals is the same checksum.
            prop_assert!(read.is_none() || read == Some((entry, mark)));
        }

        #[test]
        fn any_text_is_read_without_panic(text: String) {
            let _ = decode(&text);
        }
    }

    #[test]
    fn names_of_any_length_have_marks_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let scratch = dir.path().join("scratch");
        fs::create_dir(&scratch).unwrap();
        let marks = Marks::new(dir.path().join("state"), scratch);
        let long = [vec![0xe4; 254], vec![0xf6; 1]].concat();
        let other = vec![0xe4; 255];
        marks.write("main", &long, &Mark::NEW).unwrap();
        assert_eq!(marks.load("main", &long).unwrap(), Some(Mark::NEW));
        assert_eq!(marks.load("main", &other).unwrap(), None);
        assert_eq!(marks.of_branch("main").unwrap(), [(long.clone(), Mark::NEW)]);
        marks.remove("main", &long).unwrap();
        marks.remove("main", &long).unwrap();
        assert!(marks.of_branch("main").unwrap().is_empty());
    }

    #[test]
    fn removals_are_appended_and_a_torn_one_did_not_happen() {
        let dir = tempfile::tempdir().unwrap();
        let marks = Marks::new(dir.path().join("state"), dir.path().to_owned());
        let origin = Origin::new(VersionId([3; 32]), b"d");
        marks
            .write(
                "main",
                b"d",
                &Mark::Committed {
                    origin: origin.clone(),
                },
            )
            .unwrap();
        let path = vec![b"a b".to_vec(), b"\xff/".to_vec()];
        marks.append_gone("main", b"d", &path).unwrap();
        let file = dir.path().join("state/main/d");
        let whole = fs::read(&file).unwrap();
        let want = Some(Mark::Committed {
            origin: Origin {
                gone: [path].into(),
                ..origin.clone()
            },
        });
        assert_eq!(marks.load("main", b"d").unwrap(), want);
        fs::write(&file, &whole[..whole.len() - 1]).unwrap();
        let want = Some(Mark::Committed { origin });
        assert_eq!(marks.load("main", b"d").unwrap(), want);
        fs::write(&file, &whole[..10]).unwrap();
        assert_eq!(marks.of_branch("main").unwrap(), [(b"d".to_vec(), Mark::NEW)]);
    }
}

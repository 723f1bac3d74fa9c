//! Paths inside a mount: which store they belong to, and what they are there.

use crate::error::{Error, Kind, Result};
use crate::fuse::control;
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Where a path lies in a mount, told by the mount's own attributes.
pub(super) struct Mounted {
    /// The store's directory.
    pub(super) store: PathBuf,
    /// Components below the mount point.
    pub(super) path: Vec<String>,
}

/// Where `path` lies in a mount of zspace; none if it does not.
pub(super) fn mounted(path: &Path) -> Option<Mounted> {
    let attribute = |name: &str| {
        let mut value = vec![0; 1 << 16];
        let n = rustix::fs::getxattr(path, name, &mut value[..]).ok()?;
        value.truncate(n);
        Some(value)
    };
    let store = PathBuf::from(std::ffi::OsString::from_vec(attribute("user.zspace.store")?));
    let path = attribute("user.zspace.path")?;
    let parts = OsStr::from_bytes(&path).to_str()?.split('/').filter(|p| !p.is_empty());
    Some(Mounted { store, path: parts.map(str::to_owned).collect() })
}

/// Asks the owner of a store's staging; an answer with an error becomes one.
pub(super) fn ask(store: &Path, request: Value) -> Result<Value> {
    let answer = control::ask(store, &request)?;
    match answer.get("error").and_then(Value::as_str) {
        Some(why) => {
            let kind = match answer.get("kind").and_then(Value::as_str) {
                Some("NoSpace") => Kind::NoSpace,
                Some("NotFound") => Kind::NotFound,
                Some("Usage") => Kind::Usage,
                Some("Busy") => Kind::Busy,
                Some("Changed") => Kind::Changed,
                Some("ReadOnly") => Kind::ReadOnly,
                _ => Kind::Io,
            };
            Err(Error::new(kind, why))
        }
        None => Ok(answer),
    }
}

/// Has a staged entry committed by the mount that owns it.
pub(super) fn commit(store: &Path, entry: &str, message: &str) -> Result<Value> {
    ask(store, json!({"do": "commit", "path": entry, "message": message}))
}

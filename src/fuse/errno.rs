//! Errors that stand for one errno.

use crate::error::Error;
use std::io;

/// An error that is answered with this errno.
pub(super) fn os(errno: i32, what: impl Into<String>) -> Error {
    Error::io(what, io::Error::from_raw_os_error(errno))
}

/// The answer to every change outside `staging/`.
pub(super) fn read_only() -> Error {
    os(libc::EROFS, "only staging/ can be written")
}

//! The one error type: a kind, a message that says what, where and what to do, and the cause.

use std::error::Error as StdError;
use std::fmt;
use std::io;

/// What went wrong, coarse enough to act on. Each kind maps to one errno and one exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// No such version, branch, tag, file, tensor or node.
    NotFound,
    /// The name is taken.
    Exists,
    /// An argument is malformed or breaks a naming rule.
    Usage,
    /// Stored bytes fail their checksum or hash, or contradict each other.
    Damage,
    /// Written by a newer version of zspace, or a feature this build does not have.
    Unsupported,
    /// The operating system reported an error.
    Io,
    /// No space left, or a quota was reached.
    NoSpace,
    /// Held by another process, or still in use.
    Busy,
    /// The store or the place is read-only.
    ReadOnly,
    /// An earlier fsync failed: this writer will not write again.
    Poisoned,
    /// The source changed while it was being read.
    Changed,
    /// Input exceeds a limit of this program.
    Limit,
    /// Possible in principle, but refused for the reason given.
    Refused,
    /// Whoever asked for it asked to stop.
    Stopped,
}

impl Kind {
    /// The errno a mount answers with.
    pub fn errno(self) -> i32 {
        match self {
            Kind::NotFound => libc::ENOENT,
            Kind::Exists => libc::EEXIST,
            Kind::Usage => libc::EINVAL,
            Kind::Damage => libc::EIO,
            Kind::Unsupported => libc::ENOTSUP,
            Kind::Io => libc::EIO,
            Kind::NoSpace => libc::ENOSPC,
            Kind::Busy => libc::EBUSY,
            Kind::ReadOnly => libc::EROFS,
            Kind::Poisoned => libc::EIO,
            Kind::Changed => libc::EAGAIN,
            Kind::Limit => libc::EFBIG,
            Kind::Refused => libc::ENOTSUP,
            Kind::Stopped => libc::EINTR,
        }
    }

    /// The exit code of the command line: 1 failed, 3 damage, 64 wrong usage.
    pub fn exit_code(self) -> u8 {
        match self {
            Kind::Damage => 3,
            Kind::Usage => 64,
            Kind::Stopped => 130,
            Kind::NotFound
            | Kind::Exists
            | Kind::Unsupported
            | Kind::Io
            | Kind::NoSpace
            | Kind::Busy
            | Kind::ReadOnly
            | Kind::Poisoned
            | Kind::Changed
            | Kind::Limit
            | Kind::Refused => 1,
        }
    }
}

/// An error of any part of zspace.
pub struct Error(Box<Inner>);

struct Inner {
    kind: Kind,
    message: String,
    errno: Option<i32>,
    source: Option<Box<dyn StdError + Send + Sync>>,
}

/// The result of anything that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Asked now and then by what takes long: its error ends it.
pub type Interrupt<'a> = &'a (dyn Fn() -> Result<()> + Sync);

/// Of what nobody wants to end.
pub fn never() -> Result<()> {
    Ok(())
}

impl Error {
    /// An error with a message of its own.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error(Box::new(Inner {
            kind,
            message: message.into(),
            errno: None,
            source: None,
        }))
    }

    /// Damage found in stored bytes: `what` names the thing and the place.
    pub fn damage(what: impl Into<String>) -> Self {
        Self::new(Kind::Damage, what)
    }

    /// An operating-system error, with what was being done. ENOSPC, EDQUOT, EROFS, ENOENT and EEXIST keep their meaning.
    pub fn io(what: impl Into<String>, e: io::Error) -> Self {
        let errno = e.raw_os_error();
        let kind = match errno {
            Some(libc::ENOSPC | libc::EDQUOT) => Kind::NoSpace,
            Some(libc::EROFS) => Kind::ReadOnly,
            Some(libc::ENOENT) => Kind::NotFound,
            Some(libc::EEXIST) => Kind::Exists,
            _ => Kind::Io,
        };
        Error(Box::new(Inner {
            kind,
            message: what.into(),
            errno,
            source: Some(Box::new(e)),
        }))
    }

    /// The same error with where it happened put in front.
    #[must_use]
    pub fn context(mut self, what: impl fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    /// What went wrong.
    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    /// The errno to answer with: the system's own where there is one, else the kind's.
    pub fn errno(&self) -> i32 {
        self.0.errno.unwrap_or_else(|| self.0.kind.errno())
    }

    /// A copy for the other waiters of one shared operation; the cause becomes part of the message.
    pub fn share(&self) -> Self {
        Error(Box::new(Inner {
            kind: self.0.kind,
            message: self.to_string(),
            errno: self.0.errno,
            source: None,
        }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        match &self.0.source {
            Some(s) => write!(f, ": {s}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match &self.0.source {
            Some(s) => Some(s.as_ref()),
            None => None,
        }
    }
}

/// Adds what was being done to a failed system call.
pub trait IoContext<T> {
    /// Turns an `io::Error` into an [`Error`] with `what` as its context.
    fn doing(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::io(what(), e))
    }
}

impl<T> IoContext<T> for std::result::Result<T, rustix::io::Errno> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| Error::io(what(), e.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn os_errors_keep_their_errno_and_gain_a_kind() {
        let e = Error::io("write pack", io::Error::from_raw_os_error(libc::ENOSPC));
        assert_eq!((e.kind(), e.errno()), (Kind::NoSpace, libc::ENOSPC));
        let e = e.context("commit model.pt");
        assert!(e.to_string().starts_with("commit model.pt: write pack: "), "{e}");
        assert_eq!(e.share().kind(), Kind::NoSpace);
    }
}

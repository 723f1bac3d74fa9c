//! What the mount tells about a file, free of any FUSE type.

use crate::store::Timestamp;

/// What a name in the mount is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    /// A regular file.
    File,
    /// A directory.
    Dir,
    /// A symbolic link.
    Symlink,
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A character device.
    Char,
    /// A block device.
    Block,
}

/// The attributes of a file, as stat(2) tells them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attr {
    /// What it is.
    pub kind: FileKind,
    /// Permission bits (07777).
    pub mode: u32,
    /// Length in bytes.
    pub size: u64,
    /// 512-byte blocks in use.
    pub blocks: u64,
    /// Names it has.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Device number of a device file.
    pub rdev: u32,
    /// Time of last access.
    pub atime: Timestamp,
    /// Time of last modification.
    pub mtime: Timestamp,
    /// Time of last change of the attributes.
    pub ctime: Timestamp,
}

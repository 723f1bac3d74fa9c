//! Work buffers, kept per thread: a fresh mebibyte costs about as much in page faults as decoding it.

use std::cell::RefCell;

/// A buffer that grew beyond this (bytes) is given back to the system.
const KEEP: usize = 4 << 20;

thread_local! {
    static POOL: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
    static BUFFERS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with an empty buffer.
pub(super) fn with_buffer<R>(f: impl FnOnce(&mut Vec<u8>) -> R) -> R {
    let mut buf = BUFFERS.with_borrow_mut(Vec::pop).unwrap_or_default();
    buf.clear();
    let result = f(&mut buf);
    if buf.capacity() <= KEEP {
        BUFFERS.with_borrow_mut(|pool| pool.push(buf));
    }
    result
}

/// Calls `f` with `len` bytes of any content.
pub(super) fn with_bytes<R>(len: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
    let mut buf = POOL.with_borrow_mut(Vec::pop).unwrap_or_default();
    // Never made shorter, as growing again would fill it again.
    if buf.len() < len {
        buf.resize(len, 0);
    }
    let result = f(&mut buf[..len]);
    if buf.capacity() <= KEEP {
        POOL.with_borrow_mut(|pool| pool.push(buf));
    }
    result
}

//! Threads that stand back: what the mount does by itself gets what others leave.

use rustix::process::setpriority_process;
use rustix::thread::gettid;

/// The priority of such threads: with both at full speed they get a thirtieth of a processor.
const NICE: i32 = 15;
/// `ioprio_set` for one thread, and the lowest priority of the class of those that get what they ask for (linux/ioprio.h).
const ONE: libc::c_int = 1;
const LAST_OF_BEST_EFFORT: libc::c_int = 2 << 13 | 7;

/// Lowers the priority of this thread, and of those that it starts, for processor and disk.
pub(super) fn stand_back() {
    if let Err(e) = setpriority_process(Some(gettid()), NICE) {
        log::debug!("cannot lower the priority: {e}");
    }
    // SAFETY: the call takes three integers and no memory; 0 is the calling thread. No library has it.
    let done = unsafe { libc::syscall(libc::SYS_ioprio_set, ONE, 0, LAST_OF_BEST_EFFORT) };
    if done != 0 {
        log::debug!(
            "cannot lower the disk's priority: {}",
            std::io::Error::last_os_error()
        );
    }
}

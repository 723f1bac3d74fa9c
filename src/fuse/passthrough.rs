//! Passthrough: open files whose backing file the kernel reads and writes by itself.

use super::io::Opened;
use super::modes::Token;
use fuser::{BackingId, InitFlags, KernelConfig};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether files are given to the kernel.
#[derive(Clone)]
pub(super) struct Passthrough(Arc<AtomicBool>);

impl Passthrough {
    /// With `wanted`, where the kernel has it and lets us.
    pub(super) fn new(wanted: bool) -> Self {
        Passthrough(Arc::new(AtomicBool::new(wanted)))
    }

    /// Asks the kernel for it, which takes root (in the first user namespace) and Linux 6.9.
    pub(super) fn ask_for(&self, config: &mut KernelConfig) {
        // One level deep: the mount itself may still lie under an overlay, its backing files may not lie on one.
        let given = self.0.load(Ordering::Relaxed)
            && rustix::process::geteuid().is_root()
            && config.set_max_stack_depth(1).is_ok()
            && config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok();
        self.0.store(given, Ordering::Relaxed);
    }

    /// Makes a backing file known to the kernel by `open`, which has no answer if nobody waits for it any more.
    pub(super) fn register(&self, open: impl FnOnce() -> Option<io::Result<BackingId>>) -> Option<Token> {
        if !self.0.load(Ordering::Relaxed) {
            return None;
        }
        match open()? {
            Ok(id) => Some(Arc::new(id)),
            Err(e) => {
                // A store on a stacked file system, say: what holds for one file of it holds for all.
                if self.0.swap(false, Ordering::Relaxed) {
                    log::info!("no passthrough: {e}");
                }
                None
            }
        }
    }
}

/// What the kernel knows the backing file of an open file by.
pub(super) fn backing(opened: &Opened) -> Option<&BackingId> {
    opened.through.as_ref()?.token.downcast_ref()
}

//! Whether a transfer is to stop: asked while a peer is waited for, and while something takes long.

use crate::error::Result;
use std::fmt;
use std::sync::Arc;

/// Asks whether to stop; by default, never.
#[derive(Clone, Default)]
pub struct Stop(Option<Arc<dyn Fn() -> Result<()> + Send + Sync>>);

impl Stop {
    /// Stops with the error of `ask`, once it gives one.
    pub fn when(ask: impl Fn() -> Result<()> + Send + Sync + 'static) -> Self {
        Stop(Some(Arc::new(ask)))
    }

    /// Whether to go on.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |ask| ask())
    }
}

impl fmt::Debug for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stop({})", self.0.is_some())
    }
}

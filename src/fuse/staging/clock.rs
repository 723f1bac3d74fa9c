//! Time as staging sees it; tests put their own hand on it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The time since some fixed moment, which never goes back, and the time of the machine's clock.
pub(super) trait Clock: Send + Sync {
    /// Monotonic.
    fn now(&self) -> Duration;
    /// Since 1970; may jump.
    fn wall(&self) -> Duration;
}

/// The machine's clocks.
pub(super) struct SystemClock(Instant);

impl SystemClock {
    /// Counts from now.
    pub(super) fn new() -> Self {
        SystemClock(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn wall(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }
}

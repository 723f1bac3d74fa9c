//! The control socket of a store's staging area: how a command line talks to the mount that owns it.

use super::staging::Staging;
use crate::error::Result;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// A running control socket; dropping it stops it.
pub struct Control;

impl Control {
    /// Listens on STORE/staging/control.sock and answers in threads of its own.
    pub fn serve(_staging: &Arc<Staging>) -> Result<Control> {
        unimplemented!()
    }
}

/// Sends one request (`{"do":"status"}`, `{"do":"commit","path":"BRANCH/ENTRY","message":""}`, `{"do":"drain"}`) to the owner
/// of the store's staging and returns the last line of its answer. `NotFound` if there is no owner.
pub fn ask(_store: &Path, _request: &Value) -> Result<Value> {
    unimplemented!()
}

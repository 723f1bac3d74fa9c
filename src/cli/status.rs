//! `zspace status`

use super::{Context, show};
use crate::error::{Error, Kind, Result};
use crate::fuse::control;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Show what is staged, settling, waiting or failed, and why; cache and memory in use
#[derive(clap::Args)]
pub(super) struct Args {
    /// A mount point [default: whichever mount takes the store's staging]
    mnt: Option<PathBuf>,
    /// Everything as one JSON object
    #[arg(long)]
    json: bool,
}

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    let dir = match &args.mnt {
        None => context.dir()?,
        Some(mnt) => control::store_of(mnt).ok_or_else(|| {
            Error::new(
                Kind::NotFound,
                format!("no store is mounted on {}", mnt.display()),
            )
        })?,
    };
    let answer = control::ask(&dir, &json!({"do": "status"}))?;
    if args.json {
        return show::print_json(&answer);
    }
    let entries = answer
        .get("entries")
        .and_then(Value::as_array)
        .cloned()
        .unwrap_or_default();
    let mut rows = Vec::new();
    for e in &entries {
        let text = |key: &str| e.get(key).and_then(Value::as_str).unwrap_or_default();
        let size = e.get("bytes").and_then(Value::as_u64).unwrap_or(0);
        let why = [text("version"), text("reason")].concat();
        rows.push(vec![
            format!("{}/{}", text("branch"), show::printable(text("name").as_bytes())),
            show::bytes(size),
            text("state").to_owned(),
            show::printable(why.as_bytes()),
        ]);
    }
    let number = |key: &str| show::bytes(answer.get(key).and_then(Value::as_u64).unwrap_or(0));
    let mut text = if rows.is_empty() {
        "nothing is staged\n".to_owned()
    } else {
        show::table(&rows, &[1])
    };
    text += &format!(
        "rebuilt chunks {} of {}, whole files {} of {}, memory {}\n",
        number("cached_bytes"),
        number("cache_limit"),
        number("whole_bytes"),
        number("whole_limit"),
        number("resident_bytes")
    );
    if entries
        .iter()
        .any(|e| e.get("state").and_then(Value::as_str) == Some("waiting"))
    {
        text += "what waits is committed by `zspace commit PATH`, or can be removed\n";
    }
    show::print(&text)
}

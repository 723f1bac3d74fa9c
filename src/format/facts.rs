//! Numbers that a checkpoint says of itself: step, epoch, loss, and whatever else is plain at its top.

use super::pickle::{self, Pickle, Value};
use super::source::{Parse, Source, Stop, take};
use super::{safetensors, torch, zip};
use crate::error::Result;

/// The most numbers that are taken from one file, and the longest name of one.
const MAX_FACTS: usize = 64;
const MAX_NAME: usize = 128;

/// The finite numbers at the top of a checkpoint file, by name, in its order: of a torch file those directly in the dict that it
/// is, of a safetensors file those in its `__metadata__`. None of what no parser understands.
///
/// # Errors
/// Only what [`Source::read_at`] reports.
pub fn facts(src: &dyn Source) -> Result<Vec<(String, f64)>> {
    let mut found = match find(src) {
        Ok(found) => found,
        Err(Stop::Odd(_)) => Vec::new(),
        Err(Stop::Io(e)) => return Err(e),
    };
    found.retain(|(name, n)| !name.is_empty() && name.len() <= MAX_NAME && n.is_finite());
    found.truncate(MAX_FACTS);
    Ok(found)
}

fn find(src: &dyn Source) -> Parse<Vec<(String, f64)>> {
    if zip::is_zip(src)? {
        let members = zip::members(src)?;
        let Some(data) = torch::description(&members)? else {
            return Ok(Vec::new());
        };
        let bytes = take(src, data.offset, data.len, "torch: data.pkl")?;
        return Ok(top(&Pickle::read(bytes).map_err(Stop::Odd)?));
    }
    match safetensors::header_len(src)? {
        None => Ok(Vec::new()),
        Some(len) => {
            let header = safetensors::read_header(src, len)?;
            let number = |(name, text): &(String, String)| Some((name.clone(), text.trim().parse().ok()?));
            Ok(header.metadata().iter().filter_map(number).collect())
        }
    }
}

/// The numbers among the items of the dict that a pickle is.
fn top(p: &Pickle) -> Vec<(String, f64)> {
    let pairs = match p.get(p.root) {
        Value::Dict(pairs) => pairs,
        Value::Call(call) => &call.pairs,
        _ => return Vec::new(),
    };
    let number = |(key, value): &(pickle::Id, pickle::Id)| {
        let Value::Text(name) = p.get(*key) else {
            return None;
        };
        let n = match p.get(*value) {
            Value::Int(n) => *n as f64,
            Value::Float(n) => *n,
            _ => return None,
        };
        Some((String::from_utf8(p.text(*name).to_vec()).ok()?, n))
    };
    pairs.iter().filter_map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> Vec<(String, f64)> {
        facts(&bytes.to_vec()).unwrap()
    }

    #[test]
    fn numbers_at_the_top_are_found() {
        let want = [("global_step", 7.0), ("epoch", 0.5), ("loss", -2.25e-3)];
        let want = want.map(|(name, n)| (name.to_owned(), n));
        assert_eq!(of(include_bytes!("samples/facts.pt")), want);
    }

    #[test]
    fn metadata_that_are_numbers_are_found() {
        let header = br#"{"__metadata__":{"format":"pt","step":" 320","loss":"2.5e-1","x":"inf","":"1"}}"#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header].concat();
        assert_eq!(of(&file), [("step".to_owned(), 320.0), ("loss".to_owned(), 0.25)]);
    }

    #[test]
    fn what_is_no_checkpoint_says_nothing() {
        for bytes in [&b""[..], b"PK\x03\x04", b"\x93NUMPY", &[0; 100]] {
            assert!(of(bytes).is_empty());
        }
        let whole = include_bytes!("samples/facts.pt");
        for n in 0..whole.len() {
            let _ = of(&whole[..n]);
        }
    }
}

//! What versions say of themselves: step, epoch, loss.

use super::object::keep;
use super::{EntryKind, Numbered, Store};
use crate::error::Result;
use crate::id::FileHash;
use std::collections::{BTreeMap, VecDeque};

/// Directories of a version that are looked into, one in another, and names that are looked at.
const MAX_DEPTH: usize = 3;
const MAX_NAMES: usize = 1000;
/// Checkpoint files that are asked.
const MAX_FILES: usize = 8;
/// The largest trainer_state.json that is read.
const MAX_STATE: u64 = 64 << 20;
/// The names that numbers have for what people call step, epoch and loss; the first that is there counts.
const STEP: [&str; 6] = [
    "global_step",
    "step",
    "iteration",
    "iter",
    "trained_steps",
    "num_steps",
];
const EPOCH: [&str; 3] = ["epoch", "epochs", "current_epoch"];
const LOSS: [&str; 6] = [
    "loss",
    "train_loss",
    "training_loss",
    "eval_loss",
    "val_loss",
    "valid_loss",
];
/// Of the last numbers in an entry's name one is the step, if one of these is before it.
const STEP_WORDS: [&str; 5] = ["step", "checkpoint", "ckpt", "iter", "iteration"];

/// Numbers that a version says of itself.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Facts {
    /// Steps of the optimizer; as the entry's name says, if nothing else does.
    #[serde(with = "short", default)]
    pub step: Option<f64>,
    /// Rounds through the data.
    #[serde(with = "short", default)]
    pub epoch: Option<f64>,
    /// The last loss.
    #[serde(with = "short", default)]
    pub loss: Option<f64>,
    /// All, by their own names.
    pub all: BTreeMap<String, f64>,
}

/// Whole numbers as such.
mod short {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(n: &Option<f64>, to: S) -> Result<S::Ok, S::Error> {
        match n {
            Some(n) if n.fract() == 0.0 && n.abs() < 9e15 => to.serialize_some(&(*n as i64)),
            n => to.serialize_some(n),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<f64>, D::Error> {
        Option::deserialize(from)
    }
}

impl Store {
    /// What a version says of itself: in trainer_state.json, in the `__metadata__` of safetensors files, and as plain numbers at the top
    /// of torch files. Kept in STORE/facts, so that it is looked for once.
    ///
    /// # Errors
    /// Damage of what is looked at.
    pub fn facts(&self, version: &Numbered) -> Result<Facts> {
        let path = self.dir().join("facts").join(version.id.to_string());
        let kept = std::fs::read(&path).ok();
        if let Some(kept) = kept.and_then(|bytes| serde_json::from_slice(&bytes).ok()) {
            return Ok(kept);
        }
        let facts = self.find_facts(version)?;
        if let Ok(bytes) = serde_json::to_vec(&facts)
            && let Err(e) = keep(&path, &bytes)
        {
            log::info!("{} is not kept: {e}", path.display());
        }
        Ok(facts)
    }

    fn find_facts(&self, version: &Numbered) -> Result<Facts> {
        let mut all = BTreeMap::new();
        let mut files = Vec::new();
        let mut todo = VecDeque::from([(0, version.version.tree)]);
        let mut left = MAX_NAMES;
        while let Some((depth, tree)) = todo.pop_front() {
            for entry in self.tree(&tree)?.entries() {
                left = left.saturating_sub(1);
                match &entry.kind {
                    _ if left == 0 => break,
                    EntryKind::File { hash, len, .. } if entry.name == b"trainer_state.json" => {
                        self.trainer_state(hash, *len, &mut all)?;
                    }
                    EntryKind::File { hash, len, .. } => files.push((*hash, *len)),
                    EntryKind::Dir { tree, .. } if depth < MAX_DEPTH => todo.push_back((depth + 1, *tree)),
                    _ => {}
                }
            }
        }
        let mut asked = 0;
        for (hash, len) in files {
            // The shards of a model say the same.
            if asked == MAX_FILES || first(&all, &STEP).is_some() && first(&all, &LOSS).is_some() {
                break;
            }
            let file = self.file(&hash, len)?;
            if matches!(file.format(), "safetensors" | "torch") {
                asked += 1;
                for (name, n) in file.facts()? {
                    all.entry(name).or_insert(n);
                }
            }
        }
        let entry = String::from_utf8_lossy(&version.version.entry);
        Ok(Facts {
            step: first(&all, &STEP).or_else(|| step_of_name(&entry)),
            epoch: first(&all, &EPOCH),
            loss: first(&all, &LOSS),
            all,
        })
    }

    /// What the trainer of Hugging Face's transformers writes: the plain numbers, and those of the last line of its log that has them.
    fn trainer_state(&self, hash: &FileHash, len: u64, all: &mut BTreeMap<String, f64>) -> Result<()> {
        if len > MAX_STATE {
            return Ok(());
        }
        let file = self.file(hash, len)?;
        let mut bytes = Vec::with_capacity(len as usize);
        file.copy_to(0..len, &mut bytes, &mut |_| Ok(()))?;
        let Ok(serde_json::Value::Object(state)) = serde_json::from_slice(&bytes) else {
            return Ok(());
        };
        let lines = state
            .get("log_history")
            .and_then(|l| l.as_array())
            .into_iter()
            .flatten();
        // Later lines take the place of earlier ones; what the state itself says counts most.
        for object in lines.filter_map(|line| line.as_object()).chain([&state]) {
            for (name, value) in object {
                if let Some(n) = value.as_f64().filter(|n| n.is_finite()) {
                    all.insert(name.clone(), n);
                }
            }
        }
        Ok(())
    }
}

fn first(all: &BTreeMap<String, f64>, names: &[&str]) -> Option<f64> {
    names.iter().find_map(|name| all.get(*name)).copied()
}

/// The step that a name such as `checkpoint-500` or `step_000020.safetensors` tells.
fn step_of_name(name: &str) -> Option<f64> {
    let lower = name.to_ascii_lowercase();
    STEP_WORDS.iter().find_map(|word| {
        let after = &lower[lower.rfind(word)? + word.len()..];
        let after = after.trim_start_matches(['-', '_', '=', '.']);
        let digits = after.len() - after.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        after.get(..digits)?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_steps() {
        for (name, step) in [
            ("checkpoint-500", Some(500.0)),
            ("step_000020.safetensors", Some(20.0)),
            ("run3-step=7.ckpt", Some(7.0)),
            ("model.pt", None),
            ("epoch-3.pt", None),
            ("checkpoint", None),
            ("größe-step-1", Some(1.0)),
        ] {
            assert_eq!(step_of_name(name), step, "{name}");
        }
    }
}

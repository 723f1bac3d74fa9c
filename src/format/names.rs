//! Tensor names: percent-encoded components joined by `/` (docs/FORMAT.md, "Names").

use std::collections::HashMap;
use std::fmt::Write;

/// Encodes one component: `%`, `/`, control characters and bytes that are not UTF-8 become `%XX`; an empty one is `%`.
pub(super) fn encode(component: &[u8]) -> String {
    if component.is_empty() {
        return "%".to_owned();
    }
    let mut out = String::with_capacity(component.len());
    for part in component.utf8_chunks() {
        for c in part.valid().chars() {
            match c {
                '%' | '/' => escape(&mut out, &[c as u8]),
                c if c.is_control() => escape(&mut out, c.encode_utf8(&mut [0; 4]).as_bytes()),
                c => out.push(c),
            }
        }
        escape(&mut out, part.invalid());
    }
    out
}

pub(super) fn escape(out: &mut String, bytes: &[u8]) {
    for b in bytes {
        // Writing to a String cannot fail.
        let _ = write!(out, "%{b:02X}");
    }
}

/// Whether `name` could be an encoded name: no empty component, no control character.
pub(super) fn is_encoded(name: &str) -> bool {
    !name.split('/').any(str::is_empty) && !name.chars().any(char::is_control)
}

/// Undoes the encoding of a tensor's name: components decoded and joined by `/`, so that a safetensors tensor gets the
/// name its file gives it, and a nested torch name reads `model/layers.0.weight`. What does not decode to UTF-8 stays
/// encoded, and so do the marks `%@` and `%#` that stand for no bytes.
pub fn true_name(name: &str) -> String {
    name.split('/').map(decode).collect::<Vec<_>>().join("/")
}

fn decode(component: &str) -> String {
    if component == "%" {
        return String::new();
    }
    let mut out = Vec::with_capacity(component.len());
    let mut rest = component.as_bytes();
    while let [first, tail @ ..] = rest {
        let digit = |i: usize| tail.get(i).and_then(|b| char::from(*b).to_digit(16));
        rest = match (first, digit(0), digit(1)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high << 4 | low) as u8);
                &tail[2..]
            }
            _ => {
                out.push(*first);
                tail
            }
        };
    }
    String::from_utf8(out).unwrap_or_else(|_| component.to_owned())
}

/// Names that are in use. A name that is taken gets `%#2`, `%#3`, … put after it: `%#` starts no escape.
#[derive(Default)]
pub(super) struct Taken(HashMap<String, u32>);

impl Taken {
    /// The name, or the first free variation of it.
    pub(super) fn claim(&mut self, name: String) -> String {
        let Some(count) = self.0.get_mut(&name) else {
            self.0.insert(name.clone(), 1);
            return name;
        };
        // No encoded name holds `%#`, so a variation can only meet another of the same name.
        *count += 1;
        format!("{name}%#{count}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn encoding_is_reversible_and_clean(component: String, bytes: Vec<u8>) {
            let name = encode(component.as_bytes());
            prop_assert_eq!(&true_name(&name), &component);
            prop_assert!(is_encoded(&name) && is_encoded(&encode(&bytes)));
            // Whatever the bytes, no other ones have the same name.
            prop_assert!(!name.contains('/') && (encode(&bytes) == name) == (bytes == component.as_bytes()));
        }

        #[test]
        fn arbitrary_names_decode(name: String) {
            true_name(&name);
        }
    }

    #[test]
    fn taken_names_are_varied() {
        let mut taken = Taken::default();
        let names: Vec<String> = ["a", "b", "a", "a"]
            .iter()
            .map(|n| taken.claim((*n).to_owned()))
            .collect();
        assert_eq!(names, ["a", "b", "a%#2", "a%#3"]);
    }
}

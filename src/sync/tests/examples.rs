//! The worked examples of PROTOCOL.md, replayed against a server.

use super::*;
use std::io::{Read, Write};

/// The examples: what is sent, and what must come; nothing for any byte.
fn examples(text: &str) -> Vec<(bool, Vec<Option<u8>>)> {
    let blocks = text
        .split("```hex\n")
        .skip(1)
        .filter_map(|b| b.split("```").next());
    let lines = blocks
        .flat_map(str::lines)
        .map(str::trim)
        .filter(|l| !l.is_empty());
    let mut all: Vec<(bool, Vec<Option<u8>>)> = Vec::new();
    for line in lines {
        let rest = match line.split_once(' ') {
            Some(("→", rest)) => {
                all.push((true, Vec::new()));
                rest
            }
            Some(("←", rest)) => {
                all.push((false, Vec::new()));
                rest
            }
            _ => line,
        };
        let bytes = rest.split_whitespace().map(|b| match b {
            ".." => None,
            hex => Some(u8::from_str_radix(hex, 16).unwrap()),
        });
        all.last_mut().unwrap().1.extend(bytes);
    }
    all
}

#[test]
fn the_worked_examples_are_what_is_said() {
    let there = Fixture::new();
    let bytes: Vec<u8> = (0..100).collect();
    there
        .store
        .put_object(&request(&there.write("object", &bytes)))
        .unwrap();
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let examples = examples(include_str!("../../../PROTOCOL.md"));
    assert!(examples.len() >= 10);
    std::thread::scope(|scope| {
        let pipe = Pipe::socket(theirs.into()).unwrap();
        scope.spawn(|| serve(&there.store, &mut over(pipe), &Allowed::default()));
        for (n, (sent, bytes)) in examples.iter().enumerate() {
            if *sent {
                let bytes: Vec<u8> = bytes.iter().map(|b| b.unwrap()).collect();
                ours.write_all(&bytes).unwrap();
                continue;
            }
            let mut got = vec![0; 4];
            ours.read_exact(&mut got).unwrap();
            let len = u32::from_le_bytes(got[..].try_into().unwrap()) as usize;
            got.resize(4 + len, 0);
            ours.read_exact(&mut got[4..]).unwrap();
            let hex: Vec<String> = got.iter().map(|b| format!("{b:02x}")).collect();
            let right =
                got.len() == bytes.len() && got.iter().zip(bytes).all(|(a, b)| b.is_none_or(|b| *a == b));
            assert!(right, "example {n} is answered with\n{}", hex.join(" "));
        }
        drop(ours);
    });
}

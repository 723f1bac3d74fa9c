//! Whole conversations, either end's: whatever a peer says, there is an end to it, and nothing of it is believed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use zspace::id::ObjectId;
use zspace::store::{CommitRequest, Options, Store};
use zspace::sync::{Allowed, Link, Patience, PullRequest, PushRequest, Stop, Wire, pull, push, serve};

/// What the other side says, whatever it is told.
struct Said(Vec<u8>);

impl Wire for Said {
    fn read(&mut self, buf: &mut [u8], _: Instant) -> io::Result<usize> {
        let n = buf.len().min(self.0.len());
        buf[..n].copy_from_slice(&self.0[..n]);
        self.0.drain(..n);
        Ok(n)
    }

    fn write(&mut self, bytes: &[u8], _: Instant) -> io::Result<usize> {
        Ok(bytes.len())
    }
}

/// A store with a version, in the directory for temporary files; it is there for as long as the process.
fn store() -> &'static Store {
    static STORE: OnceLock<Store> = OnceLock::new();
    STORE.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("zspace-fuzz-{}", std::process::id()));
        let file = dir.join("file");
        std::fs::create_dir_all(&dir).expect("a directory");
        std::fs::write(&file, b"some bytes").expect("a file");
        let options = Options { memory: 1 << 20, threads: 1 };
        let store = Store::open_or_init(&dir.join("store"), &options).expect("a store");
        store.commit(&request(&file)).expect("a version");
        store
    })
}

fn request(file: &Path) -> CommitRequest {
    CommitRequest {
        branch: "main".into(),
        entries: vec![(b"file".to_vec(), file.to_owned())],
        message: String::new(),
        follow_links: false,
        keep_links: false,
        progress: None,
        stop: None,
    }
}

/// Frames: a hello that is right, then of each stretch of the input a type, a length, and so much of what follows.
fn frames(mut data: &[u8]) -> Vec<u8> {
    let hello = [&b"zspace.peer\0"[..], &[1, 0, 1, 0], &[9; 16], &[4], b"fuzz"].concat();
    let frame = |kind: u8, body: &[u8]| [&(1 + body.len() as u32).to_le_bytes()[..], &[kind], body].concat();
    let mut out = frame(1, &hello);
    while let [kind, len, rest @ ..] = data {
        let body;
        (body, data) = rest.split_at(rest.len().min(usize::from(*len)));
        out.extend(frame(*kind, body));
    }
    out
}

fuzz_target!(|data: &[u8]| {
    let [which, data @ ..] = data else { return };
    let said = if which & 8 == 0 { frames(data) } else { data.to_vec() };
    let patience = Patience { frame: Duration::from_secs(5), idle: Duration::from_secs(5), ..Patience::default() };
    let mut link = Link::new(Box::new(Said(said)), patience, Stop::default());
    let (store, head) = (store(), store().latest("main").map(|v| v.id));
    match which % 4 {
        0 => drop(serve(store, &mut link, &Allowed::default())),
        1 => drop(pull(store, &mut link, &PullRequest::default(), &mut |_| Ok(()))),
        2 => {
            let objects = vec![ObjectId([7; 32])];
            let request = PullRequest { objects, ..PullRequest::default() };
            drop(pull(store, &mut link, &request, &mut |_| Ok(())));
        }
        _ => {
            let request = PushRequest { all_branches: true, ..PushRequest::default() };
            drop(push(store, &mut link, &request, &mut |_| Ok(())));
        }
    }
    assert_eq!(store.latest("main").map(|v| v.id), head);
});

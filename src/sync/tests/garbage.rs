//! What is no message is refused, whatever it is: no panic, bounded memory and time, others are served meanwhile.

use super::*;
use crate::id::ObjectId;
use crate::store::Place;
use crate::sync::link::Frame;
use crate::sync::message::{Checked, Hello, Readable, Target};
use std::io::Write;
use std::net::Shutdown;

/// Malformed conversations that are tried; a million of them take a minute or two.
fn tries() -> u64 {
    let set = std::env::var("ZSPACE_FRAMES").ok();
    set.map_or(30_000, |n| n.parse().unwrap())
}

fn bytes((kind, body): Frame) -> Vec<u8> {
    let len = (body.len() as u32 + 1).to_le_bytes();
    [&len[..], &[kind], &body].concat()
}

/// A hello, and one request of each kind, for things that are there and things that are not.
fn right(f: &Fixture) -> Vec<Vec<u8>> {
    let version = f.store.latest("main").unwrap();
    let object = Target::Object(f.store.objects()[0].id);
    let hello = Hello {
        spoken: (1, 1),
        store: [3; 16],
        agent: "test".into(),
    };
    let requests = [
        Request::Refs { after: String::new() },
        Request::Log {
            head: version.id,
            known: vec![VersionId([1; 32])],
        },
        Request::Nodes(vec![version.version.tree, crate::id::NodeId([1; 32])]),
        Request::Object(object),
        Request::Object(Target::File(crate::id::FileHash([1; 32]), 7)),
        Request::Objects {
            after: ObjectId([0; 32]),
        },
        Request::Records {
            of: object,
            places: vec![Place { scale: 0, index: 3 }, Place { scale: 2, index: 0 }],
        },
        Request::Read {
            of: Readable::Whole(object),
            bytes: 3..700,
            packed: true,
        },
        Request::Read {
            of: Readable::Node(4, version.version.tree),
            bytes: 0..1000,
            packed: false,
        },
        Request::Check(Checked::Version(version.id)),
        Request::Push {
            branch: "main".into(),
            head: VersionId([2; 32]),
            signature: Vec::new(),
        },
        Request::PushObject(ObjectId([2; 32])),
    ];
    let mut all = vec![bytes(hello.encode())];
    all.extend(requests.iter().map(|r| bytes(r.encode())));
    all
}

/// Mangles one frame of a conversation in the way of number `n`.
fn mangle(mut frames: Vec<Vec<u8>>, n: u64, noise: &mut Noise) -> Vec<u8> {
    let at = (noise.next() % frames.len() as u64) as usize;
    let frame = &mut frames[at];
    let body = frame.len() as u32 - 4;
    let set = |frame: &mut Vec<u8>, len: u32| frame[..4].copy_from_slice(&len.to_le_bytes());
    match n % 14 {
        0 => frame.truncate((noise.next() % frame.len() as u64) as usize),
        1 => set(frame, 0),
        2 => set(frame, body + 1),
        3 => set(frame, body - 1),
        4 => set(frame, u32::MAX),
        5 => set(frame, (1 << 20) + 1),
        6 => frame[4] = noise.next() as u8,
        7 => {
            let i = 4 + (noise.next() % u64::from(body)) as usize;
            frame[i] ^= 1 << (noise.next() % 8);
        }
        8 => {
            // A count or a length of 2⁶⁴ − 1.
            let i = 5 + (noise.next() % u64::from(body)) as usize;
            frame.splice(i..i, [0xff; 9].into_iter().chain([1]));
            let len = frame.len() as u32 - 4;
            set(frame, len);
        }
        9 => frames.swap(0, at),
        10 => frames.insert(at, frames[0].clone()),
        11 => {
            let versions = [(0u16, 0u16), (2, 9), (u16::MAX, 0), (1, 1)][(noise.next() % 4) as usize];
            frames[0][17..19].copy_from_slice(&versions.0.to_le_bytes());
            frames[0][19..21].copy_from_slice(&versions.1.to_le_bytes());
        }
        12 => frames[at] = bytes((0x20 + (noise.next() % 16) as u8, noise.bytes(40))),
        _ => {
            let len = (noise.next() % 300) as usize;
            frames[at] = noise.bytes(len);
        }
    }
    frames.concat()
}

#[test]
fn malformed_frames_are_refused_and_nothing_comes_of_them() {
    let f = Fixture::new();
    f.commit(&f.write("a", b"some bytes"));
    f.store
        .put_object(&request(&f.write("object", &Noise(5).bytes(3000))))
        .unwrap();
    let (before, packs) = (f.store.latest("main").unwrap().id, f.store.stats().unwrap().packs);
    let right = right(&f);
    let mut noise = Noise(99);
    let (mut refused, start) = (0, Instant::now());
    for n in 0..tries() {
        let sent = mangle(right.clone(), n, &mut noise);
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(&sent).unwrap();
        ours.shutdown(Shutdown::Write).unwrap();
        let pipe = Pipe::socket(theirs.into()).unwrap();
        let done = serve(&f.store, &mut over(pipe), &Allowed::default());
        refused += u64::from(done.is_err());
    }
    // The last request, a push of what nobody has, ends every conversation that gets so far.
    assert_eq!(refused, tries());
    assert!(
        start.elapsed() < Duration::from_millis(5 * tries()),
        "it takes too long"
    );
    assert_eq!(f.store.latest("main").unwrap().id, before);
    assert_eq!(f.store.stats().unwrap().packs, packs);
    sound(&f.store);
}

#[test]
fn who_dawdles_is_hung_up_on() {
    let f = Fixture::new();
    f.commit(&f.write("a", b"some bytes"));
    f.store.put_object(&request(&f.write("object", b"more"))).unwrap();
    let right = right(&f);
    for part in [
        &right[0][..3],
        &right[0][..],
        &[&right[0][..], &right[1][..5]].concat(),
    ] {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.write_all(part).unwrap();
        let patience = Patience {
            frame: Duration::from_millis(50),
            idle: Duration::from_millis(100),
            slowest: 0,
            ..Patience::default()
        };
        let mut link = Link::new(
            Box::new(Pipe::socket(theirs.into()).unwrap()),
            patience,
            Stop::default(),
        );
        let start = Instant::now();
        let done = serve(&f.store, &mut link, &Allowed::default());
        assert_eq!(done.unwrap_err().kind(), Kind::Io);
        assert!(start.elapsed() < Duration::from_secs(2));
    }
}

#[test]
fn others_are_served_while_somebody_sends_garbage() {
    let f = Fixture::new();
    let files = series(&f, &[20_000], 4);
    let path = f.path("socket");
    let options = ServeOptions {
        allowed: Allowed::default(),
        peers: 16,
        tls: None,
        patience: Patience {
            frame: Duration::from_millis(200),
            idle: Duration::from_secs(5),
            slowest: 0,
            ..Patience::default()
        },
    };
    let server = Server::bind(&[Listen::Unix(path.clone())], options).unwrap();
    let (stop, ask) = stopping();
    std::thread::scope(|scope| {
        scope.spawn(|| server.run(&f.store, &ask).unwrap());
        let garbage = scope.spawn(|| {
            let mut noise = Noise(3);
            for _ in 0..400 {
                let mut ours = UnixStream::connect(&path).unwrap();
                let len = (noise.next() % 200) as usize;
                // It may be hung up on already, and half of them just stay there for a while.
                let _ = ours.write_all(&noise.bytes(len));
            }
        });
        let ways = Ways::default();
        for _ in 0..5 {
            let here = Fixture::new();
            let mut peer = Peer::connect(&Address::Unix(path.clone()), &ways).unwrap();
            let done = pull(
                &here.store,
                peer.link().unwrap(),
                &PullRequest::default(),
                &mut |_| Ok(()),
            );
            // When there are too many, who comes is turned away.
            if done.is_ok() {
                same(&here.store, &f.store, &files);
            }
        }
        garbage.join().unwrap();
        std::thread::sleep(Duration::from_millis(300));
        let here = Fixture::new();
        let mut peer = Peer::connect(&Address::Unix(path.clone()), &ways).unwrap();
        pull(
            &here.store,
            peer.link().unwrap(),
            &PullRequest::default(),
            &mut |_| Ok(()),
        )
        .unwrap();
        same(&here.store, &f.store, &files);
        drop(peer);
        stop.store(true, Relaxed);
    });
    drop(server);
    assert!(!path.exists());
}

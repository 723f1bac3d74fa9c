//! Who works on what the other side waits for says so, and is waited for.

use super::*;
use crate::id::ObjectId;
use crate::sync::ask::hello;
use crate::sync::message::Checked;
use std::io::{Read, Write};

fn patient(pipe: Pipe, idle: u64, still: u64) -> Link {
    let patience = Patience {
        idle: Duration::from_millis(idle),
        still: Duration::from_millis(still),
        ..Patience::default()
    };
    Link::new(Box::new(pipe), patience, Stop::default())
}

#[test]
fn who_is_at_work_is_waited_for_and_who_is_silent_is_not() {
    let work = || -> Result<()> {
        std::thread::sleep(Duration::from_millis(900));
        Ok(())
    };
    for says_so in [true, false] {
        let (a, b) = pair();
        let mut waits = patient(a, 300, 20);
        let heard = std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut works = patient(b, 10_000, 20);
                hello(&mut works, [1; 16]).unwrap();
                match says_so {
                    true => works.while_busy(|_| work()).unwrap(),
                    false => work().unwrap(),
                }
                works.put(0x28, &[]).and_then(|()| works.flush())
            });
            hello(&mut waits, [2; 16]).unwrap();
            waits.next()
        });
        match says_so {
            true => assert_eq!(heard.unwrap(), Some((0x28, Vec::new()))),
            false => assert_eq!(heard.unwrap_err().kind(), Kind::Io),
        }
    }
}

/// Bytes that a server sends for one request.
fn answered(f: &Fixture, request: &Request, still: u64) -> Vec<u8> {
    let (mut ours, theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        let mut link = patient(Pipe::socket(theirs.into()).unwrap(), 10_000, still);
        scope.spawn(move || serve(&f.store, &mut link, &Allowed::default()));
        let hello = crate::sync::message::Hello {
            spoken: (1, 1),
            store: [3; 16],
            agent: "test".into(),
        };
        for (kind, body) in [hello.encode(), request.encode()] {
            let len = (body.len() as u32 + 1).to_le_bytes();
            ours.write_all(&[&len[..], &[kind], &body].concat()).unwrap();
        }
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        let mut all = Vec::new();
        ours.read_to_end(&mut all).unwrap();
        all
    })
}

#[test]
fn a_server_says_that_it_is_at_work_on_a_check() {
    let f = Fixture::new();
    let bytes = Noise(1).bytes(30 << 20);
    let put = f.store.put_object(&request(&f.write("object", &bytes))).unwrap();
    let check = |id| Request::Check(Checked::Object(id));
    let still = [1, 0, 0, 0, 2];
    let said = answered(&f, &check(put.id), 1);
    assert!(said.windows(5).any(|w| w == still), "{} bytes", said.len());
    assert!(said.ends_with(&[2, 0, 0, 0, 0x2a, 0]));
    let said = answered(&f, &check(ObjectId([1; 32])), 10_000);
    assert!(!said.windows(5).any(|w| w == still));
}

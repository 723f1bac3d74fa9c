//! Servers on sockets: who is let in, who is told that there is no place, and what a path may be.

use super::*;

fn server(f: &Fixture, peers: usize) -> (Server, std::path::PathBuf) {
    let path = f.path("socket");
    let options = ServeOptions {
        allowed: Allowed::default(),
        peers,
        tls: None,
        patience: Patience::default(),
    };
    (
        Server::bind(&[Listen::Unix(path.clone())], options).unwrap(),
        path,
    )
}

#[test]
fn who_finds_no_place_is_told_so_and_a_stop_ends_who_is_silent() {
    let f = Fixture::new();
    let files = series(&f, &[3000], 2);
    let (server, path) = server(&f, 1);
    let (told, stop) = stopping();
    let address = Address::Unix(path);
    let from = |here: &Fixture| {
        Peer::with(&address, &Ways::default(), |link| {
            pull(&here.store, link, &PullRequest::default(), &mut |_| Ok(()))
        })
    };
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.run(&f.store, &stop));
        let mut silent = Peer::connect(&address, &Ways::default()).unwrap();
        let link = silent.link().unwrap();
        crate::sync::ask::hello(link, [1; 16]).unwrap();
        let here = Fixture::new();
        let e = from(&here).unwrap_err();
        assert_eq!(e.kind(), Kind::Busy, "{e}");
        assert!(e.to_string().contains("1 peers are served already"), "{e}");
        drop(silent);
        // Its place is free soon.
        let end = Instant::now() + Duration::from_secs(10);
        while from(&here).is_err() {
            assert!(Instant::now() < end);
        }
        same(&here.store, &f.store, &files);
        let mut silent = loop {
            let mut peer = Peer::connect(&address, &Ways::default()).unwrap();
            if crate::sync::ask::hello(peer.link().unwrap(), [1; 16]).is_ok() {
                break peer;
            }
        };
        let start = Instant::now();
        told.store(true, Relaxed);
        running.join().unwrap().unwrap();
        assert!(start.elapsed() < Duration::from_secs(5));
        let last = silent.link().unwrap().next().unwrap().unwrap();
        assert!(matches!(Answer::decode(&last), Ok(Answer::Failed(_))), "{last:?}");
    });
}

#[test]
fn nothing_but_a_socket_is_replaced_by_a_socket() {
    let f = Fixture::new();
    let path = f.write("socket", b"precious");
    let link = f.path("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let options = || ServeOptions {
        allowed: Allowed::default(),
        peers: 1,
        tls: None,
        patience: Patience::default(),
    };
    for at in [&path, &link] {
        let e = Server::bind(&[Listen::Unix(at.clone())], options())
            .err()
            .unwrap();
        assert_eq!(e.kind(), Kind::Exists, "{e}");
    }
    assert_eq!(fs::read(&link).unwrap(), b"precious");
    // One that was left behind is.
    let path = f.path("left");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    Server::bind(&[Listen::Unix(path)], options()).unwrap();
}

#[test]
fn what_answers_and_is_no_zspace_is_told_as_such() {
    for said in [&b"Welcome to gpu1!\n"[..], b"\x15\x03\x03\x00\x02\x02\x32"] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let address: Address = format!("tcp:{at}").parse().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| io::Write::write_all(&mut listener.accept().unwrap().0, said).unwrap());
            let here = Fixture::new();
            let e = Peer::with(&address, &Ways::default(), |link| {
                pull(&here.store, link, &PullRequest::default(), &mut |_| Ok(()))
            });
            let e = e.unwrap_err().to_string();
            assert!(e.starts_with(&format!("tcp:{at}: ")), "{e}");
            assert!(e.contains("With TLS it is tls:HOST:PORT"), "{e}");
        });
    }
}

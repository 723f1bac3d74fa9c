//! Transfers at the same time, transfers that are stopped, and transfers of which a part is refused.

use super::*;
use crate::sync::tests::lies::{Lie, lying};

/// Stops when it is asked for the `n`th time.
fn stop_at(n: u64) -> Stop {
    let asked = AtomicU64::new(0);
    Stop::when(move || match asked.fetch_add(1, Relaxed) < n {
        true => Ok(()),
        false => Err(Error::new(Kind::Stopped, "stopped")),
    })
}

#[test]
fn a_pull_that_is_stopped_anywhere_goes_on_later() {
    let there = Fixture::new();
    let files = series(&there, &[1_500_000, 300], 2);
    let object = there
        .store
        .put_object(&request(&there.write("object", &Noise(2).bytes(9 << 20))))
        .unwrap();
    let all = PullRequest {
        all_objects: true,
        ..PullRequest::default()
    };
    let mut stopped = 0;
    for n in 0.. {
        let here = Fixture::new();
        let (a, b) = pair();
        let done = std::thread::scope(|scope| {
            scope.spawn(|| serve(&there.store, &mut over(b), &Allowed::default()));
            let mut link = Link::new(Box::new(a), Patience::default(), stop_at(n * 3));
            pull(&here.store, &mut link, &all, &mut |_| Ok(()))
        });
        sound(&here.store);
        match done {
            Ok(_) => break,
            Err(e) => assert_eq!(e.kind(), Kind::Stopped, "{e}"),
        }
        stopped += 1;
        assert!(here.store.latest("main").is_none() && here.store.objects().is_empty());
        pull_with(&here.store, &there.store, &all, Fault::None).unwrap();
        same(&here.store, &there.store, &files);
        assert_eq!(here.store.objects()[0].id, object.id);
    }
    // More often than there are frames: proofs were stopped as well.
    assert!(stopped > 10, "{stopped}");
}

#[test]
fn who_waits_for_a_silent_peer_can_be_stopped() {
    for at_work in [false, true] {
        let (a, b) = pair();
        let (told, stop) = stopping();
        std::thread::scope(|scope| {
            let told = &told;
            scope.spawn(move || {
                let patience = Patience {
                    still: Duration::from_millis(5),
                    ..Patience::default()
                };
                let mut other = Link::new(Box::new(b), patience, Stop::default());
                crate::sync::ask::hello(&mut other, [1; 16]).unwrap();
                let wait = || -> Result<()> {
                    std::thread::sleep(Duration::from_secs(2));
                    Ok(())
                };
                match at_work {
                    true => other.while_busy(|_| wait()).unwrap(),
                    false => wait().unwrap(),
                }
            });
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(100));
                told.store(true, Relaxed);
            });
            let here = Fixture::new();
            let start = Instant::now();
            let mut link = Link::new(Box::new(a), Patience::default(), stop);
            let e = pull(&here.store, &mut link, &PullRequest::default(), &mut |_| Ok(())).unwrap_err();
            assert_eq!(e.kind(), Kind::Stopped, "{e}");
            assert!(start.elapsed() < Duration::from_millis(1500));
        });
    }
}

#[test]
fn who_pushes_the_same_at_the_same_time_succeeds() {
    let here = Fixture::new();
    let files = series(&here, &[30_000], 4);
    for _ in 0..5 {
        let there = Fixture::new();
        let other = Store::open(there.store.dir(), &options()).unwrap();
        std::thread::scope(|scope| {
            let one = scope.spawn(|| push_to(&here.store, &there.store, Fault::None));
            push_to(&here.store, &other, Fault::None).unwrap();
            one.join().unwrap().unwrap();
        });
        same(&there.store, &here.store, &files);
    }
}

/// Somebody sets a tag after the pull looked.
#[test]
fn a_tag_that_came_meanwhile_is_left_alone() {
    for (target, kept) in [("main/1", false), ("main/2", true)] {
        let (there, here) = (Fixture::new(), Fixture::new());
        let mut model = Model::new(&[3000]);
        for n in 0..2 {
            commit(&there, "main", &mut model, n);
        }
        pull_from(&here.store, &there.store);
        there.store.set_tag("best", "main/1", false).unwrap();
        commit(&there, "main", &mut model, 2);
        let mut set = false;
        let pulled = with(&there.store, &Allowed::default(), Fault::None, |link| {
            pull(&here.store, link, &PullRequest::default(), &mut |_| {
                if !std::mem::replace(&mut set, true) {
                    here.store.set_tag("best", target, false)?;
                }
                Ok(())
            })
        });
        let pulled = pulled.0.unwrap();
        assert_eq!(pulled.tags_kept.contains(&"best".to_owned()), kept);
        assert_eq!(here.store.versions("main").unwrap().len(), 3);
        assert_eq!(
            here.store.resolve("best").unwrap().id,
            here.store.resolve(target).unwrap().id
        );
    }
}

#[test]
fn one_branch_that_is_refused_does_not_keep_others() {
    let (there, here) = (Fixture::new(), Fixture::new());
    let mut model = Model::new(&[3000]);
    commit(&there, "main", &mut model, 0);
    pull_from(&here.store, &there.store);
    for name in ["a", "b"] {
        here.store.make_branch(name, Some("main")).unwrap();
        commit(&here, name, &mut model, 1);
    }
    commit(&there, "main", &mut model, 2);
    commit(&here, "main", &mut model, 3);
    let pushed = push_to(&here.store, &there.store, Fault::None).unwrap();
    let names: Vec<_> = pushed.branches.iter().map(|b| b.0.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    assert!(
        pushed.refused[0].0 == "main" && pushed.refused[0].1.contains("main:NAME"),
        "{pushed:?}"
    );
    there.store.refresh().unwrap();
    assert_eq!(
        there.store.latest("b").unwrap().id,
        here.store.latest("b").unwrap().id
    );
    // A pull brings all or nothing, and says how to leave one out.
    commit(&there, "a", &mut model, 4);
    let e = pull_with(&here.store, &there.store, &PullRequest::default(), Fault::None).unwrap_err();
    assert!(e.to_string().contains("name the other branches"), "{e}");
    assert_eq!(here.store.versions("a").unwrap().len(), 1);
    // What is expected is of one branch.
    let expect = PullRequest {
        expect: there.store.latest("main").map(|v| v.id),
        ..PullRequest::default()
    };
    let e = pull_with(&here.store, &there.store, &expect, Fault::None).unwrap_err();
    assert_eq!(e.kind(), Kind::Usage, "{e}");
}

#[test]
fn objects_are_seen_only_with_the_versions_that_come_with_them() {
    let (there, here) = (Fixture::new(), Fixture::new());
    let bytes = Noise(4).bytes(1 << 20);
    let put = |f: &Fixture, bytes: &[u8]| f.store.put_object(&request(&f.write("o", bytes))).unwrap();
    put(&here, &bytes);
    let files = series(&there, &[200_000], 2);
    for n in 1..4 {
        // Each has more in common with the one before than with what is here.
        let mut new = bytes.clone();
        new[..n * 200_000].iter_mut().for_each(|b| *b ^= 1);
        put(&there, &new);
    }
    let all = PullRequest {
        all_objects: true,
        ..PullRequest::default()
    };
    let whole = {
        let fresh = Fixture::new();
        put(&fresh, &bytes);
        pull_with(&fresh.store, &there.store, &all, Fault::None).unwrap()
    };
    let cut = Fault::Cut(whole.received - 50_000);
    pull_with(&here.store, &there.store, &all, cut).unwrap_err();
    assert_eq!(here.store.objects().len(), 1);
    assert!(here.store.latest("main").is_none());
    sound(&here.store);
    let done = pull_with(&here.store, &there.store, &all, Fault::None).unwrap();
    assert_eq!(here.store.objects().len(), 4);
    assert_eq!(done.objects.len(), 3);
    same(&here.store, &there.store, &files);
}

#[test]
fn an_audit_finds_out_who_only_says_that_all_is_right() {
    let there = Fixture::new();
    series(&there, &[50_000], 1);
    let version = there.store.latest("main").unwrap().id;
    let bytes: Lie = Box::new(|a| {
        if let Answer::Bytes { bytes, .. } = a
            && bytes.len() > 50_000
        {
            bytes[40_000] ^= 1;
        }
    });
    let gone: Lie = Box::new(|a| {
        if let Answer::Bytes { bytes, .. } = a
            && bytes.len() > 50_000
        {
            *a = Answer::Missing { damaged: false };
        }
    });
    let truth: Lie = Box::new(|_| ());
    for (lie, want) in [
        (truth, Standing::Verified),
        (bytes, Standing::Stale),
        (gone, Standing::Stale),
    ] {
        let path = there.path("replica");
        let _ = fs::remove_file(&path);
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let checks = parse_checks(&format!("version {version} unix:{}", path.display())).unwrap();
        let verdicts = std::thread::scope(|scope| {
            scope.spawn(|| {
                let pipe = Pipe::socket(listener.accept().unwrap().0.into()).unwrap();
                let _ = lying(&there.store, &mut over(pipe), &lie, None);
            });
            audit(&checks, &Ways::default(), 64 << 20, &|_| ())
        });
        assert_eq!(verdicts[0].state, want, "{verdicts:?}");
        if want == Standing::Verified {
            assert!(verdicts[0].why.contains("in 1 files"), "{verdicts:?}");
        }
    }
}

/// An import takes in what others publish between its own steps.
#[test]
fn imports_begin_while_others_publish() {
    let f = Fixture::new();
    series(&f, &[300], 1);
    let other = Store::open(f.store.dir(), &options()).unwrap();
    let (done, ended) = std::sync::mpsc::channel();
    let store = f.store.clone();
    // If one never begins, the thread is left behind, and the test fails.
    std::thread::spawn(move || {
        // Those that are under way keep their packs, so that each needs a new one.
        let all: Vec<_> = (0..300).map(|_| store.import().unwrap()).collect();
        let _ = done.send(all.len());
    });
    let end = Instant::now() + Duration::from_secs(60);
    let begun = (0..).take_while(|_| Instant::now() < end).find_map(|n| {
        other.make_branch(&format!("b{n}"), None).unwrap();
        ended.try_recv().ok()
    });
    assert_eq!(begun, Some(300));
}

//! What a peer may send although each of its parts is right: it is refused, or costs no more than it is.

use super::*;
use crate::id::{FileHash, NodeId};
use crate::store::{Adopt, Entry, EntryKind, NodeKind, Timestamp, Tree};

fn entry(name: &str, kind: EntryKind) -> Entry {
    Entry {
        name: name.into(),
        mode: 0o755,
        mtime: Timestamp::default(),
        xattrs: Vec::new(),
        kind,
    }
}

fn tree(import: &mut crate::store::Import<'_>, entries: Vec<Entry>) -> (NodeId, u64) {
    let tree = Tree::new(entries).unwrap();
    let raw = tree.encode();
    let id = Tree::id(&raw);
    import.mend(NodeKind::Tree, id, &raw).unwrap();
    (id, tree.len())
}

fn version((tree, len): (NodeId, u64), parents: &[VersionId]) -> crate::store::Version {
    crate::store::Version {
        parents: parents.to_vec(),
        entry: b"x".to_vec(),
        time: Timestamp::default(),
        message: String::new(),
        tree,
        len,
    }
}

fn publish(import: crate::store::Import<'_>, versions: Vec<crate::store::Version>) -> Result<()> {
    let adopt = Adopt {
        branch: "main".into(),
        base: None,
        versions: versions.into_iter().map(|v| (v, 0)).collect(),
    };
    import.publish(vec![adopt], Vec::new(), Vec::new()).map(drop)
}

/// Directories in which each of many levels is the one below twice.
#[test]
fn a_version_with_more_names_than_anybody_can_walk_is_refused() {
    for (levels, taken) in [(16, true), (24, false), (64, false), (70, false)] {
        let f = Fixture::new();
        let mut import = f.store.import().unwrap();
        let mut at = tree(&mut import, Vec::new());
        for _ in 0..levels {
            let twice = ["a", "b"].map(|name| {
                entry(
                    name,
                    EntryKind::Dir {
                        tree: at.0,
                        len: at.1,
                    },
                )
            });
            at = tree(&mut import, twice.to_vec());
        }
        let published = publish(import, vec![version(at, &[])]);
        match taken {
            true => published.unwrap(),
            false => assert_eq!(published.unwrap_err().kind(), Kind::Limit, "{levels}"),
        }
        // Each directory is looked at once.
        sound(&f.store);
    }
}

/// A directory that is in one version as it should be contradicts another version, in which it was not looked at again.
#[test]
fn hard_links_of_each_version_agree() {
    let f = Fixture::new();
    let file = |bytes: &[u8]| {
        f.commit(&f.write("f", bytes));
        match f
            .store
            .entry(&f.store.latest("main").unwrap(), b"f")
            .unwrap()
            .kind
        {
            EntryKind::File { hash, len, .. } => (hash, len),
            _ => panic!("no file"),
        }
    };
    let (one, two) = (file(b"one"), file(b"two"));
    let linked = |(hash, len): (FileHash, u64)| EntryKind::File { hash, len, link: 1 };
    let head = f.store.latest("main").unwrap().id;
    let mut import = f.store.import().unwrap();
    let d = tree(&mut import, vec![entry("x", linked(one))]);
    let dir = |name| entry(name, EntryKind::Dir { tree: d.0, len: d.1 });
    let first = version(tree(&mut import, vec![dir("d1"), dir("d2")]), &[head]);
    let second = vec![dir("d"), entry("z", linked(two))];
    let second = version(tree(&mut import, second), &[first.id()]);
    let adopt = Adopt {
        branch: "main".into(),
        base: Some(head),
        versions: vec![(first, 0), (second, 0)],
    };
    let e = import.publish(vec![adopt], Vec::new(), Vec::new()).unwrap_err();
    assert!(e.to_string().contains("hard links differ"), "{e}");
    sound(&f.store);
}

#[test]
fn an_object_that_another_process_put_is_there() {
    let (there, here) = (Fixture::new(), Fixture::new());
    let other = Store::open(there.store.dir(), &options()).unwrap();
    let put = other
        .put_object(&request(&there.write("object", &Noise(1).bytes(5000))))
        .unwrap();
    let request = PullRequest {
        objects: vec![put.id],
        ..PullRequest::default()
    };
    pull_with(&here.store, &there.store, &request, Fault::None).unwrap();
    assert_eq!(here.store.objects().len(), 1);
}

/// A failure of the peer's is none of ours, whatever it calls it.
#[test]
fn what_ails_a_peer_does_not_end_the_search_for_another() {
    for kind in [Kind::Usage, Kind::NoSpace, Kind::Busy, Kind::Refused] {
        let told = Answer::Failed(Error::new(kind, "no")).encode();
        let Ok(Answer::Failed(e)) = Answer::decode(&told) else {
            panic!("no failure")
        };
        assert!(crate::sync::connect::is_the_peers(e.kind()), "{kind:?}");
    }
}

#[test]
fn who_is_at_work_for_ever_is_given_up() {
    let (a, b) = pair();
    let short = Patience {
        idle: Duration::from_millis(20),
        still: Duration::from_millis(2),
        ..Patience::default()
    };
    let mut waits = Link::new(Box::new(a), short, Stop::default());
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let stop = &stop;
        scope.spawn(move || {
            let mut works = Link::new(Box::new(b), short, Stop::default());
            let work = |_: Interrupt<'_>| {
                while !stop.load(Relaxed) {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(())
            };
            works.while_busy(work).unwrap();
        });
        let start = Instant::now();
        assert_eq!(waits.next().unwrap_err().kind(), Kind::Io);
        assert!(start.elapsed() < Duration::from_secs(20));
        stop.store(true, Relaxed);
    });
}

#[test]
fn junk_takes_no_signatures_place() {
    let f = Fixture::new();
    f.commit(&f.write("a", b"some bytes"));
    let head = f.store.latest("main").unwrap().id;
    f.store
        .keep_signature("main", &head, b"one that somebody can check")
        .unwrap();
    for (branch, kept) in [
        ("main", Some(&b"one that somebody can check"[..])),
        ("other", None),
    ] {
        let push = Request::Push {
            branch: branch.into(),
            head,
            signature: b"junk".to_vec(),
        };
        let taken = with(&f.store, &Allowed::default(), Fault::None, |link| {
            crate::sync::ask::hello(link, [1; 16])?;
            let (kind, body) = push.encode();
            link.put(kind, &[&body])?;
            loop {
                let frame = link.next()?.unwrap();
                match Request::decode(&frame)? {
                    Some(request) => {
                        crate::sync::answer::answer(&f.store, link, &mut Default::default(), request)?;
                    }
                    None => return Answer::decode(&frame),
                }
            }
        });
        assert!(matches!(taken.0, Ok(Answer::Taken)), "{taken:?}");
        assert_eq!(f.store.signature(branch, &head).as_deref(), kept);
    }
}

#[test]
fn pulls_of_one_branch_at_once_all_succeed() {
    let there = Fixture::new();
    let files = series(&there, &[3000, 800], 4);
    for _ in 0..10 {
        let here = Fixture::new();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let store = Store::open(here.store.dir(), &options()).unwrap();
                    pull_from(&store, &there.store);
                });
            }
        });
        here.store.refresh().unwrap();
        same(&here.store, &there.store, &files);
    }
}

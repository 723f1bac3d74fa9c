//! Two stores and a way between them that may be cut, or lie.

mod bounds;
mod busy;
mod examples;
mod garbage;
mod hostile;
mod lies;
mod messages;
mod objects;
mod places;
mod together;

use crate::error::{Error, Interrupt, Kind, Result};
use crate::id::VersionId;
use crate::store::tests::{Fixture, Model, Noise, chains_hold, options, read, request};
use crate::store::{Store, manifest_id};
use crate::sync::message::{Answer, Request};
use crate::sync::*;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A series of drifting models on main; the bytes of each.
fn series(f: &Fixture, sizes: &[usize], n: u32) -> Vec<Vec<u8>> {
    let mut model = Model::new(sizes);
    (0..n).map(|step| commit(f, "main", &mut model, step)).collect()
}

fn commit(f: &Fixture, branch: &str, model: &mut Model, step: u32) -> Vec<u8> {
    let bytes = model.safetensors(step);
    let mut request = request(&f.write("model.safetensors", &bytes));
    request.branch = branch.into();
    f.store.commit(&request).unwrap();
    model.step();
    bytes
}

/// What a way does with the bytes that come over it.
#[derive(Clone, Copy)]
enum Fault {
    None,
    /// It breaks after so many.
    Cut(u64),
    /// A bit of this one is flipped.
    Flip(u64),
}

/// One end of a way between two peers.
struct Faulty {
    inner: Pipe,
    fault: Fault,
    passed: Arc<AtomicU64>,
}

impl Wire for Faulty {
    fn read(&mut self, buf: &mut [u8], deadline: Instant) -> io::Result<usize> {
        let at = self.passed.load(Relaxed);
        let most = match self.fault {
            Fault::Cut(n) if at >= n => return Ok(0),
            Fault::Cut(n) => buf.len().min((n - at) as usize),
            _ => buf.len(),
        };
        let n = self.inner.read(&mut buf[..most], deadline)?;
        if let Fault::Flip(flip) = self.fault
            && let Some(byte) = flip.checked_sub(at).and_then(|i| buf[..n].get_mut(i as usize))
        {
            *byte ^= 1 << (flip % 8);
        }
        self.passed.fetch_add(n as u64, Relaxed);
        Ok(n)
    }

    fn write(&mut self, bytes: &[u8], deadline: Instant) -> io::Result<usize> {
        self.inner.write(bytes, deadline)
    }
}

fn over(wire: impl Wire + 'static) -> Link {
    let patience = Patience {
        frame: Duration::from_millis(300),
        idle: Duration::from_secs(20),
        slowest: 0,
        ..Patience::default()
    };
    Link::new(Box::new(wire), patience, Stop::default())
}

/// What stops, once it is told to.
fn stopping() -> (Arc<AtomicBool>, Stop) {
    let told = Arc::new(AtomicBool::new(false));
    let asked = told.clone();
    let stop = Stop::when(move || match asked.load(Relaxed) {
        true => Err(Error::new(Kind::Stopped, "stopped")),
        false => Ok(()),
    });
    (told, stop)
}

fn pair() -> (Pipe, Pipe) {
    let (a, b) = UnixStream::pair().unwrap();
    (Pipe::socket(a.into()).unwrap(), Pipe::socket(b.into()).unwrap())
}

/// Runs `here` against a server of the other store; what both came to.
fn with<T>(
    there: &Store,
    allowed: &Allowed,
    fault: Fault,
    here: impl FnOnce(&mut Link) -> Result<T>,
) -> (Result<T>, Result<()>) {
    let (a, b) = pair();
    let mut link = over(Faulty {
        inner: a,
        fault,
        passed: Arc::default(),
    });
    std::thread::scope(|scope| {
        let server = scope.spawn(|| serve(there, &mut over(b), allowed));
        let done = here(&mut link);
        drop(link);
        (done, server.join().unwrap())
    })
}

fn pull_with(here: &Store, there: &Store, request: &PullRequest, fault: Fault) -> Result<Pulled> {
    with(there, &Allowed::default(), fault, |link| {
        pull(here, link, request, &mut |_| Ok(()))
    })
    .0
}

fn pull_from(here: &Store, there: &Store) -> Pulled {
    pull_with(here, there, &PullRequest::default(), Fault::None).unwrap()
}

fn all_branches() -> PushRequest {
    PushRequest {
        all_branches: true,
        ..PushRequest::default()
    }
}

fn push_to(here: &Store, there: &Store, fault: Fault) -> Result<Pushed> {
    with(there, &Allowed::default(), fault, |link| {
        push(here, link, &all_branches(), &mut |_| Ok(()))
    })
    .0
}

/// Everything here is right, also for who opens the store anew.
fn sound(store: &Store) {
    for store in [store, &Store::open(store.dir(), &options()).unwrap()] {
        let mut versions = Vec::new();
        for b in store.branches() {
            versions.extend(store.versions(&b).unwrap());
        }
        let mut report = store.verify(&versions, &mut |_| {});
        store.verify_objects(&store.objects(), &mut report, &mut |_| {});
        store.verify_packs(&mut report);
        assert_eq!(report.damage, []);
        chains_hold(store);
    }
}

fn same(here: &Store, there: &Store, files: &[Vec<u8>]) {
    here.refresh().unwrap();
    let ids = |s: &Store| -> Vec<VersionId> { s.versions("main").unwrap().iter().map(|v| v.id).collect() };
    assert_eq!(ids(here), ids(there));
    for (n, bytes) in files.iter().enumerate() {
        assert!(read(here, &format!("main/{}", n + 1), "model.safetensors").unwrap() == *bytes);
    }
    sound(here);
}

#[test]
fn a_pull_brings_everything_and_then_only_what_is_new() {
    let (there, here) = (Fixture::new(), Fixture::new());
    let mut model = Model::new(&[200_000, 3000, 100]);
    let mut files: Vec<_> = (0..8).map(|n| commit(&there, "main", &mut model, n)).collect();
    let cold = pull_from(&here.store, &there.store);
    assert_eq!(cold.branches[0].new, 8);
    same(&here.store, &there.store, &files);
    let packed = there.store.stats().unwrap().packs;
    assert!(
        cold.received < packed + packed / 50,
        "{} of {packed}",
        cold.received
    );
    let added = here.store.stats().unwrap().packs;
    assert!(added < packed + packed / 100, "{added} for {packed}");
    // Nothing more to do.
    let again = pull_from(&here.store, &there.store);
    assert_eq!((again.nodes, again.branches[0].new), (0, 0));
    assert!(again.received + again.sent < 500, "{again:?}");
    // One more.
    let before = there.store.stats().unwrap().packs;
    files.push(commit(&there, "main", &mut model, 8));
    let added = there.store.stats().unwrap().packs - before;
    let warm = pull_from(&here.store, &there.store);
    same(&here.store, &there.store, &files);
    assert!(
        warm.received < added + added / 50 + 500,
        "{} for {added}",
        warm.received
    );
    assert!(warm.rounds <= 7, "{warm:?}");
}

#[test]
fn a_push_is_a_pull_from_the_other_side() {
    let (there, here) = (Fixture::new(), Fixture::new());
    let files = series(&here, &[50_000], 5);
    let pushed = push_to(&here.store, &there.store, Fault::None).unwrap();
    assert_eq!(pushed.branches.len(), 1);
    same(&there.store, &here.store, &files);
    assert_eq!(push_to(&here.store, &there.store, Fault::None).unwrap().nodes, 0);
    let allowed = Allowed {
        read_only: true,
        ..Allowed::default()
    };
    let refused = with(&there.store, &allowed, Fault::None, |link| {
        push(&here.store, link, &all_branches(), &mut |_| Ok(()))
    });
    assert_eq!(refused.0.unwrap_err().kind(), Kind::Refused);
    refused.1.unwrap();
}

#[test]
fn who_has_gone_another_way_is_told_and_nothing_changes() {
    let (there, here) = (Fixture::new(), Fixture::new());
    let mut model = Model::new(&[3000]);
    commit(&there, "main", &mut model, 0);
    pull_from(&here.store, &there.store);
    commit(&there, "main", &mut model, 1);
    commit(&here, "main", &mut model, 2);
    let e = pull_with(&here.store, &there.store, &PullRequest::default(), Fault::None).unwrap_err();
    assert_eq!(e.kind(), Kind::Refused, "{e}");
    let e = push_to(&here.store, &there.store, Fault::None).unwrap_err();
    assert_eq!(e.kind(), Kind::Refused, "{e}");
    assert_eq!(there.store.versions("main").unwrap().len(), 2);
    // Under another name both are here.
    let renamed = PullRequest {
        branches: vec![("main".into(), "theirs".into())],
        ..PullRequest::default()
    };
    pull_with(&here.store, &there.store, &renamed, Fault::None).unwrap();
    assert_eq!(
        here.store.latest("theirs").unwrap().id,
        there.store.latest("main").unwrap().id
    );
    assert_eq!(here.store.versions("theirs").unwrap().len(), 1);
    sound(&here.store);
}

#[test]
fn branches_tags_and_objects_come_along() {
    let (there, here) = (Fixture::new(), Fixture::new());
    let mut model = Model::new(&[3000, 500]);
    for n in 0..3 {
        commit(&there, "main", &mut model, n);
    }
    there.store.make_branch("exp", Some("main/2")).unwrap();
    there.store.make_branch("empty", None).unwrap();
    commit(&there, "exp", &mut model, 7);
    there.store.set_tag("best", "exp/1", false).unwrap();
    there.store.set_tag("first", "main/1", false).unwrap();
    let path = there.write("notes.txt", &b"some notes, again and again. ".repeat(5000));
    let object = there.store.put_object(&request(&path)).unwrap();
    let all = PullRequest {
        all_objects: true,
        ..PullRequest::default()
    };
    here.store.make_branch("first", None).unwrap();
    let pulled = pull_with(&here.store, &there.store, &all, Fault::None).unwrap();
    assert_eq!(
        (pulled.tags, pulled.tags_kept),
        (vec!["best".to_owned()], vec!["first".to_owned()])
    );
    assert_eq!(here.store.resolve("best").unwrap().name(), "exp/000001");
    assert_eq!(here.store.forked_from("exp"), there.store.forked_from("exp"));
    assert_eq!(here.store.objects()[0].manifest, object.manifest);
    sound(&here.store);
    // One branch alone, with all that leads to it.
    let alone = Fixture::new();
    let exp = PullRequest {
        branches: vec![("exp".into(), "exp".into())],
        expect: Some(there.store.latest("exp").unwrap().id),
        ..PullRequest::default()
    };
    pull_with(&alone.store, &there.store, &exp, Fault::None).unwrap();
    assert_eq!(alone.store.versions("exp").unwrap().len(), 3);
    assert_eq!(alone.store.resolve("first").unwrap().name(), "exp/000001");
    pull_from(&alone.store, &there.store);
    assert_eq!(
        alone.store.latest("main").unwrap().id,
        there.store.latest("main").unwrap().id
    );
    sound(&alone.store);
    // Something else than what is expected.
    let other = PullRequest {
        expect: Some(VersionId([9; 32])),
        ..exp
    };
    let fresh = Fixture::new();
    let e = pull_with(&fresh.store, &there.store, &other, Fault::None).unwrap_err();
    assert_eq!(e.kind(), Kind::Refused);
    assert_eq!(fresh.store.stats().unwrap().packs, 0);
    // Pushed.
    let objects = PushRequest {
        objects: vec![object.id],
        ..PushRequest::default()
    };
    let pushed = with(&fresh.store, &Allowed::default(), Fault::None, |link| {
        push(&here.store, link, &objects, &mut |_| Ok(()))
    });
    assert_eq!(pushed.0.unwrap().objects, [object.id.to_string()]);
    fresh.store.refresh().unwrap();
    assert_eq!(fresh.store.objects()[0].id, object.id);
    sound(&fresh.store);
}

#[test]
fn two_pushers_at_once_both_succeed_or_one_is_told() {
    let there = Fixture::new();
    let (a, b) = (Fixture::new(), Fixture::new());
    series(&a, &[3000], 3);
    let mut model = Model::new(&[4000]);
    commit(&b, "main", &mut model, 1);
    let (one, other) = std::thread::scope(|scope| {
        let one = scope.spawn(|| push_to(&a.store, &there.store, Fault::None));
        let other = push_to(
            &b.store,
            &Store::open(there.store.dir(), &options()).unwrap(),
            Fault::None,
        );
        (one.join().unwrap(), other)
    });
    assert!(one.is_ok() != other.is_ok(), "{one:?} {other:?}");
    let e = one.err().or(other.err()).unwrap();
    assert_eq!(e.kind(), Kind::Refused, "{e}");
    there.store.refresh().unwrap();
    sound(&there.store);
    // On branches of their own both succeed.
    for (f, name) in [(&a, "a"), (&b, "b")] {
        f.store.make_branch(name, Some("main")).unwrap();
    }
    let own = |f: &Fixture, name: &str| {
        let request = PushRequest {
            branches: vec![(name.into(), name.into())],
            ..PushRequest::default()
        };
        with(&there.store, &Allowed::default(), Fault::None, |link| {
            push(&f.store, link, &request, &mut |_| Ok(()))
        })
        .0
    };
    let (one, other) = std::thread::scope(|scope| {
        let one = scope.spawn(|| own(&a, "a"));
        (own(&b, "b"), one.join().unwrap())
    });
    one.unwrap();
    other.unwrap();
    sound(&there.store);
}

/// Cuts tried in each direction.
const CUTS: u64 = 200;

#[test]
fn a_pull_cut_anywhere_leaves_nothing_and_goes_on() {
    let there = Fixture::new();
    let files = series(&there, &[400_000, 300], 3);
    let whole = {
        let here = Fixture::new();
        pull_from(&here.store, &there.store).received
    };
    for n in 0..CUTS {
        let here = Fixture::new();
        let at = whole * n / CUTS;
        let cut = pull_with(&here.store, &there.store, &PullRequest::default(), Fault::Cut(at));
        assert_eq!(cut.unwrap_err().kind(), Kind::Io, "cut at {at}");
        assert_eq!(here.store.versions("main").unwrap().len(), 0);
        sound(&here.store);
        let rest = pull_from(&here.store, &there.store);
        same(&here.store, &there.store, &files);
        // Again came only the node that was on its way, and what leads to it.
        assert!(
            rest.received < whole - at + LARGEST,
            "{} of {whole} after {at}",
            rest.received
        );
    }
}

/// A little more than the largest node of the series that is cut.
const LARGEST: u64 = 550_000;

#[test]
fn a_push_cut_anywhere_leaves_nothing_and_goes_on() {
    let here = Fixture::new();
    let files = series(&here, &[400_000, 300], 3);
    let push = |there: &Store, cut: Option<u64>| {
        let (a, b) = pair();
        let fault = cut.map_or(Fault::None, Fault::Cut);
        let passed = Arc::<AtomicU64>::default();
        let faulty = Faulty {
            inner: b,
            fault,
            passed: passed.clone(),
        };
        let done = std::thread::scope(|scope| {
            let server = scope.spawn(|| serve(there, &mut over(faulty), &Allowed::default()));
            let done = push(&here.store, &mut over(a), &all_branches(), &mut |_| Ok(()));
            let _ = server.join().unwrap();
            done
        });
        (done, passed.load(Relaxed))
    };
    let whole = push(&Fixture::new().store, None).1;
    for n in 0..CUTS {
        let there = Fixture::new();
        let at = whole * n / CUTS;
        let cut = push(&there.store, Some(at)).0;
        assert_eq!(cut.unwrap_err().kind(), Kind::Io, "cut at {at}");
        assert_eq!(there.store.versions("main").unwrap().len(), 0);
        sound(&there.store);
        let (rest, came) = push(&there.store, None);
        rest.unwrap();
        same(&there.store, &here.store, &files);
        assert!(came < whole - at + LARGEST, "{came} of {whole} after {at}");
    }
}

#[test]
fn a_flipped_bit_imports_nothing_or_does_not_matter() {
    let there = Fixture::new();
    let files = series(&there, &[3000], 3);
    let whole = {
        let here = Fixture::new();
        pull_from(&here.store, &there.store).received
    };
    let mut refused = 0;
    for n in 0..60 {
        let here = Fixture::new();
        let flip = Fault::Flip(whole * n / 60 + n % 7);
        match pull_with(&here.store, &there.store, &PullRequest::default(), flip) {
            Ok(_) => same(&here.store, &there.store, &files),
            Err(_) => {
                refused += 1;
                assert_eq!(here.store.versions("main").unwrap().len(), 0);
                sound(&here.store);
            }
        }
    }
    assert!(refused > 50, "{refused}");
}

#[test]
fn nodes_that_wait_for_their_bases_are_kept_in_bounds() {
    let (there, here) = (Fixture::new(), Fixture::new());
    let files = series(&there, &[40_000], 12);
    // The newest alone needs nodes of versions that are not asked for, for its ancestors are not there.
    let newest = there.store.latest("main").unwrap();
    fs::create_dir_all(here.path("x")).unwrap();
    let mut import = here.store.import().unwrap();
    let (a, b) = pair();
    std::thread::scope(|scope| {
        scope.spawn(|| serve(&there.store, &mut over(b), &Allowed::default()));
        let mut link = over(a);
        crate::sync::ask::hello(&mut link, here.store.id()).unwrap();
        let mut asker = crate::sync::ask::Asker::new(&mut link, None);
        let told: OnFetched<'_> = &mut |_| Ok(());
        let roots = [crate::sync::fetch::Root::Tree(newest.version.tree)];
        crate::sync::fetch::Fetch::new(&mut asker, &mut import, told)
            .all(&roots)
            .unwrap();
    });
    let crate::store::EntryKind::File { hash, len, .. } =
        there.store.entry(&newest, b"model.safetensors").unwrap().kind
    else {
        panic!("no file")
    };
    import.save().unwrap();
    drop(import);
    let file = here.store.file(&hash, len).unwrap();
    assert!(file.read(0, len as usize).unwrap().as_ref() == &files[11][..]);
    chains_hold(&here.store);
}

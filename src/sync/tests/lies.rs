//! Peers that lie, on either side: what they say is found out, and nothing of it is imported.

use super::*;
use crate::id::{NodeId, ObjectId};
use crate::store::EntryKind;
use crate::sync::answer::{Recent, answer, say};
use crate::sync::ask::hello;
use parking_lot::Mutex;

/// What is made of an answer.
pub(super) type Lie = Box<dyn Fn(&mut Answer) + Sync>;

/// A way that leads nowhere: what is sent is kept.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Wire for Kept {
    fn read(&mut self, _: &mut [u8], _: Instant) -> io::Result<usize> {
        Ok(0)
    }

    fn write(&mut self, bytes: &[u8], _: Instant) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }
}

/// Answers what the other side asks from a store, but with what `lie` makes of each answer; pushes something first, if told to. What the
/// other side said in the end, if it was no request.
pub(super) fn lying(
    there: &Store,
    link: &mut Link,
    lie: &Lie,
    push: Option<&Request>,
) -> Result<Option<Answer>> {
    hello(link, there.id())?;
    if let Some(push) = push {
        let (kind, body) = push.encode();
        link.put(kind, &[&body])?;
    }
    while let Some(frame) = link.next()? {
        let Some(request) = Request::decode(&frame)? else {
            return Answer::decode(&frame).map(Some);
        };
        let kept = Kept::default();
        let mut aside = over(kept.clone());
        answer(there, &mut aside, &mut Recent::default(), request)?;
        aside.flush()?;
        let bytes = kept.0.lock();
        let mut rest = &bytes[..];
        while let Some((len, more)) = rest.split_first_chunk::<4>() {
            let (frame, more) = more.split_at(u32::from_le_bytes(*len) as usize);
            rest = more;
            let mut answer = Answer::decode(&(frame[0], frame[1..].to_vec()))?;
            lie(&mut answer);
            say(link, &answer)?;
        }
    }
    Ok(None)
}

/// The manifest of a file that another store has.
fn foreign_manifest() -> crate::store::RawNode {
    let other = Fixture::new();
    let path = other.write("model.safetensors", &Model::new(&[900]).safetensors(0));
    other.commit(&path);
    let entry = other
        .store
        .entry(&other.store.latest("main").unwrap(), b"model.safetensors")
        .unwrap();
    let EntryKind::File { hash, len, .. } = entry.kind else {
        panic!("no file")
    };
    other.store.raw_node(&manifest_id(&hash, len)).unwrap()
}

/// Lies about what leads to a version.
fn lies_about_versions() -> Vec<(&'static str, Lie)> {
    let foreign = foreign_manifest();
    vec![
        (
            "a payload of zeros",
            Box::new(|a| {
                if let Answer::Node { kind: 1, first, .. } = a {
                    first.fill(0);
                }
            }),
        ),
        (
            "another kind",
            Box::new(|a| {
                if let Answer::Node { kind, .. } = a {
                    *kind = 3 - *kind % 2;
                }
            }),
        ),
        (
            "a node of 4 GiB",
            Box::new(|a| {
                if let Answer::Node { len, .. } = a {
                    *len = 1 << 32;
                }
            }),
        ),
        (
            "longer than announced",
            Box::new(|a| {
                if let Answer::Node { len, .. } = a {
                    *len = 1;
                }
            }),
        ),
        (
            "another file's manifest",
            Box::new(move |a| {
                if let Answer::Node {
                    kind: 3,
                    first,
                    len,
                    meta,
                } = a
                {
                    *first = foreign.payload.to_vec();
                    *len = first.len() as u64;
                    *meta = foreign.meta.clone();
                }
            }),
        ),
        (
            "nothing",
            Box::new(|a| {
                if let Answer::Node { .. } = a {
                    *a = Answer::Missing { damaged: false };
                }
            }),
        ),
        (
            "a version that says something else",
            Box::new(|a| {
                if let Answer::Log { versions, .. } = a {
                    versions.iter_mut().for_each(|v| v.message = "better".into());
                }
            }),
        ),
        (
            "a version with another tree",
            Box::new(|a| {
                if let Answer::Log { versions, .. } = a {
                    versions.iter_mut().for_each(|v| v.tree = NodeId([9; 32]));
                }
            }),
        ),
        (
            "a line with a gap",
            Box::new(|a| {
                if let Answer::Log { versions, .. } = a {
                    versions.remove(1);
                }
            }),
        ),
        (
            "a line without an end",
            Box::new(|a| {
                if let Answer::Log { more, versions } = a {
                    *more = true;
                    versions.clear();
                }
            }),
        ),
        (
            "other than what was asked for",
            Box::new(|a| {
                if let Answer::Node { .. } = a {
                    *a = Answer::Records(Vec::new());
                }
            }),
        ),
    ]
}

/// Lies about an object of which another one is here.
fn lies_about_objects() -> Vec<(&'static str, Lie)> {
    vec![
        (
            "another manifest",
            Box::new(|a| {
                if let Answer::Object(bytes) = a {
                    *bytes.last_mut().unwrap() ^= 1;
                }
            }),
        ),
        (
            "records of something else",
            Box::new(|a| {
                if let Answer::Records(bytes) = a {
                    bytes.iter_mut().skip(40).step_by(50).for_each(|b| *b ^= 1);
                }
            }),
        ),
        (
            "too few records",
            Box::new(|a| {
                if let Answer::Records(bytes) = a {
                    bytes.clear();
                }
            }),
        ),
        (
            "no manifest",
            Box::new(|a| {
                if let Answer::Object(_) = a {
                    *a = Answer::Missing { damaged: true };
                }
            }),
        ),
    ]
}

/// Two stores, each with a version and an object of which the other's is another edition; the liar's object.
fn stores() -> (Fixture, Fixture, ObjectId) {
    let (there, here) = (Fixture::new(), Fixture::new());
    series(&there, &[3000, 800], 3);
    let mut bytes = Noise(4).bytes(200_000);
    here.store
        .put_object(&request(&here.write("object", &bytes)))
        .unwrap();
    bytes[100_000] ^= 1;
    let put = there
        .store
        .put_object(&request(&there.write("object", &bytes)))
        .unwrap();
    (there, here, put.id)
}

/// Nothing came of it.
fn untouched(here: &Fixture, what: &str) {
    assert_eq!(here.store.versions("main").unwrap().len(), 0, "{what}");
    assert_eq!(here.store.objects().len(), 1, "{what}");
    sound(&here.store);
}

#[test]
fn a_lying_server_is_found_out() {
    let (there, here, object) = stores();
    let versions = lies_about_versions()
        .into_iter()
        .map(|l| (l, PullRequest::default()));
    let of = |objects| PullRequest {
        objects,
        ..PullRequest::default()
    };
    let objects = lies_about_objects().into_iter().map(|l| (l, of(vec![object])));
    for ((what, lie), request) in versions.chain(objects) {
        let (a, b) = pair();
        let e = std::thread::scope(|scope| {
            scope.spawn(|| lying(&there.store, &mut over(b), &lie, None));
            let mut link = over(a);
            pull(&here.store, &mut link, &request, &mut |_| Ok(()))
        });
        let e = e.err().unwrap_or_else(|| panic!("{what} was believed"));
        assert!(matches!(e.kind(), Kind::Damage | Kind::NotFound), "{what}: {e:?}");
        untouched(&here, what);
    }
}

#[test]
fn a_lying_client_is_found_out() {
    let (there, here, object) = stores();
    let push = Request::Push {
        branch: "main".into(),
        head: there.store.latest("main").unwrap().id,
        signature: Vec::new(),
    };
    let versions = lies_about_versions().into_iter().map(|l| (l, &push));
    let push_object = Request::PushObject(object);
    let objects = lies_about_objects().into_iter().map(|l| (l, &push_object));
    for ((what, lie), push) in versions.chain(objects) {
        let (a, b) = pair();
        let (said, served) = std::thread::scope(|scope| {
            let liar = scope.spawn(|| lying(&there.store, &mut over(a), &lie, Some(push)));
            let served = serve(&here.store, &mut over(b), &Allowed::default());
            (liar.join().unwrap(), served)
        });
        let e = served.err().unwrap_or_else(|| panic!("{what} was believed"));
        assert!(matches!(e.kind(), Kind::Damage | Kind::NotFound), "{what}: {e:?}");
        assert!(matches!(said, Ok(Some(Answer::Failed(_)))), "{what}: {said:?}");
        untouched(&here, what);
    }
    // Without a lie it is taken.
    let (a, b) = pair();
    std::thread::scope(|scope| {
        let truth: Lie = Box::new(|_| ());
        scope.spawn(move || serve(&here.store, &mut over(b), &Allowed::default()).map(|()| here));
        let said = lying(&there.store, &mut over(a), &truth, Some(&push)).unwrap();
        assert!(matches!(said, Some(Answer::Taken)), "{said:?}");
    });
}

//! Every message in bytes, and back.

use crate::error::{Error, Kind};
use crate::id::{FileHash, NodeId, ObjectId, VersionId};
use crate::store::{Place, Timestamp, Version};
use crate::sync::encoding::{CODES, encoded_again};
use crate::sync::message::*;
use proptest::prelude::*;

fn name() -> impl Strategy<Value = String> {
    "[A-Za-z0-9._-]{0,40}"
}

fn target() -> impl Strategy<Value = Target> {
    let id = any::<[u8; 32]>();
    prop_oneof![
        id.prop_map(|id| Target::Object(ObjectId(id))),
        (id, any::<u64>()).prop_map(|(hash, len)| Target::File(FileHash(hash), len)),
    ]
}

fn request() -> impl Strategy<Value = Request> {
    let id = any::<[u8; 32]>();
    prop_oneof![
        name().prop_map(|after| Request::Refs { after }),
        (id, proptest::collection::vec(id.prop_map(VersionId), 0..5)).prop_map(|(head, known)| {
            Request::Log {
                head: VersionId(head),
                known,
            }
        }),
        proptest::collection::vec(id.prop_map(NodeId), 0..5).prop_map(Request::Nodes),
        target().prop_map(Request::Object),
        id.prop_map(|id| Request::Objects { after: ObjectId(id) }),
        (name(), id, any::<Vec<u8>>()).prop_map(|(branch, head, signature)| Request::Push {
            branch,
            head: VersionId(head),
            signature
        }),
        id.prop_map(|id| Request::PushObject(ObjectId(id))),
        (
            target(),
            proptest::collection::vec((any::<u8>(), any::<u64>()), 0..4)
        )
            .prop_map(|(of, places)| {
                let places = places.into_iter().map(|(scale, index)| Place { scale, index });
                Request::Records {
                    of,
                    places: places.collect(),
                }
            }),
        (target(), any::<u32>(), 0..=MAX_READ, any::<bool>()).prop_map(|(of, from, len, packed)| {
            Request::Read {
                of: Readable::Whole(of),
                bytes: u64::from(from)..u64::from(from) + len,
                packed,
            }
        }),
        (any::<u8>(), id, 0..=MAX_READ).prop_map(|(kind, id, len)| Request::Read {
            of: Readable::Node(kind, NodeId(id)),
            bytes: 5..5 + len,
            packed: false
        }),
        id.prop_map(|id| Request::Check(Checked::Object(ObjectId(id)))),
        id.prop_map(|id| Request::Check(Checked::Version(VersionId(id)))),
    ]
}

fn answer() -> impl Strategy<Value = Answer> {
    let id = any::<[u8; 32]>();
    let one = (
        any::<bool>(),
        name(),
        proptest::option::of(id),
        any::<u64>(),
        any::<Vec<u8>>(),
    );
    let one = one.prop_map(|(tag, name, head, count, signature)| Ref {
        tag,
        name,
        head: head.map(VersionId),
        count,
        signature,
    });
    let version = (
        proptest::collection::vec(id.prop_map(VersionId), 0..3),
        any::<u64>(),
    )
        .prop_map(|(parents, len)| Version {
            parents,
            entry: b"model.pt".to_vec(),
            time: Timestamp::default(),
            message: "m".into(),
            tree: NodeId([3; 32]),
            len,
        });
    prop_oneof![
        (any::<bool>(), proptest::collection::vec(one, 0..4))
            .prop_map(|(more, refs)| Answer::Refs { more, refs }),
        (any::<bool>(), proptest::collection::vec(version, 0..4))
            .prop_map(|(more, versions)| Answer::Log { more, versions }),
        (any::<u8>(), any::<Vec<u8>>(), any::<u64>(), any::<Vec<u8>>()).prop_map(
            |(kind, meta, len, first)| {
                Answer::Node {
                    kind,
                    meta,
                    len,
                    first,
                }
            }
        ),
        any::<Vec<u8>>().prop_map(Answer::More),
        any::<bool>().prop_map(|damaged| Answer::Missing { damaged }),
        any::<Vec<u8>>().prop_map(Answer::Object),
        (
            any::<bool>(),
            proptest::collection::vec(id.prop_map(ObjectId), 0..4)
        )
            .prop_map(|(more, ids)| Answer::Objects { more, ids }),
    ]
}

proptest! {
    #[test]
    fn requests_round_trip_and_no_truncation_is_taken(request in request()) {
        let frame = request.encode();
        prop_assert_eq!(Request::decode(&frame).unwrap(), Some(request));
        for n in 0..frame.1.len() {
            prop_assert!(Request::decode(&(frame.0, frame.1[..n].to_vec())).is_err());
        }
    }

    #[test]
    fn answers_round_trip(answer in answer()) {
        let frame = answer.encode();
        prop_assert_eq!(Answer::decode(&frame).unwrap().encode(), frame);
    }

    #[test]
    fn what_is_taken_is_canonical(kind in 0x0f_u8..0x31, body in proptest::collection::vec(any::<u8>(), 0..120)) {
        for again in encoded_again(kind, &body) {
            prop_assert_eq!(again, (kind, body.clone()));
        }
    }
}

#[test]
fn errors_keep_their_kind_and_say_where_they_are_from() {
    for kind in CODES {
        let told = Answer::Failed(Error::new(kind, "bad\u{1b}[2J thing")).encode();
        let Answer::Failed(e) = Answer::decode(&told).unwrap() else {
            panic!("no error");
        };
        let here = match kind {
            Kind::Usage | Kind::NoSpace => Kind::Io,
            kind => kind,
        };
        assert_eq!(
            (e.kind(), e.to_string().as_str()),
            (here, "the peer says: bad[2J thing")
        );
    }
    let odd = Answer::Failed(Error::new(Kind::Poisoned, "x".repeat(5000)));
    let Answer::Failed(e) = Answer::decode(&odd.encode()).unwrap() else {
        panic!("no error");
    };
    assert_eq!(e.kind(), Kind::Io);
}

#[test]
fn hellos() {
    let hello = Hello {
        spoken: (1, 3),
        store: [7; 16],
        agent: "zspace 1".into(),
    };
    let frame = hello.encode();
    assert_eq!(Hello::decode(&frame).unwrap(), hello);
    for n in 0..frame.1.len() {
        assert!(Hello::decode(&(frame.0, frame.1[..n].to_vec())).is_err());
    }
    let refused = Answer::Failed(Error::new(Kind::Unsupported, "too old"));
    assert_eq!(
        Hello::decode(&refused.encode()).unwrap_err().kind(),
        Kind::Unsupported
    );
}

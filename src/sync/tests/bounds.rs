//! Peers that never come to an end: what they may cost is bounded.

use super::*;
use crate::id::NodeId;
use crate::sync::ask::{Asker, hello};
use crate::sync::message::Ref;

/// Asks somebody who answers each request with what `answers` makes of it.
fn asking<T>(
    answers: impl Fn(Request, u64) -> Vec<Answer> + Sync,
    ask: impl FnOnce(&mut Asker<'_>) -> Result<T>,
) -> Result<T> {
    let (a, b) = pair();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut link = over(b);
            hello(&mut link, [1; 16])?;
            let mut n = 0;
            while let Some(frame) = link.next()? {
                let request = Request::decode(&frame)?.ok_or_else(|| Error::damage("no request"))?;
                for answer in answers(request, n) {
                    crate::sync::answer::say(&mut link, &answer)?;
                }
                n += 1;
            }
            Ok::<(), Error>(())
        });
        let mut link = over(a);
        hello(&mut link, [2; 16])?;
        ask(&mut Asker::new(&mut link, None))
    })
}

#[test]
fn refs_without_end() {
    let refs = |_, n: u64| {
        let one = |i: u64| Ref {
            tag: false,
            name: format!("b{:012}", n * 200 + i),
            head: None,
            count: 0,
            signature: vec![7; 4096],
        };
        let refs = (0..200).map(one).collect();
        vec![Answer::Refs { more: true, refs }]
    };
    let e = asking(refs, |asker| asker.refs()).unwrap_err();
    assert_eq!(e.kind(), Kind::Limit, "{e}");
}

#[test]
fn objects_without_end() {
    let objects = |_, n: u64| {
        let id = |i: u64| {
            let mut id = [0; 32];
            id[..8].copy_from_slice(&(n * 30_000 + i + 1).to_be_bytes());
            crate::id::ObjectId(id)
        };
        let ids = (0..30_000).map(id).collect();
        vec![Answer::Objects { more: true, ids }]
    };
    let e = asking(objects, |asker| asker.objects()).unwrap_err();
    assert_eq!(e.kind(), Kind::Limit, "{e}");
}

#[test]
fn a_line_without_end() {
    // From the first on, for each names the one before it.
    let mut versions = vec![];
    let mut parents = Vec::new();
    for _ in 0..5000 {
        let version = crate::store::Version {
            parents: std::mem::take(&mut parents),
            entry: b"x".to_vec(),
            time: Default::default(),
            message: "m".repeat(60_000),
            tree: NodeId([3; 32]),
            len: 0,
        };
        parents = vec![version.id()];
        versions.push(version);
    }
    let head = parents[0];
    let versions = parking_lot::Mutex::new(versions);
    let log = |_, _| {
        let mut left = versions.lock();
        let from = left.len().saturating_sub(16);
        let mut versions = left.split_off(from);
        versions.reverse();
        vec![Answer::Log { more: true, versions }]
    };
    let e = asking(log, |asker| asker.line(head, &[], &|_| false)).unwrap_err();
    assert_eq!(e.kind(), Kind::Limit, "{e}");
}

/// Each chunk is encoded against another one that is not there.
#[test]
fn a_chain_without_end() {
    let (there, here) = (Fixture::new(), Fixture::new());
    series(&there, &[3000], 2);
    // The record of a delta, to be sent for whatever is asked for.
    let nodes_of = |n: usize| {
        let version = &there.store.versions("main").unwrap()[n];
        let entry = there.store.entry(version, b"model.safetensors").unwrap();
        let crate::store::EntryKind::File { hash, len, .. } = entry.kind else {
            panic!("no file")
        };
        let manifest = there.store.raw_node(&manifest_id(&hash, len)).unwrap();
        let file = crate::store::ImportedFile::new(hash, len, &manifest).unwrap();
        let ids: Vec<NodeId> = file.nodes().map(|(_, id)| id).collect();
        (hash, len, ids)
    };
    let bases = nodes_of(0).2;
    let (hash, len, ids) = nodes_of(1);
    let delta = ids.iter().filter_map(|id| {
        let node = there.store.raw_node(id).ok().filter(|node| node.kind == 1)?;
        let base = bases
            .iter()
            .find_map(|b| node.meta.windows(32).position(|w| w == b.0))?;
        Some((node, base))
    });
    let (delta, base) = { delta }.next().unwrap();
    let asked = AtomicU64::new(0);
    let nodes = |request, _| {
        let Request::Nodes(ids) = request else {
            return vec![Answer::Missing { damaged: false }];
        };
        let answer = |id: NodeId| {
            let mut node = delta.clone();
            let next = asked.fetch_add(1, Relaxed);
            // Its base is nowhere yet.
            let mut new = [9; 32];
            new[..8].copy_from_slice(&next.to_le_bytes());
            node.meta[base..base + 32].copy_from_slice(&new);
            let node = match there.store.raw_node(&id) {
                Ok(right) if right.kind != 1 => right,
                _ => node,
            };
            Answer::Node {
                kind: node.kind,
                meta: node.meta,
                len: node.payload.len() as u64,
                first: node.payload.to_vec(),
            }
        };
        ids.into_iter().map(answer).collect()
    };
    let mut import = here.store.import().unwrap();
    let e = asking(nodes, |asker| {
        let roots = [crate::sync::fetch::Root::File(hash, len)];
        crate::sync::fetch::Fetch::new(asker, &mut import, &mut |_| Ok(())).all(&roots)
    });
    let e = e.unwrap_err();
    assert!(e.to_string().contains("a chain that does not end"), "{e}");
    assert!(asked.load(Relaxed) < 20_000);
}

//! What a node's record says of its chain, kept true when a base is encoded anew.
//!
//! In every state that a reader can see, a delta's record gives a greater depth than its base's record does, and a cost that
//! covers the base's and its own payload. So chains end, and are as short and cheap as they say (docs/FORMAT.md, "Repacking").

use super::Parts;
use super::chain::within_bounds;
use super::encode::{Against, Encoder};
use crate::error::{Error, Result};
use crate::graph::{Delta, NodeKind, NodeMeta};
use crate::id::NodeId;
use crate::pack::{Meta, Node, PackRange, PackWriter, Packs, Place};
use crate::rebuild::NodeSource;
use std::collections::HashMap;
use std::sync::Arc;

/// What a rebuild of a node takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Load {
    /// Deltas to apply.
    pub(super) depth: u8,
    /// Payload bytes to read.
    pub(super) cost: u64,
}

impl Load {
    /// As a record says.
    pub(super) fn of(meta: &NodeMeta, payload_len: u32) -> Self {
        Load {
            depth: meta.depth(),
            cost: meta.cost(payload_len),
        }
    }

    /// What all of several bases take: the depth of the deepest, and what is read for all.
    pub(super) fn together(bases: impl IntoIterator<Item = Load>) -> Self {
        let none = Load { depth: 0, cost: 0 };
        bases.into_iter().fold(none, |a, b| Load {
            depth: a.depth.max(b.depth),
            cost: a.cost.saturating_add(b.cost),
        })
    }

    /// Whether this is true of a delta with such a payload and base, that adds `step` to its base's depth.
    pub(super) fn covers(self, base: Load, payload_len: u32, step: u8) -> bool {
        u16::from(self.depth) >= u16::from(base.depth) + u16::from(step)
            && self.cost >= base.cost.saturating_add(u64::from(payload_len))
    }
}

/// The meta of a delta whose base takes this; nothing if its chain would exceed its bounds.
pub(super) fn restamped(meta: &NodeMeta, payload_len: u32, base: Load) -> Option<NodeMeta> {
    let (mut meta, step) = (*meta, meta.step());
    let delta = meta.delta.as_mut()?;
    delta.depth = base.depth.checked_add(step)?;
    delta.cost = base.cost.checked_add(u64::from(payload_len))?;
    within_bounds(meta.codec, delta.depth, delta.cost, meta.raw_len).then_some(meta)
}

/// A record of these finished ranges that are not published.
struct Own {
    kind: NodeKind,
    place: Place,
    meta: NodeMeta,
    payload_len: u32,
}

/// The nodes of finished ranges, and those that are published.
struct Finished {
    packs: Arc<Packs>,
    own: HashMap<NodeId, Own>,
}

impl NodeSource for Finished {
    fn get(&self, id: &NodeId) -> Result<Node> {
        match self.own.get(id) {
            Some(own) => self.packs.get_at(id, &own.place),
            None => self.packs.get(id),
        }
    }

    fn meta(&self, id: &NodeId) -> Result<Meta> {
        self.packs.meta(id)
    }
}

/// Looks again at the deltas of a commit's finished ranges after others published: those whose chains are longer now than their
/// records say are written again, with the range that comes back. A node that others published in a record after `since` is
/// written as they did, for others may build on that already.
pub(super) fn recheck(parts: &Parts, ranges: &[PackRange], since: u64) -> Result<Option<PackRange>> {
    let mut own = HashMap::new();
    for range in ranges.iter().filter(|r| r.count > 0) {
        parts.packs.scan(range, &mut |id, place, m| {
            let kind = kind_of(m.kind)?;
            let meta = NodeMeta::decode(kind, &m.meta)?;
            let payload_len = m.payload_len;
            own.insert(
                id,
                Own {
                    kind,
                    place,
                    meta,
                    payload_len,
                },
            );
            Ok(())
        })?;
    }
    let mut deltas: Vec<(u8, NodeId)> = own
        .iter()
        .filter(|(_, o)| o.meta.delta.is_some())
        .map(|(id, o)| (o.meta.depth(), *id))
        .collect();
    // A base of the same commit comes first.
    deltas.sort_unstable();
    let source = Arc::new(Finished {
        packs: parts.packs.clone(),
        own,
    });
    let encoder = Encoder {
        rebuilder: parts.rebuilder.clone(),
        source: source.clone(),
    };
    let mut changed: HashMap<NodeId, Load> = HashMap::new();
    let mut writer: Option<PackWriter> = None;
    for (_, id) in deltas {
        let Some((own, delta)) = source.own.get(&id).and_then(|o| Some((o, o.meta.delta?))) else {
            continue;
        };
        if let Some(place) = parts.packs.published_since(&id, since)? {
            let node = parts.packs.get_at(&id, &place)?;
            let meta = NodeMeta::decode(kind_of(node.kind)?, &node.meta)?;
            let writer = match &mut writer {
                Some(w) => w,
                None => writer.insert(parts.packs.writer()?),
            };
            writer.append(node.kind, &id, &node.meta, &node.payload)?;
            changed.insert(id, Load::of(&meta, node.payload.len() as u32));
            continue;
        }
        let base = load_of_bases(&delta, &changed, &source)?;
        if Load::of(&own.meta, own.payload_len).covers(base, own.payload_len, own.meta.step()) {
            continue;
        }
        let (meta, payload) = match restamped(&own.meta, own.payload_len, base) {
            Some(meta) => (meta, parts.packs.get_at(&id, &own.place)?.payload.into()),
            None => {
                let raw = parts.rebuilder.node(&*source, own.kind, &id)?;
                encoder.best(own.kind, &raw, own.meta.number, &Against::default())?
            }
        };
        let writer = match &mut writer {
            Some(w) => w,
            None => writer.insert(parts.packs.writer()?),
        };
        writer.append(own.kind as u8, &id, &meta.encode(), &payload)?;
        changed.insert(id, Load::of(&meta, payload.len() as u32));
    }
    writer.map(PackWriter::finish).transpose()
}

/// What the bases of a delta take, as they are now.
fn load_of_bases(delta: &Delta, changed: &HashMap<NodeId, Load>, source: &Finished) -> Result<Load> {
    let load = |id: NodeId| match (changed.get(&id), source.own.get(&id)) {
        (Some(load), _) => Ok(*load),
        (None, Some(base)) => Ok(Load::of(&base.meta, base.payload_len)),
        (None, None) => {
            let m = source.packs.meta(&id)?;
            Ok(Load::of(
                &NodeMeta::decode(kind_of(m.kind)?, &m.meta)?,
                m.payload_len,
            ))
        }
    };
    let loads: Vec<Load> = delta.bases().map(load).collect::<Result<_>>()?;
    Ok(Load::together(loads))
}

/// The kind of node with this number.
pub(super) fn kind_of(tag: u8) -> Result<NodeKind> {
    NodeKind::from_tag(tag).ok_or_else(|| Error::damage(format!("is a record of kind {tag}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Codec;
    use crate::graph::{Further, MANY_DEPTH};
    use crate::tensor::Number;

    #[test]
    fn numbers_follow_the_base_and_stay_within_bounds() {
        let delta = Delta {
            base: NodeId([1; 32]),
            further: Further::default(),
            depth: 1,
            revision: 7,
            cost: 500,
        };
        let meta = NodeMeta {
            codec: Codec::DiffPlanes,
            number: Number::BF16,
            raw_len: 1000,
            delta: Some(delta),
        };
        let base = |depth, cost| Load { depth, cost };
        let new = restamped(&meta, 100, base(4, 900)).unwrap();
        let want = Delta {
            depth: 5,
            cost: 1000,
            ..delta
        };
        assert_eq!(new.delta, Some(want));
        assert!(Load::of(&new, 100).covers(base(4, 900), 100, 1));
        assert!(!Load::of(&meta, 100).covers(base(1, 100), 100, 1));
        assert!(!Load::of(&meta, 100).covers(base(0, 401), 100, 1));
        assert!(Load::of(&meta, 100).covers(base(0, 400), 100, 1));
        for (depth, cost) in [(255, 10), (254, 10), (0, 2901), (0, u64::MAX)] {
            assert_eq!(restamped(&meta, 100, base(depth, cost)), None);
        }
        let alone = NodeMeta {
            codec: Codec::Raw,
            delta: None,
            ..meta
        };
        assert_eq!(restamped(&alone, 100, base(0, 0)), None);
        // One that takes many bases is deeper, and may cost more.
        let many = NodeMeta {
            codec: Codec::Rounded,
            ..meta
        };
        let both = Load::together([base(4, 2000), base(9, 1500)]);
        assert_eq!(both, base(9, 3500));
        let new = restamped(&many, 100, both).unwrap();
        assert_eq!(new.depth(), 9 + MANY_DEPTH);
        assert!(Load::of(&new, 100).covers(both, 100, new.step()));
        assert!(!Load::of(&new, 100).covers(base(10, 100), 100, new.step()));
        assert_eq!(restamped(&many, 100, base(33, 100)), None);
        assert_eq!(restamped(&many, 100, base(0, 6000)), None);
    }
}

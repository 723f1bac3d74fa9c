//! A chunk against a tensor of another float width: the weights beside their f32 copy, or the f32 copy of weights that are there.

use super::encode::{Encoder, MAX_COST, MAX_DEPTH};
use super::known::{Known, Plan};
use crate::codec::{self, Related};
use crate::error::Result;
use crate::format::Place;
use crate::graph::{Delta, Further, MAX_BASES, NodeKind, NodeMeta};
use crate::id::NodeId;
use crate::rebuild::{MAX_NESTED, MAX_NODES};
use crate::tensor::Number;
use std::collections::HashMap;
use std::sync::Arc;

/// Where the elements lie that a chunk is related to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Relative {
    /// The chunks they lie in, at most [`MAX_BASES`].
    bases: Vec<NodeId>,
    /// Where in these chunks.
    related: Related,
}

/// The relatives of those chunks all of whose regions have one.
pub(super) fn of_chunks(
    plan: &Plan,
    relatives: &HashMap<usize, (Arc<Known>, usize)>,
) -> HashMap<usize, Relative> {
    if relatives.is_empty() {
        return HashMap::new();
    }
    let mut places: HashMap<usize, Vec<&Place>> = HashMap::new();
    for p in &plan.places {
        places.entry(p.chunk as usize).or_default().push(p);
    }
    let of_chunk = |(chunk, places)| Some((chunk, of_places(plan, relatives, places)?));
    places.into_iter().filter_map(of_chunk).collect()
}

fn of_places(
    plan: &Plan,
    relatives: &HashMap<usize, (Arc<Known>, usize)>,
    places: Vec<&Place>,
) -> Option<Relative> {
    let mut numbers: Option<(Number, Number)> = None;
    // Each base with where it starts among them.
    let mut bases: Vec<(NodeId, u32)> = Vec::new();
    let (mut end, mut pieces) = (0u32, Vec::<(u32, u32)>::new());
    for p in places {
        let (region, offset) = p.region?;
        let (file, other) = relatives.get(&(region as usize))?;
        let number = plan.regions[region as usize].dtype.number();
        let stored = file.plan.regions.get(*other)?.dtype.number();
        if *numbers.get_or_insert((number, stored)) != (number, stored) {
            return None;
        }
        let scaled = |bytes: u64| {
            let elements = bytes / number.width() as u64;
            let whole = bytes.is_multiple_of(number.width() as u64);
            whole.then_some(elements * stored.width() as u64)
        };
        let (from, len) = (scaled(offset)?, scaled(u64::from(p.len))?);
        let mut found = 0;
        for s in file.plan.stretches(*other, from, len) {
            let id = *file.chunks.get(s.chunk as usize)?;
            let start = match bases.iter().find(|(b, _)| *b == id) {
                Some((_, start)) => *start,
                None if bases.len() == MAX_BASES => return None,
                None => {
                    bases.push((id, end));
                    let start = end;
                    end = end.checked_add(*file.plan.lens.get(s.chunk as usize)?)?;
                    start
                }
            };
            found += u64::from(s.len);
            let at = start + s.at;
            match pieces.last_mut() {
                Some((from, len)) if *from + *len == at => *len += s.len,
                _ => pieces.push((at, s.len)),
            }
        }
        if found != len {
            return None;
        }
    }
    Some(Relative {
        bases: bases.into_iter().map(|(id, _)| id).collect(),
        related: Related {
            number: numbers?.1,
            pieces,
        },
    })
}

impl Encoder {
    /// The chunk against its relative; none if that gains nothing, or if a rebuild's work would exceed its bound.
    pub(super) fn against_relative(
        &self,
        relative: &Relative,
        raw: &[u8],
        number: Number,
    ) -> Result<Option<(NodeMeta, Vec<u8>)>> {
        let (mut depth, mut cost, mut left) = (0, 0, MAX_NODES / 2);
        for id in &relative.bases {
            let Some((meta, own)) = self.meta_of(NodeKind::Chunk, id)? else {
                return Ok(None);
            };
            depth = depth.max(meta.depth());
            cost += meta.cost(own);
            if !self.can_be_nested(id, 1, &mut left)? {
                return Ok(None);
            }
        }
        // One more than a chain may have otherwise: the weights follow their f32 copy to its end.
        if depth > MAX_DEPTH {
            return Ok(None);
        }
        let mut bases = Vec::new();
        for id in &relative.bases {
            bases.extend_from_slice(&self.rebuilder().chunk(&*self.source, id)?);
        }
        let Some(encoded) = codec::encode_related(raw, number, &bases, &relative.related) else {
            return Ok(None);
        };
        cost += encoded.payload.len() as u64;
        let (Some(first), Some(further)) = (
            relative.bases.first(),
            relative.bases.get(1..).and_then(Further::new),
        ) else {
            return Ok(None);
        };
        // What is rebuilt are the bases, which may be longer than the chunk.
        if cost > MAX_COST * raw.len().max(bases.len()) as u64 {
            return Ok(None);
        }
        let delta = Delta {
            base: *first,
            further,
            depth: depth + 1,
            revision: 0,
            cost,
        };
        let meta = NodeMeta {
            codec: encoded.codec,
            number,
            raw_len: raw.len() as u32,
            delta: Some(delta),
        };
        Ok(self
            .proves(&meta, &encoded.payload, raw, Some(&bases))
            .then_some((meta, encoded.payload)))
    }

    /// Whether a reader would follow the node's chain as a base that is `nested` in others, with `left` nodes to read. It stays one
    /// level and half the nodes below what a reader does.
    fn can_be_nested(&self, id: &NodeId, nested: usize, left: &mut usize) -> Result<bool> {
        let mut at = *id;
        loop {
            if *left == 0 {
                return Ok(false);
            }
            *left -= 1;
            let Some((meta, _)) = self.meta_of(NodeKind::Chunk, &at)? else {
                return Ok(false);
            };
            let Some(delta) = meta.delta else {
                return Ok(true);
            };
            if !meta.codec.takes_many() {
                at = delta.base;
                continue;
            }
            if nested + 1 >= MAX_NESTED {
                return Ok(false);
            }
            for base in delta.bases() {
                if !self.can_be_nested(&base, nested + 1, left)? {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
    }
}

//! A chunk against a tensor of another float width: the weights beside their f32 copy, or the f32 copy of weights that are there.

use super::encode::Encoder;
use super::known::{Known, Plan};
use super::stamp::{Load, restamped};
use crate::codec::{self, Related};
use crate::error::Result;
use crate::format::Place;
use crate::graph::{Delta, Further, MAX_BASES, NodeKind, NodeMeta};
use crate::id::NodeId;
use crate::rebuild::NodeSource;
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

impl<S: NodeSource> Encoder<S> {
    /// The chunk against its relative; none if that gains nothing, or if a rebuild's work would exceed its bound.
    pub(super) fn against_relative(
        &self,
        relative: &Relative,
        raw: &[u8],
        number: Number,
        raw_len: u32,
    ) -> Result<Option<(NodeMeta, Vec<u8>)>> {
        let Some((first, further)) = relative.bases.split_first() else {
            return Ok(None);
        };
        let Some(further) = Further::new(further) else {
            return Ok(None);
        };
        let (mut loads, mut bases) = (Vec::new(), Vec::new());
        for id in &relative.bases {
            let Some((meta, own)) = self.meta_of(NodeKind::Chunk, id)? else {
                return Ok(None);
            };
            loads.push(Load::of(&meta, own));
        }
        let load = Load::together(loads);
        for id in &relative.bases {
            bases.extend_from_slice(&self.rebuilder.chunk(&*self.source, id)?);
        }
        let Some(encoded) = codec::encode_related(raw, number, &bases, &relative.related) else {
            return Ok(None);
        };
        let delta = Delta {
            base: *first,
            further,
            depth: 0,
            revision: 0,
            cost: 0,
        };
        let meta = NodeMeta {
            codec: encoded.codec,
            number,
            raw_len,
            delta: Some(delta),
        };
        let meta = restamped(&meta, encoded.payload.len() as u32, load);
        Ok(meta
            .filter(|meta| self.proves(meta, &encoded.payload, raw, Some(bases)))
            .map(|meta| (meta, encoded.payload)))
    }
}

//! Encodes groups of revisions anew, on all cores, and keeps what is clearly smaller.

use super::survey::{Item, is_local};
use super::table::{NONE, Row, Table};
use crate::commit::Parts;
use crate::commit::encode::{Against, Encoder};
use crate::commit::stamp::{Load, restamped};
use crate::error::{Error, Kind, Result};
use crate::graph::{Delta, NodeKind, NodeMeta};
use crate::id::NodeId;
use crate::pack::{Meta, Node, PackWriter, Packs};
use crate::rebuild::{MAX_NODES, NodeSource};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A record is written anew only if that saves at least one part in so many.
const WORTH: u64 = 64;

/// The nodes as they will be once what was encoded anew is published.
pub(super) struct Planned {
    packs: Arc<Packs>,
    metas: RwLock<HashMap<NodeId, Meta>>,
}

impl NodeSource for Planned {
    /// The raw bytes are the same whichever record they come from, so those that are published do.
    fn get(&self, id: &NodeId) -> Result<Node> {
        self.packs.get(id)
    }

    fn meta(&self, id: &NodeId) -> Result<Meta> {
        match self.metas.read().get(id) {
            Some(meta) => Ok(meta.clone()),
            None => self.packs.meta(id),
        }
    }
}

/// What was done with the items of some groups.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Done {
    /// Items looked at.
    pub(super) looked: u64,
    /// Bytes of their records.
    pub(super) before: u64,
    /// Those written anew.
    pub(super) written: u64,
    /// Bytes of their records before, and now.
    pub(super) replaced: u64,
    pub(super) stored: u64,
}

/// Encodes groups.
pub(super) struct Coder<'a> {
    pub(super) parts: &'a Parts,
    pub(super) table: &'a Table,
    encoder: Encoder<Planned>,
    /// Where the records go; nowhere in a dry run.
    pub(super) writer: Mutex<Option<PackWriter>>,
    damage: Mutex<Vec<String>>,
    /// Told of each item.
    pub(super) told: &'a (dyn Fn(Done) + Sync),
    pub(super) stop: &'a (dyn Fn() -> bool + Sync),
}

impl<'a> Coder<'a> {
    pub(super) fn new(
        parts: &'a Parts,
        table: &'a Table,
        writer: Option<PackWriter>,
        told: &'a (dyn Fn(Done) + Sync),
        stop: &'a (dyn Fn() -> bool + Sync),
    ) -> Self {
        let planned = Planned {
            packs: parts.packs.clone(),
            metas: RwLock::default(),
        };
        Coder {
            parts,
            table,
            encoder: Encoder {
                rebuilder: parts.rebuilder.clone(),
                source: Arc::new(planned),
            },
            writer: Mutex::new(writer),
            damage: Mutex::default(),
            told,
            stop,
        }
    }

    /// Goes through groups on all cores; a group that was begun is finished even when it is to stop. Gives back what was
    /// damaged, and left as it is.
    pub(super) fn run(&self, groups: &[Vec<Item>]) -> Result<Vec<String>> {
        let next = AtomicUsize::new(0);
        let failed: Mutex<Option<Error>> = Mutex::new(None);
        let work = || {
            while failed.lock().is_none() && !(self.stop)() {
                let Some(group) = groups.get(next.fetch_add(1, Relaxed)) else {
                    break;
                };
                if let Err(e) = group.iter().try_for_each(|item| self.item(item)) {
                    failed.lock().get_or_insert(e);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..self.parts.threads.clamp(1, groups.len().max(1)) {
                scope.spawn(work);
            }
        });
        match failed.into_inner() {
            Some(e) => Err(e),
            None => Ok(std::mem::take(&mut self.damage.lock())),
        }
    }

    fn item(&self, item: &Item) -> Result<()> {
        let row = &self.table.rows[item.row as usize];
        let mut done = Done {
            looked: 1,
            before: u64::from(row.place.len),
            ..Done::default()
        };
        match self.anew(row, item.previous) {
            Ok(Some(stored)) => {
                done.written = 1;
                done.replaced = u64::from(row.place.len);
                done.stored = u64::from(stored);
            }
            Ok(None) => {}
            Err(e) if is_local(e.kind()) => self.damage.lock().push(e.to_string()),
            Err(e) => return Err(e),
        }
        (self.told)(done);
        Ok(())
    }

    /// Encodes a node anew; the bytes of its new record, if that is worth while.
    fn anew(&self, row: &Row, previous: u32) -> Result<Option<u32>> {
        let (packs, rebuilder) = (&*self.parts.packs, &self.parts.rebuilder);
        let old = NodeMeta::decode(row.kind, &packs.meta(&row.id)?.meta)?;
        let raw = match row.kind {
            NodeKind::Chunk => rebuilder.chunk(packs, &row.id)?,
            kind => Arc::new(rebuilder.node(packs, kind, &row.id)?),
        };
        let previous = (previous != NONE).then(|| self.table.rows[previous as usize].id);
        let against = Against {
            previous,
            relative: None,
        };
        let (mut meta, mut payload) = self.encoder.best(row.kind, &raw, old.number, &against)?;
        if let Some(delta) = meta.delta
            && self.leads_to(row, delta.base)?
        {
            let alone = Against::default();
            (meta, payload) = self.encoder.best(row.kind, &raw, old.number, &alone)?;
        }
        let bytes = meta.encode();
        let stored = (crate::pack::RECORD_OVERHEAD + bytes.len() + payload.len()) as u64;
        let worth = stored + u64::from(row.place.len) / WORTH < u64::from(row.place.len);
        if !worth && self.can_stay(row, &old)? {
            return Ok(None);
        }
        let new = Meta {
            kind: row.kind as u8,
            meta: bytes,
            payload_len: payload.len() as u32,
            stored_len: u32::try_from(stored)
                .map_err(|_| Error::new(Kind::Limit, "a record of more than 4 GiB"))?,
        };
        if let Some(writer) = &mut *self.writer.lock() {
            writer.append(new.kind, &row.id, &new.meta, &payload)?;
        }
        let stored = new.stored_len;
        self.encoder.source.metas.write().insert(row.id, new);
        Ok(Some(stored))
    }

    /// Whether the chain of `from` leads to a node, or does not end.
    fn leads_to(&self, row: &Row, from: NodeId) -> Result<bool> {
        let mut next = vec![from];
        for _ in 0..MAX_NODES {
            let Some(at) = next.pop() else { return Ok(false) };
            if at == row.id {
                return Ok(true);
            }
            let meta = NodeMeta::decode(row.kind, &self.encoder.source.meta(&at)?.meta)?;
            next.extend(meta.delta.iter().flat_map(Delta::bases));
        }
        Ok(true)
    }

    /// Whether a record is within bounds with its base as it will be.
    fn can_stay(&self, row: &Row, old: &NodeMeta) -> Result<bool> {
        let Some(delta) = old.delta else { return Ok(true) };
        let load = |id| {
            let base = self.encoder.source.meta(&id)?;
            Ok(Load::of(
                &NodeMeta::decode(row.kind, &base.meta)?,
                base.payload_len,
            ))
        };
        let loads: Vec<Load> = delta.bases().map(load).collect::<Result<_>>()?;
        Ok(restamped(old, row.payload_len, Load::together(loads)).is_some())
    }
}

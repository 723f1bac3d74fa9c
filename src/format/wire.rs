//! The bytes of an encoded layout (docs/FORMAT.md, "Encoded layout").

use super::layout::{ChunkPlan, Extent, Format, Layout, MAX_DIMS, Region, Tensor, plain_strides};
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Kind, Result};
use crate::tensor::{Dtype, Number, contiguous_strides};

const MAGIC: &[u8; 4] = b"zlay";
const VERSION: u8 = 1;

impl Layout {
    /// The canonical bytes of the layout.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::new();
        w.raw(MAGIC).u8(VERSION).u8(self.format as u8).varint(self.len);
        w.varint(self.chunks.len() as u64);
        for c in &self.chunks {
            w.u8(c.number.tag());
        }
        w.varint(self.extents.len() as u64);
        for e in &self.extents {
            w.varint(u64::from(e.chunk)).varint(u64::from(e.len));
        }
        let first = first_names(&self.tensors, self.regions.len());
        w.varint(self.regions.len() as u64);
        let mut end = 0;
        for (r, first) in self.regions.iter().zip(first) {
            w.varint(r.offset - end).varint(r.len).u8(r.dtype as u8);
            // A name is never empty, so an empty one can mean "the first tensor's".
            w.blob(if first == Some(&r.name) {
                b""
            } else {
                r.name.as_bytes()
            });
            end = r.offset + r.len;
        }
        w.varint(self.tensors.len() as u64);
        for t in &self.tensors {
            w.blob(t.name.as_bytes())
                .varint(u64::from(t.region))
                .varint(t.byte_offset)
                .u8(t.dtype as u8);
            let plain = plain_strides(t);
            w.u8(t.shape.len() as u8 | if plain { 0 } else { 0x80 });
            for n in t
                .shape
                .iter()
                .chain(if plain { &[] } else { t.strides.as_slice() })
            {
                w.varint(*n);
            }
        }
        w.varint(self.metadata.len() as u64);
        for (k, v) in &self.metadata {
            w.blob(k.as_bytes()).blob(v.as_bytes());
        }
        w.finish()
    }

    /// Reads what [`Layout::encode`] wrote, and nothing else: what is accepted encodes to the same bytes.
    ///
    /// # Errors
    /// `Damage` if the bytes are malformed or contradict themselves, `Unsupported` if a newer version wrote them.
    pub fn decode(bytes: &[u8]) -> Result<Layout> {
        let mut r = Reader::new(bytes, "layout");
        let bad = |what: &str| Error::damage(format!("layout: {what}"));
        if r.raw(4)? != MAGIC {
            return Err(bad("wrong magic"));
        }
        match r.u8()? {
            VERSION => {}
            v => {
                return Err(Error::new(
                    Kind::Unsupported,
                    format!("layout version {v}: a newer zspace wrote it"),
                ));
            }
        }
        let format = Format::from_tag(r.u8()?).ok_or_else(|| bad("unknown format"))?;
        let len = r.varint()?;
        let mut chunks = Vec::with_capacity(r.count(1)?);
        for _ in 0..chunks.capacity() {
            let number = Number::from_tag(r.u8()?).ok_or_else(|| bad("unknown number"))?;
            chunks.push(ChunkPlan { len: 0, number });
        }
        let extents = decode_extents(&mut r, &mut chunks)?;
        let mut regions = decode_regions(&mut r)?;
        let n = r.count(5)?;
        let mut tensors = Vec::with_capacity(n);
        for _ in 0..n {
            tensors.push(decode_tensor(&mut r)?);
        }
        let first = first_names(&tensors, regions.len());
        for (region, first) in regions.iter_mut().zip(first) {
            match first {
                Some(name) if region.name.is_empty() => region.name.clone_from(name),
                Some(name) if region.name == *name => {
                    return Err(bad("a region spells out its first tensor's name"));
                }
                _ => {}
            }
        }
        let n = r.count(2)?;
        let mut metadata = Vec::with_capacity(n);
        for _ in 0..n {
            metadata.push((r.text()?.to_owned(), r.text()?.to_owned()));
        }
        r.finish()?;
        let layout = Layout {
            format,
            len,
            chunks,
            extents,
            regions,
            tensors,
            metadata,
        };
        layout.check()?;
        Ok(layout)
    }
}

/// For each region, the name of the first tensor that lies in it.
fn first_names(tensors: &[Tensor], regions: usize) -> Vec<Option<&String>> {
    let mut first = vec![None; regions];
    for t in tensors {
        if let Some(slot @ None) = first.get_mut(t.region as usize) {
            *slot = Some(&t.name);
        }
    }
    first
}

fn decode_extents(r: &mut Reader<'_>, chunks: &mut [ChunkPlan]) -> Result<Vec<Extent>> {
    let bad = || Error::damage("layout: an extent leaves its chunk");
    let n = r.count(2)?;
    let mut extents = Vec::with_capacity(n);
    for _ in 0..n {
        let (chunk, len) = (r.varint()?, r.varint()?);
        let chunk = u32::try_from(chunk).map_err(|_| bad())?;
        let len = u32::try_from(len).map_err(|_| bad())?;
        let plan = chunks.get_mut(chunk as usize).ok_or_else(bad)?;
        extents.push(Extent {
            chunk,
            offset: plan.len,
            len,
        });
        plan.len = plan.len.checked_add(len).ok_or_else(bad)?;
    }
    Ok(extents)
}

fn decode_regions(r: &mut Reader<'_>) -> Result<Vec<Region>> {
    let n = r.count(4)?;
    let mut regions = Vec::with_capacity(n);
    let mut end = 0u64;
    for _ in 0..n {
        let (gap, len) = (r.varint()?, r.varint()?);
        let offset = end.checked_add(gap);
        let next = offset.and_then(|o| o.checked_add(len));
        let (Some(offset), Some(next)) = (offset, next) else {
            return Err(Error::damage("layout: a region leaves the file"));
        };
        let dtype = decode_dtype(r)?;
        regions.push(Region {
            offset,
            len,
            dtype,
            name: r.text()?.to_owned(),
        });
        end = next;
    }
    Ok(regions)
}

fn decode_tensor(r: &mut Reader<'_>) -> Result<Tensor> {
    let bad = |what: &str| Error::damage(format!("layout: {what}"));
    let name = r.text()?.to_owned();
    let region = u32::try_from(r.varint()?).map_err(|_| bad("a tensor's region is unknown"))?;
    let byte_offset = r.varint()?;
    let dtype = decode_dtype(r)?;
    let head = r.u8()?;
    let dims = usize::from(head & 0x7f);
    if dims > MAX_DIMS {
        return Err(bad("a tensor has too many dimensions"));
    }
    let list = |r: &mut Reader<'_>| (0..dims).map(|_| r.varint()).collect::<Result<Vec<u64>>>();
    let shape = list(r)?;
    let plain = contiguous_strides(&shape);
    let strides = if head & 0x80 == 0 { plain.clone() } else { list(r)? };
    if head & 0x80 != 0 && strides == plain {
        return Err(bad("a tensor spells out the usual strides"));
    }
    Ok(Tensor {
        name,
        region,
        byte_offset,
        dtype,
        shape,
        strides,
    })
}

fn decode_dtype(r: &mut Reader<'_>) -> Result<Dtype> {
    Dtype::from_tag(r.u8()?).ok_or_else(|| Error::damage("layout: unknown dtype"))
}

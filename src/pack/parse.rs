//! The bytes of packs, journal and index, and nothing but the bytes: pure functions over slices (docs/FORMAT.md).
//!
//! Everything here takes untrusted input: it never panics and allocates no more than the input's own size justifies.

use super::{Node, PackRange, Place};
use crate::bytes::{Reader, Writer};
use crate::error::{Error, Kind, Result};
use crate::id::NodeId;
use ::bytes::Bytes;

/// The one format version this build reads and writes.
pub const VERSION: u32 = 1;

/// The 16 random bytes that tell one store's files from another's.
pub type StoreId = [u8; 16];

/// First bytes of STORE/FORMAT.
pub const FORMAT_MAGIC: &[u8; 8] = b"zspaceST";
/// First bytes of a pack.
pub const PACK_MAGIC: &[u8; 8] = b"zspacePK";
/// First bytes of a journal segment and of its copy.
pub const JOURNAL_MAGIC: &[u8; 8] = b"zspaceJN";
/// First bytes of the durable mark.
pub const MARK_MAGIC: &[u8; 8] = b"zspaceDM";
/// First bytes of an index run.
pub const RUN_MAGIC: &[u8; 8] = b"zspaceIX";

/// Bytes of a prologue, and so of STORE/FORMAT.
pub const PROLOGUE: usize = 32;
/// Bytes of a pack's header.
pub const PACK_HEADER: usize = PROLOGUE + 8;
/// Bytes of a segment's header.
pub const SEGMENT_HEADER: usize = PROLOGUE + 24;
/// Bytes of the durable mark.
pub const MARK: usize = PROLOGUE + 24;
/// Bytes of a run's header.
pub const RUN_HEADER: usize = PROLOGUE + 36;

/// First two bytes of a record in a pack.
pub const RECORD_MAGIC: u16 = 0x5a9e;
/// Bytes of a record before its meta.
pub const RECORD_HEADER: usize = 44;
/// Bytes a record adds to its meta and payload.
pub const RECORD_OVERHEAD: usize = RECORD_HEADER + 4;
/// Bytes of a journal record before its content.
pub const JOURNAL_HEADER: usize = 24;
/// The longest content of a journal record: a bound on what one commit may say.
pub const MAX_JOURNAL: usize = 64 << 20;
/// Bytes of an entry in an index run.
pub const RUN_ENTRY: usize = 48;
/// Bytes of a bucket in a run's bucket table.
pub const RUN_BUCKET: usize = 8;
/// The most bits of an id that choose a bucket.
pub const MAX_BUCKET_BITS: u32 = 24;

const RANGE: usize = 24;

fn crc(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}

/// A prologue: magic, version, store id and the checksum of these, laid out alike in every version to come.
pub fn prologue(magic: &[u8; 8], store: &StoreId) -> Vec<u8> {
    let mut w = Writer::new();
    w.raw(magic).u32(VERSION).raw(store);
    seal(w)
}

fn seal(w: Writer) -> Vec<u8> {
    let mut v = w.finish();
    let c = crc(&v);
    v.extend_from_slice(&c.to_le_bytes());
    v
}

fn sealed_with(magic: &[u8; 8], store: &StoreId, fields: impl FnOnce(&mut Writer)) -> Vec<u8> {
    let mut w = Writer::new();
    w.raw(&prologue(magic, store));
    fields(&mut w);
    seal(w)
}

/// Reads a prologue. A wrong checksum or magic is damage; a version this build does not know is `Unsupported`.
pub fn read_prologue(bytes: &[u8], magic: &[u8; 8], what: &'static str) -> Result<StoreId> {
    let mut r = Reader::new(bytes, what);
    let head = r.raw(PROLOGUE - 4)?;
    if r.u32()? != crc(head) {
        return Err(Error::damage(format!("{what} has a wrong checksum")));
    }
    let mut r = Reader::new(head, what);
    if r.raw(8)? != magic {
        return Err(Error::damage(format!("{what} does not begin as one")));
    }
    let version = r.u32()?;
    if version != VERSION {
        let text = format!("{what} has format version {version}; this build reads version {VERSION}");
        return Err(Error::new(Kind::Unsupported, text));
    }
    let mut store = [0; 16];
    store.copy_from_slice(r.raw(16)?);
    Ok(store)
}

/// A prologue and the fields after it, whose checksum covers all before it.
fn sealed<'a>(
    bytes: &'a [u8],
    len: usize,
    magic: &[u8; 8],
    what: &'static str,
) -> Result<(StoreId, Reader<'a>)> {
    let store = read_prologue(bytes, magic, what)?;
    let all = Reader::new(bytes, what).raw(len)?;
    let (covered, sum) = all.split_at(len - 4);
    if Reader::new(sum, what).u32()? != crc(covered) {
        return Err(Error::damage(format!("{what} has a wrong checksum")));
    }
    Ok((store, Reader::new(&covered[PROLOGUE..], what)))
}

/// A pack's header.
pub fn pack_header(store: &StoreId, pack: u32) -> Vec<u8> {
    sealed_with(PACK_MAGIC, store, |w| {
        w.u32(pack);
    })
}

/// The store and number in a pack's header.
pub fn read_pack_header(bytes: &[u8]) -> Result<(StoreId, u32)> {
    let (store, mut r) = sealed(bytes, PACK_HEADER, PACK_MAGIC, "pack header")?;
    Ok((store, r.u32()?))
}

/// What a journal segment says first: its number and where the segment before it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The store it belongs to.
    pub store: StoreId,
    /// Its number; the first is 1.
    pub segment: u32,
    /// The length at which the segment before it ends; 0 for the first.
    pub previous_len: u64,
    /// The sequence of the last record before this segment; 0 for the first.
    pub previous_seq: u64,
}

impl SegmentHeader {
    /// The bytes of the header.
    pub fn encode(&self) -> Vec<u8> {
        sealed_with(JOURNAL_MAGIC, &self.store, |w| {
            w.u32(self.segment).u64(self.previous_len).u64(self.previous_seq);
        })
    }

    /// Reads a header.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let (store, mut r) = sealed(bytes, SEGMENT_HEADER, JOURNAL_MAGIC, "journal segment header")?;
        Ok(Self {
            store,
            segment: r.u32()?,
            previous_len: r.u64()?,
            previous_seq: r.u64()?,
        })
    }
}

/// A place in the journal: everything before it has been published (or, as the durable mark, is durable).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pos {
    /// Number of the segment.
    pub segment: u32,
    /// Length within the segment.
    pub offset: u64,
    /// Sequence of the last record before the place.
    pub seq: u64,
}

impl Pos {
    /// The place before the first record.
    pub const START: Pos = Pos {
        segment: 1,
        offset: SEGMENT_HEADER as u64,
        seq: 0,
    };

    /// The durable mark that names this place.
    pub fn encode_mark(&self, store: &StoreId) -> Vec<u8> {
        sealed_with(MARK_MAGIC, store, |w| {
            w.u32(self.segment).u64(self.offset).u64(self.seq);
        })
    }

    /// Reads a durable mark.
    pub fn decode_mark(bytes: &[u8]) -> Result<(StoreId, Self)> {
        let (store, mut r) = sealed(bytes, MARK, MARK_MAGIC, "durable mark")?;
        Ok((
            store,
            Self {
                segment: r.u32()?,
                offset: r.u64()?,
                seq: r.u64()?,
            },
        ))
    }
}

/// What a record in a pack says before its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// The node it holds.
    pub id: NodeId,
    /// The layer above's kind of node.
    pub kind: u8,
    /// The layer above's bytes about the node.
    pub meta: Vec<u8>,
    /// Bytes of the payload.
    pub payload_len: u32,
}

impl RecordHeader {
    /// Bytes of the whole record.
    pub fn stored_len(&self) -> u64 {
        (RECORD_OVERHEAD + self.meta.len()) as u64 + u64::from(self.payload_len)
    }
}

/// Appends a record to `out` and returns its length; `Limit` if the meta or the whole is too long.
pub fn write_record(out: &mut Vec<u8>, kind: u8, id: &NodeId, meta: &[u8], payload: &[u8]) -> Result<u32> {
    let limit = |what: &str| Error::new(Kind::Limit, format!("node {}: {what}", id.short()));
    let meta_len = u8::try_from(meta.len()).map_err(|_| limit("its meta exceeds 255 bytes"))?;
    let total = u32::try_from(payload.len().saturating_add(RECORD_OVERHEAD + meta.len()));
    let total = total.map_err(|_| limit("it exceeds 4 GiB"))?;
    let mut head = [0; RECORD_HEADER];
    head[..2].copy_from_slice(&RECORD_MAGIC.to_le_bytes());
    head[2] = kind;
    head[3] = meta_len;
    head[4..8].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    head[8..40].copy_from_slice(id.as_bytes());
    let mut sum = crc32fast::Hasher::new();
    sum.update(&head[..40]);
    sum.update(meta);
    head[40..].copy_from_slice(&sum.finalize().to_le_bytes());
    out.extend_from_slice(&head);
    out.extend_from_slice(meta);
    out.extend_from_slice(payload);
    out.extend_from_slice(&crc(payload).to_le_bytes());
    Ok(total)
}

/// Reads the header and meta at the front of `bytes`, which may end anywhere after them.
pub fn record_header(bytes: &[u8]) -> Result<RecordHeader> {
    let what = "pack record";
    let mut r = Reader::new(bytes, what);
    let head = r.raw(40)?;
    let sum = r.u32()?;
    let mut h = Reader::new(head, what);
    if h.u16()? != RECORD_MAGIC {
        return Err(Error::damage("no pack record begins here"));
    }
    let (kind, meta_len, payload_len, id) = (h.u8()?, h.u8()?, h.u32()?, NodeId(h.id()?));
    let meta = r.raw(usize::from(meta_len))?;
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head);
    hasher.update(meta);
    if hasher.finalize() != sum {
        return Err(Error::damage("pack record has a wrong header checksum"));
    }
    Ok(RecordHeader {
        id,
        kind,
        meta: meta.to_vec(),
        payload_len,
    })
}

/// Reads a whole record, which `bytes` must be exactly. The payload is a part of them, not a copy.
pub fn record(bytes: Vec<u8>) -> Result<(NodeId, Node)> {
    let h = record_header(&bytes)?;
    if h.stored_len() != bytes.len() as u64 {
        let text = format!(
            "pack record has {} bytes where {} were expected",
            h.stored_len(),
            bytes.len()
        );
        return Err(Error::damage(text));
    }
    let from = RECORD_HEADER + h.meta.len();
    let mut r = Reader::new(&bytes[from..], "pack record");
    let payload = r.raw(h.payload_len as usize)?;
    if r.u32()? != crc(payload) {
        return Err(Error::damage("pack record has a wrong payload checksum"));
    }
    let to = from + payload.len();
    Ok((
        h.id,
        Node {
            kind: h.kind,
            meta: h.meta,
            payload: Bytes::from(bytes).slice(from..to),
        },
    ))
}

/// A record of the journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalRecord {
    /// Its sequence number; the first is 1 and there are no gaps.
    pub seq: u64,
    /// The sequence of the first record made durable by the same fsync.
    pub batch: u64,
    /// Where the nodes it publishes lie.
    pub ranges: Vec<PackRange>,
    /// The layer above's bytes.
    pub body: Vec<u8>,
    /// Bytes of the whole record.
    pub stored_len: u64,
}

/// Appends a journal record to `out`; `Limit` if it is too long.
pub fn write_journal(
    out: &mut Vec<u8>,
    seq: u64,
    batch: u64,
    ranges: &[PackRange],
    body: &[u8],
) -> Result<()> {
    let mut w = Writer::new();
    w.varint(ranges.len() as u64);
    for r in ranges {
        w.u32(r.pack).u64(r.from).u64(r.to).u32(r.count);
    }
    w.raw(body);
    let content = w.finish();
    if content.len() > MAX_JOURNAL {
        return Err(Error::new(
            Kind::Limit,
            format!("a journal record of {} bytes is too long", content.len()),
        ));
    }
    let mut w = Writer::new();
    w.u32(content.len() as u32).u64(seq).u64(batch);
    let head = w.finish();
    let mut sum = crc32fast::Hasher::new();
    sum.update(&head);
    sum.update(&content);
    out.extend_from_slice(&head);
    out.extend_from_slice(&sum.finalize().to_le_bytes());
    out.extend_from_slice(&content);
    Ok(())
}

/// The length of the record that begins with `head`, from its first four bytes; damage if no record is that long.
pub fn journal_len(head: &[u8]) -> Result<u64> {
    match Reader::new(head, "journal record").u32()? {
        n if n == 0 || n as usize > MAX_JOURNAL => Err(Error::damage(format!(
            "journal record claims a content of {n} bytes"
        ))),
        n => Ok(JOURNAL_HEADER as u64 + u64::from(n)),
    }
}

/// Reads the journal record at the front of `bytes`, which may hold more after it.
pub fn journal_record(bytes: &[u8]) -> Result<JournalRecord> {
    let what = "journal record";
    let stored_len = journal_len(bytes)?;
    let mut r = Reader::new(bytes, what);
    let head = r.raw(JOURNAL_HEADER - 4)?;
    let sum = r.u32()?;
    let content = r.raw(stored_len as usize - JOURNAL_HEADER)?;
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(head);
    hasher.update(content);
    if hasher.finalize() != sum {
        return Err(Error::damage("journal record has a wrong checksum"));
    }
    let mut h = Reader::new(&head[4..], what);
    let (seq, batch) = (h.u64()?, h.u64()?);
    let mut r = Reader::new(content, what);
    let ranges = (0..r.count(RANGE)?)
        .map(|_| {
            Ok(PackRange {
                pack: r.u32()?,
                from: r.u64()?,
                to: r.u64()?,
                count: r.u32()?,
            })
        })
        .collect::<Result<Vec<_>>>()?;
    if batch == 0
        || batch > seq
        || ranges
            .iter()
            .any(|r| r.from > r.to || r.from < PACK_HEADER as u64)
    {
        return Err(Error::damage("journal record contradicts itself"));
    }
    let body = r.raw(r.remaining())?.to_vec();
    Ok(JournalRecord {
        seq,
        batch,
        ranges,
        body,
        stored_len,
    })
}

/// Whether a whole record of a batch that begins after `seq` lies somewhere in `bytes`: then what comes before it was durable.
pub fn later_batch(bytes: &[u8], seq: u64) -> bool {
    (0..bytes.len().saturating_sub(JOURNAL_HEADER)).any(|i| {
        let mut r = Reader::new(&bytes[i + 4..], "journal record");
        let plausible =
            matches!((r.u64(), r.u64()), (Ok(s), Ok(b)) if b > seq && b <= s && s - seq < 1 << 32);
        plausible && journal_record(&bytes[i..]).is_ok()
    })
}

/// What an index run says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunHeader {
    /// The store it belongs to.
    pub store: StoreId,
    /// The first journal sequence whose nodes it holds.
    pub first: u64,
    /// The last journal sequence whose nodes it holds.
    pub last: u64,
    /// How many entries it has.
    pub count: u64,
    /// How many leading bits of an id choose its bucket.
    pub bits: u32,
    /// Checksum of the bucket table.
    pub table_crc: u32,
}

impl RunHeader {
    /// The bytes of the header.
    pub fn encode(&self) -> Vec<u8> {
        sealed_with(RUN_MAGIC, &self.store, |w| {
            w.u64(self.first)
                .u64(self.last)
                .u64(self.count)
                .u32(self.bits)
                .u32(self.table_crc);
        })
    }

    /// Reads a header.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let (store, mut r) = sealed(bytes, RUN_HEADER, RUN_MAGIC, "index run header")?;
        let (first, last, count) = (r.u64()?, r.u64()?, r.u64()?);
        let (bits, table_crc) = (r.u32()?, r.u32()?);
        if first == 0 || first > last || count > u64::from(u32::MAX) || bits > MAX_BUCKET_BITS {
            return Err(Error::damage("index run header contradicts itself"));
        }
        Ok(Self {
            store,
            first,
            last,
            count,
            bits,
            table_crc,
        })
    }

    /// Bytes of the whole file.
    pub fn file_len(&self) -> u64 {
        self.table_at() + ((RUN_BUCKET as u64) << self.bits)
    }

    /// Where the bucket table begins.
    pub fn table_at(&self) -> u64 {
        RUN_HEADER as u64 + self.count * RUN_ENTRY as u64
    }
}

/// The bucket of an id in a run with `bits`.
pub fn bucket(id: &NodeId, bits: u32) -> usize {
    let [a, b, c, d, ..] = id.0;
    (u64::from(u32::from_be_bytes([a, b, c, d])) >> (32 - bits.min(32))) as usize
}

/// Reads a run's bucket table: for each bucket, the number of entries up to its end and the checksum of its entries.
pub fn bucket_table(bytes: &[u8], header: &RunHeader) -> Result<Vec<(u32, u32)>> {
    let what = "index run's bucket table";
    if bytes.len() != RUN_BUCKET << header.bits || crc(bytes) != header.table_crc {
        return Err(Error::damage(format!("{what} has a wrong checksum")));
    }
    let mut r = Reader::new(bytes, what);
    let table = (0..1usize << header.bits)
        .map(|_| Ok((r.u32()?, r.u32()?)))
        .collect::<Result<Vec<_>>>()?;
    let ends_last = table.last().is_some_and(|b| u64::from(b.0) == header.count);
    if !ends_last || !table.is_sorted_by_key(|b| b.0) {
        return Err(Error::damage(format!("{what} contradicts itself")));
    }
    Ok(table)
}

/// The bytes of an entry in a run.
pub fn run_entry(id: &NodeId, place: &Place) -> [u8; RUN_ENTRY] {
    let mut e = [0; RUN_ENTRY];
    e[..32].copy_from_slice(id.as_bytes());
    e[32..36].copy_from_slice(&place.pack.to_le_bytes());
    e[36..44].copy_from_slice(&place.offset.to_le_bytes());
    e[44..].copy_from_slice(&place.len.to_le_bytes());
    e
}

fn check_bucket(bytes: &[u8], sum: u32) -> Result<()> {
    if !bytes.len().is_multiple_of(RUN_ENTRY) || crc(bytes) != sum {
        return Err(Error::damage("a bucket of the index run has a wrong checksum"));
    }
    Ok(())
}

fn read_entry(bytes: &[u8]) -> Result<(NodeId, Place)> {
    let mut r = Reader::new(bytes, "index run");
    Ok((
        NodeId(r.id()?),
        Place {
            pack: r.u32()?,
            offset: r.u64()?,
            len: r.u32()?,
        },
    ))
}

/// Reads the entries of one bucket, checking their checksum.
pub fn run_entries(bytes: &[u8], sum: u32) -> Result<Vec<(NodeId, Place)>> {
    check_bucket(bytes, sum)?;
    bytes.chunks_exact(RUN_ENTRY).map(read_entry).collect()
}

/// Finds an id among the entries of one bucket, checking their checksum.
pub fn find_entry(bytes: &[u8], sum: u32, id: &NodeId) -> Result<Option<Place>> {
    check_bucket(bytes, sum)?;
    let (entries, _) = bytes.as_chunks::<RUN_ENTRY>();
    match entries.binary_search_by(|e| e[..32].cmp(id.as_bytes())) {
        Ok(i) => Ok(Some(read_entry(&entries[i])?.1)),
        Err(_) => Ok(None),
    }
}

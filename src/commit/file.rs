//! Commits one file: splits it, streams it once through hash and encoders, and proves the result.

use super::encode::{Against, Job};
use super::listing::SMALL;
use super::{Commit, base::FileBases};
use crate::disk::read_vec;
use crate::error::{Error, Kind, Result};
use crate::format::{Cutter, Layout, Source, SpanCrc, Split, crc_spans, split};
use crate::graph::{Manifest, NodeKind, Shape};
use crate::id::{Domain, FileHash, FileHasher, NodeId};
use crate::rebuild::StoredFile;
use crate::tensor::Number;
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::collections::HashMap;
use std::fs::{File, Metadata};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

/// How often a file that changes while it is read is read anew before the commit gives up.
const TRIES: usize = 3;
/// Bytes read at once.
const READ: usize = 1 << 20;

struct OpenFile<'a> {
    file: &'a File,
    len: u64,
}

impl Source for OpenFile<'_> {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(buf, offset).map_err(|e| read_error(&e))
    }
}

/// A file from front to back.
struct Input<'a> {
    file: &'a File,
    at: u64,
    /// What was read last of many small parts, and where it begins.
    window: Vec<u8>,
    window_at: u64,
}

impl<'a> Input<'a> {
    /// Bytes read at once for small parts; larger ones are read to where they belong.
    const WINDOW: usize = 64 << 10;

    fn new(file: &'a File) -> Self {
        Input {
            file,
            at: 0,
            window: Vec::new(),
            window_at: 0,
        }
    }

    /// The next `len` bytes.
    fn take(&mut self, len: usize) -> Result<Vec<u8>> {
        if len < Self::WINDOW {
            let mut part = vec![0; len];
            self.fill(&mut part)?;
            return Ok(part);
        }
        let part = read_vec(self.file, self.at, len).map_err(|e| read_error(&e))?;
        if part.len() < len {
            return Err(read_error(&ErrorKind::UnexpectedEof.into()));
        }
        self.at += len as u64;
        Ok(part)
    }

    /// The next bytes, as many as there is room for.
    fn fill(&mut self, part: &mut [u8]) -> Result<()> {
        let at = self.at;
        self.at += part.len() as u64;
        if part.len() >= Self::WINDOW {
            return self.file.read_exact_at(part, at).map_err(|e| read_error(&e));
        }
        if self.at > self.window_at + self.window.len() as u64 {
            self.window = read_vec(self.file, at, Self::WINDOW).map_err(|e| read_error(&e))?;
            self.window_at = at;
        }
        let from = (at - self.window_at) as usize;
        let found = self.window.get(from..from + part.len());
        part.copy_from_slice(found.ok_or_else(|| read_error(&ErrorKind::UnexpectedEof.into()))?);
        Ok(())
    }
}

fn read_error(e: &std::io::Error) -> Error {
    match e.kind() {
        ErrorKind::UnexpectedEof => Error::new(Kind::Changed, "the file became shorter while it was read"),
        _ => Error::io(
            "read",
            std::io::Error::from_raw_os_error(e.raw_os_error().unwrap_or(libc::EIO)),
        ),
    }
}

/// What tells that a file was written to: its inode, length and times.
pub(super) type Stamp = (u64, u64, i64, i64, i64, i64);

/// The stamp of a file.
pub(super) fn stamp(m: &Metadata) -> Stamp {
    (
        m.ino(),
        m.len(),
        m.mtime(),
        m.mtime_nsec(),
        m.ctime(),
        m.ctime_nsec(),
    )
}

impl Commit<'_> {
    /// Stores the file's content; `path` is its path in the new version. A file that changes meanwhile is read again; the
    /// metadata are those that go with the bytes. With `may_wait`, nothing is stored of a file of 16-bit floats: it should come
    /// after those beside it, for if they have f32 copies of its tensors, it follows from them.
    pub(super) fn file(
        &self,
        source: &Path,
        path: &[u8],
        may_wait: bool,
    ) -> Result<Option<(FileHash, u64, Metadata)>> {
        let at = |e: Error| e.context(source.display());
        for _ in 0..TRIES {
            // O_NONBLOCK: a FIFO put in the file's place must not hang the commit.
            let flags =
                rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC | rustix::fs::OFlags::NONBLOCK;
            let file = rustix::fs::open(source, flags, rustix::fs::Mode::empty());
            let file = File::from(file.map_err(|e| at(Error::io("open", e.into())))?);
            let before = file.metadata().map_err(|e| at(Error::io("stat", e)))?;
            if !before.is_file() {
                return Err(at(Error::new(Kind::Changed, "is no regular file any more")));
            }
            let (hash, len) = match self.try_file(&file, before.len(), path, may_wait) {
                Ok(Some(done)) => done,
                Ok(None) => return Ok(None),
                Err(e) if e.kind() == Kind::Changed => continue,
                Err(e) => return Err(at(e)),
            };
            let after = file.metadata().map_err(|e| at(Error::io("stat", e)))?;
            if stamp(&before) == stamp(&after) {
                self.bases.lock().stored(path, (hash, len));
                return Ok(Some((hash, len, before)));
            }
        }
        Err(at(Error::new(
            Kind::Changed,
            format!("changed while it was read, {TRIES} times; commit it once it is written"),
        )))
    }

    fn try_file(
        &self,
        file: &File,
        len: u64,
        path: &[u8],
        may_wait: bool,
    ) -> Result<Option<(FileHash, u64)>> {
        let source = OpenFile { file, len };
        match split(&source)? {
            Split::Parsed(layout) if may_wait && is_narrow(&layout) => Ok(None),
            Split::Parsed(layout) => self.parsed(&source, Arc::new(layout), path).map(Some),
            Split::Opaque(why) => {
                log::debug!("{}: stored as it is: {why}", String::from_utf8_lossy(path));
                self.opaque(file, len, path).map(Some)
            }
        }
    }

    fn parsed(&self, file: &OpenFile<'_>, layout: Arc<Layout>, path: &[u8]) -> Result<(FileHash, u64)> {
        let FileBases {
            chunks: bases,
            layout: layout_base,
            mut relatives,
        } = self.bases.lock().of_layout(path, &layout, file);
        let mut crc = SpanCrc::new(crc_spans(&layout))?;
        let mut hasher = FileHasher::default();
        let mut open: HashMap<u32, (Vec<u8>, u32)> = HashMap::new();
        let mut input = Input::new(file.file);
        let (reply, replies) = unbounded();
        for e in &layout.extents {
            let plan = layout
                .chunks
                .get(e.chunk as usize)
                .ok_or_else(|| Error::damage("layout names a missing chunk"))?;
            let raw = if e.len == plan.len {
                let raw = input.take(e.len as usize)?;
                hasher.update(&raw);
                crc.update(&raw);
                Some(raw)
            } else {
                let (raw, filled) = open
                    .entry(e.chunk)
                    .or_insert_with(|| (vec![0; plan.len as usize], 0));
                let (from, to) = (e.offset as usize, e.offset as usize + e.len as usize);
                let part = raw
                    .get_mut(from..to)
                    .ok_or_else(|| Error::damage("layout reaches past a chunk"))?;
                input.fill(part)?;
                hasher.update(part);
                crc.update(part);
                *filled += e.len;
                let whole = *filled == plan.len;
                whole.then(|| open.remove(&e.chunk)).flatten().map(|(raw, _)| raw)
            };
            if let Some(raw) = raw {
                let place = e.chunk as usize;
                let against = Against {
                    previous: bases.get(place).copied().flatten(),
                    relative: relatives.remove(&place),
                };
                self.advance(raw.len() as u64)?;
                self.encode(raw, plan.number, against, place, &reply)?;
            }
        }
        drop(reply);
        let chunks = collect(&replies, layout.chunks.len())?;
        let (hash, crcs) = (hasher.finish(), crc.finish()?);
        let source = self.encoder.source.clone();
        let stored = StoredFile::new(
            self.encoder.rebuilder(),
            source,
            layout.clone(),
            chunks.clone(),
            crcs.clone(),
        )?;
        match split(&stored)? {
            Split::Parsed(again) if again == *layout => {}
            _ => return Err(Error::new(Kind::Changed, "the file changed while it was parsed")),
        }
        let bytes = layout.encode();
        let id = NodeId(Domain::Layout.hash(&bytes));
        self.encoder.node(NodeKind::Layout, id, &bytes, layout_base)?;
        self.manifest(
            hash,
            layout.len,
            &Manifest {
                shape: Shape::Layout(id),
                chunks,
                crcs,
            },
        )
    }

    fn opaque(&self, file: &File, len: u64, path: &[u8]) -> Result<(FileHash, u64)> {
        let base = self.bases.lock().of_opaque(path);
        let mut hasher = FileHasher::default();
        let mut lens = Vec::new();
        let mut total = 0u64;
        let mut cutter = Cutter::new();
        let (reply, replies) = unbounded();
        {
            let mut emit = |chunk: &[u8]| {
                let place = lens.len();
                lens.push(chunk.len() as u32);
                self.advance(chunk.len() as u64)?;
                let against = Against {
                    previous: base.filter(|_| place == 0),
                    relative: None,
                };
                self.encode(chunk.to_vec(), Number::Bytes, against, place, &reply)
            };
            let mut buf = vec![0; READ.min(len as usize + 1)];
            // One byte more tells of a file that grows; to follow it could take for ever.
            let mut input = file.take(len + 1);
            loop {
                let n = input.read(&mut buf).map_err(|e| read_error(&e))?;
                if n == 0 {
                    break;
                }
                hasher.update(&buf[..n]);
                total += n as u64;
                cutter.push(&buf[..n], &mut emit)?;
            }
            cutter.finish(&mut emit)?;
        }
        drop(reply);
        if total != len {
            return Err(Error::new(
                Kind::Changed,
                "the file changed its length while it was read",
            ));
        }
        let chunks = collect(&replies, lens.len())?;
        self.manifest(
            hasher.finish(),
            len,
            &Manifest {
                shape: Shape::Opaque(lens),
                chunks,
                crcs: Vec::new(),
            },
        )
    }

    /// Hands a chunk to the encoders; small ones are not worth the way there.
    fn encode(
        &self,
        raw: Vec<u8>,
        number: Number,
        against: Against,
        place: usize,
        reply: &Sender<(usize, Result<NodeId>)>,
    ) -> Result<()> {
        if raw.len() <= 4096 {
            let id = NodeId(Domain::Chunk.hash(&raw));
            let result = self.encoder.chunk(id, &raw, number, &against);
            let _ = reply.send((place, result.map(|()| id)));
            return Ok(());
        }
        let job = Job {
            raw,
            number,
            against,
            place,
            reply: reply.clone(),
        };
        self.jobs
            .send(job)
            .map_err(|_| Error::new(Kind::Io, "the encoders have stopped"))
    }

    fn manifest(&self, hash: FileHash, len: u64, manifest: &Manifest) -> Result<(FileHash, u64)> {
        self.encoder.node(
            NodeKind::Manifest,
            Manifest::id(&hash, len),
            &manifest.encode(),
            None,
        )?;
        Ok((hash, len))
    }
}

/// Whether a file is worth the wait for others that may have its tensors as f32: most of it is 16-bit floats.
fn is_narrow(layout: &Layout) -> bool {
    let narrow = layout
        .chunks
        .iter()
        .filter(|c| matches!(c.number, Number::F16 | Number::BF16));
    layout.len >= SMALL && narrow.map(|c| u64::from(c.len)).sum::<u64>() > layout.len / 2
}

/// The chunks' ids in their places, once all encoders have answered.
fn collect(replies: &Receiver<(usize, Result<NodeId>)>, count: usize) -> Result<Vec<NodeId>> {
    let mut ids = vec![None; count];
    for (place, result) in replies {
        let slot = ids
            .get_mut(place)
            .ok_or_else(|| Error::damage("encoder answered for a chunk that is not there"))?;
        *slot = Some(result?);
    }
    let whole: Option<Vec<NodeId>> = ids.into_iter().collect();
    whole.ok_or_else(|| Error::damage("encoder left a chunk out"))
}

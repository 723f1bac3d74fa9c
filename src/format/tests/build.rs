//! Builds files byte by byte, odd ones too.

/// A safetensors file with this header and so many zero bytes after it.
pub(super) fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    out.resize(out.len() + data, 0);
    out
}

/// A safetensors file of F32 vectors of these lengths, named t0, t1, …, filled with a pattern.
pub(super) fn vectors(lens: &[usize]) -> Vec<u8> {
    let mut at = 0;
    let entries: Vec<String> = (lens.iter().enumerate())
        .map(|(i, n)| {
            let begin = at;
            at += 4 * n;
            format!("\"t{i}\":{{\"dtype\":\"F32\",\"shape\":[{n}],\"data_offsets\":[{begin},{at}]}}")
        })
        .collect();
    let mut file = safetensors(&format!("{{{}}}", entries.join(",")), at);
    for (i, b) in file.iter_mut().rev().take(at).enumerate() {
        *b = ((i * 31) >> 3) as u8;
    }
    file
}

/// A zip member to write: what the headers say, right or wrong.
#[derive(Clone, Debug)]
pub(super) struct Member {
    pub(super) name: Vec<u8>,
    pub(super) data: Vec<u8>,
    pub(super) method: u16,
    /// The name in the local header, if another.
    pub(super) local_name: Option<Vec<u8>>,
    /// Added to the offset, and to the sizes, in the directory.
    pub(super) offset_lie: i64,
    pub(super) size_lie: i64,
}

pub(super) fn member(name: &str, data: &[u8]) -> Member {
    let (name, data) = (name.as_bytes().to_vec(), data.to_vec());
    Member {
        name,
        data,
        method: 0,
        local_name: None,
        offset_lie: 0,
        size_lie: 0,
    }
}

/// A zip of these members, without zip64.
pub(super) fn zip(members: &[Member]) -> Vec<u8> {
    let (mut out, mut directory) = (Vec::new(), Vec::new());
    for m in members {
        let lie = |n: usize, by: i64| ((n as i64 + by) as u32).to_le_bytes();
        let start = out.len();
        let local_name = m.local_name.as_ref().unwrap_or(&m.name);
        let crc = crc32fast::hash(&m.data).to_le_bytes();
        let size = lie(m.data.len(), m.size_lie);
        let middle = |out: &mut Vec<u8>, name: &[u8]| {
            out.extend_from_slice(&[0, 0]);
            out.extend_from_slice(&m.method.to_le_bytes());
            out.extend_from_slice(&[0; 4]);
            out.extend_from_slice(&crc);
            out.extend_from_slice(&size);
            out.extend_from_slice(&size);
            out.extend_from_slice(&(name.len() as u16).to_le_bytes());
            out.extend_from_slice(&[0, 0]);
        };
        out.extend_from_slice(b"PK\x03\x04\x14\x00");
        middle(&mut out, local_name);
        out.extend_from_slice(local_name);
        out.extend_from_slice(&m.data);
        directory.extend_from_slice(b"PK\x01\x02\x14\x00\x14\x00");
        middle(&mut directory, &m.name);
        directory.extend_from_slice(&[0; 10]);
        directory.extend_from_slice(&lie(start, m.offset_lie));
        directory.extend_from_slice(&m.name);
    }
    let (start, count) = (out.len() as u32, members.len() as u16);
    out.extend_from_slice(&directory);
    out.extend_from_slice(b"PK\x05\x06\x00\x00\x00\x00");
    out.extend_from_slice(&count.to_le_bytes());
    out.extend_from_slice(&count.to_le_bytes());
    out.extend_from_slice(&(directory.len() as u32).to_le_bytes());
    out.extend_from_slice(&start.to_le_bytes());
    out.extend_from_slice(&[0, 0]);
    out
}

/// A torch file with this pickle and storages of these bytes, named 0, 1, ….
pub(super) fn torch(pickle: &[u8], storages: &[&[u8]]) -> Vec<u8> {
    let mut members = vec![member("x/data.pkl", pickle), member("x/byteorder", b"little")];
    for (i, s) in storages.iter().enumerate() {
        members.push(member(&format!("x/data/{i}"), s));
    }
    zip(&members)
}

/// Opcodes that push a float tensor of `numel` elements over storage `key`.
pub(super) fn tensor(key: u8, numel: u8) -> Vec<u8> {
    tensor_of(key, numel, 0, &[numel], &[1])
}

pub(super) fn tensor_of(key: u8, numel: u8, offset: u8, shape: &[u8], strides: &[u8]) -> Vec<u8> {
    let mut p = b"ctorch._utils\n_rebuild_tensor_v2\n((".to_vec();
    p.extend_from_slice(&text("storage"));
    p.extend_from_slice(b"ctorch\nFloatStorage\n");
    p.extend_from_slice(&text(&key.to_string()));
    p.extend_from_slice(&text("cpu"));
    p.extend_from_slice(&[b'K', numel, b't', b'Q', b'K', offset]);
    for list in [shape, strides] {
        p.push(b'(');
        p.extend(list.iter().flat_map(|n| [b'K', *n]));
        p.push(b't');
    }
    p.extend_from_slice(b"\x89}tR");
    p
}

/// Opcodes that push a text.
pub(super) fn text(s: &str) -> Vec<u8> {
    let mut out = vec![b'X'];
    out.extend_from_slice(&(s.len() as u32).to_le_bytes());
    out.extend_from_slice(s.as_bytes());
    out
}

/// A pickle of these opcodes.
pub(super) fn pickle(ops: &[&[u8]]) -> Vec<u8> {
    [b"\x80\x02".as_slice(), &ops.concat(), b"."].concat()
}

//! A zip directory reader: where each member's bytes lie. Inflates nothing.
//!
//! Source: PKWARE APPNOTE 6.3.10, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.14 to 4.3.16 (ends).
//! Strict on purpose: whatever two zip readers might read differently is not split.

use super::source::{Parse, Source, odd, take};
use std::collections::HashSet;

const END: [u8; 4] = *b"PK\x05\x06";
const END64: [u8; 4] = *b"PK\x06\x06";
const LOCATOR64: [u8; 4] = *b"PK\x06\x07";
const CENTRAL: [u8; 4] = *b"PK\x01\x02";
const LOCAL: [u8; 4] = *b"PK\x03\x04";
const END_LEN: u64 = 22;
const END64_LEN: u64 = 56;
const LOCATOR64_LEN: u64 = 20;
const CENTRAL_LEN: usize = 46;
const LOCAL_LEN: u64 = 30;
/// The longest central directory that is read, in bytes.
const MAX_DIRECTORY: u64 = 64 << 20;
/// General purpose flags: encrypted in one way or another; sizes follow the data.
const ENCRYPTED: u16 = 1 | 1 << 6 | 1 << 13;
const SIZES_FOLLOW: u16 = 1 << 3;

/// One member of a zip.
#[derive(Debug)]
pub(super) struct Member {
    /// The name's bytes; no two members share one.
    pub(super) name: Vec<u8>,
    /// Whether the file's bytes are the member's bytes.
    pub(super) stored: bool,
    /// Where its bytes start in the file.
    pub(super) offset: u64,
    /// How many bytes of the file it takes.
    pub(super) len: u64,
}

/// Where a zip's end record says that its directory lies.
pub(super) struct Directory {
    offset: u64,
    len: u64,
    entries: u64,
}

/// An entry of the central directory.
struct Entry {
    name: Vec<u8>,
    flags: u16,
    method: u16,
    packed: u64,
    plain: u64,
    local: u64,
}

/// Whether the file starts like a zip with at least one member.
pub(super) fn is_zip(src: &dyn Source) -> Parse<bool> {
    Ok(src.len() >= 4 && take(src, 0, 4, "zip")? == LOCAL)
}

/// Looks for the end record within the last 64 KiB, where a comment of up to 65,535 bytes may follow it. `exact` wants the
/// comment to end where the file ends.
pub(super) fn find_end(src: &dyn Source, exact: bool) -> Parse<Option<u64>> {
    let tail_len = src.len().min(END_LEN + 0xffff);
    let start = src.len() - tail_len;
    let tail = take(src, start, tail_len, "zip")?;
    let found = (0..tail.len().saturating_sub(END_LEN as usize - 1))
        .rev()
        .find(|i| {
            let comment_end = i + END_LEN as usize + usize::from(u16_at(&tail, i + 20));
            tail[*i..*i + 4] == END && (comment_end == tail.len() || !exact && comment_end < tail.len())
        });
    Ok(found.map(|i| start + i as u64))
}

/// Reads the end record at `end`, and the zip64 one before it where there is one.
pub(super) fn read_end(src: &dyn Source, end: u64) -> Parse<Directory> {
    let e = take(src, end, END_LEN, "zip: the end record")?;
    let (disk, first_disk, here, entries) = (u16_at(&e, 4), u16_at(&e, 6), u16_at(&e, 8), u16_at(&e, 10));
    let (len, offset) = (u32_at(&e, 12), u32_at(&e, 16));
    let single = |n: u16| n == 0 || n == 0xffff;
    if !single(disk) || !single(first_disk) || here != entries {
        return odd("zip: spans several disks");
    }
    let mut d = Directory {
        offset: u64::from(offset),
        len: u64::from(len),
        entries: u64::from(entries),
    };
    let mut directory_end = end;
    if let Some(at) = end.checked_sub(LOCATOR64_LEN) {
        let locator = take(src, at, LOCATOR64_LEN, "zip64 locator")?;
        if locator[..4] == LOCATOR64 {
            directory_end = u64_at(&locator, 8);
            let e = take(src, directory_end, END64_LEN, "zip64: the end record")?;
            let adjacent = directory_end.checked_add(END64_LEN) == Some(at);
            if e[..4] != END64 || u64_at(&e, 4) != END64_LEN - 12 || !adjacent {
                return odd("zip64: the end record is not before its locator");
            }
            let wide = Directory {
                offset: u64_at(&e, 48),
                len: u64_at(&e, 40),
                entries: u64_at(&e, 32),
            };
            let agrees = |narrow: u64, wide: u64, max: u64| narrow == wide || narrow == max;
            if u64_at(&e, 24) != wide.entries
                || !agrees(d.entries, wide.entries, 0xffff)
                || !agrees(d.len, wide.len, 0xffff_ffff)
                || !agrees(d.offset, wide.offset, 0xffff_ffff)
            {
                return odd("zip64: the two end records disagree");
            }
            d = wide;
        }
    }
    if d.offset.checked_add(d.len) != Some(directory_end) {
        return odd("zip: the directory does not end where the end record starts");
    }
    Ok(d)
}

/// Reads the members of a zip in file order, checking each local header against the directory.
pub(super) fn members(src: &dyn Source) -> Parse<Vec<Member>> {
    let Some(end) = find_end(src, true)? else {
        return odd("zip: no end record");
    };
    let directory = read_end(src, end)?;
    let mut entries = read_entries(src, &directory)?;
    entries.sort_by_key(|e| e.local);
    let mut at = 0;
    let mut members = Vec::with_capacity(entries.len());
    for e in entries {
        if e.local < at {
            return odd("zip: members overlap");
        }
        let member = read_local(src, e)?;
        // read_local checked that offset + len does not overflow.
        at = member.offset + member.len;
        if at > directory.offset {
            return odd("zip: a member runs into the directory");
        }
        members.push(member);
    }
    let mut names = HashSet::with_capacity(members.len());
    if !members.iter().all(|m| names.insert(m.name.as_slice())) {
        return odd("zip: two members share a name");
    }
    Ok(members)
}

/// Whether the members that the directory names end beyond the file.
pub(super) fn exceeds_file(src: &dyn Source, directory: &Directory) -> Parse<bool> {
    let beyond = |e: &Entry| {
        e.local
            .checked_add(LOCAL_LEN + e.packed)
            .is_none_or(|end| end > src.len())
    };
    Ok(read_entries(src, directory)?.iter().any(beyond))
}

fn read_entries(src: &dyn Source, directory: &Directory) -> Parse<Vec<Entry>> {
    if directory.len > MAX_DIRECTORY || directory.entries > directory.len / CENTRAL_LEN as u64 {
        return odd("zip: the directory is too long or its count too large");
    }
    let bytes = take(src, directory.offset, directory.len, "zip: the directory")?;
    let mut rest = bytes.as_slice();
    let mut entries = Vec::with_capacity(directory.entries as usize);
    for _ in 0..directory.entries {
        let Some((head, tail)) = rest.split_first_chunk::<CENTRAL_LEN>() else {
            return odd("zip: the directory is cut short");
        };
        let lens = [u16_at(head, 28), u16_at(head, 30), u16_at(head, 32)].map(usize::from);
        if head[..4] != CENTRAL || tail.len() < lens.iter().sum() {
            return odd("zip: a directory entry is malformed");
        }
        let (name, tail) = tail.split_at(lens[0]);
        let (extra, tail) = tail.split_at(lens[1]);
        let mut wide = [u32_at(head, 24), u32_at(head, 20), u32_at(head, 42)].map(u64::from);
        widen(&mut wide, extra)?;
        let [plain, packed, local] = wide;
        if u16_at(head, 34) != 0 {
            return odd("zip: spans several disks");
        }
        let (flags, method) = (u16_at(head, 8), u16_at(head, 10));
        entries.push(Entry {
            name: name.to_vec(),
            flags,
            method,
            packed,
            plain,
            local,
        });
        rest = &tail[lens[2]..];
    }
    if !rest.is_empty() {
        return odd("zip: the directory holds more than it counts");
    }
    Ok(entries)
}

/// Replaces the fields that are all ones by the values of the zip64 extra field, in its order.
fn widen(fields: &mut [u64], mut extra: &[u8]) -> Parse<()> {
    let mut wide: Option<&[u8]> = None;
    while let [a, b, c, d, rest @ ..] = extra {
        let (id, len) = (
            u16::from_le_bytes([*a, *b]),
            usize::from(u16::from_le_bytes([*c, *d])),
        );
        let Some((body, rest)) = rest.split_at_checked(len) else {
            break;
        };
        if id == 1 && wide.replace(body).is_some() {
            return odd("zip64: two extra fields");
        }
        extra = rest;
    }
    let mut wide = wide.unwrap_or_default();
    for f in fields.iter_mut().filter(|f| **f == 0xffff_ffff) {
        let Some((head, rest)) = wide.split_first_chunk::<8>() else {
            return odd("zip64: a wide field is missing");
        };
        *f = u64::from_le_bytes(*head);
        wide = rest;
    }
    Ok(())
}

fn read_local(src: &dyn Source, e: Entry) -> Parse<Member> {
    let what = "zip: a local header";
    let fixed = take(src, e.local, LOCAL_LEN, what)?;
    let (name_len, extra_len) = (u64::from(u16_at(&fixed, 26)), u64::from(u16_at(&fixed, 28)));
    let mut tail = take(src, e.local + LOCAL_LEN, name_len + extra_len, what)?;
    let extra = tail.split_off(name_len as usize);
    if fixed[..4] != LOCAL || tail != e.name || u16_at(&fixed, 6) != e.flags || u16_at(&fixed, 8) != e.method
    {
        return odd("zip: a local header is not what the directory says");
    }
    let mut sizes = [u32_at(&fixed, 22), u32_at(&fixed, 18)].map(u64::from);
    if e.flags & SIZES_FOLLOW == 0 {
        widen(&mut sizes, &extra)?;
        if sizes != [e.plain, e.packed] {
            return odd("zip: a local header's sizes are not what the directory says");
        }
    }
    let offset = e.local + LOCAL_LEN + name_len + extra_len;
    if offset.checked_add(e.packed).is_none_or(|end| end > src.len()) {
        return odd("zip: a member ends beyond the file");
    }
    let stored = e.method == 0 && e.flags & ENCRYPTED == 0;
    if stored && e.plain != e.packed {
        return odd("zip: a stored member has two sizes");
    }
    Ok(Member {
        name: e.name,
        stored,
        offset,
        len: e.packed,
    })
}

fn u16_at(b: &[u8], i: usize) -> u16 {
    u16::from_le_bytes([b[i], b[i + 1]])
}

fn u32_at(b: &[u8], i: usize) -> u32 {
    u32::from(u16_at(b, i)) | u32::from(u16_at(b, i + 2)) << 16
}

fn u64_at(b: &[u8], i: usize) -> u64 {
    u64::from(u32_at(b, i)) | u64::from(u32_at(b, i + 4)) << 32
}

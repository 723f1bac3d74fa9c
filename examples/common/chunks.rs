//! Checkpoint files as chunks, for the measuring examples.

use zspace::tensor::{Dtype, Number};

/// Seconds of processor time that this thread has used: what others do on the machine counts less than in time that passes.
pub(crate) fn cpu_seconds() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// Whatever went wrong.
pub(crate) type Failure = Box<dyn std::error::Error>;

const CHUNK: usize = 1 << 20;
const SMALL: usize = 32 << 10;

/// Bytes of one kind of number.
pub(crate) struct Chunk {
    /// The kind.
    pub(crate) number: Number,
    /// The bytes.
    pub(crate) raw: Vec<u8>,
}

/// A file's tensors in chunks as a commit would cut them, roughly: a tensor of 32 KiB or more is one, cut at 1 MiB; smaller neighbours share
/// one. Of a torch file only each `of`-th member from the `nth` on.
pub(crate) fn read(
    path: &str,
    number: Option<Number>,
    (nth, of): (usize, usize),
) -> Result<Vec<Chunk>, Failure> {
    let file = std::fs::read(path)?;
    let tensors = if path.ends_with(".safetensors") {
        safetensors(&file).ok_or("not a safetensors file")?
    } else if file.starts_with(b"PK\x03\x04") {
        let members = torch_members(&file).ok_or("not a torch zip file")?.into_iter();
        members
            .skip(nth)
            .step_by(of)
            .map(|raw| (number.unwrap_or(Number::F32), raw))
            .collect()
    } else {
        vec![(number.unwrap_or(Number::Bytes), &file[..])]
    };
    let mut chunks: Vec<Chunk> = Vec::new();
    let mut open = false;
    for (number, raw) in tensors {
        let small = raw.len() < SMALL;
        match chunks.last_mut() {
            Some(last) if open && small && last.number == number && last.raw.len() + raw.len() <= CHUNK => {
                last.raw.extend_from_slice(raw);
            }
            _ => chunks.extend(raw.chunks(CHUNK).map(|raw| Chunk {
                number,
                raw: raw.to_vec(),
            })),
        }
        open = small;
    }
    Ok(chunks)
}

fn safetensors(file: &[u8]) -> Option<Vec<(Number, &[u8])>> {
    let (len, rest) = file.split_first_chunk::<8>()?;
    let (header, data) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
    let header: serde_json::Map<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
    let mut tensors = Vec::new();
    for (_, t) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let at = |i: usize| usize::try_from(t.get("data_offsets")?.get(i)?.as_u64()?).ok();
        let dtype = Dtype::from_safetensors(t.get("dtype")?.as_str()?)?;
        tensors.push((at(0)?, dtype.number(), data.get(at(0)?..at(1)?)?));
    }
    tensors.sort_by_key(|t| t.0);
    Some(
        tensors
            .into_iter()
            .map(|(_, number, raw)| (number, raw))
            .collect(),
    )
}

/// The stored members `*/data/N`, in the order of the central directory.
fn torch_members(file: &[u8]) -> Option<Vec<&[u8]>> {
    let u16_at = |at: usize| Some(usize::from(u16::from_le_bytes(*file.get(at..)?.first_chunk()?)));
    let u32_at = |at: usize| usize::try_from(u32::from_le_bytes(*file.get(at..)?.first_chunk()?)).ok();
    let end = file.windows(4).rposition(|w| w == b"PK\x05\x06")?;
    let (count, mut at) = (u16_at(end + 10)?, u32_at(end + 16)?);
    let mut members = Vec::new();
    for _ in 0..count {
        let (size, name_len, local) = (u32_at(at + 24)?, u16_at(at + 28)?, u32_at(at + 42)?);
        let name = std::str::from_utf8(file.get(at + 46..at + 46 + name_len)?).ok()?;
        let data = local + 30 + u16_at(local + 26)? + u16_at(local + 28)?;
        if u16_at(at + 10)? == 0 && name.contains("/data/") {
            members.push(file.get(data..data + size)?);
        }
        at += 46 + name_len + u16_at(at + 30)? + u16_at(at + 32)?;
    }
    Some(members)
}

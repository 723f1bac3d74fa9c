//! `zspace object`

use super::cat::parse_range;
use super::signals::Stop;
use super::{Context, show};
use crate::error::{Error, IoContext, Kind, Result};
use crate::store::{CommitRequest, ObjectFile, Options, Proof, Store, Width};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Exact byte objects: any bytes, pinned by an id, of which any range can be proved
///
/// An ID is that of an object (8 hex digits or more), or REV:FILE for a file of a version: that has an id too, but peers find only objects
/// that were put. Ranges are A..B: from A up to, not
/// including, B.
#[derive(clap::Args)]
pub(super) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(clap::Subcommand)]
enum Verb {
    /// Store files as objects; prints the id of each
    Put {
        /// What to store; - is standard input
        #[arg(required = true)]
        files: Vec<PathBuf>,
        /// One JSON object each
        #[arg(long)]
        json: bool,
    },
    /// List the objects that were put
    Ls {
        /// One JSON object each
        #[arg(long)]
        json: bool,
    },
    /// What pins an object: length, SHA-256 and roots
    Show {
        /// The object
        id: String,
        /// As one JSON object
        #[arg(long)]
        json: bool,
    },
    /// Write a whole object, its SHA-256 checked
    Get {
        /// The object
        id: String,
        /// Where to; must not exist [default: standard output]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Write a range of an object to standard output
    Range {
        /// The object; with --proof all 64 digits of its id
        id: String,
        /// Which bytes
        #[arg(value_name = "A..B", value_parser = parse_range)]
        range: (u64, u64),
        /// Take the bytes from this proof alone, no store is needed
        #[arg(long, value_name = "FILE")]
        proof: Option<PathBuf>,
    },
    /// Write what proves a range of an object to whoever knows its id
    Prove {
        /// The object
        id: String,
        /// Which bytes
        #[arg(value_name = "A..B", value_parser = parse_range)]
        range: (u64, u64),
        /// Where to; must not exist [default: standard output]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
}

/// What a range says of the object.
const PART: &str = "these bytes are verified, up to the roots that the id pins, not the whole object";
/// What a range that is all of it says.
const WHOLE: &str = "the whole object is verified, its SHA-256 too";

/// The largest proof that is read.
const MAX_PROOF: u64 = 256 << 20;
/// Bytes copied at a time.
const STEP: u64 = 1 << 20;

pub(super) fn run(context: &Context, args: &Args) -> Result<()> {
    match &args.verb {
        Verb::Put { files, json } => files.iter().try_for_each(|f| put(context, f, *json)),
        Verb::Ls { json } => list(&context.open()?, *json),
        Verb::Show { id, json } => show(&context.open()?.object(id)?, *json),
        Verb::Get { id, output } => get(&context.open()?.object(id)?, output.as_deref()),
        Verb::Range {
            id,
            range,
            proof: Some(proof),
        } => proved(id, *range, proof),
        Verb::Range {
            id,
            range,
            proof: None,
        } => stored(&context.open()?, id, *range),
        Verb::Prove { id, range, output } => prove(&context.open()?, id, *range, output.as_deref()),
    }
}

#[derive(serde::Serialize)]
struct Line {
    id: String,
    bytes: u64,
    sha256: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    stored: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    new: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    roots: Option<Vec<String>>,
}

fn put(context: &Context, path: &Path, json: bool) -> Result<()> {
    let stop = Stop::on_signals()?;
    let store = context.open_or_init(&Options::default())?;
    let bar = show::bar(&path.display().to_string(), 0);
    // A pipe is not read twice: what comes from it is kept beside the store first.
    let spool = if path.as_os_str() == "-" {
        Some(spool(&store)?)
    } else {
        None
    };
    let from = spool.as_ref().map_or(path, |s| &s.0);
    let request = CommitRequest {
        entries: vec![(b"object".to_vec(), from.to_owned())],
        progress: show::progress(&bar),
        stop: Some(Arc::new(move || stop.is_asked())),
        ..CommitRequest::default()
    };
    let done = store.put_object(&request);
    bar.finish_and_clear();
    let done = done?;
    if let Err(e) = store.close() {
        log::warn!("{e}");
    }
    if json {
        return show::print_json(&Line {
            id: done.id.to_string(),
            bytes: done.manifest.len,
            sha256: done.manifest.hash.to_string(),
            stored: Some(done.stored),
            new: Some(done.new),
            roots: None,
        });
    }
    show::print(&format!("{}\n", done.id))
}

/// A file that goes when it is not needed any more.
struct Spool(PathBuf);

impl Drop for Spool {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn spool(store: &Store) -> Result<Spool> {
    let path = store.dir().join(format!("input-{}", std::process::id()));
    let what = || path.display().to_string();
    let mut file = File::create_new(&path).doing(what)?;
    let spool = Spool(path.clone());
    std::io::copy(&mut std::io::stdin().lock(), &mut file).doing(|| "read standard input".into())?;
    Ok(spool)
}

fn list(store: &Store, json: bool) -> Result<()> {
    let objects = store.objects();
    let hidden = |o: &crate::store::Object| Line {
        id: o.id.to_string(),
        bytes: o.manifest.len,
        sha256: o.manifest.hash.to_string(),
        stored: None,
        new: None,
        roots: None,
    };
    if json {
        return objects.iter().try_for_each(|o| show::print_json(&hidden(o)));
    }
    let row = |o: &Arc<crate::store::Object>| {
        vec![o.id.to_string(), show::time(o.time), show::bytes(o.manifest.len)]
    };
    show::print(&show::table(&objects.iter().map(row).collect::<Vec<_>>(), &[2]))
}

fn show(object: &ObjectFile, json: bool) -> Result<()> {
    let (m, id) = (&object.manifest, object.id().to_string());
    if json {
        return show::print_json(&Line {
            id,
            bytes: m.len,
            sha256: m.hash.to_string(),
            stored: None,
            new: None,
            roots: Some(m.roots.iter().map(ToString::to_string).collect()),
        });
    }
    let shape = m.shape();
    let mut text = format!(
        "object  {id}\nbytes   {}\nsha256  {}\natoms   {}\n",
        m.len,
        m.hash,
        shape.atoms()
    );
    for (place, root) in shape.roots().zip(&m.roots) {
        let covers = place.bytes(shape);
        text += &format!(
            "root    {root}  scale {}, bytes {}..{}\n",
            place.scale, covers.start, covers.end
        );
    }
    show::print(&text)
}

fn get(object: &ObjectFile, output: Option<&Path>) -> Result<()> {
    let stop = Stop::on_signals()?;
    let Some(path) = output else {
        return copy(object, &mut std::io::stdout().lock(), &stop);
    };
    let mut file = File::create_new(path).doing(|| path.display().to_string())?;
    let done =
        copy(object, &mut file, &stop).and_then(|()| file.sync_all().doing(|| path.display().to_string()));
    if done.is_err() {
        let _ = std::fs::remove_file(path);
    }
    done
}

fn copy(object: &ObjectFile, to: &mut dyn Write, stop: &Stop) -> Result<()> {
    let bar = show::bar("get", object.manifest.len);
    let done = object.copy_to(to, &mut |bytes| {
        bar.inc(bytes);
        stop.check()
    });
    bar.finish_and_clear();
    done
}

fn stored(store: &Store, id: &str, (from, to): (u64, u64)) -> Result<()> {
    let object = store.object(id)?;
    let mut out = std::io::stdout().lock();
    // Before anything is written.
    if to > object.manifest.len {
        let why = format!(
            "{from}..{to} is not within an object of {} bytes",
            object.manifest.len
        );
        return Err(Error::new(Kind::Usage, why));
    }
    for at in (from..to).step_by(STEP as usize) {
        let part = at..to.min(at + STEP);
        // Each part is checked by its records, as a peer would do it.
        let proof = store.prove(&object, part.clone())?;
        let bytes = proof.records.range(&object.manifest, part)?;
        out.write_all(&bytes)
            .doing(|| "write to standard output".into())?;
    }
    out.flush().doing(|| "write to standard output".into())?;
    eprintln!(
        "zspace: {} checked: {PART}",
        object.manifest.shape().cost(from..to)
    );
    Ok(())
}

fn proved(id: &str, (from, to): (u64, u64), path: &Path) -> Result<()> {
    let id: crate::store::ObjectId = id.parse().map_err(|_| {
        let why = "without a store an object is named by all 64 hex digits of its id: a proof is only worth what pins it";
        Error::new(Kind::Usage, why)
    })?;
    let mut bytes = Vec::new();
    let file = File::open(path).doing(|| path.display().to_string())?;
    file.take(MAX_PROOF)
        .read_to_end(&mut bytes)
        .doing(|| path.display().to_string())?;
    let proof = Proof::decode(Width::FULL, &bytes).map_err(|e| e.context(path.display()))?;
    if proof.manifest.id() != id {
        let why = format!(
            "{} is about the object {}, not {id}",
            path.display(),
            proof.manifest.id()
        );
        return Err(Error::damage(why));
    }
    let bytes = proof.records.range(&proof.manifest, from..to)?;
    let whole = (from, to) == (0, proof.manifest.len);
    if whole {
        proof.records.rebuild(&proof.manifest)?;
    }
    let mut out = std::io::stdout().lock();
    out.write_all(&bytes)
        .and_then(|()| out.flush())
        .doing(|| "write to standard output".into())?;
    eprintln!(
        "zspace: {} checked: {}",
        proof.records.counts(),
        if whole { WHOLE } else { PART }
    );
    Ok(())
}

fn prove(store: &Store, id: &str, (from, to): (u64, u64), output: Option<&Path>) -> Result<()> {
    let object = store.object(id)?;
    let proof = store.prove(&object, from..to)?;
    let bytes = proof.encode();
    match output {
        Some(path) => File::create_new(path)
            .and_then(|mut file| file.write_all(&bytes))
            .doing(|| path.display().to_string())?,
        None => std::io::stdout()
            .lock()
            .write_all(&bytes)
            .doing(|| "write to standard output".into())?,
    }
    eprintln!(
        "zspace: {} prove {from}..{to} of object {}",
        proof.records.counts(),
        object.id()
    );
    Ok(())
}

//! What goes in comes out, byte for byte, and costs little.

use super::*;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

/// Every path below `dir` with all that must come back.
fn snapshot(dir: &Path) -> Vec<(PathBuf, u32, i64, i64, u64, Vec<u8>)> {
    let mut out = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(path) = todo.pop() {
        let m = fs::symlink_metadata(&path).unwrap();
        let content = match () {
            () if m.is_symlink() => fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec(),
            () if m.is_file() => fs::read(&path).unwrap(),
            () => {
                todo.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
                Vec::new()
            }
        };
        let links = if m.is_file() { m.nlink() } else { 0 };
        let below = path.strip_prefix(dir).unwrap().to_owned();
        let mode = if m.is_symlink() { 0 } else { m.mode() };
        out.push((below, mode, m.mtime(), m.mtime_nsec(), links, content));
    }
    out.sort();
    out
}

#[test]
fn a_tree_comes_back_as_it_was() {
    let f = Fixture::new();
    let odd = [
        "-dash",
        " space ",
        "new\nline",
        "\u{1f600}",
        "漢字",
        "a".repeat(255).as_str(),
    ]
    .map(str::to_owned);
    for (i, name) in odd.iter().enumerate() {
        f.write(&format!("run/{name}"), &vec![i as u8; i * 1000]);
    }
    fs::write(
        f.path("run").join(std::ffi::OsStr::from_bytes(b"bad\xffutf8")),
        b"x",
    )
    .unwrap();
    f.write(
        "run/sub/deep/model.safetensors",
        &Model::new(&[70_000, 10, 300]).safetensors(1),
    );
    f.write("run/sub/large.bin", &Noise(7).bytes(3_000_000));
    fs::create_dir(f.path("run/empty")).unwrap();
    fs::hard_link(f.path("run/sub/large.bin"), f.path("run/linked")).unwrap();
    symlink("sub/large.bin", f.path("run/soft")).unwrap();
    symlink("/nowhere", f.path("run/dangling")).unwrap();
    symlink("loop", f.path("run/loop")).unwrap();
    for (name, mode) in [
        ("run/sub/large.bin", 0o400),
        ("run/sub", 0o2750),
        ("run/sub/deep/model.safetensors", 0o755),
    ] {
        fs::set_permissions(f.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let old = std::time::UNIX_EPOCH + std::time::Duration::new(1_000_000_000, 123_456_789);
    fs::File::open(f.path("run/sub"))
        .unwrap()
        .set_modified(old)
        .unwrap();

    let done = f.commit(&f.path("run"));
    assert_eq!((done.number, done.links_outside), (1, 1));
    f.store
        .export(&f.store.resolve("main").unwrap(), &f.path("out"), &mut |_| Ok(()))
        .unwrap();
    assert_eq!(snapshot(&f.path("out/run")), snapshot(&f.path("run")));

    // The same tree again has the same tree id, and costs next to nothing.
    let again = f.commit(&f.path("out/run"));
    let tree = |n| f.store.numbered("main", n).unwrap().version.tree;
    assert_eq!(tree(1), tree(2));
    assert_ne!(again.id, done.id);
    assert_eq!(again.stored, 0);
}

#[test]
fn attributes_come_back_where_the_disk_has_them() {
    let f = Fixture::new();
    let path = f.write("a.bin", b"x");
    if rustix::fs::setxattr(&path, "user.note", b"hello", rustix::fs::XattrFlags::empty()).is_err() {
        return;
    }
    f.commit(&path);
    f.store
        .export(&f.store.resolve("main").unwrap(), &f.path("out"), &mut |_| Ok(()))
        .unwrap();
    let mut value = [0; 16];
    let n = rustix::fs::getxattr(f.path("out/a.bin"), "user.note", &mut value[..]).unwrap();
    assert_eq!(&value[..n], b"hello");
}

#[test]
fn an_export_can_be_stopped_between_files_too() {
    let f = Fixture::new();
    for i in 0..20 {
        f.write(&format!("dir/empty-{i:02}"), b"");
    }
    f.commit(&f.path("dir"));
    let mut entries = 0;
    let stopped = f
        .store
        .export(&f.store.resolve("main").unwrap(), &f.path("out"), &mut |_| {
            entries += 1;
            match entries {
                0..10 => Ok(()),
                _ => Err(Error::new(Kind::Stopped, "stopped")),
            }
        });
    assert_eq!(stopped.unwrap_err().kind(), Kind::Stopped);
    assert!(fs::read_dir(f.path("out/dir")).unwrap().count() < 10);
}

#[test]
fn a_long_series_stays_exact_shallow_and_small() {
    let f = Fixture::new();
    let mut model = Model::new(&[100_000, 128, 128, 40_000]);
    let mut files = Vec::new();
    for step in 0..40 {
        let bytes = model.safetensors(step);
        f.commit(&f.write(&format!("step-{step:06}.safetensors"), &bytes));
        files.push(bytes);
        model.step();
    }
    for (i, bytes) in files.iter().enumerate() {
        assert!(
            f.read(&format!("main/{}", i + 1), &format!("step-{i:06}.safetensors")) == *bytes,
            "{i}"
        );
    }
    let s = f.store.stats().unwrap();
    assert!(s.depths.keys().all(|d| *d <= 11), "{:?}", s.depths);
    assert!(s.depths.len() > 3, "deltas are used: {:?}", s.depths);
    assert!(s.ratio < 0.12, "{}", s.ratio);
    let report = f.store.verify(&f.store.versions("main").unwrap(), &mut |_| {});
    assert_eq!((report.versions, report.files, report.damage.len()), (40, 40, 0));
    // A fresh process finds it all, from the index and without it.
    f.store.close().unwrap();
    let again = Store::open(f.store.dir(), &options()).unwrap();
    assert!(read(&again, "main/17", "step-000016.safetensors").unwrap() == files[16]);
    fs::remove_dir_all(f.store.dir().join("index")).unwrap();
    let again = Store::open(f.store.dir(), &options()).unwrap();
    assert!(read(&again, "main/40", "step-000039.safetensors").unwrap() == files[39]);
}

#[test]
fn a_dense_series_keeps_its_chains_within_bounds() {
    let f = Fixture::new();
    let mut noise = Noise(7);
    let mut weights: Vec<f32> = (0..60_000)
        .map(|_| (noise.next() % 2001) as f32 / 1e4 - 0.1)
        .collect();
    let file = |weights: &[f32]| {
        let data = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        super::bases::Tensors(vec![("w".into(), "F32", data)]).file()
    };
    let mut files = Vec::new();
    for step in 0..24 {
        files.push(file(&weights));
        f.commit(&f.write(&format!("step-{step}.safetensors"), &files[step]));
        for w in &mut weights {
            *w += (noise.next() % 2001) as f32 / 1e7 - 1e-4;
        }
    }
    let (mut alone, mut deltas) = (0, Vec::new());
    for (meta, len) in chunks(&f.store).values().filter(|(m, _)| m.raw_len > 10_000) {
        assert!(meta.cost(*len) <= 3 * u64::from(meta.raw_len));
        match meta.delta {
            Some(_) => deltas.push(*len),
            None => alone = alone.max(*len),
        }
    }
    deltas.sort_unstable();
    // Most follow each other one by one; those that cannot stand alone, or go on from the root.
    assert!(deltas.len() >= 18, "{}", deltas.len());
    assert!(deltas[12] < alone * 3 / 4, "{} of {alone}", deltas[12]);
    chains_hold(&f.store);
    for (i, bytes) in files.iter().enumerate() {
        assert!(f.read(&format!("main/{}", i + 1), &format!("step-{i}.safetensors")) == *bytes);
    }
}

#[test]
fn a_range_reads_only_the_chunks_it_touches() {
    let f = Fixture::new();
    let bytes = Model::new(&[4_000_000]).safetensors(1);
    f.commit(&f.write("m.safetensors", &bytes));
    let store = Store::open(f.store.dir(), &options()).unwrap();
    let version = store.resolve("main").unwrap();
    let EntryKind::File { hash, len, .. } = store.entry(&version, b"m.safetensors").unwrap().kind else {
        panic!()
    };
    let file = store.file(&hash, len).unwrap();
    assert_eq!(
        &file.read(5_000_000, 23).unwrap()[..],
        &bytes[5_000_000..5_000_023]
    );
    assert_eq!(store.counters().asked, 1);
    assert!(file.read(len, 10).unwrap().is_empty());
    assert_eq!(file.read(len - 3, 10).unwrap().len(), 3);
}

#[test]
fn tensors_are_found_in_files_of_other_names() {
    let f = Fixture::new();
    let mut model = Model::new(&[200_000, 64]);
    f.commit(&f.write("first.safetensors", &model.safetensors(0)));
    model.step();
    let done = f.commit(&f.write("second.safetensors", &model.safetensors(1)));
    assert!(done.stored * 5 < done.bytes, "{done:?}");
}

#[test]
fn model_and_optimizer_in_turn_still_find_their_bases() {
    let f = Fixture::new();
    let (mut a, mut b) = (Model::new(&[100_000]), Model::new(&[90_000]));
    for step in 0..3 {
        let x = f.commit(&f.write("model.safetensors", &a.safetensors(step)));
        let y = f.commit(&f.write("optim.safetensors", &b.safetensors(step)));
        if step > 0 {
            assert!(x.stored * 5 < x.bytes && y.stored * 5 < y.bytes, "{x:?} {y:?}");
        }
        a.step();
        b.step();
    }
}

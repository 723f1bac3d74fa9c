//! Tests of packs, journal and index as a whole.

use super::*;
use crate::disk::RealDisk;
use crate::id::Domain;

/// Remembers what it was given.
#[derive(Default)]
pub(super) struct Memory(Mutex<Vec<Vec<u8>>>);

impl Ledger for Memory {
    fn apply(&self, seq: u64, _: &[PackRange], body: &[u8]) -> Result<()> {
        let mut bodies = self.0.lock();
        assert_eq!(seq, bodies.len() as u64 + 1, "in order, and once");
        bodies.push(body.to_vec());
        Ok(())
    }
}

impl Memory {
    pub(super) fn bodies(&self) -> Vec<Vec<u8>> {
        self.0.lock().clone()
    }
}

pub(super) fn id_of(payload: &[u8]) -> NodeId {
    NodeId(Domain::Chunk.hash(payload))
}

/// Publishes payloads with a body.
pub(super) fn commit(packs: &Arc<Packs>, payloads: &[&[u8]], body: &[u8]) -> Result<u64> {
    let mut w = packs.writer()?;
    for p in payloads {
        w.append(1, &id_of(p), &p[..p.len().min(9)], p)?;
    }
    let range = w.finish()?;
    let body = body.to_vec();
    packs.publish(vec![range], Box::new(move |_| Ok(body)))
}

#[test]
fn what_is_published_is_read_back_here_and_after_opening_again() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("store");
    let disk: Arc<dyn Disk> = Arc::new(RealDisk);
    Packs::create(disk.clone(), &root).unwrap();
    assert_eq!(
        Packs::create(disk.clone(), &root).unwrap_err().kind(),
        Kind::Exists
    );
    let big = vec![7u8; 3 << 20];
    let (first, second): (&[u8], &[u8]) = (b"first", &big);
    let ledger = Arc::new(Memory::default());
    let packs = Packs::open(disk.clone(), &root, ledger.clone()).unwrap();
    assert_eq!(commit(&packs, &[first, second], b"one").unwrap(), 1);
    assert_eq!(
        packs.publish(vec![], Box::new(|_| Ok(b"two".to_vec()))).unwrap(),
        2
    );
    assert_eq!(ledger.bodies(), [b"one", b"two"]);
    let check = |packs: &Packs| {
        for p in [first, second] {
            assert_eq!(packs.get(&id_of(p)).unwrap().payload, p);
            let meta = packs.meta(&id_of(p)).unwrap();
            assert_eq!(
                (meta.payload_len as usize, &meta.meta[..]),
                (p.len(), &p[..p.len().min(9)])
            );
        }
        assert_eq!(packs.get(&id_of(b"absent")).unwrap_err().kind(), Kind::NotFound);
    };
    check(&packs);
    for _ in 0..2 {
        let ledger = Arc::new(Memory::default());
        let packs = Packs::open(disk.clone(), &root, ledger.clone()).unwrap();
        assert_eq!(ledger.bodies(), [b"one", b"two"]);
        check(&packs);
        assert_eq!(packs.sizes().unwrap().nodes, 2);
        packs.close().unwrap();
    }
}

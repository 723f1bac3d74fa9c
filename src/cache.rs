//! A least-recently-used cache weighed in bytes. It knows nothing of chunks.

use lru::LruCache;
use std::hash::Hash;
use std::sync::Arc;

/// Shared values, dropped oldest use first once their weights exceed the capacity.
pub struct ByteLru<K: Hash + Eq, V> {
    entries: LruCache<K, (Arc<V>, u64)>,
    capacity: u64,
    used: u64,
}

impl<K: Hash + Eq, V> ByteLru<K, V> {
    /// A cache that holds at most `capacity` bytes.
    pub fn new(capacity: u64) -> Self {
        ByteLru {
            entries: LruCache::unbounded(),
            capacity,
            used: 0,
        }
    }

    /// The value of `key`, which becomes the most recently used.
    pub fn get(&mut self, key: &K) -> Option<Arc<V>> {
        self.entries.get(key).map(|(v, _)| v.clone())
    }

    /// Whether `key` is held; does not count as a use.
    pub fn contains(&self, key: &K) -> bool {
        self.entries.contains(key)
    }

    /// Holds `value` of `weight` bytes. What weighs more than the whole capacity is not held.
    pub fn put(&mut self, key: K, value: Arc<V>, weight: u64) {
        if weight > self.capacity {
            return;
        }
        if let Some((_, old)) = self.entries.push(key, (value, weight)).map(|(_, v)| v) {
            self.used -= old;
        }
        self.used += weight;
        while self.used > self.capacity {
            match self.entries.pop_lru() {
                Some((_, (_, w))) => self.used -= w,
                None => break,
            }
        }
    }

    /// The most bytes that it holds.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Bytes held.
    pub fn used(&self) -> u64 {
        self.used
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn never_holds_more_than_its_capacity(ops in proptest::collection::vec((0u8..20, 0u64..50), 0..200)) {
            let mut c = ByteLru::new(100);
            for (k, w) in ops {
                c.put(k, Arc::new(w), w);
                let sum: u64 = c.entries.iter().map(|(_, (_, w))| *w).sum();
                prop_assert_eq!(sum, c.used());
                prop_assert!(sum <= 100);
                prop_assert!(c.contains(&k));
            }
        }
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut c = ByteLru::new(10);
        c.put("a", Arc::new(1), 4);
        c.put("b", Arc::new(2), 4);
        c.get(&"a");
        c.put("c", Arc::new(3), 4);
        assert!(c.contains(&"a") && !c.contains(&"b") && c.contains(&"c"));
        c.put("big", Arc::new(4), 11);
        assert!(!c.contains(&"big") && c.used() == 8);
    }
}

//! Which loose files become one version: the rules alone, without a clock or a disk.

use super::names;
use std::time::Duration;

/// Groups files whose quiet windows overlap: each window runs from the file's last change for `settle`. Returns indices into
/// `changed`, each group in order of change, groups in order of time.
pub(super) fn windows(changed: &[Duration], settle: Duration) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..changed.len()).collect();
    order.sort_by_key(|i| changed[*i]);
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for i in order {
        match groups.last_mut() {
            Some(g) if g.last().is_some_and(|p| changed[i] <= changed[*p] + settle) => g.push(i),
            _ => groups.push(vec![i]),
        }
    }
    groups
}

/// A settled loose file, looked into.
#[derive(Clone, Debug, Default)]
pub(super) struct Member {
    /// Its name in the branch.
    pub name: Vec<u8>,
    /// Its place in the order of closing.
    pub closed: u64,
    /// Whether it holds tensors.
    pub tensors: bool,
    /// The files it names as shards, if it is an index.
    pub shards: Option<Vec<Vec<u8>>>,
    /// Why it must not be committed unasked.
    pub torn: Option<String>,
}

impl Member {
    // What is torn cannot say what it holds: its name must.
    fn counts_as_tensors(&self) -> bool {
        self.tensors || self.torn.is_some() && names::looks_like_tensors(&self.name)
    }
}

/// What becomes of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Division {
    /// Each is one version, in the order in which they are to be committed.
    pub versions: Vec<Vec<usize>>,
    /// What waits, and why.
    pub waits: Vec<(usize, String)>,
}

/// Divides a group into versions: all in one if an index names some as shards or at most one holds tensors; else each file
/// that holds tensors is a version of its own, in order of closing, and the rest goes with the last.
pub(super) fn divide(group: &[Member]) -> Division {
    let mut order: Vec<usize> = (0..group.len()).collect();
    order.sort_by(|a, b| (group[*a].closed, &group[*a].name).cmp(&(group[*b].closed, &group[*b].name)));
    let named = |s: &Vec<u8>| group.iter().any(|m| m.name == *s);
    let linked = group
        .iter()
        .any(|m| m.shards.as_ref().is_some_and(|s| s.iter().any(named)));
    let holding = order.iter().filter(|i| group[**i].counts_as_tensors()).count();

    let mut out = Division::default();
    let torn = |i: &usize| group[*i].torn.clone();
    let with = |i: usize| {
        format!(
            "goes together with {}, which waits",
            String::from_utf8_lossy(&group[i].name)
        )
    };
    if linked || holding <= 1 {
        match order.iter().find(|i| group[**i].torn.is_some()) {
            None => out.versions.push(order),
            Some(bad) => out
                .waits
                .extend(order.iter().map(|i| (*i, torn(i).unwrap_or_else(|| with(*bad))))),
        }
        return out;
    }
    let (mut rest, mut last_torn) = (Vec::new(), None);
    for i in order {
        match torn(&i) {
            Some(why) => {
                out.waits.push((i, why));
                last_torn = Some(i);
            }
            None if group[i].counts_as_tensors() => out.versions.push(vec![i]),
            None => rest.push(i),
        }
    }
    match (out.versions.last_mut(), last_torn) {
        (Some(last), _) => last.extend(rest),
        (None, Some(bad)) => out.waits.extend(rest.into_iter().map(|i| (i, with(bad)))),
        (None, None) => out.versions.extend((!rest.is_empty()).then_some(rest)),
    }
    out
}

/// Whether a settled file had better wait for what is being written beside it: a shard for the rest of its set, and what holds
/// no tensors for the file with tensors that it probably belongs to. `writing` are names of unfinished work too.
pub(super) fn held_by<'a>(name: &[u8], tensors: bool, writing: &'a [Vec<u8>]) -> Option<&'a [u8]> {
    let set = names::shard_set(name);
    let holds = |w: &&Vec<u8>| {
        let w = names::intended(w);
        if tensors {
            set.is_some() && names::shard_set(w) == set
        } else {
            names::looks_like_tensors(w)
        }
    };
    writing.iter().find(holds).map(Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn secs(s: &[u64]) -> Vec<Duration> {
        s.iter().map(|s| Duration::from_secs(*s)).collect()
    }

    fn member(name: &str, closed: u64) -> Member {
        Member {
            name: name.into(),
            closed,
            tensors: names::looks_like_tensors(name.as_bytes()),
            ..Member::default()
        }
    }

    fn versions(group: &[Member]) -> Vec<Vec<String>> {
        let name = |i: &usize| String::from_utf8(group[*i].name.clone()).unwrap();
        divide(group)
            .versions
            .iter()
            .map(|v| v.iter().map(name).collect())
            .collect()
    }

    #[test]
    fn windows_that_overlap_chain() {
        let two = Duration::from_secs(2);
        assert_eq!(windows(&secs(&[10, 1, 3, 5]), two), [vec![1, 2, 3], vec![0]]);
        assert_eq!(windows(&secs(&[0, 3]), two), [[0], [1]]);
        assert!(windows(&[], two).is_empty());
    }

    #[test]
    fn at_most_one_with_tensors_is_one_version() {
        let g = [
            member("model.safetensors", 2),
            member("config.json", 1),
            member("README.md", 3),
        ];
        assert_eq!(versions(&g), [["config.json", "model.safetensors", "README.md"]]);
        assert_eq!(versions(&g[1..]), [["config.json", "README.md"]]);
    }

    #[test]
    fn several_with_tensors_are_versions_in_order_of_closing_and_the_rest_goes_with_the_last() {
        let g = [member("b.pt", 1), member("a.pt", 3), member("notes.txt", 2)];
        assert_eq!(versions(&g), [vec!["b.pt"], vec!["a.pt", "notes.txt"]]);
    }

    #[test]
    fn an_index_holds_its_shards_together() {
        let mut g = vec![
            member("model-00001-of-00002.safetensors", 1),
            member("model-00002-of-00002.safetensors", 2),
        ];
        g.push(member("model.safetensors.index.json", 3));
        assert_eq!(versions(&g).len(), 2);
        g[2].shards = Some(vec![g[0].name.clone(), g[1].name.clone()]);
        assert_eq!(versions(&g).len(), 1);
        g[1].torn = Some("short".into());
        let d = divide(&g);
        assert!(d.versions.is_empty());
        assert_eq!(d.waits.len(), 3);
        assert!(d.waits.contains(&(1, "short".into())));
    }

    #[test]
    fn a_torn_file_holds_back_only_what_would_go_with_it() {
        let mut g = vec![member("a.pt", 1), member("b.pt", 2), member("c.json", 3)];
        g[1].torn = Some("killed".into());
        g[1].tensors = false;
        assert_eq!(versions(&g), [["a.pt", "c.json"]]);
        g[0].torn = Some("killed".into());
        assert!(versions(&g).is_empty());
        assert_eq!(divide(&g).waits.len(), 3);
    }

    #[test]
    fn settled_files_wait_for_the_set_they_belong_to() {
        let w = |names: &[&str]| names.iter().map(|n| n.as_bytes().to_vec()).collect::<Vec<_>>();
        let second = w(&[".model-00002-of-00002.safetensors.Ab12Cd"]);
        assert!(held_by(b"model-00001-of-00002.safetensors", true, &second).is_some());
        assert!(held_by(b"config.json", false, &second).is_some());
        assert!(held_by(b"other.safetensors", true, &second).is_none());
        assert!(held_by(b"config.json", false, &w(&["train.log"])).is_none());
        assert!(held_by(b"config.json", false, &w(&["model.pt.part"])).is_some());
    }

    proptest! {
        #[test]
        fn every_file_is_in_one_version_or_waits(
            group in proptest::collection::vec(("[a-c]\\.(pt|txt)", 0u64..4, any::<bool>(), any::<bool>()), 0..7),
        ) {
            let group: Vec<Member> = group.into_iter().map(|(name, closed, tensors, torn)| Member {
                name: name.into_bytes(), closed, tensors, shards: None, torn: torn.then(|| "t".to_owned()),
            }).collect();
            let d = divide(&group);
            let mut all: Vec<usize> = d.versions.concat().into_iter().chain(d.waits.iter().map(|w| w.0)).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..group.len()).collect::<Vec<_>>());
            prop_assert!(d.versions.concat().iter().all(|i| group[*i].torn.is_none()));
        }
    }
}

//! Finds the tensors of a pickle and names each by the way that leads to it (docs/FORMAT.md, "Names").

use super::names::{Taken, encode};
use super::pickle::{Id, Pickle, Value};
use std::collections::HashMap;

/// The most tensors, ways and bytes of names a pickle may have: shared containers can make their number exponential.
const MAX_TENSORS: usize = 1 << 18;
const MAX_STEPS: usize = 8 << 20;
const MAX_NAMES: usize = 64 << 20;
/// The deepest nesting of containers on the way to a tensor.
const MAX_DEPTH: usize = 256;
/// The name of a tensor that is the whole pickle.
const ROOT: &str = "tensor";

/// A call that stands for a tensor: the function that would rebuild it, that function's arguments, and the state that
/// holds the tensor's attributes.
#[derive(Clone, Copy)]
pub(super) struct Rebuild {
    pub(super) version: Version,
    pub(super) args: Id,
    state: Option<Id>,
}

/// Which of torch's functions it is; they differ in their arguments.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V1,
    V2,
    V3,
}

/// Recognises a tensor, looking through parameters, buffers and subclasses.
pub(super) fn rebuild(p: &Pickle, id: Id) -> Option<Rebuild> {
    let Value::Call(call) = p.get(id) else { return None };
    let (mut callable, mut args, mut state) = (call.callable, call.args, call.state);
    // A parameter of a parameter of … is no file's content; a few levels are.
    for _ in 0..8 {
        let (module, name) = p.global(callable)?;
        let arg = |i: usize| p.tuple(args).and_then(|a| a.get(i)).copied();
        let version = match (module, name) {
            (b"torch._utils", b"_rebuild_tensor") => Version::V1,
            (b"torch._utils", b"_rebuild_tensor_v2") => Version::V2,
            (b"torch._utils", b"_rebuild_tensor_v3") => Version::V3,
            (b"torch._tensor", b"_rebuild_from_type" | b"_rebuild_from_type_v2") => {
                state = arg(3).or(state);
                (callable, args) = (arg(0)?, arg(2)?);
                continue;
            }
            (b"torch._utils", b"_rebuild_parameter" | b"_rebuild_parameter_with_state")
            | (b"torch.nn.parameter", b"Parameter" | b"Buffer") => {
                state = arg(3).or(state);
                let Value::Call(inner) = p.get(arg(0)?) else {
                    return None;
                };
                (callable, args) = (inner.callable, inner.args);
                state = state.or(inner.state);
                continue;
            }
            _ => return None,
        };
        return Some(Rebuild { version, args, state });
    }
    None
}

/// How a value is reached from the one that holds it.
enum Way {
    Key(Id),
    Index,
    Unnamed,
}

/// How a member is reached, its position there and its id.
type Member = (Way, usize, Id);

/// What a value holds.
fn members(p: &Pickle, id: Id, found: Option<&Rebuild>) -> Vec<Member> {
    let mut out = Vec::new();
    let state = match (p.get(id), found) {
        (_, Some(rebuild)) => rebuild.state,
        (Value::Tuple(items) | Value::List(items), _) => {
            out.extend(items.iter().enumerate().map(|(i, v)| (Way::Index, i, *v)));
            None
        }
        (Value::Dict(pairs), _) => {
            out.extend(pairs.iter().enumerate().map(|(i, (k, v))| (Way::Key(*k), i, *v)));
            None
        }
        (Value::Call(c), _) => {
            out.extend(
                c.pairs
                    .iter()
                    .enumerate()
                    .map(|(i, (k, v))| (Way::Key(*k), i, *v)),
            );
            out.extend(c.items.iter().enumerate().map(|(i, v)| (Way::Index, i, *v)));
            let args = p.tuple(c.args).unwrap_or_default();
            out.extend(args.iter().enumerate().map(|(i, v)| (Way::Unnamed, i, *v)));
            c.state
        }
        _ => None,
    };
    let Some(state) = state else { return out };
    // A state is the object's attributes, or a pair of those and its slots; else it is a part of its own.
    let dicts = match p.get(state) {
        Value::Tuple(pair) if pair.len() == 2 => pair.as_slice(),
        _ => std::slice::from_ref(&state),
    };
    if dicts
        .iter()
        .all(|d| matches!(p.get(*d), Value::Dict(_) | Value::None))
    {
        for d in dicts {
            if let Value::Dict(pairs) = p.get(*d) {
                out.extend(pairs.iter().enumerate().map(|(i, (k, v))| (Way::Key(*k), i, *v)));
            }
        }
    } else {
        out.push((
            Way::Unnamed,
            p.tuple(call_args(p, id)).map_or(0, <[Id]>::len),
            state,
        ));
    }
    out
}

fn call_args(p: &Pickle, id: Id) -> Id {
    match p.get(id) {
        Value::Call(c) => c.args,
        _ => id,
    }
}

fn component(p: &Pickle, way: &Way, position: usize) -> String {
    match way {
        Way::Index => position.to_string(),
        Way::Unnamed => format!("%@{position}"),
        Way::Key(k) => match p.get(*k) {
            Value::Text(s) => encode(p.text(*s)),
            Value::Int(n) => n.to_string(),
            Value::Bool(true) => "True".to_owned(),
            Value::Bool(false) => "False".to_owned(),
            Value::None => "None".to_owned(),
            _ => format!("%@{position}"),
        },
    }
}

/// Every tensor that can be reached from the root, by every way, with its name, in the pickle's order.
pub(super) fn tensors(p: &Pickle) -> Result<Vec<(String, Rebuild)>, String> {
    let found: HashMap<Id, Rebuild> = (0..p.values.len() as Id)
        .filter_map(|id| rebuild(p, id).map(|r| (id, r)))
        .collect();
    let holds = holders(p, &found);
    let mut out = Vec::new();
    let mut taken = Taken::default();
    let mut on_way = vec![false; p.values.len()];
    let (mut steps, mut name_bytes) = (0usize, 0usize);
    let mut prefix = String::new();
    let mut visit = |id: Id, prefix: &str| -> Result<(), String> {
        if let Some(rebuild) = found.get(&id) {
            let name = taken.claim(if prefix.is_empty() { ROOT } else { prefix }.to_owned());
            name_bytes += name.len();
            out.push((name, *rebuild));
            if out.len() > MAX_TENSORS || name_bytes > MAX_NAMES {
                return Err("torch: too many tensors, or their names are too long".to_owned());
            }
        }
        Ok(())
    };
    // Open containers: id, members in reverse, and the length of the prefix that names it.
    let mut open: Vec<(Id, Vec<Member>, usize)> = Vec::new();
    // A step is a member looked at or 64 bytes of a name put together: what bounds the time this takes.
    let mut spend = |n: usize| {
        steps += n;
        if steps > MAX_STEPS {
            Err("torch: too many ways lead to its tensors".to_owned())
        } else {
            Ok(())
        }
    };
    let enter = |id: Id| {
        let mut list = members(p, id, found.get(&id));
        let looked_at = list.len();
        list.retain(|(_, _, v)| holds[*v as usize]);
        list.reverse();
        (list, looked_at)
    };
    visit(p.root, &prefix)?;
    open.push((p.root, enter(p.root).0, 0));
    on_way[p.root as usize] = true;
    while let Some((id, list, len)) = open.last_mut() {
        let (id, len) = (*id, *len);
        prefix.truncate(len);
        let Some((way, position, member)) = list.pop() else {
            on_way[id as usize] = false;
            open.pop();
            continue;
        };
        if on_way[member as usize] {
            continue;
        }
        if len > 0 {
            prefix.push('/');
        }
        prefix.push_str(&component(p, &way, position));
        visit(member, &prefix)?;
        if open.len() == MAX_DEPTH {
            return Err("torch: tensors are nested too deep".to_owned());
        }
        let (list, looked_at) = enter(member);
        spend(1 + looked_at + (prefix.len() - len) / 64)?;
        on_way[member as usize] = true;
        open.push((member, list, prefix.len()));
    }
    Ok(out)
}

/// For each value, whether a tensor can be reached from it: found backwards from the tensors, so that cycles do no harm.
fn holders(p: &Pickle, found: &HashMap<Id, Rebuild>) -> Vec<bool> {
    let n = p.values.len();
    // Edges from member to holder, as one list per member in a shared array.
    let mut starts = vec![0usize; n + 1];
    for id in 0..n as Id {
        for (_, _, m) in members(p, id, found.get(&id)) {
            starts[m as usize + 1] += 1;
        }
    }
    for i in 0..n {
        starts[i + 1] += starts[i];
    }
    let mut fill = starts.clone();
    let mut edges = vec![0 as Id; starts[n]];
    for id in 0..n as Id {
        for (_, _, m) in members(p, id, found.get(&id)) {
            edges[fill[m as usize]] = id;
            fill[m as usize] += 1;
        }
    }
    let mut holds = vec![false; n];
    let mut queue: Vec<Id> = found.keys().copied().collect();
    for id in &queue {
        holds[*id as usize] = true;
    }
    while let Some(id) = queue.pop() {
        for holder in &edges[starts[id as usize]..starts[id as usize + 1]] {
            if !std::mem::replace(&mut holds[*holder as usize], true) {
                queue.push(*holder);
            }
        }
    }
    holds
}

//! Pushes branches and objects: the other side is told what there is, and then asks as if it pulled.

use super::answer::{Recent, answer, say};
use super::ask::{Asker, hello};
use super::link::Link;
use super::message::{Answer, Request};
use super::pull::{OnFetched, Plan, Pulled, again_if_moved};
use super::signers::Signers;
use crate::error::{Error, Kind, Result};
use crate::id::{ObjectId, VersionId};
use crate::store::Store;

/// What to push.
#[derive(Clone, Debug, Default)]
pub struct PushRequest {
    /// Branches here, and what they are called there.
    pub branches: Vec<(String, String)>,
    /// All branches, under their names.
    pub all_branches: bool,
    /// Objects.
    pub objects: Vec<ObjectId>,
}

/// What a push did.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Pushed {
    /// Branches there and their newest versions now.
    pub branches: Vec<(String, String)>,
    /// Objects.
    pub objects: Vec<String>,
    /// Branches and objects that the other side refused, and why; it took the others.
    pub refused: Vec<(String, String)>,
    /// Nodes that the other side asked for.
    pub nodes: u64,
    /// Bytes received.
    pub received: u64,
    /// Bytes sent.
    pub sent: u64,
}

impl Pushed {
    /// Counts one of so many; whether it was taken.
    fn one(&mut self, name: &str, all: usize, given: Result<u64>) -> Result<bool> {
        match given {
            Ok(nodes) => self.nodes += nodes,
            Err(e) if e.kind() == Kind::Refused && self.refused.len() + 1 < all => {
                self.refused.push((name.to_owned(), e.to_string()));
                return Ok(false);
            }
            Err(e) if self.branches.is_empty() && self.objects.is_empty() => return Err(e),
            Err(e) => {
                let done = self.branches.iter().map(|b| &b.0).chain(&self.objects);
                let done = done.map(String::as_str).collect::<Vec<_>>().join(", ");
                return Err(Error::new(e.kind(), format!("{e} (pushed before that: {done})")));
            }
        }
        Ok(true)
    }
}

/// Pushes over a link that nothing was said on yet. `told` hears of the bytes sent.
///
/// # Errors
/// What the other side says; `Refused` if it refuses all, say because a branch has gone another way there; what the link and the store
/// report.
pub fn push(
    store: &Store,
    link: &mut Link,
    request: &PushRequest,
    told: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<Pushed> {
    store.refresh()?;
    let mut branches = request.branches.clone();
    if request.all_branches {
        let all = store.branches().into_iter().map(|b| (b.clone(), b));
        branches.extend(all.filter(|b| store.latest(&b.0).is_some()));
        branches.sort_by_key(|b| (b.0 != crate::store::MAIN, b.0.clone()));
    }
    let head = |name: &String| {
        let why = || format!("there is no version on a branch {name:?}");
        store
            .latest(name)
            .map(|v| v.id)
            .ok_or_else(|| Error::new(Kind::NotFound, why()))
    };
    let heads: Vec<VersionId> = branches.iter().map(|b| head(&b.0)).collect::<Result<_>>()?;
    for id in &request.objects {
        if store.object_of(id).is_none() {
            return Err(Error::new(Kind::NotFound, format!("no object {id}")));
        }
    }
    hello(link, store.id())?;
    let mut pushed = Pushed::default();
    let all = branches.len() + request.objects.len();
    for ((ours, theirs), head) in branches.into_iter().zip(heads) {
        let signature = store.signature(&ours, &head).filter(|_| ours == theirs);
        let request = Request::Push {
            branch: theirs.clone(),
            head,
            signature: signature.unwrap_or_default(),
        };
        if pushed.one(&theirs, all, give(store, link, &request, told))? {
            pushed.branches.push((theirs, head.to_string()));
        }
    }
    for id in &request.objects {
        let name = format!("object {id}");
        if pushed.one(&name, all, give(store, link, &Request::PushObject(*id), told))? {
            pushed.objects.push(id.to_string());
        }
    }
    (pushed.received, pushed.sent) = (link.received(), link.sent());
    Ok(pushed)
}

/// Tells the other side to take something, and answers what it asks for that. How many nodes it asked for.
fn give(
    store: &Store,
    link: &mut Link,
    request: &Request,
    told: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<u64> {
    let (kind, body) = request.encode();
    link.put(kind, &[&body])?;
    let (mut nodes, mut recent) = (0, Recent::default());
    loop {
        let Some(frame) = link.next()? else {
            return Err(Error::new(
                Kind::Io,
                "the peer hung up before it had taken what was pushed",
            ));
        };
        match Request::decode(&frame)? {
            Some(request) => {
                if let Request::Nodes(ids) = &request {
                    nodes += ids.len() as u64;
                }
                answer(store, link, &mut recent, request)?;
                told(link.sent())?;
            }
            None => match Answer::decode(&frame)? {
                Answer::Taken => return Ok(nodes),
                Answer::Failed(e) => return Err(e),
                _ => return Err(Error::damage("the peer answered what it was not asked")),
            },
        }
    }
}

/// Takes what the other side pushes, and says so.
///
/// # Errors
/// As of [`super::pull::pull`].
pub(super) fn take(
    store: &Store,
    link: &mut Link,
    request: Request,
    signers: Option<&Signers>,
    told: OnFetched<'_>,
) -> Result<Pulled> {
    let mut asker = Asker::new(link, None);
    let mut pulled = Pulled::default();
    again_if_moved(store, || {
        store.refresh()?;
        let mut plan = Plan::default();
        match &request {
            Request::Push {
                branch,
                head,
                signature,
            } => {
                crate::store::check_name("branch", branch)?;
                plan.signed(store, signers, branch, *head, signature.clone())?;
                plan.branch(store, &mut asker, branch.clone(), *head)?;
            }
            Request::PushObject(_) if signers.is_some() => {
                let why = "only signed branches are taken here, and nobody signs objects";
                return Err(Error::new(Kind::Refused, why));
            }
            Request::PushObject(id) => plan.object(store, &mut asker, *id)?,
            _ => return Err(Error::damage("this is no push")),
        }
        pulled = Pulled::default();
        plan.carry_out(store, &mut asker, told, &mut pulled)
    })?;
    say(link, &Answer::Taken)?;
    link.flush()?;
    Ok(pulled)
}

//! A bounded reader of pickles, protocols 2 to 5. It builds a graph of values and never calls anything.
//!
//! Source: CPython's `Lib/pickletools.py`, which documents every opcode. Those of protocols 0 and 1 that are text only, and
//! out-of-band buffers, are not read. Values are shared by reference as the memo shares them, so a pickle that expands
//! without end costs no more than its opcodes.

use std::collections::HashMap;

/// The longest pickle, in bytes, and the most opcodes that are read.
pub(super) const MAX_LEN: u64 = 64 << 20;
const MAX_OPCODES: usize = 4 << 20;

/// Index of a value in [`Pickle::values`].
pub(super) type Id = u32;

/// A stretch of the pickle's own bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    from: u32,
    to: u32,
}

/// A value. Containers name their members.
#[derive(Debug)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    /// A str or bytes.
    Text(Span),
    /// A number or anything else without members that is of no interest.
    Other,
    Tuple(Vec<Id>),
    /// A list or set.
    List(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    /// Module and name.
    Global(Span, Span),
    /// A persistent id: what stands for it.
    Persistent(Id),
    /// What calling something would make, and what would then be done to it.
    Call(Box<Call>),
}

/// A call that is not made.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) callable: Id,
    pub(super) args: Id,
    /// What the object's state would be set to.
    pub(super) state: Option<Id>,
    /// What would be appended to it.
    pub(super) items: Vec<Id>,
    /// What would be set in it.
    pub(super) pairs: Vec<(Id, Id)>,
}

/// A pickle that was read.
pub(super) struct Pickle {
    bytes: Vec<u8>,
    pub(super) values: Vec<Value>,
    pub(super) root: Id,
}

impl Pickle {
    /// Reads a pickle that takes all of `bytes`; the reason if it cannot be read.
    pub(super) fn read(bytes: Vec<u8>) -> Result<Pickle, String> {
        if bytes.len() as u64 > MAX_LEN {
            return Err("pickle: too long".to_owned());
        }
        let mut m = Machine {
            bytes: &bytes,
            at: 0,
            values: vec![],
            stack: vec![],
            marks: vec![],
            memo: HashMap::new(),
        };
        let root = m
            .run()
            .map_err(|why| format!("pickle: {why} before byte {}", m.at))?;
        let values = m.values;
        Ok(Pickle { bytes, values, root })
    }

    /// The value with this id.
    pub(super) fn get(&self, id: Id) -> &Value {
        self.values.get(id as usize).unwrap_or(&Value::Other)
    }

    /// The bytes of a text.
    pub(super) fn text(&self, s: Span) -> &[u8] {
        self.bytes.get(s.from as usize..s.to as usize).unwrap_or_default()
    }

    /// The members of a tuple.
    pub(super) fn tuple(&self, id: Id) -> Option<&[Id]> {
        match self.get(id) {
            Value::Tuple(members) => Some(members),
            _ => None,
        }
    }

    /// Module and name of a global.
    pub(super) fn global(&self, id: Id) -> Option<(&[u8], &[u8])> {
        match self.get(id) {
            Value::Global(module, name) => Some((self.text(*module), self.text(*name))),
            _ => None,
        }
    }
}

/// Whether a global is one by which pickles attack whoever loads them. Nothing is ever called here; but what names these is no
/// checkpoint, and is not shown as one.
fn runs_programs(module: &[u8], name: &[u8]) -> bool {
    const MODULES: [&[u8]; 9] = [
        b"os",
        b"posix",
        b"nt",
        b"subprocess",
        b"pty",
        b"runpy",
        b"ctypes",
        b"importlib",
        b"socket",
    ];
    const BUILTINS: [&[u8]; 6] = [b"eval", b"exec", b"execfile", b"compile", b"__import__", b"open"];
    let top = module.split(|b| *b == b'.').next().unwrap_or_default();
    MODULES.contains(&top) || matches!(top, b"builtins" | b"__builtin__") && BUILTINS.contains(&name)
}

type Step<T> = Result<T, &'static str>;

struct Machine<'a> {
    bytes: &'a [u8],
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    /// Heights of the stack at the marks that are still on it.
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

impl Machine<'_> {
    fn run(&mut self) -> Step<Id> {
        for _ in 0..MAX_OPCODES {
            let [op] = self.array::<1>()?;
            if op == b'.' {
                let root = self.pop()?;
                let done = self.stack.is_empty() && self.marks.is_empty() && self.at == self.bytes.len();
                return if done {
                    Ok(root)
                } else {
                    Err("something is left over")
                };
            }
            self.step(op)?;
        }
        Err("too many opcodes")
    }

    fn step(&mut self, op: u8) -> Step<()> {
        match op {
            // PROTO, FRAME: framing only.
            0x80 => match self.array::<1>()? {
                [2..=5] => {}
                _ => return Err("unknown protocol"),
            },
            0x95 => drop(self.array::<8>()?),
            // Constants and numbers.
            b'N' => self.push(Value::None),
            0x88 => self.push(Value::Bool(true)),
            0x89 => self.push(Value::Bool(false)),
            b'J' => self.int::<4>(true)?,
            b'K' => self.int::<1>(false)?,
            b'M' => self.int::<2>(false)?,
            0x8a => self.long::<1>()?,
            0x8b => self.long::<4>()?,
            b'G' => {
                let v = f64::from_be_bytes(self.array()?);
                self.push(Value::Float(v));
            }
            // Extension codes stand for globals that only their process knows.
            0x82 => self.skip_to_other::<1>()?,
            0x83 => self.skip_to_other::<2>()?,
            0x84 => self.skip_to_other::<4>()?,
            // Text and bytes with a length of 1, 4 or 8 bytes.
            0x8c | b'U' | b'C' => self.text::<1>()?,
            b'X' | b'T' | b'B' => self.text::<4>()?,
            0x8d | 0x8e | 0x96 => self.text::<8>()?,
            // Containers.
            b']' | 0x8f => self.push(Value::List(vec![])),
            b')' => self.push(Value::Tuple(vec![])),
            b'}' => self.push(Value::Dict(vec![])),
            b'l' | 0x91 => {
                let items = self.pop_mark()?;
                self.push(Value::List(items));
            }
            b't' => {
                let items = self.pop_mark()?;
                self.push(Value::Tuple(items));
            }
            b'd' => {
                let items = self.pop_mark()?;
                self.push(Value::Dict(pairs(&items)?));
            }
            0x85..=0x87 => {
                let items = self.pop_n(usize::from(op - 0x84))?;
                self.push(Value::Tuple(items));
            }
            b'a' => {
                let items = self.pop_n(1)?;
                self.append(items)?;
            }
            b'e' | 0x90 => {
                let items = self.pop_mark()?;
                self.append(items)?;
            }
            b's' => {
                let items = self.pop_n(2)?;
                self.set(&items)?;
            }
            b'u' => {
                let items = self.pop_mark()?;
                self.set(&items)?;
            }
            // The stack and the memo.
            b'(' => self.marks.push(self.stack.len()),
            b'0' => match self.marks.last() {
                Some(mark) if *mark == self.stack.len() => drop(self.marks.pop()),
                _ => drop(self.pop()?),
            },
            b'1' => drop(self.pop_mark()?),
            b'2' => {
                let top = self.top()?;
                self.stack.push(top);
            }
            b'h' => {
                let [n] = self.array::<1>()?;
                self.get_memo(u32::from(n))?;
            }
            b'j' => {
                let n = self.array()?;
                self.get_memo(u32::from_le_bytes(n))?;
            }
            b'q' => {
                let [n] = self.array::<1>()?;
                self.put_memo(u32::from(n))?;
            }
            b'r' => {
                let n = self.array()?;
                self.put_memo(u32::from_le_bytes(n))?;
            }
            0x94 => self.put_memo(self.memo.len() as u32)?,
            _ => self.object(op)?,
        }
        Ok(())
    }

    /// Opcodes that name things or would call them.
    fn object(&mut self, op: u8) -> Step<()> {
        match op {
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                self.global(module, name)?;
            }
            0x93 => {
                let [module, name] = self.pop_array()?;
                match (&self.values[module as usize], &self.values[name as usize]) {
                    (Value::Text(m), Value::Text(n)) => {
                        let (m, n) = (*m, *n);
                        self.global(m, n)?;
                    }
                    _ => return Err("a global without a name"),
                }
            }
            b'Q' => {
                let id = self.pop()?;
                self.push(Value::Persistent(id));
            }
            // REDUCE, NEWOBJ: a callable or class, and its arguments.
            b'R' | 0x81 => {
                let [callable, args] = self.pop_array()?;
                self.call(callable, args);
            }
            // NEWOBJ_EX: a class, arguments and keyword arguments.
            0x92 => {
                let [class, args, keywords] = self.pop_array()?;
                self.push(Value::Tuple(vec![args, keywords]));
                let both = self.pop()?;
                self.call(class, both);
            }
            b'b' => {
                let state = self.pop()?;
                match self.top_value()? {
                    Value::Call(c) => c.state = Some(state),
                    _ => return Err("state for what has none"),
                }
            }
            _ => return Err("an opcode this reader does not know"),
        }
        Ok(())
    }

    fn push(&mut self, v: Value) {
        self.stack.push(self.values.len() as Id);
        self.values.push(v);
    }

    fn call(&mut self, callable: Id, args: Id) {
        let call = Call {
            callable,
            args,
            state: None,
            items: vec![],
            pairs: vec![],
        };
        self.push(Value::Call(Box::new(call)));
    }

    /// How many values may be taken without reaching below the last mark.
    fn depth(&self) -> usize {
        self.stack.len() - self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Step<Id> {
        match self.stack.last() {
            Some(id) if self.depth() > 0 => Ok(*id),
            _ => Err("the stack is empty"),
        }
    }

    fn top_value(&mut self) -> Step<&mut Value> {
        let id = self.top()?;
        self.values.get_mut(id as usize).ok_or("the stack is empty")
    }

    fn pop(&mut self) -> Step<Id> {
        let id = self.top()?;
        self.stack.pop();
        Ok(id)
    }

    fn pop_n(&mut self, n: usize) -> Step<Vec<Id>> {
        if self.depth() < n {
            return Err("the stack is empty");
        }
        Ok(self.stack.split_off(self.stack.len() - n))
    }

    fn pop_array<const N: usize>(&mut self) -> Step<[Id; N]> {
        let ids = self.pop_n(N)?;
        <[Id; N]>::try_from(ids.as_slice()).map_err(|_| "the stack is empty")
    }

    fn pop_mark(&mut self) -> Step<Vec<Id>> {
        let mark = self.marks.pop().ok_or("no mark")?;
        Ok(self.stack.split_off(mark))
    }

    fn append(&mut self, mut new: Vec<Id>) -> Step<()> {
        match self.top_value()? {
            Value::List(items) => items.append(&mut new),
            Value::Call(c) => c.items.append(&mut new),
            _ => return Err("appending to what is no list"),
        }
        Ok(())
    }

    fn set(&mut self, items: &[Id]) -> Step<()> {
        let mut new = pairs(items)?;
        match self.top_value()? {
            Value::Dict(pairs) => pairs.append(&mut new),
            Value::Call(c) => c.pairs.append(&mut new),
            _ => return Err("setting items of what is no dict"),
        }
        Ok(())
    }

    fn get_memo(&mut self, n: u32) -> Step<()> {
        let id = self.memo.get(&n).ok_or("nothing in the memo")?;
        self.stack.push(*id);
        Ok(())
    }

    fn put_memo(&mut self, n: u32) -> Step<()> {
        let top = self.top()?;
        self.memo.insert(n, top);
        Ok(())
    }

    fn raw(&mut self, n: usize) -> Step<&[u8]> {
        let end = self
            .at
            .checked_add(n)
            .filter(|end| *end <= self.bytes.len())
            .ok_or("cut short")?;
        let found = &self.bytes[self.at..end];
        self.at = end;
        Ok(found)
    }

    fn array<const N: usize>(&mut self) -> Step<[u8; N]> {
        <[u8; N]>::try_from(self.raw(N)?).map_err(|_| "cut short")
    }

    /// A little-endian length of up to 8 bytes.
    fn length<const N: usize>(&mut self) -> Step<usize> {
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(&self.array::<N>()?);
        usize::try_from(u64::from_le_bytes(wide)).map_err(|_| "cut short")
    }

    fn int<const N: usize>(&mut self, signed: bool) -> Step<()> {
        let bytes = self.array::<N>()?;
        let v = little(&bytes, signed).unwrap_or(0);
        self.push(Value::Int(v));
        Ok(())
    }

    fn long<const N: usize>(&mut self) -> Step<()> {
        let n = self.length::<N>()?;
        let v = little(self.raw(n)?, true).map_or(Value::Other, Value::Int);
        self.push(v);
        Ok(())
    }

    fn skip_to_other<const N: usize>(&mut self) -> Step<()> {
        self.array::<N>()?;
        self.push(Value::Other);
        Ok(())
    }

    fn text<const N: usize>(&mut self) -> Step<()> {
        let n = self.length::<N>()?;
        self.raw(n)?;
        let span = Span {
            from: (self.at - n) as u32,
            to: self.at as u32,
        };
        self.push(Value::Text(span));
        Ok(())
    }

    fn global(&mut self, module: Span, name: Span) -> Step<()> {
        let text = |s: Span| self.bytes.get(s.from as usize..s.to as usize).unwrap_or_default();
        if runs_programs(text(module), text(name)) {
            return Err("names a function that runs programs");
        }
        self.push(Value::Global(module, name));
        Ok(())
    }

    fn line(&mut self) -> Step<Span> {
        let rest = &self.bytes[self.at..];
        let n = rest.iter().position(|b| *b == b'\n').ok_or("cut short")?;
        let span = Span {
            from: self.at as u32,
            to: (self.at + n) as u32,
        };
        self.at += n + 1;
        Ok(span)
    }
}

/// A little-endian two's complement integer; `None` if it needs more than 64 bits.
fn little(bytes: &[u8], signed: bool) -> Option<i64> {
    if bytes.len() > 8 {
        return None;
    }
    let negative = signed && bytes.last().is_some_and(|b| *b >= 0x80);
    let mut wide = if negative { [0xff; 8] } else { [0; 8] };
    wide[..bytes.len()].copy_from_slice(bytes);
    Some(i64::from_le_bytes(wide))
}

fn pairs(items: &[Id]) -> Step<Vec<(Id, Id)>> {
    let (pairs, rest) = items.as_chunks::<2>();
    if !rest.is_empty() {
        return Err("a key without a value");
    }
    Ok(pairs.iter().map(|[k, v]| (*k, *v)).collect())
}

//! Reading one line (or one JSON document) from left to right.
//!
//! Every method that can fail says what it expected and what it found instead.

use crate::mesh::{AxisId, Mesh};
use crate::ops::Op;
use crate::plan::Space;
use crate::sharding::{ReduceKind, Sharding};
use crate::types::{LARGEST, TensorType};
use serde_json::{Map, Number, Value};

const DEPTH: usize = 64;

/// A place in a text.
pub(super) struct Cursor<'a> {
    text: &'a str,
    at: usize,
    comments: bool,
}

pub(super) fn is_word_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

impl<'a> Cursor<'a> {
    /// At the start of a line of which `;` ends what counts.
    pub(super) fn line(text: &'a str) -> Self {
        Self { text, at: 0, comments: true }
    }

    /// At the start of a JSON document.
    pub(super) fn document(text: &'a str) -> Self {
        Self { text, at: 0, comments: false }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
        if self.comments && self.rest().starts_with(';') {
            self.at = self.text.len();
        }
    }

    /// The next character that is not white space.
    pub(super) fn peek(&mut self) -> Option<char> {
        self.skip();
        self.rest().chars().next()
    }

    /// Whether nothing is left.
    pub(super) fn is_end(&mut self) -> bool {
        self.peek().is_none()
    }

    /// Checks that nothing is left.
    pub(super) fn end(&mut self) -> Result<(), String> {
        if self.is_end() { Ok(()) } else { Err(self.expected("the end of the line")) }
    }

    /// The message that something else was expected here.
    pub(super) fn expected(&mut self, what: &str) -> String {
        self.skip();
        let rest = self.rest();
        let word = rest.len() - rest.trim_start_matches(is_word_char).len();
        let first = rest.chars().next().map_or(0, char::len_utf8);
        match rest.get(..word.max(first)) {
            None | Some("") => format!("expected {what}, found the end of the line"),
            Some(found) => format!("expected {what}, found `{found}`"),
        }
    }

    /// Goes past a symbol, if it is next.
    pub(super) fn eat(&mut self, symbol: &str) -> bool {
        self.skip();
        let is_next = self.rest().starts_with(symbol);
        if is_next {
            self.at += symbol.len();
        }
        is_next
    }

    /// Goes past a symbol.
    pub(super) fn expect(&mut self, symbol: &str) -> Result<(), String> {
        if self.eat(symbol) { Ok(()) } else { Err(self.expected(&format!("`{symbol}`"))) }
    }

    fn peek_word(&mut self) -> &'a str {
        self.skip();
        let rest = self.rest();
        &rest[..rest.len() - rest.trim_start_matches(is_word_char).len()]
    }

    /// Goes past a word, if exactly this word is next.
    pub(super) fn eat_word(&mut self, word: &str) -> bool {
        let is_next = self.peek_word() == word;
        if is_next {
            self.at += word.len();
        }
        is_next
    }

    /// The name of a memory space.
    pub(super) fn space(&mut self) -> Result<Space, String> {
        let name = self.word("a memory space")?;
        Space::from_name(name).ok_or_else(|| format!("unknown memory space `{name}`; known are device, host, disk"))
    }

    pub(super) fn word(&mut self, what: &str) -> Result<&'a str, String> {
        match self.peek_word() {
            "" => Err(self.expected(what)),
            word => {
                self.at += word.len();
                Ok(word)
            }
        }
    }

    /// A natural number.
    pub(super) fn number(&mut self, what: &str) -> Result<u64, String> {
        match self.peek_word().parse() {
            Ok(number) => {
                self.at += self.peek_word().len();
                Ok(number)
            }
            Err(_) => Err(self.expected(what)),
        }
    }

    /// A natural number that counts things or bytes, so not absurdly large.
    pub(super) fn size(&mut self, what: &str) -> Result<u64, String> {
        let size = self.number(what)?;
        if size <= LARGEST { Ok(size) } else { Err(format!("{what} {size} is larger than {LARGEST}")) }
    }

    /// A string in double quotes, escaped as in JSON.
    pub(super) fn string(&mut self, what: &str) -> Result<String, String> {
        self.skip();
        let rest = self.rest();
        if !rest.starts_with('"') {
            return Err(self.expected(what));
        }
        let mut escaped = false;
        let close = rest.char_indices().skip(1).find(|(_, c)| {
            let closes = *c == '"' && !escaped;
            escaped = *c == '\\' && !escaped;
            closes
        });
        let Some((close, _)) = close else { return Err("a string without its closing `\"`".to_string()) };
        self.at += close + 1;
        serde_json::from_str(&rest[..=close]).map_err(|_| format!("{} is not a string as JSON has it", &rest[..=close]))
    }

    /// A word or a string.
    pub(super) fn name(&mut self, what: &str) -> Result<String, String> {
        if self.peek() == Some('"') { self.string(what) } else { self.word(what).map(str::to_string) }
    }

    /// A JSON value. Numbers are read exactly, which serde_json does not promise.
    pub(super) fn json(&mut self) -> Result<Value, String> {
        self.json_within(DEPTH)
    }

    fn json_within(&mut self, depth: usize) -> Result<Value, String> {
        let Some(depth) = depth.checked_sub(1) else { return Err("values are nested too deeply".to_string()) };
        match self.peek() {
            Some('"') => self.string("a string").map(Value::String),
            Some('[') => {
                self.expect("[")?;
                let mut items = Vec::new();
                while !self.eat("]") {
                    if !items.is_empty() {
                        self.expect(",")?;
                    }
                    items.push(self.json_within(depth)?);
                }
                Ok(Value::Array(items))
            }
            Some('{') => {
                self.expect("{")?;
                let mut map = Map::new();
                while !self.eat("}") {
                    if !map.is_empty() {
                        self.expect(",")?;
                    }
                    let key = self.string("a key")?;
                    self.expect(":")?;
                    map.insert(key, self.json_within(depth)?);
                }
                Ok(Value::Object(map))
            }
            Some(c) if c == '-' || c.is_ascii_digit() => self.json_number(),
            _ => {
                let words = [("true", Value::Bool(true)), ("false", Value::Bool(false)), ("null", Value::Null)];
                match words.into_iter().find(|(word, _)| self.eat_word(word)) {
                    Some((_, value)) => Ok(value),
                    None => Err(self.expected("a value as JSON has it")),
                }
            }
        }
    }

    fn json_number(&mut self) -> Result<Value, String> {
        let text = self.float_text();
        let number = text.parse::<u64>().map(Number::from).or_else(|_| text.parse::<i64>().map(Number::from));
        let number = number.ok().or_else(|| text.parse().ok().and_then(Number::from_f64));
        number.map(Value::Number).ok_or_else(|| format!("`{text}` is not a number as JSON has it"))
    }

    fn float_text(&mut self) -> &'a str {
        self.skip();
        let rest = self.rest();
        let is_part = |c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.' | 'e' | 'E');
        let text = &rest[..rest.len() - rest.trim_start_matches(is_part).len()];
        self.at += text.len();
        text
    }

    /// A number with a fraction, or `inf`.
    pub(super) fn float(&mut self, what: &str) -> Result<f64, String> {
        let negative = self.eat("-");
        let sign = if negative { -1.0 } else { 1.0 };
        if self.eat_word("inf") {
            return Ok(sign * f64::INFINITY);
        }
        let expected = self.expected(what);
        self.float_text().parse().map(|value: f64| sign * value).map_err(|_| expected)
    }

    /// A type without layout.
    pub(super) fn ty(&mut self) -> Result<TensorType, String> {
        if self.peek_word().is_empty() {
            return Err(self.expected("a type like `f32[8,4]`"));
        }
        let (ty, sharding) = self.ty_over(&Mesh::default())?;
        debug_assert!(sharding.dim_axes().is_empty());
        Ok(ty)
    }

    /// A type and its layout: `bf16[8@dp.mb,4096@tp]/sum(tp)`.
    pub(super) fn ty_over(&mut self, mesh: &Mesh) -> Result<(TensorType, Sharding), String> {
        let dtype = self.word("an element type")?.parse()?;
        self.expect("[")?;
        let (mut shape, mut sharding) = (Vec::new(), Sharding::default());
        while !self.eat("]") {
            if !shape.is_empty() {
                self.expect(",")?;
            }
            shape.push(self.size("a size")?);
            sharding.dims.push(if self.eat("@") { self.axes(mesh)? } else { Vec::new() });
        }
        while self.eat("/") {
            let kind = self.word("a reduction")?;
            let known = "known are sum, max, logsumexp";
            let kind = ReduceKind::from_name(kind).ok_or_else(|| format!("unknown reduction `{kind}`; {known}"))?;
            self.expect("(")?;
            sharding.add_partial(self.axis(mesh)?, kind);
            self.expect(")")?;
        }
        let ty = TensorType::new(dtype, shape);
        ty.expect_countable()?;
        Ok((ty, sharding))
    }

    fn axis(&mut self, mesh: &Mesh) -> Result<AxisId, String> {
        let name = self.word("an axis of the mesh")?;
        mesh.find(name).ok_or_else(|| match mesh.axes.is_empty() {
            true => format!("axis `{name}` needs a `mesh` line with it before the nodes"),
            false => format!("the mesh {mesh} has no axis `{name}`"),
        })
    }

    /// Axes joined by dots.
    pub(super) fn axes(&mut self, mesh: &Mesh) -> Result<Vec<AxisId>, String> {
        let mut axes = vec![self.axis(mesh)?];
        while self.eat(".") {
            axes.push(self.axis(mesh)?);
        }
        Ok(axes)
    }

    /// The items that follow, each begun by `sigil` and separated by commas, if the first is there.
    pub(super) fn list(&mut self, sigil: char) -> Result<Vec<&'a str>, String> {
        let mut items = Vec::new();
        while self.peek() == Some(sigil) || !items.is_empty() {
            self.expect(sigil.encode_utf8(&mut [0; 4]))?;
            items.push(self.word("a name")?);
            if !self.eat(",") {
                break;
            }
        }
        Ok(items)
    }

    /// The attributes in braces, if they are there.
    pub(super) fn attributes(&mut self, map: &mut Map<String, Value>) -> Result<(), String> {
        if !self.eat("{") {
            return Ok(());
        }
        let mut is_first = true;
        while !self.eat("}") {
            if !is_first {
                self.expect(",")?;
            }
            is_first = false;
            let key = self.word("an attribute")?.to_string();
            self.expect("=")?;
            if map.contains_key(&key) {
                return Err(format!("attribute `{key}` is given twice"));
            }
            map.insert(key, self.json()?);
        }
        Ok(())
    }

    /// An operation, its operands and its attributes: `matmul %0, %1 {spec="mk,nk->mn"}`; an
    /// attribute called `name` is the string before the operands.
    pub(super) fn op(&mut self, sigil: char) -> Result<(Op, Vec<&'a str>), String> {
        let name = self.word("an operation")?;
        let known = super::op_names();
        if !known.contains(&name) {
            return Err(format!("unknown operation `{name}`{}", super::suggestion(name, &known)));
        }
        let mut attributes = Map::new();
        if self.peek() == Some('"') {
            attributes.insert("name".to_string(), self.string("a name")?.into());
        }
        let operands = self.list(sigil)?;
        self.attributes(&mut attributes)?;
        let op = Op::from_text(name, attributes.clone())?;
        let written = op.attributes();
        for key in attributes.keys().filter(|key| !written.iter().any(|(known, _)| known == *key)) {
            // An attribute at its default is not written; one that is unknown takes even a null.
            let mut probe = attributes.clone();
            probe.insert(key.clone(), Value::Null);
            if Op::from_text(name, probe).is_ok() {
                return Err(format!("`{name}` has no attribute `{key}`"));
            }
        }
        Ok((op, operands))
    }
}

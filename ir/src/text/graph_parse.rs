//! Parsing a graph or a plan.
//!
//! A line is a statement. A line that cannot be read gives one finding; the values it would have
//! made are remembered, so that nodes that read them do not give more.

use super::cursor::Cursor;
use super::graph_print::layout_text;
use super::suggestion;
use crate::diagnostic::Diagnostics;
use crate::entity::{NodeId, ValueId};
use crate::graph::{Graph, OutputKind, Role};
use crate::mesh::{Axis, Mesh};
use crate::pipeline::{Length, Schedule};
use crate::plan::{Plan, Space};
use crate::sharding::Sharding;
use crate::types::TensorType;
use std::collections::HashMap;
use std::str::FromStr;

impl FromStr for Graph {
    type Err = Diagnostics;

    /// Reads what `Display` wrote. A plan's text is not a graph's.
    fn from_str(text: &str) -> Result<Self, Diagnostics> {
        let mut parser = Parser::default();
        parser.read(text);
        if let Some(line) = parser.mesh_line {
            parser.found.push(place(line), "a graph has no mesh; this is the text of a plan");
        }
        parser.found.finish(parser.plan.graph)
    }
}

impl FromStr for Plan {
    type Err = Diagnostics;

    /// Reads what `Display` wrote: the graph, the mesh, the strategies and the flags.
    fn from_str(text: &str) -> Result<Self, Diagnostics> {
        let mut parser = Parser::default();
        parser.read(text);
        if parser.mesh_line.is_none() {
            let header = parser.header_line.max(1);
            parser.found.push(place(header), "a plan needs a `mesh` line, like `mesh dp=2,time mb=4,tp=2`");
        }
        parser.found.finish(parser.plan)
    }
}

/// What a name stands for.
#[derive(Clone, Copy)]
enum Known {
    Value(ValueId),
    /// Its definition could not be read.
    Broken,
}

/// Why a statement was not carried out.
enum Stop {
    /// It is wrong.
    Wrong(String),
    /// Something it refers to is wrong, which is said there.
    Silent,
}

impl From<String> for Stop {
    fn from(message: String) -> Self {
        Self::Wrong(message)
    }
}

#[derive(Default)]
struct Parser<'a> {
    plan: Plan,
    names: HashMap<&'a str, (Known, usize)>,
    header_line: usize,
    mesh_line: Option<usize>,
    found: Diagnostics,
}

/// One declared result.
struct Declared<'a> {
    name: &'a str,
    ty: TensorType,
    layout: Sharding,
    transient: bool,
    space: Space,
}

fn place(line: usize) -> String {
    format!("line {line}")
}

impl<'a> Parser<'a> {
    fn read(&mut self, text: &'a str) {
        let (mut opened, mut closed, mut last) = (false, false, 1);
        for (index, line) in text.lines().enumerate() {
            let line_number = index + 1;
            let mut cursor = Cursor::line(line);
            if cursor.is_end() {
                continue;
            }
            last = line_number;
            let result = if closed {
                Err(Stop::Wrong(cursor.expected("nothing after the closing `}`")))
            } else if !opened {
                opened = true;
                self.header_line = line_number;
                self.header(&mut cursor).map_err(Stop::Wrong)
            } else if cursor.eat("}") {
                closed = true;
                cursor.end().map_err(Stop::Wrong)
            } else {
                self.statement(&mut cursor, line_number)
            };
            if let Err(Stop::Wrong(message)) = result {
                self.found.push(place(line_number), message);
                if self.mesh_line == Some(line_number) {
                    // All that follows is laid out over the mesh that was meant.
                    return;
                }
            }
        }
        if !opened {
            self.found.push(place(last), "expected `graph @NAME {`, found an empty text");
        } else if !closed {
            self.found.push(place(last), "expected a closing `}` after this line, found the end of the text");
        }
    }

    fn header(&mut self, cursor: &mut Cursor<'a>) -> Result<(), String> {
        if !cursor.eat_word("graph") {
            return Err(cursor.expected("`graph @NAME {`"));
        }
        cursor.expect("@")?;
        self.plan.graph.name = cursor.name("the graph's name")?;
        cursor.expect("{")?;
        cursor.end()
    }

    fn statement(&mut self, cursor: &mut Cursor<'a>, line: usize) -> Result<(), Stop> {
        if cursor.peek() == Some('%') {
            return self.node(cursor, line);
        }
        match cursor.word("a node, `return`, `mesh` or `}`")? {
            "return" => self.outputs(cursor),
            "mesh" => Ok(self.mesh(cursor, line)?),
            "reduce_in_loop" => {
                self.plan.reduce_in_loop = true;
                Ok(cursor.end()?)
            }
            "pipeline" => Ok(self.pipeline(cursor)?),
            word => {
                let near = suggestion(word, &["return", "mesh", "reduce_in_loop", "pipeline"]);
                Err(format!("expected a node, `return`, `mesh` or `}}`, found `{word}`{near}").into())
            }
        }
    }

    fn mesh(&mut self, cursor: &mut Cursor<'a>, line: usize) -> Result<(), String> {
        if self.plan.graph.node_count() > 0 || self.mesh_line.is_some() {
            return Err("the one `mesh` line stands before all nodes".to_string());
        }
        self.mesh_line = Some(line);
        let mut mesh = Mesh::default();
        while !cursor.is_end() {
            if !mesh.axes.is_empty() {
                cursor.expect(",")?;
            }
            let is_time = cursor.eat_word("time");
            let name = cursor.word("an axis like `dp=2`")?;
            cursor.expect("=")?;
            let size = cursor.size("the axis's size")?;
            if mesh.find(name).is_some() {
                return Err(format!("axis `{name}` is in the mesh twice"));
            }
            if size == 0 || mesh.axes.len() == 32 {
                return Err("a mesh has at most 32 axes, each of size 1 or more".to_string());
            }
            mesh.axes.push(Axis::parse(name, is_time, size)?);
            let devices = mesh.axes.iter().try_fold(1u64, |product, axis| product.checked_mul(axis.size));
            if devices.is_none_or(|devices| devices > u64::from(u32::MAX)) {
                return Err(format!("the mesh {mesh} has more than {} coordinates", u32::MAX));
            }
        }
        self.plan.mesh = mesh;
        Ok(())
    }

    fn pipeline(&mut self, cursor: &mut Cursor<'a>) -> Result<(), String> {
        if self.plan.graph.node_count() > 0 {
            return Err("the `pipeline` line stands before all nodes".to_string());
        }
        let names = Schedule::ALL.map(Schedule::name);
        let name = cursor.word("a schedule like `1f1b`")?;
        let known = || format!("`{name}` is no schedule{}; known are {}", suggestion(name, &names), names.join(", "));
        self.plan.pipeline.schedule = Schedule::from_name(name).ok_or_else(known)?;
        self.plan.pipeline.per_stage = cursor.size("the chunks of a stage")?;
        if cursor.eat_word("in_flight") {
            self.plan.pipeline.in_flight = Some(cursor.size("the chunks in flight")?);
        }
        if cursor.eat_word("delayed") {
            self.plan.pipeline.delayed = Some(cursor.size("the chunks whose gradients of weights are delayed")?);
        }
        if cursor.eat_word("lengths") {
            while !cursor.is_end() {
                let mut parts = [0; 4];
                for (index, part) in parts.iter_mut().enumerate() {
                    if index > 0 {
                        cursor.expect("/")?;
                    }
                    *part = cursor.size("the length of a chunk's part")?;
                }
                let [forward, backward, weight, message] = parts;
                self.plan.pipeline.lengths.push(Length { forward, backward, weight, message });
            }
        }
        cursor.end()
    }

    fn node(&mut self, cursor: &mut Cursor<'a>, line: usize) -> Result<(), Stop> {
        let mut declared = Vec::new();
        let result = self.node_of(cursor, &mut declared, line);
        if result.is_err() {
            for result in &declared {
                self.names.entry(result.name).or_insert((Known::Broken, line));
            }
        }
        result
    }

    fn node_of(&mut self, cursor: &mut Cursor<'a>, declared: &mut Vec<Declared<'a>>, line: usize) -> Result<(), Stop> {
        loop {
            cursor.expect("%")?;
            let name = cursor.word("a value's name")?;
            // Registered before the rest is read: if that fails, the name is known to be broken.
            let (blank, space) = (TensorType::scalar(crate::types::DType::F32), Space::Device);
            declared.push(Declared { name, ty: blank, layout: Sharding::default(), transient: false, space });
            cursor.expect(":")?;
            let (ty, layout) = cursor.ty_over(&self.plan.mesh)?;
            let transient = cursor.eat_word("transient");
            let space = if cursor.eat_word("in") { cursor.space()? } else { Space::Device };
            declared.pop();
            declared.push(Declared { name, ty, layout, transient, space });
            if !cursor.eat(",") {
                break;
            }
        }
        for (index, result) in declared.iter().enumerate() {
            if let Some((_, line)) = self.names.get(result.name) {
                return Err(format!("%{} is already defined in line {line}", result.name).into());
            }
            if declared[..index].iter().any(|other| other.name == result.name) {
                return Err(format!("%{} is defined twice", result.name).into());
            }
        }
        cursor.expect("=")?;
        let (op, operands) = cursor.op('%')?;
        let operands = operands.into_iter().map(|name| self.value(name)).collect::<Result<Vec<_>, _>>()?;
        let mut clauses = self.clauses(cursor)?;
        let types: Vec<_> = declared.iter().map(|result| result.ty.clone()).collect();
        let path = std::mem::take(&mut clauses.path);
        let added = self.plan.graph.add_as(op, &operands, &types, path, clauses.role);
        let id = added.map_err(|error| Stop::Wrong(error.to_string()))?;
        let results = self.plan.graph.node(id).results.clone();
        for (value, result) in results.into_iter().zip(declared.iter()) {
            self.names.insert(result.name, (Known::Value(value), line));
            if result.transient {
                self.plan.transient[value] = true;
            }
            if result.space != Space::Device {
                self.plan.spaces[value] = result.space;
            }
        }
        if clauses.chunk.is_some() {
            self.plan.pipeline.chunks[id] = clauses.chunk;
        }
        self.annotate(id, &clauses.strategy, declared).map_err(Stop::Wrong)
    }

    fn annotate(&mut self, id: NodeId, strategy: &str, declared: &[Declared<'a>]) -> Result<(), String> {
        if self.mesh_line.is_none() {
            let transient = declared.iter().any(|result| result.transient);
            let needs_mesh = !strategy.is_empty() || transient || self.plan.pipeline.chunks[id].is_some();
            return if needs_mesh {
                Err("a strategy or a chunk needs a `mesh` line before the nodes".to_string())
            } else {
                Ok(())
            };
        }
        self.plan.strategies[id] = self.plan.rule(id).parse_strategy(strategy, &self.plan.mesh)?;
        let rule = self.plan.rule(id);
        for (index, result) in declared.iter().enumerate() {
            let follows = rule.result_sharding(index, &self.plan.strategies[id]);
            if result.layout != follows {
                let written = layout_text(&result.ty, &result.layout, &self.plan);
                let follows = layout_text(&result.ty, &follows, &self.plan);
                let name = result.name;
                return Err(format!("%{name} is laid out as {written}, but its node's strategy makes it {follows}"));
            }
        }
        Ok(())
    }

    fn value(&self, name: &str) -> Result<ValueId, Stop> {
        match self.names.get(name) {
            Some((Known::Value(value), _)) => Ok(*value),
            Some((Known::Broken, _)) => Err(Stop::Silent),
            None => {
                let mut known: Vec<&str> =
                    self.names.keys().copied().filter(|name| name.parse::<u64>().is_err()).collect();
                known.sort_unstable();
                let near = if name.parse::<u64>().is_ok() { String::new() } else { suggestion(name, &known) };
                Err(format!("%{name} is not defined before it is used{near}").into())
            }
        }
    }

    fn reference(&self, cursor: &mut Cursor<'a>) -> Result<ValueId, Stop> {
        cursor.expect("%")?;
        self.value(cursor.word("a value's name")?)
    }

    fn clauses(&self, cursor: &mut Cursor<'a>) -> Result<Clauses, Stop> {
        let mut clauses = Clauses::default();
        while !cursor.is_end() {
            let forward =
                |cursor: &mut Cursor<'a>| self.reference(cursor).map(|value| self.plan.graph.value(value).def);
            if cursor.eat_word("at") {
                clauses.path = cursor.string("a module path in quotes")?;
            } else if cursor.eat_word("grad_of") {
                clauses.role = Role::Backward(forward(cursor)?);
            } else if cursor.eat_word("recompute_of") {
                clauses.role = Role::Recompute(forward(cursor)?);
            } else if cursor.eat_word("optimizer") {
                clauses.role = Role::Optimizer;
            } else if cursor.eat_word("chunk") {
                let chunk = cursor.size("a chunk's number")?;
                let most = || format!("chunk {chunk} is above {}", u32::MAX);
                clauses.chunk = Some(u32::try_from(chunk).map_err(|_| most())?);
            } else if cursor.eat_word("by") {
                clauses.strategy = self.strategy(cursor)?;
            } else {
                let what = "`,`, attributes, `at`, `grad_of`, `recompute_of`, `optimizer`, `chunk`, `by` or the end of the line";
                return Err(cursor.expected(what).into());
            }
        }
        Ok(clauses)
    }

    /// `FACTOR=AXIS.AXIS …` up to the end of the line.
    fn strategy(&self, cursor: &mut Cursor<'a>) -> Result<String, String> {
        let mut parts = Vec::new();
        while !cursor.is_end() {
            let factor = cursor.word("FACTOR=AXES")?;
            cursor.expect("=")?;
            let axes = cursor.axes(&self.plan.mesh)?;
            parts.push(crate::sharding::axes_text(&axes, &self.plan.mesh, &format!("{factor}=")));
        }
        Ok(parts.join(" "))
    }

    fn outputs(&mut self, cursor: &mut Cursor<'a>) -> Result<(), Stop> {
        loop {
            if cursor.eat_word("update") {
                let name = cursor.string("the leaf's name in quotes")?;
                let leaf = self.reference(cursor)?;
                cursor.expect("=")?;
                let value = self.reference(cursor)?;
                self.plan.graph.output(name, value, OutputKind::Update(leaf));
            } else {
                let name = cursor.name("`update` or the output's name")?;
                let value = self.reference(cursor)?;
                self.plan.graph.output(name, value, OutputKind::Result);
            }
            if !cursor.eat(",") {
                return Ok(cursor.end()?);
            }
        }
    }
}

/// What follows the operands and the attributes.
#[derive(Default)]
struct Clauses {
    path: String,
    role: Role,
    chunk: Option<u32>,
    strategy: String,
}

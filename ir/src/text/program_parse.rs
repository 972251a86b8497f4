//! Parsing a program; the form is shown in `program_print`.

use super::cursor::Cursor;
use super::suggestion;
use crate::diagnostic::Diagnostics;
use crate::entity::{BufferId, NodeId, SectionId, ValueId};
use crate::plan::{Category, Space};
use crate::program::{Action, Buffer, Feed, Instruction, Program, Reading, Run, Section, Slot, Stream};
use crate::sharding::ReduceKind;
use crate::units::Bytes;
use std::str::FromStr;

impl FromStr for Program {
    type Err = Diagnostics;

    /// Reads what `Display` wrote.
    fn from_str(text: &str) -> Result<Self, Diagnostics> {
        let mut parser = Parser::default();
        let mut last = 1;
        for (index, line) in text.lines().enumerate() {
            let mut cursor = Cursor::line(line);
            if cursor.is_end() {
                continue;
            }
            last = index + 1;
            if let Err(message) = parser.line(&mut cursor) {
                parser.found.push(format!("line {last}"), message);
            }
        }
        if parser.state != State::Closed {
            parser
                .found
                .push(format!("line {last}"), "expected a closing `}` after this line, found the end of the text");
        }
        parser.found.finish(parser.program)
    }
}

impl Program {
    /// The programs of all ranks from one text, as printing them one after the other gives it.
    ///
    /// # Errors
    /// All findings of the text.
    pub fn parse_all(text: &str) -> Result<Vec<Program>, Diagnostics> {
        let is_header = |line: &&str| line.trim_start().starts_with("program ");
        let starts: Vec<usize> =
            text.lines().enumerate().filter(|(_, line)| is_header(line)).map(|(index, _)| index).collect();
        let lines: Vec<&str> = text.lines().collect();
        let (mut programs, mut found) = (Vec::new(), Diagnostics::default());
        for (index, start) in starts.iter().enumerate() {
            let first = if index == 0 { 0 } else { *start };
            let end = starts.get(index + 1).copied().unwrap_or(lines.len());
            // Blank lines keep the numbers of the whole text.
            let part = format!("{}{}", "\n".repeat(first), lines[first..end].join("\n"));
            match part.parse() {
                Ok(program) => programs.push(program),
                Err(Diagnostics(more)) => found.0.extend(more),
            }
        }
        if starts.is_empty() {
            found.push("line 1", "expected `program rank R of N {`");
        }
        found.finish(programs)
    }
}

#[derive(Clone, Copy, Default, PartialEq)]
enum State {
    #[default]
    Before,
    Open,
    Section,
    Closed,
}

#[derive(Default)]
struct Parser {
    program: Program,
    state: State,
    found: Diagnostics,
}

impl Parser {
    fn line(&mut self, cursor: &mut Cursor<'_>) -> Result<(), String> {
        match self.state {
            State::Before => {
                self.state = State::Open;
                self.header(cursor)?;
            }
            State::Closed => return Err(cursor.expected("nothing after the closing `}`")),
            State::Open if cursor.eat("}") => self.state = State::Closed,
            State::Section if cursor.eat("}") => self.state = State::Open,
            State::Open => self.statement(cursor)?,
            State::Section => self.instruction(cursor)?,
        }
        cursor.end()
    }

    fn header(&mut self, cursor: &mut Cursor<'_>) -> Result<(), String> {
        if !(cursor.eat_word("program") && cursor.eat_word("rank")) {
            return Err(cursor.expected("`program rank R of N {`"));
        }
        self.program.rank = cursor.number("the rank")?;
        keyword(cursor, "of")?;
        self.program.ranks = cursor.number("the number of ranks")?;
        cursor.expect("{")
    }

    fn statement(&mut self, cursor: &mut Cursor<'_>) -> Result<(), String> {
        if cursor.peek() == Some('$') {
            return self.buffer(cursor);
        }
        match cursor.word("a statement")? {
            "arena" => {
                let space = cursor.space()?;
                self.program.arenas.push((space, Bytes(cursor.size("the arena's bytes")?)));
            }
            "group" => {
                counted(cursor, self.program.groups.len(), "group")?;
                cursor.expect("=")?;
                self.program.groups.push(numbers(cursor, "a rank")?);
            }
            "input" => self.input(cursor)?,
            "slot" => self.slot(cursor)?,
            "reading" => {
                let name = cursor.string("the reading's name in quotes")?;
                cursor.expect("=")?;
                self.program.readings.push(Reading { name, buffer: self.buffer_id(cursor)? });
            }
            "section" => {
                self.state = State::Section;
                let name = cursor.name("the section's name")?;
                let is_known = self.program.sections.values().any(|section| section.name == name);
                self.program.sections.push(Section { name: name.clone(), instructions: Vec::new() });
                if is_known {
                    return Err(format!("there are two sections `{name}`"));
                }
                cursor.expect("{")?;
            }
            "order" => self.order(cursor)?,
            word => {
                let known = ["arena", "group", "input", "slot", "reading", "section", "order"];
                let near = suggestion(word, &known);
                return Err(format!("expected `{}` or a buffer, found `{word}`{near}", known.join("`, `")));
            }
        }
        Ok(())
    }

    fn buffer(&mut self, cursor: &mut Cursor<'_>) -> Result<(), String> {
        cursor.expect("$")?;
        // The buffer is entered even if its line is wrong, so that its uses are not wrong as well.
        let blank = crate::types::TensorType::scalar(crate::types::DType::F32);
        let blank = Buffer { ty: blank, space: Space::Device, offset: 0, category: Category::Buffer, value: None };
        let expected = self.program.buffers.len();
        let id = self.program.buffers.push(blank);
        counted(cursor, expected, "buffer")?;
        cursor.expect(":")?;
        let ty = cursor.ty()?;
        let space = cursor.space()?;
        cursor.expect("+")?;
        let offset = cursor.size("the offset")?;
        let name = cursor.word("a category")?;
        let known: Vec<_> = Category::ALL.iter().map(|category| category.name()).collect();
        let category = Category::from_name(name)
            .ok_or_else(|| format!("unknown category `{name}`; known are {}", known.join(", ")))?;
        let value = if cursor.eat("%") { Some(ValueId::from_u32(index(cursor, "a value")?)) } else { None };
        self.program.buffers[id] = Buffer { ty, space, offset, category, value };
        Ok(())
    }

    fn buffer_id(&self, cursor: &mut Cursor<'_>) -> Result<BufferId, String> {
        cursor.expect("$")?;
        self.known_buffer(cursor.word("a buffer's number")?)
    }

    fn known_buffer(&self, name: &str) -> Result<BufferId, String> {
        let id = name.parse::<u32>().ok().filter(|id| (*id as usize) < self.program.buffers.len());
        id.map(BufferId::from_u32).ok_or_else(|| format!("buffer ${name} is not declared before it is used"))
    }

    fn buffers(&self, cursor: &mut Cursor<'_>) -> Result<Vec<BufferId>, String> {
        cursor.list('$')?.into_iter().map(|name| self.known_buffer(name)).collect()
    }

    fn input(&mut self, cursor: &mut Cursor<'_>) -> Result<(), String> {
        let name = cursor.string("the input's name in quotes")?;
        cursor.expect(":")?;
        let ty = cursor.ty()?;
        cursor.expect("=")?;
        let mut slices = Vec::new();
        while !cursor.is_end() {
            slices.push(slice(cursor)?);
        }
        self.program.inputs.push(Feed { name, ty, slices });
        Ok(())
    }

    fn slot(&mut self, cursor: &mut Cursor<'_>) -> Result<(), String> {
        let kind = cursor.word("`parameter`, `state` or `cast`")?;
        let name = cursor.string("the slot's name in quotes")?;
        cursor.expect(":")?;
        let ty = cursor.ty()?;
        cursor.expect("=")?;
        let buffer = self.buffer_id(cursor)?;
        let slice = slice(cursor)?;
        let (mut init, mut cast_of) = (0.0, None);
        match kind {
            "parameter" => {}
            "state" => {
                keyword(cursor, "from")?;
                init = cursor.float("the number the state starts at")?;
            }
            "cast" => {
                keyword(cursor, "of")?;
                cast_of = Some(cursor.string("the parameter's name in quotes")?);
            }
            word => return Err(format!("expected `parameter`, `state` or `cast`, found `{word}`")),
        }
        self.program.slots.push(Slot { name, buffer, ty, slice, is_parameter: kind == "parameter", init, cast_of });
        Ok(())
    }

    fn order(&mut self, cursor: &mut Cursor<'_>) -> Result<(), String> {
        while !cursor.is_end() {
            if !self.program.order.is_empty() {
                cursor.expect(",")?;
            }
            let name = cursor.name("a section's name")?;
            let section = self.program.sections.iter().find(|(_, section)| section.name == name);
            let section: SectionId = section.ok_or_else(|| format!("there is no section `{name}` above"))?.0;
            let microbatch = cursor.number("a microbatch")?;
            self.program.order.push(Run { section, microbatch });
        }
        Ok(())
    }

    fn instruction(&mut self, cursor: &mut Cursor<'_>) -> Result<(), String> {
        let Some(section) = self.program.sections.last().map(|(id, _)| id) else {
            return Err("an instruction outside a section".to_string());
        };
        if cursor.peek().is_some_and(|c| c.is_ascii_digit()) {
            counted(cursor, self.program.sections[section].instructions.len(), "instruction")?;
            cursor.expect(":")?;
        }
        let parsed = self.instruction_of(cursor);
        // A blank stands for an instruction that is wrong, so that those below keep their numbers.
        let blank = Instruction::new(Action::Copy, Vec::new(), Vec::new(), Stream::Compute);
        let (instruction, result) = parsed.map_or_else(|error| (blank, Err(error)), |parsed| (parsed, Ok(())));
        self.program.sections[section].instructions.push(instruction);
        result
    }

    fn instruction_of(&self, cursor: &mut Cursor<'_>) -> Result<Instruction, String> {
        let results = self.buffers(cursor)?;
        if !results.is_empty() {
            cursor.expect("=")?;
        }
        let (action, operands) = self.action(cursor)?;
        let scratch = if cursor.eat_word("scratch") { Some(self.buffer_id(cursor)?) } else { None };
        keyword(cursor, "on")?;
        let name = cursor.word("a stream")?;
        let known: Vec<_> = Stream::ALL.iter().map(|stream| stream.name()).collect();
        let stream =
            Stream::from_name(name).ok_or_else(|| format!("unknown stream `{name}`{}", suggestion(name, &known)))?;
        let mut after = Vec::new();
        if cursor.eat_word("after") {
            after = numbers(cursor, "an instruction's number")?.into_iter().map(|index| index as usize).collect();
        }
        let mut source = None;
        if cursor.eat_word("from") {
            let word = cursor.word("a node")?;
            let index =
                word.strip_prefix("node").and_then(|index| index.parse().ok()).filter(|index| *index < u32::MAX);
            source =
                Some(NodeId::from_u32(index.ok_or_else(|| format!("expected a node like node7, found `{word}`"))?));
        }
        Ok(Instruction { action, operands, results, scratch, stream, after, source })
    }

    fn action(&self, cursor: &mut Cursor<'_>) -> Result<(Action, Vec<BufferId>), String> {
        let name = cursor.word("an action")?;
        if name == "compute" {
            let (op, operands) = cursor.op('$')?;
            let operands = operands.into_iter().map(|name| self.known_buffer(name)).collect::<Result<_, _>>()?;
            return Ok((Action::Compute(op), operands));
        }
        let operands = self.buffers(cursor)?;
        let action = match name {
            "all_reduce" => Action::AllReduce { reduce: reduce(cursor)?, group: self.group(cursor)? },
            "all_gather" => Action::AllGather { group: self.group(cursor)? },
            "reduce_scatter" => Action::ReduceScatter { reduce: reduce(cursor)?, group: self.group(cursor)? },
            "all_to_all" => Action::AllToAll { group: self.group(cursor)? },
            "send" => Action::Send { peer: peer(cursor, "to")? },
            "receive" => Action::Receive { peer: peer(cursor, "from")? },
            "accumulate" => Action::Accumulate,
            "copy" => Action::Copy,
            "feed" => {
                keyword(cursor, "input")?;
                let input = cursor.number("an input's number")? as usize;
                if input >= self.program.inputs.len() {
                    return Err(format!("input {input} is not declared above"));
                }
                Action::Feed { input }
            }
            _ => {
                let known = [
                    "compute",
                    "all_reduce",
                    "all_gather",
                    "reduce_scatter",
                    "all_to_all",
                    "send",
                    "receive",
                    "accumulate",
                    "copy",
                    "feed",
                ];
                return Err(format!("unknown action `{name}`{}", suggestion(name, &known)));
            }
        };
        Ok((action, operands))
    }

    fn group(&self, cursor: &mut Cursor<'_>) -> Result<usize, String> {
        keyword(cursor, "over")?;
        let group = cursor.number("a group's number")? as usize;
        if group < self.program.groups.len() { Ok(group) } else { Err(format!("group {group} is not declared above")) }
    }
}

fn keyword(cursor: &mut Cursor<'_>, word: &str) -> Result<(), String> {
    if cursor.eat_word(word) { Ok(()) } else { Err(cursor.expected(&format!("`{word}`"))) }
}

/// A number that must be the next of its kind.
fn counted(cursor: &mut Cursor<'_>, next: usize, what: &str) -> Result<(), String> {
    let number = cursor.number(&format!("the {what}'s number"))?;
    if number == next as u64 { Ok(()) } else { Err(format!("{what} {number} stands where {what} {next} belongs")) }
}

fn index(cursor: &mut Cursor<'_>, what: &str) -> Result<u32, String> {
    let number = cursor.number(what)?;
    u32::try_from(number).ok().filter(|number| *number < u32::MAX).ok_or_else(|| format!("{what} cannot be {number}"))
}

fn numbers(cursor: &mut Cursor<'_>, what: &str) -> Result<Vec<u64>, String> {
    let mut numbers = vec![cursor.number(what)?];
    while cursor.eat(",") {
        numbers.push(cursor.number(what)?);
    }
    Ok(numbers)
}

fn peer(cursor: &mut Cursor<'_>, preposition: &str) -> Result<u64, String> {
    keyword(cursor, preposition)?;
    keyword(cursor, "rank")?;
    cursor.number("a rank")
}

fn reduce(cursor: &mut Cursor<'_>) -> Result<ReduceKind, String> {
    let name = cursor.word("`sum` or `max`")?;
    ReduceKind::from_name(name).ok_or_else(|| format!("expected `sum`, `max` or `logsumexp`, found `{name}`"))
}

fn slice(cursor: &mut Cursor<'_>) -> Result<Vec<(u64, u64)>, String> {
    cursor.expect("[")?;
    let mut slice = Vec::new();
    while !cursor.eat("]") {
        if !slice.is_empty() {
            cursor.expect(",")?;
        }
        let first = cursor.size("the first index")?;
        cursor.expect("+")?;
        slice.push((first, cursor.size("the length")?));
    }
    Ok(slice)
}

//! Printing a program.
//!
//! ```text
//! program rank 0 of 2 {
//!   arena device 4096
//!   group 0 = 0, 1
//!   $0: f32[4,4] device+0 parameter %1
//!   $1: f32[8,4] device+256 buffer
//!   input "x": i64[8,4] = [0+2,0+4] [2+2,0+4]          ; one part per microbatch: first+length
//!   slot parameter "w": f32[8,4] = $0 [0+4,0+4]
//!   slot state "w.m": f32[8,4] = $2 [0+4,0+4] from 0.0
//!   reading "loss" = $5
//!   section microbatch {
//!     0: $1 = all_gather $0 over 0 on communication from node3
//!     1: $3 = compute matmul $1, $2 {spec="mk,nk->mn"} scratch $4 on compute after 0 from node4
//!   }
//!   order prologue 0, microbatch 0, microbatch 1, epilogue 0
//! }
//! ```

use super::graph_print::op_text;
use super::{is_word, quoted};
use crate::entity::BufferId;
use crate::program::{Action, Instruction, Program, Section};
use std::fmt;

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "program rank {} of {} {{", self.rank, self.ranks)?;
        for (space, bytes) in &self.arenas {
            writeln!(f, "  arena {} {}", space.name(), bytes.0)?;
        }
        for (index, group) in self.groups.iter().enumerate() {
            writeln!(f, "  group {index} = {}", comma(group))?;
        }
        for (id, buffer) in &self.buffers {
            let value = buffer.value.map_or_else(String::new, |value| format!(" {value}"));
            let (space, category) = (buffer.space.name(), buffer.category.name());
            writeln!(f, "  {id}: {} {space}+{} {category}{value}", buffer.ty, buffer.offset)?;
        }
        for input in &self.inputs {
            let slices: Vec<_> = input.slices.iter().map(|slice| slice_text(slice)).collect();
            writeln!(f, "  input {}: {} = {}", quoted(&input.name), input.ty, slices.join(" "))?;
        }
        for slot in &self.slots {
            let (kind, from) = match &slot.cast_of {
                Some(parameter) => ("cast", format!(" of {}", quoted(parameter))),
                None if slot.is_parameter => ("parameter", String::new()),
                None => ("state", format!(" from {:?}", slot.init)),
            };
            let slice = slice_text(&slot.slice);
            writeln!(f, "  slot {kind} {}: {} = {} {slice}{from}", quoted(&slot.name), slot.ty, slot.buffer)?;
        }
        for reading in &self.readings {
            writeln!(f, "  reading {} = {}", quoted(&reading.name), reading.buffer)?;
        }
        for section in self.sections.values() {
            write_section(f, section)?;
        }
        let name = |run: &crate::program::Run| {
            let name = self.sections.get(run.section).map_or("?", |section| section.name.as_str());
            format!("{} {}", section_name(name), run.microbatch)
        };
        let order: Vec<_> = self.order.iter().map(name).collect();
        writeln!(f, "{}\n}}", format!("  order {}", order.join(", ")).trim_end())
    }
}

fn section_name(name: &str) -> String {
    if is_word(name) { name.to_string() } else { quoted(name) }
}

fn slice_text(slice: &[(u64, u64)]) -> String {
    let dims: Vec<_> = slice.iter().map(|(first, length)| format!("{first}+{length}")).collect();
    format!("[{}]", dims.join(","))
}

fn comma<T: ToString>(items: &[T]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn write_section(f: &mut fmt::Formatter<'_>, section: &Section) -> fmt::Result {
    writeln!(f, "  section {} {{", section_name(&section.name))?;
    for (index, instruction) in section.instructions.iter().enumerate() {
        writeln!(f, "    {index}: {instruction}")?;
    }
    writeln!(f, "  }}")
}

impl fmt::Display for Instruction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.results.is_empty() {
            write!(f, "{} = ", comma(&self.results))?;
        }
        f.write_str(&action_text(&self.action, &self.operands))?;
        self.scratch.map_or(Ok(()), |scratch| write!(f, " scratch {scratch}"))?;
        write!(f, " on {}", self.stream.name())?;
        if !self.after.is_empty() {
            write!(f, " after {}", comma(&self.after))?;
        }
        self.source.map_or(Ok(()), |source| write!(f, " from {source}"))
    }
}

fn action_text(action: &Action, operands: &[BufferId]) -> String {
    let rest = match action {
        Action::Compute(op) => {
            let operands = operands.iter().map(ToString::to_string).collect();
            return format!("compute {}", op_text(op, operands));
        }
        Action::AllReduce { reduce, group } | Action::ReduceScatter { reduce, group } => {
            format!(" {} over {group}", reduce.name())
        }
        Action::AllGather { group } | Action::AllToAll { group } => format!(" over {group}"),
        Action::Send { peer } => format!(" to rank {peer}"),
        Action::Receive { peer } => format!(" from rank {peer}"),
        Action::Accumulate | Action::Copy => String::new(),
        Action::Feed { input } => format!(" input {input}"),
    };
    let space = if operands.is_empty() { "" } else { " " };
    format!("{}{space}{}{rest}", action.name(), comma(operands))
}

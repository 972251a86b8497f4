//! Where a measured step went: by kind and by operation, each beside the device's ceiling.

use serde::Serialize;
use shardc_ir::ops::{Op, OpDef};
use shardc_ir::program::{Action, Instruction, Program, Stream};
use shardc_ir::{Seconds, TensorType};
use shardc_passes::cluster::Profile as DeviceProfile;
use shardc_passes::cost::{is_product, peak};
use shardc_runtime::Span;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

/// What a moment of a step was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Matrix products and convolutions: bound by the matrix units.
    Matmul,
    /// Attention and its gradient.
    Attention,
    /// Everything else that computes: bound by memory.
    Memory,
    /// Collectives and messages while nothing computes.
    Communication,
    /// Inputs from the host, and other copies from and to it, while nothing computes or communicates.
    Feed,
    /// Nothing at all.
    Idle,
}

impl Kind {
    fn of(instruction: &Instruction) -> Self {
        let is_link = matches!(instruction.stream, Stream::HostToDevice | Stream::DeviceToHost | Stream::Disk);
        match &instruction.action {
            Action::Compute(Op::Attention(_) | Op::AttentionGrad(_)) => Self::Attention,
            Action::Compute(op) if is_product(op) => Self::Matmul,
            Action::Feed { .. } => Self::Feed,
            Action::Copy if is_link => Self::Feed,
            Action::Compute(_) | Action::Accumulate | Action::Copy => Self::Memory,
            _ => Self::Communication,
        }
    }

    fn text(self) -> &'static str {
        match self {
            Self::Matmul => "matrix products, convolutions",
            Self::Attention => "attention",
            Self::Memory => "bound by memory",
            Self::Communication => "exposed communication",
            Self::Feed => "exposed inputs from the host",
            Self::Idle => "idle",
        }
    }
}

/// The time that one group of instructions took.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Row {
    /// Instructions that ran.
    pub count: u64,
    /// Seconds together.
    pub seconds: f64,
    /// Seconds at the device's ceiling: its peak arithmetic rate, or its memory bandwidth.
    pub ceiling: f64,
}

/// Where one rank's measured step went.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Profile {
    /// From the first instruction's start to the last one's end, in seconds.
    pub step: f64,
    /// By kind. A moment at which several kinds run counts as the first of them, in the order of [`Kind`], so the
    /// seconds add up to the step.
    pub kinds: BTreeMap<Kind, Row>,
    /// By operation and the types of its operands, the longest first.
    pub operations: Vec<(String, Row)>,
}

impl Profile {
    /// The profile of the rank that runs `program`.
    pub fn new(program: &Program, spans: &[Span], device: &DeviceProfile) -> Self {
        let spans: Vec<&Span> = spans.iter().filter(|span| span.rank == program.rank).collect();
        let mut kinds: BTreeMap<Kind, Row> = BTreeMap::new();
        let mut operations: BTreeMap<String, Row> = BTreeMap::new();
        let mut intervals = Vec::new();
        for span in &spans {
            let instruction = &program.sections[span.section].instructions[span.instruction];
            let (seconds, ceiling) = (span.end - span.start, ceiling(program, instruction, device));
            let kind = Kind::of(instruction);
            intervals.push((kind, (span.start, span.end)));
            for row in [kinds.entry(kind).or_default(), operations.entry(text(program, instruction)).or_default()] {
                row.count += 1;
                row.seconds += seconds;
                row.ceiling += ceiling;
            }
        }
        let start = spans.iter().map(|span| span.start).fold(f64::INFINITY, f64::min);
        let end = spans.iter().map(|span| span.end).fold(0.0, f64::max);
        let step = (end - start).max(0.0);
        for (kind, seconds) in shares(&intervals, step) {
            kinds.entry(kind).or_default().seconds = seconds;
        }
        let mut operations: Vec<_> = operations.into_iter().collect();
        operations.sort_by(|(_, one), (_, other)| other.seconds.total_cmp(&one.seconds));
        Self { step, kinds, operations }
    }

    /// A table of kinds, and one of the `most` longest operations.
    pub fn text(&self, most: usize) -> String {
        let mut text = String::new();
        let mut row = |name: &str, row: &Row| {
            let share = 100.0 * row.seconds / self.step.max(f64::MIN_POSITIVE);
            let reached = match row.ceiling > 0.0 && row.seconds > 0.0 {
                true => format!("{:.0}%", 100.0 * row.ceiling / row.seconds),
                false => String::new(),
            };
            let seconds = Seconds(row.seconds).to_string();
            // Writing to a string does not fail.
            let _ = writeln!(text, "{seconds:>12} {share:>6.1}% {:>6} {reached:>8}  {name}", row.count);
        };
        row("the measured step", &Row { count: 0, seconds: self.step, ceiling: 0.0 });
        self.kinds.iter().for_each(|(kind, each)| row(kind.text(), each));
        self.operations.iter().take(most).for_each(|(name, each)| row(name, each));
        format!("{:>12} {:>7} {:>6} {:>8}\n{text}", "time", "share", "count", "of peak")
    }
}

/// The seconds of each kind, while none before it runs, and what is left of the step: they add up to it.
fn shares(intervals: &[(Kind, (f64, f64))], step: f64) -> BTreeMap<Kind, f64> {
    let kinds: BTreeSet<Kind> = intervals.iter().map(|(kind, _)| *kind).collect();
    let (mut shares, mut covered) = (BTreeMap::new(), 0.0);
    for kind in kinds {
        let up_to = intervals.iter().filter(|(other, _)| *other <= kind).map(|(_, interval)| *interval);
        let reached = union(up_to.collect());
        shares.insert(kind, reached - covered);
        covered = reached;
    }
    shares.insert(Kind::Idle, step - covered);
    shares
}

/// The seconds that intervals cover.
fn union(mut intervals: Vec<(f64, f64)>) -> f64 {
    intervals.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (mut covered, mut reached) = (0.0, f64::NEG_INFINITY);
    for (start, end) in intervals {
        covered += (end - start.max(reached)).max(0.0);
        reached = reached.max(end);
    }
    covered
}

/// The least time that the instruction could take on the device: its arithmetic at the peak of its operands' type, or
/// its bytes at the memory's bandwidth. Collectives have none here.
fn ceiling(program: &Program, instruction: &Instruction, device: &DeviceProfile) -> f64 {
    let types = |ids: &[shardc_ir::BufferId]| -> Vec<TensorType> {
        ids.iter().map(|id| program.buffers[*id].ty.clone()).collect()
    };
    let (operands, results) = (types(&instruction.operands), types(&instruction.results));
    let moved = |bytes: u64| bytes as f64 / device.memory_bandwidth.value;
    match &instruction.action {
        Action::Compute(op) => {
            let traffic = moved(op.bytes(&operands, &results).0);
            let peak = operands.first().map_or(device.peak_f32.value, |operand| peak(operand.dtype, device));
            match Kind::of(instruction) {
                Kind::Matmul | Kind::Attention => traffic.max(op.flops(&operands, &results).0 / peak),
                _ => traffic,
            }
        }
        Action::Accumulate => {
            moved(operands.iter().chain(&results).chain(&results).map(TensorType::bytes).map(|bytes| bytes.0).sum())
        }
        Action::Copy => moved(operands.iter().chain(&results).map(TensorType::bytes).map(|bytes| bytes.0).sum()),
        _ => 0.0,
    }
}

/// The instruction with its local types, without where it lies: equal ones are one row.
fn text(program: &Program, instruction: &Instruction) -> String {
    let spec = match &instruction.action {
        Action::Compute(Op::Matmul(matmul)) => Some(&matmul.spec),
        Action::Compute(Op::ScaledMatmul(matmul)) => Some(&matmul.spec),
        Action::Compute(Op::Fused(region)) if region.is_products() => match &region.steps[0].op {
            Op::Matmul(matmul) => Some(&matmul.spec),
            _ => None,
        },
        _ => None,
    };
    let name = instruction.action.title() + &spec.map_or_else(String::new, |spec| format!(" {spec}"));
    let types = instruction.operands.iter().take(4).map(|id| program.buffers[*id].ty.to_string());
    format!("{name}({})", types.collect::<Vec<_>>().join(", "))
}

/// The spans in Chrome's trace event format, which Perfetto opens: a process per rank, a thread per stream.
pub fn trace_events(programs: &[Program], spans: &[Span]) -> serde_json::Value {
    let mut events = Vec::new();
    for program in programs {
        events.push(serde_json::json!({
            "ph": "M", "name": "process_name", "pid": program.rank,
            "args": {"name": format!("rank {}, measured", program.rank)},
        }));
        for (index, stream) in Stream::ALL.into_iter().enumerate() {
            events.push(serde_json::json!({
                "ph": "M", "name": "thread_name", "pid": program.rank, "tid": index, "args": {"name": stream.name()},
            }));
        }
        for span in spans.iter().filter(|span| span.rank == program.rank) {
            let section = &program.sections[span.section];
            let instruction = &section.instructions[span.instruction];
            let name = text(program, instruction);
            events.push(serde_json::json!({
                "ph": "X",
                "name": name.split('(').next(),
                "cat": Kind::of(instruction),
                "pid": program.rank,
                "tid": Stream::ALL.iter().position(|stream| *stream == span.stream),
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {
                    "instruction": format!("{}.{}", section.name, span.instruction),
                    "microbatch": span.microbatch,
                    "operands": name,
                },
            }));
        }
    }
    serde_json::json!({ "displayTimeUnit": "ms", "traceEvents": events })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_intervals_count_once() {
        assert_eq!(union(vec![(2.0, 3.0), (0.0, 1.0), (0.5, 1.5), (0.6, 0.7)]), 2.5);
        assert_eq!(union(Vec::new()), 0.0);
    }

    #[test]
    fn kinds_add_up_to_the_step() {
        use Kind::{Attention, Communication, Feed, Idle, Matmul};
        let at = |kind, start, end| (kind, (start, end));
        let intervals = [
            // Beside all else, and then alone.
            at(Feed, 0.0, 5.0),
            at(Matmul, 0.0, 2.0),
            at(Attention, 2.0, 3.0),
            at(Communication, 1.0, 4.0),
            at(Communication, 6.0, 6.5),
            at(Matmul, 7.0, 8.0),
        ];
        let found = shares(&intervals, 8.0);
        assert_eq!(found, [(Matmul, 3.0), (Attention, 1.0), (Communication, 1.5), (Feed, 1.0), (Idle, 1.5)].into());
        assert_eq!(found.values().sum::<f64>(), 8.0);
        assert_eq!(shares(&[], 0.0), [(Idle, 0.0)].into());
    }

    #[test]
    fn inputs_are_no_communication() {
        let text = "program rank 0 of 1 {\n  arena device 512\n  $0: i64[4] device+0 buffer\n  input \"x\": i64[4] = \
                    [0+4]\n  section main {\n    0: $0 = feed input 0 on host_to_device\n  }\n  order main 0\n}";
        let program: Program = text.parse().unwrap();
        assert_eq!(program.instructions().map(Kind::of).collect::<Vec<_>>(), [Kind::Feed]);
    }
}

//! Executes the programs of all ranks in one thread, over real arenas, one instruction of all ranks
//! at a time. Streams are interleaved at random within what their order and `after` allow, so a wait
//! that is missing shows as a wrong result; and so does scratch memory that is not an instruction's own,
//! since every instruction spoils its own.

use shardc_ir::program::{Action, Section, Stream};
use shardc_ir::{BufferId, DType, HostTensor, Program, ReduceKind};
use shardc_runtime::cpu::interpret::compute_op;
use std::collections::{BTreeMap, VecDeque};

type Tensors = BTreeMap<String, HostTensor>;

pub struct Lockstep<'a> {
    programs: &'a [Program],
    arenas: Vec<Vec<u8>>,
    seed: u64,
}

fn f32s(tensor: &HostTensor) -> Vec<f32> {
    assert_eq!(tensor.ty.dtype, DType::F32);
    tensor.bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])).collect()
}

impl<'a> Lockstep<'a> {
    pub fn new(programs: &'a [Program], seed: u64) -> Self {
        // Garbage in the arenas shows reads of what was never written.
        let arenas = programs.iter().map(|program| vec![0xc3; program.arenas[0].1.0 as usize]).collect();
        Self { programs, arenas, seed }
    }

    fn random(&mut self, below: usize) -> usize {
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.seed >> 33) as usize % below
    }

    fn read(&self, rank: usize, id: BufferId) -> HostTensor {
        let buffer = &self.programs[rank].buffers[id];
        let (start, length) = (buffer.offset as usize, buffer.ty.bytes().0 as usize);
        HostTensor { ty: buffer.ty.clone(), bytes: self.arenas[rank][start..start + length].to_vec() }
    }

    fn write(&mut self, rank: usize, id: BufferId, bytes: &[u8]) {
        let buffer = &self.programs[rank].buffers[id];
        assert_eq!(bytes.len() as u64, buffer.ty.bytes().0);
        let start = buffer.offset as usize;
        self.arenas[rank][start..start + bytes.len()].copy_from_slice(bytes);
    }

    /// Runs one step from whole leaves; gives the readings, and slots put together from their parts.
    pub fn step(&mut self, leaves: &Tensors) -> Tensors {
        for rank in 0..self.programs.len() {
            for slot in &self.programs[rank].slots {
                let whole = leaves.get(&slot.name).cloned().unwrap_or_else(|| HostTensor::zeros(slot.ty.clone()));
                let buffer = &self.programs[rank].buffers[slot.buffer].ty;
                self.write(rank, slot.buffer, &whole.part(&slot.slice).filled(buffer).bytes);
            }
        }
        let first = &self.programs[0];
        for run in &first.order {
            self.section(&first.sections[run.section], run.section, run.microbatch, leaves);
        }
        let mut outputs = Tensors::new();
        for rank in 0..self.programs.len() {
            for reading in &self.programs[rank].readings {
                let value = self.read(rank, reading.buffer);
                let known = outputs.entry(reading.name.clone()).or_insert_with(|| value.clone());
                assert_eq!(*known, value, "`{}` differs between ranks", reading.name);
            }
            for slot in &self.programs[rank].slots {
                let part = self.read(rank, slot.buffer).beginning(&slot.part());
                let whole = outputs.entry(slot.name.clone()).or_insert_with(|| HostTensor::zeros(slot.ty.clone()));
                whole.set_part(&slot.slice, &part);
            }
        }
        outputs
    }

    fn section(&mut self, section: &Section, id: shardc_ir::SectionId, microbatch: u64, leaves: &Tensors) {
        let count = section.instructions.len();
        let mut done = vec![false; count];
        let mut queues: BTreeMap<Stream, VecDeque<usize>> = BTreeMap::new();
        for (at, instruction) in section.instructions.iter().enumerate() {
            queues.entry(instruction.stream).or_default().push_back(at);
        }
        // One stream as far ahead as it may go, or another, or all mixed.
        let ahead = self.random(4);
        for _ in 0..count {
            let heads = queues.values().filter_map(|queue| queue.front().copied());
            let is_ready = |at: &usize| section.instructions[*at].after.iter().all(|other| done[*other]);
            let ready: Vec<usize> = heads.filter(is_ready).collect();
            let at = match ahead {
                0 => ready[0],
                1 => ready[ready.len() - 1],
                _ => ready[self.random(ready.len())],
            };
            self.instruction(id, at, microbatch, leaves);
            done[at] = true;
            queues.entry(section.instructions[at].stream).or_default().pop_front();
        }
    }

    fn instruction(&mut self, section: shardc_ir::SectionId, at: usize, microbatch: u64, leaves: &Tensors) {
        let ranks = self.programs.len();
        let of = |rank: usize| &self.programs[rank].sections[section].instructions[at];
        let operands: Vec<Vec<HostTensor>> =
            (0..ranks).map(|rank| of(rank).operands.iter().map(|id| self.read(rank, *id)).collect()).collect();
        for rank in 0..ranks {
            let (program, instruction) = (&self.programs[rank], of(rank).clone());
            assert_eq!(std::mem::discriminant(&of(0).action), std::mem::discriminant(&instruction.action));
            let types: Vec<_> = instruction.results.iter().map(|id| program.buffers[*id].ty.clone()).collect();
            let own = &operands[rank];
            let results: Vec<Vec<u8>> = match &instruction.action {
                Action::Compute(op) => {
                    let made = compute_op(op, own, &types).unwrap_or_else(|error| panic!("{error}"));
                    made.into_iter().map(|tensor| tensor.bytes).collect()
                }
                Action::Copy => own.iter().map(|tensor| tensor.bytes.clone()).collect(),
                Action::Accumulate if microbatch == 0 => own.iter().map(|tensor| tensor.bytes.clone()).collect(),
                Action::Accumulate => {
                    let total = self.read(rank, instruction.results[0]);
                    vec![combine(&[&total, &own[0]], ReduceKind::Sum)]
                }
                Action::Feed { input } => {
                    let feed = &program.inputs[*input];
                    vec![leaves[&feed.name].part(&feed.slices[microbatch as usize]).bytes]
                }
                collective => (0..own.len())
                    .map(|index| {
                        let terms = |group: usize| {
                            program.groups[group]
                                .iter()
                                .map(|peer| &operands[*peer as usize][index])
                                .collect::<Vec<_>>()
                        };
                        let position = |group: usize| {
                            program.groups[group].iter().position(|peer| *peer == rank as u64).expect("own group")
                        };
                        let cut = |bytes: &[u8], group: usize| {
                            let length = bytes.len() / program.groups[group].len();
                            bytes[position(group) * length..][..length].to_vec()
                        };
                        match collective {
                            Action::AllReduce { reduce, group } => combine(&terms(*group), *reduce),
                            Action::AllGather { group } => {
                                terms(*group).iter().flat_map(|tensor| tensor.bytes.clone()).collect()
                            }
                            Action::ReduceScatter { reduce, group } => cut(&combine(&terms(*group), *reduce), *group),
                            Action::AllToAll { group } => {
                                terms(*group).iter().flat_map(|tensor| cut(&tensor.bytes, *group)).collect()
                            }
                            other => panic!("{other:?} is not made yet"),
                        }
                    })
                    .collect(),
            };
            if let Some(scratch) = instruction.scratch {
                let bytes = program.buffers[scratch].ty.bytes().0 as usize;
                self.write(rank, scratch, &vec![0xc3; bytes]);
            }
            for (id, bytes) in instruction.results.iter().zip(results) {
                self.write(rank, *id, &bytes);
            }
        }
    }
}

fn combine(terms: &[&HostTensor], reduce: ReduceKind) -> Vec<u8> {
    if terms[0].ty.dtype == DType::I64 {
        assert_eq!(reduce, ReduceKind::Sum);
        let numbers = |term: &HostTensor| -> Vec<i64> {
            term.bytes.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()
        };
        let mut total = numbers(terms[0]);
        for term in &terms[1..] {
            total.iter_mut().zip(numbers(term)).for_each(|(sum, value)| *sum += value);
        }
        return total.iter().flat_map(|value| value.to_le_bytes()).collect();
    }
    let mut total = f32s(terms[0]);
    for term in &terms[1..] {
        for (sum, value) in total.iter_mut().zip(f32s(term)) {
            *sum = match reduce {
                ReduceKind::Sum => *sum + value,
                ReduceKind::Max => sum.max(value),
                ReduceKind::LogSumExp => panic!("log-sum-exp is made of a maximum and a sum"),
            };
        }
    }
    total.iter().flat_map(|value| value.to_le_bytes()).collect()
}

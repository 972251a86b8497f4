//! Sums: over microbatches, and those that a product, or the gradient of a table, makes by adding itself to a buffer.
//!
//! An accumulator begins as zeros, or with the first microbatch's term: it is what that microbatch leaves. In every
//! microbatch the term is added once: whole, by an accumulation, or product by product, each of which adds to what the ones
//! before it have made of the term. The sum is ready when the last microbatch's term is in it.

use super::arrangement::Arrangement;
use super::interpret::Interpreter;
use super::state::{Fact, Stage};
use crate::entity::{BufferId, EntityRef, ValueId};
use crate::mesh::AxisId;
use crate::ops::{BinaryKind, Op};
use crate::program::{Action, Instruction, Run};
use crate::sharding::ReduceKind;

impl Interpreter<'_> {
    /// `result += operand` in every microbatch makes a sum over the time axes whole.
    pub fn accumulate(&self, run: Run, instruction: &Instruction) -> Result<Fact, String> {
        let (operand, result) = (instruction.operands[0], instruction.results[0]);
        let over: Vec<AxisId> = self.time.iter().collect();
        let term = |fact: &&Fact| {
            let sum = over.iter().all(|axis| fact.arrangement.partial_over(*axis) == Some(ReduceKind::Sum));
            fact.stage == Stage::Ready && sum
        };
        let Some(fact) = self.contents[operand.index()].facts().iter().find(term) else {
            return Err(format!("accumulates {}, which is no term of a sum over the microbatches", self.held(operand)));
        };
        if run.microbatch > 0 {
            let arrangement = fact.arrangement.without_partial(&over);
            let before =
                Fact { value: fact.value, arrangement, stage: Stage::Accumulating(run.microbatch - 1), of: None };
            if !self.contents[result.index()].facts().contains(&before) {
                let before = before.text(self.plan);
                return Err(format!("adds {} to {}, not to {before}", self.held(operand), self.held(result)));
            }
        }
        let refuse = || "accumulates what is no term of a sum".to_string();
        self.added(run, fact.value, fact).ok_or_else(refuse)
    }

    /// The sum over no microbatch of a value.
    pub fn zeros(&mut self, value: ValueId) -> Fact {
        let over: Vec<AxisId> = self.time.iter().collect();
        let arrangement = self.kernels.made_as(value).without_partial(&over);
        Fact { value, arrangement, stage: Stage::Empty, of: None }
    }

    /// What a product makes that adds its operands from the given one on: a summand, a bias, or both. The
    /// graph may add either first.
    pub fn add_all(
        &mut self,
        run: Run,
        product: &Fact,
        instruction: &Instruction,
        from: usize,
    ) -> Result<Vec<Fact>, String> {
        let more = &instruction.operands[from..];
        let is_biased = matches!(&instruction.action, Action::Compute(Op::Matmul(op)) if op.bias);
        let made = match (more, is_biased) {
            ([summand], false) => return self.add_to(run, product, *summand),
            ([bias], true) => self.add_bias(product, *bias),
            ([summand, bias], true) => {
                let mut made = Vec::new();
                for fact in self.add_bias(product, *bias) {
                    made.extend(self.add_to(run, &fact, *summand).unwrap_or_default());
                }
                for fact in self.add_to(run, product, *summand).unwrap_or_default() {
                    made.extend(self.add_bias(&fact, *bias));
                }
                made
            }
            _ => Vec::new(),
        };
        match made.is_empty() {
            true => {
                let more: Vec<String> = more.iter().map(|buffer| self.held(*buffer)).collect();
                Err(format!("adds {} to {}, which is no sum of the graph", product.text(self.plan), more.join(" and ")))
            }
            false => Ok(made),
        }
    }

    /// The sums of the graph of a value and the copies of a vector along all dimensions but the last.
    fn add_bias(&mut self, sum: &Fact, bias: BufferId) -> Vec<Fact> {
        let mut made = Vec::new();
        for vector in self.contents[bias.index()].facts().to_vec() {
            for (reader, _) in self.kernels.users(vector.value).to_vec() {
                let node = self.plan.graph.node(reader);
                let copies = node.results[0];
                let last = self.plan.graph.ty(copies).rank().saturating_sub(1);
                let is_row = matches!(&node.op, Op::Broadcast(op) if op.dims == [last]);
                if !is_row || vector.stage != Stage::Ready || sum.stage != Stage::Ready {
                    continue;
                }
                let layouts = self.kernels.layouts(reader);
                if layouts.operands[0].arrangement == vector.arrangement {
                    let made_as = &layouts.results[0].arrangement;
                    made.extend(self.sums(sum, copies, |arrangement| arrangement == made_as));
                }
            }
        }
        made
    }

    /// A product that is added to a buffer: it takes the place of a sum of the graph, or of an
    /// accumulation over microbatches of the product or of such sums.
    fn add_to(&mut self, run: Run, product: &Fact, summand: BufferId) -> Result<Vec<Fact>, String> {
        let now = run.microbatch;
        let mut made = Vec::new();
        for fact in self.contents[summand.index()].facts().to_vec() {
            let begins = match fact.stage {
                Stage::Ready => {
                    made.extend(self.sums(product, fact.value, |arrangement| *arrangement == fact.arrangement));
                    continue;
                }
                Stage::Empty => now == 0,
                Stage::Accumulating(last) => last + 1 == now,
                // What the first microbatch has left is the sum over it.
                Stage::Stale(true) => (fact.of, now) == (Some(0), 1) && fact.arrangement == product.arrangement,
                _ => false,
            };
            if begins {
                made.extend(self.added(run, fact.value, product));
            } else if let Stage::Adding(microbatch, part) = fact.stage
                && microbatch == now
            {
                let over: Vec<AxisId> = self.time.iter().collect();
                let fits = |arrangement: &Arrangement| arrangement.without_partial(&over) == fact.arrangement;
                let sums = self.sums(product, part, fits);
                made.extend(sums.iter().filter_map(|sum| self.added(run, fact.value, sum)));
            }
        }
        match made.is_empty() {
            true => {
                Err(format!("adds {} to {}, which is no sum of the graph", product.text(self.plan), self.held(summand)))
            }
            false => Ok(made),
        }
    }

    /// The sums of the graph of a product and another value, which lies so that it `fits`.
    fn sums(&mut self, product: &Fact, other: ValueId, fits: impl Fn(&Arrangement) -> bool) -> Vec<Fact> {
        let mut sums = Vec::new();
        for (reader, index) in self.kernels.users(product.value).to_vec() {
            let node = self.plan.graph.node(reader);
            let is_sum = matches!(&node.op, Op::Binary(op) if op.kind == BinaryKind::Add);
            if !is_sum || node.operands[1 - index] != other {
                continue;
            }
            let layouts = self.kernels.layouts(reader);
            let own = layouts.operands[index].arrangement == product.arrangement;
            if own && fits(&layouts.operands[1 - index].arrangement) {
                sums.push(Fact::ready(node.results[0], layouts.results[0].arrangement.clone()));
            }
        }
        sums
    }

    /// The sum over the microbatches of `total`, of which the term of this one is `part` by now.
    fn added(&self, run: Run, total: ValueId, part: &Fact) -> Option<Fact> {
        let over: Vec<AxisId> = self.time.iter().collect();
        let is_term = over.iter().all(|axis| part.arrangement.partial_over(*axis) == Some(ReduceKind::Sum));
        let stage = match (part.value == total, run.microbatch + 1 == self.plan.mesh.microbatches()) {
            (false, _) => Stage::Adding(run.microbatch, part.value),
            (true, false) => Stage::Accumulating(run.microbatch),
            (true, true) => Stage::Ready,
        };
        is_term.then(|| Fact { value: total, arrangement: part.arrangement.without_partial(&over), stage, of: None })
    }
}

/// Whether an instruction fills its result with zeros.
pub(super) fn is_zero(instruction: &Instruction) -> bool {
    matches!(&instruction.action, Action::Compute(Op::Constant(constant)) if constant.value == 0.0)
}

//! What products make beside themselves: activations, their derivatives, and sums of an operand.

use super::interpret::Interpreter;
use super::state::{Fact, Stage};
use crate::entity::{BufferId, EntityRef};
use crate::ops::{Epilogue, Matmul, Op, ReduceOp};
use crate::program::Action;
use crate::program::{Instruction, Run};

/// The operands that every product has.
const PRODUCT: usize = 2;

impl Interpreter<'_> {
    /// What a product makes that goes on with what it has made: a node of the graph that reads the product
    /// alone, or the product and what the third operand holds.
    pub fn activate(
        &mut self,
        run: Run,
        epilogue: Epilogue,
        product: &Fact,
        instruction: &Instruction,
    ) -> Result<Vec<Vec<Fact>>, String> {
        let Some(function) = epilogue.function() else {
            return Ok(vec![vec![product.clone()], self.operand_sums(instruction)?]);
        };
        let (operands, results) = (&instruction.operands, instruction.results.len());
        let (before, at) = match (epilogue, operands.len() - PRODUCT) {
            (Epilogue::GeluTanh, 0) => (vec![product.clone()], None),
            (Epilogue::GeluTanh, _) => (self.add_all(run, product, instruction, PRODUCT)?, None),
            (Epilogue::GeluTanhGrad | Epilogue::Sums, _) => (vec![product.clone()], operands.get(PRODUCT).copied()),
        };
        let mut made = Vec::new();
        for fact in before.iter().filter(|fact| fact.stage == Stage::Ready) {
            for (reader, index) in self.kernels.users(fact.value).to_vec() {
                let node = self.plan.graph.node(reader);
                let is_it = match (&node.op, epilogue) {
                    (Op::Unary(op), Epilogue::GeluTanh) => op.kind == function,
                    (Op::UnaryGrad(op), Epilogue::GeluTanhGrad) => op.kind == function,
                    _ => false,
                };
                let layouts = self.kernels.layouts(reader);
                let holds = |buffer: BufferId| {
                    let wanted = layouts.operands.get(1).zip(node.operands.get(1));
                    wanted.is_some_and(|(layout, value)| self.holds(buffer, *value, &layout.arrangement))
                };
                if is_it && index == 0 && layouts.operands[0].arrangement == fact.arrangement && at.is_none_or(holds) {
                    made.push(Fact::ready(node.results[0], layouts.results[0].arrangement.clone()));
                }
            }
        }
        if made.is_empty() {
            let (name, product) = (function.name(), product.text(self.plan));
            let at = at.map_or(String::new(), |buffer| format!(" at {}", self.held(buffer)));
            return Err(format!("makes {name} or its derivative of {product}{at}, which the graph does not"));
        }
        let mut all = vec![made];
        if results == 2 {
            all.push(before);
        }
        Ok(all)
    }

    /// The nodes of the graph that sum what a product's second operand holds over what the product sums over.
    fn operand_sums(&mut self, instruction: &Instruction) -> Result<Vec<Fact>, String> {
        let Action::Compute(Op::Matmul(op)) = &instruction.action else { return Err("is no product".to_string()) };
        let op: &Matmul = op;
        let (dims, buffer) = (op.summed()?, instruction.operands[1]);
        let mut made = Vec::new();
        for fact in self.contents[buffer.index()].facts().to_vec() {
            for (reader, _) in self.kernels.users(fact.value).to_vec() {
                let node = self.plan.graph.node(reader);
                let is_it = matches!(&node.op, Op::Reduce(op) if op.kind == ReduceOp::Sum && op.dims == dims);
                let layouts = self.kernels.layouts(reader);
                if is_it && fact.stage == Stage::Ready && layouts.operands[0].arrangement == fact.arrangement {
                    made.push(Fact::ready(node.results[0], layouts.results[0].arrangement.clone()));
                }
            }
        }
        match made.is_empty() {
            true => Err(format!("sums {}, which the graph does not", self.held(buffer))),
            false => Ok(made),
        }
    }
}

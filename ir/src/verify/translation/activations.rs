//! What products make of themselves: activations and their derivatives.

use super::interpret::Interpreter;
use super::state::{Fact, Stage};
use crate::entity::BufferId;
use crate::ops::{Epilogue, Op};
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
        let function = epilogue.function();
        let (operands, results) = (&instruction.operands, instruction.results.len());
        let (before, at) = match (epilogue, operands.len() - PRODUCT) {
            (Epilogue::GeluTanh, 0) => (vec![product.clone()], None),
            (Epilogue::GeluTanh, _) => (self.add_all(run, product, instruction, PRODUCT)?, None),
            (Epilogue::GeluTanhGrad, _) => (vec![product.clone()], operands.get(PRODUCT).copied()),
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
}

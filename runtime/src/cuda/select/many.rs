//! One operation on several tensors, and sums of several tensors.

use super::{Arg, OP, RES, Select, Step, THREADS, lanes};
use crate::cuda::kernel::{Elem, Kernel, Pack};
use crate::cuda::kernels::many as kernels;
use crate::cuda::table::{Row, Table};
use shardc_ir::ops::{Adamw, Each, Op};
use shardc_ir::{DType, TensorType};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Terms of a sum that are on their way at a time.
const TERMS: usize = 4;

/// Elements of a sum, at the most, that have a block each.
const FEW: u64 = 32;

/// Vectors that a block works on: four per thread. With two, blocks end as soon as they are under way; with eight, the last
/// ones end late.
const CHUNK: u32 = 4 * THREADS;

/// An item of an instruction: which one, and its first operand and result.
#[derive(Clone, Copy)]
struct Item {
    operand: usize,
    result: usize,
    /// How many vectors its tensors have.
    vectors: u32,
}

impl Item {
    fn blocks(self) -> u32 {
        blocks(self.vectors)
    }
}

/// The blocks that so many vectors take.
fn blocks(vectors: u32) -> u32 {
    vectors.div_ceil(CHUNK).max(1)
}

/// So many vectors of [`cast_table`].
pub fn cast_row(from: Arg, to: Arg, vectors: u32) -> Row {
    Row { tensors: vec![from, to], numbers: vec![vectors], blocks: blocks(vectors) }
}

/// Copies rows of elements of one type to rows of another, in vectors of so many elements.
pub fn cast_table(types: [DType; 2], width: usize, rows: Vec<Row>) -> Table {
    let kernel = Kernel::new("cast_many", &types, width, THREADS, &(), |d| {
        let (x, y, table) = (d.input::<Pack<0>>(), d.output::<Pack<1>>(), d.input::<u32>());
        let (_, _) = (d.number(), d.number());
        kernels::cast_many::expand(d.scope(), x, y, table, CHUNK, THREADS);
    });
    let units = types.iter().map(|dtype| dtype.size() * width as u64).collect();
    let (buffers, reals) = (Vec::new(), Vec::new());
    Table { kernel: Arc::new(kernel), units, rows, buffers, reals, blocks: None }
}

impl Select<'_> {
    pub(super) fn each(&mut self, each: &Each) -> Result<(), String> {
        let (takes, makes) = (self.operands.len() / each.count, self.results.len() / each.count);
        // Tensors of one type and one width of vectors are one table.
        let mut kinds: BTreeMap<(Vec<DType>, usize), Vec<Item>> = BTreeMap::new();
        for index in 0..each.count {
            let (operand, result) = (index * takes, index * makes);
            let ty = |at: usize| -> &TensorType { &self.operands[operand + at] };
            let types: Vec<DType> = match &*each.op {
                Op::Adamw(_) if ty(2).dtype != ty(3).dtype => return Err("moments of two element types".to_string()),
                Op::Adamw(op) => (0..3).map(|at| ty(at).dtype).chain([op.cast.unwrap_or(ty(0).dtype)]).collect(),
                Op::Cast(_) => vec![ty(0).dtype, self.results[result].dtype],
                _ => vec![ty(0).dtype],
            };
            let elements = ty(0).elements();
            if elements >= 1 << 31 {
                return Err(format!("{} is too large to be one of several", ty(0)));
            }
            let width = lanes(&types, &[elements]);
            let item = Item { operand, result, vectors: (elements / width as u64) as u32 };
            kinds.entry((types, width)).or_default().push(item);
        }
        for ((types, width), items) in kinds {
            match &*each.op {
                Op::Adamw(op) => self.adamw_many(op, &types, width, &items),
                Op::SumSquares(_) => self.squares_many(types[0], width, &items),
                Op::Cast(_) if types.iter().all(|dtype| dtype.is_float()) => self.cast_many(&types, width, &items),
                other => return Err(format!("several {} at once", other.name())),
            }
        }
        Ok(())
    }

    fn table(&mut self, table: Table) {
        self.out.steps.push(Step::Table(Box::new(table)));
    }

    fn adamw_many(&mut self, op: &Adamw, types: &[DType], width: usize, items: &[Item]) {
        let casts = op.cast.is_some();
        let kernel = Kernel::new("adamw_many", types, width, THREADS, &casts, move |d| {
            let (p, g, m, v) = (d.input::<Pack<0>>(), d.input::<Pack<1>>(), d.input::<Pack<2>>(), d.input::<Pack<2>>());
            let (np, nm, nv) = (d.output::<Pack<0>>(), d.output::<Pack<2>>(), d.output::<Pack<2>>());
            let nc = d.output::<Pack<3>>();
            let (scale, rate, step) = (d.input::<f32>(), d.input::<f32>(), d.input::<f32>());
            let table = d.input::<u32>();
            let (l1, l2, r1, r2, eps, decay) = (d.real(), d.real(), d.real(), d.real(), d.real(), d.real());
            let (_, _) = (d.number(), d.number());
            let scope = d.scope();
            kernels::adamw_many::expand(
                scope, p, g, m, v, np, nm, nv, nc, scale, rate, step, table, l1, l2, r1, r2, eps, decay, casts, CHUNK,
                THREADS,
            );
        });
        let row = |item: &Item| {
            let operand = |at: usize| OP(item.operand + at);
            // Without a cast, the new parameter stands for it.
            let results = [0, 1, 2, if casts { 3 } else { 0 }].map(|at| RES(item.result + at));
            Row {
                tensors: (0..4).map(operand).chain(results).chain((4..7).map(operand)).collect(),
                numbers: vec![item.vectors],
                blocks: item.blocks(),
            }
        };
        let bytes = |index: usize| types[index].size() * width as u64;
        let units = [0, 1, 2, 2, 0, 2, 2, 3].map(bytes).into_iter().chain([4; 3]).collect();
        let reals = super::elementwise::adamw_reals(op);
        self.table(Table {
            kernel: Arc::new(kernel),
            units,
            rows: items.iter().map(row).collect(),
            buffers: Vec::new(),
            reals: reals.to_vec(),
            blocks: None,
        });
    }

    fn cast_many(&mut self, types: &[DType], width: usize, items: &[Item]) {
        let row = |item: &Item| cast_row(OP(item.operand), RES(item.result), item.vectors);
        self.table(cast_table([types[0], types[1]], width, items.iter().map(row).collect()));
    }

    fn squares_many(&mut self, dtype: DType, width: usize, items: &[Item]) {
        let blocks: u32 = items.iter().map(|item| item.blocks()).sum();
        let partial = self.scratch(u64::from(blocks) * 4);
        let chunks = Kernel::new("squares_many", &[dtype], width, THREADS, &(), |d| {
            let (x, partial, table) = (d.input::<Pack<0>>(), d.output::<f32>(), d.input::<u32>());
            let (_, _) = (d.number(), d.number());
            kernels::squares_many::expand(d.scope(), x, partial, table, CHUNK, THREADS);
        });
        let sums = Kernel::new("sums_many", &[DType::F32], 1, THREADS, &(), |d| {
            let (y, partial, table) = (d.output::<Elem<0>>(), d.input::<f32>(), d.input::<u32>());
            let (_, _) = (d.number(), d.number());
            kernels::sums_many::expand(d.scope(), y, partial, table, THREADS);
        });
        let (mut rows, mut ends, mut first) = (Vec::new(), Vec::new(), 0);
        for item in items {
            let blocks = item.blocks();
            let (tensors, numbers) = (vec![OP(item.operand)], vec![item.vectors, first]);
            rows.push(Row { tensors, numbers, blocks });
            ends.push(Row { tensors: vec![RES(item.result)], numbers: vec![blocks, first], blocks: 1 });
            first += blocks;
        }
        for (kernel, unit, rows) in [(chunks, dtype.size() * width as u64, rows), (sums, 4, ends)] {
            let (kernel, units) = (Arc::new(kernel), vec![unit]);
            let (buffers, reals) = (vec![partial], Vec::new());
            self.table(Table { kernel, units, rows, buffers, reals, blocks: None });
        }
    }

    pub(super) fn total(&mut self) -> Result<(), String> {
        let ty = self.results[0].clone();
        if ty.elements() >= 1 << 31 {
            return Err(format!("{ty} is too large for a sum of several"));
        }
        let (elements, count) = (ty.elements(), self.operands.len());
        let is_few = elements <= FEW && count > TERMS;
        let width = if is_few { 1 } else { lanes(&[ty.dtype], &[elements]) };
        let n = (elements / width as u64) as u32;
        let terms = TERMS.min(count) as u32;
        let kernel = if is_few {
            Kernel::new("total_of_few", &[ty.dtype], width, THREADS, &(), |d| {
                let (x, y, table) = (d.input::<Elem<0>>(), d.output::<Elem<0>>(), d.input::<u32>());
                let (rows, earlier) = (d.number(), d.number());
                kernels::total_of_few::expand(d.scope(), x, y, table, rows, earlier, THREADS);
            })
        } else {
            Kernel::new("total", &[ty.dtype], width, THREADS, &(n, terms), move |d| {
                let (x, y, table) = (d.input::<Pack<0>>(), d.output::<Pack<0>>(), d.input::<u32>());
                let (rows, earlier) = (d.number(), d.number());
                kernels::total::expand(d.scope(), x, y, table, rows, earlier, n, terms);
            })
        };
        let row = |index: usize| Row { tensors: vec![OP(index)], numbers: Vec::new(), blocks: 0 };
        self.table(Table {
            kernel: Arc::new(kernel),
            units: vec![ty.dtype.size() * width as u64],
            rows: (0..count).map(row).collect(),
            buffers: vec![RES(0)],
            reals: Vec::new(),
            blocks: Some(if is_few { n } else { n.div_ceil(THREADS) }),
        });
        Ok(())
    }
}

//! Attention: a fused kernel where the types allow it, and CubeCL's for the rest.
//!
//! The fused kernel is cuDNN's. The others serve f32, and where the library is missing.

use super::cut::{Cut, MOST_BLOCKS};
use super::{Arg, Engine, Fused, OP, RES, Select, Step, dense, lanes, row_threads};
use crate::cuda::cudnn::{self, attention::Attention};
use crate::cuda::kernel::{Elem, Kernel, Pack};
use crate::cuda::kernels::attention::{self as kernels, Tiling, attention_keys_grad, attention_queries_grad};
use shardc_ir::DType;
use shardc_ir::ops::{Attention as Forward, AttentionGrad};

/// Bytes of shared memory that a block may have on every GPU since 2020.
const SHARED: usize = 96 << 10;

/// Where the derivative's buffers hold the gradient of the queries, and keys, values and their gradients.
const GRAD_QUERIES: usize = 6;
const GRAD_KEYS: [usize; 4] = [2, 3, 7, 8];

/// The largest tiles that fit.
fn tiling(attention: &Attention, bytes: impl Fn(&Tiling) -> usize) -> Result<Tiling, String> {
    let Attention { d, e, causal, dtype, .. } = *attention;
    let lanes = super::lanes(&[DType::F32, dtype], &[d, e]);
    let biased = attention.bias.is_some();
    let of = |side| Tiling { side, lanes, d: d as usize, e: e as usize, causal, biased };
    let fits = [16, 8, 4, 2].map(of).into_iter().find(|tiling| bytes(tiling) <= SHARED);
    fits.ok_or_else(|| format!("no block has the shared memory for heads of {d} and {e} elements"))
}

/// The operand of this index, which is the bias; any other where there is none, since nothing of it is read then.
fn bias(attention: &Attention, index: usize) -> Arg {
    if attention.bias.is_some() { OP(index) } else { OP(0) }
}

impl Select<'_> {
    pub(super) fn attention(&mut self, op: &Forward) -> Result<(), String> {
        let [q, k, v] = [0, 1, 2].map(|index: usize| &self.operands[index]);
        let attention = Attention::new(false, [q, k, v], op.causal, op.scale).biased(self.operands.get(3));
        let attention = attention.led(op.mask())?;
        self.attention_by_tiles(&attention)?;
        self.fuse(attention, vec![OP(0), OP(1), OP(2), RES(0), RES(1)], OP(3));
        Ok(())
    }

    pub(super) fn attention_grad(&mut self, op: &AttentionGrad) -> Result<(), String> {
        let [q, k, v] = [1, 2, 3].map(|index: usize| &self.operands[index]);
        let attention = Attention::new(true, [q, k, v], op.causal, op.scale);
        let attention = attention.biased(self.operands.get(6)).deterministic(op.deterministic).led(op.mask())?;
        self.attention_grad_by_tiles(&attention)?;
        let buffers = vec![OP(0), OP(1), OP(2), OP(3), OP(4), OP(5), RES(0), RES(1), RES(2)];
        self.fuse(attention, buffers, OP(6));
        if attention.t < attention.stored {
            // What no query sees has no gradient.
            let zero = |index: usize| Step::Zero { to: RES(index), bytes: self.results[index].bytes().0 };
            self.out.steps.splice(0..0, [zero(1), zero(2)]);
        }
        Ok(())
    }

    /// Prefers fused kernels to the steps chosen so far, if they take the types.
    fn fuse(&mut self, attention: Attention, mut buffers: Vec<Arg>, bias: Arg) {
        if attention.unfit().is_some() {
            return;
        }
        let Attention { d, kv, e, dtype, .. } = attention;
        let otherwise = std::mem::take(&mut self.out);
        let scratch = attention.scratch();
        if attention.backward {
            buffers.extend([scratch.dq, scratch.delta].map(|bytes| self.scratch(bytes)));
        }
        buffers.extend(attention.bias.map(|_| bias));
        let beside = (scratch.beside > 0).then(|| self.scratch(scratch.beside));
        let workspace = self.scratch(scratch.workspace);
        for (first, part) in attention.parts() {
            let mut buffers = buffers.clone();
            // The gradients of the queries of all but the first part are added to that.
            let sum = beside.filter(|_| first > 0);
            if let Some(beside) = sum {
                buffers[GRAD_QUERIES] = beside;
                for (place, width) in GRAD_KEYS.into_iter().zip([d, e, d, e]) {
                    buffers[place] = buffers[place].offset(first * kv * width * dtype.size());
                }
            }
            let kernel = cudnn::Kernel::Attention(part);
            self.out.steps.push(Step::Engine(Box::new(Engine { kernel, buffers, workspace })));
            if let Some(beside) = sum {
                self.add_elements([RES(0), beside, RES(0)], dtype);
            }
        }
        let steps = std::mem::take(&mut self.out.steps);
        self.out.steps.push(Step::Fused(Box::new(Fused { steps, otherwise: otherwise.steps })));
        // One or the other uses it.
        self.out.scratch = self.out.scratch.max(otherwise.scratch);
    }

    fn attention_by_tiles(&mut self, attention: &Attention) -> Result<(), String> {
        let tiling = tiling(attention, Tiling::forward_bytes)?;
        let kernel = self.tiled("attention", attention, tiling, move |d| {
            let (q, k, v) = (d.input::<Pack<0>>(), d.input::<Pack<0>>(), d.input::<Pack<0>>());
            let (o, lse) = (d.output::<Pack<0>>(), d.output::<f32>());
            let bias = d.input::<Elem<0>>();
            let (s, t, h, kv) = (d.number(), d.number(), d.number(), d.number());
            let (strides, scale) = (d.numbers(4), d.real());
            kernels::attention::expand(d.scope(), q, k, v, o, lse, bias, s, t, h, kv, strides, scale, tiling);
        })?;
        let buffers = vec![OP(0), OP(1), OP(2), RES(0), RES(1), bias(attention, 3)];
        self.launch_tiles(kernel, attention, buffers, [attention.s, attention.h], tiling);
        Ok(())
    }

    fn attention_grad_by_tiles(&mut self, attention: &Attention) -> Result<(), String> {
        let delta = self.scratch(attention.b * attention.h * attention.s * 4);
        self.attention_delta(attention, delta);
        let tiling = tiling(attention, Tiling::backward_bytes)?;
        let kernel = self.tiled("attention_queries_grad", attention, tiling, move |d| {
            let (cotangent, q) = (d.input::<Pack<0>>(), d.input::<Pack<0>>());
            let (k, v) = (d.input::<Pack<0>>(), d.input::<Pack<0>>());
            let (lse, delta, dq) = (d.input::<f32>(), d.input::<f32>(), d.output::<Pack<0>>());
            let (c, bias) = (cotangent, d.input::<Elem<0>>());
            let (s, t, h, kv) = (d.number(), d.number(), d.number(), d.number());
            let (n, scale, of) = (d.numbers(4), d.real(), tiling);
            attention_queries_grad::expand(d.scope(), c, q, k, v, lse, delta, dq, bias, s, t, h, kv, n, scale, of);
        })?;
        let buffers = vec![OP(0), OP(1), OP(2), OP(3), OP(5), delta, RES(0), bias(attention, 6)];
        self.launch_tiles(kernel, attention, buffers, [attention.s, attention.h], tiling);
        let kernel = self.tiled("attention_keys_grad", attention, tiling, move |d| {
            let (cotangent, q) = (d.input::<Pack<0>>(), d.input::<Pack<0>>());
            let (k, v) = (d.input::<Pack<0>>(), d.input::<Pack<0>>());
            let (lse, delta) = (d.input::<f32>(), d.input::<f32>());
            let (dk, dv) = (d.output::<Pack<0>>(), d.output::<Pack<0>>());
            let (c, x, bias) = (cotangent, delta, d.input::<Elem<0>>());
            let (s, t, h, kv) = (d.number(), d.number(), d.number(), d.number());
            let (n, scale, of) = (d.numbers(4), d.real(), tiling);
            attention_keys_grad::expand(d.scope(), c, q, k, v, lse, x, dk, dv, bias, s, t, h, kv, n, scale, of);
        })?;
        let buffers = vec![OP(0), OP(1), OP(2), OP(3), OP(5), delta, RES(1), RES(2), bias(attention, 6)];
        self.launch_tiles(kernel, attention, buffers, [attention.t, attention.kv], tiling);
        Ok(())
    }

    /// A kernel whose blocks own tiles.
    fn tiled(
        &self,
        name: &'static str,
        attention: &Attention,
        tiling: Tiling,
        body: impl Fn(&mut crate::cuda::kernel::Definition) + Send + Sync + 'static,
    ) -> Result<Kernel, String> {
        let Attention { s, h, d, t, kv, e, causal, .. } = *attention;
        if causal && s > t {
            return Err("causal attention with more queries than keys".to_string());
        }
        if h.max(kv) > MOST_BLOCKS {
            return Err(format!("a grid takes at most {MOST_BLOCKS} heads, and these are {h} over {kv}"));
        }
        let bias: u64 = attention.bias.map_or(0, |sizes| sizes[1..].iter().product());
        if bias.max((s * h).max(attention.stored * kv) * d.max(e)) >= 1 << 32 {
            return Err(format!("a kernel cannot see {s} queries and {t} keys of {h} heads of {d} and {e} elements"));
        }
        let threads = (tiling.side * tiling.side) as u32;
        Ok(Kernel::new(name, &[attention.dtype], tiling.lanes, threads, &tiling, body))
    }

    /// The bytes that a batch element has of a buffer; 0 of a bias that all share.
    fn bytes_of_element(&self, attention: &Attention, arg: Arg) -> u64 {
        let ty = match arg {
            Arg::Operand(index, _) => &self.operands[index],
            Arg::Result(index, _) => &self.results[index],
            // The sums of the rows.
            Arg::Scratch(_) => return attention.h * attention.s * DType::F32.size(),
        };
        if ty.shape[0] == attention.b { ty.bytes().0 / attention.b } else { 0 }
    }

    /// Launches one block per tile of `rows`, head and batch element.
    fn launch_tiles(
        &mut self,
        kernel: Kernel,
        attention: &Attention,
        buffers: Vec<Arg>,
        [rows, heads]: [u64; 2],
        tiling: Tiling,
    ) {
        let Attention { b, s, h, t, stored, kv, scale, .. } = *attention;
        let bias = attention.bias.unwrap_or([1; 4]);
        let steps = dense(&bias);
        let strides = [0, 1, 2].map(|dim| if bias[dim] == 1 { 0 } else { steps[dim] });
        let numbers = [s, t, h, kv].into_iter().chain(strides).chain([stored]).map(|number| number as u32).collect();
        let grid = [rows.div_ceil(tiling.rows() as u64), heads, 1].map(|blocks| blocks as u32);
        let buffers: Vec<_> = buffers.into_iter().map(|arg| (arg, self.bytes_of_element(attention, arg))).collect();
        let cut = Cut { grid, axis: 2, ..Cut::rows(b) };
        self.launch_cut(kernel, &buffers, numbers, vec![scale], cut);
    }

    /// The rows' `sum(do * o)`, which is what the softmax's derivative subtracts.
    fn attention_delta(&mut self, attention: &Attention, delta: Arg) {
        let Attention { b, s, h, e, dtype, .. } = *attention;
        let width = lanes(&[dtype], &[e]);
        let columns = e / width as u64;
        let threads = row_threads(columns);
        let kernel = Kernel::new("attention_delta", &[dtype], width, threads, &(), move |d| {
            let (cotangent, output, delta) = (d.input::<Pack<0>>(), d.input::<Pack<0>>(), d.output::<f32>());
            let (queries, heads, columns) = (d.number(), d.number(), d.number());
            let (q, h, c) = (queries, heads, columns);
            kernels::attention_delta::expand(d.scope(), cotangent, output, delta, q, h, c, threads);
        });
        let numbers = vec![s as u32, h as u32, columns as u32];
        let buffers = [OP(0), OP(4), delta].map(|arg| (arg, self.bytes_of_element(attention, arg)));
        let cut = Cut { per_unit: s * h, ..Cut::rows(b * s * h) };
        self.launch_cut(kernel, &buffers, numbers, Vec::new(), cut);
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Selection, select, select_within};
    use super::*;
    use shardc_ir::{Op, TensorType};

    /// `do`, `q`, `k`, `v`, `o`, `lse` and a bias that the batch shares.
    fn operands([b, s, h, d]: [u64; 4]) -> Vec<TensorType> {
        let (q, lse) = (TensorType::new(DType::F32, [b, s, h, d]), TensorType::new(DType::F32, [b, h, s]));
        let bias = TensorType::new(DType::F32, [1, h, s, s]);
        vec![q.clone(), q.clone(), q.clone(), q.clone(), q, lse, bias]
    }

    fn forward(sizes: [u64; 4]) -> Result<Selection, String> {
        let op = Op::from(Forward { causal: false, scale: 1.0, lead: None, reversed: None });
        let [_, q, k, v, o, lse, bias]: [TensorType; 7] = operands(sizes).try_into().unwrap();
        select(&op, &[q, k, v, bias], &[o, lse]).map_err(|error| error.to_string())
    }

    /// Of every launch its kernel, blocks along the batch, and the bytes by which its buffers begin later.
    fn launches(selection: &Selection) -> Vec<(&'static str, u32, Vec<u64>)> {
        let launch = |step: &Step| match step {
            Step::Launch(launch) => {
                let at = |arg: &Arg| match *arg {
                    Arg::Operand(_, at) | Arg::Result(_, at) | Arg::Scratch(at) => at,
                };
                let blocks = launch.grid[if launch.kernel.name == "attention_delta" { 0 } else { 2 }];
                (launch.kernel.name, blocks, launch.buffers.iter().map(at).collect())
            }
            other => panic!("{other:?}"),
        };
        selection.steps.iter().map(launch).collect()
    }

    #[test]
    fn a_batch_beyond_a_grid_is_cut() {
        let found = forward([70_000, 4, 2, 8]).unwrap();
        let (first, rest) = (65_472, 70_000 - 65_472);
        let [q, lse] = [4 * 2 * 8 * 4, 4 * 2 * 4].map(|bytes| bytes * first);
        let expect = [
            ("attention", first as u32, vec![0; 6]),
            // All see the same bias.
            ("attention", rest as u32, vec![q, q, q, q, lse, 0]),
        ];
        assert_eq!(launches(&found), expect);
        // Two elements are as much as a launch may work on.
        let all = operands([3, 4, 2, 8]);
        let grad = AttentionGrad { causal: false, scale: 1.0, lead: None, reversed: None, deterministic: false };
        let results = [all[1].clone(), all[2].clone(), all[3].clone()];
        let found = select_within(&grad.into(), &all, &results, 2 * 256).unwrap();
        let blocks: Vec<_> = launches(&found).into_iter().map(|(name, blocks, at)| (name, blocks, at[0])).collect();
        let of = |name, each| [(name, 2 * each, 0), (name, each, 512)];
        let names = [("attention_delta", 8), ("attention_queries_grad", 1), ("attention_keys_grad", 1)];
        assert_eq!(blocks, names.map(|(name, each)| of(name, each)).concat());
    }

    #[test]
    fn more_than_a_grid_takes_is_refused() {
        let error = forward([1, 4, 65_536, 8]).unwrap_err();
        assert!(error.contains("at most 65535 heads, and these are 65536 over 65536"), "{error}");
        let error = forward([1, 1 << 20, 64, 64]).unwrap_err();
        assert!(error.contains("1048576 queries"), "{error}");
        forward([1, 4, 2, 1024]).unwrap();
        let error = forward([1, 4, 2, 2048]).unwrap_err();
        assert!(error.contains("shared memory for heads of 2048 and 2048 elements"), "{error}");
    }
}

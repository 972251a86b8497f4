//! Random numbers.

use super::{OP, RES, Select, THREADS, dense};
use crate::cuda::kernel::{Elem, Kernel};
use crate::cuda::kernels::random as kernels;
use crate::cuda::kernels::random::{Law, Shard};
use shardc_ir::DType;
use shardc_ir::ops::{Distribution, Random};

impl Select<'_> {
    pub(super) fn random(&mut self, op: &Random) -> Result<(), String> {
        let ty = &self.results[0];
        let global = if op.global.is_empty() { &ty.shape } else { &op.global };
        if global.iter().product::<u64>() >= 1 << 32 {
            return Err("a global tensor of 2^32 elements or more".to_string());
        }
        let strides = dense(global);
        let first = op.start.iter().zip(&strides).map(|(start, stride)| start * stride).sum::<u64>() as u32;
        let narrow = |values: &[u64]| values.iter().map(|value| *value as u32).collect::<Vec<_>>();
        let shard = Shard { shape: narrow(&ty.shape), strides: narrow(&strides), first };
        let (law, reals) = match op.distribution {
            Distribution::Normal { mean, std } => (Law::Normal, [mean, std]),
            Distribution::Uniform { low, high } => (Law::Uniform, [low, high - low]),
            Distribution::Bernoulli { p } => (Law::Bernoulli, [(p * 16_777_216.0).ceil(), 0.0]),
        };
        let stepped = !self.operands.is_empty();
        let placed = self.operands.len() > 1;
        let integer = |index: usize| self.operands.get(index).map_or(DType::I32, |operand| operand.dtype);
        let types = [ty.dtype, integer(0), integer(1)];
        let parameters = (shard.clone(), law, stepped, placed);
        let kernel = Kernel::new("random", &types, 1, THREADS, &parameters, move |d| {
            let (step, places) = (d.input::<Elem<1>>(), d.input::<Elem<2>>());
            let (y, n) = (d.output::<Elem<0>>(), d.number());
            let (seed_low, seed_high, stream_low, stream_high) = (d.number(), d.number(), d.number(), d.number());
            let (p, q, shard) = (d.real(), d.real(), shard.clone());
            let scope = d.scope();
            kernels::random::expand(
                scope,
                step,
                places,
                y,
                n,
                seed_low,
                seed_high,
                stream_low,
                stream_high,
                p,
                q,
                shard,
                law,
                stepped,
                placed,
            );
        });
        let words = |value: u64| [value as u32, (value >> 32) as u32];
        let numbers = [vec![ty.elements() as u32], words(op.seed).to_vec(), words(op.stream).to_vec()].concat();
        // What the kernel does not read has some address in its place.
        let buffers = vec![if stepped { OP(0) } else { RES(0) }, if placed { OP(1) } else { RES(0) }, RES(0)];
        let reals = reals.map(|real| real as f32).to_vec();
        let blocks = ty.elements().div_ceil(u64::from(THREADS)) as u32;
        self.launch(kernel, buffers, numbers, reals, [blocks, 1, 1]);
        Ok(())
    }
}

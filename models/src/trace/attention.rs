//! Attention: Burn's `[b, h, s, d]` becomes our `[b, s, h, d]`, and repeated key/value heads become
//! grouped queries.

use super::build::Built;
use super::convert::Converter;
use burn::backend::ir::AttentionOpIr;
use shardc_ir::ops::{Attention, BinaryKind, CompareKind, Iota, Matmul, UnaryKind};
use shardc_ir::{DType, Op, TensorType, ValueId};

impl Converter<'_> {
    /// Converts scaled dot-product attention; with a mask, a bias or a soft cap it is written out.
    pub(super) fn attention(&mut self, op: &AttentionOpIr) -> Built {
        let (q, k, v) = (self.value(&op.query)?, self.value(&op.key)?, self.value(&op.value)?);
        let width = self.b.shape(q)[3] as f64;
        let scale = op.options.scale.map_or(1.0 / width.sqrt(), |scale| scale.elem());
        if op.mask.is_some() || op.attn_bias.is_some() || op.options.softcap.is_some() {
            return self.attention_written_out(op, [q, k, v], scale);
        }
        let swap = [0, 2, 1, 3];
        let q = self.b.transpose(q, &swap)?;
        let (k, v) = (self.key_heads(k)?, self.key_heads(v)?);
        let o = self.b.emit(
            Attention { causal: op.options.is_causal, scale, lead: None, reversed: None },
            &[q, k, v],
            &[],
        )?;
        self.b.transpose(o, &swap)
    }

    /// Keys or values `[b, t, kv, d]` from Burn's `[b, h, t, d]`: without the copies, if each head
    /// was repeated for a group of queries.
    fn key_heads(&mut self, x: ValueId) -> Built {
        let swap = [0, 2, 1, 3];
        match self.repeated(x) {
            Some(heads) => self.b.transpose(heads, &swap),
            None => self.b.transpose(x, &swap),
        }
    }

    /// The `[b, kv, t, d]` of which a value is `reshape(broadcast([b, kv, 1, t, d] -> [b, kv, g, t, d]))`.
    fn repeated(&mut self, x: ValueId) -> Option<ValueId> {
        if !matches!(self.b.op(x), Op::Reshape(_)) {
            return None;
        }
        let copies = self.b.operand(x, 0);
        let (whole, wide) = (self.b.shape(x), self.b.shape(copies));
        if !matches!(self.b.op(copies), Op::Broadcast(_)) || wide.len() != 5 || whole.len() != 4 {
            return None;
        }
        let grouped = wide[0] == whole[0] && wide[1] * wide[2] == whole[1] && wide[3..] == whole[2..];
        let source = self.b.operand(copies, 0);
        let heads = [wide[0], wide[1], wide[3], wide[4]];
        let elements: u64 = heads.iter().product();
        if !grouped || self.b.ty(source).elements() != elements {
            return None;
        }
        self.b.reshape(source, &heads).ok()
    }

    fn attention_written_out(&mut self, op: &AttentionOpIr, qkv: [ValueId; 3], scale: f64) -> Built {
        let [q, k, v] = qkv;
        let scores = self.b.emit(Matmul::new("bhsd,bhtd->bhst"), &[q, k], &[])?;
        let mut scores = self.b.affine(scores, scale, 0.0)?;
        let ty = self.b.ty(scores);
        if let Some(cap) = op.options.softcap {
            let cap: f64 = cap.elem();
            let low = self.b.affine(scores, 1.0 / cap, 0.0)?;
            let bent = self.b.unary(UnaryKind::Tanh, low)?;
            scores = self.b.affine(bent, cap, 0.0)?;
        }
        let hidden = self.b.constant(f64::NEG_INFINITY, ty.clone())?;
        if let Some(mask) = &op.mask {
            let mask = self.value(mask)?;
            scores = self.b.select(mask, hidden, scores, &ty.shape)?;
        }
        if op.options.is_causal {
            let square = TensorType::new(DType::I64, [ty.shape[2], ty.shape[3]]);
            // The last query sees all keys, however many there are.
            let [queries, keys] = [square.shape[0], square.shape[1]];
            let start = keys.saturating_sub(queries);
            let row = self.b.emit(Iota { dim: 0, start }, &[], std::slice::from_ref(&square))?;
            let row = self.b.affine(row, 1.0, -(queries.saturating_sub(keys) as f64))?;
            let column = self.b.emit(Iota { dim: 1, start: 0 }, &[], &[square])?;
            let future = self.b.compare(CompareKind::Gt, column, row)?;
            scores = self.b.select(future, hidden, scores, &ty.shape)?;
        }
        if let Some(bias) = &op.attn_bias {
            let bias = self.value(bias)?;
            scores = self.b.binary(BinaryKind::Add, scores, bias)?;
        }
        let weights = self.softmax(scores, 3)?;
        self.b.emit(Matmul::new("bhst,bhte->bhse"), &[weights, v], &[])
    }
}

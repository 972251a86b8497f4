//! Tensor contraction of two operands, in Einstein notation.
//!
//! `mk,kn->mn` is a matrix product, `bsk,kn->bsn` a linear layer, `bsk,bsn->kn` the gradient of
//! its weight, `bhsd,bhtd->bhst` attention scores. Every index is in at least two of the three
//! tensors, once in each; its factor rule is the notation itself.

use super::{Arithmetic, Gradient, GradientError, OpDef, UnaryKind, arity, expect_float, expect_type, is_false};
use crate::factor::{Dims, FactorRule};
use crate::sharding::ReduceKind;
use crate::types::TensorType;
use crate::units::Flops;
use serde::{Deserialize, Serialize};

/// A contraction. The result may be declared with a wider element type than the operands', in
/// which the products are then summed.
///
/// Two more operands may follow, in this order: a summand of the result's type, and a bias, a vector
/// along the last dimension of the result. Lowering makes them of sums, so that a gradient is
/// accumulated where it lies and a bias costs no pass over memory. In the same way it makes an activation, or
/// the derivative of one, part of the product ([`Epilogue`]); such a product adds nothing but a bias.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matmul {
    /// The notation: one letter per index. The plain matrix product if it is not given.
    #[serde(default = "plain", skip_serializing_if = "is_plain")]
    pub spec: String,
    /// Whether the last operand is a bias.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bias: bool,
    /// What is done to the sum of the product and its bias.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epilogue: Option<Epilogue>,
}

/// What a product does to each element before it leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Epilogue {
    /// The result is the tanh form of GELU of the element. A second result, if it is declared, is the element.
    GeluTanh,
    /// The result is the element times the derivative of that function at the same place of a third operand,
    /// of the result's type. There is no bias.
    GeluTanhGrad,
}

impl Epilogue {
    /// The elementwise function that it is, or the derivative of.
    pub fn function(self) -> UnaryKind {
        match self {
            Self::GeluTanh | Self::GeluTanhGrad => UnaryKind::GeluTanh,
        }
    }
}

const PLAIN: &str = "mk,kn->mn";

fn plain() -> String {
    PLAIN.to_string()
}

fn is_plain(spec: &str) -> bool {
    spec == PLAIN
}

/// Which kind each index of a contraction is, in the order in which the tensors hold them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MatmulDims {
    /// In all three tensors.
    pub batch: Vec<char>,
    /// In the first operand and the result.
    pub m: Vec<char>,
    /// In the second operand and the result.
    pub n: Vec<char>,
    /// In both operands, summed.
    pub k: Vec<char>,
}

impl Matmul {
    /// A contraction of this notation.
    pub fn new(spec: impl Into<String>) -> Self {
        Self { spec: spec.into(), bias: false, epilogue: None }
    }

    /// The contraction of these [letters](Self::letters).
    pub fn of_letters(letters: [Vec<char>; 3]) -> Self {
        let [lhs, rhs, result] = letters.map(String::from_iter);
        Self::new(format!("{lhs},{rhs}->{result}"))
    }

    /// Which operand is the bias, of so many.
    pub fn bias(&self, operands: usize) -> Option<usize> {
        (self.bias && operands > 2).then_some(operands - 1)
    }

    /// The plain matrix product, `mk,kn->mn`.
    pub fn plain() -> Self {
        Self::new(PLAIN)
    }

    /// The letters of the first operand, the second operand and the result.
    pub fn letters(&self) -> Result<[Vec<char>; 3], String> {
        let wrong = || format!("`{}` is not of the form `mk,kn->mn`", self.spec);
        let (operands, result) = self.spec.split_once("->").ok_or_else(wrong)?;
        let (lhs, rhs) = operands.split_once(',').ok_or_else(wrong)?;
        let tensors = [lhs, rhs, result].map(|letters| letters.chars().collect::<Vec<char>>());
        for letters in &tensors {
            let mut sorted = letters.clone();
            sorted.sort_unstable();
            sorted.dedup();
            if sorted.len() != letters.len() || !sorted.iter().all(char::is_ascii_alphabetic) {
                return Err(wrong());
            }
        }
        for letter in tensors.iter().flatten() {
            if tensors.iter().filter(|tensor| tensor.contains(letter)).count() < 2 {
                return Err(format!("index `{letter}` of `{}` is in one tensor only", self.spec));
            }
        }
        Ok(tensors)
    }

    /// The kinds of the indices.
    pub fn dims(&self) -> Result<MatmulDims, String> {
        let [lhs, rhs, result] = self.letters()?;
        let mut dims = MatmulDims::default();
        for letter in &lhs {
            match (rhs.contains(letter), result.contains(letter)) {
                (true, true) => dims.batch.push(*letter),
                (true, false) => dims.k.push(*letter),
                _ => dims.m.push(*letter),
            }
        }
        dims.n = rhs.iter().filter(|letter| !lhs.contains(letter)).copied().collect();
        Ok(dims)
    }

    /// The size of every letter, from the operands.
    pub fn sizes(&self, operands: &[TensorType]) -> Result<Vec<(char, u64)>, String> {
        let letters = self.letters()?;
        let mut sizes: Vec<(char, u64)> = Vec::new();
        for (ty, letters) in operands[..operands.len().min(2)].iter().zip(&letters) {
            if ty.rank() != letters.len() {
                return Err(format!("`{}` does not fit operand {ty}", self.spec));
            }
            for (letter, size) in letters.iter().zip(&ty.shape) {
                match sizes.iter().find(|(known, _)| known == letter) {
                    Some((_, known)) if known != size => {
                        return Err(format!("index `{letter}` of `{}` is both {known} and {size}", self.spec));
                    }
                    Some(_) => {}
                    None => sizes.push((*letter, *size)),
                }
            }
        }
        Ok(sizes)
    }
}

pub(super) fn size_of(sizes: &[(char, u64)], letter: char) -> u64 {
    sizes.iter().find(|(known, _)| *known == letter).map_or(1, |(_, size)| *size)
}

impl OpDef for Matmul {
    fn infer(&self, operands: &[TensorType], declared: &[TensorType]) -> Result<Vec<TensorType>, String> {
        arity(&operands[..operands.len().min(2)], 2)?;
        expect_float(&operands[0])?;
        expect_float(&operands[1])?;
        let sizes = self.sizes(operands)?;
        let shape: Vec<u64> = self.letters()?[2].iter().map(|letter| size_of(&sizes, *letter)).collect();
        let result = TensorType::new(super::float_or(declared, 0, operands[0].dtype), shape);
        if !(2..=4).contains(&operands.len()) || operands.len() < 2 + usize::from(self.bias) {
            return Err(format!("takes 2 operands, a summand and a bias, not {} operands", operands.len()));
        }
        if let Some(addend) = self.addend(operands.len()) {
            expect_type("the summand", &operands[addend], &result)?;
        }
        if let Some(bias) = self.bias(operands.len()) {
            let last = result.shape.last().copied().ok_or("a number has no bias")?;
            expect_type("the bias", &operands[bias], &result.with_shape([last]))?;
        }
        if operands.len() == 4 && !self.bias {
            return Err("takes one summand, or a summand and a bias".to_string());
        }
        let more = operands.len() - 2 - usize::from(self.bias);
        match self.epilogue {
            None => Ok(vec![result]),
            Some(Epilogue::GeluTanh) if more == 0 => Ok(vec![result; declared.len().clamp(1, 2)]),
            Some(Epilogue::GeluTanhGrad) if more == 1 && !self.bias => {
                expect_type("where the derivative is taken", &operands[2], &result)?;
                Ok(vec![result])
            }
            Some(_) => Err("an activation takes a bias and no summand, its derivative one operand".to_string()),
        }
    }

    fn rule(&self, operands: &[TensorType], results: &[TensorType]) -> FactorRule {
        // The derivative is linear in what it is multiplied by, the activation in nothing.
        let derives = self.epilogue == Some(Epilogue::GeluTanhGrad);
        let activates = self.epilogue == Some(Epilogue::GeluTanh);
        let adds = operands.len() > 2 && !derives || activates;
        // Terms of the product need terms of what is added beside them.
        let beside = if derives { 2..2 } else { 2..operands.len() };
        let linear = [0, 1].map(|index| [index].into_iter().chain(beside.clone()).collect()).to_vec();
        let linear = if activates { Vec::new() } else { linear };
        let mut rule = FactorRule { linear, ..FactorRule::default() };
        let (Ok(letters), Ok(sizes)) = (self.letters(), self.sizes(operands)) else { return rule };
        for (letter, size) in &sizes {
            if letters[2].contains(letter) {
                rule.parallel(letter.to_string(), *size);
            } else if adds {
                rule.whole(letter.to_string(), *size);
            } else {
                rule.reduced(letter.to_string(), *size, 0, ReduceKind::Sum);
            }
        }
        let index = |letter: &char| sizes.iter().position(|(known, _)| known == letter).unwrap_or(0);
        let dims = |letters: &[char]| letters.iter().map(|letter| vec![index(letter)]).collect::<Dims>();
        rule.operands = letters[..2].iter().map(|letters| dims(letters)).collect();
        rule.operands.extend(self.addend(operands.len()).map(|_| dims(&letters[2])));
        rule.operands.extend(self.bias(operands.len()).map(|_| dims(&letters[2][letters[2].len() - 1..])));
        rule.operands.extend(derives.then(|| dims(&letters[2])));
        rule.results = vec![dims(&letters[2]); results.len()];
        rule
    }

    fn may_add(&self) -> bool {
        self.epilogue.is_none()
    }

    fn addend(&self, operands: usize) -> Option<usize> {
        (self.may_add() && operands > 2 + usize::from(self.bias)).then_some(2)
    }

    fn flops(&self, operands: &[TensorType], _results: &[TensorType]) -> Flops {
        let sizes = self.sizes(operands).unwrap_or_default();
        Flops(2.0 * sizes.iter().map(|(_, size)| *size as f64).product::<f64>())
    }
    fn gradient(&self, gradient: &mut Gradient<'_>) -> Result<(), GradientError> {
        if self.epilogue.is_some() {
            return Err(gradient.not_differentiable());
        }
        let dy = gradient.cotangent(0)?;
        let (a, b) = (gradient.operands[0], gradient.operands[1]);
        let Some((operands, result)) = self.spec.split_once("->") else { return Ok(()) };
        let Some((lhs, rhs)) = operands.split_once(',') else { return Ok(()) };
        let count = gradient.operands.len();
        if let Some(addend) = self.addend(count).filter(|addend| gradient.needed[*addend]) {
            gradient.set(addend, dy);
        }
        if let Some(bias) = self.bias(count).filter(|bias| gradient.needed[*bias]) {
            let (rank, dtype) = (gradient.graph.ty(dy).rank(), gradient.wanted_dtype(bias));
            let sum = gradient.sum(dy, (0..rank.saturating_sub(1)).collect(), dtype)?;
            gradient.set(bias, sum);
        }
        let swapped = [([dy, b], format!("{result},{rhs}->{lhs}")), ([a, dy], format!("{lhs},{result}->{rhs}"))];
        for (index, (pair, spec)) in swapped.into_iter().enumerate() {
            if gradient.needed[index] {
                // Products of 16-bit weights' gradients are summed, and kept, in 32 bits.
                let ty = gradient.operand_type(index).with_dtype(gradient.wanted_dtype(index));
                let part = gradient.add(Matmul::new(spec), &pair, &[ty])?;
                gradient.set(index, part);
            }
        }
        Ok(())
    }

    fn arithmetic(&self, _result: &TensorType) -> Arithmetic {
        Arithmetic::Narrow
    }
}

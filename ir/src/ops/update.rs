//! What is common to the updates of all optimizers.

use crate::types::DType;

/// What an update of one parameter reads and makes, in this order.
///
/// Operands: the parameter, its gradient, what the optimizer keeps of it from step to step (its state), and scalars.
/// Results: the new parameter, the new state, and the new parameter as [`cast`](Self::cast), if that names an element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Update {
    /// How many values the state is.
    pub states: usize,
    /// The element type in which the new parameter is made as well.
    pub cast: Option<DType>,
}

impl Update {
    /// The operand that is the parameter, and the result that replaces it.
    pub const PARAMETER: usize = 0;
    /// The operand that is the gradient.
    pub const GRADIENT: usize = 1;

    /// The operands that are stored from step to step.
    pub fn stored(self) -> impl Iterator<Item = usize> {
        (0..=self.states).filter_map(move |result| self.replaced(result))
    }

    /// The operand that a result replaces, if it does.
    pub fn replaced(self, result: usize) -> Option<usize> {
        match result {
            Self::PARAMETER => Some(Self::PARAMETER),
            // The gradient, which nothing replaces, lies before the state.
            result => (result <= self.states).then_some(result + 1),
        }
    }

    /// The result that is the cast, if there is one.
    pub fn cast_result(self) -> Option<usize> {
        self.cast.map(|_| self.states + 1)
    }
}

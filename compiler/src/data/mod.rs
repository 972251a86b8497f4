//! What a run trains on.
//!
//! Two kinds of sources, told apart by what the file is, not by a flag:
//!
//! * a *token stream* (a text file, or a token file of nanoGPT, llm.c or Megatron-LM): cut into
//!   samples of `seq` tokens, shuffled by a seed over their global indices ([`order`]);
//! * *exact batches*: a safetensors file of tensors `NAME.STEP`, used as they are.
//!
//! Labels are the input tokens themselves, as in Hugging Face: the model shifts inside.
//!
//! Invariants: which sample a step sees depends on the seed, the batch and the data alone, never
//! on the plan; a token that the vocabulary lacks is an error that names it, never an index out of
//! bounds in a kernel.

pub mod batches;
pub mod formats;
pub mod order;
pub mod tokens;

pub use crate::error::DataError;
use batches::ExactBatches;
use order::SampleOrder;
use shardc_ir::{DType, HostTensor, TensorType};
use shardc_models::zoo::Range;
use shardc_runtime::Feeds;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokens::{Tokens, Width};

/// How many tokens are checked against the vocabulary before the first step; the rest are checked
/// as they are read.
const CHECKED_AT_START: u64 = 1 << 26;

/// A source of global batches; see the [module](self).
pub enum Data {
    /// Samples of a token stream.
    Stream(TokenStream),
    /// Tensors fixed in advance.
    Exact(ExactBatches),
}

/// A token stream cut into shuffled samples.
pub struct TokenStream {
    path: PathBuf,
    /// What made the tokens of a text, if it did.
    tokenizer: Option<PathBuf>,
    tokens: Tokens,
    batch: u64,
    seq: u64,
    vocab: u64,
    order: SampleOrder,
}

impl Data {
    /// The batch and sequence length that the source fixes, if it does.
    pub fn shape(&self) -> Option<(u64, u64)> {
        match self {
            Self::Stream(_) => None,
            Self::Exact(batches) => batches.shape(),
        }
    }

    /// How many steps the source holds, if it does not go on for ever.
    pub fn steps(&self) -> Option<u64> {
        match self {
            Self::Stream(_) => None,
            Self::Exact(batches) => Some(batches.steps()),
        }
    }

    /// The batch of a step (from 0): one tensor per declared input, with global shapes.
    pub fn batch(&self, step: u64, inputs: &[(String, TensorType)]) -> Result<Feeds, DataError> {
        match self {
            Self::Stream(stream) => stream.batch(step, inputs),
            Self::Exact(batches) => batches.batch(step, inputs),
        }
    }

    /// Checks everything that can be checked before the first step: that every input can be fed,
    /// and that its integers are below what the model allows for an input of that name.
    pub fn check(
        &self,
        inputs: &[(String, TensorType)],
        range: &dyn Fn(&str) -> Option<Range>,
    ) -> Result<(), DataError> {
        match self {
            Self::Stream(stream) => {
                stream.names(inputs)?;
                stream.check_range(0, stream.tokens.len().min(CHECKED_AT_START))
            }
            Self::Exact(batches) => batches.check(inputs, range),
        }
    }
}

/// What a token stream needs to know to be cut into batches.
#[derive(Clone, Copy, Debug)]
pub struct StreamConfig {
    /// Sequences per step over all ranks.
    pub batch: u64,
    /// Tokens per sequence.
    pub seq: u64,
    /// The number of tokens the model knows; a token at or above it is an error.
    pub vocab: u64,
    /// Seeds the order of the samples.
    pub seed: u64,
}

/// Whether a path holds exact batches; such a file fixes the batch, a token stream does not.
pub fn is_exact(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "safetensors")
}

/// Opens exact batches.
pub fn open_batches(path: &Path) -> Result<Data, DataError> {
    Ok(Data::Exact(ExactBatches::open(path)?))
}

/// Opens a token stream; a text file is read as bytes, or by a `tokenizer.json`.
pub fn open_stream(path: &Path, tokenizer: Option<&Path>, config: StreamConfig) -> Result<Data, DataError> {
    let tokens = formats::open(path, tokenizer)?;
    if tokens.is_empty() {
        return Err(DataError::Empty { path: path.to_path_buf() });
    }
    let samples = tokens.len() / config.seq.max(1);
    if samples == 0 {
        return Err(DataError::TooShort { path: path.to_path_buf(), tokens: tokens.len(), seq: config.seq });
    }
    let StreamConfig { batch, seq, vocab, seed } = config;
    if tokens.width() == Some(Width::U16) && vocab > 1 << 16 {
        let path = path.display();
        tracing::warn!("{path}: tokens of 16 bits cannot be those from 65,536 on, and the model knows {vocab}");
    }
    let order = SampleOrder::new(samples, seed);
    let tokenizer = tokenizer.filter(|_| matches!(tokens, Tokens::Owned(_))).map(Path::to_path_buf);
    Ok(Data::Stream(TokenStream { path: path.to_path_buf(), tokenizer, tokens, batch, seq, vocab, order }))
}

impl TokenStream {
    fn batch(&self, step: u64, inputs: &[(String, TensorType)]) -> Result<Feeds, DataError> {
        let mut ids = Vec::with_capacity((self.batch * self.seq) as usize);
        for row in 0..self.batch {
            let start = self.order.sample(step * self.batch + row) * self.seq;
            self.check_range(start, start + self.seq)?;
            self.tokens.read(start, self.seq, &mut ids);
        }
        let feed = Arc::new(HostTensor::from_i64([self.batch, self.seq], &ids));
        Ok(self.names(inputs)?.into_iter().map(|name| (name, feed.clone())).collect())
    }

    /// The inputs to feed. All of them must be token inputs: the ids themselves, or the labels.
    fn names(&self, inputs: &[(String, TensorType)]) -> Result<Vec<String>, DataError> {
        let expected = TensorType::new(DType::I64, [self.batch, self.seq]);
        for (name, ty) in inputs {
            if !matches!(name.as_str(), "input_ids" | "labels") || *ty != expected {
                let (path, input, ty) = (self.path.clone(), name.clone(), ty.clone());
                return Err(DataError::NotTokens { path, input, ty, expected });
            }
        }
        Ok(inputs.iter().map(|(name, _)| name.clone()).collect())
    }

    fn check_range(&self, from: u64, to: u64) -> Result<(), DataError> {
        match self.tokens.find_foreign(from, to, self.vocab) {
            None => Ok(()),
            Some((position, token)) => {
                let (path, tokenizer, vocab) = (self.path.clone(), self.tokenizer.clone(), self.vocab);
                Err(DataError::BeyondVocabulary { path, tokenizer, token, position, vocab })
            }
        }
    }
}

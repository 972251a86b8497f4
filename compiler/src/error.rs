//! What can go wrong, and whose turn it is then.
//!
//! Every error names the value, the place and, in [`Error::fix`], what to do about it. The exit
//! code of the command line follows from the kind: 1 a run or a check failed, 2 wrong usage (a
//! wrong model, file, flag or request), 3 no plan fits. A bug of the compiler is a kind of its own.

use shardc_ir::TensorType;
use shardc_ir::text::PlanFileError;
use shardc_models::TraceError;
use shardc_models::hf::HfError;
use shardc_models::zoo::{Range, ZooError};
use shardc_passes::PassError;
use shardc_passes::cluster::ClusterError;
use shardc_passes::lower::LowerError;
use shardc_passes::search::PlanError;
use shardc_passes::simulate::SimulateError;
use shardc_runtime::RuntimeError;
use shardc_runtime::cuda::CudaError;
use shardc_runtime::launch::LaunchError;
use std::fmt;
use std::path::PathBuf;

/// What can be wrong with the data of a run.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// There is no token in it.
    #[error("{}: the file is empty", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// It is not what it should be.
    #[error("{}: {what}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The tokenizer cannot read or cannot be read.
    #[error("{}: not a usable tokenizer.json: {what}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// It does not hold one sequence.
    #[error("{}: {tokens} tokens are too few for one sequence of {seq}", path.display())]
    TooShort {
        /// The file.
        path: PathBuf,
        /// The number of its tokens.
        tokens: u64,
        /// The tokens of a sequence.
        seq: u64,
    },
    /// A token that the model does not know.
    #[error("{}: token {token} at position {position} is beyond the vocabulary of {vocab}", path.display())]
    BeyondVocabulary {
        /// The file.
        path: PathBuf,
        /// What made its tokens, if it is a text.
        tokenizer: Option<PathBuf>,
        /// The token.
        token: i64,
        /// Its index in the file.
        position: u64,
        /// The size of the vocabulary.
        vocab: u64,
    },
    /// A number of an exact batch that the model has no place for.
    #[error("{}: `{input}` holds {value} at position {position}; it must be {range}", path.display())]
    BeyondRange {
        /// The file.
        path: PathBuf,
        /// The tensor, with its step.
        input: String,
        /// The number.
        value: i64,
        /// Its index in the tensor.
        position: u64,
        /// What it may be.
        range: Range,
    },
    /// The model has an input that tokens cannot feed.
    #[error("{}: tokens cannot feed input `{input}` of type {ty}; they make {expected}", path.display())]
    NotTokens {
        /// The file.
        path: PathBuf,
        /// The input.
        input: String,
        /// Its type.
        ty: TensorType,
        /// What tokens make.
        expected: TensorType,
    },
    /// The batches lack an input.
    #[error("{}: no tensors for input `{input}`; it has {known}", path.display())]
    MissingInput {
        /// The file.
        path: PathBuf,
        /// The input.
        input: String,
        /// The names it has.
        known: String,
    },
    /// The batches have tensors that the model does not take.
    #[error("{}: it has tensors `{input}`, and the model takes {known} alone", path.display())]
    ForeignInput {
        /// The file.
        path: PathBuf,
        /// The name of the tensors.
        input: String,
        /// What the model takes.
        known: String,
    },
    /// A tensor of a batch has another type than the input.
    #[error("{}: `{input}` is {ty}, but the model takes {expected}", path.display())]
    WrongType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        input: String,
        /// Its type.
        ty: TensorType,
        /// What the model takes.
        expected: TensorType,
    },
    /// A step that the file does not hold.
    #[error("{}: it holds {steps} steps, from 0; step {step} is not one of them", path.display())]
    TooFewSteps {
        /// The file.
        path: PathBuf,
        /// The number of steps it holds.
        steps: u64,
        /// The step asked for.
        step: u64,
    },
}

impl DataError {
    /// What to do about it.
    pub fn fix(&self) -> String {
        match self {
            Self::Io { .. } => "check the path and its permissions".into(),
            Self::Empty { .. } => "give --data a file that holds text or tokens".into(),
            Self::Malformed { .. } => {
                "--data takes a text file, a token file (.bin of nanoGPT or llm.c, .bin/.idx of Megatron-LM) or batches \
                 (.safetensors with tensors NAME.STEP)"
                    .into()
            }
            Self::Tokenizer { .. } => {
                "--tokenizer takes the tokenizer.json of the model; without it, tokens are bytes".into()
            }
            Self::TooShort { tokens: 0 | 1, .. } => "give more data".into(),
            Self::TooShort { tokens, .. } => format!("give more data, or --seq {tokens} or less"),
            Self::BeyondVocabulary { tokenizer: Some(tokenizer), vocab, .. } => format!(
                "{} is of a larger vocabulary: give the model's own with --tokenizer, or a model that knows more than {vocab}",
                tokenizer.display()
            ),
            Self::BeyondVocabulary { .. } => {
                "tokenize the data with the model's own tokenizer (--tokenizer tokenizer.json for a text file)".into()
            }
            Self::BeyondRange { .. } => "number classes, users or items from 0".into(),
            Self::NotTokens { .. } => "give exact batches: a safetensors file with tensors NAME.STEP".into(),
            Self::MissingInput { input, .. } => format!("add tensors `{input}.0`, `{input}.1`, ... to the file"),
            Self::ForeignInput { input, .. } => {
                format!("leave `{input}` out of the file, if the step is what you want without (nothing is masked by it, say)")
            }
            Self::WrongType { .. } => "make the tensor of the type and shape that the model takes".into(),
            Self::TooFewSteps { steps, .. } => format!("ask for --steps {steps} or less"),
        }
    }
}

/// Everything that can end a command. As `main` prints it, it says what to do about it too.
#[derive(thiserror::Error)]
pub enum Error {
    /// The request makes no sense.
    #[error("{message}")]
    Request {
        /// The value, the place and what is wrong.
        message: String,
        /// What to do about it.
        fix: String,
    },
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The data is wrong.
    #[error(transparent)]
    Data(Box<DataError>),
    /// The plan file is wrong.
    #[error("{}: {source}", path.display())]
    PlanFile {
        /// The file.
        path: PathBuf,
        /// Why.
        source: PlanFileError,
    },
    /// The cluster is wrong.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// There is no such model, or its sizes make no sense.
    #[error(transparent)]
    Zoo(ZooError),
    /// A Hugging Face directory cannot be read or written.
    #[error(transparent)]
    Hf(HfError),
    /// The model cannot be traced.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A pass refuses the model or an option, or has a bug.
    #[error(transparent)]
    Pass(#[from] PassError),
    /// There is no plan.
    #[error(transparent)]
    Plan(Box<PlanError>),
    /// The plan cannot be lowered.
    #[error(transparent)]
    Lower(#[from] LowerError),
    /// The runtime failed.
    #[error(transparent)]
    Runtime(Box<RuntimeError>),
    /// The GPUs cannot be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The ranks, each a process, do not come together or one of them failed.
    #[error(transparent)]
    Launch(Box<LaunchError>),
    /// The numbers of a step are not finite.
    #[error("step {step}: loss {loss}, gradient norm {grad_norm}{}", first_text(.first.as_deref()))]
    NotFinite {
        /// The step, from 0.
        step: u64,
        /// Its loss.
        loss: f64,
        /// Its gradient norm.
        grad_norm: f64,
        /// The first tensor that is not finite: its rank, instruction and module.
        first: Option<String>,
    },
    /// A check found something.
    #[error("{0}")]
    Check(String),
    /// A bug of the compiler.
    #[error("internal error, please report it with the output of --dump-to: {0}")]
    Bug(String),
}

fn first_text(first: Option<&str>) -> String {
    first.map(|first| format!("; the first tensor that is not finite: {first}")).unwrap_or_default()
}

/// Whether there is no room left to write: a failed run, where other failures of files are the
/// request's.
fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{FileTooLarge, QuotaExceeded, StorageFull};
    matches!(error.kind(), FileTooLarge | QuotaExceeded | StorageFull)
}

/// The large ones are boxed, so that a result stays small.
macro_rules! boxed {
    ($($variant:ident($error:ty),)*) => {
        $(impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::$variant(Box::new(error))
            }
        })*
    };
}

boxed! {
    Data(DataError),
    Launch(LaunchError),
    Plan(PlanError),
    Runtime(RuntimeError),
}

impl From<HfError> for Error {
    fn from(error: HfError) -> Self {
        match error {
            HfError::Model(error) => error.into(),
            other => Self::Hf(other),
        }
    }
}

impl From<ZooError> for Error {
    fn from(error: ZooError) -> Self {
        match error {
            ZooError::Trace(error) => Self::Trace(error),
            other => Self::Zoo(other),
        }
    }
}

impl From<SimulateError> for Error {
    fn from(error: SimulateError) -> Self {
        let fix = match error {
            SimulateError::UnknownRank { .. } | SimulateError::Twice { .. } => {
                "--straggler takes RANK=FACTOR, with ranks from 0"
            }
            SimulateError::Factor { .. } => "1 is as planned, 2 takes twice as long",
            SimulateError::Ranks { .. } => "simulate it on the plan's own cluster, or on one of that many devices",
            SimulateError::Stuck { .. } => return Self::Check(error.to_string()),
        };
        Self::request(error.to_string(), fix)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        self.fix().map_or(Ok(()), |fix| write!(f, "\nhelp: {fix}"))
    }
}

impl Error {
    /// A request that makes no sense.
    pub fn request(message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self::Request { message: message.into(), fix: fix.into() }
    }

    /// The exit code of the command line.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Plan(error) => match **error {
                PlanError::Infeasible { .. } | PlanError::Host { .. } => 3,
                PlanError::Bug(_) => 1,
                PlanError::Pin { .. } | PlanError::Batch { .. } | PlanError::Mixed { .. } => 2,
            },
            Self::Pass(PassError::Bug { .. }) | Self::Trace(TraceError::Bug { .. }) => 1,
            Self::Io { source: error, .. } | Self::Hf(HfError::Io { error, .. }) if is_full(error) => 1,
            Self::Request { .. } | Self::Data(_) | Self::PlanFile { .. } | Self::Io { .. } | Self::Cluster(_) => 2,
            Self::Zoo(_) | Self::Hf(_) | Self::Trace(_) | Self::Pass(_) => 2,
            Self::Launch(error) => error.exit_code(),
            Self::Lower(_)
            | Self::Runtime(_)
            | Self::Cuda(_)
            | Self::NotFinite { .. }
            | Self::Check(_)
            | Self::Bug(_) => 1,
        }
    }

    /// What to do about it, if there is more to say than the error does.
    pub fn fix(&self) -> Option<String> {
        match self {
            Self::Request { fix, .. } => (!fix.is_empty()).then(|| fix.clone()),
            Self::Data(error) => Some(error.fix()),
            Self::Io { source: error, .. } | Self::Hf(HfError::Io { error, .. }) => Some(
                match is_full(error) {
                    true => "check the space on the disk, or write elsewhere",
                    false => "check the path and its permissions",
                }
                .into(),
            ),
            Self::Hf(HfError::Malformed { .. } | HfError::MissingTensor { .. }) => {
                Some("the directory is not complete or not of this model: copy it again".into())
            }
            Self::Hf(HfError::ForeignType { .. }) => Some("convert the tensor, for instance to F32".into()),
            Self::Hf(HfError::NoWeights { .. }) => Some(
                "copy the weights beside config.json, or name a built-in model (`shardc models`), which starts from \
                 random weights"
                    .into(),
            ),
            Self::Hf(HfError::Field { .. }) => Some("correct the field, or copy the model's config.json again".into()),
            Self::Hf(HfError::Foreign { .. }) => Some("save to a directory of its own".into()),
            Self::Hf(HfError::NotTied { .. }) => Some(
                "a head of its own needs `\"tie_word_embeddings\": false` in config.json; else take it out of the file"
                    .into(),
            ),
            Self::Hf(HfError::WrongType { .. }) => Some("config.json and the weights must be of the same model".into()),
            Self::Zoo(ZooError::Unknown { .. }) => Some(
                "`shardc models` lists the names; a directory with config.json and safetensors is a model too".into(),
            ),
            Self::Launch(error) => error.fix(),
            Self::Cuda(CudaError::Launch(error)) => error.fix(),
            Self::Cuda(_) => Some("`shardc check --cluster cuda:N` shows what there is; cpu:N needs no GPU".into()),
            Self::NotFinite { grad_norm, .. } if grad_norm.is_finite() => Some(
                "the loss left the range of its floats and its gradient did not, so the update has been made: look at the data of \
                 that step and at how the loss is made; fp16 ends at 65504, --precision bf16 reaches as far as fp32"
                    .into(),
            ),
            Self::NotFinite { step: 0, .. } => Some(
                "no update has been made yet: look at the weights that it starts from, and at the data of the first step".into(),
            ),
            Self::NotFinite { .. } => Some("lower --lr, raise --warmup, or look at the data of that step".into()),
            _ => None,
        }
    }
}

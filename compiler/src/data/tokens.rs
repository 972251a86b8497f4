//! A sequence of tokens, in memory or in a file that is mapped.

use shardc_runtime::mapped::MappedFile;

/// How a file stores a token; little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// One unsigned byte.
    U8,
    /// An unsigned 16-bit integer.
    U16,
    /// A signed 32-bit integer.
    I32,
    /// An unsigned 32-bit integer.
    U32,
    /// A signed 64-bit integer.
    I64,
}

impl Width {
    /// Bytes per token.
    pub fn bytes(self) -> u64 {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
            Self::I32 | Self::U32 => 4,
            Self::I64 => 8,
        }
    }

    /// A number from its bytes, which is a token if it is one of a vocabulary.
    fn decode(self, bytes: &[u8]) -> i64 {
        match (self, bytes) {
            (Self::U8, [a]) => i64::from(*a),
            (Self::U16, [a, b]) => i64::from(u16::from_le_bytes([*a, *b])),
            (Self::U32, [a, b, c, d]) => i64::from(u32::from_le_bytes([*a, *b, *c, *d])),
            (Self::I32, [a, b, c, d]) => i64::from(i32::from_le_bytes([*a, *b, *c, *d])),
            (Self::I64, [a, b, c, d, e, f, g, h]) => i64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, *h]),
            _ => -1,
        }
    }
}

/// A sequence of tokens.
pub enum Tokens {
    /// Made by a tokenizer.
    Owned(Vec<u32>),
    /// In a mapped file, in pieces that follow one another in the stream.
    Mapped {
        /// The file.
        file: MappedFile,
        /// How a token is stored.
        width: Width,
        /// The pieces: the first token's position in the stream and its offset in the file in
        /// bytes; in the order of the stream.
        pieces: Vec<Piece>,
        /// The number of tokens.
        len: u64,
    },
}

/// A contiguous run of tokens in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The position of its first token in the stream.
    pub position: u64,
    /// The offset of its first token in the file, in bytes.
    pub offset: u64,
    /// The number of its tokens.
    pub len: u64,
}

impl Tokens {
    /// A mapped file with one run of tokens that starts at `offset` and ends with the file.
    pub fn mapped(file: MappedFile, width: Width, offset: u64) -> Self {
        let len = (file.len() as u64).saturating_sub(offset) / width.bytes();
        Self::Mapped { file, width, pieces: vec![Piece { position: 0, offset, len }], len }
    }

    /// The number of tokens.
    pub fn len(&self) -> u64 {
        match self {
            Self::Owned(tokens) => tokens.len() as u64,
            Self::Mapped { len, .. } => *len,
        }
    }

    /// How a file stores them.
    pub fn width(&self) -> Option<Width> {
        match self {
            Self::Owned(_) => None,
            Self::Mapped { width, .. } => Some(*width),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends tokens `from..from + count` to `into`; the range lies within the stream.
    pub fn read(&self, from: u64, count: u64, into: &mut Vec<i64>) {
        self.each_run(from, from + count, |_, run| match run {
            Run::Tokens(tokens) => into.extend(tokens.iter().copied().map(i64::from)),
            Run::Bytes(bytes, width) => {
                into.extend(bytes.chunks_exact(width.bytes() as usize).map(|bytes| width.decode(bytes)));
            }
        });
    }

    /// The position and value of the first token in `from..to` that is not one of `vocab`.
    pub fn find_foreign(&self, from: u64, to: u64, vocab: u64) -> Option<(u64, i64)> {
        let mut found = None;
        self.each_run(from, to, |position, run| {
            if found.is_some() {
                return;
            }
            let bad = |token: &i64| u64::try_from(*token).ok().is_none_or(|token| token >= vocab);
            let at = match run {
                Run::Tokens(tokens) => tokens.iter().copied().map(i64::from).enumerate().find(|(_, token)| bad(token)),
                Run::Bytes(bytes, width) => bytes
                    .chunks_exact(width.bytes() as usize)
                    .map(|bytes| width.decode(bytes))
                    .enumerate()
                    .find(|(_, token)| bad(token)),
            };
            found = at.map(|(index, token)| (position + index as u64, token));
        });
        found
    }

    /// Calls `each` with every contiguous run of `from..to` and its position.
    fn each_run<'a>(&'a self, from: u64, to: u64, mut each: impl FnMut(u64, Run<'a>)) {
        match self {
            Self::Owned(tokens) => each(from, Run::Tokens(&tokens[from as usize..to as usize])),
            Self::Mapped { file, width, pieces, .. } => {
                let first = pieces.partition_point(|piece| piece.position + piece.len <= from);
                for piece in &pieces[first..] {
                    let (start, end) = (from.max(piece.position), to.min(piece.position + piece.len));
                    if start >= end {
                        break;
                    }
                    let byte = |position: u64| (piece.offset + (position - piece.position) * width.bytes()) as usize;
                    each(start, Run::Bytes(&file[byte(start)..byte(end)], *width));
                }
            }
        }
    }
}

enum Run<'a> {
    Tokens(&'a [u32]),
    Bytes(&'a [u8], Width),
}

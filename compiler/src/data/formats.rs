//! Which kind of token file a path is, and how its tokens lie in it.
//!
//! | file | told by | tokens |
//! |---|---|---|
//! | Megatron-LM `.bin` + `.idx` | a sibling `.idx` that starts with `MMIDIDX` | as the index says |
//! | llm.c `.bin` | the magic number of its 1024-byte header | `u16` or `u32` |
//! | nanoGPT `.bin` | the ending, and none of the above | `u16` |
//! | text | anything else | bytes, or by a `tokenizer.json` |
//!
//! Sources: `megatron/core/datasets/indexed_dataset.py`, llm.c `dev/data/data_common.py`, nanoGPT
//! `data/*/prepare.py`.

use super::tokens::{Piece, Tokens, Width};
use crate::error::DataError;
use shardc_runtime::mapped::{MappedFile, check_regular};
use std::path::{Path, PathBuf};

const MEGATRON_MAGIC: &[u8] = b"MMIDIDX\0\0";
const LLMC_HEADER_BYTES: u64 = 256 * 4;

/// How files begin that are no text, and are not read.
const FOREIGN: [(&[u8], &str); 12] = [
    (b"\x93NUMPY", "an array of NumPy"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"BZh91AY&SY", "compressed by bzip2"),
    (b"\xfd7zXZ\x00", "compressed by xz"),
    (b"\x04\x22\x4d\x18", "compressed by lz4"),
    (b"PK\x03\x04", "a zip archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"%PDF-", "a PDF document"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
];

/// So many bytes of a file say whether it is text.
const LOOKED_AT: usize = 1 << 16;

/// So many numbers of a file say whether they are halves of wider ones.
const WIDE: usize = 1 << 12;

/// Whether a path is read as text, and not as a file of tokens.
pub fn is_text(path: &Path) -> bool {
    !["bin", "idx"].iter().any(|end| path.extension() == Some(end.as_ref()))
}

/// The files that are read of a path of data.
pub fn files(path: &Path) -> Vec<PathBuf> {
    match is_text(path) {
        true => vec![path.to_path_buf()],
        false => ["bin", "idx"].map(|end| path.with_extension(end)).into(),
    }
}

/// Opens a token file of any kind; see the [module](self).
pub fn open(path: &Path, tokenizer: Option<&Path>) -> Result<Tokens, DataError> {
    let (bin, idx) = (path.with_extension("bin"), path.with_extension("idx"));
    if !is_text(path) {
        return if path == idx || idx.exists() { open_megatron(&bin, &idx) } else { open_bin(path) };
    }
    let bytes = map(path)?;
    if let Some((_, what)) = FOREIGN.iter().find(|(magic, _)| bytes.starts_with(magic)) {
        return Err(malformed(path, format!("it is {what}, not text")));
    }
    if let Some(at) = bytes.iter().take(LOOKED_AT).position(|byte| *byte == 0) {
        return Err(malformed(
            path,
            format!("its byte {at} is zero, which no text has: give text in UTF-8, or tokens"),
        ));
    }
    match tokenizer {
        None => Ok(Tokens::mapped(bytes, Width::U8, 0)),
        Some(tokenizer) => tokenize(path, tokenizer),
    }
}

fn map(path: &Path) -> Result<MappedFile, DataError> {
    MappedFile::open(path).map_err(|source| DataError::Io { path: path.to_path_buf(), source })
}

fn malformed(path: &Path, what: impl Into<String>) -> DataError {
    DataError::Malformed { path: path.to_path_buf(), what: what.into() }
}

/// A token file of llm.c, else of nanoGPT, which has no header.
fn open_bin(path: &Path) -> Result<Tokens, DataError> {
    let file = map(path)?;
    let word = |index: usize| file.get(index * 4..index * 4 + 4).map(le_u32);
    let width = match (word(0), word(1)) {
        (Some(20240520), Some(1)) => Width::U16,
        (Some(20240801), Some(7)) => Width::U32,
        (Some(magic @ (20240520 | 20240801)), Some(version)) => {
            return Err(malformed(path, format!("llm.c header {magic} has version {version}, which is not known")));
        }
        _ if file.len() % 2 != 0 => {
            return Err(malformed(path, "a nanoGPT token file holds 16-bit tokens, but its size is odd"));
        }
        _ if is_wide(&file) => {
            let what = "a nanoGPT token file holds 16-bit tokens, but every second one of this is 0, as where they have 32 bits";
            return Err(malformed(path, what));
        }
        _ => return Ok(Tokens::mapped(file, Width::U16, 0)),
    };
    let declared = u64::from(word(2).unwrap_or(0));
    let tokens = Tokens::mapped(file, width, LLMC_HEADER_BYTES);
    if tokens.len() != declared {
        return Err(malformed(path, format!("its header declares {declared} tokens, but it holds {}", tokens.len())));
    }
    Ok(tokens)
}

/// Whether numbers of 16 bits are the halves of numbers of 32, of which the upper are 0.
fn is_wide(bytes: &[u8]) -> bool {
    let (words, _) = bytes.as_chunks::<4>();
    let words = &words[..words.len().min(WIDE)];
    let has_low = words.iter().filter(|word| word[..2] != [0, 0]).count();
    has_low > 16 && words.iter().all(|word| word[2..] == [0, 0])
}

/// An indexed dataset of Megatron-LM. Its sequences follow one another in the stream.
fn open_megatron(bin: &Path, idx: &Path) -> Result<Tokens, DataError> {
    let (index, file) = (map(idx)?, map(bin)?);
    let cut = || malformed(idx, "the index is cut short");
    let field = |at: usize, len: usize| at.checked_add(len).and_then(|end| index.get(at..end)).ok_or_else(cut);
    if !index.starts_with(MEGATRON_MAGIC) {
        return Err(malformed(idx, "it does not start with MMIDIDX, as a Megatron-LM index does"));
    }
    let version = le_u64(field(9, 8)?);
    if version != 1 {
        return Err(malformed(idx, format!("index version {version} is not known; version 1 is")));
    }
    let width = match field(17, 1)?[0] {
        1 => Width::U8,
        4 => Width::I32,
        5 => Width::I64,
        8 => Width::U16,
        code => return Err(malformed(idx, format!("dtype code {code} is not one of 1, 4, 5, 8"))),
    };
    let sequences = le_u64(field(18, 8)?) as usize;
    let lengths_at = 18 + 16;
    let lengths = field(lengths_at, sequences.checked_mul(4).ok_or_else(cut)?)?;
    let offsets = field(lengths_at + sequences * 4, sequences.checked_mul(8).ok_or_else(cut)?)?;
    let (mut pieces, mut position): (Vec<Piece>, u64) = (Vec::new(), 0);
    for (sequence, (length, offset)) in lengths.chunks_exact(4).zip(offsets.chunks_exact(8)).enumerate() {
        let (len, offset) = (le_u32(length) as i32, le_u64(offset) as i64);
        let (Ok(len), Ok(offset)) = (u64::try_from(len), u64::try_from(offset)) else {
            return Err(malformed(idx, format!("sequence {sequence} has {len} tokens at byte {offset}")));
        };
        let end = len.checked_mul(width.bytes()).and_then(|bytes| offset.checked_add(bytes));
        if end.is_none_or(|end| end > file.len() as u64) {
            let (bytes, at) = (file.len(), offset);
            return Err(malformed(
                bin,
                format!("the index has {len} tokens at byte {at}, but the file ends at {bytes}"),
            ));
        }
        match pieces.last_mut() {
            _ if len == 0 => {}
            Some(last) if last.offset + last.len * width.bytes() == offset => last.len += len,
            _ => pieces.push(Piece { position, offset, len }),
        }
        position += len;
    }
    if position == 0 {
        return Err(malformed(idx, format!("its {sequences} sequences hold no tokens")));
    }
    Ok(Tokens::Mapped { file, width, pieces, len: position })
}

fn tokenize(path: &Path, tokenizer: &Path) -> Result<Tokens, DataError> {
    let wrong =
        |error: tokenizers::Error| DataError::Tokenizer { path: tokenizer.to_path_buf(), what: error.to_string() };
    let bytes = map(path)?;
    let text = std::str::from_utf8(&bytes)
        .map_err(|error| malformed(path, format!("byte {} is not UTF-8", error.valid_up_to())))?;
    check_regular(tokenizer).map_err(|source| DataError::Io { path: tokenizer.to_path_buf(), source })?;
    let mut tokenizer = tokenizers::Tokenizer::from_file(tokenizer).map_err(wrong)?;
    // The text is one: what the file says of cutting and filling up was meant for samples.
    tokenizer.with_truncation(None).map_err(wrong)?.with_padding(None);
    Ok(Tokens::Owned(tokenizer.encode_fast(text, false).map_err(wrong)?.get_ids().to_vec()))
}

/// The first four bytes as a number.
fn le_u32(bytes: &[u8]) -> u32 {
    bytes.iter().take(4).rev().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

/// The first eight bytes as a number.
fn le_u64(bytes: &[u8]) -> u64 {
    bytes.iter().take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn tokens_are_read_of_both_files_whichever_is_named() {
        let both = ["a/tokens.bin", "a/tokens.idx"].map(PathBuf::from);
        assert_eq!(["a/tokens.bin", "a/tokens.idx"].map(|path| files(Path::new(path))), [both.to_vec(), both.to_vec()]);
        assert_eq!(files(Path::new("words.txt")), [PathBuf::from("words.txt")]);
    }

    fn check(name: &str, bytes: &[u8], index: Option<&[u8]>, expect: Result<&[i64], &str>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        if let Some(index) = index {
            fs::write(path.with_extension("idx"), index).unwrap();
        }
        match (open(&path, None), expect) {
            (Ok(tokens), Ok(expect)) => {
                let mut read = Vec::new();
                tokens.read(0, tokens.len(), &mut read);
                assert_eq!(read, expect);
                if let Some(last) = expect.len().checked_sub(1) {
                    let mut read = Vec::new();
                    tokens.read(last as u64, 1, &mut read);
                    assert_eq!(read, expect[last..]);
                }
            }
            (Err(error), Err(expect)) => assert!(error.to_string().contains(expect), "{error}"),
            (Ok(tokens), Err(expect)) => panic!("{} tokens, but expected: {expect}", tokens.len()),
            (Err(error), Ok(_)) => panic!("{error}"),
        }
    }

    fn llmc(magic: i32, version: i32, count: i32, tokens: &[u8]) -> Vec<u8> {
        let mut bytes: Vec<u8> = [magic, version, count].iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(1024, 0);
        bytes.extend_from_slice(tokens);
        bytes
    }

    fn megatron(dtype: u8, sequences: &[(i32, i64)]) -> Vec<u8> {
        let mut bytes = MEGATRON_MAGIC.to_vec();
        bytes.extend_from_slice(&1u64.to_le_bytes());
        bytes.push(dtype);
        bytes.extend_from_slice(&(sequences.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&1u64.to_le_bytes());
        bytes.extend(sequences.iter().flat_map(|(length, _)| length.to_le_bytes()));
        bytes.extend(sequences.iter().flat_map(|(_, offset)| offset.to_le_bytes()));
        bytes.extend([0i64, sequences.len() as i64].iter().flat_map(|document| document.to_le_bytes()));
        bytes
    }

    #[test]
    fn files_are_told_apart() {
        check("a.txt", b"Az", None, Ok(&[65, 122]));
        check("a.bin", &[1, 0, 2, 1], None, Ok(&[1, 258]));
        check("a.bin", &[1, 0, 2], None, Err("size is odd"));
        check("a.bin", &llmc(20240520, 1, 2, &[7, 0, 1, 1]), None, Ok(&[7, 257]));
        check("a.bin", &llmc(20240801, 7, 1, &[7, 0, 1, 0]), None, Ok(&[65543]));
        check("a.bin", &llmc(20240801, 7, 2, &[7, 0, 1, 0]), None, Err("declares 2 tokens, but it holds 1"));
        check("a.bin", &llmc(20240801, 9, 1, &[7, 0, 1, 0]), None, Err("version 9"));
        let wide: Vec<u8> = (1..64u32).flat_map(u32::to_le_bytes).collect();
        check("a.bin", &wide, None, Err("every second one of this is 0"));
        check("a.npy", b"\x93NUMPY\x01\x00", None, Err("it is an array of NumPy, not text"));
    }

    #[test]
    fn megatron_sequences_may_lie_anywhere() {
        let bytes = [1, 0, 2, 0, 3, 0, 4, 0];
        check("a.bin", &bytes, Some(&megatron(8, &[(1, 0), (3, 2)])), Ok(&[1, 2, 3, 4]));
        check("a.bin", &bytes, Some(&megatron(8, &[(2, 4), (2, 0)])), Ok(&[3, 4, 1, 2]));
        check("a.bin", &bytes, Some(&megatron(8, &[(1, 2), (0, 6), (2, 4)])), Ok(&[2, 3, 4]));
        check("a.bin", &bytes, Some(&megatron(8, &[(3, 4)])), Err("the file ends at 8"));
        check("a.bin", &bytes, Some(&megatron(8, &[(1, 0), (-5, 4)])), Err("sequence 1 has -5 tokens at byte 4"));
        check("a.bin", &bytes, Some(&megatron(8, &[(2, -8)])), Err("sequence 0 has 2 tokens at byte -8"));
        check("a.bin", &bytes, Some(&megatron(8, &[])), Err("a.idx: its 0 sequences hold no tokens"));
        check("a.bin", &bytes, Some(&megatron(6, &[(2, 4)])), Err("dtype code 6"));
        check("a.bin", &bytes, Some(&megatron(8, &[(2, 4)])[..40]), Err("cut short"));
        check("a.bin", &bytes, Some(b"something else"), Err("MMIDIDX"));
        // As many sequences as bytes can just be counted for.
        let mut many = megatron(8, &[(2, 4)]);
        for sequences in [u64::MAX, u64::MAX / 4, u64::MAX / 12] {
            many[18..26].copy_from_slice(&sequences.to_le_bytes());
            check("a.bin", &bytes, Some(&many), Err("cut short"));
        }
    }
}

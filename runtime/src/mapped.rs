//! Files mapped into memory, read only: data of any size without reading it whole.

use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// A file's bytes. Like every program that maps its input, it relies on nobody cutting the file
/// short while it runs.
#[derive(Debug)]
pub struct MappedFile(Option<Mmap>);

impl MappedFile {
    /// Maps a file.
    #[expect(unsafe_code, reason = "mapping a file is a promise about other processes")]
    pub fn open(path: &Path) -> io::Result<Self> {
        // A pipe that nobody writes to would be waited for as it is opened.
        check_regular(path)?;
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if metadata.len() == 0 {
            return Ok(Self(None));
        }
        // SAFETY: the mapping is read only and outlives no borrow of it. A concurrent truncation
        // ends the process with SIGBUS; it cannot make it read other memory.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Self(Some(map)))
    }
}

/// That a path is a file with an end, which can be read whole.
pub fn check_regular(path: &Path) -> io::Result<()> {
    match std::fs::metadata(path)?.is_file() {
        true => Ok(()),
        false => Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file")),
    }
}

impl Deref for MappedFile {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

//! What was found out once and is kept on disk for later runs: compiled kernels, the fastest algorithms.
//!
//! Files lie in `$XDG_CACHE_HOME/shardc`, or `~/.cache/shardc` (XDG Base Directory Specification). Nothing
//! depends on them: what is missing, damaged or cannot be written is made anew. A file is replaced whole, so
//! that processes that write at once leave one of their files, and its first line is the digest of the rest.
//! What processes add to is changed under a lock ([`Cache::update`]), so that none loses what another added.

use sha2::{Digest, Sha256};
use std::fs::{File, TryLockError};
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// How long a process waits for others that change a file, each of which takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// The folder of this user's cache.
pub struct Cache(Option<PathBuf>);

/// The digest of some bytes, in hexadecimal digits.
pub fn digest(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

impl Cache {
    /// The folder that the environment names.
    pub fn of_user() -> Self {
        let set = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let root = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
        Self(root.map(|root| root.join("shardc")))
    }

    /// The folder at a path.
    #[cfg(test)]
    pub fn at(path: &Path) -> Self {
        Self(Some(path.to_path_buf()))
    }

    /// What is kept under a name, if it is there and whole.
    pub fn read(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.0.as_ref()?.join(name);
        let bytes = std::fs::read(&path).ok()?;
        let end = bytes.iter().position(|byte| *byte == b'\n');
        match end.filter(|end| bytes[..*end] == *digest(&bytes[end + 1..]).as_bytes()) {
            Some(end) => Some(bytes[end + 1..].to_vec()),
            None => {
                tracing::warn!("{} is damaged and is made anew", path.display());
                None
            }
        }
    }

    /// Replaces what is kept under a name by what `change` makes of it, while no other process does.
    ///
    /// # Errors
    /// A folder that is not known or cannot be written; another process that holds the lock for longer than 10 s.
    pub fn update(&self, name: &str, change: impl FnOnce(Option<Vec<u8>>) -> Vec<u8>) -> Result<()> {
        let unknown = || Error::new(ErrorKind::NotFound, "neither XDG_CACHE_HOME nor HOME names a folder");
        let path = self.0.as_ref().ok_or_else(unknown)?.join(name);
        let _locked = lock(&path.with_extension("lock"), PATIENCE)?;
        replace(&path, &change(self.read(name)))
    }

    /// Keeps bytes under a name.
    pub fn write(&self, name: &str, bytes: &[u8]) {
        let Some(folder) = &self.0 else { return };
        if let Err(error) = replace(&folder.join(name), bytes) {
            tracing::info!("{} is not kept for later runs: {error}", folder.join(name).display());
        }
    }
}

/// A file that is locked until it is dropped. Where the file system takes no locks it is not.
fn lock(path: &Path, patience: Duration) -> Result<File> {
    create_folder(path)?;
    let (file, since) = (File::options().create(true).append(true).open(path)?, Instant::now());
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(_)) => return Ok(file),
            Err(TryLockError::WouldBlock) if since.elapsed() > patience => {
                return Err(Error::new(ErrorKind::TimedOut, format!("another process keeps {}", path.display())));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn create_folder(path: &Path) -> Result<()> {
    path.parent().map_or(Ok(()), std::fs::create_dir_all)
}

/// Writes a file beside the one of this path and then gives it that name.
fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    create_folder(path)?;
    let unique = format!("{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let fresh = path.with_extension(unique);
    let written = std::fs::write(&fresh, [digest(bytes).as_bytes(), b"\n", bytes].concat())
        .and_then(|()| std::fs::rename(&fresh, path));
    if written.is_err() {
        let _ = std::fs::remove_file(&fresh);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_damaged_is_not_read() {
        let folder = std::env::temp_dir().join(format!("shardc-cache-{}", std::process::id()));
        let cache = Cache::at(&folder);
        assert_eq!(cache.read("a/one"), None);
        cache.write("a/one", b"first\nsecond");
        assert_eq!(cache.read("a/one").as_deref(), Some(&b"first\nsecond"[..]));
        cache.write("a/one", b"");
        assert_eq!(cache.read("a/one").as_deref(), Some(&b""[..]));
        cache.write("a/one", b"third");
        let path = folder.join("a/one");
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert_eq!(cache.read("a/one"), None);
        std::fs::write(&path, b"no digest").unwrap();
        assert_eq!(cache.read("a/one"), None);
        assert_eq!(std::fs::read_dir(folder.join("a")).unwrap().count(), 1, "nothing is left beside it");
        std::fs::remove_dir_all(&folder).unwrap();
        // Where there is no folder, nothing is kept.
        Cache(None).write("a", b"b");
        assert_eq!(Cache(None).read("a"), None);
        assert_eq!(Cache(None).update("a", |_| Vec::new()).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn what_is_added_at_once_is_all_kept() {
        let folder = std::env::temp_dir().join(format!("shardc-update-{}", std::process::id()));
        let add = |byte: u8| {
            let change = |kept: Option<Vec<u8>>| [kept.unwrap_or_default(), vec![byte]].concat();
            Cache::at(&folder).update("a/one", change).unwrap();
        };
        std::thread::scope(|scope| (0..32).for_each(|byte| drop(scope.spawn(move || add(byte)))));
        let mut kept = Cache::at(&folder).read("a/one").unwrap();
        kept.sort_unstable();
        assert_eq!(kept, (0..32).collect::<Vec<u8>>());
        // Who keeps the lock for ever stops nobody.
        let path = folder.join("a/one.lock");
        let held = lock(&path, Duration::ZERO).unwrap();
        assert_eq!(lock(&path, Duration::ZERO).unwrap_err().kind(), ErrorKind::TimedOut);
        drop(held);
        lock(&path, Duration::ZERO).unwrap();
        // A file where the folder should be.
        let error = Cache::at(&folder.join("a/one")).update("two", |_| Vec::new()).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::NotADirectory | ErrorKind::AlreadyExists), "{error}");
        std::fs::remove_dir_all(&folder).unwrap();
    }
}

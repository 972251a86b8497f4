//! The files that a command writes: nothing that is read is lost for them, none takes the place of another, and each is
//! whole or not there.

use shardc::Error;
use shardc_models::hf;
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Checks where files are to be written, by the flags that name them: not over what is `read` (a file, or a model's
/// directory), and not where another flag writes.
pub fn check_places(written: &[(&str, &Path)], read: &[&Path]) -> Result<(), Error> {
    for (index, (flag, path)) in written.iter().enumerate() {
        let refuse =
            |message: String, fix: &str| Err(Error::request(format!("{flag} {}: {message}", path.display()), fix));
        if path.as_os_str() == "-" {
            return refuse("it is no file".to_string(), "write /dev/stdout, or ./- for a file of that name");
        }
        if let Some(other) =
            read.iter().find(|other| is_same_file(path, other) || (path.exists() && is_part(path, other)))
        {
            return refuse(format!("this run reads {}", other.display()), "name another file, which it may write");
        }
        if let Some((first, _)) = written[..index].iter().find(|(_, other)| is_same_place(path, other)) {
            return refuse(format!("{first} writes there"), "name another file");
        }
    }
    Ok(())
}

/// Whether a path leads to a file of a model in a directory, or to where one would be.
pub fn is_part(path: &Path, dir: &Path) -> bool {
    let is_in = || dir.is_dir() && folder(path).is_some_and(|own| dir.canonicalize().is_ok_and(|dir| own == dir));
    path.file_name().and_then(OsStr::to_str).is_some_and(hf::is_part) && is_in()
}

/// Whether two paths lead to one file that is there.
fn is_same_file(a: &Path, b: &Path) -> bool {
    let place = |path: &Path| std::fs::metadata(path).ok().filter(|of| of.is_file()).map(|of| (of.dev(), of.ino()));
    place(a).is_some_and(|own| place(b) == Some(own))
}

/// Whether two paths lead to one place, whatever is there.
fn is_same_place(a: &Path, b: &Path) -> bool {
    is_same_file(a, b) || (a.file_name() == b.file_name() && folder(a).is_some_and(|own| Some(own) == folder(b)))
}

/// The folder of a file, if it is there.
fn folder(path: &Path) -> Option<PathBuf> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new(".")).canonicalize().ok()
}

/// Whether a file can be written, so that what cannot is told before the work and not after it. What is there
/// stays as it is, and what is not there is not made. What is no file (a pipe, a terminal) is opened once, when it is
/// written to.
pub fn check_writable(path: &Path) -> Result<(), Error> {
    if path.metadata().is_ok_and(|of| !of.is_file() && !of.is_dir()) {
        return Ok(());
    }
    let opened = match path.exists() {
        true => OpenOptions::new().append(true).open(path).map(drop),
        false => File::create_new(path).and_then(|_| std::fs::remove_file(path)),
    };
    opened.map_err(|source| Error::Io { path: path.to_path_buf(), source })
}

/// Writes a file whole, which [can be written](check_writable): what was there stays until then, and where there is no room.
/// What is no file (a pipe, a terminal) is written to.
pub fn write(path: &Path, text: &str) -> Result<(), Error> {
    let io = |source| Error::Io { path: path.to_path_buf(), source };
    // The file itself, where the path is a link to one.
    let of = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    if of.exists() && !of.is_file() {
        return std::fs::write(path, text).map_err(io);
    }
    let fresh = of.with_extension(format!("{}.partial", std::process::id()));
    let file = match File::create_new(&fresh) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
            return Err(io(error));
        }
        // Its folder takes no new file, or none of that name.
        Err(_) => return std::fs::write(path, text).map_err(io),
    };
    let written = fill(file, &of, text).and_then(|()| match std::fs::rename(&fresh, &of) {
        // Nothing takes the place of a file that is mounted.
        Err(error) if error.kind() == ErrorKind::ResourceBusy => std::fs::write(path, text),
        renamed => renamed,
    });
    // It is gone where it has taken its place; of what failed, the first error is the one to tell.
    let _ = std::fs::remove_file(&fresh);
    written.map_err(io)
}

/// Writes a new file, which may be read and written by whom the file may that it takes the place of.
fn fill(mut file: File, of: &Path, text: &str) -> std::io::Result<()> {
    if let Ok(before) = of.metadata() {
        file.set_permissions(before.permissions())?;
    }
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_is_written_whole_and_stays_what_it_was() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("plan.json"), dir.path().join("link"));
        write(&file, "one").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&link, "two").unwrap();
        assert!(link.is_symlink());
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "two");
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o640);
        // A name so long that nothing can be written beside it.
        let long = dir.path().join("l".repeat(250));
        write(&long, "three").unwrap();
        assert_eq!(std::fs::read_to_string(&long).unwrap(), "three");
        assert!(write(dir.path(), "four").is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn places_are_told_apart_however_they_are_written() {
        let dir = tempfile::tempdir().unwrap();
        let (model, other) = (dir.path().join("model"), dir.path().join("other"));
        std::fs::create_dir(&model).unwrap();
        let config = model.join("config.json");
        let check = |written: &[&Path], read: &[&Path]| {
            let written: Vec<(&str, &Path)> = ["--one", "--two"].into_iter().zip(written.iter().copied()).collect();
            check_places(&written, read).map_err(|error| error.to_string())
        };
        // What is not there yet is nothing that is read.
        assert_eq!(check(&[&config], &[&model]), Ok(()));
        std::fs::write(&config, "{}").unwrap();
        let winding = model.join("../model/config.json");
        assert!(
            check(&[&other, &winding], &[&model]).is_err_and(|said| said.contains("--two") && said.contains("reads"))
        );
        assert_eq!(check(&[&model.join("plan.json")], &[&model]), Ok(()));
        let again = model.join("../other");
        assert!(check(&[&other, &again], &[]).is_err_and(|said| said.contains("--one writes there")));
        assert!(check(&[Path::new("-")], &[]).is_err_and(|said| said.contains("no file")));
        assert!(is_part(&model.join("model-00001-of-00002.safetensors"), &model) && !is_part(&other, &model));
    }
}

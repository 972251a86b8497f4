//! Runs every golden file as one named test; `BLESS=1` rewrites their expectations. The form of the
//! files is described in `shardc_tests::golden`.

use libtest_mimic::{Arguments, Failed, Trial};
use shardc_tests::golden;
use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("golden");
    let mut files = Vec::new();
    collect(&root, &mut files);
    files.sort();
    let trials = files.into_iter().map(|file| {
        let name = file.strip_prefix(&root).unwrap_or(&file).with_extension("").display().to_string();
        Trial::test(name, move || check(&file))
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "ir") {
            files.push(path);
        }
    }
}

fn check(file: &Path) -> Result<(), Failed> {
    let text = fs::read_to_string(file)?;
    let blessed = golden::run(&text).map_err(|message| format!("{}\n{message}", file.display()))?;
    if golden::is_blessing() && blessed != text {
        fs::write(file, blessed)?;
    }
    Ok(())
}

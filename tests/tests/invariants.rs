//! The invariants of ARCHITECTURE.md that a program can check.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const CRATES: [&str; 7] = ["ir", "models", "passes", "runtime", "compiler", "tests", "bench"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Every Rust file of a crate's folder.
fn sources(krate: &str) -> Vec<PathBuf> {
    let mut stack = vec![root().join(krate)];
    let mut files = Vec::new();
    while let Some(dir) = stack.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                stack.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

#[test]
fn imports_run_one_way() {
    let below = ["shardc-ir", "shardc-models", "shardc-passes", "shardc-runtime"];
    let all = ["shardc-ir", "shardc-models", "shardc-passes", "shardc-runtime", "shardc"];
    let allowed: BTreeMap<&str, &[&str]> = BTreeMap::from([
        ("ir", &[] as &[&str]),
        ("models", &below[..1]),
        ("passes", &below[..1]),
        ("runtime", &below[..1]),
        ("compiler", &below),
        ("tests", &all),
        ("bench", &all),
    ]);
    for krate in CRATES {
        let manifest = fs::read_to_string(root().join(krate).join("Cargo.toml")).unwrap();
        let dependencies = manifest.split_once("[dependencies]").map_or("", |(_, rest)| rest);
        let dependencies = dependencies.split("[dev-dependencies]").next().unwrap_or_default();
        let names = dependencies.lines().filter_map(|line| line.split(['.', ' ', '=']).next());
        for name in names.filter(|name| name.starts_with("shardc")) {
            assert!(allowed[krate].contains(&name), "`{krate}` must not depend on `{name}`");
        }
    }
}

/// The names of the dependencies of a manifest, those of tests as well.
fn dependencies(krate: &str) -> Vec<String> {
    let manifest = fs::read_to_string(root().join(krate).join("Cargo.toml")).unwrap();
    let lines = manifest.lines().skip_while(|line| *line != "[dependencies]");
    let lines = lines.take_while(|line| !line.starts_with("[[") && !line.starts_with("[features"));
    let names =
        lines.filter(|line| !line.starts_with(['[', '#'])).filter_map(|line| line.split(['.', ' ', '=']).next());
    names.filter(|name| !name.is_empty()).map(String::from).collect()
}

#[test]
fn dependencies_are_used_and_have_a_reason() {
    let architecture = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, table) = architecture.split_once("## Dependencies").unwrap();
    let rows = table.split("\n## ").next().unwrap_or_default().lines().filter_map(|row| row.split('|').nth(1));
    let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    let explained: Vec<&str> = rows.flat_map(|names| names.split(|c| !is_part(c))).collect();
    let mut count = 0;
    for krate in CRATES {
        let text: String = sources(krate).iter().map(|file| fs::read_to_string(file).unwrap()).collect();
        for name in dependencies(krate) {
            let word = name.replace('-', "_");
            let is_used = text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|used| used == word);
            assert!(is_used, "`{krate}` does not use `{name}`");
            let is_ours = name.starts_with("shardc");
            assert!(is_ours || explained.contains(&name.as_str()), "ARCHITECTURE.md has no reason for `{name}`");
            count += 1;
        }
    }
    assert!(count > 40, "{count} dependencies");
}

#[test]
fn only_runtime_is_unsafe() {
    for file in CRATES.into_iter().filter(|krate| *krate != "runtime").flat_map(sources) {
        let text = fs::read_to_string(&file).unwrap();
        let keyword = concat!("un", "safe ");
        let line = text.lines().position(|line| {
            let code = line.split("//").next().unwrap_or_default();
            ["{", "fn", "impl"].iter().any(|next| code.contains(&format!("{keyword}{next}")))
        });
        assert!(line.is_none(), "{}:{}", file.display(), line.unwrap_or(0) + 1);
    }
}

#[test]
fn ir_and_passes_see_neither_burn_nor_cuda() {
    for krate in ["ir", "passes"] {
        let manifest = fs::read_to_string(root().join(krate).join("Cargo.toml")).unwrap();
        let dependencies = manifest.split("[dev-dependencies]").next().unwrap_or_default();
        for banned in ["burn", "cubecl", "cudarc"] {
            assert!(!dependencies.contains(banned), "`{krate}` must not depend on {banned}");
        }
    }
}

#[test]
fn files_are_short_and_say_what_they_are() {
    for file in CRATES.into_iter().flat_map(sources) {
        let text = fs::read_to_string(&file).unwrap();
        let lines = text.lines().count();
        assert!(lines <= 600, "{} has {lines} lines; 600 is the limit", file.display());
        assert!(text.starts_with("//!"), "{} does not open with what it is for", file.display());
    }
}

#[test]
fn passes_are_called_in_one_place() {
    let pipeline = fs::read_to_string(root().join("compiler/src/pipeline.rs")).unwrap();
    // `Self::Raise => "raise",` of `Pass::name`. Models are traced, and sensitivities searched, elsewhere too.
    let named = pipeline.lines().filter_map(|line| line.trim().strip_prefix("Self::")?.split_once(" => \""));
    let named = named.map(|(_, name)| name.trim_end_matches("\",")).filter(|name| !["trace", "search"].contains(name));
    let names: Vec<String> =
        named.map(|name| format!("{name}(")).chain(["lower_rank(", "lower_ranks("].map(String::from)).collect();
    assert!(names.len() > 8 && names.contains(&"align_head(".to_string()), "{names:?}");
    for file in sources("compiler/src").into_iter().filter(|file| !file.ends_with("pipeline.rs")) {
        let text = fs::read_to_string(&file).unwrap();
        for name in &names {
            let calls = text.match_indices(name.as_str()).any(|(at, _)| {
                !text[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_' || before == '.')
            });
            assert!(!calls, "{} calls `{name}`: only pipeline.rs may", file.display());
        }
    }
}

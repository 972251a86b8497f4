//! What a misspelt name may have meant.

use shardc_ir::names::edit_distance;

/// The known name nearest to a wrong one, if it is near enough to be worth saying: at most a third
/// of the letters differ, or one is the beginning of the other.
pub fn nearest<'a>(wrong: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = wrong.to_lowercase();
    let score = |name: &'a str| (edit_distance(&lower, &name.to_lowercase()), name);
    let named = known.into_iter().filter(|name| !name.is_empty());
    let (distance, name) = named.map(score).min()?;
    let close = distance * 3 <= wrong.chars().count().max(3);
    let begins = wrong.len() >= 3 && (name.starts_with(&lower) || lower.starts_with(name));
    (close || begins).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggestions() {
        let known = ["gpt2-124m", "llama-tiny", "llama-8b", "llama-70b"];
        let check = |wrong: &str, expect: Option<&str>| assert_eq!(nearest(wrong, known), expect, "{wrong}");
        check("gpt2-124", Some("gpt2-124m"));
        check("lama-8b", Some("llama-8b"));
        check("llama-tny", Some("llama-tiny"));
        check("LLAMA-8B", Some("llama-8b"));
        check("resnet50", None);
        assert_eq!(nearest("ab", ["", "xyz"]), None);
    }
}

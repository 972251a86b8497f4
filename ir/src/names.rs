//! How far a misspelt name is from a known one. Every place that suggests a name measures with this,
//! and says by itself what is near enough.

use std::collections::BTreeSet;

/// The edit distance of two names: insertions, deletions and replacements of one letter (Levenshtein,
/// 1966).
pub fn edit_distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (index, letter) in left.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], index + 1);
        for (column, other) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(letter != *other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

/// How many words two names have in common: runs of letters, and of digits.
pub fn shared_words(left: &str, right: &str) -> usize {
    let words = words(right);
    self::words(left).intersection(&words).count()
}

fn words(name: &str) -> BTreeSet<String> {
    let (mut words, mut last) = (vec![String::new()], None);
    for letter in name.chars() {
        let kind = letter.is_alphanumeric().then(|| letter.is_ascii_digit());
        if kind != last {
            words.push(String::new());
        }
        if let (Some(_), Some(word)) = (kind, words.last_mut()) {
            word.extend(letter.to_lowercase());
        }
        last = kind;
    }
    words.into_iter().filter(|word| !word.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        let check = |left, right, expect| assert_eq!(edit_distance(left, right), expect, "{left} {right}");
        check("", "", 0);
        check("abc", "", 3);
        check("kitten", "sitting", 3);
        check("lama-8b", "llama-8b", 1);
    }

    #[test]
    fn words_in_common() {
        let check = |left, right, expect| assert_eq!(shared_words(left, right), expect, "{left} {right}");
        check("mlp-mixer", "mixer-b-16", 1);
        check("ResNet50", "resnet-50", 2);
        check("llama3_8b", "llama-8b", 3);
        check("", "unet", 0);
    }
}

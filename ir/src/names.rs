//! How far a misspelt name is from a known one. Every place that suggests a name measures with this,
//! and says by itself what is near enough.

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
}

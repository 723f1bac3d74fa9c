//! The order in which people count: `step-9` before `step-10`.

/// A part of a name. Numbers come before text, small ones first, however many zeros are before them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// Digits without the zeros before them; the longer, the more.
    Number(usize, String),
    Text(char),
}

/// What a name is sorted by.
pub(super) fn natural(name: &str) -> (Vec<Part>, String) {
    let mut parts = Vec::new();
    let mut rest = name;
    while let Some(c) = rest.chars().next() {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (head, tail) = rest.split_at(digits.max(c.len_utf8()));
        parts.push(match digits {
            0 => Part::Text(c),
            _ => {
                let number = head.trim_start_matches('0');
                Part::Number(number.len(), number.to_owned())
            }
        });
        rest = tail;
    }
    (parts, name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::natural;

    #[test]
    fn numbers_count_by_their_value() {
        let mut names = [
            "s-10",
            "s-9",
            "s-0009b",
            "t",
            "s",
            "s-100000000000000000000000",
            "2",
            "s-010",
            "é1",
        ];
        names.sort_by_key(|n| natural(n));
        let want = [
            "2",
            "s",
            "s-9",
            "s-0009b",
            "s-010",
            "s-10",
            "s-100000000000000000000000",
            "t",
            "é1",
        ];
        assert_eq!(names, want);
    }
}

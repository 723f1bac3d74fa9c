//! The rules of names: branches, tags and how a version is spelled (REV).

use crate::error::{Error, Kind, Result};

/// How a version is spelled on the command line and in the mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Rev {
    /// `BRANCH/NUMBER`.
    Number(String, u64),
    /// `BRANCH/latest`, or `BRANCH` alone.
    Latest(String),
    /// A word without a slash: a branch, a tag, or a prefix of an id; which one only the history can tell.
    Word(String),
}

impl Rev {
    /// Takes a REV apart. Leading zeros of a number do not count.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let bad = || {
            Error::new(
                Kind::Usage,
                format!("{text:?} is not a version: write BRANCH, BRANCH/NUMBER, a tag or an id"),
            )
        };
        match text.split_once('/') {
            None if text.is_empty() => Err(bad()),
            None => Ok(Rev::Word(text.to_owned())),
            Some((branch, number)) => {
                check_name("branch", branch)?;
                if number == "latest" {
                    return Ok(Rev::Latest(branch.to_owned()));
                }
                let digits = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
                let n = number.parse().ok().filter(|_| digits).ok_or_else(bad)?;
                Ok(Rev::Number(branch.to_owned(), n))
            }
        }
    }
}

/// Checks a branch or tag name: `[A-Za-z0-9._-]`, 1 to 128 bytes, no leading dot or dash.
pub fn check_name(what: &str, name: &str) -> Result<()> {
    let ok = (1..=128).contains(&name.len())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        && !name.starts_with(['.', '-']);
    if ok {
        return Ok(());
    }
    let why = "use 1 to 128 of A-Z a-z 0-9 . _ -, not starting with a dot or dash";
    Err(Error::new(
        Kind::Usage,
        format!("{name:?} is no {what} name: {why}"),
    ))
}

/// Whether a branch or tag may have this name: see [`check_branch`].
pub fn is_name(name: &str) -> bool {
    check_branch(name).is_ok()
}

/// Checks the name of a new branch: never `latest`, all digits, or what could be a prefix of an id.
pub(super) fn check_branch(name: &str) -> Result<()> {
    check_name("branch", name)?;
    if means_else(name) {
        return Err(Error::new(
            Kind::Usage,
            format!("{name:?} is no name for a branch: {MEANS_ELSE}"),
        ));
    }
    Ok(())
}

/// Checks a tag name: also never `latest`, all digits, or what could be a prefix of an id.
pub(super) fn check_tag(name: &str) -> Result<()> {
    check_name("tag", name)?;
    if means_else(name) {
        return Err(Error::new(
            Kind::Usage,
            format!("{name:?} is no tag name: {MEANS_ELSE}"),
        ));
    }
    Ok(())
}

/// Why such a name is refused.
const MEANS_ELSE: &str = "`latest`, numbers and 8 or more hex digits mean something else already";

/// Whether the word is understood in another way where a branch or tag may be named.
fn means_else(word: &str) -> bool {
    word == "latest" || word.bytes().all(|b| b.is_ascii_digit()) || is_id_prefix(word)
}

/// Whether the word may be a prefix of a version's id: 8 to 64 lower-case hex digits.
pub(super) fn is_id_prefix(word: &str) -> bool {
    (8..=64).contains(&word.len())
        && word
            .bytes()
            .all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revs() {
        assert_eq!(Rev::parse("main/000012").unwrap(), Rev::Number("main".into(), 12));
        assert_eq!(Rev::parse("main/latest").unwrap(), Rev::Latest("main".into()));
        assert_eq!(Rev::parse("best").unwrap(), Rev::Word("best".into()));
        for bad in [
            "",
            "/1",
            "main/",
            "main/x",
            "main/1/2",
            "../1",
            "main/-1",
            "main/+1",
            "main/99999999999999999999999",
        ] {
            assert!(Rev::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn tags_cannot_shadow_other_names() {
        for bad in [
            "latest",
            "12",
            "deadbeef",
            "0123456789",
            ".x",
            "-x",
            "",
            "a b",
            "ä",
            "a/b",
        ] {
            assert!(check_tag(bad).is_err(), "{bad}");
        }
        for good in ["best", "v1.0", "deadbee", "DEADBEEF", "x".repeat(128).as_str()] {
            assert!(check_tag(good).is_ok(), "{good}");
        }
    }
}

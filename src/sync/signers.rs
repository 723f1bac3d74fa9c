//! Signed branches: who may say what a branch's newest version is (docs/PEERS.md, "Signed branches").

use crate::error::{Error, IoContext, Kind, Result};
use crate::id::VersionId;
use ssh_key::{PublicKey, SshSig};
use std::path::Path;

/// What signatures are made for, so that one for something else is none.
pub const NAMESPACE: &str = "zspace-branch";

/// The text that is signed.
pub fn statement(branch: &str, head: &VersionId) -> String {
    format!("zspace branch {branch} is {head}\n")
}

/// Whether this is somebody's signature that a branch's newest version is this one, whoever that is.
pub fn is_signature(branch: &str, head: &VersionId, signature: &[u8]) -> bool {
    SshSig::from_pem(signature).is_ok_and(|signature| {
        let key = PublicKey::from(signature.public_key().clone());
        key.verify(NAMESPACE, statement(branch, head).as_bytes(), &signature)
            .is_ok()
    })
}

/// Those who may sign, as `ssh-keygen` reads them: a line for each, `NAME[,NAME…] [OPTIONS] TYPE KEY`.
#[derive(Clone, Debug)]
pub struct Signers(Vec<(String, PublicKey)>);

impl Signers {
    /// Reads an allowed-signers file.
    ///
    /// # Errors
    /// What cannot be read, with its line. Options other than `namespaces` are refused: what is not understood must not be
    /// passed over.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).doing(|| path.display().to_string())?;
        Self::parse(&text).map_err(|e| e.context(path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let mut all = Vec::new();
        for (n, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let bad = |why: &str| Error::new(Kind::Usage, format!("line {}: {why}", n + 1));
            let words: Vec<&str> = line.split_whitespace().collect();
            let at = words.iter().position(|w| *w == "ssh-ed25519");
            let at = at.ok_or_else(|| bad("only ssh-ed25519 keys are understood"))?;
            let (names, options) = match &words[..at] {
                [names, options @ ..] => (*names, options),
                [] => return Err(bad("write NAME ssh-ed25519 KEY")),
            };
            for option in options {
                let within = option.strip_prefix("namespaces=").map(|n| n.trim_matches('"'));
                match within {
                    Some(all) if all.split(',').any(|n| n == NAMESPACE) => {}
                    Some(_) => return Err(bad("this key may not sign branches")),
                    None => return Err(bad("only the option namespaces= is understood")),
                }
            }
            let key = words.get(at + 1).ok_or_else(|| bad("there is no key"))?;
            let key =
                PublicKey::from_openssh(&format!("ssh-ed25519 {key}")).map_err(|e| bad(&e.to_string()))?;
            all.push((names.to_owned(), key));
        }
        Ok(Signers(all))
    }

    /// Who signed that a branch's newest version is this one.
    ///
    /// # Errors
    /// `Refused` if nobody did who may.
    pub fn check(&self, branch: &str, head: &VersionId, signature: &[u8]) -> Result<&str> {
        let refused = |why: &str| {
            let why = format!("branch {branch:?} at {}: {why}", head.short());
            Error::new(Kind::Refused, why)
        };
        if signature.is_empty() {
            return Err(refused("is not signed, and only signed branches are taken here"));
        }
        let signature = SshSig::from_pem(signature)
            .map_err(|e| refused(&format!("its signature cannot be read: {e}")))?;
        let text = statement(branch, head);
        let signed = |key: &PublicKey| key.verify(NAMESPACE, text.as_bytes(), &signature).is_ok();
        let by = self.0.iter().find(|(_, key)| signed(key));
        let by =
            by.ok_or_else(|| refused("is signed by nobody who may, or what was signed is something else"))?;
        Ok(&by.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // ssh-keygen -q -t ed25519 -N '' -f k; printf 'zspace branch main is 0707…\n' | ssh-keygen -Y sign -f k -n zspace-branch
    const KEY: &str = include_str!("tests/signer.pub");
    const SIGNATURE: &str = include_str!("tests/signature.pem");

    #[test]
    fn only_who_is_named_may_sign_and_only_just_that() {
        let head = VersionId([7; 32]);
        let signers = Signers::parse(&format!("# ours\n\nme@here {KEY}")).unwrap();
        assert_eq!(
            signers.check("main", &head, SIGNATURE.as_bytes()).unwrap(),
            "me@here"
        );
        assert!(is_signature("main", &head, SIGNATURE.as_bytes()));
        assert!(!is_signature("other", &head, SIGNATURE.as_bytes()));
        assert!(!is_signature("main", &head, b"junk"));
        for (branch, head, signature) in [
            ("other", head, SIGNATURE),
            ("main", VersionId([8; 32]), SIGNATURE),
            ("main", head, ""),
            (
                "main",
                head,
                "-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n",
            ),
        ] {
            let e = signers.check(branch, &head, signature.as_bytes()).unwrap_err();
            assert_eq!(e.kind(), Kind::Refused, "{e}");
        }
        let nobody = Signers::parse("").unwrap();
        assert!(nobody.check("main", &head, SIGNATURE.as_bytes()).is_err());
    }

    #[test]
    fn what_is_not_understood_is_not_passed_over() {
        let within = |options: &str| Signers::parse(&format!("me {options} {KEY}"));
        assert_eq!(within("namespaces=\"git,zspace-branch\"").unwrap().0.len(), 1);
        for bad in [
            "namespaces=\"git\"",
            "cert-authority",
            "valid-before=\"20200101\"",
        ] {
            assert_eq!(within(bad).unwrap_err().kind(), Kind::Usage, "{bad}");
        }
        for bad in [
            "me ssh-rsa AAAA",
            "me",
            KEY,
            "me ssh-ed25519",
            "me ssh-ed25519 AAAA",
        ] {
            assert!(Signers::parse(bad).is_err(), "{bad}");
        }
    }
}

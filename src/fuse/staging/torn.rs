//! Whether a process that closes a file is dying by a signal, or of an error.

use std::os::unix::fs::MetadataExt;

/// What is said of who a signal ended.
const KILLED: &str = "was killed";

/// The kernel's flag of a thread that a signal ended (include/linux/sched.h).
const PF_SIGNALED: u64 = 0x400;

/// Says who, if the thread `pid` is being ended by a signal, or ends with an error. Asked while it waits for the answer to a FLUSH
/// request: its files are closed after its fate is settled.
pub(super) fn dying(pid: u32) -> Option<String> {
    let proc = format!("/proc/{pid}");
    // What is being replaced by execve(2) closes files, too, and until it is answered its stat keeps whoever reads it waiting.
    let status = std::fs::read_to_string(format!("{proc}/status")).ok()?;
    if !exiting(&status) {
        return None;
    }
    let stat = std::fs::read(format!("{proc}/stat")).ok()?;
    // The exit status is shown only to those who may trace the process; others read 0.
    let me = rustix::process::geteuid().as_raw();
    let may_see = me == 0 || std::fs::metadata(&proc).is_ok_and(|m| m.uid() == me);
    let (name, how) = parse(&String::from_utf8_lossy(&stat), may_see)?;
    Some(its_writer(&name, pid, &how))
}

/// proc_pid_status(5): a process that closes its files as it ends has no table of them any more.
fn exiting(status: &str) -> bool {
    let size = status.lines().find_map(|l| l.strip_prefix("FDSize:"));
    size.is_some_and(|n| n.trim() == "0")
}

/// Who ended, and how, unless it was in peace. proc_pid_stat(5): field 9 is the flags, field 52 the exit status. Threads that
/// exit_group(2) ends carry the flag as well, and only the status tells them apart.
fn parse(stat: &str, may_see_status: bool) -> Option<(String, String)> {
    let (head, tail) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1;
    let mut fields = tail.split_ascii_whitespace();
    let flags: u64 = fields.nth(9 - 3)?.parse().ok()?;
    let status: i32 = fields.nth(52 - 10)?.parse().ok()?;
    let how = match may_see_status {
        true => ended_badly(status)?,
        false if flags & PF_SIGNALED != 0 => KILLED.to_owned(),
        false => return None,
    };
    Some((name.to_owned(), how))
}

/// What is said of a writer that did not end in peace.
pub(super) fn its_writer(name: &str, id: u32, how: &str) -> String {
    format!("its writer ({name}, process {id}) {how}")
}

/// How a process with this status (as wait(2) tells it) ended, unless it was in peace.
pub(super) fn ended_badly(status: i32) -> Option<String> {
    match (status & 0x7f, status >> 8 & 0xff) {
        (0, 0) => None,
        (0, code) => Some(format!("ended with an error (exit status {code})")),
        _ => Some(KILLED.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(flags: u64, status: i32) -> String {
        let between = vec!["0"; 52 - 10].join(" ");
        format!("12 (a) (b c) R 1 2 3 4 5 {flags} {between} {status}\n")
    }

    #[test]
    fn who_ends_in_peace_is_told_from_others() {
        let ended = |how: &str| Some(("a) (b c".to_owned(), how.to_owned()));
        assert_eq!(parse(&stat(0x400, 9), true), ended(KILLED));
        assert_eq!(
            parse(&stat(0x4, 0x300), true),
            ended("ended with an error (exit status 3)")
        );
        assert_eq!(parse(&stat(0x400, 0), true), None);
        assert_eq!(parse(&stat(0x400, 0), false), ended(KILLED));
        assert_eq!(parse(&stat(0x40, 0), false), None);
        assert_eq!(parse("", true), None);
        assert_eq!(parse("12 (x", true), None);
    }

    #[test]
    fn only_who_ends_has_no_files() {
        assert!(exiting("Name:\tx\nFDSize:\t0\nGroups:\t0\n"));
        assert!(!exiting("Name:\tx\nFDSize:\t64\n"));
        assert!(!exiting(&std::fs::read_to_string("/proc/self/status").unwrap()));
    }

    #[test]
    fn the_living_are_not_dying() {
        assert_eq!(dying(std::process::id()), None);
        assert_eq!(dying(u32::MAX), None);
    }

    #[test]
    fn the_fields_are_where_the_kernel_puts_them() {
        let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        assert_eq!(fields.len(), 50);
    }
}

//! Whether a process that closes a file is dying by a signal.

use std::os::unix::fs::MetadataExt;

/// The kernel's flag of a thread that a signal ended (include/linux/sched.h).
const PF_SIGNALED: u64 = 0x400;

/// Says who, if the thread `pid` is being ended by a signal. Asked while it waits for the answer to a FLUSH request: its
/// files are closed after its fate is settled.
pub(super) fn dying(pid: u32) -> Option<String> {
    let proc = format!("/proc/{pid}");
    let stat = std::fs::read(format!("{proc}/stat")).ok()?;
    // The exit status is shown only to those who may trace the process; others read 0.
    let me = rustix::process::geteuid().as_raw();
    let may_see = me == 0 || std::fs::metadata(&proc).is_ok_and(|m| m.uid() == me);
    parse(&String::from_utf8_lossy(&stat), may_see)
        .map(|name| format!("its writer ({name}, process {pid}) was killed"))
}

/// proc_pid_stat(5): field 9 is the flags, field 52 the exit status. Threads that exit_group(2) ends carry the flag as well,
/// and only the status tells them apart.
fn parse(stat: &str, may_see_status: bool) -> Option<String> {
    let (head, tail) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1;
    let mut fields = tail.split_ascii_whitespace();
    let flags: u64 = fields.nth(9 - 3)?.parse().ok()?;
    let status: i64 = fields.nth(52 - 10)?.parse().ok()?;
    let signalled = flags & PF_SIGNALED != 0 && (!may_see_status || status & 0x7f != 0);
    signalled.then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(flags: u64, status: i64) -> String {
        let between = vec!["0"; 52 - 10].join(" ");
        format!("12 (a) (b c) R 1 2 3 4 5 {flags} {between} {status}\n")
    }

    #[test]
    fn only_a_signal_counts() {
        assert_eq!(parse(&stat(0x400, 9), true), Some("a) (b c".to_owned()));
        assert_eq!(parse(&stat(0x400, 0x100), true), None);
        assert_eq!(parse(&stat(0x400, 0), false), Some("a) (b c".to_owned()));
        assert_eq!(parse(&stat(0x40, 9), true), None);
        assert_eq!(parse("", true), None);
        assert_eq!(parse("12 (x", true), None);
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

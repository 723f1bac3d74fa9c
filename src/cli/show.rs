//! How values are shown to people, and read from them.

use crate::error::{Error, IoContext, Kind, Result};
use crate::store::{OnProgress, Progress, Timestamp};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::sync::Arc;

/// Prints lines to standard output; a closed pipe ends the program quietly.
pub(super) fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .doing(|| "write to standard output".into())
}

/// Prints a value as one line of JSON.
pub(super) fn print_json(value: &impl serde::Serialize) -> Result<()> {
    let text = serde_json::to_string(value).map_err(|e| Error::new(Kind::Io, format!("write JSON: {e}")))?;
    print(&format!("{text}\n"))
}

/// Bytes in a unit that fits: `3.9 MB`.
pub(super) fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["B", "kB", "MB", "GB", "TB", "PB"];
    let (mut v, mut unit) = (n as f64, 0);
    while v >= 999.5 && unit + 1 < UNITS.len() {
        (v, unit) = (v / 1000.0, unit + 1);
    }
    match unit {
        0 => format!("{n} B"),
        _ if v < 9.95 => format!("{v:.1} {}", UNITS[unit]),
        _ => format!("{v:.0} {}", UNITS[unit]),
    }
}

/// A size that a person wrote: bytes, or with K, M, G or T (powers of 1024).
pub(super) fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..]
        .to_ascii_uppercase()
        .trim_end_matches("IB")
        .trim_end_matches('B')
    {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err("write a number of bytes, or one with K, M, G or T".into()),
    };
    let n: u64 = digits
        .parse()
        .map_err(|_| "write a number of bytes, or one with K, M, G or T".to_owned())?;
    n.checked_mul(1 << unit).ok_or_else(|| "is too large".into())
}

/// A time as `2026-05-01 12:00:00` UTC.
pub(super) fn time(t: Timestamp) -> String {
    // Days to a date after Howard Hinnant's "chrono-compatible low-level date algorithms".
    let (days, s) = (t.seconds.div_euclid(86_400), t.seconds.rem_euclid(86_400));
    let z = days.saturating_add(719_468);
    let (era, doe) = (z.div_euclid(146_097), z.rem_euclid(146_097));
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let (d, m) = (
        doy - (153 * mp + 2) / 5 + 1,
        if mp < 10 { mp + 3 } else { mp - 9 },
    );
    let y = yoe + era * 400 + i64::from(m <= 2);
    format!(
        "{y:04}-{m:02}-{d:02} {:02}:{:02}:{:02}",
        s / 3600,
        s / 60 % 60,
        s % 60
    )
}

/// A share as per cent.
pub(super) fn percent(part: f64) -> String {
    format!("{:.2}%", part * 100.0)
}

/// Text that may hold anything, safe for a terminal.
pub(super) fn printable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    text.chars()
        .flat_map(|c| {
            if c.is_control() {
                c.escape_default().collect::<Vec<_>>()
            } else {
                vec![c]
            }
        })
        .collect()
}

/// A progress bar for something that takes long; none where standard error is no terminal.
pub(super) fn bar(what: &str, total: u64) -> ProgressBar {
    let template = "{msg} {wide_bar} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta}";
    styled_bar(what, total, template)
}

/// The same for what is counted and not measured in bytes.
pub(super) fn counting_bar(what: &str) -> ProgressBar {
    styled_bar(what, 0, "{msg} {wide_bar} {pos}/{len} {eta}")
}

/// The same for bytes of which nobody knows how many there will be.
pub(super) fn transfer_bar(what: &str) -> ProgressBar {
    styled_bar(
        what,
        0,
        "{msg} {spinner} {decimal_bytes} {decimal_bytes_per_sec} {elapsed}",
    )
}

fn styled_bar(what: &str, total: u64, template: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(total);
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar
}

/// What shows on a bar how far a commit is; nothing where the bar is not seen.
pub(super) fn progress(bar: &ProgressBar) -> Option<OnProgress> {
    let shown = bar.clone();
    let progress = move |p: Progress| {
        shown.set_length(p.total);
        shown.set_position(p.done);
    };
    (!bar.is_hidden()).then(|| Arc::new(progress) as _)
}

/// Rows as columns: each as wide as its widest cell, the last one free; numbers (as `right` says) to the right.
pub(super) fn table(rows: &[Vec<String>], right: &[usize]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| {
        rows.iter()
            .filter_map(|r| r.get(c))
            .map(|s| s.chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<_> = (0..columns).map(width).collect();
    let mut out = String::new();
    for row in rows {
        let cell = |(c, s): (usize, &String)| match widths[c] {
            w if right.contains(&c) => format!("{s:>w$}"),
            _ if c + 1 == columns => s.clone(),
            w => format!("{s:<w$}"),
        };
        let line: Vec<_> = row.iter().enumerate().map(cell).collect();
        out.push_str(line.join("  ").trim_end());
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes() {
        assert_eq!(time(Timestamp { seconds: 0, nanos: 0 }), "1970-01-01 00:00:00");
        assert_eq!(
            time(Timestamp {
                seconds: 951_827_696,
                nanos: 0
            }),
            "2000-02-29 12:34:56"
        );
        assert_eq!(
            time(Timestamp {
                seconds: -1,
                nanos: 0
            }),
            "1969-12-31 23:59:59"
        );
        assert_eq!(
            (bytes(999), bytes(1_320_936), bytes(999_600)),
            ("999 B".into(), "1.3 MB".into(), "1.0 MB".into())
        );
        assert_eq!(parse_size("2G"), Ok(2 << 30));
        assert_eq!(parse_size("512MiB"), Ok(512 << 20));
        assert!(parse_size("x").is_err() && parse_size("9999999999999T").is_err() && parse_size("").is_err());
    }

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable(b"a\x1b[31mb\n"), "a\\u{1b}[31mb\\n");
    }
}

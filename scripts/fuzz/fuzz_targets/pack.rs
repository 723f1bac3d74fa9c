//! The parsers of packs, journal and index.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zspace::pack::parse::{self, Pos, RunHeader, SegmentHeader};

fuzz_target!(|data: &[u8]| {
    let [which, data @ ..] = data else { return };
    match which % 8 {
        0 => drop(parse::record(data.to_vec())),
        1 => drop(parse::record_header(data)),
        2 => drop(parse::journal_record(data)),
        3 => drop(parse::journal_len(data)),
        4 => drop(SegmentHeader::decode(data).map(|h| assert_eq!(h.encode(), &data[..h.encode().len()]))),
        5 => drop(Pos::decode_mark(data).map(|(s, p)| assert_eq!(p.encode_mark(&s), data))),
        6 => {
            if let Ok(h) = RunHeader::decode(data) {
                assert_eq!(h.encode(), &data[..h.encode().len()]);
                drop(parse::bucket_table(&data[h.encode().len()..], &h));
            }
        }
        _ => drop(parse::run_entries(data, 0)),
    }
    let _ = parse::later_batch(data, 0);
});

// Sizes of every revision of some chunks against every other.
use std::io::Read;
use zspace::codec;
use zspace::tensor::Number;
fn main() {
    let mut args = std::env::args().skip(1);
    let (chunk, step): (usize, usize) = (args.next().unwrap().parse().unwrap(), args.next().unwrap().parse().unwrap());
    let number = match args.next().unwrap().as_str() { "bf16" => Number::BF16, _ => Number::F32 };
    let files: Vec<String> = args.collect();
    let data: Vec<Vec<u8>> = files.iter().map(|f| {
        let mut b = Vec::new();
        std::fs::File::open(f).unwrap().read_to_end(&mut b).unwrap();
        let n = u64::from_le_bytes(b[..8].try_into().unwrap()) as usize;
        b[8 + n..].to_vec()
    }).collect();
    let mut at = 0;
    while at + chunk <= data[0].len() {
        let raws: Vec<&[u8]> = data.iter().map(|d| &d[at..at + chunk]).collect();
        let out: Vec<String> = std::thread::scope(|s| {
            let hs: Vec<_> = (0..2).map(|t| { let raws = &raws; s.spawn(move || {
                (0..raws.len()).filter(|i| i % 2 == t).map(|i| {
                    let row: Vec<String> = (0..raws.len()).map(|j| {
                        let base = (i != j).then_some(raws[j]);
                        codec::encode(raws[i], number, base).payload.len().to_string()
                    }).collect();
                    (i, row.join(" "))
                }).collect::<Vec<_>>()
            })}).collect();
            let mut all: Vec<_> = hs.into_iter().flat_map(|h| h.join().unwrap()).collect();
            all.sort();
            all.into_iter().map(|x| x.1).collect()
        });
        println!("# {at}\n{}", out.join("\n"));
        at += step;
    }
}

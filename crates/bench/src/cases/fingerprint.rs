//! What makes two requests the same: canonical JSON, hashed.

use std::hint::black_box;
use std::time::Instant;

use pg_idempotency::Fingerprint;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::bench::Bench;
use crate::measure::{Measured, named};
use crate::report::Report;
use crate::way::Way;

pub(crate) const ABOUT: &str = "\
There are three bodies of 256 KB of JSON: an order with many lines, a few long texts, and a list of numbers. All run on one \
core. *SHA-256 alone* hashes the text that serde_json has made, without the time to make it. *serde_json, then SHA-256* \
includes that time, and keeps the members in their own order.";

const NAME: &str = "fingerprint";
const BYTES: usize = 256 * 1024;
const ALONE: &str = "SHA-256 alone";
const CANONICAL: &str = "canonical JSON into SHA-256";

#[derive(Serialize)]
struct Order {
    reference: String,
    lines: Vec<Line>,
}

#[derive(Serialize)]
struct Line {
    sku: String,
    quantity: u32,
    price: f64,
    note: Option<String>,
}

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    let line = |n: usize| Line {
        sku: format!("sku-{n:08}"),
        quantity: n as u32 % 7,
        price: n as f64 * 0.25,
        note: n.is_multiple_of(3).then(|| "left at the door".to_owned()),
    };
    let order = Order { reference: "order 1".to_owned(), lines: (0..BYTES / 73).map(line).collect() };
    compare(bench, report, "an order of 3590 lines", &order)?;
    let texts = serde_json::json!({ "texts": vec!["All that a customer has to say. ".repeat(BYTES / 128); 4] });
    compare(bench, report, "four long texts", &texts)?;
    let numbers: Vec<f64> = (0..BYTES / 8).map(|n| n as f64 * 1.5).collect();
    compare(bench, report, "a list of numbers", &numbers)
}

fn compare<T: Serialize>(bench: &Bench, report: &mut Report, title: &str, body: &T) -> anyhow::Result<()> {
    let text = serde_json::to_vec(body)?;
    let nothing = |name| Measured::of_rounds(Way::new(name, |_, _| Box::pin(async { Ok(()) })));
    let mut measured = [ALONE, "serde_json, then SHA-256", CANONICAL].map(nothing);
    for round in 0..=bench.scale.rounds {
        for (at, one) in measured.iter_mut().enumerate() {
            let hash = || {
                anyhow::Ok(match at {
                    0 => Sha256::digest(black_box(&text))[0],
                    1 => Sha256::digest(serde_json::to_vec(black_box(body))?)[0],
                    _ => Fingerprint::of_json(black_box(body))?.as_bytes()[1],
                })
            };
            let (started, mut latencies) = (Instant::now(), Vec::new());
            while latencies.is_empty() || started.elapsed() < bench.scale.slice {
                let began = Instant::now();
                black_box(hash()?);
                latencies.push(began.elapsed().as_secs_f64() * 1e3);
            }
            if round > 0 {
                one.add(latencies.len() as f64 / started.elapsed().as_secs_f64(), latencies);
            }
        }
    }
    let title = format!("{title}, {} B of JSON", text.len());
    report.speeds(NAME, &title, None, "fingerprints", &measured);
    let times = named(&measured, ALONE).zip(named(&measured, CANONICAL)).map(|(alone, one)| alone.against(one));
    report.figure(NAME, format!("Fingerprint of {title}: time over that of SHA-256 alone"), None, times);
    Ok(())
}

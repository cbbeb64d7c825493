//! Where the client's memory goes: allocations of a call, the crate's beside those of sqlx.

use crate::alternatives::{bare_call, library};
use crate::bench::Bench;
use crate::client::response;
use crate::footprint::footprint;
use crate::report::Report;
use crate::target::Bound::Told;

pub(crate) const ABOUT: &str = "\
Allocations and reallocations of one first call, sqlx's and the closure's own among them; what the crate adds is the difference \
to the same SQL by hand, which makes, encodes and binds the same response. It adds one allocation: the response is read back \
before it is stored, because what cannot be replayed must not commit. Most of the other bytes are no allocation of the crate's: \
its future is some 3 KB larger, and the benchmark boxes it.";

const NAME: &str = "allocations";
/// For the WAL, which stands under `first_call`: no more, because large responses would take gigabytes of it.
const CALLS: usize = 30;

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    bench.clear().await?;
    let counted = bench.counted()?;
    let mut costs = Vec::new();
    for (size, bytes) in [("300 B", 300), ("4 KB", 4096), ("256 KB", 256 * 1024)] {
        let text = response(bytes);
        let ways =
            [bare_call(), bench.by_hand.first_call(text.as_str().into()), library::first_call(text.as_str().into())];
        let mut seen = Vec::new();
        for way in ways {
            let cost = footprint(bench, &counted, &way, CALLS).await?;
            seen.extend(cost.map(|cost| (cost.allocations, cost.allocated_bytes)));
            costs.push((format!("{}, {size}", way.name), cost));
        }
        if let [_, by_hand, library] = seen[..] {
            let what = format!("First call, {size} of response: allocations more than the same SQL by hand");
            report.target(NAME, what, None, Told, Some(library.0 - by_hand.0));
            let what = format!("First call, {size} of response: bytes allocated more than the same SQL by hand");
            report.target(NAME, what, None, Told, Some(library.1 - by_hand.1));
        }
    }
    report.footprints(NAME, "call", costs);
    bench.clear().await
}

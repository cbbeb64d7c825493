//! Where the client's memory goes: allocations of a call, the crate's beside those of sqlx.

use crate::alternatives::{bare_call, library};
use crate::bench::Bench;
use crate::client::response;
use crate::footprint::{Footprint, footprint};
use crate::report::Report;

pub(crate) const ABOUT: &str = "\
The tables count allocations and reallocations of one first call, including those of sqlx and of the closure. The difference \
to the same SQL by hand is what the crate adds, because both make, encode and bind the same response. The crate also decodes \
the response before it stores it, because a response that cannot be replayed must not commit. The benchmark boxes the future of \
a call, and the crate's is larger. The section First call lists the bytes on disk: this one has too few calls to count them.";

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
        for way in ways {
            let cost = footprint(bench, &counted, &way, CALLS).await?;
            // Bytes on disk come in pages, and so few calls fill none.
            let cost = cost.map(|cost| Footprint { heap_bytes: None, index_bytes: None, hot: None, ..cost });
            costs.push((format!("{}, {size}", way.name), cost));
        }
    }
    report.footprints(NAME, "call", costs);
    bench.clear().await
}

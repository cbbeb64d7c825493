//! Two demos with an HTTP door, one in transaction mode and one in steps. They are programs of crates/demos. This crate
//! does not depend on that one, because it judges pg-idempotency as a stranger.

use std::path::{Path, PathBuf};

use anyhow::ensure;

use crate::page;
use crate::program::{Checked, Service};
use crate::skipped;

/// A program of crates/demos, which a build of the workspace puts beside the check.
fn demo(name: &str) -> Option<PathBuf> {
    let program = Path::new(env!("CARGO_BIN_EXE_idempotency-check")).with_file_name(name);
    if program.exists() { Some(program) } else { skipped(name, "`cargo build -p demos` has not built it") }
}

async fn check(service: Service) -> anyhow::Result<Checked> {
    let service = service.with_own_tables().with_options(["--other-header", "X-User-ID: 43"]);
    let checked = service.check(&[]).await?;
    page::record(service.name, &checked)?;
    Ok(checked)
}

/// The client's patience where keys in doubt are expected: longer than the leases, which last two seconds.
pub(crate) const PATIENCE: &str = "4s";

#[tokio::test]
async fn the_demo_payments_is_right() -> anyhow::Result<()> {
    let Some(program) = demo("payments") else { return Ok(()) };
    let service = Service::new("payments", [program.as_os_str(), "serve".as_ref(), "{port}".as_ref()])?.with_request(
        "/payments",
        r#"{"amount":1250,"currency":"EUR","customer_id":"c-17"}"#,
        "select count(*), coalesce(sum(amount), 0) from payments_served.payment",
    );
    check(service).await?.ensure_clean()
}

/// Its last step sends a text at most once. The check sees the rows, and not what the gateway did.
#[tokio::test]
async fn the_demo_rides_leaves_texts_in_doubt_and_nothing_worse() -> anyhow::Result<()> {
    let Some(program) = demo("rides") else { return Ok(()) };
    let service = Service::new("rides", [program.as_os_str(), "serve".as_ref(), "{port}".as_ref()])?.with_request(
        "/rides",
        r#"{"from":"a","to":"b","card":"tok_1","phone":"+44","cents":1250}"#,
        "select (select count(*) from rides_served.ride), (select count(*) from rides_served.receipt)",
    );
    stuck_at_worst(&check(service.with_options(["--patience", PATIENCE])).await?)
}

fn stuck_at_worst(checked: &Checked) -> anyhow::Result<()> {
    let worse: Vec<_> = checked.findings().into_iter().filter(|finding| finding.verdict != "stuck").collect();
    ensure!(checked.exit <= 1 && worse.is_empty(), "exit {}, {worse:?}\n{}", checked.exit, checked.printed);
    Ok(())
}

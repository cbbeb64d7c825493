//! Planted errors: each mistake is found and named by the interruption that shows it, and without a mistake nothing is.

mod mistake;
mod server;

use anyhow::ensure;
use tokio::task::JoinSet;

use crate::page;
use crate::program::{Finding, Service};
use mistake::Mistake;

/// The tests start this binary again for the server that they check.
#[test]
#[ignore = "is the server that the other tests start"]
fn the_planted_server() {
    let Ok(mistake) = std::env::var("PLANTED_MISTAKE") else { return };
    let database_url = std::env::var("DATABASE_URL").expect("the check sets it");
    let port = std::env::var("PORT").expect("the tests set it").parse().expect("a port");
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    runtime.block_on(server::serve(&database_url, port, Mistake::from_name(&mistake))).expect("the server serves");
}

fn shop(mistake: Option<Mistake>) -> anyhow::Result<Service> {
    let test = ["--exact", "planted::the_planted_server", "--ignored", "--nocapture"];
    let command = [std::env::current_exe()?.into_os_string()].into_iter().chain(test.map(Into::into));
    let name = mistake.map_or("none".to_owned(), Mistake::name);
    Ok(Service::new("planted", command)?
        .with_environment("PLANTED_MISTAKE", name)
        .with_options(["--other-header", "X-User-ID: 43"]))
}

/// What the check says of a mistake: the verdict, each interruption or undisturbed check that shows it, and the
/// interrupted message.
pub(crate) const FOUND: [(Mistake, &str, &[&str], &str); 15] = [
    (Mistake::EffectBeforeClaim, "two_effects", &["lost-before"], "insert into idempotency_key"),
    (Mistake::KeyAfterCommit, "two_effects", &["lost-before"], "insert into idempotency_key"),
    (Mistake::AnswerAfterCommit, "other_answer", &["lost-before"], "update idempotency_key"),
    (Mistake::LockElsewhere, "two_effects", &["lost-after"], "insert into payments"),
    (Mistake::JsonbResponse, "other_answer", &["again"], ""),
    (Mistake::FailureStored, "stuck", &["lost-before"], "insert into payments"),
    (Mistake::KeyWithoutScope, "no_effect_but_success", &["another_user"], ""),
    (Mistake::ProcessingForever, "stuck", &["lost-before"], "insert into payments"),
    (Mistake::BodyNotCompared, "not_refused", &["another_body"], ""),
    (Mistake::WriteThroughPool, "two_effects", &["lost-before"], "commit"),
    (Mistake::UncommittedAnswer, "no_effect_but_success", &["lost-before"], "commit"),
    (Mistake::AnswerBeforeCommit, "no_effect_but_success", &["lost-before"], "commit"),
    (Mistake::DuplicateEnqueued, "two_effects", &["again"], ""),
    (
        Mistake::BrokenBodyPerformed,
        "performed_though_cut_off",
        &["cut_off", "reset_no_error", "reset_cancel", "reset_internal_error"],
        "",
    ),
    (Mistake::DetachedAtOnce, "performed_though_cut_off", &["reset_no_error"], ""),
];

/// With this query, each payment belongs to the try of its key.
const OF_THE_KEY: &str = "select count(*), coalesce(sum(amount), 0) from payments where key = '{key}'";

/// All at once, because a check waits for most of its time.
#[tokio::test]
async fn each_mistake_is_found_and_named() -> anyhow::Result<()> {
    let mut checks = JoinSet::new();
    for (mistake, verdict, by, at) in FOUND {
        checks.spawn(found(mistake, verdict, by, at));
    }
    checks.join_all().await.into_iter().collect()
}

async fn found(
    mistake: Mistake,
    verdict: &'static str,
    by: &'static [&'static str],
    at: &'static str,
) -> anyhow::Result<()> {
    // Each stuck key takes as long as the client's patience.
    let patience: &[&str] = if verdict == "stuck" { &["--patience", "1s"] } else { &[] };
    let mut service = shop(Some(mistake))?;
    if mistake == Mistake::DuplicateEnqueued {
        service = service.with_effects(OF_THE_KEY);
    }
    let checked = service.check(patience).await?;
    let findings = checked.findings();
    let named =
        |found: &Finding, by| found.verdict == verdict && found.by == by && found.sql.to_lowercase().contains(at);
    let is_found = checked.exit == 1 && by.iter().all(|by| findings.iter().any(|found| named(found, *by)));
    ensure!(is_found, "{mistake:?}: exit {}, {findings:#?}\n{}", checked.exit, checked.printed);
    Ok(())
}

#[tokio::test]
async fn without_a_mistake_nothing_is_found() -> anyhow::Result<()> {
    let checked = shop(None)?.check(&[]).await?;
    page::record("planted", &checked)?;
    checked.ensure_clean()
}

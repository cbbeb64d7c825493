//! Planted errors: each mistake is found and named by the interruption that shows it, and without a mistake nothing is.

mod mistake;
mod server;

use anyhow::ensure;

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

/// A whole run finds the mistake, and at least once by this interruption, or undisturbed check, at a message that says this.
async fn found(mistake: Mistake, verdict: &str, by: &str, at: &str) -> anyhow::Result<()> {
    // Each stuck key takes as long as the client's patience.
    let patience: &[&str] = if verdict == "stuck" { &["--patience", "1s"] } else { &[] };
    let checked = shop(Some(mistake))?.check(patience).await?;
    let findings = checked.findings();
    let named = |found: &Finding| found.verdict == verdict && found.by == by && found.sql.to_lowercase().contains(at);
    let is_found = checked.exit == 1 && findings.iter().any(named);
    ensure!(is_found, "{mistake:?}: exit {}, {findings:#?}\n{}", checked.exit, checked.printed);
    Ok(())
}

#[tokio::test]
async fn without_a_mistake_nothing_is_found() -> anyhow::Result<()> {
    let checked = shop(None)?.check(&[]).await?;
    page::record("planted", &checked)?;
    checked.ensure_clean()
}

#[tokio::test]
async fn an_effect_before_the_claim_happens_twice() -> anyhow::Result<()> {
    found(Mistake::EffectBeforeClaim, "two_effects", "lost-before", "insert into idempotency_key").await
}

#[tokio::test]
async fn a_key_that_is_stored_after_commit_may_be_missing() -> anyhow::Result<()> {
    found(Mistake::KeyAfterCommit, "two_effects", "lost-before", "insert into idempotency_key").await
}

#[tokio::test]
async fn a_lock_in_another_store_does_not_know_what_was_committed() -> anyhow::Result<()> {
    found(Mistake::LockElsewhere, "two_effects", "lost-after", "insert into payments").await
}

#[tokio::test]
async fn a_response_in_jsonb_is_replayed_with_other_bytes() -> anyhow::Result<()> {
    found(Mistake::JsonbResponse, "other_answer", "again", "").await
}

#[tokio::test]
async fn a_stored_failure_blocks_the_key() -> anyhow::Result<()> {
    found(Mistake::FailureStored, "stuck", "lost-before", "insert into payments").await
}

#[tokio::test]
async fn a_key_without_scope_gives_a_user_the_answer_of_another() -> anyhow::Result<()> {
    found(Mistake::KeyWithoutScope, "no_effect_but_success", "another_user", "").await
}

#[tokio::test]
async fn a_claim_that_nobody_takes_over_blocks_the_key() -> anyhow::Result<()> {
    found(Mistake::ProcessingForever, "stuck", "lost-before", "insert into payments").await
}

#[tokio::test]
async fn a_body_that_is_not_compared_gets_the_answer_of_another() -> anyhow::Result<()> {
    found(Mistake::BodyNotCompared, "not_refused", "another_body", "").await
}

#[tokio::test]
async fn a_write_through_the_pool_commits_without_its_key() -> anyhow::Result<()> {
    found(Mistake::WriteThroughPool, "two_effects", "lost-before", "commit").await
}

#[tokio::test]
async fn an_answer_from_an_uncommitted_state_has_no_effect() -> anyhow::Result<()> {
    found(Mistake::UncommittedAnswer, "no_effect_but_success", "lost-before", "commit").await
}

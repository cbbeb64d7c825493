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
    Ok(Service::new("planted", command)?.with_environment("PLANTED_MISTAKE", name))
}

/// A retry that never gets a final answer is one after this time.
const PATIENCE: [&str; 2] = ["--patience", "3s"];

/// The check is told of the interruption that shows the mistake, so that this takes seconds.
async fn interrupted(mistake: Mistake, interruption: &str, at: &str, verdict: &str) -> anyhow::Result<()> {
    let shop = shop(Some(mistake))?.with_options(PATIENCE);
    let all_messages = shop.check(&["--only", "1:lost-before"]).await?;
    let only = format!("{}:{interruption}", all_messages.number_of(at)?);
    let checked = shop.check(&["--only", &only]).await?;
    let found = checked.findings();
    let named = found.iter().any(|Finding { verdict: found, by }| {
        found == verdict && by.starts_with(interruption) && by.to_lowercase().contains(at)
    });
    ensure!(checked.exit == 1 && named, "{mistake:?}: {found:?}, exit {}\n{}", checked.exit, checked.printed);
    // The same interruption of the right server.
    let right = self::shop(None)?.with_options(PATIENCE);
    let all_messages = right.check(&["--only", "1:lost-before"]).await?;
    right.check(&["--only", &format!("{}:{interruption}", all_messages.number_of(at)?)]).await?.ensure_clean()
}

async fn undisturbed(mistake: Mistake, check: &str, verdict: &str) -> anyhow::Result<()> {
    let checked = shop(Some(mistake))?
        .with_options(["--other-header", "X-User-ID: 43"])
        .check(&["--only", "1:lost-before"])
        .await?;
    let expected = Finding { verdict: verdict.into(), by: check.into() };
    let found = checked.findings();
    ensure!(checked.exit == 1 && found.contains(&expected), "{mistake:?}: {found:?}\n{}", checked.printed);
    Ok(())
}

#[tokio::test]
async fn without_a_mistake_nothing_is_found() -> anyhow::Result<()> {
    let checked = shop(None)?.with_options(["--other-header", "X-User-ID: 43"]).check(&[]).await?;
    page::record("planted", &checked)?;
    checked.ensure_clean()
}

#[tokio::test]
async fn an_effect_before_the_claim_happens_twice() -> anyhow::Result<()> {
    interrupted(Mistake::EffectBeforeClaim, "lost-before", "insert into idempotency_key", "two_effects").await
}

#[tokio::test]
async fn a_key_that_is_stored_after_commit_may_be_missing() -> anyhow::Result<()> {
    interrupted(Mistake::KeyAfterCommit, "lost-before", "insert into idempotency_key", "two_effects").await
}

#[tokio::test]
async fn a_lock_in_another_store_does_not_know_what_was_committed() -> anyhow::Result<()> {
    interrupted(Mistake::LockElsewhere, "lost-after", "insert into payments", "two_effects").await
}

#[tokio::test]
async fn a_response_in_jsonb_is_replayed_with_other_bytes() -> anyhow::Result<()> {
    undisturbed(Mistake::JsonbResponse, "again", "other_answer").await
}

#[tokio::test]
async fn a_stored_failure_blocks_the_key() -> anyhow::Result<()> {
    interrupted(Mistake::FailureStored, "lost-before", "insert into payments", "stuck").await
}

#[tokio::test]
async fn a_key_without_scope_gives_a_user_the_answer_of_another() -> anyhow::Result<()> {
    undisturbed(Mistake::KeyWithoutScope, "another_user", "no_effect_but_success").await
}

#[tokio::test]
async fn a_claim_that_nobody_takes_over_blocks_the_key() -> anyhow::Result<()> {
    interrupted(Mistake::ProcessingForever, "lost-before", "insert into payments", "stuck").await
}

#[tokio::test]
async fn a_body_that_is_not_compared_gets_the_answer_of_another() -> anyhow::Result<()> {
    undisturbed(Mistake::BodyNotCompared, "another_body", "not_refused").await
}

#[tokio::test]
async fn a_write_through_the_pool_commits_without_its_key() -> anyhow::Result<()> {
    interrupted(Mistake::WriteThroughPool, "lost-before", "commit", "two_effects").await
}

#[tokio::test]
async fn an_answer_from_an_uncommitted_state_has_no_effect() -> anyhow::Result<()> {
    interrupted(Mistake::UncommittedAnswer, "lost-before", "commit", "no_effect_but_success").await
}

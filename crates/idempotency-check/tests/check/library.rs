//! Services in the process of a test.

use std::time::Duration;

use idempotency_check::{Interruption, Verdict};
use sqlx::PgPool;

use crate::shop::Memory;
use crate::support::{check, with};

#[sqlx::test]
async fn a_right_service_has_no_findings(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    let report = check(&options, Memory::Right).await?.run().await?;
    assert!(report.findings.is_empty(), "{report}");
    let sql: Vec<_> = report.messages.iter().map(|message| &*message.sql).collect();
    let expected = [
        "BEGIN",
        "insert into keys (key, request) values ($1, $2) on conflict do nothing",
        "insert into payments (amount) values ($1) returning id",
        "update keys set answer = $2 where key = $1",
        "COMMIT",
    ];
    assert_eq!(sql, expected);
    assert_eq!(report.tries.len(), 4 * expected.len(), "nothing can kill the process of the test");
    assert!(report.tries.iter().all(|it| it.reached && it.verdict == Some(Verdict::OneEffect)), "{report}");
    Ok(())
}

#[sqlx::test]
async fn a_key_that_is_kept_after_the_commit_allows_a_second_payment(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    let report = check(&options, Memory::Late).await?.run().await?;
    let found = with(&report, Verdict::TwoEffects);
    let found = |message, interruption| {
        found.iter().any(|it| it.message == Some(message) && it.interruption == Some(interruption))
    };
    // BEGIN, the look, the payment and COMMIT; then BEGIN, the key, its answer and COMMIT.
    assert!(found(4, Interruption::LostAfter), "{report}");
    assert!(found(8, Interruption::LostBefore), "{report}");
    // The handler ends with its client, and keeps no key.
    assert!(found(4, Interruption::HangUp), "{report}");
    assert!(!found(4, Interruption::LostBefore) && !found(8, Interruption::LostAfter), "{report}");
    Ok(())
}

#[sqlx::test]
async fn a_claim_that_nobody_releases_is_stuck(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    // The payment. Each request of the client is answered in this time, also on a busy machine.
    let check = check(&options, Memory::Stuck).await?.only(5, Interruption::LostBefore);
    let report = check.patience(Duration::from_secs(10)).run().await?;
    assert_eq!((report.findings.len(), with(&report, Verdict::Stuck).len()), (1, 1), "{report}");
    Ok(())
}

#[sqlx::test]
async fn one_try_can_be_repeated(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    let report = check(&options, Memory::Late).await?.only(4, Interruption::LostAfter).run().await?;
    assert_eq!((report.tries.len(), report.findings.len()), (1, 1), "{report}");
    let story = report.findings[0].story.join("\n");
    let parts = [
        "   4  COMMIT   <-- the server executes this, and the connection is lost before the answer",
        "* answer to the first request: 500",
        "* answer to the retry request: 201",
        "* the effect: +2 +200; without an interruption: +1 +100",
    ];
    let places: Vec<_> =
        parts.iter().map(|part| story.find(part).unwrap_or_else(|| panic!("{part}: {story}"))).collect();
    assert!(places.is_sorted(), "{story}");
    Ok(())
}

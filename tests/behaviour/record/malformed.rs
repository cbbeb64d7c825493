//! Rows that a person has written by hand, and that no call leaves behind. Each is the problem of its own key.

use std::time::Duration;

use pg_idempotency::lease::{Finding, InDoubt, Lease};
use pg_idempotency::operator::{show, stats, unsettled};
use pg_idempotency::{Error, Key};
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use crate::lease::reconcile::{in_doubt, reconciler};
use crate::lease::resume::{abandoned, leasing};
use crate::support::key;

/// Probes of this lapse, of which the first is due, and which do not decode.
const COUNTS_AND_IS_MALFORMED: &str = "probes = jsonb_build_object('token', token,
    'lease_until', to_jsonb(lease_until at time zone 'UTC'),
    'of', '[{\"probes\": \"two\", \"no_trace\": 0, \"next\": 1}]'::jsonb)";

/// Assignments that spoil a record, whatever its mode is.
const SPOILS: [&str; 29] = [
    "probes = '5'",
    "probes = '[]'",
    "probes = 'null'",
    "probes = '\"text\"'",
    "probes = '{\"token\": \"x\"}'",
    "probes = '{\"token\": 1e400}'",
    "probes = jsonb_build_object('token', token, 'lease_until', 'soon', 'of', '[]'::jsonb)",
    "probes = jsonb_build_object('token', token, 'lease_until', 5, 'of', 5)",
    "probes = jsonb_build_object('token', token, 'of', '[]'::jsonb,
        'lease_until', to_jsonb(lease_until at time zone 'UTC'))",
    COUNTS_AND_IS_MALFORMED,
    "probes = repeat('[', 500) || repeat(']', 500)",
    "steps = '5'",
    "steps = '[1]'",
    "steps = 'null'",
    "steps = '\"text\"'",
    "steps = '{\"a\": 5}'",
    "steps = '{\"a\": {\"result\": 5}}'",
    "steps = '{\"a\": {\"result\": \"no JSON\", \"attempt\": 1e400, \"at\": \"soon\"}}'",
    "steps = '[{\"a\": {\"begun\": 5}}]'",
    "steps = repeat('[', 500) || repeat(']', 500)",
    "fingerprint = null",
    "fingerprint = ''",
    "attempt = -2147483648",
    "attempt = 2147483647",
    "request = ''",
    "request = decode('00ffff', 'hex')",
    "last_error = ''",
    "claimed_at = '-infinity'",
    "claimed_at = '4713-01-01 00:00:00+00 BC', expires_at = 'infinity'",
];

/// Copies the record of this value, with the assignment, claimed longer ago.
async fn spoil(pool: &PgPool, of: &str, value: &str, assignment: &str) {
    let copy = format!(
        "insert into idempotency.record
             (mode, scope, operation, value, fingerprint, token, attempt, claimed_at, lease_until, expires_at, request)
         select mode, scope, operation, '{value}', fingerprint, token + 1, attempt, claimed_at - interval '1 min',
             lease_until, expires_at, request
         from idempotency.record where value = '{of}'"
    );
    pool.execute(AssertSqlSafe(copy)).await.expect("a copy");
    // A literal with a colon would be a parameter elsewhere; here it is a text.
    let assignment =
        assignment.replace("repeat('[', 500) || repeat(']', 500)", "(repeat('[', 500) || repeat(']', 500))::jsonb");
    let spoil = format!("update idempotency.record set {assignment} where value = '{value}'");
    pool.execute(AssertSqlSafe(spoil)).await.expect("spoilt");
}

/// Rows with a key that no caller can have, older than every other one.
async fn nobodys(pool: &PgPool, of: &str) {
    let copies = format!(
        "insert into idempotency.record
             (mode, scope, operation, value, fingerprint, token, attempt, claimed_at, lease_until, expires_at, request)
         select mode, scope, operation, '{of}' || chr(1) || n::text, fingerprint, n, attempt, claimed_at - interval '1 h',
             lease_until, expires_at, request
         from idempotency.record, generate_series(1, 70) as n where value = '{of}'"
    );
    pool.execute(AssertSqlSafe(copies)).await.expect("copies");
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn an_operator_sees_and_removes_each_malformed_row_and_no_row_hides_another(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "most").await;
    abandoned(&pool, "steps").await;
    for (number, assignment) in SPOILS.into_iter().enumerate() {
        spoil(&pool, "most", &format!("most {number}"), assignment).await;
        spoil(&pool, "steps", &format!("steps {number}"), assignment).await;
    }
    nobodys(&pool, "most").await;
    let listed = unsettled(&pool, 1000, None, Some(Duration::ZERO)).await?;
    let is_listed = |value: &str| listed.iter().any(|shown| shown.key.value() == value);
    assert!(is_listed("most") && is_listed("steps"));
    assert_eq!(unsettled(&pool, 7, None, Some(Duration::ZERO)).await?.len(), 7);
    stats(&pool).await?;
    for (number, assignment) in SPOILS.into_iter().enumerate() {
        for kind in ["most", "steps"] {
            let key = key(&format!("{kind} {number}"));
            let shown = show(&pool, &key).await.map_err(|error| anyhow::anyhow!("{kind}, {assignment}: {error:?}"))?;
            // A claim that never began waits for no person.
            assert!(is_listed(key.value()) || assignment.starts_with("attempt = -"), "{kind}, {assignment}");
            shown.expect("a record").forget(&pool).await?;
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn a_reconciler_comes_to_a_key_behind_any_number_of_malformed_rows(pool: PgPool) -> anyhow::Result<()> {
    in_doubt(&pool, "most").await;
    for (number, assignment) in SPOILS.into_iter().enumerate() {
        spoil(&pool, "most", &format!("most {number}"), assignment).await;
    }
    nobodys(&pool, "most").await;
    // More than one search finds. No visit can note them.
    for number in 0..40 {
        spoil(&pool, "most", &format!("no lease {number}"), "lease_until = null").await;
    }
    let reconciler = reconciler();
    let is_reached = |key: &Key| key.value() == "most";
    for _ in 0..SPOILS.len() * 4 {
        let mut reached = false;
        let looks_up = async |asked: &InDoubt| {
            reached = is_reached(&asked.key);
            Ok::<_, Error>(Finding::Unknown)
        };
        reconciler.visit_one(&pool, looks_up).await?;
        if reached {
            return Ok(());
        }
        // The first probe of each is due.
        pool.execute(
            "update idempotency.record set probes = jsonb_set(probes, '{of,0,next}', '1')
             where jsonb_path_exists(probes, '$.of[*].probes ? (@ == 0)')",
        )
        .await?;
    }
    panic!("the key is never asked for");
}

#[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
async fn a_resumer_comes_to_a_key_behind_any_number_of_malformed_rows(pool: PgPool) -> anyhow::Result<()> {
    abandoned(&pool, "steps").await;
    for (number, assignment) in SPOILS.into_iter().enumerate() {
        // What does not decode ends its own attempt.
        if !assignment.starts_with("request") {
            spoil(&pool, "steps", &format!("steps {number}"), assignment).await;
        }
    }
    nobodys(&pool, "steps").await;
    let mut resumed = Vec::new();
    let work = async |lease: &Lease, _: String| Ok::<_, Error>(lease.key().value().to_owned());
    while let Some(value) = leasing().resume_one(&pool, "operation", work).await? {
        resumed.push(value);
    }
    assert!(resumed.contains(&"steps".to_owned()), "{resumed:?}");
    // Finished steps that cannot be decoded must not be performed again.
    for (number, assignment) in SPOILS.into_iter().enumerate() {
        let is_unreadable = assignment.starts_with("steps = ") && !assignment.starts_with("steps = '{");
        assert!(!is_unreadable || !resumed.contains(&format!("steps {number}")), "{assignment}");
    }
    Ok(())
}

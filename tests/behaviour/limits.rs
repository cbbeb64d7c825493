//! The settings at the ends of their ranges, in use. `tests/http/durations.rs` is about the ranges themselves.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Lease, LeaseOptions, Policy};
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::operator::{State, search, unsettled};
use pg_idempotency::testing::expire;
use pg_idempotency::{Error, Idempotency, Janitor, Key, Misuse, OnDuplicate, Outcome};
use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use serde_json::value::RawValue;
use sqlx::{Executor as _, PgConnection, PgPool};

use crate::support::{create_effects, effects, janitor, key, leave_effect, once, records, shown};

const MILLISECOND: Duration = Duration::from_millis(1);
const DAY: Duration = Duration::from_secs(24 * 3600);
const YEARS: Duration = Duration::from_secs(3660 * 24 * 3600);

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_call_keeps_its_promise_at_both_ends_of_the_retention(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let slow = async |conn: &mut PgConnection| {
        let id = leave_effect(conn, "slow").await?;
        conn.execute("select pg_sleep(0.01)").await?;
        Ok::<_, Error>(id)
    };
    let (way, key) = (Idempotency::new(), key("a"));
    // By default, the wait is half of the retention, which is under a millisecond here.
    for brief in [way.retention(MILLISECOND), way.retention(MILLISECOND).on_duplicate(OnDuplicate::Reject)] {
        let outlived = brief.run(&pool, &key, "body", slow).await;
        assert!(matches!(outlived, Err(Error::OutlivedRetention)), "{outlived:?}");
        assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    }
    let long = way.retention(YEARS).on_duplicate(OnDuplicate::Wait(Duration::from_secs(3600)));
    assert!(!long.run(&pool, &key, "body", slow).await?.is_replayed());
    assert!(long.run(&pool, &key, "body", slow).await?.is_replayed());
    assert!(shown(&pool, &key).await.retention_left > YEARS - DAY);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_lease_keeps_its_promise_at_both_ends_of_its_settings(pool: PgPool) -> anyhow::Result<()> {
    let policies: [fn(Duration) -> Policy; 3] = [
        |lease| Policy::AtLeastOnce { lease },
        |lease| Policy::InSteps { lease },
        |lease| Policy::AtMostOnce { lease },
    ];
    let (shortest, longest) = (10 * MILLISECOND, DAY / 2);
    for (number, policy) in policies.into_iter().enumerate() {
        let key = |name: &str| key(&format!("{name} {number}"));
        let work = async |lease: &Lease| Ok::<_, Error>(lease.attempt());
        for (name, leasing) in [
            ("least", LeaseOptions::new(policy(longest)).retention(2 * longest).max_attempts(NonZeroU32::MIN)),
            ("greatest", LeaseOptions::new(policy(longest)).retention(YEARS).max_attempts(NonZeroU32::MAX)),
        ] {
            let leasing = leasing.on_duplicate(OnDuplicate::Wait(Duration::from_secs(3600))).resume_after(DAY);
            for expected in [Outcome::Performed(1), Outcome::Replayed(1)] {
                assert_eq!(leasing.run(&pool, &key(name), "body", work).await?, expected, "{name}: {policy:?}");
            }
        }
        // The lease may be over before the work begins.
        let brief = LeaseOptions::new(policy(shortest)).retention(2 * shortest);
        match brief.run(&pool, &key("brief"), "body", work).await {
            Ok(Outcome::Performed(1)) | Err(Error::LeaseLost) => {}
            other => panic!("{other:?}"),
        }
        let forgetful = LeaseOptions::new(policy(longest)).retention(2 * longest - MILLISECOND);
        let refused = forgetful.run(&pool, &key("forgetful"), "body", work).await;
        assert!(matches!(refused, Err(Error::Misuse(Misuse::Options { .. }))), "{refused:?}");
    }
    Ok(())
}

/// A busy server takes longer than the lease. The effect has happened, so its result must not be lost.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_short_lease_leaves_the_time_to_store_and_to_release(pool: PgPool) -> anyhow::Result<()> {
    pool.execute(
        "create function slow() returns trigger language plpgsql as 'begin perform pg_sleep(0.6); return new; end';
         create trigger slow before update on idempotency.record for each row
             when (new.completed_at is not null or new.lease_until = '-infinity') execute function slow()",
    )
    .await?;
    let leasing = LeaseOptions::new(Policy::AtMostOnce { lease: Duration::from_millis(500) });
    let stored = leasing.run(&pool, &key("stored"), "body", async |_| Ok::<_, Error>(1)).await?;
    assert_eq!(stored, Outcome::Performed(1));
    let fails = async |lease: &Lease| Err::<i64, _>(lease.not_performed(Error::OutlivedRetention));
    let failed = leasing.run(&pool, &key("released"), "body", fails).await;
    assert!(matches!(failed, Err(Error::OutlivedRetention)), "{failed:?}");
    assert_eq!(shown(&pool, &key("released")).await.state, State::Released);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_batch_of_more_places_than_a_statement_has_parameters_is_marked(pool: PgPool) -> anyhow::Result<()> {
    let different: Vec<Key> = (0..100).map(|number| key(&number.to_string())).collect();
    let places: Vec<Key> = different.iter().cloned().cycle().take(70_000).collect();
    let marking = MarkOptions::new(DAY);
    let mut tx = pool.begin().await?;
    let marked = marking.mark_many(&mut tx, &places).await?;
    tx.commit().await?;
    assert!(marked[..100].iter().all(|marked| *marked == Marked::First));
    assert!(marked[100..].iter().all(|marked| *marked == Marked::Duplicate) && marked.len() == places.len());
    let too_many: Vec<Key> = (0..70_000).map(|number| key(&format!("other {number}"))).collect();
    let mut tx = pool.begin().await?;
    let refused = marking.mark_many(&mut tx, &too_many).await;
    assert!(matches!(refused, Err(Error::Misuse(Misuse::TooManyKeys { keys: 70_000, .. }))), "{refused:?}");
    tx.commit().await?;
    assert_eq!(records(&pool).await, 100);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_janitor_and_a_list_work_at_both_ends_of_their_settings(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for value in ["a", "b", "c"] {
        let _ = once(&pool, &key(value), "body").await?;
        expire(&pool, &key(value)).await?;
    }
    let kept = Janitor::new(pool.clone()).grace(YEARS).sweep_once(u64::MAX).await?;
    assert_eq!((kept.rows(), kept.limited), (0, false));
    let none = janitor(&pool).sweep_once(0).await?;
    assert_eq!((none.rows(), none.limited), (0, true));
    for (limit, found) in [(0, 0), (1, 1), (u32::MAX, 3)] {
        assert_eq!(search(&pool, None, None, "", limit, Duration::MAX).await?.len(), found, "{limit}");
        assert_eq!(unsettled(&pool, limit, Some(NonZeroU32::MAX), Some(Duration::MAX)).await?.len(), 0, "{limit}");
    }
    // The pause follows a full batch only.
    let swept = janitor(&pool).batch_size(NonZeroU32::MAX).pause(DAY).sweep_once(u64::MAX).await?;
    assert_eq!((swept.rows(), swept.batches), (3, 1));
    Ok(())
}

/// The decoder takes 127 levels.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_response_is_as_deep_as_a_retry_can_read(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let nested = |levels: usize| (0..levels).fold(Value::Null, |inside, _| Value::Array(vec![inside]));
    let run = async |levels: usize| {
        let perform = async |conn: &mut PgConnection| {
            leave_effect(conn, "deep").await?;
            Ok::<_, Error>(nested(levels))
        };
        Idempotency::new().run(&pool, &key("a"), &nested(200), perform).await
    };
    for too_deep in [128, 1000] {
        let refused = run(too_deep).await;
        assert!(matches!(refused, Err(Error::Unencodable { .. })), "{refused:?}");
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    for expected in [Outcome::Performed(nested(127)), Outcome::Replayed(nested(127))] {
        assert_eq!(run(127).await?, expected);
    }
    Ok(())
}

/// Without prepared statements, sqlx sends a statement in two messages. Outside a transaction, a pooler may send them
/// to two servers.
#[test]
fn a_look_before_the_transaction_needs_prepared_statements() {
    type Setters = fn(Idempotency) -> Idempotency;
    let both: [Setters; 2] = [
        |options| options.persistent(false).replay_first(true),
        |options| options.replay_first(true).persistent(false),
    ];
    for set in both {
        let refused = std::panic::catch_unwind(|| set(Idempotency::new())).expect_err("refused");
        let text = refused.downcast_ref::<&str>().copied().unwrap_or_default();
        assert!(text.contains("replay_first needs statements that stay prepared"), "{text}");
    }
    let one: [Setters; 3] = [
        |options| options.persistent(false).replay_first(false),
        |options| options.replay_first(true).persistent(true),
        |options| options.replay_first(true).replay_first(false).persistent(false),
    ];
    for set in one {
        let _ = set(Idempotency::new());
    }
}

/// A list of 256 texts of 1 MiB, without their memory. The commas make it larger than a record stores.
#[derive(Debug)]
struct TooLarge;

impl Serialize for TooLarge {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = RawValue::from_string(format!("\"{}\"", "x".repeat(1024 * 1024 - 2)));
        let text = text.map_err(serde::ser::Error::custom)?;
        serializer.collect_seq((0..256).map(|_| &text))
    }
}

impl<'de> Deserialize<'de> for TooLarge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|_| Self)
    }
}

/// The server would cut the connection, and the caller would take that for a failure that passes.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_response_over_256_mib_is_no_failure_that_passes(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let perform = async |conn: &mut PgConnection| leave_effect(conn, "large").await.map(|_| TooLarge);
    let refused = Idempotency::new().run(&pool, &key("a"), "body", perform).await;
    assert!(matches!(&refused, Err(error @ Error::Unencodable { .. }) if !error.is_transient()), "{refused:?}");
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    let leasing = LeaseOptions::new(Policy::AtLeastOnce { lease: Duration::from_secs(30) });
    let refused = leasing.run(&pool, &key("b"), "body", async |_: &Lease| Ok::<_, Error>(TooLarge)).await;
    assert!(matches!(&refused, Err(error @ Error::Unencodable { .. }) if !error.is_transient()), "{refused:?}");
    Ok(())
}

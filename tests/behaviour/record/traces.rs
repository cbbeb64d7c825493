//! The trace that a call passes on.

use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOptions};
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::operator::show;
use pg_idempotency::testing::{expire, lapse};
use pg_idempotency::{Error, Idempotency};
use rig::lease::AT_LEAST_ONCE;
use sqlx::PgPool;

use crate::support::{DEPLOYMENTS, WAYS, key};

const ONE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const TWO: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

async fn kept(pool: &PgPool, value: &str) -> anyhow::Result<Option<String>> {
    Ok(show(pool, &key(value)).await?.expect("a record").trace)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_record_has_the_trace_of_the_call_that_performed(pool: PgPool) -> anyhow::Result<()> {
    let ways = WAYS.into_iter().chain(DEPLOYMENTS.iter().map(|of| Idempotency::new().deployment(*of)));
    for (n, way) in ways.enumerate() {
        let value = n.to_string();
        let call = async |trace| {
            let way = way.trace(trace);
            anyhow::Ok(way.run(&pool, &key(&value), "body", async |_| Ok::<_, Error>(1)).await?.is_replayed())
        };
        assert!(!call(ONE).await?, "{way:?}");
        assert!(call(TWO).await?, "{way:?}: the trace is no part of the request");
        assert_eq!(kept(&pool, &value).await?.as_deref(), Some(ONE), "{way:?}");
        // After the retention the next call takes the record over.
        for (next, has) in [(TWO, Some(TWO)), ("", None)] {
            expire(&pool, &key(&value)).await?;
            assert!(!call(next).await?, "{way:?}");
            assert_eq!(kept(&pool, &value).await?.as_deref(), has, "{way:?}");
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_lease_that_is_taken_over_has_the_trace_of_the_last_attempt(pool: PgPool) -> anyhow::Result<()> {
    let leasing = LeaseOptions::new(AT_LEAST_ONCE);
    let acquire = async |trace| leasing.trace(trace).acquire::<i64, _>(&pool, &key("a"), "body").await;
    let Acquired::Owner(first) = acquire(ONE).await? else { panic!("the key is new") };
    assert_eq!(kept(&pool, "a").await?.as_deref(), Some(ONE), "while it runs, too");
    drop(first);
    lapse(&pool, &key("a")).await?;
    let Acquired::Owner(second) = acquire(TWO).await? else { panic!("lapsed") };
    second.complete(&1).await?;
    assert!(matches!(acquire(ONE).await?, Acquired::Replayed(1)));
    let shown = show(&pool, &key("a")).await?.expect("a record");
    assert_eq!((shown.attempt, shown.trace.as_deref()), (2, Some(TWO)));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_mark_has_the_trace_of_the_first_and_a_batch_has_none(pool: PgPool) -> anyhow::Result<()> {
    let window = Duration::from_secs(60);
    let mut tx = pool.begin().await?;
    let marks = MarkOptions::new(window);
    assert_eq!(marks.trace(ONE).mark(&mut tx, &key("a")).await?, Marked::First);
    assert_eq!(marks.trace(TWO).mark(&mut tx, &key("a")).await?, Marked::Duplicate);
    tx.commit().await?;
    assert_eq!(kept(&pool, "a").await?.as_deref(), Some(ONE));
    expire(&pool, &key("a")).await?;
    let mut tx = pool.begin().await?;
    let batch = [key("a"), key("b")];
    assert_eq!(marks.trace(TWO).mark_many(&mut tx, &batch).await?, [Marked::First, Marked::First]);
    tx.commit().await?;
    let kept = (kept(&pool, "a").await?, kept(&pool, "b").await?);
    // On a distributed table each key is claimed by itself, with the trace of the call.
    let of_batch = if cfg!(idempotency_distributed) { (Some(TWO), Some(TWO)) } else { (None, None) };
    assert_eq!((kept.0.as_deref(), kept.1.as_deref()), of_batch, "nothing of the old record remains");
    Ok(())
}

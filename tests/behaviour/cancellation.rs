//! Every future is dropped after 0, 1, 2 … polls until it completes, and each time the world must be whole.
//!
//! How often a future is polled varies from run to run, so each number of polls is tried several times.

use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOptions};
use pg_idempotency::mark::{MarkOptions, Marked, mark};
use pg_idempotency::{Error, Idempotency, Key, Outcome, ensure_idempotent};
use rig::gate::cancel_after;
use rig::lease::{AT_MOST_ONCE, owner};
use sqlx::{Connection as _, PgConnection, PgPool};

use crate::support::{clear, create_effects, janitor, key, leave_effect, once, pool_of};

/// Far more than any call takes.
const MOST_POLLS: usize = 200;
const TRIES: usize = 3;

/// What was stored and what happened agree: an effect for each completed record, and for nothing else.
async fn assert_whole(pool: &PgPool, context: &str) {
    let (effects, completed, unfinished): (i64, i64, i64) = sqlx::query_as(
        "select effects.count, record.completed, record.unfinished
         from (select count(*) from effect) as effects,
            (select count(completed_at) as completed, count(*) - count(completed_at) as unfinished
             from idempotency.record) as record",
    )
    .fetch_one(pool)
    .await
    .expect("counts");
    assert_eq!((effects, unfinished), (completed, 0), "{context}");
}

/// The connection is in no transaction, and what is written on it in autocommit is there.
async fn assert_usable(conn: &mut PgConnection, pool: &PgPool, context: &str) {
    assert!(!conn.is_in_transaction(), "{context}");
    sqlx::query("insert into written values ($1)").bind(context).execute(&mut *conn).await.expect("an insert");
    let seen: bool = sqlx::query_scalar("select exists (select from written where note = $1)")
        .bind(context)
        .fetch_one(pool)
        .await
        .expect("an answer");
    assert!(seen, "{context}: an acknowledged write was lost");
}

async fn tables(pool: &PgPool) {
    create_effects(pool).await;
    sqlx::query("create table written (note text)").execute(pool).await.expect("a table");
}

/// Tries each number of polls until the call has completed a few times. `try_with` returns whether it has.
async fn at_every_poll(mut try_with: impl AsyncFnMut(usize) -> anyhow::Result<bool>) -> anyhow::Result<()> {
    let mut completed = 0;
    for polls in 0..MOST_POLLS {
        completed += usize::from(try_with(polls).await?);
        if completed == TRIES {
            return Ok(());
        }
    }
    panic!("it never completed");
}

/// One connection, so that the next caller meets whatever the dropped call left on it.
async fn alone(observer: &PgPool) -> PgPool {
    pool_of(1, &observer.connect_options()).await
}

/// A first call, one that undoes its writes, a replay and a refusal, with and without a look before the transaction.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn run_can_be_dropped_at_every_poll(observer: PgPool) -> anyhow::Result<()> {
    let pool = alone(&observer).await;
    tables(&observer).await;
    let there = key("there");
    for (replay_first, kind) in [false, true]
        .into_iter()
        .flat_map(|first| ["first call", "undo", "replay", "refusal"].map(|kind| (first, kind)))
    {
        let way = Idempotency::new().replay_first(replay_first);
        clear(&observer).await;
        let is_new = ["first call", "undo"].contains(&kind);
        if !is_new {
            let _ = once(&observer, &there, "body").await?;
        }
        at_every_poll(async |polls| {
            let key = if is_new { &key(&polls.to_string()) } else { &there };
            let body = if kind == "refusal" { "another" } else { "body" };
            let perform = async |conn: &mut PgConnection| {
                if kind == "undo" {
                    let mut nested = conn.begin().await?;
                    leave_effect(&mut nested, "undone").await?;
                    nested.rollback().await?;
                }
                leave_effect(conn, "effect").await
            };
            let answered = cancel_after(polls, way.run(&pool, key, body, perform)).await;
            let completed = match (kind, answered) {
                (_, None) => false,
                ("first call" | "undo", Some(Ok(Outcome::Performed(_)))) => true,
                ("replay", Some(Ok(Outcome::Replayed(_)))) => true,
                ("refusal", Some(Err(Error::KeyReused { .. }))) => true,
                (_, other) => panic!("{way:?}, {kind}, {polls} polls: {other:?}"),
            };
            assert_usable(&mut *pool.acquire().await?, &observer, &format!("{kind}, {polls} polls")).await;
            assert_whole(&observer, &format!("{kind}, {polls} polls")).await;
            Ok(completed)
        })
        .await?;
    }
    Ok(())
}

/// A caller that drops the call alone and commits: at worst the key is indeterminate, and there is never a second
/// effect.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_call_dropped_in_a_transaction_that_commits_is_at_worst_indeterminate(pool: PgPool) -> anyhow::Result<()> {
    tables(&pool).await;
    at_every_poll(async |polls| {
        let key = key(&polls.to_string());
        let mut tx = pool.begin().await?;
        let call = ensure_idempotent(&mut tx, &key, "body", async |conn| leave_effect(conn, &polls.to_string()).await);
        let done = cancel_after(polls, call).await.transpose()?.is_some();
        tx.commit().await?;
        match Idempotency::new()
            .run(&pool, &key, "body", async |conn| leave_effect(conn, &polls.to_string()).await)
            .await
        {
            Ok(_) => {}
            Err(Error::Indeterminate { .. }) => assert!(!done),
            Err(error) => return Err(error.into()),
        }
        let effects: i64 = sqlx::query_scalar("select count(*) from effect where note = $1")
            .bind(polls.to_string())
            .fetch_one(&pool)
            .await?;
        assert!(effects <= 1, "{polls} polls: {effects} effects");
        Ok(done)
    })
    .await
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_sweep_can_be_dropped_at_every_poll(observer: PgPool) -> anyhow::Result<()> {
    let pool = alone(&observer).await;
    tables(&observer).await;
    at_every_poll(async |polls| {
        let swept = cancel_after(polls, janitor(&pool).sweep_once(10)).await.transpose()?;
        assert_usable(&mut *pool.acquire().await?, &observer, &format!("{polls} polls")).await;
        Ok(swept.is_some())
    })
    .await
}

#[sqlx::test(migrations = false)]
async fn a_migration_can_be_dropped_at_every_poll(observer: PgPool) -> anyhow::Result<()> {
    let pool = alone(&observer).await;
    for polls in 0..MOST_POLLS {
        let done = cancel_after(polls, pg_idempotency::migrate(&pool)).await.transpose()?.is_some();
        assert!(!pool.acquire().await?.is_in_transaction());
        let (applied, created): (bool, bool) = sqlx::query_as(
            "select to_regclass('idempotency._sqlx_migrations') is not null, to_regclass('idempotency.record') is not null",
        )
        .fetch_one(&observer)
        .await?;
        assert_eq!(applied, created, "{polls} polls: done or not begun");
        if done {
            assert!(created);
            return Ok(());
        }
    }
    panic!("it never completed");
}

/// Lease mode: dropped at any poll, a claim is whole or not there, and the connection is fit for use.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_lease_can_be_dropped_at_every_poll_of_claim_and_completion(observer: PgPool) -> anyhow::Result<()> {
    let pool = alone(&observer).await;
    tables(&observer).await;
    let leasing = LeaseOptions::new(AT_MOST_ONCE);
    at_every_poll(async |polls| {
        let key = key(&polls.to_string());
        let call = leasing.run(&pool, &key, "body", async |_| Ok::<_, Error>(polls));
        let done = cancel_after(polls, call).await.transpose()?.is_some();
        assert_usable(&mut *pool.acquire().await?, &observer, &format!("{polls} polls")).await;
        let again = leasing.run(&pool, &key, "body", async |_| Ok::<_, Error>(usize::MAX)).await;
        match again {
            // Dropped before the claim was committed, and so not performed; or completed, and replayed.
            Ok(Outcome::Performed(usize::MAX)) => assert!(!done),
            Ok(Outcome::Replayed(response)) => assert_eq!(response, polls),
            // The claim has to lapse before another call performs.
            Err(Error::InFlight { .. }) => assert!(!done),
            other => panic!("{polls} polls: {other:?}"),
        }
        Ok(done)
    })
    .await
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_release_can_be_dropped_at_every_poll(observer: PgPool) -> anyhow::Result<()> {
    let pool = alone(&observer).await;
    tables(&observer).await;
    let leasing = LeaseOptions::new(AT_MOST_ONCE);
    at_every_poll(async |polls| {
        let key = key(&polls.to_string());
        let lease = owner(&pool, leasing, &key).await;
        let done = cancel_after(polls, lease.release("on purpose")).await.transpose()?.is_some();
        assert_usable(&mut *pool.acquire().await?, &observer, &format!("{polls} polls")).await;
        match leasing.acquire::<i64, _>(&pool, &key, "body").await {
            Ok(Acquired::Owner(lease)) => assert_eq!(lease.attempt(), 2, "released"),
            Err(Error::InFlight { .. }) => assert!(!done, "left to lapse"),
            other => panic!("{polls} polls: {other:?}"),
        }
        Ok(done)
    })
    .await
}

/// A mark goes with its transaction, wherever the call was dropped.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn marks_can_be_dropped_at_every_poll(pool: PgPool) -> anyhow::Result<()> {
    let window = Duration::from_secs(300);
    at_every_poll(async |polls| {
        let keys: Vec<Key> = (0..3).map(|n| key(&format!("{polls}/{n}"))).collect();
        let mut tx = pool.begin().await?;
        let marking = async {
            let single = mark(&mut tx, &keys[0], window).await?;
            let batch = MarkOptions::new(window).mark_many(&mut tx, &keys[1..]).await?;
            Ok::<_, Error>((single, batch))
        };
        let done = cancel_after(polls, marking).await.transpose()?;
        drop(tx);
        if let Some(marked) = &done {
            assert_eq!(*marked, (Marked::First, vec![Marked::First; 2]));
        }
        let mut tx = pool.begin().await?;
        assert_eq!(
            MarkOptions::new(window).mark_many(&mut tx, &keys).await?,
            [Marked::First; 3],
            "{polls} polls: rolled back"
        );
        tx.commit().await?;
        Ok(done.is_some())
    })
    .await
}

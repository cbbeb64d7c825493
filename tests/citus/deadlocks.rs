//! Two callers that wait for each other's rows. A worker detects a deadlock between its own rows after
//! `deadlock_timeout`. Citus detects one over two workers: every two seconds it asks all nodes which session waits for
//! which.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::{Error, Key, OnDuplicate, Outcome};
use rig::gate::PATIENCE;
use sqlx::{PgConnection, PgPool};
use tokio::sync::Barrier;

use crate::{DISTRIBUTED, calls, citus, effect, effects, key_of, scope};

#[derive(Clone, Copy, Debug)]
enum Rows {
    OnOneWorker,
    OnTwoWorkers,
}

const BOTH: [Rows; 2] = [Rows::OnOneWorker, Rows::OnTwoWorkers];

/// Two scopes in different shards, as these rows need them.
async fn scopes(pool: &PgPool, rows: Rows) -> anyhow::Result<[String; 2]> {
    let place = async |scope: &str| -> anyhow::Result<(i64, i32)> {
        let shard = "select shardid, nodeport from pg_dist_shard_placement
            where shardid = get_shard_id_for_distribution_column('idempotency.record', $1)";
        Ok(sqlx::query_as(shard).bind(scope).fetch_one(pool).await?)
    };
    let first = scope();
    let (shard, worker) = place(&first).await?;
    loop {
        let second = scope();
        let (other_shard, other_worker) = place(&second).await?;
        if other_shard != shard && (other_worker == worker) == matches!(rows, Rows::OnOneWorker) {
            return Ok([first, second]);
        }
    }
}

/// The SQLSTATE that makes [`Error::Retryable`].
fn state(error: &Error) -> Option<String> {
    let Error::Retryable(error) = error else { return None };
    Some(error.as_database_error()?.code()?.into_owned())
}

/// Asks with the same key until the error is not transient, and returns the errors before that too.
async fn with_retries<T>(call: impl AsyncFn() -> Result<T, Error>) -> anyhow::Result<(T, Vec<Error>)> {
    let mut errors = Vec::new();
    loop {
        match call().await {
            Ok(done) => return Ok((done, errors)),
            Err(error) => {
                anyhow::ensure!(error.is_transient() && errors.len() < 20, "{error:?} after {errors:?}");
                errors.push(error);
            }
        }
    }
}

/// Runs both callers. Without the detector they would wait for ever.
async fn together<A, B>(one: impl Future<Output = A>, other: impl Future<Output = B>) -> anyhow::Result<(A, B)> {
    let both = tokio::time::timeout(PATIENCE, async { tokio::join!(one, other) });
    both.await.context("no deadlock was found; is citus.distributed_deadlock_detection_factor -1?")
}

/// One of the two must fail, and by a deadlock.
fn assert_one_victim(errors: [Vec<Error>; 2]) {
    let errors: Vec<Error> = errors.into_iter().flatten().collect();
    let states: Vec<_> = errors.iter().map(state).collect();
    assert_eq!(states, [Some("40P01".to_owned())], "{errors:?}");
}

/// Adds one to the row of this scope.
async fn touch(conn: &mut PgConnection, scope: &str) -> Result<(), Error> {
    let update = "update citus_effect set note = (note::int + 1)::text where scope = $1 and note <> 'effect'";
    sqlx::query(update).bind(scope).execute(conn).await?;
    Ok(())
}

async fn create_rows(pool: &PgPool, scopes: &[String]) -> anyhow::Result<()> {
    for scope in scopes {
        sqlx::query("insert into citus_effect (scope, note) values ($1, '0')").bind(scope).execute(pool).await?;
    }
    Ok(())
}

async fn touches(pool: &PgPool, scope: &str) -> anyhow::Result<String> {
    let note = "select note from citus_effect where scope = $1 and note <> 'effect'";
    Ok(sqlx::query_scalar(note).bind(scope).fetch_one(pool).await?)
}

#[tokio::test]
async fn two_calls_that_deadlock_in_perform_take_effect_once_each() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    for rows in BOTH {
        let scopes = scopes(&citus.pool, rows).await?;
        create_rows(&citus.pool, &scopes).await?;
        let keys = [key_of(&scopes[0], "deadlock"), key_of(&scopes[1], "deadlock")];
        let both_have_one = Barrier::new(2);
        let caller = async |own: usize| {
            let first = AtomicBool::new(true);
            with_retries(async || {
                calls()
                    .run(&citus.pool, &keys[own], "body", async |conn| -> Result<usize, Error> {
                        touch(conn, &scopes[own]).await?;
                        if first.swap(false, Ordering::Relaxed) {
                            both_have_one.wait().await;
                        }
                        touch(conn, &scopes[1 - own]).await?;
                        Ok(own)
                    })
                    .await
            })
            .await
        };
        let (one, other) = together(caller(0), caller(1)).await?;
        let ((one, its_errors), (other, others_errors)) = (one?, other?);
        assert_eq!((one, other), (Outcome::Performed(0), Outcome::Performed(1)), "{rows:?}");
        assert_one_victim([its_errors, others_errors]);
        for (own, key) in keys.iter().enumerate() {
            assert_eq!(touches(&citus.pool, &scopes[own]).await?, "2", "{rows:?}: each call once");
            let unreached = async |_: &mut PgConnection| -> Result<usize, Error> { unreachable!() };
            assert_eq!(calls().run(&citus.pool, key, "body", unreached).await?, Outcome::Replayed(own));
        }
    }
    Ok(())
}

/// Two transactions that take two batches in opposite orders wait for each other's keys, until one of the waits ends.
#[tokio::test]
async fn two_consumers_with_batches_in_opposite_orders_mark_each_key_once() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    let marking = MarkOptions::new(Duration::from_secs(3600))
        .deployment(DISTRIBUTED)
        .on_duplicate(OnDuplicate::Wait(Duration::from_millis(500)));
    for rows in BOTH {
        let scopes = scopes(&citus.pool, rows).await?;
        let keys = |scope: &str| -> Vec<Key> {
            (0..50).map(|at| Key::new(scope, "event", at.to_string()).expect("a key")).collect()
        };
        let batches = [keys(&scopes[0]), keys(&scopes[1])];
        let both_have_one = Barrier::new(2);
        let consumer = async |own: usize| {
            let first = AtomicBool::new(true);
            with_retries(async || {
                let mut tx = citus.pool.begin().await?;
                let mut marked = marking.mark_many(&mut tx, &batches[own]).await?;
                if first.swap(false, Ordering::Relaxed) {
                    both_have_one.wait().await;
                }
                marked.extend(marking.mark_many(&mut tx, &batches[1 - own]).await?);
                pg_idempotency::commit(tx).await?;
                Ok(marked.into_iter().filter(|marked| *marked == Marked::First).count())
            })
            .await
        };
        let (one, other) = together(consumer(0), consumer(1)).await?;
        let ((one, _), (other, _)) = (one?, other?);
        assert_eq!(one + other, 100, "{rows:?}: each key is first once");
    }
    Ok(())
}

/// The one waits for a row on a worker, and the other waits on the coordinator for the key, with a limit.
#[tokio::test]
async fn a_wait_for_a_key_and_a_wait_for_a_row_end_each_other() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    let scopes = scopes(&citus.pool, Rows::OnTwoWorkers).await?;
    create_rows(&citus.pool, &scopes[1..]).await?;
    let key = key_of(&scopes[0], "deadlock");
    let both_have_one = Barrier::new(2);
    let first = [true; 2].map(AtomicBool::new);
    let meet = async |own: usize| {
        if first[own].swap(false, Ordering::Relaxed) {
            both_have_one.wait().await;
        }
    };
    let owner = with_retries(async || {
        calls()
            .run(&citus.pool, &key, "body", async |conn| -> Result<i64, Error> {
                meet(0).await;
                touch(conn, &scopes[1]).await?;
                effect(conn, &key).await
            })
            .await
    });
    let duplicate = with_retries(async || {
        let mut tx = citus.pool.begin().await?;
        touch(&mut tx, &scopes[1]).await?;
        meet(1).await;
        let outcome = calls().ensure(&mut tx, &key, "body", async |conn| effect(conn, &key).await).await?;
        pg_idempotency::commit(tx).await?;
        Ok(outcome)
    });
    let (owner, duplicate) = together(owner, duplicate).await?;
    let ((owner, its_errors), (duplicate, others_errors)) = (owner?, duplicate?);
    assert!(!its_errors.is_empty() || !others_errors.is_empty(), "they did not meet");
    assert_ne!(owner.is_replayed(), duplicate.is_replayed());
    assert_eq!(effects(&mut *citus.pool.acquire().await?, &key).await?, 1);
    Ok(())
}

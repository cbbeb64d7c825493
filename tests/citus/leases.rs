//! Lease mode.

use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOptions, LeaseOwner, Policy};
use pg_idempotency::operator::show;
use pg_idempotency::{Error, Key, SettleError};
use rig::fixture::Fixture;
use sqlx::PgPool;

use crate::{DISTRIBUTED, citus, citus_alone, key, options};

const LEASE: Duration = Duration::from_secs(40);
const REPEATS: Policy = Policy::AtLeastOnce { lease: LEASE };
const NEVER_REPEATS: Policy = Policy::AtMostOnce { lease: LEASE };

fn leasing(policy: Policy) -> LeaseOptions {
    LeaseOptions::new(policy).deployment(DISTRIBUTED)
}

async fn acquired(pool: &PgPool, key: &Key, policy: Policy) -> anyhow::Result<LeaseOwner> {
    match leasing(policy).acquire::<String, _>(pool, key, "body").await? {
        Acquired::Owner(lease) => Ok(lease),
        Acquired::Replayed(response) => anyhow::bail!("replayed {response}"),
    }
}

/// A transaction by hand has locked the record on its worker.
#[tokio::test]
async fn an_operator_waits_for_a_locked_record_as_long_as_the_session_allows() -> anyhow::Result<()> {
    let Some(citus) = citus().await else { return Ok(()) };
    let key = key("locked");
    Fixture::lapsed(&key, "body", NEVER_REPEATS)?.write(&citus.pool).await?;
    let unknown = leasing(NEVER_REPEATS).acquire::<String, _>(&citus.pool, &key, "body").await;
    let Err(Error::Indeterminate { version, .. }) = unknown else { panic!("{unknown:?}") };
    let shown = show(&citus.pool, &key).await?.expect("a record");
    assert_eq!(*shown.version(), *version);
    let mut locker = citus.pool.begin().await?;
    let lock = "update idempotency.record set attempt = attempt where scope = $1";
    sqlx::query(lock).bind(key.scope()).execute(&mut *locker).await?;
    let bounded = options().expect("a URL").options([("lock_timeout", "300ms")]);
    let pool = PgPool::connect_with(bounded).await?;
    for settle in ["resolve", "release"] {
        let settled = async {
            match settle {
                "resolve" => shown.clone().resolve(&pool, &"found".to_owned(), LEASE * 9).await,
                _ => shown.clone().release(&pool, "it did nothing").await,
            }
        };
        let settled = tokio::time::timeout(rig::gate::PATIENCE, settled).await.expect("in time");
        let Err(SettleError::Other(Error::Database(error))) = settled else { panic!("{settle}: {settled:?}") };
        let state = error.as_database_error().and_then(|error| error.code()).map(|code| code.into_owned());
        assert_eq!(state.as_deref(), Some("55P03"), "{settle}");
    }
    pool.close().await;
    locker.rollback().await?;
    let mut tx = citus.pool.begin().await?;
    shown.release(&mut tx, "it did nothing").await?;
    tx.commit().await?;
    Ok(())
}

/// Functions on the shards write down with which setting a worker would commit.
#[tokio::test]
async fn the_workers_commit_a_lease_durably() -> anyhow::Result<()> {
    let Some(citus) = citus_alone().await else { return Ok(()) };
    let pool = &citus.pool;
    let on_workers = async |command: &str| -> anyhow::Result<()> {
        let run = "select bool_and(success) from run_command_on_workers($1)";
        anyhow::ensure!(sqlx::query_scalar::<_, bool>(run).bind(command).fetch_one(pool).await?, "{command}");
        Ok(())
    };
    let on_shards = async |command: &str| -> anyhow::Result<()> {
        let run = "select bool_and(success) from run_command_on_shards('idempotency.record', $1)";
        anyhow::ensure!(sqlx::query_scalar::<_, bool>(run).bind(command).fetch_one(pool).await?, "{command}");
        Ok(())
    };
    on_workers(
        "set citus.enable_ddl_propagation = off; create or replace function public.tell_commit() returns trigger language plpgsql as
         $$ begin new.last_error := current_setting('synchronous_commit'); return new; end $$",
    )
    .await?;
    on_shards(
        "create trigger tell_commit before insert or update on %s for each row execute function public.tell_commit()",
    )
    .await?;
    let mut told = Vec::new();
    for session in ["off", "on", "remote_apply"] {
        let session = options().expect("a URL").options([("synchronous_commit", session)]);
        let pool = PgPool::connect_with(session).await?;
        // As the workers' own: weak.
        for policy in [REPEATS, NEVER_REPEATS] {
            let key = key("durable");
            let lease = acquired(&pool, &key, policy).await?;
            told.push(last_error(&pool, &key).await?);
            lease.complete(&"done".to_owned()).await?;
            told.push(last_error(&pool, &key).await?);
        }
        pool.close().await;
    }
    on_shards("drop trigger tell_commit on %s").await?;
    on_workers("set citus.enable_ddl_propagation = off; drop function public.tell_commit()").await?;
    assert_eq!(told, [["on"; 8].as_slice(), ["remote_apply"; 4].as_slice()].concat());
    Ok(())
}

async fn last_error(pool: &PgPool, key: &Key) -> anyhow::Result<String> {
    let record = pg_idempotency::operator::show(pool, key).await?;
    Ok(record.and_then(|record| record.last_error).unwrap_or_default())
}

//! Lease mode: what each policy does with a claim that completes, fails, lapses or is given up.

use std::num::NonZeroU32;
use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOwner, Leasing, Policy, ensure_leased};
use pg_idempotency::operator::{release, resolve};
use pg_idempotency::testing::{Gate, lapse};
use pg_idempotency::{Error, InFlight, Outcome};
use sqlx::{Executor as _, PgPool};

use crate::support::{create_effects, expire_in, key, once};

const LEASE: Duration = Duration::from_secs(40);
pub(crate) const AT_LEAST_ONCE: Policy = Policy::AtLeastOnce { lease: LEASE };
pub(crate) const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: LEASE };
const POLICIES: [Policy; 2] = [AT_LEAST_ONCE, AT_MOST_ONCE];

#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkError {
    #[error("gateway said no")]
    Gateway,
    #[error(transparent)]
    Idempotency(#[from] Error),
}

pub(crate) async fn acquire(pool: &PgPool, policy: Policy, body: &str) -> Result<Acquired<String>, Error> {
    Leasing::new(policy)?.acquire(pool, &key("a"), body).await
}

pub(crate) async fn acquired(pool: &PgPool, policy: Policy) -> LeaseOwner {
    match acquire(pool, policy, "body").await.expect("acquired") {
        Acquired::Owner(lease) => lease,
        Acquired::Replayed(response) => panic!("replayed {response}"),
    }
}

async fn work(pool: &PgPool, policy: Policy, response: &str) -> Result<Outcome<String>, Error> {
    ensure_leased(pool, &key("a"), "body", policy, async |_| Ok::<_, Error>(response.to_owned())).await
}

async fn failing(pool: &PgPool, policy: Policy, not_performed: bool) -> Result<Outcome<String>, WorkError> {
    ensure_leased(pool, &key("a"), "body", policy, async |lease| {
        let error = WorkError::Gateway;
        Err(if not_performed { lease.not_performed(error) } else { error })
    })
    .await
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_work_is_done_once_and_replayed(pool: PgPool) -> anyhow::Result<()> {
    for policy in POLICIES {
        sqlx::query("delete from idempotency.record").execute(&pool).await?;
        assert_eq!(work(&pool, policy, "first").await?, Outcome::Performed("first".to_owned()));
        assert_eq!(work(&pool, policy, "second").await?, Outcome::Replayed("first".to_owned()));
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn an_operator_never_touches_a_completed_record(pool: PgPool) -> anyhow::Result<()> {
    let token = acquired(&pool, AT_MOST_ONCE).await.token();
    // As the HTTP layer completes it.
    let completed = "update idempotency.record
        set completed_at = now(), lease_until = null, expires_at = now() + interval '1 day',
            response_status = 201, response_headers = '[[\"location\", \"/payments/7\"]]', response_body = '\"sent\"'";
    pool.execute(completed).await?;
    let row = async || -> sqlx::Result<String> {
        sqlx::query_scalar("select record::text from idempotency.record").fetch_one(&pool).await
    };
    let before = row().await?;
    for response in ["sent", "not sent"] {
        let error = resolve(&pool, &key("a"), token, &response.to_owned(), LEASE).await.expect_err("it is completed");
        assert!(matches!(error, Error::Changed), "{error:?}");
    }
    let error = release(&pool, &key("a"), token, &[], "looked it up").await.expect_err("it is completed");
    assert!(matches!(error, Error::Changed), "{error:?}");
    assert_eq!(row().await?, before);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn an_indeterminate_operation_can_be_released(pool: PgPool) -> anyhow::Result<()> {
    let held = acquired(&pool, AT_MOST_ONCE).await.token();
    let early = release(&pool, &key("a"), held, &[], "too early").await.expect_err("under a live lease");
    assert!(matches!(early, Error::Changed), "{early:?}");
    lapse(&pool, &key("a")).await?;
    release(&pool, &key("a"), held, &[], "the gateway has no such charge").await?;
    let kept: String = sqlx::query_scalar("select last_error from idempotency.record").fetch_one(&pool).await?;
    assert_eq!(kept, "the gateway has no such charge");
    assert_eq!(acquired(&pool, AT_MOST_ONCE).await.attempt(), 2);
    let kept: String = sqlx::query_scalar("select last_error from idempotency.record").fetch_one(&pool).await?;
    assert_eq!(kept, "the gateway has no such charge", "also after the take-over");
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn an_indeterminate_transaction_can_be_resolved_and_released(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for resolved in [true, false] {
        sqlx::query("delete from idempotency.record").execute(&pool).await?;
        let mut tx = pool.begin().await?;
        pg_idempotency::ensure_idempotent(&mut tx, &key("a"), "body", async |_| -> Result<i64, Error> {
            Err(Error::Database(sqlx::Error::RowNotFound))
        })
        .await
        .expect_err("perform fails");
        tx.commit().await?;
        let error = once(&pool, &key("a"), "body").await.expect_err("indeterminate");
        let Error::Indeterminate { token, .. } = error else { panic!("{error:?}") };
        if resolved {
            resolve(&pool, &key("a"), token, &17_i64, LEASE).await?;
            assert_eq!(once(&pool, &key("a"), "body").await?, Outcome::Replayed(17));
        } else {
            release(&pool, &key("a"), token, &[], "looked it up").await?;
            assert!(!once(&pool, &key("a"), "body").await?.is_replayed());
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn an_error_of_the_work_releases_at_least_once(pool: PgPool) -> anyhow::Result<()> {
    let error = failing(&pool, AT_LEAST_ONCE, false).await.expect_err("the work's own error");
    assert!(matches!(error, WorkError::Gateway), "{error:?}");
    let kept: String = sqlx::query_scalar("select last_error from idempotency.record").fetch_one(&pool).await?;
    assert_eq!(kept, "gateway said no");
    assert_eq!(acquired(&pool, AT_LEAST_ONCE).await.attempt(), 2, "at once");
    Ok(())
}

/// A heartbeat that was on its way when the work failed would make the claim look alive for a whole lease.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_failure_draws_a_new_token_too(pool: PgPool) -> anyhow::Result<()> {
    let mut held = 0;
    let result: Result<Outcome<String>, WorkError> =
        ensure_leased(&pool, &key("a"), "body", AT_MOST_ONCE, async |lease| {
            held = lease.token();
            Err(WorkError::Gateway)
        })
        .await;
    result.expect_err("fails");
    let error = acquire(&pool, AT_MOST_ONCE, "body").await.expect_err("indeterminate");
    let Error::Indeterminate { token, .. } = error else { panic!("{error:?}") };
    assert_ne!(token, held);
    release(&pool, &key("a"), token, &[], "looked it up").await?;
    Ok(())
}

/// So that nothing which knows the old one, a heartbeat on its way, can touch the record again.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_release_draws_a_new_token(pool: PgPool) -> anyhow::Result<()> {
    let lease = acquired(&pool, AT_LEAST_ONCE).await;
    let held = lease.token();
    lease.release("on purpose").await?;
    let (token, released): (i64, bool) =
        sqlx::query_as("select token, lease_until = '-infinity' from idempotency.record").fetch_one(&pool).await?;
    assert!(released);
    assert_ne!(token, held);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn an_error_of_the_work_is_indeterminate_at_most_once_unless_not_performed(pool: PgPool) -> anyhow::Result<()> {
    let error = failing(&pool, AT_MOST_ONCE, true).await.expect_err("the work's own error");
    assert!(matches!(error, WorkError::Gateway), "{error:?}");
    let error = failing(&pool, AT_MOST_ONCE, false).await.expect_err("released, so it is tried again");
    assert!(matches!(error, WorkError::Gateway), "{error:?}");
    let error = failing(&pool, AT_MOST_ONCE, false).await.expect_err("at once, without waiting for the lease");
    let WorkError::Idempotency(Error::Indeterminate { attempt, last_error, .. }) = error else { panic!("{error:?}") };
    assert_eq!((attempt, last_error.as_deref()), (2, Some("gateway said no")));
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_poison_message_is_exhausted(pool: PgPool) -> anyhow::Result<()> {
    let leasing = Leasing::new(AT_LEAST_ONCE)?.with_max_attempts(NonZeroU32::new(3).expect("three"));
    let attempt = async || {
        let result: Result<Outcome<String>, WorkError> =
            leasing.ensure(&pool, &key("a"), "body", async |_| Err(WorkError::Gateway)).await;
        result.expect_err("fails")
    };
    for _ in 0..2 {
        assert!(matches!(attempt().await, WorkError::Gateway));
    }
    // The third is lost with its process instead of failing.
    match leasing.acquire::<String, _>(&pool, &key("a"), "body").await? {
        Acquired::Owner(lease) => assert_eq!(lease.attempt(), 3),
        Acquired::Replayed(_) => panic!("nothing to replay"),
    }
    lapse(&pool, &key("a")).await?;
    for _ in 0..2 {
        let error = attempt().await;
        let WorkError::Idempotency(Error::Exhausted { attempts: 3, last_error, token, .. }) = error else {
            panic!("{error:?}")
        };
        assert_eq!(last_error.as_deref(), Some("gateway said no"));
        assert_ne!(token, 0);
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_retention_counts_from_the_completion(pool: PgPool) -> anyhow::Result<()> {
    let leasing = Leasing::new(AT_LEAST_ONCE)?.with_retention(Duration::from_secs(3 * 3600))?;
    let Acquired::Owner(lease) = leasing.acquire::<String, _>(&pool, &key("a"), "body").await? else { panic!() };
    expire_in(&pool, &key("a"), Duration::from_secs(60)).await?;
    lease.complete(&"done".to_owned()).await?;
    let exact: bool = sqlx::query_scalar(
        "select expires_at = completed_at + interval '3 h' and lease_until is null from idempotency.record",
    )
    .fetch_one(&pool)
    .await?;
    assert!(exact);
    expire_in(&pool, &key("a"), Duration::ZERO).await?;
    assert_eq!(work(&pool, AT_LEAST_ONCE, "anew").await?, Outcome::Performed("anew".to_owned()));
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn the_downstream_key_is_one_for_all_attempts(pool: PgPool) -> anyhow::Result<()> {
    let lease = acquired(&pool, AT_LEAST_ONCE).await;
    let first = (lease.downstream_key(), lease.token());
    let shown = pg_idempotency::operator::show(&pool, &key("a")).await?.expect("a record");
    assert_eq!(shown.downstream_key.as_ref(), Some(&first.0));
    drop(lease);
    lapse(&pool, &key("a")).await?;
    let lease = acquired(&pool, AT_LEAST_ONCE).await;
    assert_eq!(lease.downstream_key(), first.0);
    assert_ne!(lease.token(), first.1);
    assert!(first.0.len() == 32 && first.0.bytes().all(|byte| byte.is_ascii_hexdigit()), "{}", first.0);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn waiting_holds_no_connection_and_gets_the_first_result(
    _: sqlx::postgres::PgPoolOptions,
    options: sqlx::postgres::PgConnectOptions,
) -> anyhow::Result<()> {
    // One connection for the owner, its renewal, and twenty callers that wait.
    let pool = sqlx::postgres::PgPoolOptions::new().max_connections(1).connect_with(options).await?;
    let gate = Gate::new();
    let owner = tokio::spawn({
        let (pool, gate) = (pool.clone(), gate.clone());
        async move {
            ensure_leased(&pool, &key("a"), "body", AT_LEAST_ONCE, async |_| {
                gate.pass().await;
                Ok::<_, Error>("first".to_owned())
            })
            .await
        }
    });
    gate.reached().await;
    let waiting = Leasing::new(AT_LEAST_ONCE)?.with_in_flight(InFlight::Wait(Duration::from_secs(20)))?;
    let waiters: Vec<_> = (0..20)
        .map(|_| {
            let pool = pool.clone();
            tokio::spawn(async move {
                waiting.ensure(&pool, &key("a"), "body", async |_| Ok::<_, Error>("second".to_owned())).await
            })
        })
        .collect();
    // Others get on meanwhile.
    for _ in 0..50 {
        pool.execute("select 1").await?;
    }
    gate.open();
    assert!(!owner.await??.is_replayed());
    for waiter in waiters {
        assert_eq!(waiter.await??, Outcome::Replayed("first".to_owned()));
    }
    let gave_up = Leasing::new(AT_LEAST_ONCE)?.with_in_flight(InFlight::Wait(Duration::from_millis(100)))?;
    sqlx::query("delete from idempotency.record").execute(&pool).await?;
    let _lease = acquired(&pool, AT_LEAST_ONCE).await;
    let error = gave_up.acquire::<String, _>(&pool, &key("a"), "body").await.expect_err("in flight");
    assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "a distributed table takes no triggers; tests/citus looks at the shards")]
async fn claim_and_completion_are_durable_whatever_the_session_says(pool: PgPool) -> anyhow::Result<()> {
    for (session, expected) in [("off", "on"), ("local", "on"), ("remote_apply", "remote_apply"), ("on", "on")] {
        pool.execute(
            "delete from idempotency.record;
             drop table if exists seen;
             create table seen (synchronous_commit text);
             create or replace function note() returns trigger language plpgsql as $$
             begin insert into seen values (current_setting('synchronous_commit')); return new; end $$;
             drop trigger if exists note on idempotency.record;
             create trigger note after insert or update on idempotency.record for each row execute function note()",
        )
        .await?;
        let options = (*pool.connect_options()).clone().options([("synchronous_commit", session)]);
        let session_pool = PgPool::connect_with(options).await?;
        let _ = work(&session_pool, AT_MOST_ONCE, "done").await?;
        let seen: Vec<String> = sqlx::query_scalar("select synchronous_commit from seen").fetch_all(&pool).await?;
        assert_eq!(seen, [expected, expected], "claim and completion, from a session of {session}");
        let after: String =
            sqlx::query_scalar("select current_setting('synchronous_commit')").fetch_one(&session_pool).await?;
        assert_eq!(after, session, "only for these transactions");
        session_pool.close().await;
    }
    Ok(())
}

#[test]
fn durations_that_make_no_sense_are_refused() -> anyhow::Result<()> {
    for absurd in [Duration::ZERO, Duration::from_secs(24 * 3600)] {
        Leasing::new(Policy::AtMostOnce { lease: absurd }).expect_err("absurd");
    }
    Leasing::new(AT_LEAST_ONCE)?.with_retention(LEASE * 2)?;
    let error =
        Leasing::new(AT_LEAST_ONCE)?.with_retention(LEASE * 2 - Duration::from_millis(1)).expect_err("too short");
    assert_eq!(error.shortest, LEASE * 2);
    Ok(())
}

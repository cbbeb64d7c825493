//! Lease mode: what each policy does with a claim that completes, fails, lapses or is given up.

use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOptions, LeaseOwner, Policy};
use pg_idempotency::operator::{State, show};
use pg_idempotency::testing::{expire, lapse};
use pg_idempotency::{Error, OnDuplicate, Outcome};
use rig::cases::each;
use rig::gate::Gate;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS, LEASE, owner};
use sqlx::{Executor as _, PgPool};

use crate::support::{expire_in, janitor, key, options, pool_of, recorded};

#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkError {
    #[error("gateway said no")]
    Gateway,
    #[error(transparent)]
    Idempotency(#[from] Error),
}

pub(crate) async fn acquire(pool: &PgPool, policy: Policy, body: &str) -> Result<Acquired<String>, Error> {
    LeaseOptions::new(policy).acquire(pool, &key("a"), body).await
}

pub(crate) async fn acquired(pool: &PgPool, policy: Policy) -> LeaseOwner {
    owner(pool, LeaseOptions::new(policy), &key("a")).await
}

async fn work(pool: &PgPool, policy: Policy, response: &str) -> Result<Outcome<String>, Error> {
    LeaseOptions::new(policy).run(pool, &key("a"), "body", async |_| Ok::<_, Error>(response.to_owned())).await
}

#[derive(Clone, Copy, Debug)]
enum Ending {
    Fails,
    FailsWithoutEffect,
    IsReleased,
}

/// A new token, so that a heartbeat on its way cannot make the claim look alive for a whole lease.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_attempt_that_fails_keeps_its_reason_and_gets_a_new_token(pool: PgPool) -> anyhow::Result<()> {
    each(
        [
            (AT_LEAST_ONCE, Ending::Fails, State::Released),
            (AT_LEAST_ONCE, Ending::FailsWithoutEffect, State::Released),
            (AT_LEAST_ONCE, Ending::IsReleased, State::Released),
            (AT_MOST_ONCE, Ending::Fails, State::Indeterminate),
            (AT_MOST_ONCE, Ending::FailsWithoutEffect, State::Released),
            (AT_MOST_ONCE, Ending::IsReleased, State::Released),
        ],
        async |(policy, ending, state)| {
            pool.execute("truncate idempotency.record").await?;
            let mut held = 0;
            if let Ending::IsReleased = ending {
                let lease = acquired(&pool, policy).await;
                held = lease.token();
                lease.release(&WorkError::Gateway.to_string()).await?;
            } else {
                let failed: Result<Outcome<String>, WorkError> = LeaseOptions::new(policy)
                    .run(&pool, &key("a"), "body", async |lease| {
                        held = lease.token();
                        let failed = WorkError::Gateway;
                        Err(if let Ending::Fails = ending { failed } else { lease.not_performed(failed) })
                    })
                    .await;
                assert!(matches!(failed, Err(WorkError::Gateway)), "{policy:?} {ending:?}: {failed:?}");
            }
            let shown = show(&pool, &key("a")).await?.expect("a record");
            assert_eq!((shown.state, shown.attempt), (state, 1), "{policy:?} {ending:?}");
            assert_eq!(shown.last_error.as_deref(), Some("gateway said no"), "{policy:?} {ending:?}");
            assert_ne!(shown.token, held, "{policy:?} {ending:?}");
            // At once, without waiting for the lease.
            match acquire(&pool, policy, "body").await {
                Ok(Acquired::Owner(lease)) if state == State::Released => assert_eq!(lease.attempt(), 2),
                Err(Error::Indeterminate { attempt: 1, last_error: Some(told), token, .. }) => {
                    assert_eq!((state, told.as_str(), token), (State::Indeterminate, "gateway said no", shown.token));
                    shown.release(&pool, "the gateway has no such charge").await?;
                    assert_eq!(acquired(&pool, policy).await.attempt(), 2);
                    let kept = show(&pool, &key("a")).await?.expect("a record").last_error;
                    assert_eq!(kept.as_deref(), Some("the gateway has no such charge"), "also after the take-over");
                }
                other => panic!("{policy:?} {ending:?}: {other:?}"),
            }
            Ok(())
        },
    )
    .await;
    Ok(())
}

/// The owner was suspended, and its operator has found the result meanwhile.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_owners_release_does_not_undo_what_an_operator_has_resolved(pool: PgPool) -> anyhow::Result<()> {
    let lease = acquired(&pool, AT_MOST_ONCE).await;
    lapse(&pool, &key("a")).await?;
    let shown = show(&pool, &key("a")).await?.expect("a record");
    shown.resolve(&pool, &"sent".to_owned(), LEASE).await?;
    let released = lease.release("too late").await;
    assert!(matches!(released, Err(Error::LeaseLost)), "{released:?}");
    assert!(matches!(acquire(&pool, AT_MOST_ONCE, "body").await?, Acquired::Replayed(response) if response == "sent"));
    Ok(())
}

/// A token that counts would come back after a purge.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_owner_whose_record_was_purged_is_fenced_from_the_next_one(pool: PgPool) -> anyhow::Result<()> {
    let overtaken = acquired(&pool, AT_LEAST_ONCE).await;
    expire(&pool, &key("a")).await?;
    assert_eq!(janitor(&pool).sweep_once(10).await?.rows(), 1);
    let next = acquired(&pool, AT_LEAST_ONCE).await;
    assert!(matches!(overtaken.complete(&"late".to_owned()).await, Err(Error::LeaseLost)));
    Ok(next.complete(&"done".to_owned()).await?)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_retention_counts_from_the_completion(pool: PgPool) -> anyhow::Result<()> {
    let leasing = LeaseOptions::new(AT_LEAST_ONCE).retention(Duration::from_secs(3 * 3600));
    let lease = owner(&pool, leasing, &key("a")).await;
    expire_in(&pool, &key("a"), Duration::from_secs(60)).await?;
    lease.complete(&"done".to_owned()).await?;
    let exact: bool = recorded(&pool, "expires_at = completed_at + interval '3 h' and lease_until is null").await;
    assert!(exact);
    expire_in(&pool, &key("a"), Duration::ZERO).await?;
    assert_eq!(work(&pool, AT_LEAST_ONCE, "anew").await?, Outcome::Performed("anew".to_owned()));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn waiting_holds_no_connection_and_gets_the_first_result(pool: PgPool) -> anyhow::Result<()> {
    // One connection for the owner, its renewal, and twenty callers that wait.
    let pool = pool_of(1, &pool.connect_options()).await;
    let gate = Gate::new();
    let owner = tokio::spawn({
        let (pool, gate) = (pool.clone(), gate.clone());
        async move {
            LeaseOptions::new(AT_LEAST_ONCE)
                .run(&pool, &key("a"), "body", async |_| {
                    gate.pass().await;
                    Ok::<_, Error>("first".to_owned())
                })
                .await
        }
    });
    gate.reached().await;
    let waiting = LeaseOptions::new(AT_LEAST_ONCE).on_duplicate(OnDuplicate::Wait(Duration::from_secs(20)));
    let waiters: Vec<_> = (0..20)
        .map(|_| {
            let pool = pool.clone();
            tokio::spawn(async move {
                waiting.run(&pool, &key("a"), "body", async |_| Ok::<_, Error>("second".to_owned())).await
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
    let gave_up = LeaseOptions::new(AT_LEAST_ONCE).on_duplicate(OnDuplicate::Wait(Duration::from_millis(100)));
    sqlx::query("delete from idempotency.record").execute(&pool).await?;
    let _lease = acquired(&pool, AT_LEAST_ONCE).await;
    let error = gave_up.acquire::<String, _>(&pool, &key("a"), "body").await.expect_err("in flight");
    assert!(matches!(error, Error::InFlight { .. }), "{error:?}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_change_under_a_lease_is_durable_whatever_the_session_says(pool: PgPool) -> anyhow::Result<()> {
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
        let session_pool = pool_of(5, &options(&pool).options([("synchronous_commit", session)])).await;
        let _ = LeaseOptions::new(IN_STEPS)
            .run(&session_pool, &key("b"), "body", async |lease| {
                lease.step("ride", async |_| Ok::<_, Error>(1)).await?;
                lease.step_at_most_once("text", async |_| Ok::<_, Error>(1)).await
            })
            .await?;
        acquired(&session_pool, AT_LEAST_ONCE).await.release("nothing was done").await?;
        let seen: Vec<String> = sqlx::query_scalar("select synchronous_commit from seen").fetch_all(&pool).await?;
        let changes = "claim, a step in the database, a step that begins and finishes, completion, claim, release";
        assert_eq!(seen, [expected; 7], "{changes}, from a session of {session}");
        let after: String =
            sqlx::query_scalar("select current_setting('synchronous_commit')").fetch_one(&session_pool).await?;
        assert_eq!(after, session, "only for these transactions");
        session_pool.close().await;
    }
    Ok(())
}

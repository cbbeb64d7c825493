//! Fencing: an owner that was overtaken stores and releases nothing. A model goes through every order of four of eight
//! steps, also of those with a janitor, which the interleavings have only one at a time.

use std::time::Duration;

use pg_idempotency::lease::{Acquired, LeaseOwner};
use pg_idempotency::testing::lapse;
use pg_idempotency::{Error, Janitor};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::lease::leases::{AT_LEAST_ONCE, acquire, acquired};
use crate::support::{expire_in, key, wide_pool};

/// What two owners, a janitor and time can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Lapse,
    Expire,
    Sweep,
    SecondClaims,
    FirstCompletes,
    FirstReleases,
    SecondCompletes,
    SecondReleases,
}

const STEPS: [Step; 8] = [
    Step::Lapse,
    Step::Expire,
    Step::Sweep,
    Step::SecondClaims,
    Step::FirstCompletes,
    Step::FirstReleases,
    Step::SecondCompletes,
    Step::SecondReleases,
];

/// A second reading of the rules, without a database: whose the claim is, and what is stored.
#[derive(Debug, Default)]
struct Model {
    owner: Option<u8>,
    lapsed: bool,
    released: bool,
    expired: bool,
    gone: bool,
    stored: Option<u8>,
    second_has_claimed: bool,
}

impl Model {
    fn owns(&self, who: u8) -> bool {
        self.owner == Some(who) && !self.released && !self.gone && self.stored.is_none()
    }

    fn live(&self) -> bool {
        self.stored.is_none() && !self.lapsed && !self.released && !self.gone
    }
}

async fn sql(pool: &PgPool, statement: &'static str) {
    sqlx::query(statement).execute(pool).await.expect("a statement");
}

/// Every sequence of four different steps, under the policy that lets a second owner in.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn every_order_of_steps_keeps_one_result_and_one_owner(pool: PgPool) -> anyhow::Result<()> {
    let mut sequences = vec![vec![]];
    for _ in 0..4 {
        sequences = sequences
            .into_iter()
            .flat_map(|sequence: Vec<Step>| {
                STEPS
                    .into_iter()
                    .filter(|step| !sequence.contains(step))
                    .map(|step| [&sequence[..], &[step]].concat())
                    .collect::<Vec<_>>()
            })
            .collect();
    }
    assert_eq!(sequences.len(), 8 * 7 * 6 * 5);
    for sequence in sequences {
        sql(&pool, "delete from idempotency.record").await;
        let mut first = Some(acquired(&pool, AT_LEAST_ONCE).await);
        let mut second: Option<LeaseOwner> = None;
        let mut model = Model { owner: Some(1), ..Model::default() };
        for step in &sequence {
            match step {
                Step::Lapse => {
                    sql(&pool, "update idempotency.record set lease_until = now() - interval '1 s' where lease_until > '-infinity'").await;
                    model.lapsed |= !model.released && model.stored.is_none();
                }
                Step::Expire => {
                    sql(&pool, "update idempotency.record set expires_at = now() - interval '1 s'").await;
                    model.expired = !model.gone;
                }
                Step::Sweep => {
                    Janitor::new(pool.clone()).with_grace(Duration::ZERO).sweep_once(10).await?;
                    if model.expired && !model.live() {
                        model.gone = true;
                    }
                }
                Step::SecondClaims => {
                    let result = acquire(&pool, AT_LEAST_ONCE, "body").await;
                    let free = model.gone
                        || (model.expired && !model.live())
                        || (model.stored.is_none() && (model.lapsed || model.released));
                    match result {
                        Ok(Acquired::Owner(lease)) => {
                            assert!(free, "{sequence:?} {step:?}: {model:?}");
                            second = Some(lease);
                            model = Model { owner: Some(2), second_has_claimed: true, ..Model::default() };
                        }
                        Ok(Acquired::Replayed(response)) => {
                            assert_eq!(
                                Some(response),
                                model.stored.map(|who| who.to_string()),
                                "{sequence:?}: {model:?}"
                            );
                            assert!(!free, "{sequence:?} {step:?}: {model:?}");
                        }
                        Err(Error::InFlight { .. }) => {
                            assert!(model.live() && !free, "{sequence:?} {step:?}: {model:?}")
                        }
                        Err(error) => panic!("{sequence:?} {step:?}: {error:?}"),
                    }
                }
                Step::FirstCompletes | Step::SecondCompletes => {
                    let (who, lease) =
                        if *step == Step::FirstCompletes { (1, first.take()) } else { (2, second.take()) };
                    let Some(lease) = lease else { continue };
                    let result = lease.complete(&who.to_string()).await;
                    assert_eq!(result.is_ok(), model.owns(who), "{sequence:?} {step:?}: {model:?} {result:?}");
                    if result.is_ok() {
                        model = Model {
                            owner: model.owner,
                            stored: Some(who),
                            second_has_claimed: model.second_has_claimed,
                            ..Model::default()
                        };
                    } else {
                        assert!(matches!(result, Err(Error::LeaseLost)), "{sequence:?}: {result:?}");
                    }
                }
                Step::FirstReleases | Step::SecondReleases => {
                    let (who, lease) =
                        if *step == Step::FirstReleases { (1, first.take()) } else { (2, second.take()) };
                    let Some(lease) = lease else { continue };
                    let result = lease.release("on purpose").await;
                    assert_eq!(result.is_ok(), model.owns(who), "{sequence:?} {step:?}: {model:?} {result:?}");
                    if result.is_ok() {
                        model.released = true;
                    }
                }
            }
        }
        let stored: Option<Option<Vec<u8>>> =
            sqlx::query_scalar("select response_body from idempotency.record").fetch_optional(&pool).await?;
        let expected = (!model.gone).then(|| model.stored.map(|who| format!("\"{who}\"").into_bytes()));
        assert_eq!(stored, expected, "{sequence:?}: {model:?}");
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn of_32_callers_of_a_lapsed_claim_one_takes_over(
    _: PgPoolOptions,
    options: PgConnectOptions,
) -> anyhow::Result<()> {
    let pool = wide_pool(&options, 34).await;
    for round in 2..12 {
        if round == 2 {
            drop(acquired(&pool, AT_LEAST_ONCE).await);
        }
        lapse(&pool, &key("a")).await?;
        let takers: Vec<_> = (0..32)
            .map(|_| {
                let pool = pool.clone();
                tokio::spawn(async move { acquire(&pool, AT_LEAST_ONCE, "body").await })
            })
            .collect();
        let mut leases = Vec::new();
        for taker in takers {
            match taker.await? {
                Ok(Acquired::Owner(lease)) => leases.push(lease.attempt()),
                Ok(Acquired::Replayed(_)) => panic!("nothing is stored"),
                Err(error) => assert!(matches!(error, Error::InFlight { .. }), "{error:?}"),
            }
        }
        assert_eq!(leases, [round], "one, and it is the next attempt");
    }
    pool.close().await;
    Ok(())
}

/// A token that counts would come back after a purge.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_stale_owner_cannot_complete_the_claim_made_after_a_purge(pool: PgPool) -> anyhow::Result<()> {
    let stale = acquired(&pool, AT_LEAST_ONCE).await;
    lapse(&pool, &key("a")).await?;
    expire_in(&pool, &key("a"), Duration::ZERO).await?;
    assert_eq!(Janitor::new(pool.clone()).with_grace(Duration::ZERO).sweep_once(10).await?.unfinished, 1);
    let fresh = acquired(&pool, AT_LEAST_ONCE).await;
    assert_eq!(fresh.attempt(), 1);
    assert!(matches!(stale.complete(&"stale".to_owned()).await, Err(Error::LeaseLost)));
    fresh.complete(&"fresh".to_owned()).await?;
    Ok(())
}

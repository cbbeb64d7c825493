//! Fencing: an owner that was overtaken stores and releases nothing. A model goes through every order of four of eight
//! steps, also of those with a janitor, which the interleavings have only one at a time.

use std::collections::BTreeMap;

use pg_idempotency::Error;
use pg_idempotency::lease::{Acquired, LeaseOwner};
use sqlx::PgPool;

use crate::lease::leases::{AT_LEAST_ONCE, acquire, acquired};
use crate::support::janitor;

/// What two owners, a janitor and time can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Lapse,
    Expire,
    Sweep,
    SecondClaims,
    /// By the first or by the second owner.
    Completes(u8),
    Releases(u8),
}

const STEPS: [Step; 8] = [
    Step::Lapse,
    Step::Expire,
    Step::Sweep,
    Step::SecondClaims,
    Step::Completes(1),
    Step::Releases(1),
    Step::Completes(2),
    Step::Releases(2),
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
}

impl Model {
    fn owns(&self, owner: u8) -> bool {
        self.owner == Some(owner) && !self.released && !self.gone && self.stored.is_none()
    }

    fn live(&self) -> bool {
        self.stored.is_none() && !self.lapsed && !self.released && !self.gone
    }
}

async fn sql(pool: &PgPool, statement: &'static str) {
    sqlx::query(statement).execute(pool).await.expect("a statement");
}

/// Every sequence of four different steps, under the policy that lets a second owner in.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
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
    // A token that counts would come back after a purge.
    sequences.push(vec![Step::Lapse, Step::Expire, Step::Sweep, Step::SecondClaims, Step::Completes(1)]);
    for sequence in sequences {
        sql(&pool, "delete from idempotency.record").await;
        let mut leases: BTreeMap<u8, LeaseOwner> = [(1, acquired(&pool, AT_LEAST_ONCE).await)].into();
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
                    janitor(&pool).sweep_once(10).await?;
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
                            leases.insert(2, lease);
                            model = Model { owner: Some(2), ..Model::default() };
                        }
                        Ok(Acquired::Replayed(response)) => {
                            assert_eq!(
                                Some(response),
                                model.stored.map(|owner| owner.to_string()),
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
                Step::Completes(owner) => {
                    let Some(lease) = leases.remove(owner) else { continue };
                    let result = lease.complete(&owner.to_string()).await;
                    assert_eq!(result.is_ok(), model.owns(*owner), "{sequence:?} {step:?}: {model:?} {result:?}");
                    if result.is_ok() {
                        model = Model { owner: model.owner, stored: Some(*owner), ..Model::default() };
                    } else {
                        assert!(matches!(result, Err(Error::LeaseLost)), "{sequence:?}: {result:?}");
                    }
                }
                Step::Releases(owner) => {
                    let Some(lease) = leases.remove(owner) else { continue };
                    let result = lease.release("on purpose").await;
                    assert_eq!(result.is_ok(), model.owns(*owner), "{sequence:?} {step:?}: {model:?} {result:?}");
                    if result.is_ok() {
                        model.released = true;
                    }
                }
            }
        }
        let stored: Option<Option<Vec<u8>>> =
            sqlx::query_scalar("select response_body from idempotency.record").fetch_optional(&pool).await?;
        let expected = (!model.gone).then(|| model.stored.map(|owner| format!("\"{owner}\"").into_bytes()));
        assert_eq!(stored, expected, "{sequence:?}: {model:?}");
    }
    Ok(())
}

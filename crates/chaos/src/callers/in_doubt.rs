//! A call at most once whose answer is often lost, and the reconcilers and the operator who settle it. The gateway
//! (gateway.sql) takes no idempotency key, delivers late, loses requests, and answers look-ups. It answers nothing
//! about some keys.

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pg_idempotency::lease::{Acquired, Finding as Found, InDoubt, LeaseOptions, Reconciler};
use pg_idempotency::operator::{Shown, show, unsettled};
use pg_idempotency::{DEFAULT_RETENTION, Error, Outcome, SettleError};
use sqlx::PgPool;
use sqlx::postgres::types::PgInterval;
use tokio::time::{sleep, timeout};

use super::lease::Leased;
use crate::checker::Aftermath;
use crate::checker::leases::{self, Promise};
use crate::checker::register;
use crate::finding::Finding;
use crate::history::{Call, What, now};
use crate::random::Random;
use crate::request::{Failure, key};
use crate::world::World;

pub(crate) const GATEWAY: &str = include_str!("../gateway.sql");
pub(crate) const OPERATOR: &str = "operator decided";

const QUIET: Duration = Duration::from_millis(300);
const DISTANCE: Duration = Duration::from_millis(100);
/// The first probe comes a lease of half a second and the quiet time after the lapse, and the third one 1 + 2 distances
/// later. So the third one is later than the last request that takes effect, and the first two may be earlier.
const LATEST: Duration = Duration::from_millis(1050);
/// The distances of seven probes add up to six seconds.
const PROBES: (u32, u32) = (3, 7);
/// Of a key whose requests are all lost.
const MAX_ATTEMPTS: NonZeroU32 = NonZeroU32::new(3).expect("not zero");

/// How the gateway treats a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gateway {
    Answers,
    /// Loses every request, and says that it has no trace.
    Loses,
    /// Loses every request, and answers no look-up.
    IsAway,
}

impl Gateway {
    fn of(value: &str) -> Self {
        let number: u64 = value.trim_start_matches(|digit: char| !digit.is_ascii_digit()).parse().unwrap_or_default();
        match number % 16 {
            5 => Self::Loses,
            13 => Self::IsAway,
            _ => Self::Answers,
        }
    }
}

fn leasing(leased: Leased, gateway: Gateway) -> LeaseOptions {
    let leasing = LeaseOptions::new(leased.policy()).store_request(true);
    // With a limit, the unlucky ones of the other keys would wait for a person.
    if gateway == Gateway::Answers { leasing } else { leasing.max_attempts(MAX_ATTEMPTS) }
}

pub(super) async fn call(
    world: &World,
    pool: &PgPool,
    value: &str,
    call: &str,
    leased: Leased,
    random: &mut Random,
) -> Result<Outcome<String>, Failure> {
    let gateway = Gateway::of(value);
    match leasing(leased, gateway).acquire(pool, &key(value), value).await? {
        Acquired::Replayed(response) => Ok(Outcome::Replayed(response)),
        Acquired::Owner(lease) => {
            world.history.add(call, value, What::Claimed(lease.token()));
            sleep(leased.work(random)).await;
            if lease.is_lost() {
                return Err(Error::LeaseLost.into());
            }
            let part = match random.below(6) {
                _ if gateway != Gateway::Answers => None,
                0 => None,
                1 => Some(random.below(100) as f64 / 100.0),
                // The first probes are too early for these.
                2 => Some(0.97),
                _ => Some(0.0),
            };
            sqlx::query("select send_unsure($1::text, $2::text, $3::text, $4::int8, $5::float8, $6::interval)")
                .bind(value)
                .bind(call)
                .bind(lease.downstream_key())
                .bind(lease.token())
                .bind(part)
                .bind(PgInterval::try_from(LATEST).unwrap_or_default())
                .execute(pool)
                .await?;
            if part != Some(0.0) {
                return Err(Error::Unanswered.into());
            }
            sleep(leased.work(random)).await;
            lease.complete(&call.to_owned()).await?;
            Ok(Outcome::Performed(call.to_owned()))
        }
    }
}

/// Runs in each worker, and when the fault is over in this process.
pub(super) async fn reconcile(
    world: Arc<World>,
    pool: PgPool,
    worker: String,
    leased: Leased,
    stopped: Arc<AtomicBool>,
) {
    let reconciler = Reconciler::new(leasing(leased, Gateway::Answers), "chaos", QUIET)
        .expect("valid options")
        .probes(PROBES.0, PROBES.1)
        .distance(DISTANCE);
    let shutdown = async {
        while !stopped.load(Ordering::Relaxed) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    let (shared, gateway) = (world.clone(), pool.clone());
    let look_up = async move |asked: &InDoubt| look_up(&shared, &gateway, &worker, asked).await;
    reconciler.run(&pool, shutdown, look_up).await;
}

async fn look_up(world: &World, gateway: &PgPool, worker: &str, asked: &InDoubt) -> anyhow::Result<Found> {
    let mut random = world.random(&format!("{worker} {} {}", asked.key.value(), now()));
    if Gateway::of(asked.key.value()) == Gateway::IsAway || random.one_in(16) {
        anyhow::bail!("the gateway is away");
    }
    if random.one_in(16) {
        return Ok(Found::Unknown);
    }
    let found: Option<String> = sqlx::query_scalar("select probe($1::text, $2::text)")
        .bind(&asked.downstream_key)
        .bind(worker)
        .fetch_one(gateway)
        .await?;
    sleep(random.millis(0..40)).await;
    sqlx::query("delete from probed where worker = $1::text").bind(worker).execute(gateway).await?;
    Ok(match found {
        Some(call) => Found::took_effect(&call)?,
        None => Found::NoTrace,
    })
}

/// Decides about some keys while reconcilers probe them.
pub(crate) async fn operator(world: Arc<World>) {
    let (pool, mut random) = (&world.observer, world.random("operator"));
    while !world.is_over() {
        sleep(random.millis(150..400)).await;
        let Ok(found) = unsettled(pool, 50, None, None).await else { continue };
        let mut asked: Vec<_> = found
            .into_iter()
            .filter(|shown| !shown.probes.is_empty() && Gateway::of(shown.key.value()) == Gateway::Answers)
            .collect();
        if asked.is_empty() {
            continue;
        }
        let shown = asked.swap_remove(usize::try_from(random.below(asked.len() as u64)).unwrap_or_default());
        match decide(pool, shown, random.millis(0..40)).await {
            Ok(()) => world.fault(OPERATOR),
            Err(SettleError::Changed) => world.fault("operator came too late"),
            Err(error) => panic!("an operator's decision failed: {error}"),
        }
    }
}

/// First makes sure that no request is on its way.
async fn decide(pool: &PgPool, shown: Shown, pause: Duration) -> Result<(), SettleError> {
    let happened: Option<String> = sqlx::query_scalar("select refuse($1::text, $2::int8)")
        .bind(&shown.downstream_key)
        .bind(shown.token)
        .fetch_one(pool)
        .await?;
    sleep(pause).await;
    match happened {
        Some(call) => shown.resolve(pool, &call, DEFAULT_RETENTION).await.map(drop),
        None => shown.release(pool, "nothing happened").await.map(drop),
    }
}

/// What becomes of a key that is in doubt when the fault is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doubt {
    Lasts,
    /// The reconcilers have given it up, as they should.
    GivenUp,
    /// The reconcilers were killed in too many probes, and an operator has decided.
    ByHand,
}

fn is_given_up(shown: &Shown) -> bool {
    shown.probes.iter().any(|probes| probes.next.is_none())
}

pub(super) async fn doubt(pool: &PgPool, value: &str) -> anyhow::Result<Doubt> {
    let Some(shown) = show(pool, &key(value)).await? else { return Ok(Doubt::Lasts) };
    if !is_given_up(&shown) {
        sleep(Duration::from_millis(20)).await;
        return Ok(Doubt::Lasts);
    }
    if Gateway::of(value) != Gateway::Answers {
        return Ok(Doubt::GivenUp);
    }
    decide(pool, shown, Duration::ZERO).await?;
    Ok(Doubt::ByHand)
}

/// `decided` keys were settled by hand.
pub(super) async fn check(world: &World, mode: Option<&str>, decided: usize) -> anyhow::Result<Finding> {
    deliver(world).await?;
    let (mut calls, mut after) = (world.history.calls(), world.aftermath().await?);
    let mut violations = lost_keys(world, &mut calls, &mut after).await?;
    violations.extend(leases::check(&calls, &after, Promise::Reconciled).violations);
    let keys = format!("{} keys settled, {decided} of them given up and then settled by hand", after.records.len());
    let requests: String = sqlx::query_scalar(
        "select format('%s requests, %s of them took effect, %s of these late',
            (select count(*) from sent), count(*), count(*) filter (where part > 0::float8))
        from effect",
    )
    .fetch_one(&world.observer)
    .await?;
    let finding = world.finding(violations, register::check(&calls));
    Ok(finding.tell(mode, &calls, &after).note(keys).note(requests))
}

/// Waits until the last request has taken effect.
async fn deliver(world: &World) -> anyhow::Result<()> {
    let waiting = "select exists (select from effect where due > clock_timestamp())";
    let delivered = async {
        while sqlx::query_scalar::<_, bool>(waiting).fetch_one(&world.observer).await? {
            sleep(DISTANCE).await;
        }
        Ok(())
    };
    timeout(Duration::from_secs(60), delivered).await?
}

/// Takes away the keys whose requests are all lost, and checks them.
async fn lost_keys(world: &World, calls: &mut Vec<Call>, after: &mut Aftermath) -> anyhow::Result<Vec<String>> {
    let answers = |value: &str| Gateway::of(value) == Gateway::Answers;
    let mut lost: Vec<String> = after.records.iter().map(|record| record.key.clone()).collect();
    lost.retain(|value| !answers(value));
    calls.retain(|call| answers(&call.key));
    after.records.retain(|record| answers(&record.key));
    let mut violations = Vec::new();
    for value in lost {
        let sent: i64 = sqlx::query_scalar("select count(*) from sent where key = $1::text")
            .bind(&value)
            .fetch_one(&world.observer)
            .await?;
        if sent > i64::from(MAX_ATTEMPTS.get()) {
            violations.push(format!("{value}: {sent} requests, of at most {MAX_ATTEMPTS}"));
        }
        let shown = show(&world.observer, &key(&value)).await?;
        let waits = |shown: &Shown| shown.is_exhausted(MAX_ATTEMPTS) || is_given_up(shown);
        if !shown.as_ref().is_some_and(waits) {
            violations.push(format!("{value}: the gateway knows nothing of it, and it does not wait for a person"));
        }
    }
    Ok(violations)
}

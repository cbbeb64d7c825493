//! The scenarios: what is stored before, and who calls. Only this file calls the library.

use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use pg_idempotency::dedup::{Dedup, Marked};
use pg_idempotency::lease::{Acquired, Lease, Leasing, Policy, release, resolve};
use pg_idempotency::testing::{self, Fixture};
use pg_idempotency::{Error, Idempotency, InFlight, Janitor, Key, Mode, Outcome, Verdict, commit, operator};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool, PgTransaction};

use crate::wire::Board;
use crate::world::{cause, letter};

/// The response of an earlier call, whose effect is not counted.
pub(crate) const EARLIER: &str = "Z";
const BODY: &str = "body";
const HOUR: Duration = Duration::from_secs(3600);
const LEASE: Duration = Duration::from_secs(40);
const AT_LEAST_ONCE: Policy = Policy::AtLeastOnce { lease: LEASE };
const AT_MOST_ONCE: Policy = Policy::AtMostOnce { lease: LEASE };
const IN_STEPS: Policy = Policy::InSteps { lease: LEASE };

/// An actor's place.
#[derive(Clone)]
pub(crate) struct Seat {
    pub(crate) at: usize,
    pub(crate) pool: PgPool,
    pub(crate) key: Key,
    pub(crate) board: Arc<Board>,
}

type Acting = Pin<Box<dyn Future<Output = anyhow::Result<String>> + Send>>;
pub(crate) type Act = Arc<dyn Fn(Seat) -> Acting + Send + Sync>;

/// A few actors on one key.
pub(crate) struct Scenario {
    pub(crate) name: String,
    before: Vec<Before>,
    pub(crate) actors: Vec<Act>,
    next: Act,
    /// How often an effect may be there.
    pub(crate) most_effects: usize,
    /// Every effect is of a call that has performed.
    pub(crate) one_effect: bool,
    pub(crate) one_key: bool,
    /// A statement that may wait here, for a documented reason.
    pub(crate) may_wait: Vec<&'static str>,
    /// A call may be told that the key is in flight while a sweep or an operator has its row.
    pub(crate) may_give_up: bool,
    pub(crate) drops: Vec<usize>,
    pub(crate) kills: Vec<usize>,
    /// Whether equal states are merged.
    pub(crate) merged: bool,
    /// Whether statements stop between their snapshot and their lock, too.
    pub(crate) inside: bool,
}

type Before = fn(&Key) -> Result<Fixture, Error>;

impl Scenario {
    fn of<const N: usize>(name: &str, actors: [Act; N]) -> Self {
        Self {
            name: name.to_owned(),
            before: Vec::new(),
            actors: actors.into(),
            next: call(REJECT),
            most_effects: 1,
            one_effect: true,
            one_key: true,
            may_wait: Vec::new(),
            may_give_up: false,
            drops: Vec::new(),
            kills: Vec::new(),
            merged: true,
            inside: false,
        }
    }

    fn after(mut self, before: Before) -> Self {
        self.before.push(before);
        self
    }

    fn effects(self, most_effects: usize) -> Self {
        Self { most_effects, ..self }
    }

    /// The records before the first call.
    pub(crate) fn before(&self, key: &Key) -> Result<Vec<Fixture>, Error> {
        self.before.iter().map(|before| before(key)).collect()
    }

    /// The state that remains, and the answer of a further call, which is rolled back.
    pub(crate) async fn left(&self, conn: &mut PgConnection, key: &Key) -> anyhow::Result<String> {
        let state = operator::show(conn, key).await?.map_or_else(|| "no record".to_owned(), |shown| shown.state);
        let options = REJECT;
        let mut tx = conn.begin().await?;
        let next = options.ensure(&mut tx, key, BODY, async |_| Ok::<_, Error>(String::new())).await;
        tx.rollback().await?;
        let next = match next {
            Ok(Outcome::Performed(_)) => "performs".to_owned(),
            Ok(Outcome::Replayed(who)) => format!("replays {who}"),
            Err(error) => cause(&error.into()),
        };
        Ok(format!("{state}, the next {next}"))
    }
}

#[derive(Clone, Copy)]
enum Isolation {
    ReadCommitted,
    RepeatableRead,
}

impl Seat {
    fn name(&self) -> String {
        letter(self.at).to_string()
    }

    fn answer(&self, answer: &str) {
        self.board.change(|board| board.players[self.at].answer = Some(answer.to_owned()));
    }

    async fn effect(&self, conn: &mut PgConnection, what: &str) -> Result<String, Error> {
        let insert = sqlx::query("insert into interleave.effect (what, who) values ($1, $2)").bind(what);
        insert.bind(self.name()).execute(conn).await?;
        Ok(self.name())
    }

    /// Begins a transaction with a `lock_timeout` of its own, which no call may change.
    async fn begin(&self, isolation: Isolation) -> Result<PgTransaction<'static>, sqlx::Error> {
        self.pool
            .begin_with(match isolation {
                Isolation::ReadCommitted => "begin; set local lock_timeout = '33s'",
                Isolation::RepeatableRead => "begin isolation level repeatable read; set local lock_timeout = '33s'",
            })
            .await
    }

    /// Commits after an answer, with which the transaction has to be usable.
    async fn conclude(
        &self,
        mut tx: PgTransaction<'_>,
        answered: Result<Outcome<String>, anyhow::Error>,
    ) -> anyhow::Result<String> {
        let answer = match answered {
            Ok(Outcome::Performed(_)) => "performed".to_owned(),
            Ok(Outcome::Replayed(who)) => format!("replayed {who}"),
            Err(error) => cause(&error),
        };
        self.answer(&answer);
        if answer.starts_with("fails") || answer.starts_with("is told to retry") {
            tx.rollback().await?;
            return Ok(answer);
        }
        let setting = sqlx::query_scalar("select current_setting('lock_timeout')");
        let lock_timeout: Result<String, _> = setting.fetch_one(&mut *tx).await;
        if !lock_timeout.as_ref().is_ok_and(|limit| limit == "33s") {
            return Ok(format!("{answer}, with an unusable transaction: {lock_timeout:?}"));
        }
        tx.commit().await?;
        Ok(answer)
    }
}

fn act<F>(acting: impl Fn(Seat) -> F + Send + Sync + 'static) -> Act
where
    F: Future<Output = anyhow::Result<String>> + Send + 'static,
{
    Arc::new(move |seat| Box::pin(acting(seat)))
}

const fn options(in_flight: InFlight) -> Idempotency {
    match Idempotency::new().with_in_flight(in_flight) {
        Ok(options) => options,
        Err(_) => panic!("a limit"),
    }
}

const WAIT: Idempotency = options(InFlight::Wait(Duration::from_secs(600)));
const REJECT: Idempotency = options(InFlight::Reject);

/// A call in a transaction of the caller.
fn call(options: Idempotency) -> Act {
    call_at(Isolation::ReadCommitted, options)
}

fn call_at(isolation: Isolation, options: Idempotency) -> Act {
    act(move |seat| async move {
        let mut tx = seat.begin(isolation).await?;
        let answered = options.ensure(&mut tx, &seat.key, BODY, async |conn| seat.effect(conn, "").await).await;
        seat.conclude(tx, answered.map_err(Into::into)).await
    })
}

/// A call whose transaction is the crate's.
fn run(options: Idempotency) -> Act {
    act(move |seat| async move {
        let answered = options.run(&seat.pool, &seat.key, BODY, async |conn| seat.effect(conn, "").await).await?;
        Ok(match answered {
            Outcome::Performed(_) => "performed".to_owned(),
            Outcome::Replayed(who) => format!("replayed {who}"),
        })
    })
}

pub(crate) fn all() -> Vec<Scenario> {
    vec![
        Scenario::of("two-wait", [call(WAIT), call(WAIT)]),
        Scenario::of("two-reject", [call(REJECT), call(REJECT)]),
        Scenario::of("three-wait", [call(WAIT), call(WAIT), call(WAIT)]),
        Scenario::of("run-two", [run(WAIT), run(WAIT)]),
        Scenario::of("expired-two", [call(WAIT), call(WAIT)]).after(expired),
    ]
}

fn expired(key: &Key) -> Result<Fixture, Error> {
    Ok(Fixture::completed(key, BODY, EARLIER)?.expired())
}

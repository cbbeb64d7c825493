//! The service of the demo `rides`: the cases of the specs of Brandur's rocket-rides-atomic, over HTTP, and those of its
//! completer. The demo itself covers kills and suspensions.
#![allow(dead_code, reason = "the demo uses the rest of its modules")]

#[path = "../src/bin/rides/dice.rs"]
mod dice;
#[path = "../src/bin/rides/gateways.rs"]
mod gateways;
#[path = "../src/bin/rides/mutant.rs"]
mod mutant;
#[path = "../src/bin/rides/outside.rs"]
mod outside;
#[path = "../src/bin/rides/ride.rs"]
mod ride;
#[path = "../src/bin/rides/schema.rs"]
mod schema;
#[path = "../src/bin/rides/service.rs"]
mod service;

use std::time::Duration;

use pg_idempotency::lease::{Acquired, Lease, LeaseOwner};
use pg_idempotency::operator::{Shown, show};
use pg_idempotency::{Key, testing};
use reqwest::Client;
use serde_json::{Value, json};
use sqlx::PgPool;
use tokio::net::TcpListener;

use gateways::{DECLINED, Gateways, Mishap};
use outside::{Failure, Outside};
use ride::{Booking, NewRide, RESUME_AFTER, Rides, leasing};
use schema::TABLES;

const OPERATION: &str = "POST /rides";

/// The service and its gateways, on sockets of this process.
struct App {
    rides: Rides,
    gateways: Gateways,
    base: String,
    client: Client,
    new: NewRide,
}

/// The counts of what must happen once: rides, charges, receipts, texts.
type Effects = (i64, usize, i64, usize);
const ONCE: Effects = (1, 1, 1, 1);

impl App {
    async fn start(pool: PgPool) -> anyhow::Result<Self> {
        pg_idempotency::migrate(&pool).await?;
        sqlx::raw_sql(demos::STRICT).execute(&pool).await?;
        sqlx::raw_sql(TABLES).execute(&pool).await?;
        let (gateways, url) = Gateways::start(Duration::ZERO, None).await?;
        let rides = Rides { pool, outside: Outside::new(&url), operation: OPERATION.to_owned(), mutant: None };
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let base = format!("http://{}", listener.local_addr()?);
        tokio::spawn(axum::serve(listener, service::router(rides.clone())).into_future());
        let [from, to, card, phone] = ["Alamo Square", "Union Square", "tok_1", "+12025550101"].map(str::to_owned);
        let new = NewRide { from, to, card, phone, cents: 1250 };
        Ok(Self { rides, gateways, base, client: Client::new(), new })
    }

    fn pool(&self) -> &PgPool {
        &self.rides.pool
    }

    async fn post_ride(&self, new: &NewRide) -> anyhow::Result<(u16, Value)> {
        let request = self.client.post(format!("{}/rides", self.base)).json(new);
        let answer = request.header("x-user-id", "ada").header("idempotency-key", "key-1").send().await?;
        Ok((answer.status().as_u16(), answer.json().await?))
    }

    async fn post(&self) -> anyhow::Result<(u16, Value)> {
        self.post_ride(&self.new).await
    }

    async fn assert_booked(&self) -> anyhow::Result<()> {
        let answer = self.post().await?;
        assert_eq!(self.effects().await?, ONCE);
        let ride: i64 = sqlx::query_scalar("select number from ride").fetch_one(self.pool()).await?;
        let booked = json!({"status": "booked", "ride": ride, "charge": {"number": 1}, "text": {"number": 1}});
        assert_eq!(answer, (201, booked));
        Ok(())
    }

    async fn assert_problem(&self, status: u16, kind: &str) -> anyhow::Result<()> {
        let (answered, problem) = self.post().await?;
        assert_eq!((answered, &problem["type"]), (status, &json!(format!("https://rides.example/problems/{kind}"))));
        Ok(())
    }

    async fn effects(&self) -> anyhow::Result<Effects> {
        let count = "select (select count(*) from ride), (select count(*) from receipt)";
        let (rides, receipts) = sqlx::query_as(count).fetch_one(self.pool()).await?;
        Ok((rides, self.gateways.charges_of(&self.new.card), receipts, self.gateways.texts_to(&self.new.phone)))
    }

    /// Another process takes the ride, and is at work.
    async fn taken(&self) -> anyhow::Result<LeaseOwner> {
        match leasing()?.acquire::<Booking, _>(self.pool(), &key(), &self.new).await? {
            Acquired::Owner(lease) => Ok(lease),
            Acquired::Replayed(booking) => panic!("{booking:?}"),
        }
    }

    async fn shown(&self) -> anyhow::Result<Shown> {
        Ok(show(self.pool(), &key()).await?.expect("a record"))
    }

    async fn assert_unlocked(&self, steps: &[&str]) -> anyhow::Result<()> {
        let shown = self.shown().await?;
        assert_eq!(shown.state.as_str(), "released");
        assert_eq!(shown.steps.iter().map(|step| step.name.as_str()).collect::<Vec<_>>(), steps);
        Ok(())
    }

    /// The completer of rocket-rides-atomic.
    async fn resume(&self) -> Result<Option<Booking>, Failure> {
        let work = async |lease: &Lease, new: NewRide| self.rides.perform(lease, &new).await;
        leasing()?.resume_one(self.pool(), OPERATION, work).await
    }

    async fn age(&self) -> anyhow::Result<()> {
        Ok(testing::age(self.pool(), &key(), RESUME_AFTER).await?)
    }

    /// The first insert into the table of rides fails with this SQLSTATE.
    async fn fail_first_insert(&self, sqlstate: &str) -> anyhow::Result<()> {
        sqlx::raw_sql(
            "create sequence insert_number;
             create function fail() returns trigger language plpgsql as $$
             begin
                 if nextval('insert_number') = 1 then
                     raise 'on purpose' using errcode = tg_argv[0];
                 end if;
                 return new;
             end $$",
        )
        .execute(self.pool())
        .await?;
        let trigger =
            format!("create trigger fail before insert on ride for each row execute function fail('{sqlstate}')");
        sqlx::raw_sql(sqlx::AssertSqlSafe(trigger)).execute(self.pool()).await?;
        Ok(())
    }
}

fn key() -> Key {
    Key::new("ada", OPERATION, "key-1").expect("a key")
}

#[sqlx::test(migrations = false)]
async fn a_new_key_books_the_ride(pool: PgPool) -> anyhow::Result<()> {
    App::start(pool).await?.assert_booked().await
}

#[sqlx::test(migrations = false)]
async fn a_stored_response_is_returned(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    app.assert_booked().await?;
    let requests = app.gateways.requests();
    app.assert_booked().await?;
    assert_eq!(app.gateways.requests(), requests);
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn a_key_that_was_unlocked_is_worked_on(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    app.taken().await?.release("it began nothing").await?;
    app.assert_booked().await?;
    assert_eq!(app.shown().await?.attempt, 2);
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn a_stale_lock_is_taken_over(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    drop(app.taken().await?);
    testing::lapse(app.pool(), &key()).await?;
    app.assert_booked().await
}

#[sqlx::test(migrations = false)]
async fn a_permanent_failure_is_stored(pool: PgPool) -> anyhow::Result<()> {
    let mut app = App::start(pool).await?;
    app.new.card = DECLINED.to_owned();
    for _ in 0..2 {
        assert_eq!(app.post().await?, (402, json!({"status": "declined", "ride": 1})));
    }
    assert_eq!((app.effects().await?, app.gateways.requests()), ((1, 0, 0, 0), 1));
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn it_continues_from_ride_created(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    app.gateways.fail_next_charge(Mishap::Busy);
    app.assert_problem(502, "gateway-failed").await?;
    app.assert_unlocked(&["ride"]).await?;
    app.assert_booked().await
}

/// The charge was made, and nobody heard of it. The gateway knows the key.
#[sqlx::test(migrations = false)]
async fn it_continues_in_the_middle_of_the_charge(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    app.gateways.fail_next_charge(Mishap::NoAnswer { done: true });
    app.assert_problem(502, "gateway-failed").await?;
    assert_eq!(app.effects().await?, (1, 1, 0, 0));
    app.assert_booked().await?;
    assert_eq!(app.gateways.deduplicated(), 1);
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn it_continues_from_charge_created(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    app.gateways.fail_next_text(Mishap::Busy);
    app.assert_problem(502, "gateway-failed").await?;
    app.assert_unlocked(&["ride", "charge", "receipt"]).await?;
    app.assert_booked().await?;
    assert_eq!(app.gateways.deduplicated(), 0, "the gateway was not asked again");
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn other_parameters_are_refused(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    app.assert_booked().await?;
    let other = NewRide { cents: 9900, ..app.new.clone() };
    let (status, problem) = app.post_ride(&other).await?;
    assert_eq!((status, &problem["type"]), (422, &json!("https://rides.example/problems/key-reused")));
    assert_eq!(app.effects().await?, ONCE);
    Ok(())
}

/// Also before the operation is complete: a take-over would charge for another ride.
#[sqlx::test(migrations = false)]
async fn other_parameters_are_refused_after_the_first_step(pool: PgPool) -> anyhow::Result<()> {
    let mut app = App::start(pool).await?;
    app.gateways.fail_next_charge(Mishap::Busy);
    app.assert_problem(502, "gateway-failed").await?;
    app.new.cents = 9900;
    app.assert_problem(422, "key-reused").await?;
    app.new.cents = 1250;
    app.assert_booked().await
}

#[sqlx::test(migrations = false)]
async fn a_ride_in_flight_is_refused(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    let _working = app.taken().await?;
    app.assert_problem(409, "in-flight").await?;
    assert_eq!(app.effects().await?, (0, 0, 0, 0));
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn a_serialization_failure_unlocks_the_key(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    app.fail_first_insert("40001").await?;
    app.assert_problem(503, "unavailable").await?;
    app.assert_unlocked(&[]).await?;
    app.assert_booked().await
}

#[sqlx::test(migrations = false)]
async fn an_internal_error_unlocks_the_key(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    app.fail_first_insert("P0001").await?;
    app.assert_problem(500, "internal-error").await?;
    app.assert_unlocked(&[]).await?;
    app.assert_booked().await
}

/// Not in the original, which has no step of this kind.
#[sqlx::test(migrations = false)]
async fn a_text_in_doubt_waits_for_an_operator(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    app.gateways.fail_next_text(Mishap::NoAnswer { done: true });
    app.assert_problem(502, "gateway-failed").await?;
    for _ in 0..2 {
        app.assert_problem(409, "indeterminate").await?;
        app.age().await?;
        assert!(app.resume().await?.is_none(), "a resumer does not take it either");
    }
    let shown = app.shown().await?;
    let reference = ride::reference(&shown.downstream_key.expect("a lease"), shown.attempt);
    let sent = app.rides.outside.withdraw(&reference).await?.expect("the gateway has sent it");
    pg_idempotency::operator::resolve_step(app.pool(), &key(), shown.token, "text", &sent).await?;
    app.assert_booked().await
}

#[sqlx::test(migrations = false)]
async fn the_completer_pushes_a_ride_through(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    app.gateways.fail_next_charge(Mishap::Busy);
    app.assert_problem(502, "gateway-failed").await?;
    app.age().await?;
    assert!(matches!(app.resume().await?, Some(Booking::Booked { ride: 1, .. })));
    assert_eq!(app.effects().await?, ONCE);
    app.assert_booked().await
}

#[sqlx::test(migrations = false)]
async fn the_completer_survives_an_error_and_keeps_ride_created(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    app.gateways.fail_next_charge(Mishap::Busy);
    app.assert_problem(502, "gateway-failed").await?;
    app.age().await?;
    app.gateways.fail_next_charge(Mishap::Busy);
    assert!(matches!(app.resume().await, Err(Failure::NotDone(_))));
    app.assert_unlocked(&["ride"]).await?;
    app.assert_booked().await
}

#[sqlx::test(migrations = false)]
async fn the_completer_ignores_young_and_recently_run_keys(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    // The time between the answer and the search must not count.
    let future = "update idempotency.record set claimed_at = now() + interval '1 hour'";
    app.gateways.fail_next_charge(Mishap::Busy);
    app.assert_problem(502, "gateway-failed").await?;
    sqlx::raw_sql(future).execute(app.pool()).await?;
    assert!(app.resume().await?.is_none(), "young");
    sqlx::raw_sql("update idempotency.record set claimed_at = now() - interval '1 hour'").execute(app.pool()).await?;
    app.gateways.fail_next_charge(Mishap::Busy);
    assert!(app.resume().await.is_err());
    sqlx::raw_sql(future).execute(app.pool()).await?;
    assert!(app.resume().await?.is_none(), "run recently");
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn the_completer_ignores_an_empty_database_and_finished_keys(pool: PgPool) -> anyhow::Result<()> {
    let app = App::start(pool).await?;
    assert!(app.resume().await?.is_none());
    app.assert_booked().await?;
    testing::age(app.pool(), &key(), Duration::from_secs(3600)).await?;
    assert!(app.resume().await?.is_none());
    assert_eq!(app.effects().await?, ONCE);
    Ok(())
}

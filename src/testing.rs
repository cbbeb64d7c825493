//! Tools for the tests of your own service (feature `testing`): they write records in any state, move time, and stop, drop, race and kill calls.
//!
//! With `#[sqlx::test]`, which gives each test a database of its own, [`MIGRATOR`](crate::MIGRATOR) creates the table:
//!
//! ```no_run,test_harness
//! # use pg_idempotency::{Error, Idempotency, Key, testing::Fixture};
//! #[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
//! async fn a_repeated_order_gets_the_first_answer(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//!     let key = Key::new("user:1", "POST /orders", "abc")?;
//!     Fixture::completed(&key, "tea", &17)?.write(&pool).await?;
//!
//!     let order = async |_: &mut sqlx::PgConnection| -> Result<i32, Error> { unreachable!("not performed again") };
//!     let outcome = Idempotency::new().run(&pool, &key, "tea", order).await?;
//!     assert!(outcome.is_replayed());
//!     assert_eq!(outcome.into_inner(), 17);
//!     Ok(())
//! }
//! ```
//!
//! | to test | use |
//! |---|---|
//! | a repeat, a retry after a crash, an expired key | [`Fixture`] |
//! | a duplicate of a call in flight | [`in_flight`], or a [`Gate`] in your own operation |
//! | a call a day later | [`age`], [`expire`], [`lapse`] |
//! | a storm of duplicates | [`race`] and [`assert_performed_once`] |
//! | a client that hangs up, a time-out | [`cancel_after`] |
//! | a lost connection | [`kill_backend`] |
//! | the record that remains | [`assert_completed`], [`assert_no_trace`]; for more, [`operator::show`](crate::operator::show()) |
//!
//! The guide's page `testing` is a tutorial, which also covers databases with migrations of their own.
//! `src/testing/fixtures` contains records as `.sql` files for `#[sqlx::test(fixtures(path = …))]`.
//!
//! Functions that wait give up after [`PATIENCE`], by Tokio's clock.

mod assertion;
mod backend;
mod cancel;
mod fixture;
mod gate;
mod in_flight;
mod race;
mod time;

pub use assertion::{assert_completed, assert_no_trace, assert_performed_once};
pub use backend::{backend, kill_backend, until_blocked};
pub use cancel::cancel_after;
pub use fixture::Fixture;
pub use gate::{Gate, PATIENCE};
pub use in_flight::{InFlightCall, in_flight};
pub use race::race;
pub use time::{age, expire, lapse};

//! Tools for the tests of your own service (feature `testing`): they move time, and stop, drop and race calls.
//!
//! **Make a record by the call that would leave it**, and then let time pass. With `#[sqlx::test]`, which gives each test a
//! database of its own, [`MIGRATOR`](crate::MIGRATOR) creates the table:
//!
//! ```no_run,test_harness
//! # use pg_idempotency::{Error, Idempotency, Key, testing};
//! # use std::time::Duration;
//! #[sqlx::test(migrator = "pg_idempotency::MIGRATOR")]
//! async fn a_key_is_remembered_for_a_day(pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
//!     let key = Key::new("user:1", "POST /orders", "abc")?;
//!     let order = async |_: &mut sqlx::PgConnection| -> Result<i32, Error> { Ok(17) };
//!     assert!(!Idempotency::new().run(&pool, &key, "tea", order).await?.is_replayed());
//!
//!     testing::age(&pool, &key, Duration::from_secs(23 * 3600)).await?;
//!     assert!(Idempotency::new().run(&pool, &key, "tea", order).await?.is_replayed());
//!     Ok(())
//! }
//! ```
//!
//! | to test | use |
//! |---|---|
//! | a retry | the call itself, twice |
//! | a call a day later, a worker that has died | [`age`], [`expire`], [`lapse`] |
//! | a duplicate of a call in flight | a transaction of the test, or a [`Gate`] in your own operation |
//! | a storm of duplicates | [`race`] and [`assert_performed_once`] |
//! | a client that hangs up, a time-out | [`cancel_after`] |
//! | a write that does not go through the transaction of the call | [`protect`](crate::protect()) |
//! | the record that remains | [`operator::show`](crate::operator::show()) |
//!
//! The guide's page `testing` is a tutorial, with the call that leaves each state, and a lost connection. It also covers
//! databases with migrations of their own.
//!
//! Functions that wait give up after [`PATIENCE`], by Tokio's clock.

mod assertion;
mod cancel;
mod gate;
mod race;
mod time;

pub use assertion::assert_performed_once;
pub use cancel::cancel_after;
pub use gate::{Gate, PATIENCE};
pub use race::race;
pub use time::{age, expire, lapse};

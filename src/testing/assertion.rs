//! Assertions about the answers and the records that remain.

use std::fmt::Debug;
use std::future::Future;
use std::panic::Location;

use sqlx::PgPool;

use crate::operator::{State, show};
use crate::{Key, Outcome};

/// Asserts that exactly one of these calls performed, that all others replayed, and that all gave the same answer.
/// Returns the answer.
///
/// ```
/// # use pg_idempotency::{Error, Outcome, testing::assert_performed_once};
/// let answers = [Ok::<_, Error>(Outcome::Replayed(17)), Ok(Outcome::Performed(17)), Ok(Outcome::Replayed(17))];
/// assert_eq!(assert_performed_once(answers), 17);
/// ```
///
/// Under [`InFlight::Reject`](crate::InFlight::Reject) a duplicate may get [`Error::InFlight`](crate::Error::InFlight):
/// filter these errors out first.
///
/// # Panics
///
/// If two calls performed, or none, or if a call failed, or if the answers differ.
#[track_caller]
pub fn assert_performed_once<T, E>(answers: impl IntoIterator<Item = Result<Outcome<T>, E>>) -> T
where
    T: PartialEq + Debug,
    E: Debug,
{
    let (mut performed, mut replayed) = (Vec::new(), Vec::new());
    for answer in answers {
        match answer {
            Ok(Outcome::Performed(answer)) => performed.push(answer),
            Ok(Outcome::Replayed(answer)) => replayed.push(answer),
            Err(error) => panic!("a call failed: {error:?}"),
        }
    }
    assert!(performed.len() <= 1, "performed {} times, with {performed:?}", performed.len());
    let Some(first) = performed.pop() else { panic!("performed by nobody; replayed {replayed:?}") };
    for answer in replayed {
        assert_eq!(answer, first, "a replay gave another answer than the call that performed");
    }
    first
}

/// Asserts that the key has a committed record that is completed or a mark, and whose retention has not ended.
///
/// # Panics
///
/// If the key has no such record: the message contains the state of its record. Also if the database fails.
#[track_caller]
pub fn assert_completed<'a>(pool: &'a PgPool, key: &'a Key) -> impl Future<Output = ()> + Send + 'a {
    let at = Location::caller();
    async move {
        match state(pool, key, at).await {
            Some(State::Completed | State::Mark) => {}
            Some(state) => panic!("{} is {state}, not completed; asserted at {at}", named(key)),
            None => panic!("{} has no record, so it is not completed; asserted at {at}", named(key)),
        }
    }
}

/// Asserts that the key has no committed record: the call with it has failed and left no trace.
///
/// # Panics
///
/// If there is a record: the message contains its state. Also if the database fails.
#[track_caller]
pub fn assert_no_trace<'a>(pool: &'a PgPool, key: &'a Key) -> impl Future<Output = ()> + Send + 'a {
    let at = Location::caller();
    async move {
        if let Some(state) = state(pool, key, at).await {
            panic!("{} has a record, which is {state}; asserted at {at}", named(key));
        }
    }
}

/// In full: the keys of a test are no secrets, and `Debug` of a key hides two of its parts.
fn named(key: &Key) -> String {
    format!("the key {:?}", (key.scope(), key.operation(), key.value()))
}

async fn state(pool: &PgPool, key: &Key, at: &Location<'_>) -> Option<State> {
    match show(pool, key).await {
        Ok(shown) => shown.map(|shown| shown.state),
        Err(error) => {
            panic!(
                "{} cannot be looked at: {error}: {:?}; asserted at {at}",
                named(key),
                std::error::Error::source(&error)
            )
        }
    }
}

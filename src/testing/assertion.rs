//! What must be left.

use std::fmt::Debug;
use std::future::Future;
use std::panic::Location;

use sqlx::PgPool;

use crate::operator::{Shown, show};
use crate::{Key, Outcome};

/// Asserts that one of these calls performed, that every other one replayed, and that all gave one answer; returns it.
///
/// ```
/// # use pg_idempotency::{Error, Outcome, testing::assert_performed_once};
/// let answers = [Ok::<_, Error>(Outcome::Replayed(17)), Ok(Outcome::Performed(17)), Ok(Outcome::Replayed(17))];
/// assert_eq!(assert_performed_once(answers), 17);
/// ```
///
/// Under [`InFlight::Reject`](crate::InFlight::Reject) a duplicate may be told [`Error::InFlight`](crate::Error::InFlight):
/// filter those out before.
///
/// # Panics
///
/// Where that is not so: two performed, or none, or a call failed.
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

/// Asserts that the key's record is completed, or that it is marked; by a committed record, within its retention.
///
/// # Panics
///
/// Where it is not, with the state that it is in; and where the database does not answer.
#[track_caller]
pub fn assert_completed<'a>(pool: &'a PgPool, key: &'a Key) -> impl Future<Output = ()> + Send + 'a {
    let at = Location::caller();
    async move {
        match state(pool, key, at).await.as_deref() {
            Some("completed" | "mark") => {}
            Some(state) => panic!("{key:?} is {state}, not completed; asserted at {at}"),
            None => panic!("{key:?} has no record, so it is not completed; asserted at {at}"),
        }
    }
}

/// Asserts that there is no committed record of the key: what was called with it has failed, and left no trace.
///
/// # Panics
///
/// Where there is one, with the state that it is in; and where the database does not answer.
#[track_caller]
pub fn assert_no_trace<'a>(pool: &'a PgPool, key: &'a Key) -> impl Future<Output = ()> + Send + 'a {
    let at = Location::caller();
    async move {
        if let Some(state) = state(pool, key, at).await {
            panic!("{key:?} has a record, which is {state}; asserted at {at}");
        }
    }
}

async fn state(pool: &PgPool, key: &Key, at: &Location<'_>) -> Option<String> {
    let shown: Result<Option<Shown>, crate::Error> = async { show(&mut *pool.acquire().await?, key).await }.await;
    match shown {
        Ok(shown) => shown.map(|shown| shown.state),
        Err(error) => {
            panic!("{key:?} cannot be looked at: {error}: {:?}; asserted at {at}", std::error::Error::source(&error))
        }
    }
}

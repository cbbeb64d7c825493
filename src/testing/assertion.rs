//! What the answers of a race must have in common.

use std::fmt::Debug;

use crate::Outcome;

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

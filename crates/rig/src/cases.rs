//! The cases of one test.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

/// Tests each case, also after a case that fails. Then fails with the numbers of the cases that failed.
pub async fn each<C>(cases: impl IntoIterator<Item = C>, mut test: impl AsyncFnMut(C) -> anyhow::Result<()>) {
    let mut failed = Vec::new();
    for (number, case) in (1..).zip(cases) {
        let mut running = pin!(test(case));
        let failure = poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| running.as_mut().poll(context))) {
            Ok(polled) => polled.map(|ended| ended.err().map(|error| format!("{error:?}"))),
            Err(_) => Poll::Ready(Some("panicked, see above".to_owned())),
        });
        failed.extend(failure.await.map(|why| format!("case {number}: {why}")));
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

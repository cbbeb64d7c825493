//! Panics of the service's code, as errors.

use std::any::Any;
use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Poll;

/// What a panic carries.
pub(crate) type Panic = Box<dyn Any + Send>;

/// Runs code of the service, and returns its panic as an error. The code is dropped before this returns.
///
/// After a panic, the caller must look at nothing that the code may have left half changed.
pub(crate) fn caught<T>(code: impl Future<Output = T>) -> impl Future<Output = Result<T, Panic>> {
    // Boxed before the first await, for the reason in session/bounded.rs.
    let mut code = Box::pin(code);
    async move {
        poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| code.as_mut().poll(context))) {
            Ok(poll) => poll.map(Ok),
            Err(panic) => Poll::Ready(Err(panic)),
        })
        .await
    }
}

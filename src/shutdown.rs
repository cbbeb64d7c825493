//! The future that ends a sweep or a run.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::sleep;

/// A future that may be polled again after it was ready, unlike most futures.
pub(crate) struct Shutdown<'a, F> {
    future: Option<Pin<&'a mut F>>,
}

impl<'a, F> Shutdown<'a, F> {
    pub(crate) fn new(future: Pin<&'a mut F>) -> Self {
        Self { future: Some(future) }
    }
}

impl<F: Future<Output = ()>> Future for Shutdown<'_, F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if let Some(future) = &mut self.future {
            if future.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
            self.future = None;
        }
        Poll::Ready(())
    }
}

/// The outcome of `other`; `None` if `end` is ready first. This polls `end` first.
pub(crate) async fn unless<F: Future>(end: &mut (impl Future<Output = ()> + Unpin), other: F) -> Option<F::Output> {
    let mut other = pin!(other);
    poll_fn(|context| match Pin::new(&mut *end).poll(context) {
        Poll::Ready(()) => Poll::Ready(None),
        Poll::Pending => other.as_mut().poll(context).map(Some),
    })
    .await
}

/// Is ready at this time, and `grace` after `end` is, whichever is earlier.
pub(crate) async fn no_later(limit: Duration, end: &mut (impl Future<Output = ()> + Unpin), grace: Duration) {
    let mut limit = pin!(sleep(limit));
    if unless(&mut *end, limit.as_mut()).await.is_none() {
        unless(&mut limit, sleep(grace)).await;
    }
}

pub(crate) async fn is_ready(shutdown: &mut (impl Future<Output = ()> + Unpin)) -> bool {
    unless(shutdown, std::future::ready(())).await.is_none()
}

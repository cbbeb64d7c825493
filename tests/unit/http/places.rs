//! The request that runs its handler stays the holder of its key, as far as this process knows.

use std::time::Duration;

use super::*;

#[tokio::test]
async fn a_request_that_took_an_unnoticed_lapse_over_leaves_the_holder_alone() {
    let ticket = Ticket {
        key: Arc::new(Key::new("tenant", "POST /texts", "a").expect("a key")),
        fingerprint: Fingerprint::of_bytes(b""),
        arrived: std::time::Instant::now(),
        stored: None,
    };
    let runs = Runs::default();
    let (_clients, gone): (Vec<_>, Vec<_>) = (0..4).map(|_| oneshot::channel()).unzip();
    let mut gone = gone.into_iter();
    let mut turn = |wait: Duration| {
        let bounds = Bounds { all: 8, of_one_scope: 7, of_one_key: 6, wait, place_time: wait };
        runs.turn(bounds, Some(&ticket), gone.next().expect("four"))
    };
    let mut first = turn(Duration::from_secs(60)).await.expect("a turn");
    let mut second = turn(Duration::from_secs(60)).await.expect("another turn");
    first.hold_key();
    second.hold_key();
    drop(second);
    // A duplicate still finds the first request.
    assert!(turn(Duration::ZERO).await.is_err());
    drop(first);
    assert!(turn(Duration::ZERO).await.is_ok());
    assert!(locked(&runs.queues).is_empty());
}

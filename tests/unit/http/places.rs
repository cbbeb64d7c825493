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
    let places = Places::default();
    let (_clients, gone): (Vec<_>, Vec<_>) = (0..4).map(|_| oneshot::channel()).unzip();
    let mut gone = gone.into_iter();
    let mut place = |patience: Duration| {
        let end = Instant::now() + patience;
        let patience = Patience { first: end, place: end };
        places.place(Bounds::of(8, None, 8, 8), Some(&ticket), patience, gone.next().expect("four"))
    };
    let mut first = place(Duration::from_secs(60)).await.expect("a place");
    let mut second = place(Duration::from_secs(60)).await.expect("another place");
    let performing = first.performing();
    assert!(performing.is_some() && second.performing().is_none());
    // A duplicate still finds the first request.
    assert!(place(Duration::ZERO).await.is_err());
    drop(performing);
    assert!(place(Duration::ZERO).await.is_ok());
}

//! The layer in front of a protected table: its handlers write, and their mistakes are refused.

use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx};
use pg_idempotency::lease::{Lease, Policy};
use pg_idempotency::{Error, Idempotency, OnEscape, RoundTrips, protect};
use sqlx::{PgExecutor, PgPool};

use crate::support::{calls, create_effects, effects, insert, leasing, post_to, request, send, user};

async fn protected(pool: &PgPool) {
    create_effects(pool).await;
    protect(pool, "effect", OnEscape::Refuse).await.expect("protected");
}

/// A write that does not go through the transaction of the call. Gives the SQLSTATE of its error.
async fn escape<'c>(on: impl PgExecutor<'c>) -> String {
    let error = sqlx::query("insert into effect (note) values ('escapes')").execute(on).await.expect_err("refused");
    error.as_database_error().and_then(|error| error.code()).expect("a state").into_owned()
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_transactional_layer_lets_its_handlers_write_with_a_key_and_without(pool: PgPool) {
    protected(&pool).await;
    let writes = async |mut tx: IdempotentTx| insert(&mut tx, "written").await.to_string();
    for (round_trips, key) in [(RoundTrips::Plain, "a"), (RoundTrips::SelectFirst, "b"), (RoundTrips::Fewest, "c")] {
        let layer =
            IdempotencyLayer::transactional(pool.clone(), Idempotency::new().with_round_trips(round_trips), user)
                .with_stored_errors([StatusCode::CONFLICT])
                .expect("a client error")
                .with_optional_key(true);
        let app = Router::new().route("/effects", post(writes)).layer(layer);
        let before = effects(&pool).await;
        let first = post_to(&app, "/effects", key, "x").await;
        assert_eq!((first.status, first.is_replayed()), (StatusCode::OK, false));
        assert!(post_to(&app, "/effects", key, "x").await.is_replayed());
        assert_eq!(effects(&pool).await, before + 1);
        for _ in 0..2 {
            assert_eq!(send(&app, request("POST", "/effects", None, "x")).await.status, StatusCode::OK);
        }
        assert_eq!(effects(&pool).await, before + 3);
        // Whichever connection of the pool the key's absence has exempted is so no more.
        for _ in 0..10 {
            assert_eq!(escape(&pool).await, "IK006");
        }
    }
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_handler_that_writes_through_the_pool_is_refused_and_leaves_nothing(pool: PgPool) {
    protected(&pool).await;
    let handler = {
        let pool = pool.clone();
        async move |mut tx: IdempotentTx| {
            insert(&mut tx, "written").await;
            assert_eq!(escape(&pool).await, "IK006");
            StatusCode::SERVICE_UNAVAILABLE
        }
    };
    let layer = IdempotencyLayer::transactional(pool.clone(), calls(), user).with_optional_key(true);
    let app = Router::new().route("/effects", post(handler)).layer(layer);
    assert_eq!(post_to(&app, "/effects", "a", "x").await.status, StatusCode::SERVICE_UNAVAILABLE);
    // Without a key, too: a handler has one form for both.
    assert_eq!(send(&app, request("POST", "/effects", None, "x")).await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(effects(&pool).await, 0);
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_handler_under_a_lease_writes_in_steps(pool: PgPool) {
    protected(&pool).await;
    let handler = {
        let pool = pool.clone();
        async move |lease: Lease| {
            assert_eq!(escape(&pool).await, "IK006");
            let step = lease.step("effect", async |conn| -> Result<(), Error> {
                sqlx::query("insert into effect (note) values ('written')").execute(conn).await?;
                Ok(())
            });
            step.await.map_or(StatusCode::SERVICE_UNAVAILABLE, |()| StatusCode::CREATED)
        }
    };
    let policy = Policy::InSteps { lease: Duration::from_secs(40) };
    let layer = IdempotencyLayer::leased(pool.clone(), leasing(policy), user);
    let app = Router::new().route("/effects", post(handler)).layer(layer);
    assert_eq!(post_to(&app, "/effects", "a", "x").await.status, StatusCode::CREATED);
    assert!(post_to(&app, "/effects", "a", "x").await.is_replayed());
    assert_eq!(effects(&pool).await, 1);
}

//! Mistakes of handlers and of the service's functions. They never lead to a success that was not committed, nor to a
//! damaged connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use axum::routing::post;
use axum::{Router, body::Bytes};
use pg_idempotency::Idempotency;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx, NoTransaction};
use pg_idempotency::lease::Lease;
use rig::cases::each;
use rig::lease::IN_STEPS;
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, PgPool};

use crate::support::{
    app, create_effects, effects, insert, leased, options, outside, pool_of, post_to, records, replaying_first,
    request, send, transactional, until, until_nothing_is_open,
};

/// The inner layer would wait for the key that the outer one holds, and the client would be told *in flight* for ever.
/// Or it would commit, and the outer one say that nothing was.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn two_layers_on_one_router_are_a_mistake_that_is_named(pool: PgPool) {
    create_effects(&pool).await;
    let write = async |mut tx: IdempotentTx| {
        insert(&mut tx, "x").await;
        StatusCode::CREATED
    };
    let layer = || transactional(&pool).operation(|_| Some("POST /effects".to_owned()));
    let of_another = IdempotencyLayer::transactional(pool.clone(), Idempotency::new(), |_| Ok("another".to_owned()));
    let of_another = of_another.operation(|_| Some("POST /effects".to_owned()));
    let under_a_lease = || leased(&pool, IN_STEPS).operation(|_| Some("POST /effects".to_owned()));
    let with_another_key = || under_a_lease().key_from(|_, _| Ok(Some("k".into())));
    let without_key = || layer().key_from(|_, _| Ok(None)).optional_key(true);
    for (name, inner, outer) in [
        ("both in a transaction", layer(), layer()),
        ("the outer one under a lease", layer(), under_a_lease()),
        ("the inner one under a lease", under_a_lease(), layer()),
        ("of another scope", layer(), of_another),
        ("of another key, under a lease", layer(), with_another_key()),
        ("both under a lease", under_a_lease(), with_another_key()),
        ("the inner one without a key", without_key(), layer()),
        ("the outer one without a key", layer(), without_key()),
        ("both without a key", without_key(), without_key()),
    ] {
        let app = Router::new().route("/effects", post(write)).route_layer(inner).route_layer(outer);
        let answer = post_to(&app, "/effects", &format!("\"{name}\""), "x").await;
        assert!(answer.mistake().contains("two IdempotencyLayers"), "{name}: {answer:?}");
        assert_eq!(effects(&pool).await, 0, "{name}");
    }
}

/// sqlx would release a savepoint instead of the COMMIT, and return `Ok`. The next caller that gets the connection
/// finds no open transaction, whatever the handler answers.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_forgotten_nested_transaction_is_never_acknowledged(other: PgPool) {
    let pool = pool_of(1, &other.connect_options()).await;
    create_effects(&other).await;
    let forgets = async |mut tx: IdempotentTx, body: Bytes| {
        insert(&mut tx, "outside").await;
        let mut nested = tx.begin().await.expect("a savepoint");
        sqlx::query("insert into effect (note) values ('nested')").execute(&mut *nested).await.expect("an effect");
        std::mem::forget(nested);
        StatusCode::from_bytes(&body).expect("a status")
    };
    let layer = transactional(&pool).optional_key(true).store_errors([StatusCode::PAYMENT_REQUIRED]);
    let app = Router::new().route("/forgets", post(forgets)).layer(layer);
    for key in [Some("key-1"), None] {
        // Neither an answer that releases the key nor an error without a key is stored.
        let declined = if key.is_some() { 500 } else { 402 };
        for (handlers, expected) in [("200", 500), ("402", declined), ("404", 404), ("503", 503)] {
            let answer = send(&app, request("POST", "/forgets", key, handlers)).await;
            assert_eq!(answer.status.as_u16(), expected, "{key:?}: {answer:?}");
            if expected == 500 {
                assert!(answer.mistake().contains("nested transaction was still open"), "{answer:?}");
            }
            outside(&pool, "insert into effect (note) values ('the next caller')").await;
            assert_eq!((effects(&other).await, records(&other).await), (1, 0), "{key:?} {handlers}");
            outside(&other, "truncate effect").await;
        }
    }
}

/// With and without a key, a success after a raw end of the transaction is refused, and nothing is stored.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_handler_that_ends_the_transaction_is_never_acknowledged(pool: PgPool) {
    create_effects(&pool).await;
    let ends = async |mut tx: IdempotentTx, body: String| {
        insert(&mut tx, "before").await;
        for statement in body.split(';') {
            sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut *tx).await.expect("executed");
        }
        "done"
    };
    let app = Router::new().route("/ends", post(ends)).layer(transactional(&pool).optional_key(true));
    for body in ["rollback", "commit", "rollback; begin", "commit; begin", "rollback and chain", "commit and chain"] {
        for key in [Some("key-1"), None] {
            let answer = send(&app, request("POST", "/ends", key, body)).await;
            assert!(answer.mistake().contains("not in the transaction"), "{key:?} {body}: {answer:?}");
            until_nothing_is_open(&pool).await;
            // A raw COMMIT commits the claim, which is indeterminate then, and the writes before it.
            let kept = i64::from(body.starts_with("commit"));
            assert_eq!(effects(&pool).await, kept, "{key:?} {body}");
            assert_eq!(records(&pool).await, if key.is_some() { kept } else { 0 });
            outside(&pool, "truncate effect, idempotency.record").await;
        }
    }
}

/// Nobody else has the key, so the client must not be told for ever that it is in flight.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_claim_that_the_database_swallows_is_a_mistake_that_is_named(pool: PgPool) {
    create_effects(&pool).await;
    sqlx::raw_sql(
        "create function in_the_way() returns trigger language plpgsql as 'begin return null; end';
         create trigger in_the_way before insert on idempotency.record for each row execute function in_the_way()",
    )
    .execute(&pool)
    .await
    .expect("a trigger");
    for layer in [transactional(&pool), replaying_first(&pool)] {
        let answer = post_to(&app(layer), "/effects", "key-1", "x").await;
        assert!(answer.mistake().contains("a BEFORE trigger that returns null"), "{answer:?}");
    }
    let handler = async |_: Lease| -> StatusCode { panic!("it is not called") };
    let app = Router::new().route("/effects", post(handler)).layer(leased(&pool, IN_STEPS));
    let answer = post_to(&app, "/effects", "key-1", "x").await;
    assert!(answer.mistake().contains("a BEFORE trigger that returns null"), "{answer:?}");
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

/// Dropping a query does not cancel it, so the ROLLBACK waits behind it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_time_out_inside_the_handler_is_answered_while_its_statement_still_runs(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |mut tx: IdempotentTx| {
        insert(&mut tx, "slow").await;
        let slow = sqlx::query("select pg_sleep(8)").execute(&mut *tx);
        match tokio::time::timeout(Duration::from_millis(100), slow).await {
            Ok(_) => StatusCode::OK,
            Err(_) => StatusCode::GATEWAY_TIMEOUT,
        }
    };
    let app = Router::new().route("/slow", post(handler)).layer(transactional(&pool).optional_key(true));
    for key in [Some("key-1"), None] {
        let started = Instant::now();
        let answer = send(&app, request("POST", "/slow", key, "x")).await;
        assert_eq!(answer.status, StatusCode::GATEWAY_TIMEOUT);
        assert!(started.elapsed() < Duration::from_secs(4), "answered after {:?}", started.elapsed());
    }
    until(&pool, "select count(*) = 0 from pg_stat_activity where query = 'select pg_sleep(8)' and state = 'active'")
        .await;
    until_nothing_is_open(&pool).await;
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_panic_in_a_function_of_the_service_claims_nothing_and_stays_a_panic(pool: PgPool) {
    create_effects(&pool).await;
    let layers = [
        IdempotencyLayer::transactional(pool.clone(), Idempotency::new(), |_| panic!("the scope")),
        transactional(&pool).key_from(|_, _| panic!("the key")),
        transactional(&pool).operation(|_| panic!("the operation")),
        transactional(&pool).key_from(|_, _| Ok(None)).on_rejection(|_| panic!("the rejection")),
    ];
    each(layers, async |layer| {
        let runs = layer.runs();
        let app = app(layer);
        let panicked = tokio::spawn(async move { post_to(&app, "/effects", "key-1", "x").await }).await;
        assert!(panicked.is_err_and(|error| error.is_panic()));
        assert_eq!(runs.count(), 0);
        Ok(())
    })
    .await;
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

/// A failed call of gRPC has the status 200, and says so in its trailers. So does a stream of Connect, at its end.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_grpc_response_commits_nothing(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |mut tx: IdempotentTx, kind: String| {
        insert(&mut tx, "called").await;
        [("content-type", kind)]
    };
    let app = Router::new().route("/grpc", post(handler)).layer(transactional(&pool).optional_key(true));
    for kind in ["application/grpc+proto", "Application/gRPC", "application/grpc-web", "application/connect+json"] {
        for key in [Some("key-1"), None] {
            let answer = send(&app, request("POST", "/grpc", key, kind)).await;
            assert!(answer.mistake().contains("gRPC"), "{answer:?}");
        }
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

/// The chosen error is stored although a statement of the handler failed before it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_aborted_transaction_still_stores_a_chosen_error(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |mut tx: IdempotentTx| {
        insert(&mut tx, "declined").await;
        assert!(sqlx::query("select 1 / 0").execute(&mut *tx).await.is_err());
        (StatusCode::PAYMENT_REQUIRED, "declined")
    };
    let ends = async |mut tx: IdempotentTx| {
        sqlx::raw_sql("rollback").execute(&mut *tx).await.expect("rolled back");
        (StatusCode::PAYMENT_REQUIRED, "declined")
    };
    let layer = transactional(&pool).store_errors([StatusCode::PAYMENT_REQUIRED]);
    let app = Router::new().route("/declined", post(handler)).route("/ends", post(ends)).layer(layer);
    assert_eq!(post_to(&app, "/declined", "key-1", "x").await.status, StatusCode::PAYMENT_REQUIRED);
    assert!(post_to(&app, "/declined", "key-1", "x").await.is_replayed());
    assert_eq!(post_to(&app, "/ends", "key-2", "x").await.problem(), "misconfigured");
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 1));
}

/// A request that looks before its transaction waits for a connection once: if it gets none, it does not wait for a
/// second one.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_missing_connection_is_waited_for_once(pool: PgPool) {
    const LIMIT: Duration = Duration::from_secs(3);
    let alone = PgPoolOptions::new().max_connections(1).acquire_timeout(LIMIT);
    let pool = alone.connect_with(options(&pool)).await.expect("a pool");
    let app = app(replaying_first(&pool));
    let _held = pool.acquire().await.expect("the only connection");
    let asked = Instant::now();
    assert_eq!(post_to(&app, "/effects", "key-1", "x").await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(asked.elapsed() < LIMIT * 2, "{:?}", asked.elapsed());
}

/// The handler writes by a pool of its own. Its answer would be replayed, but its writes would not be atomic with the
/// key.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_handler_that_never_takes_the_transaction_is_a_mistake_of_the_service(pool: PgPool) {
    create_effects(&pool).await;
    let handler = {
        let pool = pool.clone();
        async move |body: Bytes| {
            let status = StatusCode::from_u16(str::from_utf8(&body).expect("text").parse().expect("a number"));
            outside(&pool, "insert into effect (note) values ('apart')").await;
            (status.expect("a status"), "done, it believes")
        }
    };
    let layer = transactional(&pool).store_errors([StatusCode::PAYMENT_REQUIRED]);
    let app = Router::new().route("/apart", post(handler)).layer(layer);
    for status in ["200", "201", "303"] {
        let answer = post_to(&app, "/apart", "key-1", status).await;
        assert!(answer.mistake().contains("without its IdempotentTx"), "{answer:?}");
        assert_eq!(records(&pool).await, 0, "nothing is stored");
    }
    // An error may come before the handler needs the transaction, for example from an extractor.
    for status in ["400", "402", "500"] {
        let answer = post_to(&app, "/apart", &format!("key-{status}"), status).await;
        assert_eq!(answer.status.as_str(), status);
        assert!(answer.rejection.is_none());
    }
}

/// A retrying middleware inside the layer: it calls the handler up to three times, until the answer is not a 503.
async fn retried(
    request: axum::extract::Request,
    next: axum::middleware::Next,
) -> Result<axum::response::Response, StatusCode> {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1000).await.map_err(|_| StatusCode::BAD_REQUEST)?;
    let mut last = Err(StatusCode::SERVICE_UNAVAILABLE);
    for _ in 0..3 {
        let mut again = axum::extract::Request::new(axum::body::Body::from(body.clone()));
        *again.method_mut() = parts.method.clone();
        *again.uri_mut() = parts.uri.clone();
        *again.extensions_mut() = parts.extensions.clone();
        let response = next.clone().run(again).await;
        let done = response.status() != StatusCode::SERVICE_UNAVAILABLE;
        last = Ok(response);
        if done {
            break;
        }
    }
    last
}

/// The first attempt's writes are still in the transaction when the second one begins.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_retry_inside_the_layer_does_not_write_twice(pool: PgPool) {
    create_effects(&pool).await;
    let attempts = Arc::new(AtomicU32::new(0));
    let counted = attempts.clone();
    let fails_once = async move |mut tx: IdempotentTx| {
        insert(&mut tx, "an attempt").await;
        match counted.fetch_add(1, Ordering::SeqCst) {
            0 => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::CREATED,
        }
    };
    let ignores = async |extensions: axum::http::Extensions| {
        let mut tx = IdempotentTx::take(&extensions).expect("the first time");
        insert(&mut tx, "once").await;
        drop(tx);
        assert_eq!(IdempotentTx::take(&extensions).err(), Some(NoTransaction::GivenBack));
        StatusCode::CREATED
    };
    let layer = transactional(&pool).optional_key(true);
    let app = Router::new()
        .route("/fails-once", post(fails_once))
        .layer(axum::middleware::from_fn(retried))
        .route("/ignores", post(ignores))
        .layer(layer);
    for key in [Some("key-1"), None] {
        attempts.store(0, Ordering::SeqCst);
        let answer = send(&app, request("POST", "/fails-once", key, "x")).await;
        assert_eq!(answer.status, StatusCode::INTERNAL_SERVER_ERROR);
        let answer = send(&app, request("POST", "/ignores", key, "x")).await;
        assert!(answer.mistake().contains("given back and taken again"), "{answer:?}");
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

//! Key, effects and response commit in one transaction.

use axum::Router;
use axum::body::Body;
use axum::http::StatusCode;
use axum::middleware::map_response;
use axum::response::Response;
use axum::routing::post;
use http_body_util::BodyExt as _;
use pg_idempotency::Key;
use pg_idempotency::http::{IdempotentTx, NoTransaction, Rejection};
use rig::proxy::Proxy;
use sqlx::postgres::PgPoolOptions;
use sqlx::{PgPool, Row as _};

use crate::support::{
    app, create_effects, effects, insert, options, pool_of, post_to, records, replaying_first, request, send,
    transactional, until, until_nothing_is_open,
};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_error_undoes_everything_and_frees_the_key(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    for status in [400, 404, 422, 500, 503] {
        let uri = format!("/status/{status}");
        for _ in 0..2 {
            let answer = post_to(&app, &uri, "key-1", "x").await;
            assert_eq!((answer.status.as_u16(), answer.is_replayed()), (status, false));
            assert!(answer.body.starts_with(b"effect "), "the handler's own answer");
        }
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    // A corrected request may use the key.
    assert_eq!(post_to(&app, "/effects", "key-1", "x").await.status, StatusCode::CREATED);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_chosen_error_is_stored_and_its_writes_are_undone(pool: PgPool) {
    create_effects(&pool).await;
    let layer = transactional(&pool).store_errors([StatusCode::PAYMENT_REQUIRED]);
    let app = app(layer);
    let first = post_to(&app, "/status/402", "key-1", "x").await;
    let repeat = post_to(&app, "/status/402", "key-1", "x").await;
    assert_eq!((repeat.status, repeat.is_replayed()), (StatusCode::PAYMENT_REQUIRED, true));
    assert_eq!(repeat.body, first.body);
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 1));
    // Other errors and successes are treated as before.
    assert!(!post_to(&app, "/status/403", "key-2", "x").await.is_replayed());
    assert!(!post_to(&app, "/status/403", "key-2", "x").await.is_replayed());
    assert_eq!(post_to(&app, "/effects", "key-3", "x").await.status, StatusCode::CREATED);
    assert!(post_to(&app, "/effects", "key-3", "x").await.is_replayed());
    assert_eq!(effects(&pool).await, 1);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_panic_undoes_everything_frees_the_key_and_stays_a_panic(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    for _ in 0..2 {
        let app = app.clone();
        let panicked = tokio::spawn(async move { post_to(&app, "/panic", "key-1", "x").await }).await;
        assert!(panicked.is_err_and(|error| error.is_panic()));
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    assert_eq!(post_to(&app, "/effects", "key-1", "x").await.status, StatusCode::CREATED);
}

/// The handler ignores an error of the database, keeps the transaction, or sends a response that breaks off.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_answer_that_cannot_be_committed_and_replayed_is_a_mistake_of_the_service(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    let mut wrong = Vec::new();
    for uri in ["/swallow", "/keep", "/broken"] {
        let answer = post_to(&app, uri, "key-1", "x").await;
        // A transaction that is kept is rolled back when the task drops it.
        until_nothing_is_open(&pool).await;
        let left = (effects(&pool).await, records(&pool).await);
        let kind = answer.rejection.as_ref().map(Rejection::kind);
        if (answer.status, kind, left) != (StatusCode::INTERNAL_SERVER_ERROR, Some("misconfigured"), (0, 0)) {
            wrong.push(format!("{uri} leaves {left:?}: {answer:?}"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_handler_has_the_key_and_may_nest_transactions(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |axum::Extension(key): axum::Extension<Key>, mut tx: IdempotentTx| {
        use sqlx::Connection as _;
        insert(&mut tx, "outer").await;
        let mut inner = tx.begin().await.expect("a savepoint");
        sqlx::query("insert into effect (note) values ('inner')").execute(&mut *inner).await.expect("an effect");
        inner.rollback().await.expect("rolled back");
        assert_eq!(tx.key(), Some(&key));
        format!("{} {} {}", key.scope(), key.operation(), key.value())
    };
    let app = Router::new().route("/nested/{id}", post(handler)).layer(transactional(&pool));
    let answer = post_to(&app, "/nested/7", "key-1", "x").await;
    assert_eq!(answer.body, "ada POST /nested/{} key-1");
    assert_eq!(post_to(&app, "/nested/7", "key-1", "x").await.body, answer.body);
    assert_eq!(effects(&pool).await, 1);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_transaction_is_lent_once(pool: PgPool) {
    create_effects(&pool).await;
    let twice = async |_first: IdempotentTx, second: Result<IdempotentTx, NoTransaction>| {
        assert_eq!(second.err(), Some(NoTransaction::Taken));
        "told"
    };
    let app = Router::new().route("/twice", post(twice)).layer(transactional(&pool));
    let answer = post_to(&app, "/twice", "key-1", "x").await;
    assert_eq!((answer.status, &*answer.body), (StatusCode::OK, &b"told"[..]));
}

/// Without a key, the transaction is exempt from the protection of the table of effects, and the connection is not.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_without_a_key_leaves_no_exemption_on_its_connection(pool: PgPool) {
    let pool = pool_of(1, &pool.connect_options()).await;
    create_effects(&pool).await;
    let app = app(transactional(&pool).optional_key(true));
    for performed in 1..=2 {
        assert_eq!(send(&app, request("POST", "/effects", None, "x")).await.status, StatusCode::CREATED);
        let escaped = sqlx::raw_sql("insert into effect (note) values ('escapes')").execute(&pool).await;
        let refused = escaped.expect_err("outside").into_database_error().expect("by the server");
        assert_eq!(refused.code().as_deref(), Some("IK006"));
        assert_eq!(effects(&pool).await, performed);
    }
}

/// The message with BEGIN fails in the server, as a cancelled statement would, by a shadowed operator.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_failed_begin_leaves_its_connection_outside_a_transaction(observer: PgPool) {
    create_effects(&observer).await;
    sqlx::raw_sql(
        "create schema evil;
         create function evil.fail(int, int) returns int language plpgsql as $$
             begin raise exception 'cancelled' using errcode = '57014'; end $$;
         create operator evil./ (leftarg = int, rightarg = int, function = evil.fail)",
    )
    .execute(&observer)
    .await
    .expect("made");
    let spoilt = options(&observer).options([("search_path", "evil, pg_catalog, public")]);
    let pool = PgPoolOptions::new().max_connections(1).connect_with(spoilt).await.expect("a pool");
    let app = app(transactional(&pool).optional_key(true));
    for _ in 0..2 {
        let answer = send(&app, request("POST", "/effects", None, "x")).await;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE);
        let asked = sqlx::raw_sql("select now() = statement_timestamp()").fetch_one(&pool).await.expect("it is usable");
        let idle: bool = asked.try_get(0).expect("an answer");
        assert!(idle, "no transaction is open on it");
    }
    assert_eq!(effects(&observer).await, 0);
}

/// The bare handler takes three: BEGIN, the insert, and COMMIT.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_takes_the_documented_round_trips(direct: PgPool) -> anyhow::Result<()> {
    create_effects(&direct).await;
    let proxy = Proxy::before(&direct.connect_options()).await?;
    let pool =
        PgPoolOptions::new().max_connections(1).test_before_acquire(false).connect_with(proxy.options.clone()).await?;
    // The pool pings a connection that comes back: here ours, and then the layer's.
    const PINGS: usize = 2;
    // Of a first call and of a replay. The replay does not wait for its ROLLBACK, which is counted.
    for (layer, name, wanted) in [(transactional(&pool), "plain", [5, 4]), (replaying_first(&pool), "first", [6, 1])] {
        let app = app(layer);
        // The first use of a statement prepares it.
        for key in ["prepare", "measure"].map(|key| format!("{key}-{name}")) {
            for wanted in wanted {
                let held = pool.acquire().await?;
                proxy.take();
                drop(held);
                assert_eq!(post_to(&app, "/effects", &key, "x").await.status, StatusCode::CREATED);
                let _held = pool.acquire().await?;
                let trips = proxy.take() - PINGS;
                if key.starts_with("measure") {
                    assert_eq!(trips, wanted, "{key}");
                }
            }
        }
    }
    assert_eq!((effects(&direct).await, records(&direct).await), (4, 4));
    Ok(())
}

/// A dashboard that watches the ratio of rollbacks must not alarm because of the layer.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_first_call_counts_no_rollback(observer: PgPool) {
    create_effects(&observer).await;
    let rollbacks = async || -> i64 {
        let counted = "select xact_rollback from pg_stat_database where datname = current_database()";
        sqlx::query_scalar(counted).fetch_one(&observer).await.expect("a count")
    };
    let before = rollbacks().await;
    let pool = pool_of(1, &observer.connect_options()).await;
    let app = app(transactional(&pool));
    for key in 0..10 {
        assert_eq!(post_to(&app, "/effects", &format!("key-{key}"), "x").await.status, StatusCode::CREATED);
    }
    // The server publishes all counts of a session at its end.
    pool.close().await;
    until(&observer, "select n_tup_ins = 10 from pg_stat_user_tables where relname = 'effect'").await;
    assert_eq!(rollbacks().await - before, 0);
}

/// So a call fails over GraphQL and JSON-RPC.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_failure_with_status_200_commits_unless_a_middleware_inside_makes_it_a_503(pool: PgPool) {
    create_effects(&pool).await;
    let mutation = async |mut tx: IdempotentTx| {
        insert(&mut tx, "half").await;
        r#"{"errors":[{"message":"the bank is busy"}]}"#
    };
    let failing = async |response: Response| {
        let (mut parts, body) = response.into_parts();
        let body = body.collect().await.expect("a body").to_bytes();
        if body.starts_with(br#"{"errors""#) {
            parts.status = StatusCode::SERVICE_UNAVAILABLE;
        }
        Response::from_parts(parts, Body::from(body))
    };
    let routes = Router::new().route("/graphql", post(mutation));
    let with_middleware = routes.clone().route_layer(map_response(failing)).route_layer(transactional(&pool));
    for _ in 0..2 {
        let answer = post_to(&with_middleware, "/graphql", "key-1", "mutation").await;
        assert_eq!((answer.status, answer.is_replayed()), (StatusCode::SERVICE_UNAVAILABLE, false));
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    let without = routes.route_layer(transactional(&pool));
    for replayed in [false, true] {
        let answer = post_to(&without, "/graphql", "key-1", "mutation").await;
        assert_eq!((answer.status, answer.is_replayed()), (StatusCode::OK, replayed));
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
}

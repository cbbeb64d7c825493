//! Errors of the database: a 503 if a retry may succeed, a 500 if it cannot. A client that obeys `Retry-After`
//! would otherwise ask forever, and the handler would run each time.

use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use pg_idempotency::http::IdempotentTx;
use pg_idempotency::lease::Policy;
use rig::lease::AT_MOST_ONCE;
use rig::proxy::Proxy;
use sqlx::PgPool;

use crate::support::{
    Answer, app, create_effects, effects, insert, leased, options, outside, pool_of, post_to, records, replaying_first,
    request, send, transactional,
};

/// The answer tells the client to stop: it has no `Retry-After` and is not retryable.
fn assert_permanent(answer: &Answer) {
    assert_eq!((answer.status, &*answer.problem()), (StatusCode::INTERNAL_SERVER_ERROR, "misconfigured"));
    assert!(!answer.headers.contains_key("retry-after"), "{answer:?}");
    assert!(answer.rejection.as_ref().is_some_and(|rejection| !rejection.is_retryable()));
}

/// The answer tells the client when to ask again.
fn assert_transient(answer: &Answer) {
    assert_eq!((answer.status, &*answer.problem()), (StatusCode::SERVICE_UNAVAILABLE, "unavailable"));
    assert_eq!(answer.headers["retry-after"], "1");
    assert!(answer.rejection.as_ref().is_some_and(|rejection| rejection.is_retryable()));
}

/// It is unknown whether a COMMIT took effect whose connection was lost; a retry with the same key gives the answer.
/// `statement_timeout` does not apply to a COMMIT, but a cancel request does.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_commit_that_fails_is_a_503_or_a_500_if_it_always_will(pool: PgPool) {
    create_effects(&pool).await;
    let mut conn = pool.acquire().await.expect("a connection");
    for sql in [
        "create function at_commit() returns trigger language plpgsql as $$ begin
            case new.note
                when 'cut' then perform pg_terminate_backend(pg_backend_pid());
                when 'cancelled' then perform pg_cancel_backend(pg_backend_pid()); perform pg_sleep(60);
                when 'lost' then raise exception 'to a concurrent transaction' using errcode = '40001';
                when 'refused' then raise exception 'by a deferred constraint' using errcode = '23505';
                else null;
            end case;
            return new;
        end $$",
        "create constraint trigger at_commit after insert on effect deferrable initially deferred
         for each row execute function at_commit()",
    ] {
        sqlx::raw_sql(sql).execute(&mut *conn).await.expect("made");
    }
    drop(conn);
    let app = app(transactional(&pool).optional_key(true));
    for body in ["cut", "cancelled", "lost", "refused"] {
        for key in [Some("key-1"), None] {
            let answer = send(&app, request("POST", "/effects", key, body)).await;
            if body == "refused" {
                assert_permanent(&answer)
            } else {
                assert_transient(&answer)
            }
            assert_eq!((effects(&pool).await, records(&pool).await), (0, 0), "{body}");
        }
    }
    assert_eq!(post_to(&app, "/effects", "key-1", "x").await.status, StatusCode::CREATED, "the key is free");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_connection_that_is_lost_under_the_handler_is_a_503(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |mut tx: IdempotentTx| {
        insert(&mut tx, "cut").await;
        let _ = sqlx::query("select pg_terminate_backend(pg_backend_pid())").execute(&mut *tx).await;
        "done, it believes"
    };
    let app = Router::new().route("/cut", post(handler)).layer(transactional(&pool).optional_key(true));
    for key in [Some("key-1"), None] {
        assert_transient(&send(&app, request("POST", "/cut", key, "x")).await);
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

/// The sessions of a primary that a fail-over has demoted last, and are read only.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_demoted_primary_is_a_503_and_a_transaction_that_the_handler_made_read_only_a_500(pool: PgPool) {
    create_effects(&pool).await;
    let demoted = options(&pool).options([("default_transaction_read_only", "on")]);
    let demoted = pool.options().clone().connect_lazy_with(demoted);
    assert_transient(&post_to(&app(transactional(&demoted)), "/effects", "key-1", "x").await);
    assert_transient(&post_to(&app(leased(&demoted, AT_MOST_ONCE)), "/effects", "key-1", "x").await);
    let handler = async |mut tx: IdempotentTx| {
        sqlx::query("set transaction read only").execute(&mut *tx).await.expect("set");
        "done, it believes"
    };
    let app = Router::new().route("/reads", post(handler)).layer(transactional(&pool));
    assert_permanent(&post_to(&app, "/reads", "key-1", "x").await);
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

/// The next owner may repeat the effect outside, so the rejection must not ask for a retry.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_leased_response_that_the_database_refuses_is_a_500(pool: PgPool) {
    sqlx::raw_sql("alter table idempotency.record add constraint small check (octet_length(response_body) < 4)")
        .execute(&pool)
        .await
        .expect("altered");
    let policy = Policy::AtLeastOnce { lease: Duration::from_secs(5) };
    let layer = leased(&pool, policy);
    let app = Router::new().route("/sms", post(async || "sent")).layer(layer);
    assert_permanent(&post_to(&app, "/sms", "key-1", "x").await);
}

/// Before the handler, another connection helps. After it, each retry would run the handler again.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn lost_statements_are_a_503_before_the_handler_and_a_500_after_it(other: PgPool) {
    create_effects(&other).await;
    for layer in [transactional, replaying_first] {
        outside(&other, "truncate effect, idempotency.record").await;
        let pool = pool_of(1, &other.connect_options()).await;
        let handler = async |mut tx: IdempotentTx, body: String| {
            insert(&mut tx, &body).await;
            if body == "loses" {
                sqlx::raw_sql("deallocate all").execute(&mut *tx).await.expect("lost");
            }
            StatusCode::CREATED
        };
        let app = Router::new().route("/effects", post(handler)).layer(layer(&pool));
        assert_eq!(post_to(&app, "/effects", "key-1", "x").await.status, StatusCode::CREATED);
        sqlx::raw_sql("deallocate all").execute(&pool).await.expect("lost");
        assert_transient(&post_to(&app, "/effects", "key-2", "x").await);
        assert_eq!(post_to(&app, "/effects", "key-2", "x").await.status, StatusCode::CREATED);
        assert_permanent(&post_to(&app, "/effects", "key-3", "loses").await);
        assert_eq!((effects(&other).await, records(&other).await), (2, 2));
        assert_eq!(post_to(&app, "/effects", "key-3", "x").await.status, StatusCode::CREATED);
    }
}

/// The pooler has lost its connection to the server, which has executed the COMMIT.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_commit_that_a_pooler_answers_with_58000_is_a_503_and_the_retry_a_replay(direct: PgPool) {
    create_effects(&direct).await;
    let proxy = Proxy::before(&direct.connect_options()).await.expect("a proxy");
    let pool = pool_of(2, &proxy.options).await;
    let app = app(transactional(&pool).optional_key(true));
    for key in [Some("key-1"), None] {
        proxy.answer("COMMIT", "58000", 1);
        assert_transient(&send(&app, request("POST", "/effects", key, "x")).await);
    }
    assert!(post_to(&app, "/effects", "key-1", "x").await.is_replayed());
    assert_eq!((effects(&direct).await, records(&direct).await), (2, 1));
    // The owner of a lease asks again by itself.
    let handler = async move |State(proxy): State<Proxy>| {
        proxy.answer("COMMIT", "58000", 1);
        "sent"
    };
    let app = Router::new().route("/sms", post(handler)).layer(leased(&pool, AT_MOST_ONCE)).with_state(proxy);
    assert_eq!(post_to(&app, "/sms", "key-1", "x").await.status, StatusCode::OK);
    assert!(post_to(&app, "/sms", "key-1", "x").await.is_replayed());
}

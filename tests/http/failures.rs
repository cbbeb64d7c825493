//! Errors of the database: a 503 if a retry may succeed, a 500 if it cannot. A client that obeys `Retry-After`
//! would otherwise ask forever, and the handler would run each time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use pg_idempotency::Error;
use pg_idempotency::http::{IdempotentTx, Rejection};
use pg_idempotency::lease::Policy;
use pg_idempotency::testing::Gate;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool};

use crate::support::{
    Answer, app, create_effects, effects, insert, leased, outside, post_to, records, request, send, transactional,
    until,
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

/// A transient answer with this SQLSTATE as its cause.
fn assert_unavailable(answer: &Answer, state: &str) {
    assert_transient(answer);
    let Some(Rejection::Unavailable(error)) = &answer.rejection else { panic!("{answer:?}") };
    let Error::Database(error) = &**error else { panic!("{error:?}") };
    assert_eq!(error.as_database_error().and_then(|error| error.code()).as_deref(), Some(state));
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_constraint_that_fails_at_commit_is_a_500(pool: PgPool) {
    create_effects(&pool).await;
    sqlx::raw_sql("create table deferred (n int unique deferrable initially deferred)")
        .execute(&pool)
        .await
        .expect("made");
    let app = app(transactional(&pool).with_optional_key(true));
    for key in [Some("key-1"), None] {
        assert_permanent(&send(&app, request("POST", "/fail-to-commit", key, "x")).await);
    }
    assert_eq!(records(&pool).await, 0);
}

/// 57014 and 55P03: with less load the same request succeeds.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(
    idempotency_distributed,
    ignore = "a distributed table has no deferred triggers, and its locks are elsewhere"
)]
async fn a_time_out_of_the_server_is_a_503(_: PgPoolOptions, options: PgConnectOptions) {
    let pool = PgPool::connect_with(options.clone()).await.expect("a pool");
    create_effects(&pool).await;
    for (setting, state) in [("statement_timeout", "57014"), ("lock_timeout", "55P03")] {
        let limited = PgPool::connect_with(options.clone().options([(setting, "300ms")])).await.expect("a pool");
        let app = app(transactional(&limited).with_optional_key(true));
        let mut locked = pool.begin().await.expect("begun");
        sqlx::raw_sql("lock table idempotency.record in exclusive mode").execute(&mut *locked).await.expect("locked");
        assert_unavailable(&post_to(&app, "/effects", "key-1", "x").await, state);
        locked.rollback().await.expect("unlocked");
        assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
        assert_eq!(post_to(&app, "/effects", "key-1", "x").await.status, StatusCode::CREATED, "the retry");
        outside(&pool, "delete from effect; delete from idempotency.record").await;
    }
}

/// `statement_timeout` does not apply to a COMMIT, but a cancel request does, here in a deferred trigger.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "a distributed table has no deferred triggers")]
async fn a_commit_that_is_cancelled_is_a_503(pool: PgPool) {
    create_effects(&pool).await;
    sqlx::raw_sql(
        "create function linger() returns trigger language plpgsql as $$
            begin if new.note = 'slow' then perform pg_sleep(60); end if; return null; end $$;
         create constraint trigger linger after insert on effect deferrable initially deferred
            for each row execute function linger()",
    )
    .execute(&pool)
    .await
    .expect("a trigger");
    let app = app(transactional(&pool).with_optional_key(true));
    for key in [Some("key-1"), None] {
        let first = tokio::spawn({
            let app = app.clone();
            async move { send(&app, request("POST", "/effects", key, "slow")).await }
        });
        until(
            &pool,
            "select count(pg_cancel_backend(pid)) = 1 from pg_stat_activity
             where datname = current_database() and wait_event = 'PgSleep'",
        )
        .await;
        assert_unavailable(&first.await.expect("joined"), "57014");
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    assert_eq!(post_to(&app, "/effects", "key-1", "x").await.status, StatusCode::CREATED, "the key is free");
}

/// 42501: the role may not write the record, until a person grants it the privilege.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_missing_privilege_is_a_500(_: PgPoolOptions, options: PgConnectOptions) {
    let pool = PgPool::connect_with(options.clone()).await.expect("a pool");
    create_effects(&pool).await;
    let backend: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&pool).await.expect("a backend");
    let role = format!("reader_{backend}");
    let create = format!(
        "create role {role} login; grant usage on schema idempotency to {role};
         grant select on idempotency.record to {role}"
    );
    sqlx::raw_sql(AssertSqlSafe(create)).execute(&pool).await.expect("created");
    let as_reader = PgPool::connect_with(options.username(&role)).await.expect("a pool");
    let answer = post_to(&app(transactional(&as_reader)), "/effects", "key-1", "x").await;
    as_reader.close().await;
    let drop = format!("drop owned by {role}; drop role {role}");
    sqlx::raw_sql(AssertSqlSafe(drop)).execute(&pool).await.expect("dropped");
    assert_permanent(&answer);
    assert_eq!(effects(&pool).await, 0);
}

/// 22P05: the key has a character that the database's encoding lacks.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_key_outside_the_databases_encoding_is_a_500(_: PgPoolOptions, options: PgConnectOptions) {
    let pool = PgPool::connect_with(options.clone()).await.expect("a pool");
    let backend: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&pool).await.expect("a backend");
    let database = format!("latin_{backend}");
    let create = format!("create database {database} encoding 'LATIN1' template template0 lc_collate 'C' lc_ctype 'C'");
    sqlx::raw_sql(AssertSqlSafe(create)).execute(&pool).await.expect("created");
    let latin = PgPool::connect_with(options.database(&database)).await.expect("a pool");
    pg_idempotency::migrate(&latin).await.expect("migrated");
    let ran = Arc::new(AtomicU32::new(0));
    let counted = ran.clone();
    let handler = async move |_: IdempotentTx| {
        counted.fetch_add(1, Ordering::SeqCst);
        "done"
    };
    let layer = transactional(&latin).with_key_from(|_, body| Ok(Some(String::from_utf8_lossy(body).into_owned())));
    let app = Router::new().route("/any", post(handler)).layer(layer);
    let strange = post_to(&app, "/any", "unused", "\u{2603}").await;
    let plain = post_to(&app, "/any", "unused", "key-1").await;
    latin.close().await;
    sqlx::raw_sql(AssertSqlSafe(format!("drop database {database}"))).execute(&pool).await.expect("dropped");
    assert_permanent(&strange);
    assert_eq!(plain.status, StatusCode::OK);
    assert_eq!(ran.load(Ordering::SeqCst), 1);
}

/// The error is permanent until an operator migrates, and the handler never runs unprotected.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_missing_table_is_a_500(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool));
    sqlx::raw_sql("alter table idempotency.record rename to hidden").execute(&pool).await.expect("renamed");
    assert_permanent(&post_to(&app, "/effects", "key-1", "x").await);
    assert_eq!(effects(&pool).await, 0);
}

/// Each effect runs this at the COMMIT; on Citus its worker does, which creates it in a statement of its own.
async fn at_commit(pool: &PgPool, statement: &str) {
    let mut conn = pool.acquire().await.expect("a connection");
    for sql in [
        "set citus.enable_unsafe_triggers = on",
        &format!(
            "create function at_commit() returns trigger language plpgsql as $$ begin {statement}; return new; end $$"
        ),
        "create constraint trigger at_commit after insert on effect deferrable initially deferred
         for each row execute function at_commit()",
    ] {
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut *conn).await.expect("made");
    }
}

/// It is unknown whether the COMMIT took effect; a retry with the same key gives the answer.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_connection_that_is_lost_at_commit_is_a_503(pool: PgPool) {
    create_effects(&pool).await;
    at_commit(&pool, "if new.note = 'cut' then perform pg_terminate_backend(pg_backend_pid()); end if").await;
    let app = app(transactional(&pool).with_optional_key(true));
    for key in [Some("key-1"), None] {
        assert_transient(&send(&app, request("POST", "/effects", key, "cut")).await);
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    assert_eq!(post_to(&app, "/effects", "key-1", "x").await.status, StatusCode::CREATED);
}

/// 40001: the transaction lost against a concurrent one, and the next attempt may win.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_serialization_failure_at_commit_is_a_503(pool: PgPool) {
    create_effects(&pool).await;
    at_commit(&pool, "raise exception 'lost' using errcode = '40001'").await;
    let app = app(transactional(&pool).with_optional_key(true));
    for key in [Some("key-1"), None] {
        assert_transient(&send(&app, request("POST", "/effects", key, "x")).await);
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_connection_that_is_lost_under_the_handler_is_a_503(pool: PgPool) {
    create_effects(&pool).await;
    let handler = async |mut tx: IdempotentTx| {
        insert(&mut tx, "cut").await;
        let _ = sqlx::query("select pg_terminate_backend(pg_backend_pid())").execute(&mut *tx).await;
        "done, it believes"
    };
    let app = Router::new().route("/cut", post(handler)).layer(transactional(&pool).with_optional_key(true));
    for key in [Some("key-1"), None] {
        assert_transient(&send(&app, request("POST", "/cut", key, "x")).await);
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

/// 25P03: the handler leaves the transaction idle for too long, and the server ends the session.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_session_that_the_server_has_ended_is_a_503(pool: PgPool) {
    create_effects(&pool).await;
    let gate = Gate::new();
    let gated = gate.clone();
    let handler = async move |mut tx: IdempotentTx| {
        insert(&mut tx, "idle").await;
        // Last: on a busy machine a millisecond passes between two statements, too.
        sqlx::query("set local idle_in_transaction_session_timeout = 1").execute(&mut *tx).await.expect("set");
        gated.pass().await;
        "done, it believes"
    };
    let app = Router::new().route("/idle", post(handler)).layer(transactional(&pool));
    let answer = tokio::spawn(async move { post_to(&app, "/idle", "key-1", "x").await });
    gate.reached().await;
    crate::support::until(
        &pool,
        "select count(*) = 0 from pg_stat_activity where datname = current_database() and state like 'idle in%'",
    )
    .await;
    gate.open();
    assert_transient(&answer.await.expect("joined"));
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

/// The next owner may repeat the effect outside, so the rejection must not ask for a retry.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_leased_response_that_the_database_refuses_is_a_500(pool: PgPool) {
    sqlx::raw_sql("alter table idempotency.record add constraint small check (octet_length(response_body) < 4)")
        .execute(&pool)
        .await
        .expect("altered");
    let policy = Policy::AtLeastOnce { lease: Duration::from_millis(300) };
    let layer = leased(&pool, policy);
    let app = Router::new().route("/sms", post(async || "sent")).layer(layer);
    assert_permanent(&post_to(&app, "/sms", "key-1", "x").await);
}

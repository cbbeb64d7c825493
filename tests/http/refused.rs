//! A leased handler that refuses its request with a 4xx.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use pg_idempotency::lease::{Lease, LeaseOptions, Policy};
use pg_idempotency::operator::{Shown, State, show};
use pg_idempotency::testing::age;
use pg_idempotency::{Error, Key};
use serde_json::Value;
use sqlx::PgPool;

use crate::support::{Answer, leased, post_to};

const LEASE: Duration = Duration::from_secs(60);
const IN_STEPS: Policy = Policy::InSteps { lease: LEASE };

fn key() -> Key {
    Key::new("ada", "POST /rides", "key-1").expect("a key")
}

async fn shown(pool: &PgPool) -> Shown {
    show(pool, &key()).await.expect("a database").expect("a record")
}

/// A handler that does what its body says.
fn app(pool: &PgPool, policy: Policy) -> Router {
    let handler = async |lease: Lease, body: String| -> Response {
        match body.as_str() {
            "panic" => panic!("on purpose"),
            "stepped" => {
                let failed = lease.step_at_least_once("charge", async |_| Err::<u32, Error>(Error::OutlivedRetention));
                failed.await.expect_err("on purpose");
                StatusCode::NOT_FOUND.into_response()
            }
            "ok" => lease.attempt().to_string().into_response(),
            status => StatusCode::from_u16(status.parse().expect("a number")).expect("a status").into_response(),
        }
    };
    Router::new().route("/rides", post(handler)).layer(leased(pool, policy))
}

async fn ask(app: &Router, body: &str) -> Answer {
    post_to(app, "/rides", "key-1", body).await
}

/// The client corrects its typing error under the same key, as often as it needs.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn in_steps_a_refusal_before_the_first_step_frees_the_key(pool: PgPool) -> anyhow::Result<()> {
    let app = app(&pool, IN_STEPS);
    for status in ["404", "422", "409"] {
        assert_eq!(ask(&app, status).await.status.as_str(), status);
        let shown = shown(&pool).await;
        assert_eq!((shown.state, shown.attempt), (State::Released, 0));
        assert!(shown.last_error.is_some_and(|error| error.contains(status)));
    }
    let performed = ask(&app, "ok").await;
    assert_eq!((performed.status, &*performed.body), (StatusCode::OK, &b"1"[..]), "the first attempt");
    assert_eq!(ask(&app, "404").await.problem(), "key-reused", "it is done");
    Ok(())
}

/// After a step, or an attempt that ended in another way, an effect of the first body may have happened.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn in_steps_any_other_end_keeps_the_body(pool: PgPool) -> anyhow::Result<()> {
    let app = app(&pool, IN_STEPS);
    for body in ["503", "panic", "stepped"] {
        // A panic goes on.
        let asking = app.clone();
        let _ = tokio::spawn(async move { ask(&asking, body).await }).await;
        assert_eq!(shown(&pool).await.attempt, 1, "{body}");
        assert_eq!(ask(&app, "404").await.problem(), "key-reused", "{body}");
        sqlx::raw_sql("truncate idempotency.record").execute(&pool).await?;
    }
    // A second attempt that is refused does not show what the first one did.
    let answers = Arc::new(Mutex::new(vec![StatusCode::NOT_FOUND, StatusCode::BAD_GATEWAY]));
    let handler = async move |_: Lease, _: Bytes| answers.lock().expect("not poisoned").pop().expect("two answers");
    let app = Router::new().route("/rides", post(handler)).layer(leased(&pool, IN_STEPS));
    assert_eq!(ask(&app, "body").await.status, StatusCode::BAD_GATEWAY);
    assert_eq!(ask(&app, "body").await.status, StatusCode::NOT_FOUND);
    assert_eq!(shown(&pool).await.attempt, 2);
    assert_eq!(ask(&app, "another body").await.problem(), "key-reused");
    Ok(())
}

/// A task with a clone of the lease has asked for a step while the handler answered.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn in_steps_a_task_with_a_step_keeps_the_body(pool: PgPool) -> anyhow::Result<()> {
    let handler = async |lease: Lease, _: Bytes| {
        let (reached, waits) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            let charge = lease.step_at_least_once("charge", async |_| {
                let _ = reached.send(());
                std::future::pending::<Result<u32, Error>>().await
            });
            let _ = charge.await;
        });
        waits.await.expect("it charges");
        StatusCode::UNPROCESSABLE_ENTITY
    };
    let app = Router::new().route("/rides", post(handler)).layer(leased(&pool, IN_STEPS));
    assert_eq!(ask(&app, "body").await.status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!((shown(&pool).await.state, shown(&pool).await.attempt), (State::Released, 1));
    assert_eq!(ask(&app, "another body").await.problem(), "key-reused");
    Ok(())
}

/// The worker of an earlier attempt has stored the request. A client was told 404. Then the account appears, and the
/// resumer runs.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn what_a_client_was_told_is_refused_is_never_resumed(pool: PgPool) -> anyhow::Result<()> {
    for policy in [IN_STEPS, Policy::AtLeastOnce { lease: LEASE }] {
        let leasing = LeaseOptions::new(policy).max_attempts(std::num::NonZeroU32::new(9).expect("nine"));
        let leasing = leasing.resume_after(Duration::ZERO);
        for (status, resumed) in [(404, false), (422, false), (409, true), (425, true), (429, true)] {
            sqlx::raw_sql("truncate idempotency.record").execute(&pool).await?;
            let status = StatusCode::from_u16(status)?;
            let answers = Arc::new(Mutex::new(vec![status, StatusCode::BAD_GATEWAY]));
            let handler = async move |_: Lease, _: Bytes| answers.lock().expect("not poisoned").pop().expect("two");
            let app = Router::new().route("/rides", post(handler)).layer(leased(&pool, policy));
            assert_eq!(ask(&app, "body").await.status, StatusCode::BAD_GATEWAY);
            sqlx::query("update idempotency.record set request = '1'").execute(&pool).await?;
            assert_eq!(ask(&app, "body").await.status, status);
            let charges = AtomicU32::new(0);
            assert_eq!(shown(&pool).await.resumable, resumed, "{policy:?} {status}");
            age(&pool, &key(), Duration::from_secs(3600)).await?;
            let work = async |_: &Lease, _: Value| -> Result<u32, Error> { Ok(charges.fetch_add(1, Ordering::SeqCst)) };
            let done = leasing.resume_one(&pool, "POST /rides", work).await?.is_some();
            assert_eq!((done, charges.load(Ordering::SeqCst)), (resumed, u32::from(resumed)), "{policy:?} {status}");
        }
    }
    Ok(())
}

/// A transaction has locked the record, so the refusal cannot be stored. A client that was told of it would not come
/// back, and a resumer could carry the request out.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_refusal_that_cannot_be_stored_is_no_answer(pool: PgPool) -> anyhow::Result<()> {
    let lease = Duration::from_millis(500);
    for policy in [Policy::InSteps { lease }, Policy::AtLeastOnce { lease }] {
        sqlx::raw_sql("truncate idempotency.record").execute(&pool).await?;
        let (locking, locked) = (pool.clone(), Arc::new(Mutex::new(None)));
        let holder = locked.clone();
        let handler = async move |_: Lease, _: Bytes| {
            let mut tx = locking.begin().await.expect("a connection");
            sqlx::query("update idempotency.record set trace = trace").execute(&mut *tx).await.expect("a lock");
            *holder.lock().expect("not poisoned") = Some(tx);
            StatusCode::UNPROCESSABLE_ENTITY
        };
        let app = Router::new().route("/rides", post(handler)).layer(leased(&pool, policy));
        let answer = ask(&app, "body").await;
        assert_eq!(
            (answer.status, answer.problem()),
            (StatusCode::SERVICE_UNAVAILABLE, "unavailable".to_owned()),
            "{policy:?}"
        );
        drop(locked.lock().expect("not poisoned").take());
    }
    Ok(())
}

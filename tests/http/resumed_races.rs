//! Clients that come back while a resumer decides, and layers that meet a lease: no caller gets a second claim or a
//! wrong answer.

use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::http::StatusCode;
use axum::routing::post;
use axum::{Extension, Router};
use pg_idempotency::http::{Decision, IdempotencyLayer, RequestResumer, ResumedRequest};
use pg_idempotency::lease::{Lease, LeaseOptions};
use pg_idempotency::{Error, Key, Misuse, operator};
use rig::cases::each;
use rig::gate::Gate;
use rig::lease::IN_STEPS;
use sqlx::{Executor as _, PgPool};
use tokio::sync::oneshot;

use crate::resumed::{Account, OPERATION, Service, key, options, permit, signed};
use crate::support::{send, spawned_post, user};

/// Between the search and the claim, the client comes back, or the record is another operation's.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_changes_during_the_decision_is_not_taken(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    service.abandoned(&pool, "key-1", "/payments/ada").await;
    let changes = [
        (Decision::Resume, "set request = set_byte(request, 10, 7)"),
        (Decision::Resume, "set attempt = attempt + 1"),
        (Decision::Resume, "set lease_until = now() + interval '1 h'"),
        (Decision::Refuse("no".to_owned()), "set lease_until = now() + interval '1 h'"),
        (Decision::Refuse("no".to_owned()), "set token = token + 1"),
    ];
    pool.execute("create table before as select * from idempotency.record").await?;
    for (decision, change) in changes {
        let decide = async |_: &Key, _: &mut axum::http::Request<Bytes>| -> Result<Decision, sqlx::Error> {
            sqlx::query(sqlx::AssertSqlSafe(format!("update idempotency.record {change}"))).execute(&pool).await?;
            Ok(decision)
        };
        let resumed = service.layer.resume_one(OPERATION, decide.clone(), service.routes()).await?;
        assert_eq!(resumed, None, "{change}");
        let kept = "select request is not null and completed_at is null from idempotency.record";
        assert!(sqlx::query_scalar::<_, bool>(kept).fetch_one(&pool).await?, "{change}");
        let restore = "truncate idempotency.record; insert into idempotency.record select * from before";
        pool.execute(restore).await?;
    }
    assert_eq!(service.charges().len(), 1);
    assert!(matches!(service.resume().await, Some(ResumedRequest::Answered(..))), "undisturbed");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_lease_that_is_over_does_not_replace_the_claim(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    service.abandoned(&pool, "key-1", "/payments/ada").await;
    let routes = service.restarted(&pool).routes();
    let (kept, given) = oneshot::channel();
    let kept = Arc::new(Mutex::new(Some(kept)));
    let keep = async move |lease: Lease| {
        drop(kept.lock().expect("not poisoned").take().expect("once").send(lease));
        (StatusCode::CREATED, "kept")
    };
    let keeping = Router::new().route("/payments/{of}", post(keep)).route_layer(service.layer.clone());
    assert!(matches!(service.layer.resume_one(OPERATION, permit, keeping).await?, Some(ResumedRequest::Answered(..))));
    let lease = given.await?;
    assert!(lease.is_lost());
    let app = routes.layer(Extension(lease)).layer(Extension(Account("ada".to_owned())));
    let retry = send(&app, signed("key-1", "/payments/ada")).await;
    assert_eq!((retry.is_replayed(), &*retry.body), (true, &b"kept"[..]));
    Ok(())
}

/// The service gives *in flight* the status 202, for clients that poll. It is no answer of the key.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_rejection_of_a_layer_is_not_stored_as_the_answer(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    service.abandoned(&pool, "key-1", "/payments/ada").await;
    let gate = Gate::new();
    let gated = gate.clone();
    let accepts = |_: &pg_idempotency::http::Rejection| {
        let mut response = axum::http::Response::new(Bytes::from_static(b"wait"));
        *response.status_mut() = StatusCode::ACCEPTED;
        response
    };
    let other = IdempotencyLayer::leased(pool.clone(), options(), user)
        .operation(|_| Some("another".into()))
        .on_rejection(accepts);
    let routes = Router::new().route("/payments/{of}", post(async move || gated.pass().await)).layer(other);
    let first = spawned_post(&routes, "/payments/ada", "key-1", "another body");
    gate.reached().await;
    let resumed = service.layer.resume_one(OPERATION, permit, routes).await?;
    assert_eq!(resumed, Some(ResumedRequest::Failed(key("key-1"))));
    let shown = operator::show(&pool, &key("key-1")).await?.expect("a record");
    assert!(shown.resumable && shown.completed_at.is_none());
    gate.open();
    assert_eq!(first.await?.status, StatusCode::OK);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_layer_that_stores_no_requests_has_no_resumer(pool: PgPool) {
    let leased = |options| IdempotencyLayer::leased(pool.clone(), options, user);
    let unlimited = LeaseOptions::new(IN_STEPS).store_request(true);
    let cases = [
        (crate::support::transactional(&pool), "store_request"),
        (leased(options().store_request(false)), "store_request"),
        (leased(unlimited), "max_attempts"),
    ];
    each(cases, async |(layer, expected)| {
        let refused = RequestResumer::new(&layer, OPERATION).expect_err("refused");
        assert!(
            matches!(&refused, Error::Misuse(Misuse::Options { problem, .. }) if problem.contains(expected)),
            "{refused:?}"
        );
        Ok(())
    })
    .await;
}

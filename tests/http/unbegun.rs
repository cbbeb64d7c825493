//! A leased layer whose claim is committed, and hears nothing of that: the handler has not begun, so a retry is performed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use pg_idempotency::lease::{Lease, Policy};
use rig::database::until_blocked;
use rig::proxy::Proxy;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, PgConnection, PgPool};

use crate::support::{leased, post_to, until};

const LEASE: Duration = Duration::from_secs(60);

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "Citus takes no trigger")]
async fn after_a_claim_without_an_answer_a_retry_is_performed(pool: PgPool) -> anyhow::Result<()> {
    let server: &PgConnectOptions = &pool.connect_options();
    // The COMMIT of a claim waits for the test.
    sqlx::raw_sql(
        "create function held() returns trigger language plpgsql as
         $$ begin perform pg_advisory_xact_lock_shared(4711); return null; end $$;
         create constraint trigger held after insert or update on idempotency.record
         deferrable initially deferred for each row execute function held()",
    )
    .execute(&pool)
    .await?;
    let mut gate = PgConnection::connect_with(server).await?;
    for policy in
        [Policy::AtMostOnce { lease: LEASE }, Policy::AtLeastOnce { lease: LEASE }, Policy::InSteps { lease: LEASE }]
    {
        sqlx::raw_sql("truncate idempotency.record; select pg_advisory_lock(4711)").execute(&mut gate).await?;
        let proxy = Proxy::before(server).await?;
        let service = PgPoolOptions::new().max_connections(2).connect_with(proxy.options.clone()).await?;
        let sent = Arc::new(AtomicU32::new(0));
        let counted = sent.clone();
        let handler = async move |lease: Lease| {
            counted.fetch_add(1, Ordering::SeqCst);
            lease.attempt().to_string()
        };
        let app = Router::new().route("/send", post(handler)).layer(leased(&service, policy));
        let first = tokio::spawn({
            let app = app.clone();
            async move { post_to(&app, "/send", "key-1", "x").await }
        });
        until_blocked(&pool, 1).await?;
        proxy.cut_connections();
        let first = first.await?;
        assert_eq!((first.status, &*first.problem()), (StatusCode::SERVICE_UNAVAILABLE, "unavailable"), "{policy:?}");
        sqlx::query("select pg_advisory_unlock(4711)").execute(&mut gate).await?;
        until(&pool, "select exists (select from idempotency.record where attempt = 0)").await;
        let retry = post_to(&app, "/send", "key-1", "x").await;
        assert_eq!((retry.status, &*retry.body), (StatusCode::OK, &b"1"[..]), "{policy:?}");
        assert_eq!(sent.load(Ordering::SeqCst), 1, "{policy:?}");
    }
    Ok(())
}

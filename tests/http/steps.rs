//! Handlers whose tasks outlive the response: a lease that has ended begins no step. The demo `rides` kills and drops
//! handlers in the middle of each step, and checks the books.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use pg_idempotency::Error;
use pg_idempotency::http::Rejection;
use pg_idempotency::lease::Lease;
use rig::gate::Gate;
use rig::lease::IN_STEPS;
use sqlx::{PgConnection, PgPool};
use tokio::sync::oneshot;

use crate::support::{Answer, create_effects, effects, leased, post_to, recorded};

async fn insert(conn: &mut PgConnection, note: &str) -> Result<i64, Error> {
    Ok(sqlx::query_scalar("insert into effect (note) values ($1) returning id").bind(note).fetch_one(conn).await?)
}

fn layered(pool: &PgPool, routes: Router) -> Router {
    routes.layer(leased(pool, IN_STEPS))
}

async fn ask(app: &Router) -> Answer {
    post_to(app, "/rides", "key-1", "x").await
}

/// The step in doubt is the text.
async fn assert_indeterminate(pool: &PgPool, app: &Router) {
    let answer = ask(app).await;
    assert_eq!((answer.status, &*answer.problem()), (StatusCode::CONFLICT, "indeterminate"));
    let Some(Rejection::Indeterminate { token, steps, .. }) = answer.rejection else { panic!("{answer:?}") };
    assert_eq!(steps, ["text"]);
    let found = pg_idempotency::operator::unsettled(pool, 10, None, None).await;
    let [found] = &found.expect("a list")[..] else { panic!("one record") };
    let in_doubt: Vec<_> = found.steps.iter().filter(|step| step.in_doubt).map(|step| step.name.clone()).collect();
    assert_eq!((found.token, in_doubt), (token, steps));
}

/// The next attempt may be at work when such a task wakes.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_task_that_outlives_the_response_performs_no_step(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for status in [StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE] {
        let gate = Gate::new();
        let (sender, late) = oneshot::channel();
        let (gated, sender) = (gate.clone(), Arc::new(Mutex::new(Some(sender))));
        let handler = async move |lease: Lease| {
            let task = async move {
                gated.pass().await;
                let performed = AtomicU32::new(0);
                let perform = || -> Result<u32, Error> { Ok(performed.fetch_add(1, Ordering::SeqCst)) };
                let results = [
                    lease.step("ride", async |conn| insert(conn, "late").await.map(|_| 0)).await,
                    lease.step_at_least_once("charge", async |_| perform()).await,
                    lease.step_at_most_once("text", async |_| perform()).await,
                ];
                (results, lease.is_lost(), performed.into_inner())
            };
            let sender = sender.lock().expect("not poisoned").take().expect("once");
            tokio::spawn(async move { drop(sender.send(task.await)) });
            status
        };
        let app = layered(&pool, Router::new().route("/rides", post(handler)));
        assert_eq!(ask(&app).await.status, status);
        gate.open();
        let (results, is_lost, performed) = late.await?;
        assert!(results.iter().all(|result| matches!(result, Err(Error::LeaseLost))), "{status}: {results:?}");
        assert_eq!((is_lost, performed, effects(&pool).await), (true, 0, 0), "{status}");
        sqlx::raw_sql("truncate idempotency.record").execute(&pool).await?;
    }
    Ok(())
}

/// What it wrote may be committed. Neither a retry nor the handler itself performs it again.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_that_commits_has_one_effect_and_waits_for_a_person(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let handler = async |lease: Lease| -> StatusCode {
        for _ in ["first", "again"] {
            let text = lease.step("text", async |conn| {
                let id = insert(&mut *conn, "committed").await?;
                sqlx::raw_sql("commit; begin").execute(conn).await?;
                Ok::<_, Error>(id)
            });
            assert!(text.await.is_err());
        }
        StatusCode::INTERNAL_SERVER_ERROR
    };
    let app = layered(&pool, Router::new().route("/rides", post(handler)));
    assert_eq!(ask(&app).await.status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_indeterminate(&pool, &app).await;
    assert_eq!(effects(&pool).await, 1);
    Ok(())
}

/// It may have taken effect, although the handler has answered.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_task_in_the_middle_of_a_text_leaves_it_in_doubt(pool: PgPool) -> anyhow::Result<()> {
    let gate = Gate::new();
    let (sender, ended) = oneshot::channel();
    let (gated, sender) = (gate.clone(), Arc::new(Mutex::new(Some(sender))));
    let handler = async move |lease: Lease| {
        let sender = sender.lock().expect("not poisoned").take().expect("once");
        let in_text = gated.clone();
        tokio::spawn(async move {
            let text = lease.step_at_most_once("text", async |_| {
                in_text.pass().await;
                Ok::<_, Error>(1)
            });
            drop(sender.send(text.await));
        });
        gated.reached().await;
        StatusCode::SERVICE_UNAVAILABLE
    };
    let app = layered(&pool, Router::new().route("/rides", post(handler)));
    assert_eq!(ask(&app).await.status, StatusCode::SERVICE_UNAVAILABLE);
    assert!(matches!(ended.await?, Err(Error::LeaseLost)), "it was stopped");
    assert_indeterminate(&pool, &app).await;
    assert!(recorded::<bool>(&pool, "lease_until > '-infinity'").await, "remembered for the whole retention");
    Ok(())
}

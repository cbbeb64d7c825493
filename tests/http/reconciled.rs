//! A request at most once whose process died, and whose answer a reconciler finds out.

use std::time::Duration;

use axum::Router;
use axum::http::{Response, StatusCode, header};
use axum::routing::post;
use pg_idempotency::http::IdempotencyLayer;
use pg_idempotency::lease::{Finding, InDoubt, Reconciler, Visit};
use pg_idempotency::{Error, operator};
use rig::lease::AT_MOST_ONCE;
use sqlx::{Executor as _, PgPool};

use crate::support::{leased, leasing, post_to, user};

const OPERATION: &str = "POST /texts";

fn storing(pool: &PgPool) -> IdempotencyLayer {
    IdempotencyLayer::leased(pool.clone(), leasing(AT_MOST_ONCE).store_request(true), user)
}

/// A handler whose gateway breaks the connection, and a client that gets the first answer.
async fn in_doubt(pool: &PgPool, status: StatusCode) -> Router {
    let app = Router::new().route("/texts", post(async move || status)).layer(storing(pool));
    assert_eq!(post_to(&app, "/texts", "key-1", "x").await.status, status);
    app
}

async fn reconciled(pool: &PgPool, finding: Finding) -> Visit {
    let options = leasing(AT_MOST_ONCE).store_request(true);
    let reconciler = Reconciler::new(options, OPERATION, Duration::from_millis(1)).expect("options");
    let nobody = async |_: &InDoubt| -> Result<Finding, Error> { panic!("too early") };
    assert_eq!(reconciler.visit_one(pool, nobody).await.expect("a visit"), Visit::Noted);
    let due = "update idempotency.record set probes = jsonb_set(probes, '{of,0,next}', '1')";
    pool.execute(due).await.expect("moved time");
    let look_up = async |asked: &InDoubt| {
        let request = asked.http_request().expect("the request of a layer");
        assert_eq!((request.method().as_str(), request.uri().path()), ("POST", "/texts"));
        assert_eq!(&request.body()[..], b"x");
        assert!(asked.request::<String>().is_err(), "it is no JSON");
        Ok::<_, Error>(finding)
    };
    reconciler.visit_one(pool, look_up).await.expect("a visit")
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_retry_gets_the_status_the_headers_and_the_body_that_a_probe_has_found(pool: PgPool) -> anyhow::Result<()> {
    let app = in_doubt(&pool, StatusCode::BAD_GATEWAY).await;
    let found = Response::builder()
        .status(StatusCode::CREATED)
        .header(header::LOCATION, "/texts/7")
        .header(header::SET_COOKIE, "session=1")
        .body("sent \u{0}".as_bytes())?;
    assert_eq!(reconciled(&pool, leased(&pool, AT_MOST_ONCE).took_effect(found)?).await, Visit::Resolved);
    let retry = post_to(&app, "/texts", "key-1", "x").await;
    assert_eq!((retry.status, retry.is_replayed(), &*retry.body), (StatusCode::CREATED, true, &b"sent \0"[..]));
    assert_eq!(retry.headers[header::LOCATION], "/texts/7");
    assert!(!retry.headers.contains_key(header::SET_COOKIE));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_response_that_no_retry_would_get_is_refused(pool: PgPool) {
    let layer = leased(&pool, AT_MOST_ONCE).response_limit(4);
    assert!(layer.took_effect(Response::new("four")).is_ok());
    let informational = Response::builder().status(StatusCode::CONTINUE).body("").expect("a response");
    for refused in [layer.took_effect(Response::new("fiver")), layer.took_effect(informational)] {
        assert!(matches!(refused, Err(Error::Unencodable { .. })), "{refused:?}");
    }
}

/// No resumer may repeat a request that was refused for good. At most once none does, and a reconciler needs the
/// request.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_refused_request_at_most_once_stays_stored_for_the_reconciler(pool: PgPool) -> anyhow::Result<()> {
    let _ = in_doubt(&pool, StatusCode::UNPROCESSABLE_ENTITY).await;
    let key = pg_idempotency::Key::new("ada", OPERATION, "key-1")?;
    assert_eq!(operator::show(&pool, &key).await?.expect("a record").state, operator::State::Indeterminate);
    assert_eq!(reconciled(&pool, Finding::NoTrace).await, Visit::Undecided);
    Ok(())
}

//! What makes a key new, and what does not: the name of the operation.

use axum::Router;
use axum::http::StatusCode;
use axum::routing::post;
use pg_idempotency::http::{Decision, IdempotentTx, RequestResumer, ResumedRequest};
use pg_idempotency::lease::{LeaseOptions, Reconciler};
use pg_idempotency::operator::State;
use pg_idempotency::testing::age;
use pg_idempotency::{Error, Misuse, operator};
use rig::lease::AT_MOST_ONCE;
use sqlx::PgPool;

use crate::resumed::{MINUTE, OPERATION, Service, key, permit, signed};
use crate::support::{create_effects, effects, insert, post_to, recorded, records, send, transactional};

/// No client can see the name, so every retry of theirs is one of the same operation.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_parameter_that_gets_another_name_makes_no_key_new(pool: PgPool) {
    create_effects(&pool).await;
    let pay = async |mut tx: IdempotentTx, body: String| insert(&mut tx, &body).await.to_string();
    let deployed = |route: &str| Router::new().route(route, post(pay)).route_layer(transactional(&pool));
    for (route, replayed) in [("/a/{id}/pay", false), ("/a/{account_id}/pay", true), ("/a/{*rest}", false)] {
        let answer = post_to(&deployed(route), "/a/42/pay", "key-1", "x").await;
        assert_eq!((answer.status, answer.is_replayed()), (StatusCode::OK, replayed), "{route}");
    }
    assert_eq!(effects(&pool).await, 2, "the setter says that `{{*rest}}` is another operation");
}

/// It would search for ever, and find nothing.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_resumer_refuses_an_operation_that_no_request_can_have(pool: PgPool) -> anyhow::Result<()> {
    let layer = Service::new(&pool).layer;
    for named in ["POST /payments/{of}", "POST /{*rest}", "POST /a/{b}/{}"] {
        let refused = RequestResumer::new(&layer, named).err();
        assert!(
            matches!(refused, Some(Error::Misuse(Misuse::Options { problem, .. })) if problem.contains("{}")),
            "{named}"
        );
        let routes = Service::new(&pool).routes();
        let refused = layer.resume_one(named, permit, routes).await.err();
        assert!(matches!(refused, Some(Error::Misuse(Misuse::Options { .. }))), "{named}");
        let own = layer.clone().operation(move |_| Some(named.to_owned()));
        RequestResumer::new(&own, named)?;
        // It knows no layer.
        let asking = LeaseOptions::new(AT_MOST_ONCE).store_request(true);
        Reconciler::new(asking, named, MINUTE)?;
    }
    for impossible in [String::new(), "POST /a\0".to_owned(), "x".repeat(256)] {
        let refused = RequestResumer::new(&layer, &impossible).err();
        assert!(matches!(refused, Some(Error::Misuse(Misuse::Options { .. }))), "{impossible:?}: {refused:?}");
    }
    for operation in [OPERATION, "POST /{*}", "POST /{{id}}", "pay"] {
        RequestResumer::new(&layer, operation)?;
    }
    Ok(())
}

/// A deploy has changed the operation while the request was open.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_resumed_request_that_meets_another_key_costs_its_attempts(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    service.abandoned(&pool, "key-1", "/payments/ada").await;
    let (moved, key) = (service.moved(&pool, "pay"), key("key-1"));
    // Two attempts are permitted.
    assert_eq!(moved.resume().await, Some(ResumedRequest::Failed(key.clone())));
    let shown = operator::show(&pool, &key).await?.expect("a record");
    assert_eq!((shown.state, shown.attempt), (State::Released, 2));
    let error = shown.last_error.as_deref().expect("a reason");
    assert!(error.contains("\"pay\"") && error.contains(&format!("{OPERATION:?}")), "{error}");
    age(&pool, &key, MINUTE * 60).await?;
    assert_eq!(moved.resume().await, None, "the attempts are used up");
    let retry = send(&service.restarted(&pool).authenticated(), signed("key-1", "/payments/ada")).await;
    assert_eq!((&*retry.problem(), service.charges().len()), ("exhausted", 1), "nothing was performed");
    shown.grant(&pool, "the operation is back").await?;
    let resumed = service.restarted(&pool).resume().await;
    assert_eq!(resumed, Some(ResumedRequest::Answered(key, StatusCode::CREATED)));
    let charges = service.charges();
    let [(_, first, _), (_, second, _)] = &charges[..] else { panic!("{charges:?}") };
    assert_eq!(first, second, "one operation, for a gateway that knows the key");
    Ok(())
}

/// A middleware may make another response of the layer's. A success would become the answer of work that never ran, and
/// a 404 would refuse the request for ever.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn no_answer_of_the_service_hides_that_the_request_met_another_key(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    let moved = service.moved(&pool, "pay");
    for status in [StatusCode::OK, StatusCode::NOT_FOUND, StatusCode::SERVICE_UNAVAILABLE] {
        let key = key(status.as_str());
        service.abandoned(&pool, status.as_str(), "/payments/ada").await;
        let routes = moved
            .routes()
            .layer(axum::middleware::map_response(move |_: axum::response::Response| async move { status }));
        let resumed = moved.layer.resume_one(OPERATION, permit, routes).await?;
        assert_eq!(resumed, Some(ResumedRequest::Failed(key.clone())), "{status}");
        let shown = operator::show(&pool, &key).await?.expect("a record");
        assert_eq!((shown.state, shown.attempt), (State::Released, 2), "{status}");
        assert!(shown.request.is_some() && shown.last_error.is_some_and(|error| error.contains("\"pay\"")), "{status}");
    }
    assert_eq!(service.charges().len(), 3, "nothing was performed");
    Ok(())
}

/// The function that decides has put another identity into the request.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_resumed_request_of_another_identity_is_not_performed(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    service.abandoned(&pool, "key-1", "/payments/ada").await;
    let another = async |_: &_, request: &mut axum::http::Request<_>| -> Result<Decision, Error> {
        request.extensions_mut().insert(crate::resumed::Account("somebody else".to_owned()));
        Ok(Decision::Resume)
    };
    let failed = service.layer.resume_one(OPERATION, another, service.routes()).await?;
    assert_eq!(failed, Some(ResumedRequest::Failed(key("key-1"))));
    assert_eq!((service.charges().len(), records(&pool).await), (1, 1), "no charge under another downstream key");
    // The scopes are in no error of the record.
    let error: String = recorded(&pool, "last_error").await;
    assert!(error.contains("identity") && !error.contains("somebody") && !error.contains("ada"), "{error}");
    Ok(())
}

/// The client has changed the path, which stays in the fingerprint.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_retry_at_another_path_is_no_replay_also_with_one_operation(pool: PgPool) {
    create_effects(&pool).await;
    let order = async |mut tx: IdempotentTx, body: String| insert(&mut tx, &body).await.to_string();
    let layer = transactional(&pool).operation(|_| Some("POST /orders".to_owned()));
    let app = Router::new().route("/v1/orders", post(order)).route("/v2/orders", post(order)).route_layer(layer);
    let answer = post_to(&app, "/v1/orders", "key-1", "x").await;
    assert_eq!((answer.status, answer.is_replayed()), (StatusCode::OK, false));
    let answer = post_to(&app, "/v2/orders", "key-1", "x").await;
    assert_eq!((answer.status, &*answer.problem()), (StatusCode::UNPROCESSABLE_ENTITY, "key-reused"));
    assert!(post_to(&app, "/v1/orders", "key-1", "x").await.is_replayed());
    assert_eq!(effects(&pool).await, 1);
}

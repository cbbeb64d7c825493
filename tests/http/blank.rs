//! Keys with nothing to see, and keys that are too short. Clients send them by mistake, and different operations would
//! then be one.

use axum::http::StatusCode;
use pg_idempotency::Key;
use pg_idempotency::http::ResumedRequest;
use sqlx::PgPool;

use crate::resumed::{OPERATION, Service};
use crate::support::{app, create_effects, effects, post_to, records, request, send, transactional};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_key_that_nobody_can_see_is_malformed(pool: PgPool) {
    create_effects(&pool).await;
    let from_header = app(transactional(&pool));
    for key in ["\" \"", "\"   \""] {
        assert_eq!(post_to(&from_header, "/effects", key, "x").await.problem(), "malformed-key", "{key:?}");
    }
    let from_body = app(transactional(&pool).key_from(|_, body| Ok(Some(String::from_utf8_lossy(body).into_owned()))));
    for body in [" ", "\u{a0}", "\u{200b}\u{feff}"] {
        let refused = send(&from_body, request("POST", "/effects", None, body)).await;
        assert_eq!((refused.status, &*refused.problem()), (StatusCode::BAD_REQUEST, "malformed-key"), "{body:?}");
    }
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
}

/// An unreleased build has let it in.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_with_such_a_key_that_is_recorded_is_resumed(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    service.abandoned(&pool, "key-1", "/payments/ada").await;
    let stored = "update idempotency.record
        set value = ' ', request = decode(replace(encode(request, 'hex'), encode($1, 'hex'), encode($2, 'hex')), 'hex')";
    // Two texts of the same length, because the head of a stored request has its length in front.
    sqlx::query(stored).bind(&b"key-1"[..]).bind(&br#"\" \""#[..]).execute(&pool).await?;
    let resumed = service.resume().await;
    assert_eq!(resumed, Some(ResumedRequest::Answered(Key::recorded("ada", OPERATION, " ")?, StatusCode::CREATED)));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_key_that_is_shorter_than_the_service_takes_is_malformed(pool: PgPool) {
    create_effects(&pool).await;
    let layer = transactional(&pool).shortest_key(8);
    let from_header = app(layer.clone());
    for (key, problem) in [("1234567", "malformed-key"), ("\"1234567\"", "malformed-key"), ("12345678", "")] {
        let answer = post_to(&from_header, "/effects", key, "x").await;
        if problem.is_empty() {
            assert_eq!(answer.status, StatusCode::CREATED, "{key}");
        } else {
            assert_eq!((answer.status, &*answer.problem()), (StatusCode::BAD_REQUEST, problem), "{key}");
        }
    }
    // Characters count, and not bytes.
    let from_body = app(layer.key_from(|_, body| Ok(Some(String::from_utf8_lossy(body).into_owned()))));
    let refused = send(&from_body, request("POST", "/effects", None, "\u{e4}\u{e4}\u{e4}\u{e4}")).await;
    assert_eq!(refused.problem(), "malformed-key");
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_stored_request_is_resumed_under_a_key_that_has_become_too_short(pool: PgPool) -> anyhow::Result<()> {
    let mut service = Service::new(&pool);
    service.abandoned(&pool, "key-1", "/payments/ada").await;
    service.layer = service.layer.shortest_key(8);
    let resumed = service.resume().await;
    assert_eq!(resumed, Some(ResumedRequest::Answered(Key::new("ada", OPERATION, "key-1")?, StatusCode::CREATED)));
    Ok(())
}

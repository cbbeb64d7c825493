//! Keys with nothing to see. A client that lost its key sends one, and all its operations would be one.

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

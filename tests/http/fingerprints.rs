//! Fingerprints by the service's choice, and records that were made under another choice.

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Request, StatusCode, header};
use pg_idempotency::http::IdempotencyLayer;
use rig::cases::each;
use sqlx::PgPool;

use crate::support::{app, create_effects, effects, post_to, recorded, request, send, transactional};

const ACCOUNT: HeaderName = HeaderName::from_static("x-account");

fn without(pool: &PgPool, pointers: &[&str]) -> IdempotencyLayer {
    transactional(pool).canonical_json(pointers.iter().copied())
}

/// A handler may select the account by a header. Without that header in the fingerprint, one account would get the
/// response of the other.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn fingerprinted_headers_and_several_lines_of_one_are_kept_apart(pool: PgPool) {
    create_effects(&pool).await;
    let [a, b] = ["x-a", "x-b"].map(HeaderName::from_static);
    let layer = transactional(&pool).fingerprint_header(a.clone()).fingerprint_header(b.clone());
    let app = app(layer);
    let with = |lines: &[(&HeaderName, &str)]| {
        let mut request = request("POST", "/effects", Some("key-1"), "x");
        for (name, value) in lines {
            request.headers_mut().append(*name, value.parse().expect("a value"));
        }
        request
    };
    assert_eq!(send(&app, with(&[(&a, "1"), (&b, "2")])).await.status, StatusCode::CREATED);
    assert!(send(&app, with(&[(&b, "2"), (&a, "1")])).await.is_replayed(), "their order on the wire does not count");
    for other in [
        &[(&a, "2"), (&b, "1")][..],
        &[(&a, ""), (&b, "2")],
        &[(&b, "2")],
        &[(&a, "1"), (&a, "2")],
        &[(&a, "12")],
        &[(&b, "1"), (&b, "2")],
        &[],
    ] {
        assert_eq!(send(&app, with(other)).await.problem(), "key-reused", "{other:?}");
    }
}

/// A client that builds a form anew draws another boundary, and one that compresses anew may write another time.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_form_or_a_compressed_body_that_is_built_anew_is_another_request(pool: PgPool) {
    create_effects(&pool).await;
    let plain = app(transactional(&pool));
    let form = |boundary: &str| {
        format!("--{boundary}\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n7\r\n--{boundary}--")
    };
    assert_eq!(post_to(&plain, "/effects", "form", &form("one")).await.status, StatusCode::CREATED);
    assert!(post_to(&plain, "/effects", "form", &form("one")).await.is_replayed());
    assert_eq!(post_to(&plain, "/effects", "form", &form("two")).await.problem(), "key-reused");
    // "12 EUR", by two clocks.
    let compressed = |key: &str, seconds: u8| {
        let mut body =
            b"\x1f\x8b\x08\0\0\0\0\0\x02\x03\x33\x34\x52\x70\x0d\x0d\x02\0\x91\xe7\xcf\x31\x06\0\0\0".to_vec();
        body[4] = seconds;
        let request = Request::post("/echo").header("idempotency-key", key).header("content-encoding", "gzip");
        request.body(Body::from(body)).expect("a request")
    };
    assert_eq!(send(&plain, compressed("gzip", 1)).await.status, StatusCode::OK);
    assert_eq!(send(&plain, compressed("gzip", 2)).await.problem(), "key-reused");
    let decompressing = plain.layer(tower_http::decompression::RequestDecompressionLayer::new());
    for (seconds, replayed) in [(1, false), (2, true)] {
        let answer = send(&decompressing, compressed("unpacked", seconds)).await;
        assert_eq!((answer.is_replayed(), &*answer.body), (replayed, &b"12 EUR"[..]));
    }
}

/// HTTP/2 sends the host as a part of the URI. A handler may select the tenant by it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_fingerprinted_host_is_the_authority_of_http_2(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(transactional(&pool).fingerprint_header(header::HOST));
    let asked = |authority: &str| request("POST", &format!("http://{authority}/effects"), Some("key-1"), "x");
    let asked_by = |host: &'static str| {
        let mut request = request("POST", "/effects", Some("key-1"), "x");
        request.headers_mut().insert(header::HOST, HeaderValue::from_static(host));
        request
    };
    assert_eq!(send(&app, asked("a.example:8080")).await.status, StatusCode::CREATED);
    assert!(send(&app, asked("a.example:8080")).await.is_replayed());
    assert!(send(&app, asked_by("a.example:8080")).await.is_replayed(), "a retry over HTTP/1.1 is the same request");
    for other in [asked("b.example:8080"), asked("a.example"), asked_by("b.example:8080")] {
        assert_eq!(send(&app, other).await.problem(), "key-reused");
    }
    assert_eq!(post_to(&app, "/effects", "key-1", "x").await.problem(), "key-reused", "no host at all");
    assert_eq!(effects(&pool).await, 1);

    // The absolute form of HTTP/1.1 names a host as well, and a handler may read either.
    let both = |authority: &str, key| {
        let mut request = request("POST", &format!("http://{authority}/effects"), Some(key), "x");
        request.headers_mut().insert(header::HOST, HeaderValue::from_static("a.example:8080"));
        request
    };
    assert!(send(&app, both("a.example:8080", "key-1")).await.is_replayed());
    assert_eq!(send(&app, both("b.example", "key-1")).await.problem(), "key-reused");
    assert_eq!(send(&app, both("b.example", "key-2")).await.status, StatusCode::CREATED);
    assert_eq!(send(&app, both("c.example", "key-2")).await.problem(), "key-reused");
    assert_eq!(effects(&pool).await, 2);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn members_that_differ_in_each_attempt_may_be_ignored(pool: PgPool) {
    create_effects(&pool).await;
    let app = app(without(&pool, &["/sent_at", "/client/at~1by"]));
    let first = r#"{"cents": 1250, "sent_at": 1763769600.1234567, "client": {"at/by": [1], "name": "a"}}"#;
    assert_eq!(post_to(&app, "/effects", "key-1", first).await.status, StatusCode::CREATED);
    for same in [
        r#"{"sent_at": "later", "client": {"name": "a", "at\/by": {}}, "cents": 125e1}"#,
        r#"{"client":{"name":"a"},"cents":1250}"#,
        r#"{"sent\u005fat":1,"cents":1250,"client":{"name":"a"}}"#,
    ] {
        assert!(post_to(&app, "/effects", "key-1", same).await.is_replayed(), "{same}");
    }
    let mut with_type = request("POST", "/effects", Some("key-1"), first);
    with_type.headers_mut().insert("content-type", "application/json; charset=utf-8".parse().expect("a value"));
    assert!(send(&app, with_type).await.is_replayed(), "the type is that of JSON anyway");
    for other in [
        r#"{"cents":1251,"client":{"name":"a"}}"#,
        r#"{"cents":1250,"client":{"name":"a","sent_at":1}}"#,
        r#"{"cents":1250,"client":{"name":"a"},"at":1}"#,
        r#"[{"cents":1250,"client":{"name":"a"}}]"#,
    ] {
        assert_eq!(post_to(&app, "/effects", "key-1", other).await.problem(), "key-reused", "{other}");
    }
    for body in ["", "not json", "{\"sent_at\":}", "{\"sent_at\":1,}"] {
        let refused = post_to(&app, "/effects", "key-2", body).await;
        assert_eq!((refused.status, &*refused.problem()), (StatusCode::BAD_REQUEST, "invalid-body"), "{body}");
    }
    assert_eq!(effects(&pool).await, 1);
}

/// The same request under every choice, against a record of every other choice, is an error and never a replay.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_was_made_under_another_choice_is_never_replayed(pool: PgPool) {
    create_effects(&pool).await;
    let choices = [
        transactional(&pool),
        transactional(&pool).canonical_json([]),
        transactional(&pool).fingerprint_header(ACCOUNT),
        transactional(&pool).fingerprint_header(HeaderName::from_static("x-other")),
        transactional(&pool).fingerprint_header(ACCOUNT).canonical_json([]),
        without(&pool, &["/sent_at"]),
        without(&pool, &["/at"]),
        without(&pool, &["/at", "/sent_at"]),
    ];
    let apps = choices.map(app);
    for (made, maker) in apps.iter().enumerate() {
        let key = format!("key-{made}");
        assert_eq!(post_to(maker, "/effects", &key, "{}").await.status, StatusCode::CREATED);
        for (asked, other) in apps.iter().enumerate() {
            let answer = post_to(other, "/effects", &key, "{}").await;
            if made == asked {
                assert!(answer.is_replayed());
                continue;
            }
            // *Key reused* would tell the client to take a new key, and to perform again.
            assert_eq!(answer.problem(), "misconfigured", "made under {made}, asked for under {asked}");
        }
    }
    assert_eq!(effects(&pool).await, 8);
}

/// The same choice gives the same fingerprint, in whatever order the settings are made.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_order_of_the_settings_does_not_change_the_fingerprint(pool: PgPool) {
    create_effects(&pool).await;
    let [a, b] = ["x-a", "x-b"].map(HeaderName::from_static);
    let one = app(without(&pool, &["/a", "/b"]).fingerprint_header(a.clone()).fingerprint_header(b.clone()));
    let same = transactional(&pool).fingerprint_header(b.clone()).fingerprint_header(a.clone());
    let same = app(same.fingerprint_header(b).canonical_json(["/b", "/a", "/b"]));
    assert_eq!(post_to(&one, "/effects", "key-1", "{}").await.status, StatusCode::CREATED);
    assert!(post_to(&same, "/effects", "key-1", "{}").await.is_replayed());
}

/// After a change of these digests, every repeat of an earlier request would be `key-reused`.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_default_digests_never_change(pool: PgPool) {
    create_effects(&pool).await;
    let layers = [transactional(&pool), transactional(&pool).canonical_json([])];
    each(
        layers.into_iter().zip([
            "0380258ef38ba84653cab9a44273bbd757b70f5934f4cb495974bbc02c25702217",
            "01f8ce6284b5abab0fa54ed18faed0880547e457938f629ab5b8343a792570551a",
        ]),
        async |(layer, expected)| {
            let mut request =
                request("POST", "/accounts/7/effects?fast=yes", Some("key-1"), r#"{"b": 1.50, "a": "x"}"#);
            request.headers_mut().insert("content-type", "application/json".parse().expect("a value"));
            sqlx::raw_sql("delete from idempotency.record").execute(&pool).await.expect("empty");
            assert_eq!(send(&app(layer), request).await.status, StatusCode::CREATED);
            assert_eq!(recorded::<String>(&pool, "encode(fingerprint, 'hex')").await, expected);
            Ok(())
        },
    )
    .await;
}

//! Requests whose clients are gone: a resumer sends each to the service again, and stores the answer.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Path, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Extension, Router};
use pg_idempotency::http::{Decision, IdempotencyLayer, LastError, RequestResumer, ResumedRequest};
use pg_idempotency::lease::{Acquired, Lease, LeaseOptions};
use pg_idempotency::testing::{age, lapse};
use pg_idempotency::{Error, Key, operator};
use rig::gate::{Gate, PATIENCE};
use rig::lease::{AT_LEAST_ONCE, IN_STEPS};
use sqlx::{Executor as _, PgPool};
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::support::{post_to, records, request, send, until};

pub(crate) const OPERATION: &str = "POST /payments/{}";
const TWO: NonZeroU32 = NonZeroU32::new(2).expect("two");
pub(crate) const MINUTE: Duration = Duration::from_secs(60);

/// What the authentication, or the decision about a stored request, puts into the request.
#[derive(Clone)]
pub(crate) struct Account(pub(crate) String);

/// The charged account, the key and the headers.
type Charges = Arc<Mutex<Vec<(String, String, HeaderMap)>>>;

pub(crate) struct Service {
    pub(crate) layer: IdempotencyLayer,
    charges: Charges,
    gate: Gate,
}

pub(crate) fn options() -> LeaseOptions {
    LeaseOptions::new(AT_LEAST_ONCE).store_request(true).max_attempts(TWO)
}

fn scope(parts: &axum::http::request::Parts) -> Result<String, pg_idempotency::http::Denied> {
    let Account(id) = parts.extensions.get().ok_or(StatusCode::UNAUTHORIZED)?;
    Ok(id.clone())
}

impl Service {
    pub(crate) fn new(pool: &PgPool) -> Self {
        let layer = IdempotencyLayer::leased(pool.clone(), options(), scope);
        Self { layer, charges: Charges::default(), gate: Gate::new() }
    }

    /// Another process of the same service, in which no run of the first one is in progress.
    pub(crate) fn restarted(&self, pool: &PgPool) -> Self {
        let layer = IdempotencyLayer::leased(pool.clone(), options(), scope);
        Self { layer, charges: self.charges.clone(), gate: Gate::new() }
    }

    /// The same service after a deploy, in which its route has another operation.
    pub(crate) fn moved(&self, pool: &PgPool, operation: &'static str) -> Self {
        let moved = self.restarted(pool);
        let layer = moved.layer.operation(move |_| Some(operation.to_owned()));
        Self { layer, charges: self.charges.clone(), gate: Gate::new() }
    }

    /// Without its authentication. The first attempt stops after the gateway has charged. `/payments/failing` fails,
    /// and `/payments/gone` finds no user.
    pub(crate) fn routes(&self) -> Router {
        let (charges, gate) = (self.charges.clone(), self.gate.clone());
        let pay = async move |Path(of): Path<String>, lease: Lease, headers: HeaderMap, body: String| -> Response {
            charges.lock().expect("not poisoned").push((
                lease.key().scope().to_owned(),
                lease.downstream_key(),
                headers,
            ));
            if lease.attempt() == 1 {
                gate.pass().await;
            }
            match &*of {
                "failing" => (Extension(LastError("closed".into())), StatusCode::BAD_GATEWAY).into_response(),
                "gone" => StatusCode::FORBIDDEN.into_response(),
                _ => (StatusCode::CREATED, [(header::LOCATION, "/payments/7")], format!("{of} {body}")).into_response(),
            }
        };
        Router::new().route("/payments/{of}", post(pay)).route_layer(self.layer.clone())
    }

    pub(crate) fn authenticated(&self) -> Router {
        self.routes().layer(middleware::from_fn(async |headers: HeaderMap, mut request: Request, next: Next| {
            let token = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
            let Some(account) = token.and_then(|token| token.strip_prefix("Bearer ")) else {
                return StatusCode::UNAUTHORIZED.into_response();
            };
            request.extensions_mut().insert(Account(account.to_owned()));
            next.run(request).await
        }))
    }

    /// A request whose process has died after the gateway had charged. Its run stays at the gate.
    pub(crate) async fn abandoned(&self, pool: &PgPool, key: &str, uri: &str) {
        let app = self.authenticated();
        let request = signed(key, uri);
        drop(tokio::spawn(async move { send(&app, request).await }));
        self.gate.reached().await;
        gone(pool, key).await;
    }

    pub(crate) async fn resume(&self) -> Option<ResumedRequest> {
        self.layer.resume_one(OPERATION, permit, self.routes()).await.expect("a search")
    }

    pub(crate) fn charges(&self) -> Vec<(String, String, HeaderMap)> {
        self.charges.lock().expect("not poisoned").clone()
    }
}

pub(crate) fn signed(key: &str, uri: &str) -> Request {
    let mut request = request("POST", uri, Some(key), "12 EUR");
    for (name, value) in [
        ("authorization", "Bearer ada"),
        ("cookie", "session=1"),
        ("proxy-authorization", "Basic x"),
        ("content-type", "text/plain"),
        ("x-shop", "caf\u{e9}"),
        ("x-other", "no"),
    ] {
        let value = axum::http::HeaderValue::from_bytes(value.as_bytes()).expect("a value");
        request.headers_mut().insert(name, value);
    }
    request
}

pub(crate) fn key(value: &str) -> Key {
    Key::new("ada", OPERATION, value).expect("a key")
}

async fn gone(pool: &PgPool, value: &str) {
    lapse(pool, &key(value)).await.expect("lapsed");
    age(pool, &key(value), MINUTE).await.expect("older");
}

pub(crate) async fn permit(key: &Key, request: &mut axum::http::Request<Bytes>) -> Result<Decision, Error> {
    request.extensions_mut().insert(Account(key.scope().to_owned()));
    Ok(Decision::Resume)
}

/// A record of the library or of the layer, whose owner is gone. The gate is open: no run waits there.
pub(crate) async fn many(pool: &PgPool, from: &str, count: u32) {
    let copy = "insert into idempotency.record
            (mode, scope, operation, value, fingerprint, token, claimed_at, lease_until, expires_at, request)
        select mode, scope, operation, value || n::text, fingerprint, token + n::int8, claimed_at - interval '1 h', lease_until, expires_at, request
        from idempotency.record, generate_series(1, $2) as n where value = $1";
    sqlx::query(copy).bind(from).bind(i32::try_from(count).expect("few")).execute(pool).await.expect("copies");
}

async fn library_request(pool: &PgPool, value: &str) {
    let acquired = options().acquire::<String, _>(pool, &key(value), "body").await.expect("acquired");
    assert!(matches!(acquired, Acquired::Owner(_)));
    drop(acquired);
    gone(pool, value).await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_whose_client_is_gone_is_answered_and_a_late_retry_replays_it(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    service.abandoned(&pool, "key-1", "/payments/ada?of=x").await;
    let (stop, stopped) = oneshot::channel::<()>();
    // An interval is far below the patience of this test.
    let resumer = RequestResumer::new(&service.layer, OPERATION)?.interval(Duration::from_millis(100));
    let routes = service.routes();
    let resuming = tokio::spawn(async move { resumer.run(async { drop(stopped.await) }, permit, routes).await });
    until(&pool, "select completed_at is not null from idempotency.record").await;
    drop(stop);
    timeout(PATIENCE, resuming).await??;
    let charges = service.charges();
    let [(first, under, _), (second, again, _)] = &charges[..] else { panic!("{charges:?}") };
    assert_eq!((first, under), (second, again), "one charge, for a gateway that knows the key");
    service.gate.open();
    let app = service.restarted(&pool).authenticated();
    let retry = send(&app, signed("key-1", "/payments/ada?of=x")).await;
    assert_eq!((retry.status, retry.is_replayed(), &*retry.body), (StatusCode::CREATED, true, &b"ada 12 EUR"[..]));
    assert_eq!(retry.headers[header::LOCATION], "/payments/7");
    let left: bool =
        sqlx::query_scalar("select request is null and attempt = 2 from idempotency.record").fetch_one(&pool).await?;
    assert!(left && service.charges().len() == 2 && service.resume().await.is_none());
    Ok(())
}

/// HTTP/2 sends the host as a part of the URI, and a stored request has only the path of it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_listed_host_is_stored_also_over_http_2(pool: PgPool) -> anyhow::Result<()> {
    for (key, is_fingerprinted) in [("key-1", true), ("key-2", false)] {
        let mut service = Service::new(&pool);
        service.layer = match is_fingerprinted {
            true => service.layer.fingerprint_header(header::HOST),
            false => service.layer.store_header(header::HOST),
        };
        service.abandoned(&pool, key, "http://a.example:8080/payments/ada").await;
        assert!(matches!(service.resume().await, Some(ResumedRequest::Answered(..))));
        let (_, _, headers) = &service.charges()[1];
        assert_eq!(headers[header::HOST], "a.example:8080", "{key}");
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn only_what_the_service_lists_is_stored(pool: PgPool) -> anyhow::Result<()> {
    let mut service = Service::new(&pool);
    let layer = service.layer.store_header(header::HeaderName::from_static("x-shop"));
    service.layer = layer.fingerprint_header(header::COOKIE);
    service.abandoned(&pool, "key-1", "/payments/ada?of=x").await;
    let shown = operator::show(&pool, &key("key-1")).await?.expect("a record").request.expect("a request");
    assert_eq!((&*shown.method, &*shown.target), ("POST", "/payments/ada?of=x"));
    let mut names: Vec<_> = shown.headers.iter().map(|(name, _)| &**name).collect();
    names.sort_unstable();
    assert_eq!(names, ["content-type", "idempotency-key", "x-shop"]);
    assert_eq!(service.resume().await, Some(ResumedRequest::Answered(key("key-1"), StatusCode::CREATED)));
    let (_, _, headers) = &service.charges()[1];
    assert_eq!(headers["x-shop"].as_bytes(), "caf\u{e9}".as_bytes());
    assert!(
        !headers.contains_key("authorization") && !headers.contains_key("cookie") && !headers.contains_key("x-other")
    );
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_that_is_too_large_to_store_is_refused(pool: PgPool) {
    let mut service = Service::new(&pool);
    service.layer = service.layer.request_limit(10);
    let app = service.routes().layer(Extension(Account("ada".into())));
    assert_eq!(post_to(&app, "/payments/ada", "key-1", "12 euros each").await.problem(), "body-too-large");
    let mut request = request("POST", "/payments/ada", Some("key-1"), "12 EUR");
    request.headers_mut().insert("content-type", "x".repeat(70_000).parse().expect("a value"));
    assert_eq!(send(&app, request).await.status, StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE);
    assert_eq!(records(&pool).await, 0);
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_that_the_service_refuses_is_left_to_a_person(pool: PgPool) -> anyhow::Result<()> {
    let options = LeaseOptions::new(IN_STEPS).store_request(true).max_attempts(TWO);
    let layer = || IdempotencyLayer::leased(pool.clone(), options, scope);
    let service = Service { layer: layer(), ..Service::new(&pool) };
    service.abandoned(&pool, "key-1", "/payments/ada").await;
    let refuse = async |_: &Key, _: &mut axum::http::Request<Bytes>| -> Result<Decision, Error> {
        Ok(Decision::Refuse("the account is closed".to_owned()))
    };
    assert!(operator::unsettled(&pool, 9, None, None).await?.is_empty());
    // A reconciler noted a step, whose owner woke and finished it.
    sqlx::query("update idempotency.record set probes = '{}'").execute(&pool).await?;
    let refused = service.layer.resume_one(OPERATION, refuse, service.routes()).await?;
    assert_eq!(refused, Some(ResumedRequest::Refused(key("key-1"))));
    let listed = operator::unsettled(&pool, 9, None, None).await?;
    let [shown] = &listed[..] else { panic!("{listed:?}") };
    assert_eq!((shown.attempt, shown.resumable), (1, false));
    assert_eq!(shown.last_error.as_deref(), Some("refused: the account is closed"));
    assert!(service.resume().await.is_none(), "visited no more");
    assert_eq!(service.charges().len(), 1);
    let app = Service { layer: layer(), ..service.restarted(&pool) }.authenticated();
    let retry = send(&app, signed("key-1", "/payments/ada")).await;
    assert_eq!((retry.status, retry.is_replayed()), (StatusCode::CREATED, false), "the user is back");
    assert!(operator::unsettled(&pool, 9, None, None).await?.is_empty());
    Ok(())
}

/// A function that fails for some requests must not keep the others waiting.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn requests_that_cannot_be_decided_do_not_hide_the_others(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    service.abandoned(&pool, "key-", "/payments/ada").await;
    many(&pool, "key-", 40).await;
    let decide = async |key: &Key, request: &mut axum::http::Request<Bytes>| {
        assert_ne!(key.value(), "key-1", "on purpose");
        if key.value() != "key-" {
            Err("the directory is away")
        } else {
            Ok(permit(key, request).await.expect("permitted"))
        }
    };
    let resumed = service.layer.resume_one(OPERATION, decide, service.routes()).await?;
    assert_eq!(resumed, Some(ResumedRequest::Answered(key("key-"), StatusCode::CREATED)));
    let untouched =
        "select count(*) from idempotency.record where attempt = 1 and request is not null and last_error is null";
    assert_eq!(sqlx::query_scalar::<_, i64>(untouched).fetch_one(&pool).await?, 40);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn requests_of_the_library_and_of_the_layer_do_not_hide_each_other(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    service.abandoned(&pool, "http", "/payments/ada").await;
    library_request(&pool, "library").await;
    many(&pool, "http", 17).await;
    let work =
        async |lease: &Lease, body: String| -> Result<String, Error> { Ok(format!("{} {body}", lease.key().value())) };
    assert_eq!(options().resume_one(&pool, OPERATION, work).await?.as_deref(), Some("library body"));
    assert_eq!(options().resume_one(&pool, OPERATION, work).await?, None, "the others are requests of the layer");
    pool.execute("delete from idempotency.record where value <> 'http'").await?;
    library_request(&pool, "older").await;
    many(&pool, "older", 17).await;
    assert_eq!(service.resume().await, Some(ResumedRequest::Answered(key("http"), StatusCode::CREATED)));
    assert_eq!(service.resume().await, None);
    Ok(())
}

/// A newer release finishes it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_of_another_version_is_left_alone(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    service.abandoned(&pool, "key-1", "/payments/ada").await;
    for first in ["02", "00", "08", ""] {
        let other = "update idempotency.record set request = decode($1, 'hex') || substr(request, 2)";
        sqlx::query(other).bind(first).execute(&pool).await?;
        if first.is_empty() {
            pool.execute("update idempotency.record set request = ''").await?;
        }
        assert_eq!(service.resume().await, None, "{first}");
        let work = async |_: &Lease, _: String| -> Result<String, Error> { panic!("it is not JSON") };
        assert_eq!(options().resume_one(&pool, OPERATION, work).await?, None, "{first}");
        let shown = operator::show(&pool, &key("key-1")).await?.expect("a record");
        assert_eq!((shown.request, shown.attempt), (None, 1));
    }
    // Damaged: it waits for a person.
    pool.execute("update idempotency.record set request = '\\x01ffff7b'").await?;
    assert_eq!(service.resume().await, None);
    assert_eq!(
        (service.charges().len(), operator::show(&pool, &key("key-1")).await?.expect("a record").attempt),
        (1, 1)
    );
    Ok(())
}

/// The access has ended after the decision, and the handler refuses.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_that_the_handler_refuses_is_not_sent_again(pool: PgPool) -> anyhow::Result<()> {
    let service = Service::new(&pool);
    service.abandoned(&pool, "key-1", "/payments/gone").await;
    assert_eq!(service.resume().await, Some(ResumedRequest::Failed(key("key-1"))));
    operator::show(&pool, &key("key-1")).await?.expect("one").grant(&pool, "again").await?;
    age(&pool, &key("key-1"), MINUTE * 60).await?;
    assert_eq!((service.resume().await, service.charges().len()), (None, 2));
    Ok(())
}

/// An unreleased build has accepted a key without a visible character.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_stored_request_with_a_blank_key_is_resumed(pool: PgPool) -> anyhow::Result<()> {
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
async fn a_stored_request_is_resumed_under_a_key_that_has_become_too_short(pool: PgPool) -> anyhow::Result<()> {
    let mut service = Service::new(&pool);
    service.abandoned(&pool, "key-1", "/payments/ada").await;
    service.layer = service.layer.shortest_key(8);
    let resumed = service.resume().await;
    assert_eq!(resumed, Some(ResumedRequest::Answered(Key::new("ada", OPERATION, "key-1")?, StatusCode::CREATED)));
    Ok(())
}

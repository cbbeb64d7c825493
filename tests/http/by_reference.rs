//! Answers by reference: the record keeps what identifies the answer, and a replay builds the answer anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Path;
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use axum::{Extension, Json, Router};
use pg_idempotency::http::{AnswerBy, IdempotencyLayer, IdempotentTx, NoStore, NoTransaction, Replay};
use pg_idempotency::{Error, Key, RoundTrips, operator};
use rig::lease::AT_MOST_ONCE;
use serde::Serialize;
use sqlx::{PgConnection, PgPool};

use crate::support::{
    Announcing, app, create_effects, effects, insert, leased, outside, pool_of, post_to, recorded, request, saving,
    send, transactional,
};

/// One test for each constructor and each way to find the record.
macro_rules! in_each_layer {
    ($($behaviour:ident),*) => {
        in_each_layer!(plain, |pool| saving(pool, RoundTrips::Plain), [$($behaviour),*]);
        in_each_layer!(select_first, |pool| saving(pool, RoundTrips::SelectFirst), [$($behaviour),*]);
        in_each_layer!(fewest, |pool| saving(pool, RoundTrips::Fewest), [$($behaviour),*]);
        in_each_layer!(under_a_lease, |pool| leased(pool, AT_MOST_ONCE), [$($behaviour),*]);
    };
    ($name:ident, $layer:expr, [$($behaviour:ident),*]) => {
        mod $name {
            use super::*;
            $(
                #[sqlx::test(migrator = "rig::strict::MIGRATOR")]
                async fn $behaviour(pool: PgPool) {
                    super::$behaviour(pool, $layer).await;
                }
            )*
        }
    };
}

in_each_layer!(
    an_order_is_shown_as_it_is_now,
    the_record_of_a_large_report_is_small,
    a_reference_that_does_not_resolve_is_gone_and_never_performed_again,
    a_replay_that_fails_leaves_nothing_open_and_performs_nothing
);

type Layer = fn(&PgPool) -> IdempotencyLayer;

// The first caller: an order by its id, as it is now.

#[derive(Serialize, sqlx::FromRow)]
struct Order {
    id: i64,
    note: String,
}

#[derive(Clone, Default)]
struct OrdersById {
    replays: Arc<AtomicUsize>,
}

impl Replay for OrdersById {
    type Reference = i64;
    type Body = Body;

    async fn replay(&self, id: i64, _: &Parts, conn: &mut PgConnection) -> Result<Option<Response>, Error> {
        self.replays.fetch_add(1, Ordering::Relaxed);
        let order: Option<Order> =
            sqlx::query_as("select id, note from effect where id = $1").bind(id).fetch_optional(conn).await?;
        Ok(order.map(|order| Json(order).into_response()))
    }
}

/// Under a lease the effect is written elsewhere, here by the pool.
async fn new_effect(tx: Result<IdempotentTx, NoTransaction>, pool: &PgPool, note: &str) -> i64 {
    match tx {
        Ok(mut tx) => insert(&mut tx, note).await,
        Err(_) => {
            outside(pool, "insert into effect (note) values ('paper')").await;
            sqlx::query_scalar("select max(id) from effect").fetch_one(pool).await.expect("an id")
        }
    }
}

fn orders(pool: &PgPool) -> Router {
    let pool = pool.clone();
    let place = async move |tx: Result<IdempotentTx, NoTransaction>| {
        let id = new_effect(tx, &pool, "paper").await;
        let order = Order { id, note: "paper".to_owned() };
        let once = [(header::SET_COOKIE, "session=1"), (header::ETAG, "\"first\"")];
        (StatusCode::CREATED, AnswerBy(order.id), once, Json(order))
    };
    Router::new().route("/orders", post(place))
}

/// Nothing of the first answer is stored. A replay needs one connection, and the layer has no other.
async fn an_order_is_shown_as_it_is_now(pool: PgPool, layer: Layer) {
    create_effects(&pool).await;
    let app = orders(&pool).layer(layer(&pool_of(1, &pool.connect_options()).await).replay(OrdersById::default()));
    let first = post_to(&app, "/orders", "key-1", "x").await;
    assert_eq!((first.status, first.is_replayed()), (StatusCode::CREATED, false), "{first:?}");
    assert_eq!(first.headers["set-cookie"], "session=1", "the first answer is the handler's");
    let stored: String = recorded(&pool, "format('%s %s', response_status, response_headers)").await;
    assert_eq!(stored, "201 \"reference\"");
    for note in ["pencils", "erasers"] {
        outside(&pool, &format!("update effect set note = '{note}'")).await;
        let repeat = post_to(&app, "/orders", "key-1", "x").await;
        assert_eq!((repeat.status, repeat.is_replayed()), (StatusCode::CREATED, true), "{repeat:?}");
        assert_eq!(repeat.headers["content-type"], "application/json");
        assert!(!repeat.headers.contains_key("etag") && !repeat.headers.contains_key("set-cookie"), "{repeat:?}");
        let order: serde_json::Value = serde_json::from_slice(&repeat.body).expect("JSON");
        assert_eq!(order["note"], note);
    }
    assert_eq!(effects(&pool).await, 1);
}

// The second caller: a report of 64 KB, which a table of the service has anyway.

struct Reports;

impl Replay for Reports {
    type Reference = i64;
    type Body = Body;

    async fn replay(&self, id: i64, request: &Parts, conn: &mut PgConnection) -> Result<Option<Response>, Error> {
        // The run puts the key into the request, so that the reader sees whose request it is.
        let account = request.extensions.get().map(Key::scope);
        let text: Option<String> = sqlx::query_scalar("select content from report where id = $1 and account = $2")
            .bind(id)
            .bind(account)
            .fetch_optional(conn)
            .await?;
        Ok(text.map(|text| ([(header::CONTENT_TYPE, "text/csv")], text).into_response()))
    }
}

async fn the_record_of_a_large_report_is_small(pool: PgPool, layer: Layer) {
    let create = "create table report (id bigint, account text, content text)";
    sqlx::raw_sql(create).execute(&pool).await.expect("a table");
    // Not compressible, so that no compression hides a body in the record.
    let report: String =
        (0..64 * 1024 / 17_u64).map(|n| format!("{:016x}\n", n.wrapping_mul(0x9e37_79b9_7f4a_7c15))).collect();
    sqlx::query("insert into report values (7, 'ada', $1)").bind(&report).execute(&pool).await.expect("a report");
    let content = report.clone();
    let handler = async move |_tx: Result<IdempotentTx, NoTransaction>| {
        (AnswerBy(7), [(header::CONTENT_TYPE, "text/csv")], content.clone())
    };
    // The limit is that of a stored body, and no body is stored.
    let layer = layer(&pool).replay(Reports).response_limit(1000);
    let app = Router::new().route("/reports", post(handler)).layer(layer);
    for replayed in [false, true] {
        let answer = post_to(&app, "/reports", "b5b6a1e0-8a1c-4c6e-9f63-0e9f5a3d6c11", "x").await;
        assert_eq!((answer.status, answer.is_replayed()), (StatusCode::OK, replayed));
        assert_eq!(answer.headers["content-type"], "text/csv");
        assert_eq!(answer.body, report.as_bytes());
    }
    let bytes: i32 = recorded(&pool, "pg_column_size(record)").await;
    assert!(bytes < 400, "{bytes} bytes");
    let key = Key::new("ada", "POST /reports", recorded::<String>(&pool, "value").await).expect("a key");
    let shown = operator::show(&pool, &key).await.expect("shown").expect("a record");
    assert_eq!(shown.response_bytes, Some(1), "an operator sees the size of the reference");
}

async fn a_reference_that_does_not_resolve_is_gone_and_never_performed_again(pool: PgPool, layer: Layer) {
    create_effects(&pool).await;
    let app = orders(&pool).layer(layer(&pool).replay(OrdersById::default()));
    post_to(&app, "/orders", "key-1", "x").await;
    outside(&pool, "delete from effect").await;
    for _ in 0..2 {
        let gone = post_to(&app, "/orders", "key-1", "x").await;
        assert_eq!((gone.status, &*gone.problem()), (StatusCode::GONE, "gone"));
        assert!(!gone.is_replayed() && !gone.headers.contains_key("retry-after"), "{gone:?}");
    }
    assert_eq!(effects(&pool).await, 0);
}

/// A layer that cannot replay a reference, and one whose references have another type.
fn unable(layer: &IdempotencyLayer) -> [(IdempotencyLayer, &'static str); 2] {
    [(layer.clone(), "add IdempotencyLayer::replay"), (layer.clone().replay(Failing), "does not decode")]
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_transaction_with_a_reference_that_cannot_be_replayed_does_not_commit(pool: PgPool) {
    create_effects(&pool).await;
    for (layer, mistake) in unable(&transactional(&pool)) {
        let answer = post_to(&orders(&pool).layer(layer), "/orders", "key-1", "x").await;
        assert!(answer.mistake().contains(mistake), "{answer:?}");
        assert_eq!(effects(&pool).await, 0);
    }
}

/// The effect has happened. The next deployment repairs the replay.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn under_a_lease_a_reference_that_cannot_be_replayed_is_never_performed_again(pool: PgPool) {
    create_effects(&pool).await;
    let leased = leased(&pool, AT_MOST_ONCE);
    for (number, (layer, mistake)) in (1..).zip(unable(&leased)) {
        let (app, key) = (orders(&pool).layer(layer), format!("key-{number}"));
        assert_eq!(post_to(&app, "/orders", &key, "x").await.status, StatusCode::CREATED);
        let repeat = post_to(&app, "/orders", &key, "x").await;
        assert!(repeat.mistake().contains(mistake), "{repeat:?}");
        assert!(!format!("{repeat:?}").contains("type: integer"), "no log shows the reference");
        assert_eq!(effects(&pool).await, number);
        let repaired = orders(&pool).layer(leased.clone().replay(OrdersById::default()));
        assert!(post_to(&repaired, "/orders", &key, "x").await.is_replayed());
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_stored_body_is_replayed_as_it_is(pool: PgPool) {
    create_effects(&pool).await;
    let replay = OrdersById::default();
    let app = app(transactional(&pool).replay(replay.clone()));
    let first = post_to(&app, "/effects", "key-1", "x").await;
    let repeat = post_to(&app, "/effects", "key-1", "x").await;
    assert_eq!((repeat.is_replayed(), &repeat.body), (true, &first.body));
    assert_eq!(replay.replays.load(Ordering::Relaxed), 0);
}

/// What can go wrong in the service's code.
struct Failing;

impl Replay for Failing {
    type Reference = String;
    type Body = Body;

    async fn replay(&self, how: String, _: &Parts, conn: &mut PgConnection) -> Result<Option<Response>, Error> {
        match &*how {
            "writes" => {
                // No trigger protects this table.
                sqlx::query("update idempotency.record set last_error = 'written'").execute(conn).await?;
            }
            "cancelled" => {
                sqlx::raw_sql("set local statement_timeout = '50ms'").execute(&mut *conn).await?;
                sqlx::query("select pg_sleep(60)").execute(conn).await?;
            }
            "notifies" => {
                // It is permitted in a read-only transaction.
                sqlx::raw_sql("notify replayed; set application_name = 'replayed'").execute(conn).await?;
            }
            "panics" => panic!("on purpose"),
            "hangs" => {
                sqlx::query("select pg_sleep(3)").execute(conn).await?;
            }
            "refuses" => return Ok(Some(StatusCode::FORBIDDEN.into_response())),
            "breaks" => {
                let parts = [Ok("half of it"), Err(std::io::Error::other("the disk is gone"))];
                return Ok(Some(Body::from_stream(futures_util::stream::iter(parts)).into_response()));
            }
            other => return Ok(Some(other.to_owned().into_response())),
        }
        Ok(Some("never seen".into_response()))
    }
}

async fn a_replay_that_fails_leaves_nothing_open_and_performs_nothing(pool: PgPool, layer: Layer) {
    create_effects(&pool).await;
    let layer = layer(&pool).replay(Failing).run_timeout(Duration::from_secs(1));
    let effect_pool = pool.clone();
    let handler = async move |Path(how): Path<String>, tx: Result<IdempotentTx, NoTransaction>| {
        new_effect(tx, &effect_pool, "performed").await;
        (AnswerBy(how), "the first answer")
    };
    let app = Router::new().route("/{how}", post(handler)).layer(layer);
    let cases = [
        ("writes", 500, "misconfigured"),
        ("breaks", 500, "misconfigured"),
        ("cancelled", 503, "unavailable"),
        ("hangs", 503, "timed-out"),
        ("panics", 0, ""),
        ("refuses", 403, ""),
    ];
    for (how, status, problem) in cases {
        let uri = format!("/{how}");
        assert_eq!(post_to(&app, &uri, how, "x").await.body, "the first answer", "{how}");
        let repeat = tokio::spawn({
            let app = app.clone();
            async move { post_to(&app, &uri, how, "x").await }
        });
        match repeat.await {
            Ok(repeat) => {
                assert_eq!((repeat.status.as_u16(), repeat.is_replayed()), (status, false), "{how}: {repeat:?}");
                assert!(problem.is_empty() || repeat.problem() == problem, "{how}: {repeat:?}");
            }
            Err(panicked) => assert!(panicked.is_panic() && how == "panics", "{how}: {panicked}"),
        }
    }
    assert_eq!(effects(&pool).await, cases.len() as i64);
    let mut listener = sqlx::postgres::PgListener::connect_with(&pool).await.expect("a listener");
    listener.listen("replayed").await.expect("listening");
    for replayed in [false, true] {
        assert_eq!(post_to(&app, "/notifies", "notifies", "x").await.is_replayed(), replayed);
    }
    outside(&pool, "notify replayed, 'the only one'").await;
    assert_eq!(listener.recv().await.expect("a notification").payload(), "the only one");
    // Only the statement that hangs is still there, until the server ends it.
    crate::support::until(
        &pool,
        "select not exists (
            select from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
                and (state like 'idle in transaction%' or state = 'active')
        )",
    )
    .await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_reference_follows_the_rules_of_a_response(pool: PgPool) {
    create_effects(&pool).await;
    let route = Router::new()
        .route(
            "/declined",
            post(async |mut tx: IdempotentTx| {
                insert(&mut tx, "undone").await;
                (StatusCode::PAYMENT_REQUIRED, AnswerBy("declined"), "no money")
            }),
        )
        .route("/refused", post(async |_: IdempotentTx| (StatusCode::BAD_REQUEST, AnswerBy("x"), "freed")))
        .route("/long", post(async |_: IdempotentTx| (AnswerBy("x".repeat(2 << 20)), "too long")))
        .route("/secret", post(async |_: IdempotentTx| (Extension(NoStore), AnswerBy("x"), "secret")))
        .route(
            "/no-json",
            post(async |mut tx: IdempotentTx| {
                insert(&mut tx, "undone").await;
                (AnswerBy(std::collections::BTreeMap::from([((1, 2), 3)])), "a key of JSON is a text")
            }),
        );
    let layer = transactional(&pool).optional_key(true).replay(Failing);
    let app = route.layer(layer.store_errors([StatusCode::PAYMENT_REQUIRED]));
    assert_eq!(post_to(&app, "/declined", "key-1", "x").await.body, "no money");
    let declined = post_to(&app, "/declined", "key-1", "x").await;
    assert_eq!((declined.status, declined.is_replayed()), (StatusCode::PAYMENT_REQUIRED, true));
    assert_eq!(declined.body, "declined");
    for _ in 0..2 {
        assert_eq!(post_to(&app, "/refused", "key-2", "x").await.body, "freed");
        let no_json = post_to(&app, "/no-json", "key-3", "x").await;
        assert_eq!((no_json.status, &no_json.body[..]), (StatusCode::INTERNAL_SERVER_ERROR, &b""[..]));
    }
    assert_eq!(post_to(&app, "/secret", "key-4", "x").await.body, "secret");
    assert_eq!(post_to(&app, "/secret", "key-4", "x").await.problem(), "not-replayable");
    assert_eq!(post_to(&app, "/long", "key-5", "x").await.body, "too long");
    assert_eq!(post_to(&app, "/long", "key-5", "x").await.problem(), "not-replayable");
    assert_eq!(send(&app, request("POST", "/secret", None, "x")).await.body, "secret", "without a key");
    assert_eq!(effects(&pool).await, 0);
}

/// Rebuilds an answer of as many bytes as the reference says, and announces as many more as the query says.
struct Long;

impl Replay for Long {
    type Reference = (usize, u64);
    type Body = Announcing;

    async fn replay(
        &self,
        (bytes, more): Self::Reference,
        _: &Parts,
        _: &mut PgConnection,
    ) -> Result<Option<Response<Announcing>>, Error> {
        let data = Some(vec![b'x'; bytes].into());
        Ok(Some(Response::new(Announcing { data, length: bytes as u64 + more })))
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_rebuilt_answer_has_a_bound_and_an_end(pool: PgPool) {
    const MOST: usize = 64 * 1024 * 1024;
    let layer = transactional(&pool).replay(Long);
    let place = async |_: IdempotentTx, Json(reference): Json<(usize, u64)>| (AnswerBy(reference), "placed");
    let app = Router::new().route("/long", post(place)).layer(layer);
    for (number, (bytes, more, status)) in [
        (MOST, 0, StatusCode::OK),
        (MOST + 1, 0, StatusCode::INTERNAL_SERVER_ERROR),
        (9, 1, StatusCode::INTERNAL_SERVER_ERROR),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("key-{number}");
        let ask = || {
            let mut request = request("POST", "/long", Some(&key), &format!("[{bytes},{more}]"));
            request.headers_mut().insert("content-type", "application/json".parse().expect("a value"));
            request
        };
        assert_eq!(send(&app, ask()).await.body, "placed");
        let again = send(&app, ask()).await;
        assert_eq!(again.status, status, "{bytes} bytes, and {more} more announced");
        if status == StatusCode::OK {
            assert_eq!(again.body.len(), bytes);
        } else {
            assert_eq!(again.problem(), "misconfigured");
        }
    }
}

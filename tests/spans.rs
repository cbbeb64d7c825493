//! What a listener of `tracing` sees: a span for each call, with its outcome, and nothing of the key but its operation.
//!
//! A binary of its own: `tracing` remembers that nobody listens to a call when it is first made in a thread without a
//! listener, as those of the other tests are.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pg_idempotency::lease::{LeaseOptions, Policy};
use pg_idempotency::mark::{MarkOptions, Marked, mark};
use pg_idempotency::{Error, Idempotency, Janitor, Key, Verdict, ensure_idempotent};
use rig::database::pool_of;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, owner};
use sqlx::PgPool;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::DefaultGuard;
use tracing::{Event, Instrument as _, Subscriber, info_span};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::{Context, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::{Layer, registry};

const SCOPE: &str = "scope-of-nobody-else";
const VALUE: &str = "value-that-is-a-secret";

type Fields = BTreeMap<&'static str, String>;

/// Keeps every span of ours, and the text of all spans and events of anybody's.
#[derive(Clone, Default)]
struct Listener(Arc<Mutex<Heard>>);

#[derive(Default)]
struct Heard {
    spans: Vec<(Id, &'static str, Fields)>,
    text: String,
}

impl Listener {
    fn hear(&self, id: Option<&Id>, name: &'static str, record: impl FnOnce(&mut Fields)) {
        let mut fields = Fields::new();
        record(&mut fields);
        let mut heard = self.0.lock().expect("not poisoned");
        heard.text += &format!("{name} {fields:?}\n");
        let Some(id) = id else { return };
        // The latest, because an id is used again.
        match heard.spans.iter_mut().rev().find(|(known, ..)| known == id).filter(|_| name.is_empty()) {
            Some((_, _, known)) => known.extend(fields),
            None => heard.spans.push((id.clone(), name, fields)),
        }
    }

    /// Each span, in the order of their beginning: its name and fields. Tokens are random, so the first token is shown
    /// as 1, the second one as 2.
    fn spans(&self) -> Vec<String> {
        let tokens = self.tokens();
        let heard = self.0.lock().expect("not poisoned");
        let shown = heard.spans.iter().map(|(_, name, fields)| {
            let fields: Vec<_> = fields
                .iter()
                .map(|(field, value)| match tokens.iter().position(|token| *field == "token" && token == value) {
                    Some(position) => format!("{field}={}", position + 1),
                    None => format!("{field}={value}"),
                })
                .collect();
            format!("{name} {}", fields.join(" "))
        });
        shown.collect()
    }

    /// The different tokens of the spans, in the order of their first occurrence.
    fn tokens(&self) -> Vec<String> {
        let heard = self.0.lock().expect("not poisoned");
        let mut tokens: Vec<String> = Vec::new();
        for token in heard.spans.iter().filter_map(|(_, _, fields)| fields.get("token")) {
            if !tokens.contains(token) {
                tokens.push(token.clone());
            }
        }
        tokens
    }

    fn text(&self) -> String {
        self.0.lock().expect("not poisoned").text.clone()
    }
}

struct Visitor<'f>(&'f mut Fields);

impl Visit for Visitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name(), format!("{value:?}").trim_matches('"').to_owned());
    }

    /// With its causes, as subscribers print it.
    fn record_error(&mut self, field: &Field, error: &(dyn std::error::Error + 'static)) {
        let causes = std::iter::successors(Some(error), |error| error.source());
        self.0.insert(field.name(), causes.map(ToString::to_string).collect::<Vec<_>>().join(": "));
    }
}

impl<S: Subscriber + for<'s> LookupSpan<'s>> Layer<S> for Listener {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        self.hear(Some(id), attributes.metadata().name(), |fields| attributes.record(&mut Visitor(fields)));
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        self.hear(Some(id), "", |fields| values.record(&mut Visitor(fields)));
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let span = context.event_span(event).map_or("no span", |span| span.name());
        self.hear(None, span, |fields| event.record(&mut Visitor(fields)));
    }
}

/// One runtime thread, so its default listener hears the whole test and nothing else, until the guard is dropped.
fn listen() -> (Listener, DefaultGuard) {
    let listener = Listener::default();
    let guard = tracing::subscriber::set_default(registry().with(listener.clone()));
    (listener, guard)
}

#[cfg(feature = "axum")]
async fn post_to(app: &axum::Router, path: &str) -> anyhow::Result<axum::http::StatusCode> {
    use tower::ServiceExt as _;
    let request = axum::http::Request::post(path).header("idempotency-key", VALUE).body(axum::body::Body::empty())?;
    Ok(app.clone().oneshot(request).await?.status())
}

#[cfg(feature = "axum")]
fn transactional(pool: &PgPool) -> pg_idempotency::http::IdempotencyLayer {
    let scope = |_: &axum::http::request::Parts| Ok(SCOPE.to_owned());
    pg_idempotency::http::IdempotencyLayer::transactional(pool.clone(), Idempotency::new(), scope)
}

fn key(operation: &str) -> Key {
    Key::new(SCOPE, operation, VALUE).expect("a valid key")
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_write_that_escapes_is_a_warning_under_warn(pool: PgPool) -> anyhow::Result<()> {
    let (listener, _guard) = listen();
    sqlx::raw_sql("create table orders (id int)").execute(&pool).await?;
    pg_idempotency::protect(&pool, "orders", pg_idempotency::OnEscape::Warn).await?;
    let place = "insert into orders values (1)";
    let key = key("POST /orders");
    let inside = Idempotency::new().run(&pool, &key, "body", async |conn| {
        sqlx::query(place).execute(conn).await?;
        Ok::<_, Error>(1)
    });
    assert!(!inside.await?.is_replayed());
    let warnings = || listener.text().matches("public.orders was written outside an idempotent operation").count();
    assert_eq!(warnings(), 0);
    sqlx::query(place).execute(&pool).await?;
    assert_eq!(warnings(), 1);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_first_call_a_replay_and_a_sweep_are_spans(pool: PgPool) -> anyhow::Result<()> {
    let (listener, _guard) = listen();

    let call = async |body: &str| {
        let mut tx = pool.begin().await?;
        let outcome = ensure_idempotent(&mut tx, &key("POST /orders"), body, async |_| {
            tracing::info!("performing");
            Ok::<_, anyhow::Error>(1)
        })
        .await?;
        tx.commit().await?;
        anyhow::Ok(outcome)
    };
    assert!(!call("body").await?.is_replayed());
    assert!(call("body").await?.is_replayed());
    // An error of ours in the caller's own type, and one of the caller's.
    call("another").await.expect_err("key reused");
    let failing = async |_: &mut sqlx::PgConnection| -> Result<i64, Error> { Err(sqlx::Error::RowNotFound.into()) };
    Idempotency::new().run(&pool, &key("PUT /orders"), "", failing).await.expect_err("perform fails");
    let undo = async |_: &mut sqlx::PgConnection| Ok::<_, Error>(Verdict::Undo(1));
    let mut tx = pool.begin().await?;
    let _ = Idempotency::new().ensure_isolated(&mut tx, &key("POST /cards"), "", undo).await?;
    tx.commit().await?;
    sqlx::query("update idempotency.record set expires_at = now() - interval '1 s'").execute(&pool).await?;
    assert_eq!(Janitor::new(pool.clone()).grace(Duration::ZERO).sweep_once(1).await?.rows(), 1);
    assert_eq!(Janitor::new(pool.clone()).grace(Duration::ZERO).sweep_once(9).await?.rows(), 1);

    assert_eq!(
        listener.spans(),
        [
            "ensure_idempotent mode=transaction operation=POST /orders outcome=performed token=1",
            "ensure_idempotent mode=transaction operation=POST /orders outcome=replayed token=1",
            "ensure_idempotent mode=transaction operation=POST /orders outcome=key_reused",
            "run mode=transaction operation=PUT /orders outcome=failed token=2",
            "ensure_isolated mode=transaction operation=POST /cards outcome=performed token=3",
            "janitor.sweep batches=1 outcome=limited rows=1",
            "janitor.sweep batches=1 outcome=done rows=1",
        ]
    );
    let text = listener.text();
    assert!(text.contains("ensure_idempotent {\"message\": \"performing\"}"), "perform is inside the span\n{text}");
    assert!(!text.contains(SCOPE) && !text.contains(VALUE), "never the key or its scope\n{text}");
    Ok(())
}

/// A role with the name of the schema finds it in its `search_path`.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_schema_in_the_search_path_is_a_warning_of_migrate(pool: PgPool) -> anyhow::Result<()> {
    let (listener, _guard) = listen();
    let warnings = || listener.text().matches("the search_path of this role contains the schema").count();
    pg_idempotency::migrate(&pool).await?;
    assert_eq!(warnings(), 0);
    let path = rig::database::options(&pool).options([("search_path", "public, idempotency")]);
    pg_idempotency::migrate(&pool_of(1, &path).await).await?;
    assert_eq!(warnings(), 1, "{}", listener.text());
    Ok(())
}

/// A pool of one lends its connection to the work, and the renewal gets none.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_lease_that_gets_no_connection_for_its_renewal_is_a_warning(pool: PgPool) -> anyhow::Result<()> {
    let (listener, _guard) = listen();
    let pool = pool_of(1, &pool.connect_options()).await;
    let policy = Policy::AtLeastOnce { lease: Duration::from_secs(1) };
    let error = LeaseOptions::new(policy)
        .run(&pool, &key("charge"), "body", async |_| {
            let _held = pool.acquire().await?;
            std::future::pending::<Result<(), Error>>().await
        })
        .await;
    assert!(matches!(error, Err(Error::LeaseLost)), "{error:?}");
    let text = listener.text();
    assert!(text.contains("the pool had no connection for the renewal"), "{text}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn marks_and_leases_are_spans(pool: PgPool) -> anyhow::Result<()> {
    let (listener, _guard) = listen();

    let mut tx = pool.begin().await?;
    let window = Duration::from_secs(60);
    assert_eq!(mark(&mut tx, &key("event"), window).await?, Marked::First);
    assert_eq!(mark(&mut tx, &key("event"), window).await?, Marked::Duplicate);
    let marked = MarkOptions::new(window).mark_many(&mut tx, &[key("event"), key("nonce"), key("nonce")]).await?;
    assert_eq!(marked, [Marked::Duplicate, Marked::First, Marked::Duplicate]);
    tx.commit().await?;

    let charge =
        async || LeaseOptions::new(AT_MOST_ONCE).run(&pool, &key("charge"), "body", async |_| Ok::<_, Error>(1)).await;
    assert!(!charge().await?.is_replayed());
    assert!(charge().await?.is_replayed());
    let forgotten = async |_: &pg_idempotency::lease::Lease| {
        sqlx::query("delete from idempotency.record where operation = 'refund'").execute(&pool).await?;
        Ok::<_, Error>(1)
    };
    LeaseOptions::new(AT_MOST_ONCE).run(&pool, &key("refund"), "body", forgotten).await.expect_err("lost");
    let dropped = owner(&pool, LeaseOptions::new(AT_MOST_ONCE), &key("payout")).await;
    drop(dropped);

    assert_eq!(
        listener.spans(),
        [
            "mark mode=mark operation=event outcome=performed token=1",
            "mark mode=mark operation=event outcome=replayed token=1",
            "mark_many first=1 keys=3 mode=mark outcome=performed",
            "lease.run mode=at_most_once operation=charge outcome=performed",
            "lease.acquire mode=at_most_once operation=charge outcome=claimed token=2",
            "lease.complete mode=at_most_once operation=charge outcome=performed token=2",
            "lease.run mode=at_most_once operation=charge outcome=replayed",
            "lease.acquire mode=at_most_once operation=charge outcome=replayed token=2",
            "lease.run mode=at_most_once operation=refund outcome=lease_lost",
            "lease.acquire mode=at_most_once operation=refund outcome=claimed token=3",
            "lease.complete mode=at_most_once operation=refund outcome=lease_lost token=3",
            "lease.acquire mode=at_most_once operation=payout outcome=claimed token=4",
        ]
    );
    let text = listener.text();
    assert!(text.contains("its claim lapses"), "a dropped lease is logged\n{text}");
    assert!(!text.contains(SCOPE) && !text.contains(VALUE), "never the key or its scope\n{text}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_call_that_is_dropped_logs_in_its_span(pool: PgPool) -> anyhow::Result<()> {
    let (listener, _guard) = listen();
    let payout = key("payout");
    let never = async |_: &pg_idempotency::lease::Lease| std::future::pending::<Result<(), Error>>().await;
    let call = LeaseOptions::new(AT_MOST_ONCE).run(&pool, &payout, "body", never);
    tokio::time::timeout(Duration::from_secs(1), call).await.expect_err("the work never ends");
    let text = listener.text();
    assert!(text.lines().any(|line| line.starts_with("lease.run ") && line.contains("its claim lapses")), "{text}");
    Ok(())
}

/// The token joins the two spans, and the traces around them.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_spans_of_a_first_call_and_of_its_replays_have_the_token_of_the_record(pool: PgPool) -> anyhow::Result<()> {
    let (listener, _guard) = listen();
    for replay_first in [false, true] {
        let a = key(&replay_first.to_string());
        // After the retention, the key is new: the take-over is a first call with a token of its own.
        for _ in 0..2 {
            for replayed in [false, true, true] {
                let way = Idempotency::new().replay_first(replay_first);
                assert_eq!(way.run(&pool, &a, "body", async |_| Ok::<_, Error>(1)).await?.is_replayed(), replayed);
            }
            let spans = listener.spans();
            let [first, replays @ ..] = &spans[spans.len() - 3..] else { panic!("three spans") };
            let (_, token) = first.rsplit_once(" token=").expect("a token");
            assert!(
                replays.iter().all(|replay| replay.ends_with(&format!("outcome=replayed token={token}"))),
                "{spans:?}"
            );
            let shown = pg_idempotency::operator::show(&pool, &a).await?.expect("a record");
            assert_eq!(listener.tokens()[token.parse::<usize>()? - 1], shown.token.to_string());
            pg_idempotency::testing::expire(&pool, &a).await?;
        }
    }
    Ok(())
}

/// A service has fields of the same name, and a filter that leaves our spans out.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_outcome_is_told_to_no_span_of_the_callers(pool: PgPool) -> anyhow::Result<()> {
    let listener = Listener::default();
    let filtered = listener.clone().with_filter(LevelFilter::INFO);
    let _guard = tracing::subscriber::set_default(registry().with(filtered));

    let key = key("POST /orders");
    for _ in 0..2 {
        let call = Idempotency::new().run(&pool, &key, "body", async |_| Ok::<_, Error>(1));
        let span = info_span!("the caller's", outcome = tracing::field::Empty, token = tracing::field::Empty);
        let _ = call.instrument(span).await?;
    }
    assert_eq!(listener.spans(), ["the caller's "; 2]);
    Ok(())
}

/// The warning names the operation, the token of the record, and the step in doubt, so an operator can find the key.
#[cfg(feature = "axum")]
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_that_meets_a_step_in_doubt_is_a_warning(pool: PgPool) -> anyhow::Result<()> {
    use axum::http::StatusCode;
    use axum::routing::post;
    use pg_idempotency::http::IdempotencyLayer;
    use pg_idempotency::lease::Lease;

    let (listener, _guard) = listen();
    let send = async |lease: Lease| {
        let sent = lease.step_at_most_once("text", async |_| Err::<i64, Error>(sqlx::Error::RowNotFound.into())).await;
        sent.map_or(StatusCode::SERVICE_UNAVAILABLE, |_| StatusCode::CREATED)
    };
    let in_steps = Policy::InSteps { lease: Duration::from_secs(30) };
    let layer = IdempotencyLayer::leased(pool.clone(), LeaseOptions::new(in_steps), |_| Ok(SCOPE.to_owned()));
    let app = axum::Router::new().route("/texts", post(send)).layer(layer);
    // The repeats are counted with the metrics, and left out of the log for a minute.
    let repeats = [StatusCode::CONFLICT; 3];
    for status in [StatusCode::SERVICE_UNAVAILABLE].into_iter().chain(repeats) {
        assert_eq!(post_to(&app, "/texts").await?, status);
    }
    let token: i64 = sqlx::query_scalar("select token from idempotency.record").fetch_one(&pool).await?;
    let text = listener.text();
    let warnings: Vec<_> = text.lines().filter(|line| line.contains("waits for an operator")).collect();
    let [warning] = warnings[..] else { panic!("{warnings:?}") };
    for field in
        [r#""kind": "indeterminate""#, r#""operation": "POST /texts""#, r#""steps": "[\"text\"]""#, &token.to_string()]
    {
        assert!(warning.contains(field), "{field}: {warning}");
    }
    assert!(!text.contains(SCOPE) && !text.contains(VALUE), "{text}");
    Ok(())
}

/// Under AtMostOnce, the refusal of a router or of an extractor leaves its key to an operator. The warning comes once
/// for each route. It does not come if the handler has used its lease, or if the refusal is a proof.
#[cfg(feature = "axum")]
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_request_that_does_not_reach_its_handler_under_at_most_once_is_a_warning(pool: PgPool) -> anyhow::Result<()> {
    use axum::extract::DefaultBodyLimit;
    use axum::http::{Request, StatusCode};
    use axum::routing::{get, post};
    use axum::{Json, Router};
    use pg_idempotency::http::{IdempotencyLayer, LeasedBody, method_not_allowed};
    use pg_idempotency::lease::Lease;

    let (listener, _guard) = listen();
    let layer = |policy| IdempotencyLayer::leased(pool.clone(), LeaseOptions::new(policy), |_| Ok(SCOPE.to_owned()));
    let separate = async |_: Lease, _: Json<String>| StatusCode::CREATED;
    let together = async |_: LeasedBody<Json<String>>| StatusCode::CREATED;
    let passes_on = async |lease: Lease| {
        assert_eq!(lease.downstream_key().len(), 32);
        StatusCode::UNSUPPORTED_MEDIA_TYPE
    };
    let steps = async |lease: Lease| {
        let _ = lease.step("charge", async |_| Ok::<_, Error>(1)).await;
        StatusCode::PAYLOAD_TOO_LARGE
    };
    let declares = async |lease: Lease| lease.not_performed(StatusCode::UNSUPPORTED_MEDIA_TYPE);
    let routes = || {
        Router::new()
            .route("/separate", post(separate))
            .route("/also", post(separate))
            .route("/together", post(together))
            .route("/passes", post(passes_on))
            .route("/steps", post(steps))
            .route("/declares", post(declares))
            .route("/refuses", post(async |_: Lease| StatusCode::BAD_REQUEST))
            .route("/read", get(async || "read"))
            .layer(DefaultBodyLimit::max(10))
    };
    let at_most_once = routes().route_layer(layer(AT_MOST_ONCE));
    let with_fallback = routes().method_not_allowed_fallback(method_not_allowed).route_layer(layer(AT_MOST_ONCE));
    let at_least_once = routes().route_layer(layer(AT_LEAST_ONCE));
    let (text, large) = ("text/plain", "application/json");
    let mut asked = 0;
    for (app, path, kind, status, warns) in [
        (&at_most_once, "/separate", text, 415, true),
        (&at_most_once, "/separate", large, 413, false),
        (&at_most_once, "/also", large, 413, true),
        (&at_most_once, "/read", text, 405, true),
        (&at_most_once, "/read", text, 405, false),
        (&at_most_once, "/together", text, 415, false),
        (&at_most_once, "/together", large, 413, false),
        (&at_most_once, "/passes", text, 415, false),
        (&at_most_once, "/steps", text, 413, false),
        (&at_most_once, "/declares", text, 415, false),
        (&at_most_once, "/refuses", text, 400, false),
        (&with_fallback, "/read", text, 405, false),
        (&at_least_once, "/separate", text, 415, false),
        (&at_least_once, "/read", text, 405, false),
    ] {
        asked += 1;
        let request = Request::post(path).header("idempotency-key", format!("{VALUE}{asked}"));
        let request = request.header("content-type", kind).body(axum::body::Body::from("\"0123456789\""))?;
        let before = listener.text().len();
        let answer = tower::ServiceExt::oneshot(app.clone(), request).await?;
        assert_eq!(answer.status(), status, "{path} {kind}");
        let said = listener.text().split_off(before);
        let warnings: Vec<_> =
            said.lines().filter(|line| line.contains("before any code had used its lease")).collect();
        assert_eq!(warnings.len(), usize::from(warns), "{path} {kind}: {said}");
        for warning in warnings {
            for part in [&format!("POST {path}"), &status.to_string(), "LeasedBody", "not_found", "method_not_allowed"]
            {
                assert!(warning.contains(part), "{part}: {warning}");
            }
        }
    }
    assert!(!listener.text().contains(SCOPE) && !listener.text().contains(VALUE), "{}", listener.text());
    Ok(())
}

/// A call gets an error that another call may not get. A person has to know of the cause all the same.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_way_to_the_server_that_fails_is_an_error_that_says_what_to_do(pool: PgPool) -> anyhow::Result<()> {
    let listener = Listener::default();
    let errors = registry().with(listener.clone().with_filter(LevelFilter::ERROR));
    let _guard = tracing::subscriber::set_default(errors);
    let call = async |pool: &PgPool, operation: &str| {
        Idempotency::new().run(pool, &key(operation), "body", async |_| Ok::<i64, Error>(1)).await
    };
    let alone = pool_of(1, &pool.connect_options()).await;
    let _ = call(&alone, "prepares").await?;
    sqlx::raw_sql("deallocate all").execute(&alone).await?;
    assert!(call(&alone, "loses").await.is_err_and(|error| error.is_transient()));
    let stranger = rig::database::options(&pool).username("nobody-has-this-name");
    let refused = pool.options().clone().connect_lazy_with(stranger);
    for _ in ["first", "again"] {
        assert!(call(&refused, "refused").await.is_err_and(|error| error.is_transient()));
    }
    let text = listener.text();
    for line in ["see the guide's page poolers", "the database refuses the role, the password or the database's name"] {
        // Each call may meet them, so they are written once in a minute.
        assert_eq!(text.matches(line).count(), 1, "{line}: {text}");
    }
    assert!(!text.contains(SCOPE) && !text.contains(VALUE), "{text}");
    Ok(())
}

/// The layer logs the cause of a mistake in the set-up. The server's detail would quote the key. A client's mistake
/// must not look like one of them.
#[cfg(feature = "axum")]
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn mistakes_in_the_set_up_of_the_layer_are_errors_without_the_key(pool: PgPool) -> anyhow::Result<()> {
    use axum::http::StatusCode;
    use axum::routing::post;
    use pg_idempotency::http::IdempotencyLayer;

    let (listener, _guard) = listen();
    // A key in another mode; a record that the server refuses; a table that is missing.
    let mut tx = pool.begin().await?;
    assert_eq!(mark(&mut tx, &key("POST /texts"), Duration::from_secs(60)).await?, Marked::First);
    tx.commit().await?;
    let app = axum::Router::new()
        .route("/declined", post(async || StatusCode::UNPROCESSABLE_ENTITY))
        .route("/texts", post(async || StatusCode::CREATED))
        .route("/refused", post(async || StatusCode::CREATED))
        .layer(transactional(&pool));
    assert_eq!(post_to(&app, "/declined").await?, StatusCode::UNPROCESSABLE_ENTITY);
    let refused = "alter table idempotency.record add check (operation <> 'POST /refused')";
    for (path, change, cause) in [
        ("/texts", "select 1", "the key belongs to mode mark"),
        ("/refused", refused, "violates check constraint"),
        ("/texts", "drop table idempotency.record", "is missing or too old"),
    ] {
        sqlx::query(change).execute(&pool).await?;
        assert_eq!(post_to(&app, path).await?, StatusCode::INTERNAL_SERVER_ERROR, "{path}");
        let text = listener.text();
        let logged: Vec<_> = text.lines().filter(|line| line.contains("mistake in the service's set-up")).collect();
        assert!(logged.last().is_some_and(|line| line.contains(cause)), "{cause}\n{logged:?}");
        // At `info`, no span has its name.
        let operation = format!("\"operation\": \"POST {path}\"");
        assert!(logged.last().is_some_and(|line| line.contains(&operation)), "{operation}\n{logged:?}");
        assert!(!text.contains(SCOPE) && !text.contains(VALUE), "never the key or its scope\n{text}");
    }
    let spans = listener.spans();
    let of_a_request = "http.transaction mode=transaction operation=POST /";
    let outcomes: Vec<_> = spans.iter().filter_map(|span| span.strip_prefix(of_a_request)).collect();
    assert_eq!(
        outcomes,
        ["declined outcome=failed token=2", "texts outcome=other_mode", "refused outcome=error", "texts outcome=error"]
    );
    // A request without a key, which needs no connection, has the only place.
    let brief = sqlx::postgres::PgPoolOptions::new()
        .acquire_timeout(Duration::from_millis(20))
        .connect_lazy_with(pool.connect_options().as_ref().clone());
    let layer = IdempotencyLayer::leased(brief, LeaseOptions::new(AT_LEAST_ONCE), |_| Ok(SCOPE.to_owned()));
    let layer = layer.optional_key(true).max_runs(1);
    let runs = layer.runs();
    let full = axum::Router::new()
        .route("/busy", post(async || std::future::pending::<StatusCode>().await))
        .route("/full", post(async || StatusCode::CREATED))
        .layer(layer);
    let busy = axum::http::Request::post("/busy").body(axum::body::Body::empty())?;
    let busy = tokio::spawn(tower::ServiceExt::oneshot(full.clone(), busy));
    while runs.count() == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(post_to(&full, "/full").await?, StatusCode::SERVICE_UNAVAILABLE);
    busy.abort();
    let counted = listener.text().lines().rfind(|line| line.contains("POST /full")).unwrap_or_default().to_owned();
    assert!(counted.contains("\"outcome\": \"overloaded\""), "counted with the metrics: {counted}");
    pool.close().await;
    assert_eq!(post_to(&app, "/texts").await?, StatusCode::SERVICE_UNAVAILABLE);
    let text = listener.text();
    let refused = text.lines().rfind(|line| line.contains("could not be made idempotent")).unwrap_or_default();
    assert!(refused.contains("\"operation\": \"POST /texts\""), "{text}");
    Ok(())
}

/// The probes of one record do not decode. The other records are probed, and the warning has no key.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_whose_probes_do_not_decode_is_left_out_with_a_warning(pool: PgPool) -> anyhow::Result<()> {
    use pg_idempotency::lease::{Finding, InDoubt, Reconciler, Visit};
    use pg_idempotency::testing::lapse;

    let (listener, _guard) = listen();
    let leasing = LeaseOptions::new(Policy::AtMostOnce { lease: Duration::from_secs(30) }).store_request(true);
    let of_value = |value| Key::new(SCOPE, "POST /texts", value);
    for value in ["malformed", "sound"] {
        drop(leasing.acquire::<i32, _>(&pool, &of_value(value)?, "body").await?);
        lapse(&pool, &of_value(value)?).await?;
    }
    let reconciler = Reconciler::new(leasing, "POST /texts", Duration::from_secs(60))?;
    let looks_up = async |asked: &InDoubt| {
        assert_eq!(asked.key.value(), "sound");
        Ok::<_, Error>(Finding::Unknown)
    };
    assert_eq!(reconciler.visit_one(&pool, looks_up).await?, Visit::Noted);
    assert!(!listener.text().contains("left out"), "{}", listener.text());
    sqlx::query(
        "update idempotency.record set probes = jsonb_set(jsonb_set(probes, '{of,0,next}', '1'), '{of,0,no_trace}',
            case value when 'malformed' then '\"none\"'::jsonb else '0'::jsonb end)",
    )
    .execute(&pool)
    .await?;
    assert_eq!(reconciler.visit_one(&pool, looks_up).await?, Visit::Undecided);
    let text = listener.text();
    let warnings: Vec<_> = text.lines().filter(|line| line.contains("does not decode was left out")).collect();
    let [warning] = warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains(r#""operation": "POST /texts""#), "{warning}");
    // An operator sees the record without them.
    let shown = pg_idempotency::operator::show(&pool, &of_value("malformed")?).await?.expect("a record");
    assert_eq!((shown.probes.len(), shown.state.to_string().as_str()), (0, "indeterminate"));
    assert!(listener.text().contains("the probes of a record do not decode"), "{}", listener.text());
    assert!(!text.contains(SCOPE), "{text}");
    Ok(())
}

/// An error of the work is the service's own. What the crate adds to it has no key.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_resumer_logs_errors_and_panics_without_the_key(pool: PgPool) -> anyhow::Result<()> {
    use pg_idempotency::lease::{Lease, Resumer};
    use pg_idempotency::testing::{age, lapse};

    let (listener, _guard) = listen();
    let leasing =
        LeaseOptions::new(AT_LEAST_ONCE).store_request(true).max_attempts(std::num::NonZeroU32::MIN.saturating_add(3));
    for operation in ["fails", "panics"] {
        let key = key(operation);
        let lease = owner(&pool, leasing, &key).await;
        drop(lease);
        lapse(&pool, &key).await?;
        age(&pool, &key, Duration::from_secs(60)).await?;
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let stop = std::sync::Mutex::new(Some(stop));
        let work = async |lease: &Lease, _: String| -> Result<i64, Error> {
            drop(stop.lock().expect("no panic holds it").take());
            match lease.key().operation() {
                "panics" => panic!("on purpose"),
                _ => Err(Error::Database(sqlx::Error::RowNotFound)),
            }
        };
        let resumer = Resumer::new(leasing, operation)?.interval(Duration::from_millis(100));
        resumer.run(&pool, async { drop(stopped.await) }, work).await;
    }
    let text = listener.text();
    assert!(text.contains("a resumed operation failed") && text.contains("a resumed operation panicked"), "{text}");
    assert!(!text.contains(SCOPE) && !text.contains(VALUE), "never the key or its scope\n{text}");
    Ok(())
}

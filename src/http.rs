//! `Idempotency-Key` over HTTP, after draft-ietf-httpapi-idempotency-key-header-07: a tower layer for axum and
//! hyper.
//!
//! ```
//! # #[cfg(feature = "axum")] {
//! use axum::{Router, http::StatusCode, routing::post};
//! use pg_idempotency::Idempotency;
//! use pg_idempotency::http::{IdempotencyLayer, IdempotentTx};
//!
//! /// The authentication, further out, puts this into the request.
//! #[derive(Clone)]
//! struct Account(String);
//!
//! async fn pay(mut tx: IdempotentTx, body: String) -> Result<String, StatusCode> {
//!     let insert = sqlx::query_scalar("insert into payment (what) values ($1) returning id::text").bind(body);
//!     insert.fetch_one(&mut *tx).await.map_err(|_| StatusCode::SERVICE_UNAVAILABLE)
//! }
//!
//! fn router(pool: sqlx::PgPool) -> Router {
//!     let idempotency = IdempotencyLayer::transactional(pool, Idempotency::new(), |request| {
//!         let Account(id) = request.extensions.get().ok_or(StatusCode::UNAUTHORIZED)?;
//!         Ok(id.clone())
//!     });
//!     Router::new().route("/payments", post(pay)).route_layer(idempotency)
//! }
//! # let _ = router; }
//! ```
//!
//! # What happens to a request
//!
//! The first rule that applies decides. With [`key_from`](IdempotencyLayer::key_from) the key may be in the
//! body, so the rules 2 and 4 come before what 1 and 3 say of a missing or malformed key. [`Rejection`] lists the
//! answers that are not the handler's.
//!
//! 1. The layer does not [cover](IdempotencyLayer::methods) the method: the handler runs, unprotected. The key is
//!    missing and [optional](IdempotencyLayer::optional_key): the same, once the body is there (rule 4) and the
//!    request has a place (rule 5).
//! 2. The scope function returns an error: that is the response.
//! 3. The key is missing: 400 `missing-key`. It is malformed, or there are several: 400 `malformed-key`. `"abc"` and
//!    `abc` are the same key.
//! 4. The body is over its limit, or over one further out: 413. The layer first reads on, for up to eight limits and 10
//!    seconds, because a client that is still writing would see a reset in place of the answer. The body breaks off,
//!    ends before the length that it has announced, or comes [too slowly](#runs): 400 `broken-body`. It cannot be
//!    decoded: 400 `invalid-body`. There are [too many bytes](#runs) of other requests: 503 `overloaded`. Up to here
//!    nothing is claimed, and no place and no connection is taken, however slow the upload is.
//! 5. The request becomes a *run*, which is a task of its own: **a client that hangs up changes nothing**, and gets the
//!    answer when it asks again. With too many runs, of all or of its scope, it waits for a place, and then the answer
//!    is a 503 `overloaded`. The run claims the key. If the database is unreachable, the answer is a 503, and the
//!    handler does not run. If it refuses a statement that a retry would send again, or the table is missing, the
//!    answer is a 500.
//! 6. The key came with [another request](#what-makes-two-requests-the-same): 422 `key-reused`. A transaction of
//!    another process is invisible until it commits, so the answer is `in-flight` until then.
//! 7. The first request is in flight: 409 `in-flight` with `Retry-After`, or a [bounded
//!    wait](crate::Idempotency::on_duplicate).
//! 8. Its outcome is unknown, or it failed as often as it may: 409 `indeterminate`, 409 `exhausted`.
//! 9. The first request was answered: **the same answer**, with the same status, the [allowed
//!    headers](IdempotencyLayer::replay_header), the same bytes, and `Idempotent-Replayed: true`. If the
//!    response was not stored (too large, a stream, a secret): 409 `not-replayable`. If the record has a
//!    [reference](AnswerBy), the answer is [rebuilt](IdempotencyLayer::replay); if the reference no longer
//!    resolves: 410 `gone`.
//! 10. Otherwise the handler runs. A response
//!     - **below 400** is stored with the key, committed, and then sent. A commit that fails is a 500 if the database
//!       refuses it (a deferred constraint), and a 503 if a retry may succeed or the connection was lost.
//!     - of a [chosen status](IdempotencyLayer::store_errors) is stored, too. The handler's writes are undone.
//!     - of any other status undoes everything and frees the key, so that a corrected request may use it. So do an
//!       error, a panic, and a handler that takes [too long](IdempotencyLayer::run_timeout).
//!
//! Under a [lease](IdempotencyLayer::leased), effects outside are not undone. An error that is not of a chosen status
//! frees the key for the same body under `AtLeastOnce` and in steps. **Under `AtMostOnce` it leaves the key
//! indeterminate**, for an operator, also if it is a 4xx of an extractor, or axum's own 404 or 405. A handler that has
//! done nothing says so with [`Lease::not_performed`](crate::lease::Lease::not_performed). A 4xx of the first attempt
//! frees the key for any body if [`LeasedBody`] or a fallback of this module ([`not_found`], [`method_not_allowed`])
//! has refused the request, and in steps before the first step. The guide's page `http` has all cases.
//!
//! Every response of the layer to a request with one `Idempotency-Key` echoes it, as this request sent it: first
//! answers, replays, rejections, and errors of the scope function. It replaces the echo of another service, which a
//! handler has passed on. A key [from another place](IdempotencyLayer::key_from) is not echoed. The echo is not
//! stored. `docs/standards.md` compares the layer with the draft and with Stripe, line by line.
//!
//! # Where to put it
//!
//! From the outside in: authentication, limits of size and rate, signature checks, **this layer**, the handler. A layer
//! outside also runs for a replay, so a user whose access was revoked reads nothing; a layer inside does not.
//! Compression belongs outside, or the stored body is compressed. A limit of concurrent requests inside counts a
//! request when its body is there. A time-out belongs outside, where its 408 or 504 leaves the run alone. **Code that
//! retries the handler belongs outside**: inside, the second attempt would write into a transaction that still has the
//! first one's writes, so it gets no transaction, and nothing is committed. Under `AtMostOnce` it gets no lease. A
//! second layer on the same route is refused, also with another key.
//!
//! **A response of unknown length is held back until its end, for up to a second**, because only a whole response can
//! be stored. The transaction is open meanwhile. A `text/event-stream` is held back for a tenth of a second. With
//! [`NoStore`], nothing is held back, and nothing can be replayed.
//!
//! **gRPC methods do not belong behind the layer**: a call that fails has the status 200 and says so after the body, so
//! the layer refuses its response, and commits nothing. So it does for a stream of Connect. Call
//! [`ensure_idempotent`](crate::ensure_idempotent()) in the method.
//!
//! In axum add the layer with `Router::route_layer`: there the matched route names the operation, and unknown paths
//! stay a 404. **Enable the feature `axum`**, without which a nested router hides the front of the path.
//!
//! A run has the span of its request, but **not the task-locals of the layers outside** (`tokio::task_local!`). Pass
//! such values in the request's extensions, where the handler also finds the [`Key`](crate::Key), if there is one, and
//! what [`IdempotentTx`] and [`Lease`](crate::lease::Lease) take. A panic of the handler continues on the connection's
//! task: the client sees a cut connection, or the answer of a `CatchPanicLayer` further out.
//!
//! **Between the connection and this layer, do not move a request into a task of its own** (`tokio::spawn` in a
//! middleware). If a client resets its upload over HTTP/2, hyper can end the body as if it were whole: with `NO_ERROR`,
//! which some proxies make of every reset, and in hyper 1.9 and before also with `CANCEL`. It then drops the request.
//! So after the end of each body the layer lets hyper do this before it begins. In a task of its own the request lives
//! on, and without a `content-length` nothing shows that the body is cut off. For the same reason, an answer without a
//! length that another service cuts off, and that a handler passes on, is stored as if it were whole.
//!
//! # What makes two requests the same
//!
//! By default: method, path with query, and body, byte by byte. **If the effect or the answer depends on a header** (an
//! account, a currency), [add it](IdempotencyLayer::fingerprint_header), or one account gets the response of
//! another. The trailers of a request do not reach the handler. For clients that build the body anew for each attempt
//! there are [other choices](IdempotencyLayer::canonical_json).
//!
//! - **A multipart form** that a client builds anew has another boundary, and is another request: a 422. No setting
//!   helps, so the client keeps the bytes for its retry.
//! - **A body that a client compresses anew** may have other bytes. A layer outside that decompresses requests
//!   (tower-http's `RequestDecompressionLayer`) repairs it.
//!
//! After a change of these settings, a retry of an earlier request
//! gets a 500 (`misconfigured`) until its key expires.
//!
//! # Runs
//!
//! A run outlives its client, so no limit further out bounds runs: without one, clients that hang up and continue with
//! another key would leave any number of them behind, each with its body. The layer bounds their
//! [number](IdempotencyLayer::max_runs) and their [time](IdempotencyLayer::run_timeout), which includes the
//! layer's own statements. A graceful shutdown of the server does not wait for them either: after it, wait for
//! [`Runs::finished`].
//!
//! A request waits for its place among the runs in the order of arrival, for as long as the pool waits for a connection
//! (`acquire_timeout`), or for the wait of the options if that is longer, and ends with its client meanwhile. **A storm
//! of requests with one key costs other keys time and nothing else, and a storm of one scope costs other scopes no
//! more**: each queues for [places of its own](IdempotencyLayer::max_runs_of_one_scope) first. A layer counts its
//! own runs only: if several layers share a pool, set the bounds so that their sum leaves a connection to others. A
//! duplicate that waits for another process asks again every half second at most, and has no place in between.
//!
//! **The requests that upload or wait have no place yet, so their bytes have a bound**: one largest
//! [body](IdempotencyLayer::request_limit) for each place. One scope may hold half of it, and so may the requests
//! without a key together. Bytes count from their arrival until the handler reads them. A request that finds no room is
//! refused at once. An upload may take 30 seconds, and a second more for each 16 kB that has arrived. So an account
//! that stalls many uploads refuses its own requests, and several such accounts those of others: limit their rate
//! further out.
//!
//! If the database is down, sqlx waits for a connection for the pool's `acquire_timeout`, by default 30 seconds, and
//! only then the layer answers 503, which most clients would never see. **Set 3 seconds**:
//! `PgPoolOptions::new().acquire_timeout(Duration::from_secs(3))`.
//!
//! # Costs
//!
//! A first call costs two more round trips than the handler in a transaction of its own, and a replay takes four, or
//! one with [`round_trips`](crate::Idempotency::round_trips). `docs/performance.md` of the package has measurements.

mod body;
mod handler;
mod layer;
mod leased;
mod places;
mod rejection;
mod replay;
mod request;
mod resume;
mod service;
mod transactional;

pub use body::LayerBody;
pub use handler::{LastError, NoStore};
pub use layer::IdempotencyLayer;
pub use leased::NoLease;
#[cfg(feature = "axum")]
pub use leased::{LeasedBody, method_not_allowed, not_found};
pub use places::Runs;
pub use rejection::{Denied, Rejection, problem};
pub use replay::{AnswerBy, IDEMPOTENT_REPLAYED, Replay};
pub use request::IDEMPOTENCY_KEY;
pub use resume::{Decision, RequestResumer, ResumedRequest};
pub use service::IdempotencyService;
pub use transactional::{IdempotentTx, NoTransaction};

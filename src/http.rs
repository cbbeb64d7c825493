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
//! The first rule that applies decides. With [`key_from`](IdempotencyLayer::key_from), the key may be in the body, so
//! rules 2 and 4 come before the parts of 1 and 3 about the key. [`Rejection`] lists the answers that are not the
//! handler's.
//!
//! 1. The layer does not [cover](IdempotencyLayer::methods) the method: the handler runs, unprotected. The same holds
//!    without a key if the key is [optional](IdempotencyLayer::optional_key), once the body was read (rule 4) and the
//!    request has a place (rule 5).
//! 2. The scope function returns an error: this is the response.
//! 3. The key is missing: 400 `missing-key`. It is malformed, or there are several keys: 400 `malformed-key`. `"abc"`
//!    and `abc` are the same key.
//! 4. The body cannot be used. Nothing is claimed, and the request holds neither a place nor a connection, however slow
//!    its upload is.
//!    - The body is over its limit, or over a limit further out: 413 `body-too-large`. The layer first reads on, for up
//!      to eight limits and 10 seconds, because a client that is still writing would see a reset instead of the answer.
//!    - It breaks off, ends before the length that it has announced, or comes [too slowly](#runs): 400 `broken-body`.
//!    - It cannot be decoded: 400 `invalid-body`.
//!    - [Too many bytes](#runs) of other requests wait: 503 `overloaded`.
//! 5. The request becomes a *run*, which is a task of its own. **A client that hangs up changes nothing**, and gets the
//!    answer by its retry. The run claims the key.
//!    - There are too many runs, of all scopes or of this one, and no place becomes free in time: 503 `overloaded`.
//!    - The database is unreachable: 503 `unavailable`. The handler does not run.
//!    - The table is missing, or the database refuses a statement and would refuse it again: 500 `misconfigured`.
//! 6. An earlier request had the key and was [another request](#what-makes-two-requests-the-same): 422 `key-reused`. If
//!    its transaction is still open in another process, the answer is `in-flight`, because its body is not visible yet.
//! 7. The first request is in flight: 409 `in-flight` with `Retry-After`, or a [bounded
//!    wait](crate::Idempotency::on_duplicate).
//! 8. The outcome of the first request is unknown: 409 `indeterminate`. The operation has used up its attempts: 409
//!    `exhausted`.
//! 9. The first request was answered: **the same answer**, with the same status, the [allowed
//!    headers](IdempotencyLayer::replay_header), the same bytes, and `Idempotent-Replayed: true`.
//!    - Its response was not stored (too large, a stream, a secret): 409 `not-replayable`.
//!    - Its record has a [reference](AnswerBy): the answer is [rebuilt](IdempotencyLayer::replay), or a 410 `gone` if
//!      the reference does not resolve any more.
//! 10. Otherwise the handler runs. A response
//!     - **below 400** is stored with the key, committed, and then sent. A commit that fails is a 500 if the database
//!       refuses it (a deferred constraint), and a 503 if a retry may succeed or the connection was lost.
//!     - of a [chosen status](IdempotencyLayer::store_errors) is stored, too. The handler's writes are undone.
//!     - of any other status undoes everything and frees the key for a corrected request. So does an error, a panic, or
//!       a handler that takes [too long](IdempotencyLayer::run_timeout).
//!
//! Under a [lease](IdempotencyLayer::leased), effects outside the database are not undone. An error without a chosen
//! status frees the key for the same body under `AtLeastOnce` and `InSteps`. **Under `AtMostOnce` it leaves the key
//! indeterminate**, also if it is a 4xx of an extractor, or axum's own 404 or 405. A handler that has done nothing says
//! so with [`Lease::not_performed`](crate::lease::Lease::not_performed). The guide's page `http` lists the 4xx that
//! free the key for any body: see [`LeasedBody`].
//!
//! The layer adds the `Idempotency-Key` of the request to every response. If a handler passes on the response of
//! another service, the layer replaces the `Idempotency-Key` of that service. A key [from another
//! place](IdempotencyLayer::key_from) is not added. `docs/standards.md` compares the layer with the draft and with
//! Stripe.
//!
//! # Where to put it
//!
//! From the outside in: authentication, limits of size and rate, signature checks, **this layer**, the handler. In axum
//! add the layer with `Router::route_layer`: there the matched route names the operation, and unknown paths stay a 404.
//! **Enable the feature `axum`**, without which a nested router hides the front of the path. A second layer on the same
//! route is refused, also with another key.
//!
//! - Layers outside also run for a replay, so a user whose access was revoked gets no stored answer. Layers inside do
//!   not run.
//! - **Code that retries the handler belongs outside.** Inside, the second attempt would write into a transaction that
//!   has the writes of the first attempt. So it gets no transaction, and nothing is committed. Under `AtMostOnce` it
//!   gets no lease.
//! - Compression belongs outside, or the stored body is compressed. A time-out belongs outside, where its 408 or 504
//!   leaves the run alone. A limit of concurrent requests inside does not count requests that still upload.
//! - `CatchPanicLayer` belongs outside. A panic of the handler continues on the connection's task, so without such a
//!   layer the client sees a cut connection.
//! - Task-locals of the layers outside do not reach the handler (`tokio::task_local!`). Pass values in the request's
//!   extensions, where the handler also finds the [`Key`](crate::Key), if there is one. A run has the span of its
//!   request.
//!
//! **Between the connection and this layer, do not move a request into a task of its own** (`tokio::spawn` in a
//! middleware). If a client resets its upload over HTTP/2, hyper can end the body as if the upload were complete. Then
//! hyper drops the request. This happens after a reset with `NO_ERROR`, into which some proxies turn every reset. Up to
//! hyper 1.9 it also happens after `CANCEL`. So after the end of each body, the layer gives hyper the time to drop the
//! request before the run begins. In a task of its own the request lives on, and without a `content-length` nothing
//! shows that the body is cut off. The same holds for the answer of another service that has no length. If the answer
//! is cut off and the handler passes it on, the layer stores it as if it were whole.
//!
//! **A response of unknown length is held back until its end, for up to a second**, because only a whole response can
//! be stored. The transaction is open meanwhile. A `text/event-stream` is held back for a tenth of a second. With
//! [`NoStore`], nothing is held back, and nothing can be replayed.
//!
//! **Put no gRPC methods or Connect streams behind the layer.** A call that fails has the status 200 and its error
//! after the body, so the layer refuses the response and commits nothing. Call
//! [`ensure_idempotent`](crate::ensure_idempotent()) in the method.
//!
//! # What makes two requests the same
//!
//! By default: method, path with query, and body, byte by byte. **If the effect or the answer depends on a header** (an
//! account, a currency), [add it](IdempotencyLayer::fingerprint_header), or one account gets the response of another.
//! Trailers do not reach the handler. After a change of these settings, a retry of an earlier request gets a 500
//! `misconfigured` until its key expires.
//!
//! If clients build the body anew for each attempt, choose [`canonical_json`](IdempotencyLayer::canonical_json). It
//! does not help in two cases:
//!
//! - A multipart form that is built anew has another boundary, and the answer is a 422. The client has to keep the
//!   bytes for its retry.
//! - A body that is compressed anew may have other bytes. Decompress it in a layer outside (tower-http's
//!   `RequestDecompressionLayer`).
//!
//! # Runs
//!
//! A run outlives its client. So a limit further out does not bound runs: clients that hang up and continue with
//! another key would leave any number of them behind. The layer bounds their [number](IdempotencyLayer::max_runs) and
//! their [time](IdempotencyLayer::run_timeout). A graceful shutdown of the server does not wait for runs either: wait
//! for [`Runs::finished`] after it.
//!
//! A request waits for a place in the order of arrival. The wait ends with its client, or after the pool's
//! `acquire_timeout`, or after the wait of the options if that is longer. **A storm of requests with one key, or of one
//! scope, delays other requests, and does not refuse them**: it queues for [places of its
//! own](IdempotencyLayer::max_runs_of_one_scope) first. A duplicate that waits for another process asks the database
//! every half second at most, and has no place in between. A layer counts only its own runs. If several layers share a
//! pool, choose bounds whose sum leaves a connection to others.
//!
//! **The bytes of requests that upload or wait have a bound**: the size of one largest
//! [body](IdempotencyLayer::request_limit) for each place. One scope may hold half of it, and so may all requests
//! without a key. Bytes count from their arrival until the handler reads them. A request that finds no room is refused
//! at once. An upload may take 30 seconds, and one more second for each 16 kB that has arrived. So an account that
//! stalls many uploads refuses its own requests, and several such accounts refuse those of others: limit their rate
//! further out.
//!
//! If the database is down, the layer answers 503 after the pool's `acquire_timeout`. The default of sqlx is 30
//! seconds, and few clients wait so long. **Set 3 seconds**:
//! `PgPoolOptions::new().acquire_timeout(Duration::from_secs(3))`.

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

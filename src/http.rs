//! `Idempotency-Key` over HTTP, after draft-ietf-httpapi-idempotency-key-header-07: a tower layer for axum, hyper, tonic.
//!
//! ```
//! # #[cfg(feature = "axum")] {
//! use axum::{Router, http::StatusCode, routing::post};
//! use pg_idempotency::http::{IdempotencyLayer, IdempotentTx};
//!
//! /// Put into the request by the authentication, further out.
//! #[derive(Clone)]
//! struct Account(String);
//!
//! async fn pay(mut tx: IdempotentTx, body: String) -> Result<(StatusCode, String), StatusCode> {
//!     let id: i64 = sqlx::query_scalar("insert into payment (what) values ($1) returning id")
//!         .bind(body)
//!         .fetch_one(&mut *tx)
//!         .await
//!         .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
//!     Ok((StatusCode::CREATED, format!("{{\"id\":{id}}}")))
//! }
//!
//! fn router(pool: sqlx::PgPool) -> Router {
//!     let idempotency = IdempotencyLayer::transactional(pool, |request| {
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
//! The first rule that applies decides.
//!
//! 1. A method that is [not covered](IdempotencyLayer::with_methods) (POST and PATCH are): the handler, untouched.
//! 2. No key, where [none is required](IdempotencyLayer::with_optional_key): the handler, unprotected.
//! 3. The scope's function fails: its own response.
//! 4. No key: 400 `missing-key`. One that is malformed, or several: 400 `malformed-key`. `"abc"` and `abc` are one key.
//! 5. The body is over its limit: 413. It breaks off: 400. Nothing was claimed so far, however slow the upload was.
//! 6. From here on the run is a task of its own: **a client that hangs up changes nothing**, and finds the answer when it
//!    asks again. Too many runs are under way: 503 `overloaded`. The key is claimed. The database is away: 503, never an
//!    unprotected run. It refuses what a repeat would ask for again, or its table is missing: 500.
//! 7. The key came with another request (method, path with query, content type, body, or [what you
//!    chose](#what-makes-two-requests-the-same)): 422 `key-reused`. Also while the first is in flight, if it is under a lease
//!    or in this process; what another process does in a transaction cannot be seen before that commits, and is *in flight*
//!    until then.
//! 8. The first request is in flight: 409 `in-flight` with `Retry-After`; or a [bounded wait](IdempotencyLayer::with_in_flight)
//!    that holds no connection.
//! 9. Its outcome is unknown, or it failed as often as it may: 409 `indeterminate`, 409 `exhausted`.
//! 10. It was answered: **that answer**, with `Idempotency-Replayed: true`, which a first response never has: the status, the
//!     [allowed headers](IdempotencyLayer::with_replayed_header), the same bytes. Where it was not kept (too large, a stream,
//!     a secret): 409 `not-replayable`, and nothing runs.
//! 11. Otherwise the handler performs. Its response
//!     - **below 400** is stored with the key and committed, and then sent. A commit that fails is a 500 where the database has
//!       refused it (a deferred constraint), and a 503 where a repeat may succeed or the connection was lost.
//!     - of a [chosen status](IdempotencyLayer::with_stored_errors), "card declined", is stored too; what it wrote is undone.
//!     - of any other status, an error, a panic and a handler that takes [too
//!       long](IdempotencyLayer::with_run_timeout) undo all and free the key: a corrected request may use it.
//!
//! Rejections are `application/problem+json`; [`Rejection`] has the table. They can be told [in another
//! way](IdempotencyLayer::with_rejection).
//!
//! # Transactional or leased
//!
//! [`IdempotencyLayer::transactional`] is for effects in this database. The handler takes the layer's transaction, an
//! [`IdempotentTx`], and key, effects and response commit together, before the first byte is sent: exactly once. A handler that
//! succeeds under a key without having taken it is a mistake, a 500 and not stored: what it wrote elsewhere would not commit
//! with the key. For handlers without effects in this database, say
//! [`with_optional_transaction`](IdempotencyLayer::with_optional_transaction).
//!
//! [`IdempotencyLayer::leased`] is for handlers that call the outside. The claim is committed first, the handler runs under a
//! lease that renews itself, and the response is stored afterwards, as [`lease`](crate::lease) says: at least once or at most
//! once, by your choice. Rule 11 holds, with this difference: what was done outside is not undone. At least once, an error
//! frees the key. **At most once it leaves the key indeterminate**, whatever the status and also when an extractor has refused
//! the request, unless the response says [`NotPerformed`], or the handler was to say when its effect
//! [begins](IdempotencyLayer::with_explicit_begin) and has not.
//!
//! # Where to put it
//!
//! From the outside in: authentication, limits of size and rate, checks of signatures, **this layer**, the handler. What is
//! outside runs for a replay too, so a user whose access was revoked reads nothing; what is inside does not. Compression
//! belongs outside, or the stored body is a compressed one; so does a time-out, whose 408 or 504 then leaves the run alone.
//! **What retries the handler belongs outside too**: inside, its second attempt would write into the transaction that still
//! has the first one's writes. So the transaction is lent once for each request; a second take is refused, and
//! nothing is committed.
//! In axum add it by `Router::route_layer`, where the matched route is known and unknown paths stay a 404; elsewhere name the
//! operation by [`with_route`](IdempotencyLayer::with_route). **Give it the feature `axum` there:** without it a nested router
//! hides the front of the path, and with it whose account a request is for.
//!
//! A run is a task of its own, with the span of its request. **Task-locals of layers further out are not there**
//! (`tokio::task_local!`): hand over by the request's extensions what the handler needs, or set the task-local inside of this
//! layer.
//!
//! # gRPC
//!
//! A unary call is a POST whose status is at its end, in the trailers. So the layer reads a response of `application/grpc` to
//! its end before it commits, with a key and without, kept or not: a call that fails is undone. One that does not come to its
//! status within a second or 4 MiB is a 500, and undone as well, so long streams do not belong behind the layer. With gRPC-Web,
//! put the translation outside: inside, the status is in the body, where the layer does not look.
//!
//! # What makes two requests the same
//!
//! Under one key, a request with another method, path, query, content type or body is another request, and refused. Other
//! headers do not count. **A handler whose effect or answer depends on another header** (an account, a currency) needs
//! [`with_fingerprinted_header`](IdempotencyLayer::with_fingerprinted_header), or one account gets the other's response; where
//! it says whose the request is, it belongs into the scope. For clients that build the body anew for each attempt there are
//! [`with_canonical_json`](IdempotencyLayer::with_canonical_json) and, for bodies with a timestamp,
//! [`with_json_without`](IdempotencyLayer::with_json_without); [`with_fingerprint`](IdempotencyLayer::with_fingerprint) is the
//! choice as a whole. A fingerprint is of one choice: after a change of it, a request that repeats one from before is refused
//! until its key expires, and never gets a response that was meant for another.
//!
//! # What the handler gets
//!
//! The request, with its body whole. In its extensions, what the extractors [`IdempotentTx`] and [`IdempotentLease`] take, and
//! the [`Key`](crate::Key), where there is one. A panic of the handler's stays a panic, on the connection's task: a client
//! sees a cut connection, or what a `CatchPanicLayer` further out makes of it.
//!
//! # Bounds
//!
//! A run outlives its client, so what bounds connections or requests further out does not bound runs. The layer does, in number
//! and in time: [`with_max_runs`](IdempotencyLayer::with_max_runs), 32 for each connection of the pool by default, beyond
//! which a request is a 503 `overloaded`; and [`with_run_timeout`](IdempotencyLayer::with_run_timeout), 5 minutes by default,
//! after which the handler is dropped and the answer is a 503 `timed-out`.
//!
//! # Shutdown
//!
//! A run goes on without its client, so the server's own graceful shutdown does not wait for it. Wait for
//! [`Runs::finished`] after it, and end within a time-out: what is cut off is rolled back, or its lease lapses.
//!
//! # Costs
//!
//! Over the bare handler in a transaction of its own: two round trips, a task, and both bodies in memory, each to its limit
//! of 1 MiB. A replay is four round trips: begin, claim, look, rollback; one with
//! [`with_select_first`](IdempotencyLayer::with_select_first), and a first call one fewer with
//! [`with_fewest_round_trips`](IdempotencyLayer::with_fewest_round_trips). `docs/http.md` has the measurements, and the draft's
//! requirements one by one.

mod body;
mod conclusion;
mod fingerprint_choice;
mod grpc;
mod handler;
mod key_header;
mod layer;
mod leased;
mod local_in_flight;
mod misconfigured;
mod problem;
mod rejection;
mod replay;
mod request;
mod runs;
mod service;
mod settings;
mod transactional;

pub use body::LayerBody;
pub use conclusion::{NoStore, NotPerformed};
#[cfg(feature = "testing")]
pub(crate) use fingerprint_choice::plain_fingerprint;
pub use key_header::{IDEMPOTENCY_KEY, MalformedKey, key_value};
pub use layer::{IdempotencyLayer, InvalidSetting};
pub use leased::{IdempotentLease, Leased, NoLease};
pub use misconfigured::Misconfigured;
pub use problem::{PROBLEM_TYPE, problem, processing};
pub use rejection::Rejection;
#[cfg(feature = "testing")]
pub(crate) use replay::plain_response;
pub use replay::{IDEMPOTENCY_REPLAYED, Seal};
pub use runs::Runs;
pub use service::{IdempotencyService, ResponseFuture};
pub use settings::Denied;
pub use transactional::{IdempotentTx, NoTransaction, Transactional};

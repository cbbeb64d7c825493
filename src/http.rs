//! A tower layer for axum and hyper that implements `Idempotency-Key` over HTTP, as
//! draft-ietf-httpapi-idempotency-key-header-07 describes it.
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
//! The first of these rules that applies decides what happens to a request. With
//! [`key_from`](IdempotencyLayer::key_from), the key may be in the body. So the layer then applies rules 2 and 4 before
//! it looks for the key (rules 1 and 3). [`Rejection`] lists the answers that do not come from the handler.
//!
//! 1. If the layer does not [cover](IdempotencyLayer::methods) the method, the handler runs unprotected. If the key is
//!    [optional](IdempotencyLayer::optional_key), the handler also runs for a request without a key. The layer first
//!    reads the body of this request (rule 4), and gives the request a place (rule 5).
//! 2. If the scope function returns an error, this error is the response.
//! 3. If the key is missing, the answer is 400 `missing-key`. If the key is malformed, or there are several keys, the
//!    answer is 400 `malformed-key`. The quoted `"abc"` and the bare `abc` are the same key. Whether the key is [long
//!    enough](IdempotencyLayer::shortest_key) is checked after rule 4.
//! 4. If the body cannot be used, the layer refuses the request. No key is claimed yet. The request holds neither a
//!    place nor a connection, however slow its upload is.
//!    - If the body is over the limit of the layer or of an outer layer, the answer is 413 `body-too-large`. If the
//!      body exceeds the layer's own limit, the layer reads on before it answers, for at most 10 seconds and at most
//!      eight times the limit. Otherwise a client that is still writing would see a reset instead of the answer.
//!    - If the body breaks off, ends before its announced length, or comes [too slowly](#runs), the answer is 400
//!      `broken-body`.
//!    - If the body cannot be decoded, the answer is 400 `invalid-body`.
//!    - If other requests that wait hold [too many bytes](#runs), the answer is 503 `overloaded`, or 429
//!      `too-many-requests` if these requests are of the same scope.
//! 5. The request becomes a *run*, which is a task of its own and claims the key. **If the client hangs up, a run that
//!    has its [place](#runs) continues**, and a retry of the client gets the answer.
//!    - A duplicate of a request that this process is performing needs no place. Rules 6 and 7 decide about this
//!      duplicate before rule 5.
//!    - If no place becomes free in time, because the limit of the runs of this scope is reached, the answer is 429
//!      `too-many-requests`. If the limit of all runs is reached, the answer is 503 `overloaded`. If too many other
//!      requests with the same key wait for an answer, the answer is 409 `in-flight`.
//!    - If the database is unreachable, the answer is 503 `unavailable`, and the handler does not run.
//!    - If the table is missing, the answer is 500 `misconfigured`. If the database refuses a statement and would
//!      refuse it again, the answer is also 500 `misconfigured`.
//! 6. If an earlier request had the same key and was [a different request](#what-makes-two-requests-the-same), the
//!    answer is 422 `key-reused`. While the earlier request has an open transaction in another process, the layer
//!    cannot see its body yet, and answers `in-flight`.
//! 7. If the first request is in flight, the answer is 409 `in-flight` with `Retry-After`. With
//!    [`on_duplicate`](crate::Idempotency::on_duplicate), the second request can wait for a limited time instead.
//! 8. If the outcome of the first request is unknown, the answer is 409 `indeterminate`. If the operation has used up
//!    its attempts, the answer is 409 `exhausted`.
//! 9. If the first request was answered, a retry gets **the same answer**: the same status, the [allowed
//!    headers](IdempotencyLayer::replay_header), the same bytes, and `Idempotent-Replayed: true`. If the first response
//!    was not stored (too large, a stream, a secret), the answer is 409 `not-replayable`.
//! 10. If no other rule applies, the handler runs, and its response decides about the key.
//!     - A response **below 400** is stored with the key, committed, and then sent. If the database refuses the COMMIT
//!       (a deferred constraint), the answer is a 500. If the COMMIT fails but a retry may succeed, or if the
//!       connection is lost, the answer is a 503.
//!     - A response with a [chosen status](IdempotencyLayer::store_errors) is stored. The handler's writes are undone.
//!     - A response with any other status undoes everything, and frees the key for a corrected request. If the handler
//!       returns an error, panics, or takes [too long](IdempotencyLayer::run_timeout), everything is also undone, and
//!       the key is free.
//!
//! Under a [lease](IdempotencyLayer::leased), effects outside the database are not undone. Under `AtLeastOnce` and
//! `InSteps`, an error without a chosen status frees the key for the same body. **Under `AtMostOnce`, an error without
//! a chosen status leaves the key indeterminate**, even if it is a 4xx of an extractor, or axum's own 404 or 405. A
//! handler that has done nothing declares this with [`Lease::not_performed`](crate::lease::Lease::not_performed). The
//! guide's page `http` lists each 4xx that frees the key for any body (see [`LeasedBody`]).
//!
//! The layer adds the `Idempotency-Key` of the request to every response, unless the header has more than 512 bytes. If
//! a handler passes on the response of another service, the layer replaces the `Idempotency-Key` of that service. A key
//! that comes from [`key_from`](IdempotencyLayer::key_from) is not added to the response. `docs/standards.md` compares
//! the layer with the draft and with Stripe.
//!
//! # Where to put it
//!
//! The order from the outside to the inside is: authentication, limits of size and rate, signature checks, **this
//! layer**, the handler. In axum, add the layer with `Router::route_layer`. With `route_layer`, the matched route names
//! the operation, and the answer for an unknown path stays a 404. **Enable the feature `axum`**, because otherwise the
//! layer does not see the path prefix of a nested router. If two of these layers cover a request, the request is
//! refused, even if the layers use different keys. If the database has other services, give the layer the name of its
//! [`service`](IdempotencyLayer::service).
//!
//! - Outer layers also run for a replay, so a user whose access was revoked gets no stored answer. Inner layers do not
//!   run for a replay.
//! - **Put code that retries the handler outside this layer.** Inside the layer, the second attempt would write into a
//!   transaction that has the writes of the first attempt. So the second attempt gets no transaction, and nothing is
//!   committed. Under `AtMostOnce`, the second attempt gets no lease.
//! - Put CORS outside this layer, because `Access-Control-Allow-Origin` answers the `Origin` of one request. A replay
//!   does not repeat this header of a handler.
//! - Put compression outside this layer, because otherwise the stored body is compressed. Put a time-out outside this
//!   layer, so that its 408 or 504 does not end the run. An inner limit of concurrent requests does not count requests
//!   that upload.
//! - Put `CatchPanicLayer` outside this layer. A panic of the handler continues on the connection's task, so without a
//!   `CatchPanicLayer` the client sees a cut connection.
//! - Task-locals (`tokio::task_local!`) of outer layers do not reach the handler. Pass values in the request's
//!   extensions instead. The extensions also contain the [`Key`](crate::Key) of a request that has one. A run is in the
//!   tracing span of its request.
//!
//! **Between the connection and this layer, do not move a request into a task of its own** (`tokio::spawn` in a
//! middleware). If a client resets its upload over HTTP/2, hyper can end the body as if the upload were complete, and
//! then drop the request. So the layer gives hyper the time to drop the request before the run begins. But hyper does
//! not drop a request that was moved into a task of its own. Without a `content-length`, nothing then shows that the
//! body of this request is cut off. A response of another service can be cut off in the same way if it has no length.
//! If a handler passes on such a response, the layer stores it as if it were whole.
//!
//! **The layer holds back a response of unknown length until its end, for up to a second**, because only a whole
//! response can be stored. The transaction is open during this time. A `text/event-stream` is held back for up to a
//! tenth of a second. A response with [`NoStore`] is not held back, and cannot be replayed. The server computes the
//! `Content-Length` of a whole response. If the handler has announced a longer body, the answer is a 500
//! `misconfigured`, and nothing is stored.
//!
//! **Put no gRPC methods or Connect streams behind the layer.** A gRPC or Connect call that fails has the status 200,
//! and its error comes after the body. So the layer refuses these responses, and commits nothing. Call
//! [`ensure_idempotent`](crate::ensure_idempotent()) in the method instead.
//!
//! **Over GraphQL and JSON-RPC, a failed call has the status 200, too**, and the layer sees no error. So its writes
//! commit, and each retry gets the failure. Call `ensure_idempotent` in the mutation instead, or let a middleware
//! inside the layer turn an answer with errors into a 503. A query on the route of the mutations needs a key, too,
//! unless [`optional_key`](IdempotencyLayer::optional_key) is set.
//!
//! # Behind a proxy
//!
//! A proxy may send copies of a request, and the first copy may still run when the next copy arrives. For the layer,
//! each copy is a retry of the client, so the operation is performed once. But a proxy can hide, change and answer
//! requests:
//!
//! - **A client does not know how many copies of its request exist.** A copy that meets a running copy gets the 409
//!   `in-flight`, and the proxy may pass this answer on to a client that has sent one request. If a proxy sends a
//!   second copy because the first copy is slow, it then cancels the first copy, whose run continues. With
//!   [`on_duplicate`](crate::Idempotency::on_duplicate), the second copy waits instead.
//! - **A delayed copy may still be performed.** This happens after a 4xx of the handler, unless the status is one of
//!   [`store_errors`](IdempotencyLayer::store_errors). Under a lease, each retry of a proxy after a 5xx can use up an
//!   attempt.
//! - **A rewritten path may lead to another operation.** If both `/payments` and `/api/payments` are routes, and only
//!   some requests lose their prefix, a retry by the other route is performed again. If only the query, the body or a
//!   header of the fingerprint is rewritten, the answer to the retry is a 422.
//! - **A key can get lost.** Some proxies drop headers that they do not know. With
//!   [`optional_key`](IdempotencyLayer::optional_key), each retry is then performed again. So check that an answer
//!   through the proxy repeats the `Idempotency-Key`.
//! - **A proxy can write headers.** If a proxy puts the identity of the client into a header, the proxy must remove the
//!   client's own lines of this header. Otherwise the client chooses its scope.
//! - **A proxy can answer.** Let no proxy cache the answers of the covered methods, because a cache does not compare
//!   keys, and would send the answer of one client to another client. Let no proxy replace the bodies of errors,
//!   because the client needs `retryable`. Let the proxy refuse bodies over the
//!   [`request_limit`](IdempotencyLayer::request_limit). If the layer refuses a much larger body, the proxy may answer
//!   502 or 503, which clients retry.
//! - **A proxy can take a host out of service.** Envoy's outlier detection does this after five 5xx in a row. So if the
//!   requests of a scope exceed its share, the excess requests get a 429. But the answers `timed-out`, `unavailable`
//!   and `overloaded`, and each 5xx of a handler, count against the host.
//!
//! # What makes two requests the same
//!
//! By default, the layer compares the method, the path with its query, and the body, byte by byte. Requests of two
//! scopes have two keys, and are never compared. **If the effect or the answer depends on a header that is not part of
//! the scope** (a currency, a sub-account), [add this header](IdempotencyLayer::fingerprint_header) to the fingerprint.
//! Otherwise a request with one value of the header gets the response to another value. The trailers of a request do
//! not reach the handler. After a change of the settings of the fingerprint, a retry of an earlier request gets a 500
//! `misconfigured` until its key expires.
//!
//! If clients build the body anew for each attempt, choose [`canonical_json`](IdempotencyLayer::canonical_json). This
//! setting does not help in two cases:
//!
//! - A multipart form that is built anew has another boundary, so the answer to the retry is a 422. The client has to
//!   keep the bytes of the form for its retry.
//! - A body that is compressed anew may have other bytes. Decompress the body in an outer layer (tower-http's
//!   `RequestDecompressionLayer`).
//!
//! If each attempt has another query, as with signed URLs, remove the parameters that differ before the request reaches
//! the `Router`. The guide's page `http` has such a middleware.
//!
//! # Runs
//!
//! A run outlives its client. So an outer limit of concurrent requests does not bound the runs. Without another bound,
//! clients that hang up and continue with another key would leave any number of runs behind. So the layer bounds the
//! [number](IdempotencyLayer::max_runs) and the [time](IdempotencyLayer::run_timeout) of its runs. A graceful shutdown
//! of the server does not wait for runs, so wait for [`Runs::finished`] after the shutdown.
//!
//! Requests get places in the order of their arrival. A request stops waiting for its place when its client hangs up,
//! or after the pool's `acquire_timeout`. If the options set a wait for duplicates that is longer than the
//! `acquire_timeout`, the request waits for this longer time. **A storm of requests with one key, or of one scope,
//! delays other requests, but does not cause their refusal**, because the storm first queues for [places of its
//! own](IdempotencyLayer::max_runs_of_one_scope). A duplicate that waits for another process polls the database, with
//! pauses of up to half a second. During a pause, the duplicate gives its place back. Each layer counts only its own
//! runs. If several layers share a pool, choose bounds whose sum leaves a connection free.
//!
//! **The layer bounds the bytes of all requests that upload or wait.** The bound is the
//! [`request_limit`](IdempotencyLayer::request_limit) times [`max_runs`](IdempotencyLayer::max_runs). The requests of
//! one scope may hold at most half of these bytes. All requests without a key count as one scope. A byte counts from
//! its arrival until the handler reads it. A request that finds no room for its bytes is refused at once. An upload may
//! take 30 seconds, and one more second for each 16 kB that has arrived. So an account that stalls many uploads causes
//! the refusal of its own requests. Several accounts that do this also cause the refusal of other accounts' requests.
//! So limit the rate in an outer layer.
//!
//! If the database is down, the layer answers 503 after the pool's `acquire_timeout`. The default of sqlx is 30
//! seconds, but few clients wait so long. **Set the time-out to 3 seconds**:
//! `PgPoolOptions::new().acquire_timeout(Duration::from_secs(3))`.

mod body;
mod extensions;
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
pub use extensions::{IdempotentTx, LastError, NoLease, NoStore, NoTransaction};
#[cfg(feature = "axum")]
pub use extensions::{LeasedBody, method_not_allowed, not_found};
pub use layer::IdempotencyLayer;
pub use places::Runs;
pub use rejection::{Denied, Rejection, problem};
pub use replay::IDEMPOTENT_REPLAYED;
pub use request::IDEMPOTENCY_KEY;
pub use resume::{Decision, RequestResumer, ResumedRequest};
pub use service::IdempotencyService;

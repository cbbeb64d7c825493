//! The settings of the layer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, Method, Response, StatusCode};

use super::IdempotencyLayer;
use crate::Error;
use crate::fingerprint::Pointer;
use crate::http::fingerprint_choice::Compared;
use crate::http::places::Runs;
use crate::http::rebuild::Replay;
use crate::http::rejection::{Denied, Rejection};
use crate::http::replay::{NEVER_REPLAYED, to_record};
use crate::http::stored_request::NEVER_STORED;
use crate::lease::Finding;
use crate::limits::{RETENTION, is_in};

/// Which requests have a key, and which key it is.
impl IdempotencyLayer {
    /// The methods that the layer covers; it passes on all others unchanged. The default is POST and PATCH. HTTP
    /// defines the other methods as idempotent (RFC 9110, section 9.2.2), and your handlers must make them so.
    ///
    /// axum answers HEAD by the handler of GET. If you cover GET, also cover HEAD, or route it by itself: otherwise its
    /// handler finds no transaction or lease, and answers 500. With one key, GET and HEAD are two operations.
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        Self { methods: methods.into_iter().collect(), ..self }
    }

    /// Whether requests without a key are performed, each time they come. The default is `false`. A transactional layer
    /// gives them a transaction, too, so the handler needs no second form.
    ///
    /// Their bodies are read to the end before the handler runs, and [limited](Self::request_limit), as those with
    /// a key are. So set that limit to the one of the route, and leave routes that stream a body outside the layer.
    pub fn optional_key(self, optional: bool) -> Self {
        Self { key_required: !optional, ..self }
    }

    /// The fewest characters that the value of a key may have. The default is no minimum. A client that counts its
    /// requests repeats a short key by mistake, and then gets the answer to another request, or a 422. With 8
    /// characters, most counters are refused, and no UUID is. The answer is a 400 `malformed-key`, and nothing is done.
    ///
    /// The minimum holds for the header and for [`key_from`](Self::key_from). **A retry of an earlier request with a
    /// shorter key is refused, too**, and its client may take a new key and so repeat the operation. So set the minimum
    /// before clients send keys. A stored request is resumed and settled under any key.
    pub fn shortest_key(self, characters: usize) -> Self {
        Self { shortest_key: characters, ..self }
    }

    /// Takes the value of the key from another place than `Idempotency-Key`: from another header, or from a field of
    /// the body. `Ok(None)` means that the key is missing. If the function returns an error, that is the response. No
    /// response echoes such a key.
    pub fn key_from(
        self,
        value: impl Fn(&Parts, &Bytes) -> Result<Option<String>, Denied> + Send + Sync + 'static,
    ) -> Self {
        Self { key_from: Some(Arc::new(value)), ..self }
    }

    /// Names the operation by a function of the request. The default is the method and the route that axum has matched,
    /// without the names of its parameters: `POST /payments/{}`, and `{*}` for the rest of a path. `None` is a mistake
    /// of the service, and the answer is a 500. Return such a template: with real ids, every payment would be an
    /// operation and a time series of its own. If you use the path all the same, decode its percent-encoding, because
    /// `/a` and `/%61` would be two operations. If a [`Key`](crate::Key) refuses the text, the answer is a 400
    /// `malformed-key`.
    ///
    /// **The operation is a part of the key: if it changes, a retry of an earlier request is performed again.** A
    /// parameter that gets another name changes nothing. Another prefix or method does, and so does a route that is
    /// split, merged, or gets a `{*rest}` in place of a parameter. Before such a change, return the old text here,
    /// until the retention has passed. So does a [`RequestResumer`](crate::http::RequestResumer) of the old operation.
    pub fn operation(self, operation: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self { operation: Some(Arc::new(operation)), ..self }
    }
}

/// The fingerprint.
impl IdempotencyLayer {
    /// Compares bodies as canonical JSON instead of byte by byte: for clients that build the request anew for each
    /// retry. A body that is not JSON is then refused with a 400. A body without a canonical form is compared byte by
    /// byte, also in the parts that should be ignored: an object has two members of the same name, a string has half of
    /// a surrogate pair (`"\ud800"`), or the body is more than 128 levels deep.
    ///
    /// It ignores the parts at these JSON pointers (RFC 6901), for clients that put a timestamp or the number of the
    /// attempt into each body: `layer.canonical_json(["/sent_at", "/client/attempt"])`. The body need not have
    /// these parts. **Ignore only parts on which the handler does not act**: two requests that differ only in them are
    /// the same, and the second gets the response of the first.
    ///
    /// # Panics
    ///
    /// For a text that is not a JSON pointer, and for the empty pointer, which is the whole body.
    #[track_caller]
    pub fn canonical_json<'p>(mut self, ignored: impl IntoIterator<Item = &'p str>) -> Self {
        let parse = |text: &str| {
            Pointer::parse(text).unwrap_or_else(|| {
                panic!("{text:?} is not a JSON pointer to a part of the body (RFC 6901); write /name or /outer/inner")
            })
        };
        let ignored = ignored.into_iter().map(parse).collect();
        self.fingerprint.compared = Compared::Json { ignored };
        self
    }

    /// Also stores this header with a [stored request](crate::lease::LeaseOptions::store_request), in plain text.
    /// `Content-Type`, `Content-Encoding`, `Idempotency-Key` and the headers of the fingerprint are always stored. A
    /// resumed request has no other header, so name each one by which the handler decides, and that of
    /// [`key_from`](Self::key_from).
    ///
    /// # Panics
    ///
    /// For `Authorization`, `Cookie` and `Proxy-Authorization`, which are not stored as headers of the fingerprint
    /// either.
    #[track_caller]
    pub fn store_header(mut self, name: HeaderName) -> Self {
        assert!(
            !NEVER_STORED.contains(&name),
            "the header {name} must not be stored: it proves who the client is, now"
        );
        self.stored_headers.push(name);
        self
    }

    /// Adds this header, with all its lines, to the fingerprint: one by which the handler selects an account, a
    /// currency or a language, and not one that a client changes with each attempt, such as a trace or a date. For
    /// `Host`, the authority of the URI counts, too, as HTTP/2 sends it, unless the header says the same.
    pub fn fingerprint_header(mut self, name: HeaderName) -> Self {
        self.fingerprint.add_header(name);
        self
    }
}

/// Which responses are stored, and how rejections look.
impl IdempotencyLayer {
    /// Also stores responses of these statuses, from 400 to 499, which otherwise free the key, such as "card declined".
    /// A transactional layer undoes the handler's writes by a savepoint, which costs every request one round trip.
    ///
    /// # Panics
    ///
    /// For any other status: a success is stored anyway, and a 5xx must stay open to a retry.
    #[track_caller]
    pub fn store_errors(self, statuses: impl IntoIterator<Item = StatusCode>) -> Self {
        let statuses: Vec<_> = statuses.into_iter().collect();
        for status in &statuses {
            assert!(
                status.is_client_error(),
                "responses of status {status} cannot be stored by choice; only 400 to 499 can"
            );
        }
        Self { stored_errors: statuses, ..self }
    }

    /// Also replays this header.
    ///
    /// # Panics
    ///
    /// For `Set-Cookie`, authentication, hop-by-hop headers, `Date`, `Content-Length`, and the headers that the layer
    /// adds itself.
    #[track_caller]
    pub fn replay_header(mut self, name: HeaderName) -> Self {
        assert!(
            !NEVER_REPLAYED.contains(&name),
            "the header {name} must not be replayed: it belongs to one connection, one session or one moment"
        );
        self.replayed_headers.push(name);
        self
    }

    /// Rebuilds the answers of which the record keeps a [reference](crate::http::AnswerBy) and no body: for answers
    /// that hold credentials, are large, or must show the present state. Stored bodies are replayed as without this
    /// setting. One layer has one type of reference. A layer without this setting that meets a reference answers 500
    /// `misconfigured`.
    pub fn replay(self, replay: impl Replay) -> Self {
        Self { replay: Some(Arc::new(replay)), ..self }
    }

    /// The function that makes a response of a rejection. The default is [`problem`](crate::http::problem). The
    /// function may change what `problem` returns, for example add a `Link` to your documentation of the key, as the
    /// draft demands.
    pub fn on_rejection(self, rejection: impl Fn(&Rejection) -> Response<Bytes> + Send + Sync + 'static) -> Self {
        Self { rejection: Arc::new(rejection), ..self }
    }
}

/// Settling a request whose outcome is unknown.
impl IdempotencyLayer {
    /// What a [`Reconciler`](crate::lease::Reconciler) answers of an operation of this layer that took effect: the
    /// response that the handler would have sent. It is stored as the layer stores the handler's: the status, the
    /// replayed headers and the body. Of a step, it answers [`Finding::took_effect`] with the result of the step.
    ///
    /// # Errors
    ///
    /// [`Error::Unencodable`] for an informational status, and for a body over
    /// [`response_limit`](Self::response_limit), which no retry would get.
    pub fn took_effect(&self, response: Response<impl Into<Vec<u8>>>) -> Result<Finding, Error> {
        let (parts, body) = response.into_parts();
        let body = body.into();
        if body.len() > self.response_limit || parts.status.is_informational() {
            return Err(Error::Unencodable {
                source: "the response is too large, or has an informational status".into(),
            });
        }
        Ok(Finding::of_response(to_record(&parts, Some(body), &self.replayed_headers)))
    }
}

/// The bounds of sizes and runs.
impl IdempotencyLayer {
    /// The largest request body, in bytes. The default is 1 MiB. It also determines how many [bytes](crate::http#runs)
    /// the requests that upload or wait may hold together.
    pub fn request_limit(self, bytes: usize) -> Self {
        Self { request_limit: bytes, ..self }
    }

    /// The largest response body that is stored, in bytes. The default is 1 MiB. A larger one is sent and not stored.
    pub fn response_limit(self, bytes: usize) -> Self {
        Self { response_limit: bytes, ..self }
    }

    /// The greatest number of [runs](crate::http#runs) at a time. A further request waits for a place, as long as the
    /// pool waits for a connection (`acquire_timeout`) or for the wait if that is longer, and then is
    /// [`Overloaded`](Rejection::Overloaded). The default is 32 for each connection that the pool may have. With the 5
    /// seconds that the crate recommends, each run gets a connection in time if the transactions take about 150 ms.
    /// Raise the limit for a leased layer whose handlers wait for other services, without a connection.
    ///
    /// A replay counts as a run. A duplicate that waits for another request does not: it has a place only while it asks
    /// the database. A layer and its clones share their places. A clone with another limit has places of its own.
    pub fn max_runs(self, runs: usize) -> Self {
        Self { max_runs: runs, ..self }
    }

    /// The greatest number of [runs](crate::http#runs) of one scope at a time, so that no account takes the places of
    /// the others. The requests without a key count as one scope. The default is seven eighths of the places. In a
    /// transactional layer, each run has a connection, so it is seven eighths of the connections if these are fewer. Of
    /// two places or more, at least one is left to other scopes. **Of a pool of one connection, none is left.**
    ///
    /// The requests with one key that do not perform have at most half of these places, and at most as many as the pool
    /// has connections, but at least one.
    pub fn max_runs_of_one_scope(self, runs: usize) -> Self {
        Self { max_runs_of_one_scope: Some(runs), ..self }
    }

    /// How long a handler may take, from its call to its response. After that the layer drops it at its next await, as
    /// a failure: [`TimedOut`](Rejection::TimedOut). The default is 5 minutes: common proxies give up after one. Choose
    /// a longer time than the time-outs further out, which answer the client and leave the run alone.
    ///
    /// Dropping a handler stops neither its statement nor a task that it has spawned. PostgreSQL ends the statement by
    /// its own `statement_timeout`, and the transaction is open until then.
    ///
    /// The layer's own statements are bounded, too, because a connection can vanish without a word. In a transactional
    /// layer, a claim may take the pool's `acquire_timeout` and 30 seconds; the completion with its COMMIT, or the
    /// ROLLBACK, may take 30 seconds. If this limit is shorter than 30 seconds, it applies to each of them, with at
    /// least a second. After that the answer is [`Unavailable`](Rejection::Unavailable), the key is free in this
    /// process, and the connection is closed and leaves the pool. **After a COMMIT it is unknown whether the operation
    /// took effect.** Under a lease, a claim may take the pool's `acquire_timeout` and the length of the lease, but at
    /// least 2 and at most 30 seconds more; a response is stored by tries for the length of one lease.
    ///
    /// # Panics
    ///
    /// Under a millisecond or over ten years.
    #[track_caller]
    pub fn run_timeout(self, limit: Duration) -> Self {
        assert!(is_in(&RETENTION, limit), "a run time-out must be between a millisecond and ten years");
        Self { run_timeout: limit, ..self }
    }

    /// The runs of this layer and its clones. A graceful shutdown waits for them.
    #[must_use]
    pub fn runs(&self) -> Runs {
        self.places.runs()
    }
}

//! Uploads whose client resets the stream, over HTTP/2. hyper gives such a body a clean end if the code is NO_ERROR,
//! and up to its release 1.9 also if it is CANCEL.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx};
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS};
use sqlx::PgPool;
use tokio::io::AsyncWriteExt as _;

use crate::frames::{CANCEL, INTERNAL_ERROR, NO_ERROR, PREFACE, Served, data, headers, reset, settings, until_read};
use crate::support::{leased, request, send, transactional};

const WHOLE: &str = "amount=1000";

/// How the client cuts its upload.
#[derive(Clone, Copy, Debug)]
struct Cut {
    key: bool,
    /// Whether the request has a `content-length`.
    announced: bool,
    sent: &'static str,
    code: u32,
    /// Whether the server reads all frames at once.
    at_once: bool,
}

fn cuts() -> impl Iterator<Item = Cut> {
    let mut cuts = Vec::new();
    for sent in ["", "amount=1", WHOLE] {
        for code in [NO_ERROR, CANCEL, INTERNAL_ERROR] {
            for [key, announced, at_once] in (0..8).map(|bits| [bits & 1 > 0, bits & 2 > 0, bits & 4 > 0]) {
                cuts.push(Cut { key, announced, sent, code, at_once });
            }
        }
    }
    cuts.into_iter()
}

impl Cut {
    async fn send(self, server: &Served, key: &str) {
        let length = WHOLE.len().to_string();
        let mut fields = vec![(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", "/notes")];
        if self.key {
            fields.push(("idempotency-key", key));
        }
        if self.announced {
            fields.push(("content-length", &length));
        }
        let mut client = server.connect().await;
        let mut frames = [PREFACE.to_vec(), settings(), headers(&fields, false)].concat();
        if !self.at_once {
            client.write_all(&frames).await.expect("sent");
            until_read(&mut client).await;
            frames.clear();
        }
        if !self.sent.is_empty() {
            frames.extend(data(self.sent));
        }
        frames.extend(reset(self.code));
        client.write_all(&frames).await.expect("sent");
        until_read(&mut client).await;
    }
}

/// Reads the whole body before the layer, as a check of a signature does, so the layer's body has its exact length.
async fn collect(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match to_bytes(body, usize::MAX).await {
        Ok(body) => next.run(Request::from_parts(parts, Body::from(body))).await,
        Err(_) => StatusCode::BAD_REQUEST.into_response(),
    }
}

/// `name` is a part of each key.
async fn no_cut_upload_is_performed(name: &str, layer: IdempotencyLayer, transactional: bool) {
    let layer = layer.optional_key(true);
    let runs = layer.runs();
    let performed = Arc::new(Mutex::new(Vec::new()));
    let noting = performed.clone();
    let note = move |body: String| noting.lock().expect("no panic").push(body);
    let route = match transactional {
        true => post(async move |_: IdempotentTx, body: String| note(body)),
        false => post(async move |body: String| note(body)),
    };
    let plain = Router::new().route("/notes", route).layer(layer);
    for (collected, app) in [(false, plain.clone()), (true, plain.layer(from_fn(collect)))] {
        let server = Served::of(app.clone()).await;
        for (number, cut) in cuts().enumerate() {
            let key = format!("{name}-{collected}-{number}");
            cut.send(&server, &key).await;
            let retry = send(&app, request("POST", "/notes", cut.key.then_some(&key), WHOLE)).await;
            runs.finished().await;
            let performed = std::mem::take(&mut *performed.lock().expect("no panic"));
            let expected = (StatusCode::OK, &[WHOLE.to_owned()][..]);
            assert_eq!((retry.status, &*performed), expected, "{name}, collected: {collected}, {cut:?}, {retry:?}");
        }
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_upload_that_is_reset_is_not_performed_in_a_transaction(pool: PgPool) {
    no_cut_upload_is_performed("transaction", transactional(&pool), true).await;
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_upload_that_is_reset_is_not_performed_under_a_lease(pool: PgPool) {
    for (name, policy) in [("at-least-once", AT_LEAST_ONCE), ("at-most-once", AT_MOST_ONCE), ("in-steps", IN_STEPS)] {
        no_cut_upload_is_performed(name, leased(&pool, policy), false).await;
    }
}

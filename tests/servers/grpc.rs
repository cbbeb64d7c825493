//! A unary gRPC service and its client, both with tonic, over a loopback socket. The messages are text with a codec of
//! their own instead of protobuf; the layer sees only bytes.

use std::future::Future;
use std::net::Ipv4Addr;
use std::pin::Pin;

use bytes::{Buf as _, BufMut as _};
use futures_util::{Stream, StreamExt as _};
use http::request::Parts;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx, Rejection};
use pg_idempotency::testing::{Gate, PATIENCE};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tonic::client::Grpc as Client;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::server::{Grpc, ServerStreamingService, UnaryService};
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status};

#[derive(Clone, Copy, Default)]
struct Text;

impl Codec for Text {
    type Encode = String;
    type Decode = String;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Text {
    type Item = String;
    type Error = Status;

    fn encode(&mut self, text: String, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put_slice(text.as_bytes());
        Ok(())
    }
}

impl Decoder for Text {
    type Item = String;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let text = buffer.copy_to_bytes(buffer.remaining());
        String::from_utf8(text.into()).map(Some).map_err(|error| Status::invalid_argument(error.to_string()))
    }
}

/// `taxi.Orders/Place` orders a taxi. No taxi drives to the moon.
struct Place;

impl UnaryService<String> for Place {
    type Response = String;
    type Future = Pin<Box<dyn Future<Output = Result<Response<String>, Status>> + Send>>;

    fn call(&mut self, request: Request<String>) -> Self::Future {
        Box::pin(async move {
            let mut tx =
                IdempotentTx::take(request.extensions()).map_err(|error| Status::internal(error.to_string()))?;
            let number: i64 = sqlx::query_scalar("insert into ride (destination) values ($1) returning number")
                .bind(request.get_ref())
                .fetch_one(&mut *tx)
                .await
                .map_err(|error| Status::internal(error.to_string()))?;
            match request.get_ref().as_str() {
                // This error comes after the insert, which must be undone.
                "moon" => Err(Status::failed_precondition("no road leads there")),
                destination => Ok(Response::new(format!("ride {number} to {destination}"))),
            }
        })
    }
}

/// `taxi.Orders/Follow` orders a taxi and answers with its way. The status comes after the messages, in the trailers.
struct Follow(Gate);

impl ServerStreamingService<String> for Follow {
    type Response = String;
    type ResponseStream = Pin<Box<dyn Stream<Item = Result<String, Status>> + Send>>;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Self::ResponseStream>, Status>> + Send>>;

    fn call(&mut self, request: Request<String>) -> Self::Future {
        let gate = self.0.clone();
        Box::pin(async move {
            let mut tx =
                IdempotentTx::take(request.extensions()).map_err(|error| Status::internal(error.to_string()))?;
            sqlx::query("insert into ride (destination) values ($1)")
                .bind(request.get_ref())
                .execute(&mut *tx)
                .await
                .map_err(|error| Status::internal(error.to_string()))?;
            let on_the_way = futures_util::stream::iter([Ok("on the way".to_owned())]);
            let end: Self::ResponseStream = match request.get_ref().as_str() {
                "moon" => {
                    Box::pin(futures_util::stream::iter([Err(Status::failed_precondition("no road leads there"))]))
                }
                "far" => Box::pin(futures_util::stream::once(async move {
                    gate.pass().await;
                    Err(Status::failed_precondition("no road leads there"))
                })),
                _ => Box::pin(futures_util::stream::empty()),
            };
            let stream: Self::ResponseStream = Box::pin(on_the_way.chain(end));
            Ok(Response::new(stream))
        })
    }
}

fn layer(pool: PgPool) -> IdempotencyLayer {
    // A real service takes the scope from the authenticated identity.
    let scope = |parts: &Parts| match parts.headers.get("x-user-id").map(|user| user.to_str()) {
        Some(Ok(user)) => Ok(user.to_owned()),
        _ => Err(Status::unauthenticated("who are you?").into_http().into()),
    };
    IdempotencyLayer::transactional(pool, scope)
        // The method of each call is POST, and its path is a template already.
        .with_operation(|parts| Some(parts.uri.path().to_owned()))
        .with_rejection(|rejection| Status::new(code(rejection), rejection.to_string()).into_http())
}

/// gRPC clients retry UNAVAILABLE on their own.
fn code(rejection: &Rejection) -> Code {
    match rejection {
        Rejection::InFlight { .. } => Code::Aborted,
        Rejection::KeyReused => Code::FailedPrecondition,
        Rejection::Indeterminate { .. } | Rejection::NotReplayable { .. } => Code::DataLoss,
        Rejection::Exhausted { .. } | Rejection::BodyTooLarge { .. } => Code::ResourceExhausted,
        Rejection::Unavailable(_) | Rejection::Overloaded { .. } => Code::Unavailable,
        Rejection::TimedOut { .. } => Code::DeadlineExceeded,
        Rejection::Misconfigured(_) => Code::Internal,
        _ => Code::InvalidArgument,
    }
}

/// The service and a connected client. Both end with the test's runtime.
async fn connected(pool: &PgPool) -> anyhow::Result<Client<Channel>> {
    connected_to(pool, layer(pool.clone()), Gate::new()).await
}

async fn connected_to(pool: &PgPool, layer: IdempotencyLayer, gate: Gate) -> anyhow::Result<Client<Channel>> {
    sqlx::raw_sql(
        "create table if not exists ride (number bigint generated always as identity, destination text not null)",
    )
    .execute(pool)
    .await?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    let place = async |request: axum::extract::Request| Grpc::new(Text).unary(Place, request).await;
    let follow = async move |request: axum::extract::Request| {
        Grpc::new(Text).server_streaming(Follow(gate.clone()), request).await
    };
    let routes = axum::Router::new()
        .route("/taxi.Orders/Place", axum::routing::post(place))
        .route("/taxi.Orders/Follow", axum::routing::post(follow));
    let server = Server::builder().layer(layer).add_routes(Routes::from(routes));
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    Ok(Client::new(Endpoint::from_shared(format!("http://{address}"))?.connect().await?))
}

fn asked(key: Option<&str>, to: &str) -> Request<String> {
    let mut request = Request::new(to.to_owned());
    request.metadata_mut().insert("x-user-id", "ada".parse().expect("a word"));
    if let Some(key) = key {
        request.metadata_mut().insert("idempotency-key", key.parse().expect("a word"));
    }
    request
}

async fn place(client: &mut Client<Channel>, key: Option<&str>, to: &str) -> Result<Response<String>, Status> {
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    client.unary(asked(key, to), "/taxi.Orders/Place".parse().expect("a path"), Text).await
}

/// Reads all messages; an error in the trailers is an error here.
async fn follow(client: &mut Client<Channel>, key: Option<&str>, to: &str) -> Result<Vec<String>, Status> {
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    let path = "/taxi.Orders/Follow".parse().expect("a path");
    let mut stream = client.server_streaming(asked(key, to), path, Text).await?.into_inner();
    let mut messages = Vec::new();
    while let Some(message) = stream.message().await? {
        messages.push(message);
    }
    Ok(messages)
}

async fn records(pool: &PgPool) -> sqlx::Result<i64> {
    sqlx::query_scalar("select count(*) from idempotency.record").fetch_one(pool).await
}

async fn rides(pool: &PgPool) -> sqlx::Result<i64> {
    sqlx::query_scalar("select count(*) from ride").fetch_one(pool).await
}

fn replayed<T>(response: &Response<T>) -> bool {
    response.metadata().get("idempotency-replayed").is_some_and(|value| value == "true")
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_unary_call_is_performed_once_and_replayed(pool: PgPool) -> anyhow::Result<()> {
    let mut client = connected(&pool).await?;
    let first = place(&mut client, Some("order-1"), "station").await?;
    assert_eq!((first.get_ref().as_str(), replayed(&first)), ("ride 1 to station", false));
    let again = place(&mut client, Some("order-1"), "station").await?;
    assert_eq!((again.get_ref().as_str(), replayed(&again)), ("ride 1 to station", true));
    assert_eq!(rides(&pool).await?, 1);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_call_that_fails_leaves_nothing_and_frees_its_key(pool: PgPool) -> anyhow::Result<()> {
    let mut client = connected(&pool).await?;
    for _ in 0..2 {
        let refused = place(&mut client, Some("order-1"), "moon").await.expect_err("nobody drives there");
        assert_eq!((refused.code(), refused.message()), (Code::FailedPrecondition, "no road leads there"));
    }
    assert_eq!(rides(&pool).await?, 0);
    let corrected = place(&mut client, Some("order-1"), "station").await?;
    assert!(!replayed(&corrected));
    assert_eq!(rides(&pool).await?, 1);
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_rejection_is_a_grpc_status(pool: PgPool) -> anyhow::Result<()> {
    let mut client = connected(&pool).await?;
    let keyless = place(&mut client, None, "station").await.expect_err("a key is required");
    assert_eq!(keyless.code(), Code::InvalidArgument);
    assert!(keyless.message().contains("Idempotency-Key"), "{keyless}");
    place(&mut client, Some("order-1"), "station").await?;
    let reused = place(&mut client, Some("order-1"), "airport").await.expect_err("another request");
    assert_eq!(reused.code(), Code::FailedPrecondition);
    assert_eq!(rides(&pool).await?, 1);
    Ok(())
}

/// With and without a key; with a response that is stored, not stored, and too large.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_failure_in_the_trailers_is_never_committed(pool: PgPool) -> anyhow::Result<()> {
    let layers = [
        layer(pool.clone()).with_optional_key(true),
        layer(pool.clone()).with_optional_key(true).with_no_store(true),
        layer(pool.clone()).with_optional_key(true).with_response_limit(4),
    ];
    for (number, layer) in layers.into_iter().enumerate() {
        let mut client = connected_to(&pool, layer, Gate::new()).await?;
        for key in [Some("order-1"), None] {
            let refused = follow(&mut client, key, "moon").await.expect_err("nobody drives there");
            assert_eq!((refused.code(), refused.message()), (Code::FailedPrecondition, "no road leads there"));
            assert_eq!((rides(&pool).await?, records(&pool).await?), (0, 0), "layer {number}, key {key:?}");
        }
    }
    Ok(())
}

/// Without the status it is unknown whether the call fails, and it must not be committed by then.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_call_whose_status_comes_too_late_is_not_committed(pool: PgPool) -> anyhow::Result<()> {
    let gate = Gate::new();
    let layers = [layer(pool.clone()), layer(pool.clone()).with_optional_key(true).with_no_store(true)];
    for (layer, key) in layers.into_iter().zip([Some("order-1"), None]) {
        let mut client = connected_to(&pool, layer, gate.clone()).await?;
        let refused = tokio::time::timeout(PATIENCE, follow(&mut client, key, "far")).await.expect("in time");
        let refused = refused.expect_err("no status");
        assert_eq!(refused.code(), Code::Internal, "{refused}");
        assert_eq!((rides(&pool).await?, records(&pool).await?), (0, 0));
    }
    Ok(())
}

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn a_call_that_succeeds_over_the_limit_is_committed_and_not_stored(pool: PgPool) -> anyhow::Result<()> {
    let layers = [layer(pool.clone()).with_response_limit(4), layer(pool.clone()).with_no_store(true)];
    for (layer, key) in layers.into_iter().zip(["order-1", "order-2"]) {
        let mut client = connected_to(&pool, layer, Gate::new()).await?;
        assert_eq!(follow(&mut client, Some(key), "station").await?, ["on the way"]);
        let again = follow(&mut client, Some(key), "station").await.expect_err("not kept");
        assert_eq!(again.code(), Code::DataLoss);
    }
    assert_eq!(rides(&pool).await?, 2);
    Ok(())
}

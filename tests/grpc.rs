//! A unary gRPC service of tonic's behind the layer, and a client of tonic's, over a loopback socket. No protobuf: its
//! messages are text, by a codec of their own, and the layer sees bytes either way.

#[path = "support/strict.rs"]
mod strict;

use std::future::Future;
use std::net::Ipv4Addr;
use std::pin::Pin;

use bytes::{Buf as _, BufMut as _};
use http::request::Parts;
use pg_idempotency::http::{IdempotencyLayer, IdempotentTx, Rejection};
use sqlx::PgPool;
use tokio::net::TcpListener;
use tonic::client::Grpc as Client;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::server::{Grpc, UnaryService};
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

/// `taxi.Orders/Place`: orders a taxi to somewhere. Nobody drives to the moon.
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
                // After the insert, which must not stay.
                "moon" => Err(Status::failed_precondition("no road leads there")),
                destination => Ok(Response::new(format!("ride {number} to {destination}"))),
            }
        })
    }
}

fn layer(pool: PgPool) -> IdempotencyLayer {
    // A stand-in: a real service takes it from the authenticated identity.
    let scope = |parts: &Parts| match parts.headers.get("x-user-id").map(|user| user.to_str()) {
        Some(Ok(user)) => Ok(user.to_owned()),
        _ => Err(Status::unauthenticated("who are you?").into_http().into()),
    };
    IdempotencyLayer::transactional(pool, scope)
        // The method is POST for each call, and the path names the call: it is a template already.
        .with_operation(|parts| Some(parts.uri.path().to_owned()))
        .with_rejection(|rejection| Status::new(code(rejection), rejection.to_string()).into_http())
}

/// What gRPC's clients retry on their own is UNAVAILABLE.
fn code(rejection: &Rejection) -> Code {
    match rejection {
        Rejection::InFlight { .. } => Code::Aborted,
        Rejection::KeyReused => Code::FailedPrecondition,
        Rejection::Indeterminate { .. } | Rejection::NotReplayable { .. } => Code::DataLoss,
        Rejection::Exhausted { .. } | Rejection::BodyTooLarge { .. } => Code::ResourceExhausted,
        Rejection::Unavailable(_) => Code::Unavailable,
        Rejection::Misconfigured(_) => Code::Internal,
        _ => Code::InvalidArgument,
    }
}

/// The service, and a client that is connected to it. Both end with the test's runtime.
async fn connected(pool: &PgPool) -> anyhow::Result<Client<Channel>> {
    sqlx::raw_sql("create table ride (number bigint generated always as identity, destination text not null)")
        .execute(pool)
        .await?;
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    let place = async |request: axum::extract::Request| Grpc::new(Text).unary(Place, request).await;
    let routes = Routes::from(axum::Router::new().route("/taxi.Orders/Place", axum::routing::post(place)));
    let server = Server::builder().layer(layer(pool.clone())).add_routes(routes);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    Ok(Client::new(Endpoint::from_shared(format!("http://{address}"))?.connect().await?))
}

async fn place(client: &mut Client<Channel>, key: Option<&str>, to: &str) -> Result<Response<String>, Status> {
    let mut request = Request::new(to.to_owned());
    request.metadata_mut().insert("x-user-id", "ada".parse().expect("a word"));
    if let Some(key) = key {
        request.metadata_mut().insert("idempotency-key", key.parse().expect("a word"));
    }
    client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
    client.unary(request, "/taxi.Orders/Place".parse().expect("a path"), Text).await
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
async fn a_rejection_is_a_status_of_grpc(pool: PgPool) -> anyhow::Result<()> {
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

//! The actors that ask over HTTP. Each has a layer of its own, as another process has: a layer knows which keys its own
//! process performs, and refuses their duplicates without a question to the database.

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use pg_idempotency::Idempotency;
use pg_idempotency::http::{
    IDEMPOTENCY_KEY, IDEMPOTENT_REPLAYED, IdempotencyLayer, IdempotentTx, LayerBody, Rejection,
};
use pg_idempotency::lease::{Lease, Policy};
use tower::{Layer as _, ServiceExt as _, service_fn};

use super::{Actor, BODY, Manner, OPERATION, Seat, actor, leasing};

/// The response of a handler that undoes its writes.
const DECLINED: StatusCode = StatusCode::UNPROCESSABLE_ENTITY;

/// A request whose handler writes through its `IdempotentTx`.
pub(crate) fn request(manner: Manner, options: Idempotency) -> Actor {
    actor(move |seat| async move {
        let scope = seat.key.scope().to_owned();
        let layer = IdempotencyLayer::transactional(seat.pool.clone(), options, move |_| Ok(scope.clone()));
        let layer = if manner == Manner::Undoes { layer.store_errors([DECLINED]) } else { layer };
        seat.ask(layer, true, manner).await
    })
}

/// A request without a key, whose handler has a transaction of its own.
pub(crate) fn request_without_key() -> Actor {
    actor(|seat| async move {
        let layer = IdempotencyLayer::transactional(seat.pool.clone(), Idempotency::new(), |_| Ok(String::new()));
        seat.ask(layer.optional_key(true), false, Manner::Keeps).await
    })
}

/// A request under a lease.
pub(crate) fn request_leased(policy: Policy) -> Actor {
    actor(move |seat| async move {
        let scope = seat.key.scope().to_owned();
        let layer = IdempotencyLayer::leased(seat.pool.clone(), leasing(policy)?, move |_| Ok(scope.clone()));
        seat.ask(layer, true, Manner::Keeps).await
    })
}

impl Seat {
    async fn ask(self, layer: IdempotencyLayer, with_key: bool, manner: Manner) -> anyhow::Result<String> {
        let mut request = Request::post("/");
        if with_key {
            request = request.header(IDEMPOTENCY_KEY, self.key.value());
        }
        let handler = service_fn(move |request| self.clone().handle(request, manner));
        let service = layer.operation(|_| Some(OPERATION.to_owned())).layer(handler);
        let (parts, body) = service.oneshot(request.body(Full::from(BODY))?).await?.into_parts();
        if let Some(rejection) = parts.extensions.get::<Rejection>() {
            let name = format!("{rejection:?}");
            let name = name.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
            return Ok(if name == "Unavailable" { "fails: Unavailable".to_owned() } else { name.to_owned() });
        }
        let body = body.collect().await.map_err(|error| anyhow::anyhow!("the body: {error:?}"))?.to_bytes();
        let who: String = serde_json::from_slice(&body)?;
        Ok(match parts.status {
            _ if parts.headers.contains_key(IDEMPOTENT_REPLAYED) => format!("replayed {who}"),
            StatusCode::OK => "performed".to_owned(),
            _ => "refused".to_owned(),
        })
    }

    async fn handle(
        self,
        request: Request<LayerBody<Full<Bytes>>>,
        manner: Manner,
    ) -> anyhow::Result<Response<Full<Bytes>>> {
        let done = if Lease::of_request(request.extensions()).is_ok() {
            Ok(self.effect(&mut *self.pool.acquire().await?, "").await?)
        } else {
            self.perform(&mut *IdempotentTx::take(request.extensions())?, manner).await
        };
        let status = match &done {
            Ok(_) if manner == Manner::Undoes => DECLINED,
            Ok(_) => StatusCode::OK,
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        let body = serde_json::to_vec(&done.unwrap_or_default())?;
        Ok(Response::builder().status(status).body(Full::from(body))?)
    }
}

//! The extractors for axum.

use axum::extract::FromRequestParts;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::request::Parts;

use super::idempotent_tx::{IdempotentTx, NoTransaction};
use super::lease::{IdempotentLease, NoLease};

impl<S: Sync> FromRequestParts<S> for IdempotentTx {
    type Rejection = NoTransaction;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoTransaction> {
        Self::take(&parts.extensions)
    }
}

impl<S: Sync> FromRequestParts<S> for IdempotentLease {
    type Rejection = NoLease;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, NoLease> {
        Self::get(&parts.extensions)
    }
}

/// A mistake of the service's: the text is for its log, not for the client.
fn misconfigured(error: &(dyn std::error::Error + 'static)) -> Response {
    tracing::error!(error, "a handler met a mistake in the service's set-up");
    StatusCode::INTERNAL_SERVER_ERROR.into_response()
}

impl IntoResponse for NoTransaction {
    fn into_response(self) -> Response {
        misconfigured(&self)
    }
}

impl IntoResponse for NoLease {
    fn into_response(self) -> Response {
        misconfigured(&self)
    }
}

//! What a request must bring beside its key: a user and a payment.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use pg_idempotency::MAX_PART_BYTES;
use serde::Deserialize;

use crate::problem::Problem;

/// Whose request it is, which is the scope of the key. **A real service takes it from the authenticated session**: a
/// header that anybody can write lets anybody read another's payments.
pub(crate) struct User(pub(crate) String);

impl User {
    pub(crate) fn of(parts: &Parts) -> Result<Self, Problem> {
        let mut lines = parts.headers.get_all("x-user-id").iter();
        // Two lines have no meaning, and taking the first would hide the mistake.
        let user = match (lines.next(), lines.next()) {
            (Some(line), None) => line.to_str().ok(),
            _ => None,
        };
        user.filter(|user| (1..=MAX_PART_BYTES).contains(&user.len()) && user.bytes().all(|b| b.is_ascii_graphic()))
            .map(|user| Self(user.to_owned()))
            .ok_or_else(|| Problem::new(StatusCode::UNAUTHORIZED, "no-user", "send one X-User-ID, without spaces"))
    }
}

impl<S: Sync> FromRequestParts<S> for User {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        Self::of(parts)
    }
}

/// The body. A misspelt field is refused: who sends `"ammount"` should hear of it before it is paid.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewPayment {
    pub(crate) amount: i64,
    pub(crate) currency: String,
    pub(crate) customer_id: String,
}

impl<S: Send + Sync> FromRequest<S> for NewPayment {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let malformed = |detail: String| Problem::new(StatusCode::BAD_REQUEST, "malformed-body", detail);
        let body = Bytes::from_request(request, state).await.map_err(|error| malformed(error.body_text()))?;
        // serde would take `[1250, "EUR", "c-17"]` for a struct too.
        if !body.trim_ascii_start().starts_with(b"{") {
            return Err(malformed("the body is not a JSON object".to_owned()));
        }
        serde_json::from_slice::<Self>(&body).map_err(|error| malformed(error.to_string()))?.checked()
    }
}

impl NewPayment {
    fn checked(self) -> Result<Self, Problem> {
        let invalid = |detail| Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid-payment", detail));
        if self.amount <= 0 {
            return invalid("the amount must be positive");
        }
        if self.currency.len() != 3 || !self.currency.bytes().all(|b| b.is_ascii_alphabetic()) {
            return invalid("the currency must be three ASCII letters");
        }
        // PostgreSQL's text has no U+0000.
        if self.customer_id.is_empty() || self.customer_id.contains('\0') {
            return invalid("the customer_id must be neither empty nor hold U+0000");
        }
        Ok(self)
    }
}

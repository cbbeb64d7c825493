//! What a request must bring: a user, a key, a payment. Each is an extractor, and nothing is stored before all three
//! have passed.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use pg_idempotency::MAX_PART_BYTES;
use serde::{Deserialize, Serialize};

use crate::problem::Problem;

/// Shorter ones are counters and dates, which two devices of one user make up alike.
const SHORTEST_KEY: usize = 8;

/// Whose request it is, which is the scope of the key. **A real service takes it from the authenticated session**: a
/// header that anybody can write lets anybody read another's payments.
pub(crate) struct User(pub(crate) String);

impl<S: Sync> FromRequestParts<S> for User {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        match single(&parts.headers, "x-user-id") {
            Some(user) if (1..=MAX_PART_BYTES).contains(&user.len()) && user.bytes().all(|b| b.is_ascii_graphic()) => {
                Ok(Self(user.to_owned()))
            }
            _ => Err(Problem::new(StatusCode::UNAUTHORIZED, "no-user", "send one X-User-ID, without spaces")),
        }
    }
}

/// The value of the key, from `Idempotency-Key`.
pub(crate) struct KeyValue(pub(crate) String);

impl<S: Sync> FromRequestParts<S> for KeyValue {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let malformed = |detail| Problem::new(StatusCode::BAD_REQUEST, "malformed-key", detail);
        let value = single(&parts.headers, "idempotency-key").ok_or_else(|| {
            malformed("send one Idempotency-Key: a new one for each payment, the same with each retry")
        })?;
        let value = if value.starts_with('"') { unquoted(value) } else { bare(value) }
            .ok_or_else(|| malformed("the Idempotency-Key is neither a bare word nor a quoted string"))?;
        if value.len() < SHORTEST_KEY {
            return Err(malformed("the Idempotency-Key is shorter than 8 characters; take a random UUID"));
        }
        Ok(Self(value))
    }
}

/// Two lines of one header have no meaning here, and taking the first would hide the mistake.
fn single<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    let mut lines = headers.get_all(name).iter();
    match (lines.next(), lines.next()) {
        (Some(line), None) => line.to_str().ok(),
        _ => None,
    }
}

/// What most clients send. A comma is what a proxy puts between two lines that it joins.
fn bare(value: &str) -> Option<String> {
    value.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'"' | b',')).then(|| value.to_owned())
}

/// What the IETF draft asks for, a string of structured fields (RFC 9651), so that `"abc"` and `abc` are the same key.
fn unquoted(value: &str) -> Option<String> {
    let mut rest = value.strip_prefix('"')?.strip_suffix('"')?.chars();
    let mut unquoted = String::new();
    while let Some(character) = rest.next() {
        unquoted.push(match character {
            '\\' => rest.next().filter(|escaped| matches!(escaped, '"' | '\\'))?,
            ' '..='~' if character != '"' => character,
            _ => return None,
        });
    }
    Some(unquoted)
}

/// The body. What has the same three values is the same request, whatever its white space and order.
///
/// A misspelt field is refused: who sends `"ammount"` should hear of it before it is paid.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewPayment {
    pub(crate) amount: i64,
    pub(crate) currency: String,
    pub(crate) customer_id: String,
}

impl<S: Send + Sync> FromRequest<S> for NewPayment {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let body = Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status() {
            status @ StatusCode::PAYLOAD_TOO_LARGE => Problem::new(status, "too-large", "the body is over 1 MiB"),
            _ => Problem::new(StatusCode::BAD_REQUEST, "malformed-body", "the body could not be read to its end"),
        })?;
        let malformed = |detail| Problem::new(StatusCode::BAD_REQUEST, "malformed-body", detail);
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

//! The app's signature on what it sends: `X-Signature`, an HMAC-SHA256 in hexadecimal digits. Here because it has its
//! place in the order: behind the limit, for it reads the body, and in front of the key, for a forgery must not take
//! one.

use axum::body::{Body, Bytes};
use axum::extract::{FromRequest as _, Request};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use crate::problem::Problem;

pub(crate) const HEADER: &str = "x-signature";

/// A real one is no constant.
const SECRET: &[u8] = b"shared by the app and the service";

pub(crate) async fn check(request: Request, next: Next) -> Result<Response, Problem> {
    if request.method() == Method::GET {
        return Ok(next.run(request).await);
    }
    let (parts, body) = request.into_parts();
    let unread = Request::from_parts(parts.clone(), body);
    let body = Bytes::from_request(unread, &()).await.map_err(|rejection| match rejection.status() {
        status @ StatusCode::PAYLOAD_TOO_LARGE => Problem::new(status, "too-large", "the body is over 16 KiB"),
        _ => Problem::new(StatusCode::BAD_REQUEST, "broken-body", "the body could not be read to its end"),
    })?;
    let signature = parts.headers.get(HEADER).and_then(|header| bytes(header.as_bytes()));
    // In constant time: else a forger could guess it byte by byte.
    match signature.map(|signature| mac(&parts.method, parts.uri.path(), &body).verify_slice(&signature)) {
        Some(Ok(())) => Ok(next.run(Request::from_parts(parts, Body::from(body))).await),
        _ => Err(Problem::new(StatusCode::FORBIDDEN, "bad-signature", "the signature is not of this request")),
    }
}

pub(crate) fn sign(method: &Method, path: &str, body: &[u8]) -> String {
    mac(method, path, body).finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn mac(method: &Method, path: &str, body: &[u8]) -> Hmac<Sha256> {
    let keyed = Hmac::new_from_slice(SECRET).expect("HMAC takes keys of any length");
    keyed.chain_update(method.as_str()).chain_update(" ").chain_update(path).chain_update("\n").chain_update(body)
}

/// The bytes that these hexadecimal digits mean.
fn bytes(hex: &[u8]) -> Option<Vec<u8>> {
    let digit = |digit: u8| Some(char::from(digit).to_digit(16)? as u8);
    hex.chunks(2).map(|pair| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?)).collect()
}

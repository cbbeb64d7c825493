//! Decides who may see a page and send a form. Every request passes [`guard`] first.

use std::fs::read_to_string;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Form;
use axum::body::to_bytes;
use axum::extract::{FromRequest, Request, State};
use axum::http::StatusCode;
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::uri::Authority;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;
use tokio::time::timeout;

use super::Console;
use super::refusal::Refusal;
use crate::arguments::ConsoleOptions;
use crate::failure::Failure;

const COOKIE: &str = "idempotency-console";
/// A form is small, and a browser sends it in one piece. Without a limit, a client that does not end its form would keep
/// its connection.
const FORM_TIME: Duration = Duration::from_secs(5);

/// A page loads only the style sheet, runs no script, sends forms only to the console, and cannot be framed.
const HEADERS: [(HeaderName, &str); 7] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; style-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    ),
    (header::X_FRAME_OPTIONS, "DENY"),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

pub(super) struct Access {
    /// Then the Host is checked: another site may point its own name to this machine (DNS rebinding).
    loopback: bool,
    /// The digest of the token: a comparison of digests does not reveal the token's length.
    token: Option<[u8; 32]>,
    user_header: Option<HeaderName>,
    /// Signs the forms of this process.
    secret: String,
}

/// The person behind a request.
#[derive(Clone)]
pub(super) struct Visitor {
    /// `None` on loopback without a sign-in; the forms then ask for a name.
    pub(super) name: Option<String>,
    /// What the forms of this session of the browser carry.
    pub(super) csrf: String,
}

impl Access {
    /// Fails if the address is not loopback and nobody would have to sign in.
    pub(super) fn new(address: SocketAddr, options: &ConsoleOptions) -> Result<Self, Failure> {
        let loopback = address.ip().is_loopback();
        if !loopback && options.token_file.is_none() && options.user_header.is_none() {
            return Err(Failure::OpenConsole { address });
        }
        let token = options.token_file.as_ref().map(|path| {
            let failure = |source| Failure::TokenFile { path: path.clone(), source };
            let text = read_to_string(path).map_err(failure)?;
            match text.trim() {
                token if token.len() >= 16 => Ok(Sha256::digest(token).into()),
                _ => Err(failure(std::io::Error::other("the token is too short"))),
            }
        });
        let token = token.transpose()?;
        Ok(Self { loopback, token, user_header: options.user_header.clone(), secret: random() })
    }

    fn visitor(&self, headers: &HeaderMap, session: &str) -> Result<Visitor, Refusal> {
        if self.loopback && !headers.get(header::HOST).is_some_and(is_loopback) {
            return Err(Refusal::Host);
        }
        let mut name = None;
        if let Some(token) = &self.token {
            let (user, given) = basic(headers).ok_or(Refusal::NotSignedIn)?;
            let given: [u8; 32] = Sha256::digest(given).into();
            if user.is_empty() || !bool::from(given.ct_eq(token)) {
                return Err(Refusal::NotSignedIn);
            }
            name = Some(user);
        }
        if let Some(header) = &self.user_header {
            // A second one is a client's own, beside the proxy's.
            let users: Vec<_> = headers.get_all(header).iter().map(|user| user.as_bytes().trim_ascii()).collect();
            let [user @ [_, ..]] = users[..] else { return Err(Refusal::NotOneUser(header.clone(), users.len())) };
            name = Some(String::from_utf8_lossy(user).into_owned());
        }
        let csrf = Sha256::new_with_prefix(&self.secret).chain_update(session).finalize();
        Ok(Visitor { name, csrf: BASE64_URL_SAFE_NO_PAD.encode(csrf) })
    }
}

fn is_loopback(host: &HeaderValue) -> bool {
    let Ok(authority) = Authority::try_from(host.as_bytes()) else { return false };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

/// The name and the password.
fn basic(headers: &HeaderMap) -> Option<(String, String)> {
    let (scheme, encoded) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let decoded = BASE64_STANDARD.decode(encoded.trim()).ok().filter(|_| scheme.eq_ignore_ascii_case("basic"))?;
    let decoded = String::from_utf8(decoded).ok()?;
    let (name, password) = decoded.split_once(':')?;
    Some((name.trim().to_owned(), password.to_owned()))
}

/// The cookie of the browser's session. Its forms are valid only for this session.
fn cookie(headers: &HeaderMap) -> Option<String> {
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut cookies = cookies.flat_map(|value| value.split(';')).filter_map(|cookie| cookie.trim().split_once('='));
    cookies.find(|(name, value)| *name == COOKIE && value.len() == 22).map(|(_, value)| value.to_owned())
}

fn random() -> String {
    let mut random = [0; 16];
    getrandom::fill(&mut random).expect("the operating system provides random numbers");
    BASE64_URL_SAFE_NO_PAD.encode(random)
}

/// Passes a request on, or answers with a page that explains the refusal. Errors of axum become pages too.
pub(super) async fn guard(State(console): State<Arc<Console>>, mut request: Request, next: Next) -> Response {
    let known = cookie(request.headers());
    let session = known.clone().unwrap_or_else(random);
    let mut response = match console.access.visitor(request.headers(), &session) {
        Err(refusal) => refusal.into_response(),
        Ok(visitor) => {
            request.extensions_mut().insert(visitor);
            next.run(request).await
        }
    };
    let status = response.status();
    let page = response.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == "text/html; charset=utf-8");
    if !page && (status.is_client_error() || status.is_server_error()) {
        let reason = to_bytes(response.into_body(), usize::MAX).await.unwrap_or_default();
        let reason = if reason.is_empty() { status.to_string() } else { String::from_utf8_lossy(&reason).into_owned() };
        response = Refusal::Malformed(status, reason).into_response();
    }
    for (name, value) in HEADERS {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    if known.is_none()
        && let Ok(cookie) = HeaderValue::try_from(format!("{COOKIE}={session}; HttpOnly; SameSite=Strict; Path=/"))
    {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
    response
}

/// A form that this console made for this session of the browser. Handlers accept forms only through this type.
pub(super) struct Posted<T>(pub(super) T, pub(super) Visitor);

#[derive(Deserialize)]
struct Signed<T> {
    csrf: String,
    #[serde(flatten)]
    form: T,
}

impl<T: DeserializeOwned> FromRequest<Arc<Console>> for Posted<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, console: &Arc<Console>) -> Result<Self, Refusal> {
        let visitor = request.extensions().get::<Visitor>().cloned();
        let slow = |_| Refusal::Malformed(StatusCode::REQUEST_TIMEOUT, "the form took too long to arrive".to_owned());
        let form = timeout(FORM_TIME, Form::from_request(request, console)).await.map_err(slow)?;
        let Form(Signed { csrf, form }) =
            form.map_err(|rejection| Refusal::Malformed(StatusCode::BAD_REQUEST, rejection.body_text()))?;
        let visitor = visitor.filter(|visitor| csrf.as_bytes().ct_eq(visitor.csrf.as_bytes()).into());
        Ok(Self(form, visitor.ok_or(Refusal::Forged)?))
    }
}

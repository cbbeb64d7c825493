//! Decides who may see a page and send a form. Every request passes [`guard`] first. The console uses HTTP Basic, so
//! there are no sessions to keep or to steal.

use std::fs::read_to_string;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::to_bytes;
use axum::extract::{Request, State};
use axum::http::Method;
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

use super::refusal::Refusal;
use crate::arguments::ConsoleOptions;
use crate::failure::Failure;
use crate::server::names_loopback;

/// A page loads only the style sheet, runs no script, sends forms only to the console, and cannot be framed.
const HEADERS: [(HeaderName, &str); 6] = [
    (
        header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; style-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    // With `no-referrer` a browser would send `null` as the `Origin` of the console's own forms.
    (header::REFERRER_POLICY, "same-origin"),
    (header::CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

pub(super) struct Access {
    /// Whether the console listens on loopback. On loopback, the `Host` is checked, because another site may point its
    /// own name to this machine (DNS rebinding).
    loopback: bool,
    /// The digest of the token. A comparison of digests does not reveal the length of the token.
    token: Option<[u8; 32]>,
    user_header: Option<HeaderName>,
}

/// The name of the person who sends a request. `None` on loopback without a sign-in, where the forms ask for the name.
#[derive(Clone)]
pub(super) struct Visitor(pub(super) Option<String>);

impl Access {
    /// Fails if the address is not loopback and no sign-in is required.
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
        Ok(Self { loopback, token, user_header: options.user_header.clone() })
    }

    fn visitor(&self, method: &Method, headers: &HeaderMap) -> Result<Visitor, Refusal> {
        if self.loopback && !headers.get(header::HOST).is_some_and(names_loopback) {
            return Err(Refusal::Host);
        }
        if method == Method::POST && is_of_another_site(headers) {
            return Err(Refusal::OtherSite);
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
            // If a request has this header twice, a client has sent one, and the proxy has added another.
            let users: Vec<_> = headers.get_all(header).iter().map(|user| user.as_bytes().trim_ascii()).collect();
            let [user @ [_, ..]] = users[..] else { return Err(Refusal::NotOneUser(header.clone(), users.len())) };
            name = Some(String::from_utf8_lossy(user).into_owned());
        }
        Ok(Visitor(name))
    }
}

/// Whether a page of another site made a browser send this request, with the sign-in of the browser's user. Browsers
/// report the site of the page in `Sec-Fetch-Site`. To a server without TLS, browsers report the site in `Origin`. A
/// client that sends neither header is not a browser, so a page cannot make this client send a form.
fn is_of_another_site(headers: &HeaderMap) -> bool {
    if let Some(site) = headers.get("sec-fetch-site") {
        return site != "same-origin" && site != "none";
    }
    let Some(origin) = headers.get(header::ORIGIN) else { return false };
    let own = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    origin.to_str().ok().and_then(|origin| Some(origin.split_once("://")?.1)) != own
}

/// The name and the password of HTTP Basic.
fn basic(headers: &HeaderMap) -> Option<(String, String)> {
    let (scheme, encoded) = headers.get(header::AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let decoded = BASE64_STANDARD.decode(encoded.trim()).ok().filter(|_| scheme.eq_ignore_ascii_case("basic"))?;
    let decoded = String::from_utf8(decoded).ok()?;
    let (name, password) = decoded.split_once(':')?;
    Some((name.trim().to_owned(), password.to_owned()))
}

/// Passes a request on, or answers with a page that explains the refusal. Errors of axum become pages, too.
pub(super) async fn guard(State(access): State<Arc<Access>>, mut request: Request, next: Next) -> Response {
    let mut response = match access.visitor(request.method(), request.headers()) {
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
    response
}

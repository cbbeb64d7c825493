use axum::Router;
use axum::extract::Request;
use axum::http::Uri;
use tower::Layer as _;
use tower::util::{MapRequest, MapRequestLayer};

/// The parameters of the signature, which has been checked. Each attempt has other values.
const OF_THE_SIGNATURE: [&str; 2] = ["expires", "signature"];

/// Serve `ServiceExt::<Request>::into_make_service(without_signature(router))`, with `axum::ServiceExt`.
pub(crate) fn without_signature(router: Router) -> MapRequest<Router, fn(Request) -> Request> {
    MapRequestLayer::new(remove_signature as fn(Request) -> Request).layer(router)
}

fn remove_signature(mut request: Request) -> Request {
    let name = |parameter: &str| parameter.split('=').next().unwrap_or_default().to_owned();
    let is_kept = |parameter: &&str| !parameter.is_empty() && !OF_THE_SIGNATURE.contains(&&*name(parameter));
    let query = request.uri().query().unwrap_or_default();
    let kept: Vec<_> = query.split('&').filter(is_kept).collect();
    let target = [request.uri().path(), &kept.join("&")].join(if kept.is_empty() { "" } else { "?" });
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = target.parse().ok();
    // A part of a valid URI is valid.
    *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
    request
}

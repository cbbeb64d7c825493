//! The status of a gRPC call, which comes in the trailers of a response whose HTTP status is 200.

use http::{HeaderMap, HeaderName, HeaderValue, header};

pub(super) const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");

/// The layer reads this much of a gRPC response to reach its status. gRPC implementations accept messages of up to 4 MiB by
/// default; the last KiB is for the frame.
pub(super) const GRPC_LIMIT: usize = 4 * 1024 * 1024 + 1024;

/// Whether the status of the call may still come, in the trailers.
pub(super) fn has_status_in_trailers(headers: &HeaderMap) -> bool {
    let content_type = headers.get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
    content_type.is_some_and(|value| value.starts_with(b"application/grpc")) && !headers.contains_key(GRPC_STATUS)
}

/// Whether these headers or trailers say that the call failed.
pub(super) fn is_failure(fields: &HeaderMap) -> bool {
    fields.get(GRPC_STATUS).is_some_and(|status| status != "0")
}

//! Settings: which requests have a key, and which key it is.

use std::sync::Arc;

use bytes::Bytes;
use http::Method;
use http::request::Parts;

use super::{IdempotencyLayer, InvalidSetting};
use crate::MAX_PART_BYTES;
use crate::http::settings::{Denied, KeyFrom, OperationFrom};

/// OPTIONS, the longest common method, and a space.
const LONGEST_METHOD: usize = 8;

/// Settings of the key.
impl<M> IdempotencyLayer<M> {
    /// The methods that the layer covers; it passes on all others unchanged. The default is POST and PATCH. HTTP
    /// defines the other methods as idempotent (RFC 9110, section 9.2.2), and your handlers must make them so.
    #[must_use]
    pub fn with_methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|settings| settings.methods = methods.into_iter().collect())
    }

    /// Whether requests without a key reach the handler, unprotected: they are performed each time they come. The
    /// default is `false`. A transactional layer gives them a transaction, too, so the handler needs no second form.
    #[must_use]
    pub fn with_optional_key(self, optional: bool) -> Self {
        self.with(|settings| settings.key_required = !optional)
    }

    /// Whether the header must be a quoted string (RFC 9651), as the draft demands. The default is `false`, because
    /// most clients send bare words. The layer then takes the key from the header, even after
    /// [`with_key_from`](Self::with_key_from).
    #[must_use]
    pub fn with_strict_header(self, strict: bool) -> Self {
        self.with(|settings| settings.key = KeyFrom::Header { strict })
    }

    /// Takes the value of the key from another place than `Idempotency-Key`: from another header, or from a field of
    /// the body. `Ok(None)` means that the key is missing. If the function returns an error, that is the response.
    #[must_use]
    pub fn with_key_from<F>(self, value: F) -> Self
    where
        F: Fn(&Parts, &Bytes) -> Result<Option<String>, Denied> + Send + Sync + 'static,
    {
        self.with(|settings| settings.key = KeyFrom::Function(Arc::new(value)))
    }

    /// Refuses keys with fewer bytes than this. Two devices of one user may both invent the same counter or date, but
    /// not the same 36 bytes of a UUID.
    #[must_use]
    pub fn with_shortest_key(self, bytes: usize) -> Self {
        self.with(|settings| settings.shortest_key = bytes)
    }

    /// Names the operation by its method and this route, for services without an axum router that reports the matched
    /// route. Give a template such as `/payments/{id}`: with the real ids, every payment would be an operation and a
    /// time series of its own in the metrics.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::RouteTooLong`].
    pub fn with_route(self, route: impl Into<String>) -> Result<Self, InvalidSetting> {
        let (route, most) = (route.into(), MAX_PART_BYTES - LONGEST_METHOD);
        if route.len() > most {
            return Err(InvalidSetting::RouteTooLong { bytes: route.len(), most });
        }
        Ok(self.with(|settings| settings.operation = OperationFrom::Route(route)))
    }

    /// Names the operation by a function of the request. `None` is a mistake of the service, and the answer is a 500.
    #[must_use]
    pub fn with_operation<F>(self, operation: F) -> Self
    where
        F: Fn(&Parts) -> Option<String> + Send + Sync + 'static,
    {
        self.with(|settings| settings.operation = OperationFrom::Function(Arc::new(operation)))
    }
}

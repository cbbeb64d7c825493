//! Settings: which responses are stored, and how rejections look.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode, Uri};

use super::{IdempotencyLayer, InvalidSetting};
use crate::http::rejection::Rejection;
use crate::http::replay::{Seal, may_be_replayed};

/// Settings of the response.
impl<M> IdempotencyLayer<M> {
    /// Also stores responses of these statuses, from 400 to 499, which otherwise free the key. An example is "card
    /// declined", which every repeat should get. A transactional layer still undoes the handler's writes, by a
    /// savepoint, which costs every request one round trip.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::StatusNotStorable`].
    pub fn with_stored_errors(self, statuses: impl IntoIterator<Item = StatusCode>) -> Result<Self, InvalidSetting> {
        let statuses: Vec<_> = statuses.into_iter().collect();
        match statuses.iter().find(|status| !status.is_client_error()) {
            Some(status) => Err(InvalidSetting::StatusNotStorable(*status)),
            None => Ok(self.with(|settings| settings.stored_errors = statuses)),
        }
    }

    /// Also replays this header.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::HeaderNotReplayable`] for `Set-Cookie`, authentication, hop-by-hop headers, `Date`,
    /// `Content-Length`.
    pub fn with_replayed_header(self, name: HeaderName) -> Result<Self, InvalidSetting> {
        if !may_be_replayed(&name) {
            return Err(InvalidSetting::HeaderNotReplayable(name));
        }
        Ok(self.with(|settings| settings.replayed_headers.push(name)))
    }

    /// Whether the layer stores no response at all, for operations that answer with secrets. The default is `false`.
    /// With `true` a repeat gets [`NotReplayable`](Rejection::NotReplayable). For a single response, use
    /// [`NoStore`](crate::http::NoStore).
    #[must_use]
    pub fn with_no_store(self, no_store: bool) -> Self {
        self.with(|settings| settings.no_store = no_store)
    }

    /// Seals stored bodies and opens them for replays. Headers are stored as they are.
    #[must_use]
    pub fn with_seal(self, seal: impl Seal) -> Self {
        self.with(|settings| settings.seal = Some(Arc::new(seal)))
    }

    /// The function that makes a response of a rejection. The default is [`problem`](crate::http::problem). For clients
    /// that poll there is [`processing`](crate::http::processing).
    #[must_use]
    pub fn with_rejection<F>(self, rejection: F) -> Self
    where
        F: Fn(&Rejection) -> Response<Bytes> + Send + Sync + 'static,
    {
        self.with(|settings| settings.rejection = Arc::new(rejection))
    }

    /// Adds a `Link` with `rel="describedby"` to every rejection, as the draft demands. The URI is that of your API's
    /// documentation of the key and its retention.
    #[must_use]
    pub fn with_documentation(self, uri: &Uri) -> Self {
        // A `Uri` is visible ASCII without angle brackets, so this does not fail.
        let link = HeaderValue::from_str(&format!("<{uri}>; rel=\"describedby\""));
        self.with(|settings| settings.documentation = link.ok())
    }
}

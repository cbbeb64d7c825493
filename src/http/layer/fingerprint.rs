//! Settings: which parts of a request its fingerprint covers.

use std::sync::Arc;

use bytes::Bytes;
use http::HeaderName;
use http::request::Parts;

use super::{IdempotencyLayer, InvalidSetting};
use crate::fingerprint::pointer::Pointer;
use crate::http::fingerprint_choice::Compared;
use crate::{Fingerprint, InvalidBody};

/// Settings of the fingerprint. Of `with_canonical_json`, `with_json_without` and `with_fingerprint`, the last call
/// decides.
impl<M> IdempotencyLayer<M> {
    /// Whether bodies are compared as canonical JSON, without regard to `Content-Type`, instead of byte by byte. The
    /// default is `false`. `true` is for clients that build the request anew for each retry. A body that is not JSON is
    /// then refused with a 400. A body that has a number with more digits than an `f64` keeps is compared byte by byte.
    #[must_use]
    pub fn with_canonical_json(self, canonical_json: bool) -> Self {
        let compared = if canonical_json { Compared::CanonicalJson } else { Compared::Bytes };
        self.with(|settings| settings.fingerprint.compared = compared)
    }

    /// Compares bodies as [canonical JSON](Self::with_canonical_json) and ignores the parts at these JSON pointers (RFC
    /// 6901), for clients that put a timestamp or the number of the attempt into each body.
    ///
    /// ```
    /// # use pg_idempotency::http::{IdempotencyLayer, InvalidSetting};
    /// # fn f(layer: IdempotencyLayer) -> Result<IdempotencyLayer, InvalidSetting> {
    /// layer.with_json_without(["/sent_at", "/client/attempt"])
    /// # }
    /// ```
    ///
    /// A pointer to a part that the body does not have is allowed. **Ignore only parts on which the handler does not
    /// act**: two requests that differ only in them are the same, and the second gets the response of the first.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::NotAPointer`], also for the empty pointer, which is the whole body.
    pub fn with_json_without<P: Into<String>>(
        self,
        pointers: impl IntoIterator<Item = P>,
    ) -> Result<Self, InvalidSetting> {
        let parse = |text: String| Pointer::parse(&text).ok_or(InvalidSetting::NotAPointer(text));
        let pointers = pointers.into_iter().map(|text| parse(text.into())).collect::<Result<_, _>>()?;
        Ok(self.with(|settings| settings.fingerprint.compared = Compared::JsonWithout(pointers)))
    }

    /// Two requests are the same if this function returns the same [`Fingerprint`] for both. Only the key's scope and
    /// operation, and [further headers](Self::with_fingerprinted_header), count in addition: method and path do not,
    /// unless the function includes them. If it returns an error, the answer is a 400.
    ///
    /// The layer cannot see the function's code, so `name` represents it in the fingerprint. **Change the name with
    /// each change of the function**, because fingerprints of two functions with the same name are compared.
    ///
    /// ```
    /// # use pg_idempotency::Fingerprint;
    /// # use pg_idempotency::http::IdempotencyLayer;
    /// # fn f(layer: IdempotencyLayer) -> IdempotencyLayer {
    /// // Only the account and the bytes of the upload, because each attempt signs the query anew.
    /// layer.with_fingerprint("account and bytes", |parts, body| {
    ///     let account = parts.headers.get("x-account").map(|account| account.as_bytes());
    ///     Fingerprint::of_json(&(account, Fingerprint::of_bytes(body).as_bytes()))
    /// })
    /// # }
    /// ```
    #[must_use]
    pub fn with_fingerprint<F>(self, name: impl Into<String>, function: F) -> Self
    where
        F: Fn(&Parts, &Bytes) -> Result<Fingerprint, InvalidBody> + Send + Sync + 'static,
    {
        let compared = Compared::Function { name: name.into(), function: Arc::new(function) };
        self.with(|settings| settings.fingerprint.compared = compared)
    }

    /// Adds this header, with all its lines, to the fingerprint: a request with the same key and another value is
    /// [`KeyReused`](crate::http::Rejection::KeyReused). Use it for a header by which the handler selects an account, a
    /// currency or a language, and not for one that a client changes with each attempt, such as a trace or a date.
    #[must_use]
    pub fn with_fingerprinted_header(self, name: HeaderName) -> Self {
        self.with(|settings| settings.fingerprint.add_header(name))
    }
}

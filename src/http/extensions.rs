//! The values in the extensions of requests and responses. The layer, the handler and the resumer are on both sides of
//! the service's own code, which passes only a request in and a response out. So these values are their interface.
//!
//! | in a request | written by | read by |
//! |---|---|---|
//! | [`Key`] | `service.rs` before a run, `resume.rs` | an inner layer in `service.rs`, which refuses the request; `IdempotentTx::take`; the service |
//! | `Slot` of `transactional.rs` | `transactional.rs` | `IdempotentTx::take`; an inner layer in `service.rs`, which refuses the request |
//! | [`LentLease`] | `leased.rs` | `Lease::of_request`, `LeasedBody` and the two fallbacks in `leased.rs`; `service.rs`, which passes a resumed request on |
//! | [`WithoutKey`] | `service.rs`, for a leased layer | `Lease::of_request` |
//! | [`FromResumer`] | `resume.rs` | `service.rs`, which removes it; `leased.rs` |
//! | `MatchedPath`, `OriginalUri` | axum | `request.rs` |
//!
//! | in a response | written by | read by |
//! |---|---|---|
//! | [`NoStore`] | the handler | `handler.rs` |
//! | [`LastError`] | the handler | `leased.rs` |
//! | [`NotBegun`] | `LeasedBody` and the two fallbacks in `leased.rs` | `leased.rs` |
//! | [`Rejection`] | `service.rs` | an outer layer in `handler.rs` and `leased.rs`, which does not judge the response; the service |

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use http::Extensions;

use super::rejection::{Mistake, Rejection};
use crate::Key;
use crate::lease::Lease;

/// Marks a response that the layer must send and must not store. Put this value into the extensions of the response.
/// With axum, write `(Extension(NoStore), secret).into_response()`.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoStore;

/// The reason why an operation failed. Put this value into the extensions of an error response. A leased layer stores
/// the first 2000 characters as the last error of the record. The console and `idempotency-janitor show` print this
/// error. Without this value, the error is a text such as *the handler answered 503 Service Unavailable*. With axum,
/// write `(Extension(LastError(reason)), StatusCode::SERVICE_UNAVAILABLE).into_response()`.
///
/// The client does not see the reason. A transactional layer ignores the reason, because such a layer keeps nothing of
/// a failure. If a layer stores the response, the layer also ignores the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastError(pub String);

/// The lease of a request, and whether code of the service has taken the lease. Once code has taken the lease, nothing
/// proves any more that the handler has not begun. Code inside the layer may call the handler again, and the first call
/// may have had its effect.
#[derive(Clone)]
pub(super) struct LentLease {
    pub(super) lease: Lease,
    taken: Arc<AtomicBool>,
}

impl LentLease {
    pub(super) fn new(lease: Lease) -> Self {
        Self { lease, taken: Arc::default() }
    }

    pub(super) fn of(request: &Extensions) -> Option<&Self> {
        request.get()
    }

    /// Takes the lease, and returns whether the lease was taken before.
    pub(super) fn take(&self) -> bool {
        self.taken.swap(true, Ordering::Relaxed)
    }

    /// Adds the proof that no handler has begun to a response, unless code has taken the lease.
    #[cfg(feature = "axum")]
    pub(super) fn prove_not_begun(&self, response: &mut Extensions) {
        if !self.taken.load(Ordering::Relaxed) {
            response.insert(NotBegun { token: self.lease.token() });
        }
    }
}

/// The proof that no handler has begun under the claim with this token. A status is not a proof, because a handler that
/// has had an effect may also answer 404.
#[derive(Clone, Copy)]
pub(super) struct NotBegun {
    token: i64,
}

impl NotBegun {
    pub(super) fn is_proved(response: &Extensions, lease: &Lease) -> bool {
        response.get::<Self>().is_some_and(|proof| proof.token == lease.token())
    }
}

/// Marks a request without a key that a leased layer has passed on.
#[derive(Clone, Copy)]
pub(super) struct WithoutKey;

/// Marks a resumed request, whose key has a record. The layer in the service removes this mark when the layer has
/// compared its key with the key of the record.
#[derive(Clone)]
pub(super) struct FromResumer {
    key: Key,
    /// The reason why the layer in the service refused the request. The resumer reads the reason here, because code
    /// between the layer and the resumer may change the layer's response.
    mistake: Arc<Mutex<Option<String>>>,
}

impl FromResumer {
    pub(super) fn new(key: Key) -> Self {
        Self { key, mistake: Arc::default() }
    }

    /// Compares the key that the layer has found with the key of the record. Under another key, the effect would have
    /// another downstream key, and could happen twice.
    pub(super) fn meets(&self, key: &Key) -> Result<(), Rejection> {
        let mistake = (self.key != *key).then(|| Mistake::ResumedUnderAnotherKey {
            recorded: self.key.operation().to_owned(),
            found: key.operation().to_owned(),
        });
        *self.mistake.lock().unwrap_or_else(PoisonError::into_inner) = mistake.as_ref().map(ToString::to_string);
        mistake.map_or(Ok(()), |mistake| Err(mistake.into()))
    }

    /// Returns the reason why nothing was performed, if the request has another key here than in its record.
    pub(super) fn mistake(&self) -> Option<String> {
        self.mistake.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

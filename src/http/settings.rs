//! What a layer is told, as its parts read it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Response, StatusCode};
use sqlx::PgPool;

use super::choice::Choice;
use super::denied::Denied;
use super::in_flight::InFlightHere;
use super::rejection::Rejection;
use super::runs::Runs;
use super::seal::Seal;
use crate::lease::Leasing;
use crate::{Deployment, InFlight, InvalidDuration};

pub(super) type ScopeOf = dyn Fn(&Parts) -> Result<String, Denied> + Send + Sync;
pub(super) type ValueOf = dyn Fn(&Parts, &Bytes) -> Result<Option<String>, Denied> + Send + Sync;
pub(super) type OperationOf = dyn Fn(&Parts) -> Option<String> + Send + Sync;
pub(super) type RejectionOf = dyn Fn(&Rejection) -> Response<Bytes> + Send + Sync;

#[derive(Clone)]
pub(super) struct Settings {
    pub(super) pool: PgPool,
    pub(super) mode: Mode,
    pub(super) scope: Arc<ScopeOf>,
    pub(super) value: ValueFrom,
    pub(super) shortest_key: usize,
    pub(super) operation: OperationFrom,
    pub(super) methods: Vec<Method>,
    pub(super) key_required: bool,
    pub(super) retention: Duration,
    pub(super) in_flight: InFlight,
    pub(super) in_flight_here: InFlightHere,
    pub(super) transaction_required: bool,
    pub(super) deployment: Deployment,
    pub(super) select_first: bool,
    pub(super) fewest_round_trips: bool,
    pub(super) choice: Choice,
    pub(super) request_limit: usize,
    pub(super) response_limit: usize,
    pub(super) stored_errors: Vec<StatusCode>,
    pub(super) replayed_headers: Vec<HeaderName>,
    pub(super) no_store: bool,
    pub(super) seal: Option<Arc<dyn Seal>>,
    pub(super) rejection: Arc<RejectionOf>,
    pub(super) documentation: Option<HeaderValue>,
    pub(super) explicit_begin: bool,
    pub(super) runs: Runs,
    pub(super) max_runs: usize,
    pub(super) run_timeout: Duration,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Mode {
    Transactional,
    Leased(Leasing),
}

impl Mode {
    pub(super) fn of_record(self) -> crate::Mode {
        match self {
            Self::Transactional => crate::Mode::Transaction,
            Self::Leased(leasing) => leasing.mode(),
        }
    }
}

#[derive(Clone)]
pub(super) enum ValueFrom {
    Header { strict: bool },
    Function(Arc<ValueOf>),
}

#[derive(Clone)]
pub(super) enum OperationFrom {
    MatchedRoute,
    Route(String),
    Function(Arc<OperationOf>),
}

/// A setting that the layer cannot keep.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidSetting {
    /// A status that is not a client error: a success is stored anyhow, and a 5xx must stay open to a retry.
    #[error("responses of status {0} cannot be stored by choice; only 400 to 499 can")]
    StatusNotStorable(StatusCode),
    /// A header of one connection, one session or one moment.
    #[error("the header {0} must not be replayed: it belongs to one connection, one session or one moment")]
    HeaderNotReplayable(HeaderName),
    /// No JSON pointer to a part of the body.
    #[error("{0:?} is no JSON pointer to a part of the body (RFC 6901); write /name or /outer/inner")]
    NotAPointer(String),
    /// The route is too long to be part of a key.
    #[error("the route has {bytes} bytes, and {most} is the most; give the operation a shorter name: with_operation")]
    RouteTooLong {
        /// Its length.
        bytes: usize,
        /// What is taken.
        most: usize,
    },
    /// A setting of the other constructor's.
    #[error("attempts are counted for leases only; make the layer by `leased`")]
    LeasedOnly,
    /// A duration that makes no sense.
    #[error(transparent)]
    Duration(#[from] InvalidDuration),
}

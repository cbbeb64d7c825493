//! The options of mark mode.

use std::time::Duration;

use crate::limits::{RETENTION, checked, within};
use crate::{Deployment, InFlight, InvalidDuration};

/// How keys are marked: the retention, and what to do about a mark that is not committed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Marking {
    pub(super) retention: Duration,
    pub(super) in_flight: Option<InFlight>,
    pub(super) deployment: Deployment,
}

impl Marking {
    /// Makes options for marks that last for `retention`. The retention counts from the mark, by the database's clock,
    /// and does not depend on sweeps. Make it longer than the transaction that marks and processes: if the retention
    /// ends first, the mark is expired as soon as others can see it.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] under a millisecond or over ten years.
    pub const fn new(retention: Duration) -> Result<Self, InvalidDuration> {
        match within("retention", retention, RETENTION) {
            Ok(retention) => Ok(Self { retention, in_flight: None, deployment: Deployment::new() }),
            Err(invalid) => Err(invalid),
        }
    }

    /// What to do about a mark whose transaction is still open. The default is to wait for 5 seconds, or for half the
    /// retention if that is shorter.
    ///
    /// # Errors
    ///
    /// [`InvalidDuration`] for a wait under a millisecond (use [`InFlight::Reject`]), over an hour, or not shorter than
    /// the retention.
    pub const fn with_in_flight(self, in_flight: InFlight) -> Result<Self, InvalidDuration> {
        match checked(in_flight, self.retention) {
            Ok(in_flight) => Ok(Self { in_flight: Some(in_flight), ..self }),
            Err(invalid) => Err(invalid),
        }
    }

    /// How the service reaches the database, for example behind a pooler.
    #[must_use]
    pub const fn with_deployment(self, deployment: Deployment) -> Self {
        Self { deployment, ..self }
    }
}

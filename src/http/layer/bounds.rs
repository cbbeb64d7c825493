//! Settings: the bounds of sizes, waits and runs.

use std::time::Duration;

use super::{IdempotencyLayer, InvalidSetting};
use crate::InFlight;
use crate::http::runs::Runs;
use crate::limits::{RETENTION, WAIT, within};

/// Settings of the bounds.
impl<M> IdempotencyLayer<M> {
    /// What happens to a request while the first request with its key is not finished. The layer refuses it at once
    /// with a 409 and `Retry-After`, which is the default, or lets it wait for the response of the first. A request
    /// that waits polls, and holds no connection of the pool between two polls.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::Duration`] for a wait under a millisecond or over an hour.
    pub fn with_in_flight(self, in_flight: InFlight) -> Result<Self, InvalidSetting> {
        if let InFlight::Wait(limit) = in_flight {
            within("wait", limit, WAIT)?;
        }
        Ok(self.with(|settings| settings.in_flight = in_flight))
    }

    /// The largest request body. The default is 1 MiB. A larger one is refused with a 413, and nothing is claimed.
    #[must_use]
    pub fn with_request_limit(self, bytes: usize) -> Self {
        self.with(|settings| settings.request_limit = bytes)
    }

    /// The largest response body that is stored. The default is 1 MiB. A larger one is sent and not stored, and a
    /// repeat gets [`NotReplayable`](crate::http::Rejection::NotReplayable).
    #[must_use]
    pub fn with_response_limit(self, bytes: usize) -> Self {
        self.with(|settings| settings.response_limit = bytes)
    }

    /// The greatest number of [runs](crate::http#runs) at a time. A further request is refused with a 503 and
    /// `Retry-After` ([`Overloaded`](crate::http::Rejection::Overloaded)) before anything begins. The default is 32 for
    /// each connection that the pool may have: 320 for sqlx's default of 10 connections.
    ///
    /// Without a limit, clients that upload a body, hang up and continue with another key would leave any number of
    /// runs behind, each with its body. With the default, a run that waits for a connection gets it within the 30
    /// seconds for which sqlx waits, as long as handlers take about a second. Raise the limit for a leased layer whose
    /// handlers wait for other services, because they hold no connection meanwhile.
    ///
    /// A replay counts as a run, and so does a duplicate that waits for a request of another process. A duplicate that
    /// waits for a request of this process does not: it ends with its client.
    #[must_use]
    pub fn with_max_runs(self, runs: usize) -> Self {
        self.with(|settings| settings.max_runs = runs)
    }

    /// How long a handler may take, from its call to its response. After that the layer drops it at its next await, and
    /// answers with a 503 and `Retry-After` ([`TimedOut`](crate::http::Rejection::TimedOut)). A transactional layer
    /// rolls the handler's writes back and frees the key. Under a lease the time-out is a failure of the handler: at
    /// least once the key is free, at most once it is indeterminate.
    ///
    /// The default is 5 minutes, because common proxies give up after one. Without a limit, a handler that never
    /// returns would keep its connection and its key forever. Choose a longer time than the time-outs further out,
    /// which answer the client and leave the run alone.
    ///
    /// Dropping a handler stops neither its statement nor a task that it has spawned. PostgreSQL ends the statement by
    /// its own `statement_timeout`, and the transaction and its connection are in use until then.
    ///
    /// # Errors
    ///
    /// [`InvalidSetting::Duration`] under a millisecond or over ten years.
    pub fn with_run_timeout(self, limit: Duration) -> Result<Self, InvalidSetting> {
        within("run time-out", limit, RETENTION)?;
        Ok(self.with(|settings| settings.run_timeout = limit))
    }

    /// Counts the runs of this layer together with those of other layers. [`with_max_runs`](Self::with_max_runs) then
    /// applies to the sum.
    #[must_use]
    pub fn with_runs(self, runs: &Runs) -> Self {
        self.with(|settings| settings.runs = runs.clone())
    }

    /// The runs of this layer and its clones. A graceful shutdown waits for them.
    #[must_use]
    pub fn runs(&self) -> Runs {
        self.settings.runs.clone()
    }
}

//! What a scenario is given: its name, a server, a seed and some time.

use std::sync::Arc;
use std::time::Duration;

use crate::cluster::Cluster;
use crate::mutant::Mutant;

#[derive(Clone)]
pub(crate) struct Stage {
    /// The name of the scenario, and of its database.
    pub(crate) name: &'static str,
    pub(crate) cluster: Arc<Cluster>,
    /// The broken variant that makes the calls instead of the crate.
    pub(crate) mutant: Option<Mutant>,
    pub(crate) seed: u64,
    pub(crate) time: Duration,
    /// How much longer the scenario may take to reach its minimum numbers.
    pub(crate) patience: Duration,
}

impl Stage {
    /// Without a limit, for callers that are stopped when the faults are over.
    pub(crate) fn until_stopped(&self) -> Self {
        Self { time: Duration::from_secs(24 * 60 * 60), ..self.clone() }
    }
}

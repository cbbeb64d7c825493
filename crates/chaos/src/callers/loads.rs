//! Callers in each mode at the same time, each mode in a database of its own, for faults that last seconds. The effects
//! of leases and steps are on the stage's own server, which the fault does not hit.

use std::sync::Arc;
use std::time::Duration;

use super::{Answers, Callers, IN_STEPS, Leased, Pace, Way};
use crate::checker::leases::Promise;
use crate::finding::Finding;
use crate::request::SAFE_TO_DROP;
use crate::stage::Stage;
use crate::world::{KEYS, KEYS_IN_STEPS, Setup, World, outside, pool_that_waits};

/// Shorter than many faults, so that the leases of callers that are cut off lapse.
const LEASE: Duration = Duration::from_secs(2);
/// How long a call waits for a connection.
const ACQUIRE: Duration = Duration::from_secs(1);
/// The servers share the machine with the callers.
const PACE: Pace =
    Pace { limit: Duration::from_secs(3), pause: Duration::from_millis(20), thinking: Duration::from_millis(10) };

pub(crate) struct Loads {
    pub(crate) transactions: Callers,
    others: Vec<(&'static str, Callers)>,
}

impl Loads {
    /// `world` prepares the database of that name.
    pub(crate) async fn start(
        stage: &Stage,
        in_steps: bool,
        world: impl AsyncFn(&'static str, Setup) -> anyhow::Result<Arc<World>>,
    ) -> anyhow::Result<Self> {
        let outside = outside(&stage.cluster.create_database("outside").await?).await?;
        let start = async |name: &'static str, way: Way, prefix: &'static str, callers: usize| {
            let outside = matches!(way, Way::Lease(_)).then(|| outside.clone());
            let world = world(name, Setup { prefix: Some(prefix), outside, ..Setup::default() }).await?;
            // A dropped call keeps its connection until the server has answered, and steps run side by side. So there
            // are more connections than callers.
            let connections = if prefix == KEYS_IN_STEPS { 12 } else { 3 * callers };
            let pool = pool_that_waits(&world.options, u32::try_from(connections)?, ACQUIRE);
            anyhow::Ok(Callers::paced(&world, way, pool, name, callers, PACE))
        };
        let lease = |promise| Way::Lease(Leased { promise, lease: LEASE, work: 20 });
        let safe = Way::Transaction(|random, request| request.enter(random, SAFE_TO_DROP));
        let mut others = vec![
            ("marks", start("marks", Way::Mark, KEYS, 2).await?),
            ("at least once", start("at-least-once", lease(Promise::AtLeastOnce), "least-", 2).await?),
            ("at most once", start("at-most-once", lease(Promise::AtMostOnce), "most-", 2).await?),
        ];
        if in_steps {
            others.push(("in steps", start("steps", Way::Lease(IN_STEPS), KEYS_IN_STEPS, 1).await?));
        }
        Ok(Self { transactions: start("transactions", safe, KEYS, 6).await?, others })
    }

    pub(crate) async fn stop(&mut self) -> anyhow::Result<()> {
        for (_, callers) in &mut self.others {
            callers.stop().await?;
        }
        self.transactions.stop().await
    }

    /// Stops, and checks. The losses matter also if not all faults were `injected`.
    pub(crate) async fn finding(mut self, injected: anyhow::Result<()>, answers: Answers) -> anyhow::Result<Finding> {
        self.stop().await?;
        let mut finding = self.check(answers).await?;
        if let Err(error) = injected {
            finding.violations.push(format!("not all faults were injected and survived: {error:#}"));
        }
        Ok(finding)
    }

    /// Asks for every key once more, and compares all answers with the tables and with the outside.
    pub(crate) async fn check(&self, answers: Answers) -> anyhow::Result<Finding> {
        let mut finding = Finding::default();
        let transactions = [("transactions", &self.transactions)];
        for (name, callers) in transactions.into_iter().chain(self.others.iter().map(|(name, one)| (*name, one))) {
            let (mut part, lost) = callers.check(answers).await?;
            part.violations.iter_mut().for_each(|found| found.insert_str(0, &format!("{name}, ")));
            part.notes = vec![format!("{name}: {}", [vec![lost], part.notes].concat().join(", "))];
            finding.add(part);
        }
        Ok(finding)
    }
}

//! The table of all scenarios. A scenario is one entry here and one function below.

mod clock_jumps;
mod cut_connections;
mod dropped_futures;
mod killed_server;
mod killed_workers;
mod patroni;
mod rolling_upgrade;
mod suspended_owners;
mod two_services;
mod unknown_outcomes;

use futures_util::FutureExt as _;
use futures_util::future::LocalBoxFuture;

use crate::checker::leases::Promise;
use crate::finding::Finding;
use crate::mutant::Mutant;
use crate::mutant::Mutant::*;
use crate::patroni::formation::Replication;
use crate::stage::Stage;

/// The servers that a scenario needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Servers {
    Own,
    /// With `--patroni`: they take minutes for a fault.
    Patroni,
}

type Played<'a> = LocalBoxFuture<'a, anyhow::Result<Finding>>;
type Play = for<'a> fn(&'a Stage) -> Played<'a>;

pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) servers: Servers,
    /// Its share of the time.
    pub(crate) weight: u32,
    play: Play,
    pub(crate) trials: &'static [Trial],
}

/// A variant, and the words of the violation by which the scenario must catch it. Without words it must pass.
pub(crate) struct Trial {
    pub(crate) mutant: Mutant,
    pub(crate) violation: Option<&'static str>,
}

const GONE: &str = "which is not there";
const TWICE: &str = "effects, of";
const NO_ANSWER: &str = "never answered";
const TWO_COMPLETIONS: &str = "completions were accepted";
const NO_REGISTER: &str = "not linearizable";
const TWO_TEXTS: &str = "texts for one operation";
const DOUBLE: &str = "under at most once";
const PASSES: Trial = Trial { mutant: PlainSql, violation: None };

/// One entry: the servers, the name, the weight, the function that plays it, and its trials.
macro_rules! table {
    ($($servers:ident $name:literal $weight:literal, $play:expr, [$($trial:expr),*];)*) => {
        &[$(Scenario {
            name: $name,
            servers: Servers::$servers,
            weight: $weight,
            play: $play,
            trials: &[$($trial),*],
        }),*]
    };
}

/// In the order in which they are played.
pub(crate) static SCENARIOS: &[Scenario] = table! {
    Own "dropped-futures" 2, |stage| dropped_futures::play(stage).boxed_local(),
        [trial(PlainBegin, "was acknowledged, and is lost")];
    Own "killed-workers" 3, |stage| killed_workers::play(stage, None).boxed_local(),
        [trial(AutocommitClaim, NO_ANSWER), trial(WritesApart, TWICE), PASSES];
    Own "both-doors" 3, |stage| killed_workers::play_both_doors(stage).boxed_local(),
        [trial(EffectBeforeAnswer, TWICE), trial(CompletesApart, "was told: indeterminate")];
    Own "killed-server" 4, |stage| killed_server::play(stage).boxed_local(),
        [trial(SynchronousCommitOff, GONE), trial(ErrorsSwallowed, GONE), trial(AnswersBeforeCommit, GONE), PASSES];
    Own "cut-connections" 3, |stage| cut_connections::play(stage).boxed_local(),
        [trial(LostAnswerIsFailure, TWICE), PASSES];
    Own "suspended-owners" 3, |stage| suspended_owners::play(stage, Promise::AtLeastOnce).boxed_local(),
        [trial(LossIgnored, TWO_COMPLETIONS), trial(LossIgnored, NO_REGISTER)];
    Own "suspended-at-most-once" 2, |stage| suspended_owners::play(stage, Promise::AtMostOnce).boxed_local(),
        [trial(TakesOverAtMostOnce, DOUBLE)];
    Own "suspended-steps" 3, |stage| suspended_owners::play(stage, Promise::InSteps).boxed_local(),
        [trial(RowOutside, "an overtaken attempt")];
    Own "killed-leases" 3, |stage| killed_workers::play(stage, Some(Promise::AtLeastOnce)).boxed_local(),
        [trial(CompletesFirst, "without an effect")];
    Own "killed-leases-at-most-once" 3, |stage| killed_workers::play(stage, Some(Promise::AtMostOnce)).boxed_local(),
        [trial(TakesOverAtMostOnce, DOUBLE)];
    Own "unknown-outcomes" 6, |stage| unknown_outcomes::play(stage).boxed_local(),
        [trial(OneProbeSuffices, DOUBLE), trial(QuietFromClaim, DOUBLE), trial(NoTraceGrants, "requests, of at most")];
    Own "killed-steps" 3, |stage| killed_workers::play(stage, Some(Promise::InSteps)).boxed_local(),
        [trial(BegunNotWritten, TWO_TEXTS)];
    Own "killed-server-steps" 3, |stage| killed_server::play_steps(stage).boxed_local(),
        [trial(BegunNotDurable, TWO_TEXTS)];
    Own "rolling-upgrade" 2, |stage| rolling_upgrade::play(stage).boxed_local(),
        [trial(NewerSchemaRefused, "does not start"), PASSES];
    Own "two-services" 2, |stage| two_services::play(stage, None).boxed_local(),
        [trial(OneOperation, GONE)];
    Own "two-services-in-steps" 3, |stage| two_services::play(stage, Some(Promise::InSteps)).boxed_local(),
        [trial(OneOperation, "0 rows for one operation")];
    Own "clock-jumps" 3, |stage| clock_jumps::play(stage).boxed_local(),
        [trial(LossIgnored, TWO_COMPLETIONS)];
    // `patroni-delayed` shows that the rule of `patroni-strict` can fail, so these need no mutants.
    Patroni "patroni-strict" 6, |stage| patroni::play(stage, Replication::Strict).boxed_local(), [];
    Patroni "patroni-asynchronous" 3, |stage| patroni::play(stage, Replication::Asynchronous).boxed_local(), [];
    Patroni "patroni-delayed" 1, |stage| patroni::play_delayed(stage).boxed_local(), [];
};

const fn trial(mutant: Mutant, violation: &'static str) -> Trial {
    Trial { mutant, violation: Some(violation) }
}

impl Scenario {
    /// Plays it. If it fails before its end, that is a violation.
    pub(crate) async fn play(&self, stage: &Stage) -> Finding {
        (self.play)(stage).await.unwrap_or_else(|error| Finding {
            violations: vec![format!("{} failed before its end: {error:#}", self.name)],
            ..Finding::default()
        })
    }
}

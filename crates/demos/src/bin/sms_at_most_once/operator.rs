//! The operator: finds out what became of each indeterminate text, and says so.

use std::time::Duration;

use pg_idempotency::Outcome;
use pg_idempotency::operator::{release, resolve};

use crate::gateway::Receipt;
use crate::job::{Case, Jobs};
use crate::sms::{Failure, Sms};
use crate::worker::leasing;

/// As long as the crate remembers by default what a worker has stored.
const RETENTION: Duration = Duration::from_secs(24 * 60 * 60);

/// What was decided, and how often.
#[derive(Default)]
pub(crate) struct Decided {
    pub(crate) resolved: usize,
    pub(crate) released: usize,
}

/// Decides every case there is. The jobs go back to the workers, who hear what became of the text, or send it.
///
/// The token says which claim was looked into. Should another operator have been faster, nothing is changed, and this
/// ends with `Changed`.
pub(crate) async fn decide(jobs: &Jobs, sms: &Sms, run: &str) -> anyhow::Result<Decided> {
    let mut decided = Decided::default();
    println!("\nfor the operator:");
    println!(" job  attempt  {:<16}  {:>20}  {:<52}  gateway", "claimed at", "token", "last error");
    for Case { job, found } in jobs.indeterminate().await? {
        let key = job.key(run)?;
        let sent = sms.look_up(job.number).await?;
        let verdict = match &sent {
            Some(receipt) => {
                resolve(&jobs.pool, &key, found.token, receipt, RETENTION).await?;
                decided.resolved += 1;
                "resolve: was sent"
            }
            None => {
                release(&jobs.pool, &key, found.token, &[], "the gateway has no such text").await?;
                decided.released += 1;
                "release: was not sent"
            }
        };
        println!(
            "{:>4}  {:>7}  {:<16}  {:>20}  {:<52}  {verdict}",
            job.number,
            found.attempt,
            found.claimed_at.format("%H:%M:%S%.3f UTC"),
            found.token,
            found.last_error.as_deref().unwrap_or("none: its worker died"),
        );
        jobs.give_back(job.number, Duration::ZERO).await?;
    }
    Ok(decided)
}

/// Asks for every text once more, as a queue that has lost its marks would. Returns how many got the receipt of the one
/// text that was sent.
pub(crate) async fn ask_again(jobs: &Jobs, sms: &Sms, run: &str, texts: &[i64]) -> anyhow::Result<usize> {
    let mut replayed = 0;
    for job in jobs.all(texts).await? {
        let again: Result<Outcome<Receipt>, Failure> =
            leasing()?.ensure(&jobs.pool, &job.key(run)?, &job.text, async |_| sms.send(&job).await).await;
        if let Outcome::Replayed(receipt) = again?
            && Some(receipt) == sms.look_up(job.number).await?
        {
            replayed += 1;
        }
    }
    Ok(replayed)
}

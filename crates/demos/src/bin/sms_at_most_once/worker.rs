//! A worker, in two ways: the first has sent ten texts to one customer, and the second sends no text twice.

use std::time::Duration;

use demos::outside::{Failure, Outside, reference};
use demos::schema::Schema;
use pg_idempotency::lease::{Leasing, Policy};
use pg_idempotency::{Error, Outcome};
use tokio::time::sleep;

use crate::jobs::{Job, Jobs};

/// After this long, a text whose worker died is left to the operator. 40 seconds are usual. This one has to be watched.
const LEASE: Duration = Duration::from_secs(2);

/// Between two looks into an empty queue.
const PAUSE: Duration = Duration::from_millis(50);

/// The jobs, a claim and its renewal can each need a connection at the same time.
const CONNECTIONS: u32 = 3;

/// Ends only with an error, or with the process.
pub(crate) async fn work(schema: &Schema, arguments: &[String]) -> anyhow::Result<()> {
    let [way, gateway] = arguments else { anyhow::bail!("a worker gets its way and the gateway's URL") };
    let jobs = Jobs { pool: schema.pool(CONNECTIONS).await?, scope: schema.scope("shop") };
    let outside = Outside::new(gateway);
    println!("ready");
    loop {
        match jobs.take().await? {
            Some(job) if way == "naive" => naive(&jobs, &outside, &job).await?,
            Some(job) => at_most_once(&jobs, &outside, &job).await?,
            None => sleep(PAUSE).await,
        }
    }
}

/// This looks right: a job is done when it is marked, and is tried again until then.
async fn naive(jobs: &Jobs, outside: &Outside, job: &Job) -> anyhow::Result<()> {
    outside.text(job.number.to_string(), &job.phone).await?;
    // If the worker dies before this line, nothing in the database tells of the text.
    Ok(jobs.set(job, "sent", Duration::ZERO).await?)
}

/// Sends the job's text under a lease, or returns that it was sent.
pub(crate) async fn send(
    jobs: &Jobs,
    outside: &Outside,
    job: &Job,
) -> Result<Outcome<demos::gateway::Receipt>, Failure> {
    let key = jobs.key(job).map_err(Error::from)?;
    let leasing = Leasing::new(Policy::AtMostOnce { lease: LEASE }).map_err(Error::from)?;
    leasing
        .ensure(&jobs.pool, &key, job, async |lease| {
            let reference = reference(&lease.downstream_key(), lease.attempt());
            match outside.text(reference, &job.phone).await {
                // Every other error leaves the text to the operator.
                Err(error @ Failure::NotDone(_)) => Err(lease.not_performed(error)),
                sent => sent,
            }
        })
        .await
}

async fn at_most_once(jobs: &Jobs, outside: &Outside, job: &Job) -> anyhow::Result<()> {
    let (state, after) = match send(jobs, outside, job).await {
        Ok(_) => ("sent", Duration::ZERO),
        // Another worker is sending it, or was when it died.
        Err(Failure::Idempotency(Error::InFlight { retry_after, .. })) => ("waiting", retry_after),
        Err(Failure::Idempotency(Error::Indeterminate { .. })) => ("in doubt", Duration::ZERO),
        // A text that was not sent may be claimed at once. A text that was perhaps sent is indeterminate now, and the
        // text of a lost lease will be: the next worker learns that, and leaves it to the operator.
        Err(Failure::NotDone(_) | Failure::Unknown(_) | Failure::Idempotency(Error::LeaseLost)) => {
            ("waiting", Duration::ZERO)
        }
        Err(error) => return Err(error.into()),
    };
    Ok(jobs.set(job, state, after).await?)
}

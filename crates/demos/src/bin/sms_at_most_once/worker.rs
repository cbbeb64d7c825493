//! A worker, in two ways: the one that sent ten texts, and the one that sends none twice.

use std::time::Duration;

use anyhow::bail;
use pg_idempotency::Error;
use pg_idempotency::lease::{Leasing, Policy};
use tokio::time::sleep;

use crate::job::{Indeterminate, Job, Jobs};
use crate::schema::Schema;
use crate::sms::{Failure, Sms};

/// How long it takes until a text whose worker died is left to the operator. 40 seconds are usual; this one has to be
/// watched.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

/// Between two looks into an empty queue.
const PAUSE: Duration = Duration::from_millis(50);

/// The jobs, a claim and a renewal of it can want a connection at the same time.
const CONNECTIONS: u32 = 3;

#[derive(Clone, Copy)]
pub(crate) enum Way {
    Naive,
    AtMostOnce,
}

impl Way {
    pub(crate) fn as_argument(self) -> &'static str {
        match self {
            Self::Naive => "naive",
            Self::AtMostOnce => "at-most-once",
        }
    }

    pub(crate) fn from_argument(argument: &str) -> anyhow::Result<Self> {
        match argument {
            "naive" => Ok(Self::Naive),
            "at-most-once" => Ok(Self::AtMostOnce),
            _ => bail!("{argument:?} is no way to send a text"),
        }
    }
}

/// The one policy of the operation: whoever asks under its keys, also the operator, asks under this.
pub(crate) fn leasing() -> Result<Leasing, Error> {
    Ok(Leasing::new(Policy::AtMostOnce { lease: LEASE })?)
}

/// Ends only with an error, or with the process.
pub(crate) async fn work(way: Way, sms: Sms, schema: Schema) -> anyhow::Result<()> {
    let jobs = Jobs { pool: schema.pool(CONNECTIONS).await? };
    loop {
        match (jobs.take().await?, way) {
            (Some(job), Way::Naive) => naive(&jobs, &sms, &job).await?,
            (Some(job), Way::AtMostOnce) => at_most_once(&jobs, &sms, &schema.run, &job).await?,
            (None, _) => sleep(PAUSE).await,
        }
    }
}

/// Looks right: a job is done when it is marked, and is tried again until then.
async fn naive(jobs: &Jobs, sms: &Sms, job: &Job) -> anyhow::Result<()> {
    sms.send(job).await?;
    // A worker that dies before this line has sent a text that nobody knows of.
    jobs.sent(job).await?;
    Ok(())
}

async fn at_most_once(jobs: &Jobs, sms: &Sms, run: &str, job: &Job) -> anyhow::Result<()> {
    let sent = leasing()?
        .ensure(&jobs.pool, &job.key(run)?, &job.text, async |lease| match sms.send(job).await {
            // Without these words, an error leaves the text to the operator.
            Err(error @ Failure::NotSent(_)) => Err(lease.not_performed(error)),
            sent => sent,
        })
        .await;
    match sent {
        Ok(_) => jobs.sent(job).await?,
        // Another worker is at it, or was when it died.
        Err(Failure::Idempotency(Error::InFlight { retry_after, .. })) => {
            jobs.give_back(job.number, retry_after).await?;
        }
        Err(Failure::Idempotency(Error::Indeterminate { attempt, claimed_at, last_error, token, .. })) => {
            let found = Indeterminate { attempt: attempt.into(), claimed_at, last_error, token };
            jobs.leave_to_operator(job, &found).await?;
        }
        // What was not sent may be claimed at once. What was perhaps sent is indeterminate from now on, and what is
        // under a lost lease will be: the next worker is told, and tells the operator.
        Err(Failure::NotSent(_) | Failure::Unknown(_) | Failure::Idempotency(Error::LeaseLost)) => {
            jobs.give_back(job.number, Duration::ZERO).await?;
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

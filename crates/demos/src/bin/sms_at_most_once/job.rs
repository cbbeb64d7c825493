//! The jobs: a text each, delivered again and again until it is marked as sent, or left to an operator.

use std::time::Duration;

use pg_idempotency::chrono::{DateTime, Utc};
use pg_idempotency::{InvalidKey, Key};
use serde::Serialize;
use sqlx::PgPool;

/// How long a job is out of sight once it was taken: what a crash costs where nothing else stops the next worker.
const VISIBILITY: Duration = Duration::from_millis(300);

pub(crate) struct Jobs {
    pub(crate) pool: PgPool,
}

#[derive(sqlx::FromRow)]
pub(crate) struct Job {
    pub(crate) number: i64,
    #[sqlx(flatten)]
    pub(crate) text: Text,
}

/// What goes out, and what must be the same in every attempt: the body of the operation.
#[derive(Serialize, sqlx::FromRow)]
pub(crate) struct Text {
    pub(crate) phone: String,
    pub(crate) text: String,
}

/// A job whose text was sent, or was not.
#[derive(sqlx::FromRow)]
pub(crate) struct Case {
    #[sqlx(flatten)]
    pub(crate) job: Job,
    #[sqlx(flatten)]
    pub(crate) found: Indeterminate,
}

/// What [`pg_idempotency::Error::Indeterminate`] tells of a job's claim.
#[derive(sqlx::FromRow)]
pub(crate) struct Indeterminate {
    pub(crate) attempt: i64,
    pub(crate) claimed_at: DateTime<Utc>,
    pub(crate) last_error: Option<String>,
    pub(crate) token: i64,
}

impl Job {
    /// Jobs are numbered anew in every run, and the keys of earlier runs are remembered.
    pub(crate) fn key(&self, run: &str) -> Result<Key, InvalidKey> {
        Key::new("shop", "sms.sent", format!("{run}-{}", self.number))
    }
}

impl Jobs {
    /// Adds so many, and gives their numbers.
    pub(crate) async fn add(&self, texts: i64) -> sqlx::Result<Vec<i64>> {
        let sql = "
            insert into job (phone, text)
            select '+1202555' || 100 + number, 'Your parcel ' || number || ' is on its way.'
            from generate_series(0, $1::int8 - 1) as number
            returning number
        ";
        sqlx::query_scalar(sql).bind(texts).fetch_all(&self.pool).await
    }

    pub(crate) async fn take(&self) -> sqlx::Result<Option<Job>> {
        let sql = "
            update job
            set visible_at = statement_timestamp() + make_interval(secs => $1::float8)
            where number = (
                select number
                from job
                where state = 'waiting' and visible_at <= statement_timestamp()
                order by visible_at
                limit 1
                for update skip locked
            )
            returning number, phone, text
        ";
        sqlx::query_as(sql).bind(VISIBILITY.as_secs_f64()).fetch_optional(&self.pool).await
    }

    pub(crate) async fn sent(&self, job: &Job) -> sqlx::Result<()> {
        let sql = "update job set state = 'sent' where number = $1::int8";
        sqlx::query(sql).bind(job.number).execute(&self.pool).await.map(drop)
    }

    /// To be taken again after this long.
    pub(crate) async fn give_back(&self, number: i64, after: Duration) -> sqlx::Result<()> {
        let sql = "
            update job
            set state = 'waiting', visible_at = statement_timestamp() + make_interval(secs => $2::float8)
            where number = $1::int8
        ";
        sqlx::query(sql).bind(number).bind(after.as_secs_f64()).execute(&self.pool).await.map(drop)
    }

    pub(crate) async fn leave_to_operator(&self, job: &Job, found: &Indeterminate) -> sqlx::Result<()> {
        let sql = "
            update job
            set state = 'indeterminate', attempt = $2::int8, claimed_at = $3::timestamptz, last_error = $4::text,
                token = $5::int8
            where number = $1::int8
        ";
        sqlx::query(sql)
            .bind(job.number)
            .bind(found.attempt)
            .bind(found.claimed_at)
            .bind(&found.last_error)
            .bind(found.token)
            .execute(&self.pool)
            .await
            .map(drop)
    }

    pub(crate) async fn indeterminate(&self) -> sqlx::Result<Vec<Case>> {
        let sql = "
            select number, phone, text, attempt, claimed_at, last_error, token
            from job
            where state = 'indeterminate'
            order by number
        ";
        sqlx::query_as(sql).fetch_all(&self.pool).await
    }

    pub(crate) async fn all(&self, numbers: &[i64]) -> sqlx::Result<Vec<Job>> {
        let sql = "select number, phone, text from job where number = any($1::int8[])";
        sqlx::query_as(sql).bind(numbers).fetch_all(&self.pool).await
    }

    /// How many a worker may still do.
    pub(crate) async fn left(&self) -> sqlx::Result<i64> {
        sqlx::query_scalar("select count(*) from job where state = 'waiting'").fetch_one(&self.pool).await
    }
}

//! The jobs: a text each, delivered again and again until it is marked as sent, or left to an operator.

use std::time::Duration;

use pg_idempotency::{InvalidKey, Key};
use serde::Serialize;
use sqlx::PgPool;

pub(crate) const TABLES: &str = "
    create table job (
        number bigint generated always as identity primary key,
        phone text not null,
        text text not null,
        state text not null default 'waiting' check (state in ('waiting', 'sent', 'in doubt')),
        -- A worker that takes the job moves this time, so the job comes again if the worker dies.
        visible_at timestamptz not null default now()
    );
";

/// How long a job is invisible after it was taken: the delay after a crash where nothing else stops the next worker.
const VISIBILITY: Duration = Duration::from_millis(300);

pub(crate) struct Jobs {
    pub(crate) pool: PgPool,
    pub(crate) scope: String,
}

/// It must be the same in every attempt: it is the body of the operation.
#[derive(Clone, Serialize, sqlx::FromRow)]
pub(crate) struct Job {
    pub(crate) number: i64,
    pub(crate) phone: String,
    text: String,
}

impl Jobs {
    pub(crate) fn key(&self, job: &Job) -> Result<Key, InvalidKey> {
        Key::new(&self.scope, "sms.sent", job.number.to_string())
    }

    pub(crate) async fn add(&self, jobs: i64) -> sqlx::Result<Vec<Job>> {
        let sql = "
            insert into job (phone, text)
            select 'phone ' || number, 'Your parcel arrives today.'
            from generate_series((select count(*) from job), (select count(*) from job) + $1::int8 - 1) as number
            returning number, phone, text
        ";
        sqlx::query_as(sql).bind(jobs).fetch_all(&self.pool).await
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

    /// A job that is waiting can be taken again after this long.
    pub(crate) async fn set(&self, job: &Job, state: &str, visible_after: Duration) -> sqlx::Result<()> {
        let sql = "
            update job
            set state = $2::text, visible_at = statement_timestamp() + make_interval(secs => $3::float8)
            where number = $1::int8
        ";
        let seconds = visible_after.as_secs_f64();
        sqlx::query(sql).bind(job.number).bind(state).bind(seconds).execute(&self.pool).await.map(drop)
    }

    pub(crate) async fn in_doubt(&self) -> sqlx::Result<Vec<Job>> {
        let sql = "select number, phone, text from job where state = 'in doubt'";
        sqlx::query_as(sql).fetch_all(&self.pool).await
    }
}

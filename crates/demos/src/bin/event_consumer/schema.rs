//! The tables of one run, in a schema of their own.

use std::str::FromStr as _;
use std::time::Duration;

use anyhow::Context as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{AssertSqlSafe, PgPool};

/// This is how late the error comes when nothing listens on the database's port.
const ACQUIRE_LIMIT: Duration = Duration::from_secs(10);

pub(crate) struct Schema {
    url: String,
    /// Eight hexadecimal digits.
    pub(crate) run: String,
}

impl Schema {
    pub(crate) fn new(url: String, run: String) -> Self {
        Self { url, run }
    }

    fn name(&self) -> String {
        format!("event_consumer_{}", self.run)
    }

    /// Connections that find the run's tables without a schema's name. The crate's statements name theirs.
    pub(crate) async fn pool(&self, connections: u32) -> anyhow::Result<PgPool> {
        let options =
            PgConnectOptions::from_str(&self.url).context("DATABASE_URL is not the URL of a PostgreSQL database")?;
        let options = options.options([("search_path", self.name())]);
        let pool = PgPoolOptions::new().max_connections(connections).acquire_timeout(ACQUIRE_LIMIT);
        pool.connect_with(options).await.context("cannot connect to the database")
    }

    pub(crate) async fn create(&self) -> anyhow::Result<()> {
        let pool = self.pool(1).await?;
        pg_idempotency::migrate(&pool).await?;
        // A proof, not a service: every statement is held to the rules of a record.
        sqlx::raw_sql(demos::STRICT).execute(&pool).await?;
        sqlx::raw_sql(AssertSqlSafe(format!("create schema {}", self.name()))).execute(&pool).await?;
        sqlx::raw_sql(TABLES).execute(&pool).await?;
        Ok(())
    }

    pub(crate) async fn drop(&self) -> anyhow::Result<()> {
        let pool = self.pool(1).await?;
        // A notice for each of its tables would go to the log.
        let sql = format!("set client_min_messages = warning; drop schema {} cascade", self.name());
        sqlx::raw_sql(AssertSqlSafe(sql)).execute(&pool).await?;
        Ok(())
    }
}

const TABLES: &str = "
    create table message (
        number bigint generated always as identity primary key,
        -- Not unique: a sender that got no answer sends again.
        request_id text not null,
        body text not null,
        -- How often this demo kills the worker that is at it.
        kills bigint not null,
        state text not null default 'waiting',
        -- From when on it may be delivered. A delivery moves it, so that the message comes again should its worker die.
        visible_at timestamptz not null default now(),
        result text,
        last_error text,
        constraint known_state check (state in ('waiting', 'in progress', 'failed', 'completed', 'poison')),
        constraint result_only_when_completed check ((state = 'completed') = (result is not null))
    );

    create table delivery (
        number bigint generated always as identity primary key,
        message bigint not null references message,
        request_id text not null,
        worker bigint not null,
        -- Null while the worker is at it.
        outcome text,
        -- When the claim was made whose owner was killed.
        claimed_at timestamptz,
        constraint known_outcome check (
            outcome in ('performed', 'replayed', 'failed', 'in flight', 'lease lost', 'set aside', 'killed')
        )
    );

    -- The outside world. Nothing is unique in it, because a world that dedupes needs no help.
    create table effect (
        request_id text not null,
        delivery bigint not null,
        attempt bigint not null,
        at timestamptz not null default clock_timestamp()
    );

    -- A request, whose message may have come several times.
    create view request as
    select
        request_id,
        body,
        bool_or(state = 'completed') as completed,
        bool_or(state = 'poison') as set_aside,
        count(*) as messages,
        (select count(*) from effect where effect.request_id = message.request_id) as effects,
        (
            select count(*)
            from delivery
            where delivery.request_id = message.request_id and outcome in ('killed', 'failed', 'lease lost')
        ) as cut_short,
        (
            select count(*) from delivery where delivery.request_id = message.request_id and outcome = 'performed'
        ) as performed
    from message
    group by request_id, body;

    create view stored as
    select value as request_id, convert_from(response_body, 'UTF8') as result
    from idempotency.record
    where scope = 'queue' and operation = 'message.handled' and completed_at is not null
        and value in (select request_id from message);
";

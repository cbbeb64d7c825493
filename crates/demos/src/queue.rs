//! A queue that delivers at least once: a message that a worker neither finishes nor gives back is delivered again.

use std::time::Duration;

use serde::Serialize;
use sqlx::PgPool;
use tokio::time::sleep;

/// The queue's table, for a demo's schema.
pub const TABLES: &str = "
    create table message (
        number bigint generated always as identity primary key,
        -- Not unique: a sender without an answer sends again.
        request_id text not null,
        -- Every state but 'waiting' is final.
        state text not null default 'waiting',
        -- A delivery moves this time, so the message is delivered again if its worker dies.
        visible_at timestamptz not null default statement_timestamp()
    );
";

/// How long a message is invisible after a delivery: the delay after a crash where nothing else stops the next worker.
const VISIBILITY: Duration = Duration::from_millis(300);

/// Between two looks into the queue.
const PAUSE: Duration = Duration::from_millis(50);

/// A queue in the tables of a run.
pub struct Queue {
    /// Connections of the run's schema.
    pub pool: PgPool,
}

/// A message, which is the body of its operation, the same in every delivery.
#[derive(Clone, Serialize, sqlx::FromRow)]
pub struct Message {
    #[serde(skip)]
    number: i64,
    /// The sender's name for the request.
    pub request_id: String,
}

impl Queue {
    /// Appends a message.
    pub async fn send(&self, request_id: &str) -> sqlx::Result<()> {
        let sql = "insert into message (request_id) values ($1::text)";
        sqlx::query(sql).bind(request_id).execute(&self.pool).await.map(drop)
    }

    /// Delivers the message that has been visible for the longest time.
    async fn take(&self) -> sqlx::Result<Option<Message>> {
        let sql = "
            update message
            set visible_at = statement_timestamp() + make_interval(secs => $1::float8)
            where number = (
                select number
                from message
                where state = 'waiting' and visible_at <= statement_timestamp()
                order by visible_at, number
                limit 1
                for update skip locked
            )
            returning number, request_id
        ";
        sqlx::query_as(sql).bind(VISIBILITY.as_secs_f64()).fetch_optional(&self.pool).await
    }

    /// Acknowledges the message: it is not delivered again. Two workers may have one message, and the first one
    /// decides.
    pub async fn ack(&self, message: &Message, state: &str) -> sqlx::Result<()> {
        let sql = "update message set state = $2::text where number = $1::int8 and state = 'waiting'";
        sqlx::query(sql).bind(message.number).bind(state).execute(&self.pool).await.map(drop)
    }

    /// Gives the message back, to be delivered again after this time.
    pub async fn nack(&self, message: &Message, after: Duration) -> sqlx::Result<()> {
        let sql = "
            update message
            set visible_at = statement_timestamp() + make_interval(secs => $2::float8)
            where number = $1::int8 and state = 'waiting'
        ";
        sqlx::query(sql).bind(message.number).bind(after.as_secs_f64()).execute(&self.pool).await.map(drop)
    }

    /// The messages in this state.
    pub async fn in_state(&self, state: &str) -> sqlx::Result<Vec<Message>> {
        let sql = "select number, request_id from message where state = $1::text order by number";
        sqlx::query_as(sql).bind(state).fetch_all(&self.pool).await
    }

    /// Handles one message after the other. Ends only with an error, or with the process.
    pub async fn work(&self, handle: impl AsyncFn(&Message) -> anyhow::Result<()>) -> anyhow::Result<()> {
        println!("ready");
        self.deliver(handle).await
    }

    /// The same, for a worker that handles several messages at the same time.
    pub async fn deliver(&self, handle: impl AsyncFn(&Message) -> anyhow::Result<()>) -> anyhow::Result<()> {
        loop {
            match self.take().await? {
                Some(message) => handle(&message).await?,
                None => sleep(PAUSE).await,
            }
        }
    }

    /// Returns when no message waits any more.
    pub async fn handled(&self) -> anyhow::Result<()> {
        while !self.in_state("waiting").await?.is_empty() {
            sleep(PAUSE).await;
        }
        Ok(())
    }
}

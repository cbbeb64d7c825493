//! A queue that delivers at least once: a message that was neither acknowledged nor given back is delivered again.

use std::process;
use std::time::Duration;

use serde::Serialize;
use sqlx::PgPool;

pub(crate) const TABLES: &str = "
    create table message (
        number bigint generated always as identity primary key,
        -- Not unique: a sender without an answer sends again.
        request_id text not null,
        body text not null,
        -- How often this demo kills the worker that handles it.
        kills bigint not null,
        state text not null default 'waiting' check (state in ('waiting', 'completed', 'poison')),
        -- A delivery moves this time, so the message is delivered again if its worker dies.
        visible_at timestamptz not null default now(),
        result text,
        check ((state = 'completed') = (result is not null))
    );

    create table delivery (
        number bigint generated always as identity primary key,
        message bigint not null references message,
        request_id text not null,
        worker bigint not null,
        -- Null while the worker handles it.
        outcome text check (
            outcome in ('performed', 'replayed', 'failed', 'in flight', 'lease lost', 'set aside', 'killed')
        )
    );

    -- The outside world. Nothing is unique in it, because a world that deduplicates needs no help.
    create table effect (request_id text not null, delivery bigint not null);

    -- A request, whose message may have come several times. An attempt that was cut short may have had its effect.
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
    from records
    where completed_at is not null;
";

/// How long a message is invisible after a delivery. Slow work takes longer, as it does in every old queue: then a
/// second worker gets the message while the first one is alive.
const VISIBILITY: Duration = Duration::from_secs(1);

/// A message's body. Here it says what the outside world does.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, sqlx::Type)]
#[serde(rename_all = "snake_case")]
#[sqlx(type_name = "text", rename_all = "snake_case")]
pub(crate) enum Body {
    Plain,
    /// Takes longer than a lease.
    Slow,
    FailsTwice,
    AlwaysFails,
}

#[derive(Clone)]
pub(crate) struct Queue {
    pub(crate) pool: PgPool,
    pub(crate) scope: String,
}

/// A message that a worker has to handle.
#[derive(sqlx::FromRow)]
pub(crate) struct Delivery {
    pub(crate) number: i64,
    message: i64,
    pub(crate) request_id: String,
    pub(crate) body: Body,
}

impl Queue {
    pub(crate) async fn send(&self, request_id: &str, body: Body, kills: i64) -> sqlx::Result<()> {
        let sql = "insert into message (request_id, body, kills) values ($1::text, $2::text, $3::int8)";
        sqlx::query(sql).bind(request_id).bind(body).bind(kills).execute(&self.pool).await.map(drop)
    }

    pub(crate) async fn take(&self) -> sqlx::Result<Option<Delivery>> {
        let sql = "
            with next as (
                select number
                from message
                where state = 'waiting' and visible_at <= statement_timestamp()
                order by number
                limit 1
                for update skip locked
            ), delivered as (
                update message
                set visible_at = statement_timestamp() + make_interval(secs => $1::float8)
                where number = (select number from next)
                returning number as message, request_id, body
            ), inserted as (
                insert into delivery (message, request_id, worker)
                select message, request_id, $2::int8
                from delivered
                returning number
            )
            select inserted.number, message, request_id, body
            from delivered, inserted
        ";
        let (visibility, worker) = (VISIBILITY.as_secs_f64(), i64::from(process::id()));
        sqlx::query_as(sql).bind(visibility).bind(worker).fetch_optional(&self.pool).await
    }

    /// The message is done, with this result.
    pub(crate) async fn ack(&self, delivery: &Delivery, outcome: &str, result: &str) -> sqlx::Result<()> {
        self.end(delivery, outcome, "completed", Duration::ZERO, Some(result)).await
    }

    /// Gives the message back, to be delivered again after this long.
    pub(crate) async fn nack(&self, delivery: &Delivery, outcome: &str, after: Duration) -> sqlx::Result<()> {
        self.end(delivery, outcome, "waiting", after, None).await
    }

    pub(crate) async fn set_aside(&self, delivery: &Delivery) -> sqlx::Result<()> {
        self.end(delivery, "set aside", "poison", Duration::ZERO, None).await
    }

    /// Two workers may have one message. When one has completed it, the other's nack must not bring it back.
    async fn end(
        &self,
        delivery: &Delivery,
        outcome: &str,
        state: &str,
        visible_after: Duration,
        result: Option<&str>,
    ) -> sqlx::Result<()> {
        sqlx::query(
            "
            with ended as (update delivery set outcome = $2::text where number = $1::int8)
            update message
            set state = $4::text, visible_at = statement_timestamp() + make_interval(secs => $5::float8),
                result = $6::text
            where number = $3::int8 and state = 'waiting'
            ",
        )
        .bind(delivery.number)
        .bind(outcome)
        .bind(delivery.message)
        .bind(state)
        .bind(visible_after.as_secs_f64())
        .bind(result)
        .execute(&self.pool)
        .await
        .map(drop)
    }
}

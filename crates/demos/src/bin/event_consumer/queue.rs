//! A queue that delivers at least once: a message that was neither acknowledged nor given back comes again.

use std::process;
use std::time::Duration;

use pg_idempotency::Outcome;
use sqlx::PgPool;

use crate::effect::Receipt;
use crate::plan::Body;

/// How long a message is out of sight once it was delivered. Slow work takes longer, as it comes to be in any queue
/// that is old enough: then a second worker gets the message while the first is alive.
const VISIBILITY: Duration = Duration::from_secs(1);

pub(crate) struct Queue {
    pub(crate) pool: PgPool,
}

/// A message in a worker's hand.
#[derive(sqlx::FromRow)]
pub(crate) struct Delivery {
    pub(crate) number: i64,
    message: i64,
    pub(crate) request_id: String,
    pub(crate) body: Body,
}

/// Why a message is given back.
#[derive(Clone, Copy)]
pub(crate) enum Why {
    InFlight,
    LeaseLost,
    Failed,
}

impl Queue {
    pub(crate) async fn send(&self, request_id: &str, body: Body, kills: i64) -> sqlx::Result<()> {
        sqlx::query("insert into message (request_id, body, kills) values ($1::text, $2::text, $3::int8)")
            .bind(request_id)
            .bind(body)
            .bind(kills)
            .execute(&self.pool)
            .await
            .map(drop)
    }

    pub(crate) async fn take(&self) -> sqlx::Result<Option<Delivery>> {
        let mut transaction = self.pool.begin().await?;
        let next: Option<i64> = sqlx::query_scalar(
            "
            select number
            from message
            where state in ('waiting', 'in progress', 'failed') and visible_at <= statement_timestamp()
            order by number
            limit 1
            for update skip locked
            ",
        )
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(message) = next else { return Ok(None) };
        let delivery = sqlx::query_as(
            "
            with delivered as (
                update message
                set state = 'in progress', visible_at = statement_timestamp() + make_interval(secs => $2::float8)
                where number = $1::int8
                returning number as message, request_id, body
            ), inserted as (
                insert into delivery (message, request_id, worker)
                select message, request_id, $3::int8
                from delivered
                returning number
            )
            select inserted.number, message, request_id, body
            from delivered, inserted
            ",
        )
        .bind(message)
        .bind(VISIBILITY.as_secs_f64())
        .bind(i64::from(process::id()))
        .fetch_one(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(Some(delivery))
    }

    pub(crate) async fn ack(&self, delivery: &Delivery, outcome: &Outcome<Receipt>) -> anyhow::Result<()> {
        let (how, receipt) = match outcome {
            Outcome::Performed(receipt) => ("performed", receipt),
            Outcome::Replayed(receipt) => ("replayed", receipt),
        };
        let result = serde_json::to_string(receipt)?;
        Ok(self.end(delivery, how, "completed", Duration::ZERO, Some(&result), None).await?)
    }

    /// Gives the message back, to be delivered again after this long.
    pub(crate) async fn nack(&self, delivery: &Delivery, why: Why, error: &str, after: Duration) -> sqlx::Result<()> {
        let (how, state) = match why {
            Why::InFlight => ("in flight", "in progress"),
            Why::LeaseLost => ("lease lost", "failed"),
            Why::Failed => ("failed", "failed"),
        };
        self.end(delivery, how, state, after, None, Some(error)).await
    }

    pub(crate) async fn set_aside(&self, delivery: &Delivery, error: &str) -> sqlx::Result<()> {
        self.end(delivery, "set aside", "poison", Duration::ZERO, None, Some(error)).await
    }

    /// Two workers may have one message. When the one has completed it, the other's nack must not bring it back.
    async fn end(
        &self,
        delivery: &Delivery,
        how: &str,
        state: &str,
        visible_after: Duration,
        result: Option<&str>,
        error: Option<&str>,
    ) -> sqlx::Result<()> {
        sqlx::query(
            "
            with ended as (update delivery set outcome = $2::text where number = $1::int8)
            update message
            set state = $4::text, visible_at = statement_timestamp() + make_interval(secs => $5::float8),
                result = $6::text, last_error = $7::text
            where number = $3::int8 and state not in ('completed', 'poison')
            ",
        )
        .bind(delivery.number)
        .bind(how)
        .bind(delivery.message)
        .bind(state)
        .bind(visible_after.as_secs_f64())
        .bind(result)
        .bind(error)
        .execute(&self.pool)
        .await
        .map(drop)
    }

    /// How many messages are in each state.
    pub(crate) async fn states(&self) -> sqlx::Result<Vec<(String, i64)>> {
        let sql = "
            select state, count(*)
            from message
            group by state
            order by array_position(array['waiting', 'in progress', 'failed', 'completed', 'poison'], state)
        ";
        sqlx::query_as(sql).fetch_all(&self.pool).await
    }
}

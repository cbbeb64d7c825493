//! Whom to kill, and what he was at: a worker whose effect is there and whose result is not.

use sqlx::PgPool;

#[derive(sqlx::FromRow)]
pub(crate) struct Victim {
    pub(crate) worker: i64,
    pub(crate) request_id: String,
    pub(crate) attempt: i64,
}

pub(crate) async fn victims(pool: &PgPool) -> sqlx::Result<Vec<Victim>> {
    let sql = "
        select delivery.worker, delivery.request_id, effect.attempt
        from delivery
        join effect on effect.delivery = delivery.number
        join message on message.number = delivery.message
        where outcome is null
            and message.kills > (
                select count(*)
                from delivery as killed
                where killed.request_id = delivery.request_id and killed.outcome = 'killed'
            )
    ";
    sqlx::query_as(sql).fetch_all(pool).await
}

/// Notes that the worker was killed, and when it had made its claim. Returns whether the kill was in the middle: the
/// effect is there, and the claim is neither completed nor another one by now.
///
/// The crate does not tell of a claim under at-least-once, so this looks at its table.
pub(crate) async fn note(pool: &PgPool, victim: &Victim) -> sqlx::Result<bool> {
    let claimed: Vec<bool> = sqlx::query_scalar(
        "
        update delivery
        set outcome = 'killed',
            claimed_at = (
                select record.claimed_at
                from idempotency.record
                where scope = 'queue' and operation = 'message.handled' and value = $2::text
                    and attempt = $3::int8 and completed_at is null and delivery.request_id = $2::text
            )
        where worker = $1::int8 and outcome is null
        returning claimed_at is not null
        ",
    )
    .bind(victim.worker)
    .bind(&victim.request_id)
    .bind(victim.attempt)
    .fetch_all(pool)
    .await?;
    Ok(claimed.contains(&true))
}

//! The books: both tables as a whole, whatever the steps have counted.

use crate::client::Client;
use crate::tally::Tally;

/// Adds what is wrong.
pub(crate) async fn audit(client: &Client, steps: &[Tally], wrong: &mut Vec<String>) -> sqlx::Result<()> {
    let expected = steps.iter().map(|step| step.expected.payments).sum();
    let mut check = |what: &str, counted: i64, expected: i64| {
        println!("{what}: {counted}");
        if counted != expected {
            wrong.push(format!("{what}: {counted}, expected {expected}"));
        }
    };
    println!();
    check("payments", payments(client).await?, expected);
    check("user and key with two payments", paid_twice(client).await?, 0);
    check("records", records(client).await?, expected);
    check("records completed, with the payment that their response names", settled(client).await?, expected);
    // An intent that was answered in two steps would count twice; none is.
    let intents = steps.iter().map(|step| step.answers.len()).sum::<usize>();
    check("intents that were answered with the stored bytes", answered(client, steps).await?, intents as i64);
    Ok(())
}

async fn payments(client: &Client) -> sqlx::Result<i64> {
    count(client, "select count(*) from payments where starts_with(user_id, $1::text)").await
}

async fn paid_twice(client: &Client) -> sqlx::Result<i64> {
    let sql = "
        select count(*)
        from (
            select
            from payments
            where starts_with(user_id, $1::text)
            group by user_id, idempotency_key
            having count(*) > 1
        ) as twice
    ";
    count(client, sql).await
}

async fn records(client: &Client) -> sqlx::Result<i64> {
    count(client, "select count(*) from idempotency.record where starts_with(scope, $1::text)").await
}

async fn settled(client: &Client) -> sqlx::Result<i64> {
    let sql = "
        select count(*)
        from idempotency.record
        join payments on payments.user_id = record.scope and payments.idempotency_key = record.value
        where starts_with(scope, $1::text)
            and completed_at is not null
            and convert_from(response_body, 'UTF8')::json ->> 'id' = payments.id::text
    ";
    count(client, sql).await
}

async fn count(client: &Client, sql: &'static str) -> sqlx::Result<i64> {
    sqlx::query_scalar(sql).bind(client.prefix()).fetch_one(&client.pool).await
}

/// Compares bytes with bytes: what came over the wire, and what the record holds.
async fn answered(client: &Client, steps: &[Tally]) -> sqlx::Result<i64> {
    let mut answered = 0;
    for (intent, answer) in steps.iter().flat_map(|step| &step.answers) {
        let there: i64 = sqlx::query_scalar(
            "
            select count(*)
            from idempotency.record
            where scope = $1::text and operation = 'POST /payments' and value = $2::text and response_body = $3::bytea
            ",
        )
        .bind(&intent.user)
        .bind(&intent.key)
        .bind(answer)
        .fetch_one(&client.pool)
        .await?;
        answered += there;
    }
    Ok(answered)
}

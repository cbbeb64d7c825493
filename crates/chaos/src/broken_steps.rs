//! Operations in steps in plain SQL, whole or with one part broken.

use std::time::Duration;

use pg_idempotency::Outcome;
use serde_json::{Map, Value, json};
use sqlx::{Executor as _, PgExecutor, PgPool, Row as _};
use tokio::time::sleep;

use crate::history::What;
use crate::lease::Leased;
use crate::mutant::Mutant;
use crate::stepped::{Attempt, CHARGE, EMAIL, Plan, ROW, TEXT};
use crate::subject::Failure;
use crate::world::World;

struct Owner<'a> {
    mutant: Mutant,
    pool: &'a PgPool,
    outside: &'a PgPool,
    attempt: Attempt<'a>,
    token: i64,
    plan: Plan,
    /// What earlier attempts have stored.
    steps: Map<String, Value>,
}

pub(crate) async fn call(
    mutant: Mutant,
    world: &World,
    pool: &PgPool,
    value: &str,
    call: &str,
    leased: Leased,
    plan: Plan,
) -> Result<Outcome<String>, Failure> {
    let token = i64::from_le_bytes(*uuid::Uuid::new_v4().as_bytes().first_chunk().expect("sixteen bytes"));
    let claimed = sqlx::query(
        "insert into idempotency.record as r (mode, scope, operation, value, fingerprint, token, lease_until, expires_at)
        values ('in_steps', $1::text, 'chaos', $1::text, '\\x0000', $2::int8, now() + $3::float8 * interval '1 s', now() + interval '1 day')
        on conflict (scope, operation, value) do update
        set token = excluded.token, lease_until = excluded.lease_until, expires_at = excluded.expires_at,
            attempt = case when r.expires_at > statement_timestamp() then r.attempt + 1 else 1 end,
            steps = case when r.expires_at > statement_timestamp() then r.steps end, request = null
        where r.expires_at <= statement_timestamp()
            or r.completed_at is null and r.lease_until <= statement_timestamp()
                and jsonb_path_exists(r.steps, '$.*.begun') is not true
        returning attempt, coalesce(steps, '{}')::text as steps",
    )
    .bind(value)
    .bind(token)
    .bind(leased.lease.as_secs_f64())
    .fetch_optional(pool)
    .await?;
    let Some(claimed) = claimed else {
        let found = sqlx::query_scalar(
            "select convert_from(response_body, 'utf8')::json #>> '{}' from idempotency.record
            where operation = 'chaos' and value = $1::text",
        );
        let found: Option<String> = found.bind(value).fetch_one(pool).await?;
        return found.map(Outcome::Replayed).ok_or(Failure::Mutant("in flight"));
    };
    world.history.add(call, value, What::Claimed(token));
    let attempt = Attempt { key: value, call, number: claimed.get::<i32, _>("attempt").unsigned_abs() };
    let outside = world.outside_or(pool);
    let owner = Owner { mutant, pool, outside, attempt, token, plan, steps: parsed(claimed.get("steps")) };
    let (row, charge) = (|| owner.row(), || owner.charge());
    let (text, email) = (plan.ask(TEXT, || owner.message(TEXT)), plan.ask(EMAIL, || owner.message(EMAIL)));
    let responding = plan.respond(plan.ask(ROW, row), plan.ask(CHARGE, charge), text, email);
    let responded = tokio::select! {
        responded = responding => responded,
        error = owner.renew(leased.lease) => Err(error),
    };
    let response = match responded {
        Ok(response) => response,
        Err(error) => {
            let lapse = "update idempotency.record set lease_until = now() where value = $1::text and token = $2::int8";
            sqlx::query(lapse).bind(value).bind(token).execute(pool).await?;
            return Err(error);
        }
    };
    let complete = "
        update idempotency.record
        set completed_at = now(), lease_until = null, steps = null, response_body = to_json($2::text)::text::bytea
        where operation = 'chaos' and value = $1::text and token = $3::int8 and completed_at is null";
    let completed = sqlx::query(complete).bind(value).bind(&response).bind(token).execute(pool).await?;
    if completed.rows_affected() == 1 { Ok(Outcome::Performed(response)) } else { Err(Failure::Mutant("lease lost")) }
}

impl Owner<'_> {
    /// Until it fails. An owner that has lost its lease goes on: a process that was suspended may be anywhere in its work.
    async fn renew(&self, lease: Duration) -> Failure {
        let renew = "
            update idempotency.record set lease_until = now() + $3::float8 * interval '1 s'
            where operation = 'chaos' and value = $1::text and token = $2::int8 and completed_at is null";
        loop {
            sleep(lease / 3).await;
            let renewed = sqlx::query(renew).bind(self.attempt.key).bind(self.token).bind(lease.as_secs_f64());
            if let Err(error) = renewed.execute(self.pool).await {
                return error.into();
            }
        }
    }

    async fn row(&self) -> Result<String, Failure> {
        if let Some(result) = result_of(&self.steps, ROW) {
            return Ok(result);
        }
        let seen = self.seen().await?;
        let mut conn = self.pool.acquire().await?;
        // A dropped step must not leave its transaction to the next.
        conn.close_on_drop();
        conn.execute("begin").await?;
        self.attempt.add(&mut *conn, ROW, None).await?;
        sleep(self.plan.pause).await;
        self.plan.check(ROW)?;
        if self.finish(&mut *conn, ROW, &seen).await? {
            conn.execute("commit").await?;
            return Ok(self.attempt.call.to_owned());
        }
        conn.execute("rollback").await?;
        self.stored(ROW).await
    }

    async fn charge(&self) -> Result<String, Failure> {
        if let Some(result) = result_of(&self.steps, CHARGE) {
            return Ok(result);
        }
        let seen = self.seen().await?;
        self.attempt.add(self.outside, CHARGE, Some(self.attempt.key)).await?;
        sleep(self.plan.pause).await;
        self.plan.check(CHARGE)?;
        if self.finish(self.pool, CHARGE, &seen).await? {
            return Ok(self.attempt.call.to_owned());
        }
        self.stored(CHARGE).await
    }

    async fn message(&self, name: &str) -> Result<String, Failure> {
        if let Some(result) = result_of(&self.steps, name) {
            return Ok(result);
        }
        let seen = self.seen().await?;
        if self.mutant != Mutant::BegunNotWritten && !self.begin(name).await? {
            return self.stored(name).await;
        }
        sleep(self.plan.pause).await;
        self.plan.check(name)?;
        if !self.attempt.send(self.outside, name, self.attempt.key).await? {
            return Err(Failure::Mutant("withdrawn"));
        }
        sleep(self.plan.pause).await;
        if self.finish(self.pool, name, &seen).await? {
            return Ok(self.attempt.call.to_owned());
        }
        self.stored(name).await
    }

    async fn begin(&self, name: &str) -> Result<bool, Failure> {
        let begun = sqlx::query(
            "update idempotency.record
            set steps = coalesce(steps, '{}') || jsonb_build_object($3::text, jsonb_build_object('begun', now(), 'attempt', attempt))
            where operation = 'chaos' and value = $1::text and (token = $2::int8 or $5::bool) and completed_at is null
                and steps -> $3::text -> 'begun' is null and steps -> $3::text -> 'result' is null
                and case when $4::bool then set_config('synchronous_commit', 'off', true) = 'off' else true end",
        )
        .bind(self.attempt.key)
        .bind(self.token)
        .bind(name)
        .bind(self.mutant == Mutant::BegunNotDurable)
        .bind(self.mutant == Mutant::StepWithoutFence)
        .execute(self.pool)
        .await?;
        Ok(begun.rows_affected() == 1)
    }

    /// `seen` is the document before the step, for the client that writes all of it.
    async fn finish(&self, db: impl PgExecutor<'_>, step: &str, seen: &Map<String, Value>) -> Result<bool, Failure> {
        let mut entry = Map::new();
        let result = json!(self.attempt.call).to_string();
        entry.insert(step.to_owned(), json!({ "result": result, "attempt": self.attempt.number }));
        let seen = (self.mutant == Mutant::StepsByTheClient).then(|| json!(seen).to_string());
        let finished = sqlx::query(
            "update idempotency.record set steps = coalesce($5::text::jsonb, steps, '{}') || $4::text::jsonb
            where operation = 'chaos' and value = $1::text and (token = $2::int8 or $6::bool) and completed_at is null
                and (steps -> $3::text -> 'result' is null or $7::bool)",
        )
        .bind(self.attempt.key)
        .bind(self.token)
        .bind(step)
        .bind(json!(entry).to_string())
        .bind(seen)
        .bind(self.mutant == Mutant::StepWithoutFence)
        .bind(self.mutant == Mutant::StepStoredAgain)
        .execute(db)
        .await?;
        Ok(finished.rows_affected() == 1)
    }

    async fn seen(&self) -> Result<Map<String, Value>, Failure> {
        let steps = "select steps::text from idempotency.record where operation = 'chaos' and value = $1::text";
        let steps: Option<String> = sqlx::query_scalar(steps).bind(self.attempt.key).fetch_one(self.pool).await?;
        Ok(parsed(steps.as_deref().unwrap_or("{}")))
    }

    async fn stored(&self, step: &str) -> Result<String, Failure> {
        result_of(&self.seen().await?, step).ok_or(Failure::Mutant("lease lost, or in doubt"))
    }
}

fn parsed(steps: &str) -> Map<String, Value> {
    serde_json::from_str(steps).expect("a JSON object")
}

fn result_of(steps: &Map<String, Value>, step: &str) -> Option<String> {
    serde_json::from_str(steps.get(step)?.get("result")?.as_str()?).ok()
}

//! Transaction mode in plain SQL, with one broken part or with none.

use pg_idempotency::Outcome;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};

use crate::mutant::Mutant;
use crate::mutant::Mutant::*;
use crate::request::{Failure, INDETERMINATE, Request};

impl Mutant {
    /// Breaks the database, for a mutant that is not broken in its calls.
    pub(crate) async fn prepare(self, conn: &mut PgConnection) -> anyhow::Result<()> {
        match self {
            BegunNotDurable => {
                let trigger = "
                    create function not_durable() returns trigger language plpgsql as $$
                    begin
                        perform set_config('synchronous_commit', 'off', true);
                        return new;
                    end $$;
                    create trigger not_durable before update on idempotency.record for each row
                    when (old.steps is distinct from new.steps) execute function not_durable()";
                conn.execute(trigger).await?;
            }
            OneProbeSuffices => {
                let trigger = r#"
                    create function one_probe() returns trigger language plpgsql as $$
                    begin
                        new.probes := jsonb_set(new.probes, '{of,0}',
                            (new.probes #> '{of,0}'::text[]) || '{"no_trace": 2, "finding": "no_trace"}'::jsonb);
                        return new;
                    end $$;
                    create trigger one_probe before update on idempotency.record for each row
                    when (new.probes #>> '{of,0,probes}'::text[] = '0'::text) execute function one_probe()"#;
                conn.execute(trigger).await?;
            }
            QuietFromClaim => {
                let trigger = "
                    create function from_claim() returns trigger language plpgsql as $$
                    begin
                        new.probes := jsonb_set(new.probes, '{of,0,next}', to_jsonb(
                            (new.probes #>> '{of,0,next}'::text[])::float8
                            - extract(epoch from new.lease_until - new.claimed_at)::float8
                        ));
                        return new;
                    end $$;
                    create trigger from_claim before update on idempotency.record for each row
                    when (new.probes #>> '{of,0,probes}'::text[] = '0'::text) execute function from_claim()";
                conn.execute(trigger).await?;
            }
            NoTraceGrants => {
                let trigger = "
                    create function grants() returns trigger language plpgsql as $$
                    begin
                        new.granted_attempt := new.attempt + 1;
                        return new;
                    end $$;
                    create trigger grants before update on idempotency.record for each row
                    when (new.lease_until = '-infinity'::timestamptz and starts_with(new.last_error, 'a reconciler'))
                    execute function grants()";
                conn.execute(trigger).await?;
            }
            SynchronousCommitOff => {
                let database: String = sqlx::query_scalar("select current_database()").fetch_one(&mut *conn).await?;
                let sql = format!("alter database \"{database}\" set synchronous_commit = off");
                conn.execute(AssertSqlSafe(sql)).await?;
            }
            _ => {}
        }
        Ok(())
    }

    pub(crate) async fn call(self, pool: &PgPool, request: &Request) -> Result<Outcome<String>, Failure> {
        match self {
            AutocommitClaim => {
                // A claim in a transaction of its own needs a look before it. Otherwise no call would ever replay.
                let mut conn = pool.acquire().await?;
                if let Some(Some(response)) = self.look(&mut conn, request).await? {
                    return Ok(Outcome::Replayed(response));
                }
                if !self.claim(&mut conn, request).await? {
                    return Err(Failure::Refused("claimed elsewhere"));
                }
                let performed = self.in_transaction(&mut conn, request).await;
                if matches!(performed, Err(Failure::AskedFor)) {
                    let release = "delete from idempotency.record where operation = 'chaos' and value = $1::text";
                    sqlx::query(release).bind(&request.key).execute(&mut *conn).await?;
                }
                performed
            }
            LostAnswerIsFailure => {
                let first = self.in_transaction(&mut *pool.acquire().await?, request).await;
                match first {
                    Err(Failure::Of(_)) => {
                        request.effect(&mut *pool.acquire().await?).await?;
                        Ok(Outcome::Performed(request.call.clone()))
                    }
                    first => first,
                }
            }
            _ => self.in_transaction(&mut *pool.acquire().await?, request).await,
        }
    }

    async fn in_transaction(self, conn: &mut PgConnection, request: &Request) -> Result<Outcome<String>, Failure> {
        let mut tx = conn.begin().await?;
        let performed = self.perform(&mut tx, request).await;
        if performed.is_ok() {
            tx.commit().await?;
        } else {
            let _ = tx.rollback().await;
        }
        performed
    }

    async fn perform(self, conn: &mut PgConnection, request: &Request) -> Result<Outcome<String>, Failure> {
        if self != AutocommitClaim && !self.claim(conn, request).await? {
            match self.look(conn, request).await? {
                Some(Some(response)) => return Ok(Outcome::Replayed(response)),
                Some(None) => return Err(Failure::Barred(INDETERMINATE)),
                None => return Err(Failure::Refused("neither won nor found")),
            }
        }
        let response = match self {
            ErrorsSwallowed => match request.effect(conn).await {
                Err(Failure::Of(_)) => request.call.clone(),
                performed => performed?,
            },
            _ => request.effect(conn).await?,
        };
        match self.complete(conn, request, &response).await {
            Err(Failure::Of(_)) if self == ErrorsSwallowed => {}
            completed => completed?,
        }
        Ok(Outcome::Performed(response))
    }

    async fn complete(self, conn: &mut PgConnection, request: &Request, response: &str) -> Result<(), Failure> {
        // This one has no claim in its own transaction.
        let fenced = self != AutocommitClaim;
        let completed = sqlx::query(
            "update idempotency.record set completed_at = now(), response_body = to_json($2::text)::text::bytea
            where scope = $1::text and operation = 'chaos' and value = $1::text and completed_at is null
                and (claimed_at = now() or not $3::bool)",
        )
        .bind(&request.key)
        .bind(response)
        .bind(fenced)
        .execute(conn)
        .await?;
        if fenced && completed.rows_affected() != 1 { Err(Failure::Refused("the claim is not there")) } else { Ok(()) }
    }

    async fn claim(self, conn: &mut PgConnection, request: &Request) -> Result<bool, Failure> {
        let inserted = sqlx::query(
            "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, expires_at)
            values ('transaction', $1::text, 'chaos', $1::text, '\\x0100', 1, now() + interval '1 day')
            on conflict (scope, operation, value) do nothing",
        )
        .bind(&request.key)
        .execute(conn)
        .await?;
        Ok(inserted.rows_affected() == 1)
    }

    /// The record. The response of an unfinished one is `None`.
    async fn look(self, conn: &mut PgConnection, request: &Request) -> Result<Option<Option<String>>, Failure> {
        let found = sqlx::query_scalar(
            "select convert_from(response_body, 'utf8')::json #>> '{}'::text[] from idempotency.record
            where scope = $1::text and operation = 'chaos' and value = $1::text",
        );
        Ok(found.bind(&request.key).fetch_optional(conn).await?)
    }
}

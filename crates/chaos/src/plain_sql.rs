//! Transaction mode in plain SQL, whole or with one part broken.

use pg_idempotency::Outcome;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool, Row as _};

use crate::error_checker::INDETERMINATE;
use crate::mutant::Mutant;
use crate::mutant::Mutant::*;
use crate::subject::{Failure, Request};

impl Mutant {
    /// What is broken in the database, and not in a call.
    pub(crate) async fn prepare(self, conn: &mut PgConnection, database: &str) -> anyhow::Result<()> {
        match self {
            SessionLock => {
                conn.execute("alter table idempotency.record drop constraint record_pkey").await?;
            }
            AwaitKeepsLock => {
                let sql = "select pg_get_functiondef('idempotency.await_key'::regproc)";
                let source: String = conn.fetch_one(sql).await?.try_get(0)?;
                let part = "raise exception 'a record is there' using errcode = 'IK004'";
                anyhow::ensure!(source.contains(part), "the function has no {part:?}:\n{source}");
                conn.execute(AssertSqlSafe(source.replace(part, "return 'look'"))).await?;
            }
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
            UnloggedRecord => {
                conn.execute("alter table idempotency.record set unlogged").await?;
            }
            SynchronousCommitOff => {
                let sql = format!("alter database \"{database}\" set synchronous_commit = off");
                conn.execute(AssertSqlSafe(sql)).await?;
            }
            _ => {}
        }
        Ok(())
    }

    pub(crate) async fn call(self, pool: &PgPool, request: &Request) -> Result<Outcome<String>, Failure> {
        match self {
            AutocommitClaim | EffectOutside => {
                // With a claim in a transaction of its own there must be a look before it, or nothing would ever be
                // replayed.
                let mut conn = pool.acquire().await?;
                if let Some(Found { response: Some(response) }) = self.look(&mut conn, request).await? {
                    return Ok(Outcome::Replayed(response));
                }
                let won = if self == AutocommitClaim {
                    self.claim(&mut conn, request).await?
                } else {
                    request.effect(&mut conn).await?;
                    true
                };
                if !won {
                    return Err(Failure::Mutant("claimed elsewhere"));
                }
                let performed = self.in_transaction(&mut conn, request).await;
                if self == AutocommitClaim && matches!(performed, Err(Failure::AskedFor)) {
                    let release = "delete from idempotency.record where operation = 'chaos' and value = $1::text";
                    sqlx::query(release).bind(&request.key).execute(&mut *conn).await?;
                }
                performed
            }
            SessionLock => {
                let mut conn = pool.acquire().await?;
                let hash = format!("hashtext('{}')", request.key);
                let lock = sqlx::raw_sql(AssertSqlSafe(format!("select pg_try_advisory_lock({hash})")));
                if !conn.fetch_one(lock).await?.get::<bool, _>(0) {
                    return Err(Failure::Mutant("locked elsewhere"));
                }
                let performed = self.in_transaction(&mut conn, request).await;
                let unlock = sqlx::raw_sql(AssertSqlSafe(format!("select pg_advisory_unlock({hash})")));
                conn.execute(unlock).await?;
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

    pub(crate) async fn perform(self, conn: &mut PgConnection, request: &Request) -> Result<Outcome<String>, Failure> {
        if self != AutocommitClaim && !self.claim(conn, request).await? {
            match self.look(conn, request).await? {
                Some(Found { response: Some(response) }) => return Ok(Outcome::Replayed(response)),
                Some(_) if self != UnfinishedIsFree => return Err(Failure::Barred(INDETERMINATE)),
                _ if self.take_over(conn, request).await? => {}
                _ => return Err(Failure::Mutant("neither won nor found")),
            }
        }
        let response = match self {
            EffectOutside => request.call.clone(),
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
        // These have no claim in their own transaction.
        let fenced = !matches!(self, AutocommitClaim | ImpatientClaim | ConflictsIgnored);
        let completed = sqlx::query(
            "update idempotency.record set completed_at = now(), response_body = to_json($2::text)::text::bytea
            where scope = $1::text and operation = 'chaos' and value = $1::text and completed_at is null
                and (claimed_at = now() or not $3::bool)",
        )
        .persistent(request.prepared)
        .bind(&request.key)
        .bind(response)
        .bind(fenced)
        .execute(conn)
        .await?;
        if fenced && completed.rows_affected() != 1 { Err(Failure::Torn) } else { Ok(()) }
    }

    async fn claim(self, conn: &mut PgConnection, request: &Request) -> Result<bool, Failure> {
        let sql = match self {
            SessionLock => {
                "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, expires_at)
                select 'transaction', $1::text, 'chaos', $1::text, '\\x0100', 1, now() + $2::float8 * interval '1 s'
                where not exists (select from idempotency.record where value = $1::text)"
            }
            _ => {
                "insert into idempotency.record (mode, scope, operation, value, fingerprint, token, expires_at)
                values ('transaction', $1::text, 'chaos', $1::text, '\\x0100', 1, now() + $2::float8 * interval '1 s')
                on conflict (scope, operation, value) do nothing"
            }
        };
        let (before, ignored): (_, &[&str]) = match self {
            ImpatientClaim => ("savepoint claim; set local lock_timeout = '20ms'", &["55P03"]),
            ConflictsIgnored => ("savepoint claim", &["40001", "40P01"]),
            _ => ("", &[]),
        };
        if !before.is_empty() {
            conn.execute(sqlx::raw_sql(before)).await?;
        }
        let inserted = sqlx::query(sql)
            .persistent(request.prepared)
            .bind(&request.key)
            .bind(request.retention.as_secs_f64())
            .execute(&mut *conn)
            .await;
        match inserted {
            Ok(inserted) => Ok(inserted.rows_affected() == 1),
            Err(error) if ignored.contains(&&*sqlstate(&error)) => {
                conn.execute("rollback to savepoint claim").await?;
                Ok(true)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// What is there and not expired.
    async fn look(self, conn: &mut PgConnection, request: &Request) -> Result<Option<Found>, Failure> {
        let found = sqlx::query(
            "select convert_from(response_body, 'utf8')::json #>> '{}' as response, mode,
                get_byte(fingerprint, 0) as version
            from idempotency.record
            where scope = $1::text and operation = 'chaos' and value = $1::text and expires_at > statement_timestamp()",
        )
        .persistent(request.prepared)
        .bind(&request.key)
        .fetch_optional(conn)
        .await?;
        let Some(row) = found else { return Ok(None) };
        if self != NewerIsRead && row.get::<i32, _>("version") != 1 {
            return Err(Failure::Barred("unknown fingerprint"));
        }
        if self != NewerIsRead && row.get::<&str, _>("mode") != "transaction" {
            return Err(Failure::Barred("unknown mode"));
        }
        Ok(Some(Found { response: row.get("response") }))
    }

    async fn take_over(self, conn: &mut PgConnection, request: &Request) -> Result<bool, Failure> {
        let updated = sqlx::query(
            "update idempotency.record
            set completed_at = null, response_body = null, claimed_at = now(),
                expires_at = now() + $2::float8 * interval '1 s'
            where scope = $1::text and operation = 'chaos' and value = $1::text
                and (expires_at <= statement_timestamp() or ($3::bool and completed_at is null))",
        )
        .persistent(request.prepared)
        .bind(&request.key)
        .bind(request.retention.as_secs_f64())
        .bind(self == UnfinishedIsFree)
        .execute(conn)
        .await?;
        Ok(updated.rows_affected() == 1)
    }

    /// The sweep of this variant; `None` where it is not what is broken.
    pub(crate) async fn sweep(self, pool: &PgPool) -> Option<sqlx::Result<u64>> {
        let delete = "
            delete from idempotency.record
            where value in (select value from idempotency.record where expires_at <= statement_timestamp() limit 500)";
        match self {
            JanitorByKey => Some(pool.execute(delete).await.map(|done| done.rows_affected())),
            _ => None,
        }
    }
}

struct Found {
    response: Option<String>,
}

fn sqlstate(error: &sqlx::Error) -> String {
    error.as_database_error().and_then(|error| error.code()).unwrap_or_default().into_owned()
}

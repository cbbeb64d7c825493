//! The protocol of transaction mode in plain SQL, whole or with one part broken: what a scenario does not catch here, it
//! would not catch in the crate.

use std::str::FromStr;

use anyhow::Context as _;
use pg_idempotency::Outcome;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool, Row as _};

use crate::subject::{Failure, Request};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutant {
    /// Not broken: it shows that the others fail for what is broken in them.
    PlainSql,
    /// Looks first and inserts then, with no unique key in the way.
    NoConflictTarget,
    /// An expired record is taken over by its key alone.
    TakeOverWithoutPredicate,
    /// Lease mode: the result is stored by the key alone.
    CompletionWithoutToken,
    /// Lease mode: whoever comes takes the claim over, lapsed or not.
    LeaseTakeOverWithoutPredicate,
    /// The sweep deletes by a list of keys, and does not look again.
    JanitorByKey,
    /// Claim and effect commit, and no response.
    NoCompletion,
    /// The claim commits before the effect.
    AutocommitClaim,
    /// The effect commits before the claim.
    EffectOutside,
    /// Commits are acknowledged before they are on disk.
    SynchronousCommitOff,
    /// sqlx's own `begin` where a future can be dropped.
    PlainBegin,
}

use Mutant::*;

/// A mutant, where it has to be caught, and by which words. Those that are `None` must pass.
pub(crate) struct Trial {
    pub(crate) mutant: Mutant,
    pub(crate) scenario: &'static str,
    pub(crate) violation: Option<&'static str>,
}

pub(crate) const TRIALS: &[Trial] = &[
    trial(NoConflictTarget, "duplicate-storm", "effects, of"),
    trial(TakeOverWithoutPredicate, "janitor-races", "calls performed that are to be remembered"),
    trial(JanitorByKey, "janitor-races", "calls performed that are to be remembered"),
    trial(NoCompletion, "killed-workers", "not completed"),
    trial(AutocommitClaim, "killed-workers", "never answered"),
    trial(EffectOutside, "cut-connections", "effects, of"),
    trial(SynchronousCommitOff, "killed-server", "which is not there"),
    trial(SynchronousCommitOff, "promoted-standby", "which is not there"),
    trial(PlainBegin, "dropped-futures", "was acknowledged, and is lost"),
    trial(PlainBegin, "duplicate-storm", "somebody else's"),
    trial(CompletionWithoutToken, "suspended-owners", "completions were accepted"),
    trial(LeaseTakeOverWithoutPredicate, "killed-leases-at-most-once", "under at most once"),
    Trial { mutant: PlainSql, scenario: "killed-workers", violation: None },
    Trial { mutant: PlainSql, scenario: "killed-server", violation: None },
    Trial { mutant: PlainSql, scenario: "cut-connections", violation: None },
    Trial { mutant: PlainSql, scenario: "janitor-races", violation: None },
];

const fn trial(mutant: Mutant, scenario: &'static str, violation: &'static str) -> Trial {
    Trial { mutant, scenario, violation: Some(violation) }
}

const NAMES: &[(Mutant, &str)] = &[
    (PlainSql, "plain-sql"),
    (NoConflictTarget, "no-conflict-target"),
    (TakeOverWithoutPredicate, "take-over-without-predicate"),
    (CompletionWithoutToken, "completion-without-token"),
    (LeaseTakeOverWithoutPredicate, "lease-take-over-without-predicate"),
    (JanitorByKey, "janitor-by-key"),
    (NoCompletion, "no-completion"),
    (AutocommitClaim, "autocommit-claim"),
    (EffectOutside, "effect-outside"),
    (SynchronousCommitOff, "synchronous-commit-off"),
    (PlainBegin, "plain-begin"),
];

impl Mutant {
    pub(crate) fn name(self) -> &'static str {
        NAMES.iter().find(|(mutant, _)| *mutant == self).map_or("?", |(_, name)| name)
    }

    /// What is broken in the database, and not in a call.
    pub(crate) async fn prepare(self, conn: &mut PgConnection, database: &str) -> anyhow::Result<()> {
        match self {
            NoConflictTarget => {
                conn.execute("alter table idempotency.record drop constraint record_pkey").await?;
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
        if self == AutocommitClaim || self == EffectOutside {
            // With a claim in a transaction of its own there must be a look before it, or nothing would ever be replayed.
            let mut conn = pool.acquire().await?;
            if let Some(response) = self.look(&mut conn, request).await? {
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
        }
        let mut tx = pool.begin().await?;
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
            if let Some(response) = self.look(conn, request).await? {
                return Ok(Outcome::Replayed(response));
            }
            if !self.take_over(conn, request).await? {
                return Err(Failure::Mutant("neither won nor found"));
            }
        }
        let response = if self == EffectOutside { request.call.clone() } else { request.effect(conn).await? };
        if self != NoCompletion {
            sqlx::query(
                "update idempotency.record set completed_at = now(), response_body = to_json($2::text)::text::bytea
                where scope = 'tenant' and operation = 'chaos' and key = $1::text",
            )
            .bind(&request.key)
            .bind(&response)
            .execute(conn)
            .await?;
        }
        Ok(Outcome::Performed(response))
    }

    async fn claim(self, conn: &mut PgConnection, request: &Request) -> Result<bool, Failure> {
        let sql = match self {
            NoConflictTarget => {
                "insert into idempotency.record (mode, scope, operation, key, fingerprint, token, expires_at)
                select 'transaction', 'tenant', 'chaos', $1::text, '\\x0000', 1, now() + $2::float8 * interval '1 s'
                where not exists (select from idempotency.record where key = $1::text)"
            }
            _ => {
                "insert into idempotency.record (mode, scope, operation, key, fingerprint, token, expires_at)
                values ('transaction', 'tenant', 'chaos', $1::text, '\\x0000', 1, now() + $2::float8 * interval '1 s')
                on conflict (scope, operation, key) do nothing"
            }
        };
        let inserted = sqlx::query(sql).bind(&request.key).bind(request.retention.as_secs_f64()).execute(conn).await?;
        Ok(inserted.rows_affected() == 1)
    }

    async fn look(self, conn: &mut PgConnection, request: &Request) -> Result<Option<String>, Failure> {
        let found = sqlx::query(
            "select convert_from(response_body, 'utf8')::json #>> '{}' as response from idempotency.record
            where scope = 'tenant' and operation = 'chaos' and key = $1::text and expires_at > statement_timestamp()",
        )
        .bind(&request.key)
        .fetch_optional(conn)
        .await?;
        Ok(found.and_then(|row| row.get("response")))
    }

    async fn take_over(self, conn: &mut PgConnection, request: &Request) -> Result<bool, Failure> {
        let sql = match self {
            TakeOverWithoutPredicate => {
                "update idempotency.record
                set completed_at = null, response_body = null, expires_at = now() + $2::float8 * interval '1 s'
                where scope = 'tenant' and operation = 'chaos' and key = $1::text"
            }
            _ => {
                "update idempotency.record
                set completed_at = null, response_body = null, expires_at = now() + $2::float8 * interval '1 s'
                where scope = 'tenant' and operation = 'chaos' and key = $1::text
                    and expires_at <= statement_timestamp()"
            }
        };
        let taken = sqlx::query(sql).bind(&request.key).bind(request.retention.as_secs_f64()).execute(conn).await?;
        Ok(taken.rows_affected() == 1)
    }

    /// The sweep of this variant; `None` where it is not what is broken.
    pub(crate) async fn sweep(self, pool: &PgPool) -> Option<sqlx::Result<u64>> {
        let delete = "
            delete from idempotency.record
            where key in (select key from idempotency.record where expires_at <= statement_timestamp() limit 500)";
        match self {
            JanitorByKey => Some(pool.execute(delete).await.map(|done| done.rows_affected())),
            _ => None,
        }
    }
}

impl FromStr for Mutant {
    type Err = anyhow::Error;

    fn from_str(name: &str) -> anyhow::Result<Self> {
        let found = NAMES.iter().find(|(_, known)| *known == name);
        found.map(|(mutant, _)| *mutant).with_context(|| format!("there is no mutant {name:?}; --list shows them"))
    }
}

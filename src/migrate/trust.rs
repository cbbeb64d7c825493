//! The check whether the schema is the crate's own. Before this check, the crate reads, calls or looks up nothing in
//! the schema, because a view, a trigger or a function of an untrusted role would run with the rights of the current
//! role. Every function that an operator or a DBA calls makes this check first, because the roles of operators and DBAs
//! often have more rights than the role of the service.
//!
//! A trusted schema stays trusted until a trusted role drops it, because no other role can add code to the schema. But
//! before the schema exists, any role can hold the lock of the migrations, and create a schema of its own in the
//! meantime. The check therefore runs in the transaction that uses the schema, after the last point at which this
//! transaction may wait for an untrusted role.

use std::sync::LazyLock;

use sha2::{Digest as _, Sha256};
use sqlx::migrate::Migration;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};

use super::{FUNCTIONS, MIGRATIONS};
use crate::record::{self, Distrust, Known, Schema};
use crate::{Error, Incompatible};

/// The state of the crate's schema in a database.
#[derive(Debug)]
pub(crate) enum Standing {
    /// There is no schema.
    Nothing,
    /// Nothing in the schema may be touched, for one or more reasons.
    Distrusted(Vec<String>),
    /// The schema may be used.
    Trusted(Trusted),
}

#[derive(Debug)]
pub(crate) struct Trusted {
    schema: Schema,
    /// The names of the functions that a newer release has changed.
    pub(crate) newer: Option<String>,
}

pub(crate) async fn standing(conn: &mut PgConnection) -> Result<Standing, Error> {
    let Some(schema) = record::schema(conn, &KNOWN).await? else { return Ok(Standing::Nothing) };
    let newer = match &schema.distrust[..] {
        [] => schema.newer.clone(),
        // During a roll-out and after a roll-back, processes of an older release start on the schema of a newer
        // release.
        [Distrust::Functions { objects }] if schema.is_applied_plain && is_newer(conn).await? => {
            Some(schema.newer.iter().chain([objects]).cloned().collect::<Vec<_>>().join(", "))
        }
        distrust => return Ok(Standing::Distrusted(distrust.iter().map(reason).collect())),
    };
    Ok(Standing::Trusted(Trusted { schema, newer }))
}

/// Fails unless the schema is trusted.
pub(crate) async fn trusted(conn: &mut PgConnection) -> Result<(), Error> {
    standing(conn).await?.trusted().map(drop)
}

/// Fails unless the schema is trusted and complete for this release.
pub(crate) async fn current(conn: &mut PgConnection) -> Result<(), Error> {
    standing(conn).await?.trusted()?.current(conn).await
}

/// Revokes the rights to add code that untrusted roles have. Call this function only in the transaction that has
/// created the schema or its tables, after a check that found no such right. Only default privileges of the installing
/// role can then have given the rights.
pub(crate) async fn revoke_rights(conn: &mut PgConnection) -> Result<(), Error> {
    let schema = record::schema(conn, &KNOWN).await?.unwrap_or_default();
    for distrust in schema.distrust {
        if let Distrust::Right { remedy, .. } = distrust {
            conn.execute(AssertSqlSafe(remedy)).await?;
        }
    }
    Ok(())
}

impl Standing {
    pub(crate) fn trusted(self) -> Result<Trusted, Error> {
        match self {
            Self::Nothing => Err(Error::SchemaMissing { source: "there is no schema idempotency".into() }),
            Self::Distrusted(reasons) => Err(refusal(reasons.join("; "))),
            Self::Trusted(trusted) => Ok(trusted),
        }
    }
}

impl Trusted {
    /// Fails unless the schema is complete for this release.
    pub(crate) async fn current(&self, conn: &mut PgConnection) -> Result<(), Error> {
        let source = match (self.missing(conn).await?.first(), &self.schema.older) {
            (None, None) => return Ok(()),
            (Some(migration), _) => format!("migration {} is not applied", migration.version),
            (None, Some(older)) => format!("an earlier release has created {older}"),
        };
        Err(Error::SchemaMissing { source: source.into() })
    }

    /// Whether the functions for callers in other languages exist.
    pub(super) const fn has_any_language(&self) -> bool {
        self.schema.has_any_language
    }

    /// Whether an earlier release has created the functions for callers in other languages.
    pub(super) const fn has_older_functions(&self) -> bool {
        self.schema.older.is_some()
    }

    /// Returns the migrations that are not recorded as applied. The query is plain SQL without parameters, so that any
    /// pooler passes it in one message.
    pub(super) async fn missing(&self, conn: &mut PgConnection) -> Result<Vec<&'static Migration>, Error> {
        if !self.schema.has_applied {
            return Ok(MIGRATIONS.iter().collect());
        }
        // The checksum is read as text, because a setting determines the form of `bytea`.
        let applied = conn
            .fetch_all(
                "
                select /* pg_idempotency: applied */ version, pg_catalog.encode(checksum, 'hex')
                from idempotency._sqlx_migrations
                where success
                ",
            )
            .await?;
        let mut missing = Vec::new();
        for migration in MIGRATIONS.iter() {
            let mut checksum = None;
            for row in &applied {
                if row.try_get::<i64, _>(0)? == migration.version {
                    checksum = Some(row.try_get::<String, _>(1)?);
                }
            }
            match checksum {
                None => missing.push(migration),
                Some(checksum) if checksum == hex::encode(&migration.checksum) => {}
                Some(_) => {
                    return Err(refusal(format!(
                        "migration {} was applied with another text; install the release that made it; a schema that is dropped \
                         and created again has forgotten all keys, so each retry is performed again",
                        migration.version
                    )));
                }
            }
        }
        // The migration is recorded as applied, but the table may have been dropped since.
        if !self.schema.has_record && missing.is_empty() {
            return Err(refusal("idempotency._sqlx_migrations says that idempotency.record was created, but the table is not \
                                  there; restore the table from a backup; if its keys are lost, each retry is performed again: \
                                  drop the schema idempotency, and migrate"
                .to_owned()));
        }
        Ok(missing)
    }
}

/// Whether the database has recorded a migration that is newer than the migrations of this release.
async fn is_newer(conn: &mut PgConnection) -> Result<bool, Error> {
    let row = conn
        .fetch_one(
            "
            select /* pg_idempotency: newest applied */ pg_catalog.max(version)
            from idempotency._sqlx_migrations
            where success
            ",
        )
        .await?;
    Ok(row.try_get::<Option<i64>, _>(0)? > MIGRATIONS.last().map(|migration| migration.version))
}

pub(crate) fn refusal(problem: String) -> Error {
    Incompatible::Schema { problem }.into()
}

/// Returns a description of the problem and of the remedy.
fn reason(distrust: &Distrust) -> String {
    const DROP: &str = "stop all callers, read as that role, and as no other, which keys are unfinished (`select * from \
                        idempotency.record where completed_at is null`), and drop the schema idempotency; the database then \
                        forgets all keys, so each retry is performed again";
    // An untrusted role has chosen these names. A name in backticks would look like the remedy.
    let unlike_sql = |names: &str| names.replace('`', "'");
    match distrust {
        Distrust::Owner { role, objects, remedy } => format!(
            "the role {role:?} owns {}, so its code could run with the rights of each role that uses them; if you know \
             that role, migrate as it, or run as a superuser or as the owner of the database: `{remedy}`; if you do not, {DROP}",
            unlike_sql(objects)
        ),
        Distrust::Right { role, remedy } => format!(
            "the role {role:?} may add code to the schema idempotency, which could run with the rights of each role that uses \
             it; run as the owner of the schema: `{remedy}`"
        ),
        Distrust::Functions { objects } | Distrust::Objects { objects } => format!(
            "this release does not know {}, and no newer release is recorded; if you have made them, restore what \
             `idempotency-janitor migrate --print --any-language` creates, and keep your own in another schema; if you have not, find the role \
             that has; {DROP}",
            unlike_sql(objects)
        ),
    }
}

/// The functions that the crate creates. The migrations also contain the functions of each earlier release. The
/// functions for callers in other languages are known only in the form of this release.
///
/// A further file that creates functions must be added here. A test checks that each function of an installed schema is
/// known.
static KNOWN: LazyLock<Known> = LazyLock::new(|| {
    let migrations = MIGRATIONS.iter().flat_map(|migration| functions(migration.sql.as_str()));
    let number = FUNCTIONS.split_once("as 'select ").and_then(|(_, rest)| rest.split_once("';"));
    Known {
        digests: migrations
            .chain(functions(FUNCTIONS))
            .map(|function| digest(function).expect("a name, a language and a body"))
            .collect(),
        any_language: functions(FUNCTIONS).filter_map(|function| name(function).map(str::to_owned)).collect(),
        number: number.and_then(|(number, _)| number.parse().ok()).expect("the number of the file"),
    }
});

/// Divides the text into functions. Each part begins with the name of its function.
fn functions(text: &str) -> impl Iterator<Item = &str> {
    let created = text.split("\ncreate ").skip(1);
    created.filter_map(|text| text.strip_prefix("or replace ").unwrap_or(text).strip_prefix("function idempotency."))
}

fn name(function: &str) -> Option<&str> {
    Some(function.split_once('(')?.0)
}

/// Returns the digest of a function. The text begins with the name of the function.
fn digest(function: &str) -> Option<String> {
    let (head, quoted) = function.split_once(" as ")?;
    let name = name(head)?;
    let language = head.split_once("language ")?.1.split_whitespace().next()?;
    let definer = head.contains("security definer");
    let settings =
        head.split_once(" set search_path = ").map_or(String::new(), |(_, path)| format!("search_path={path}"));
    let quote = if quoted.starts_with("$$") { "$$" } else { "'" };
    let (body, _) = quoted.strip_prefix(quote)?.split_once(quote)?;
    let digest = Sha256::digest(format!("{name}\n{language}\n{definer}\n{settings}\n{}", body.replace('\r', "")));
    Some(hex::encode(digest))
}

#[cfg(test)]
#[path = "../../tests/unit/migrate/trust.rs"]
mod tests;

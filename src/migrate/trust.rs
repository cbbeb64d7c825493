//! The check whether the schema is the crate's own. Before this check, the crate reads, calls or looks up nothing in
//! the schema, because a view, a trigger or a function of an untrusted role would run with the rights of the current
//! role. Every function that an operator or a DBA calls makes this check first, because the roles of operators and DBAs
//! often have more rights than the role of the service.
//!
//! A trusted schema stays trusted until a trusted role drops it, because no other role can add code to the schema. But
//! before the schema exists, any role can hold the lock of the migrations, and create a schema of its own in the
//! meantime. The check therefore runs in the transaction that uses the schema, after the last point at which this
//! transaction may wait for an untrusted role.

use sqlx::migrate::Migration;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, Row as _};

use super::{FUNCTIONS, MIGRATIONS};
use crate::record::{self, Distrust, Schema};
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
pub(crate) struct Trusted(Schema);

pub(crate) async fn standing(conn: &mut PgConnection) -> Result<Standing, Error> {
    Ok(match record::schema(conn).await? {
        None => Standing::Nothing,
        Some(schema) if schema.distrust.is_empty() => Standing::Trusted(Trusted(schema)),
        Some(schema) => Standing::Distrusted(schema.distrust.iter().map(reason).collect()),
    })
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
    let schema = record::schema(conn).await?.unwrap_or_default();
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
    /// Whether the `search_path` of the current role contains the schema.
    pub(crate) const fn is_in_search_path(&self) -> bool {
        self.0.in_search_path
    }

    /// Fails unless the schema is complete for this release.
    pub(crate) async fn current(&self, conn: &mut PgConnection) -> Result<(), Error> {
        let source = match self.missing(conn).await?.first() {
            Some(migration) => format!("migration {} is not applied", migration.version),
            None if self.has_older_functions() => "an earlier release has created the SQL functions".to_owned(),
            None => return Ok(()),
        };
        Err(Error::SchemaMissing { source: source.into() })
    }

    /// Whether the functions for callers in other languages exist.
    pub(super) const fn has_any_language(&self) -> bool {
        self.0.version.is_some()
    }

    /// Whether an earlier release has created the functions for callers in other languages. During a roll-out and after
    /// a roll-back, the functions of a newer release remain. A number that this release cannot read may be the number
    /// of a newer release.
    pub(super) fn has_older_functions(&self) -> bool {
        self.0.version.as_deref().and_then(number).is_some_and(|number| number < ours())
    }

    /// Returns the migrations that are not recorded as applied. The query is plain SQL without parameters, so that any
    /// pooler passes it in one message.
    pub(super) async fn missing(&self, conn: &mut PgConnection) -> Result<Vec<&'static Migration>, Error> {
        if !self.0.has_applied {
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
        if !self.0.has_record && missing.is_empty() {
            return Err(refusal("idempotency._sqlx_migrations says that idempotency.record was created, but the table is not \
                                  there; restore the table from a backup; if its keys are lost, each retry is performed again: \
                                  drop the schema idempotency, and migrate"
                .to_owned()));
        }
        Ok(missing)
    }
}

/// Returns the number of the functions for callers in other languages, from the body of `idempotency.version`.
fn number(body: &str) -> Option<u32> {
    body.strip_prefix("select ")?.parse().ok()
}

/// The number of the functions of this release.
fn ours() -> u32 {
    let body = FUNCTIONS.split_once(" as '").and_then(|(_, rest)| rest.split('\'').next());
    body.and_then(number).expect("the number of the file")
}

pub(crate) fn refusal(problem: String) -> Error {
    Incompatible::Schema { problem }.into()
}

/// Returns a description of the problem and of the remedy.
fn reason(distrust: &Distrust) -> String {
    const DROP: &str = "stop all callers, read as that role, and as no other, which keys are unfinished (`select * from \
                        idempotency.record where completed_at is null`), move the tables that are not the crate's to \
                        another schema, and drop the schema idempotency; the database then forgets all keys, so each \
                        retry is performed again";
    // An untrusted role has chosen these names. A name in backticks would look like the remedy.
    let unlike_sql = |names: &str| names.replace('`', "'");
    match distrust {
        Distrust::Owner { role, objects, remedy } => format!(
            "the role {role:?} owns {}, so its code could run with the rights of each role that uses them; if you know \
             that role, migrate as it, or run as a superuser, or as the owner of the database with ADMIN OPTION on that \
             role (CREATEROLE is enough before PostgreSQL 16): `{remedy}`; if you do not, {DROP}",
            unlike_sql(objects)
        ),
        Distrust::Right { role, remedy } => format!(
            "the role {role:?} may add code to the schema idempotency, which could run with the rights of each role that uses \
             it; run as the owner of the schema: `{remedy}`"
        ),
    }
}

#[cfg(test)]
#[path = "../../tests/unit/migrate/trust.rs"]
mod tests;

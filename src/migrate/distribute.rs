//! Handing the table to Citus.

use sqlx::PgPool;

use crate::SetupError;
use crate::record::{self, Distribution};
use crate::session::{Opening, in_pooled_transaction};

/// Distributes the table by `scope` over the workers of Citus. If it is distributed so already, does nothing. Then set
/// [`Deployment::distributed`](crate::Deployment::distributed) in every process.
///
/// A business table that is written in the same transaction should have its rows beside the key: give it a column of
/// the type `text collate "C"` with the scope, and distribute it by that, `colocate_with => 'idempotency.record'`. Then
/// a call is one transaction on one worker. Every table that `perform` writes must be a distributed table, a reference
/// table, or local to Citus's metadata. A plain table of the coordinator commits apart from the key.
///
/// Apply `migrations/strict.sql` before, if at all: Citus does not take it in one statement. Stop the service
/// meanwhile: a process with the other setting gets [`Misuse::WrongDeployment`](crate::Misuse::WrongDeployment).
///
/// # Errors
///
/// - [`Error::SchemaMissing`](crate::Error::SchemaMissing): run [`migrate`](crate::migrate()) before.
/// - [`SetupError::Refused`]: the database has no Citus, or the table is distributed in another way.
/// - [`Incompatible::Schema`](crate::Incompatible::Schema): the schema
///   [cannot be trusted](crate::operator::Warning::UntrustedSchema).
/// - [`SetupError::Locked`]: as of [`migrate`](crate::migrate()).
/// - [`Error::Database`](crate::Error::Database): Citus refuses, for example for want of workers or because the role is
///   not the owner.
///
/// # Cancellation
///
/// All of it is one transaction, done or not done.
pub async fn distribute(pool: &PgPool) -> Result<(), SetupError> {
    let refused = |why: &str| Err(SetupError::refused(why));
    in_pooled_transaction(pool, Opening::ReadCommitted, async |conn| {
        super::lock(conn).await?;
        super::current(conn).await?;
        match record::distribution(conn).await? {
            Distribution::By(column) if column == "scope" => Ok(()),
            Distribution::Plain => Ok(record::create_distributed_table(conn).await?),
            Distribution::NoCitus => refused("the database has no Citus; run `create extension citus` on every node"),
            Distribution::By(_) | Distribution::Other => {
                refused("Citus has idempotency.record, and not by the hash of scope; undistribute it first")
            }
        }
    })
    .await
}

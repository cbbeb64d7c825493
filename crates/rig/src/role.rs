//! Roles belong to the whole server, so a test has to drop its own.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::task::Poll;

use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use crate::database::backend;

/// Does the work while there is a role with these rights. In the SQL of the rights, `@role` is its name. The role and
/// what it owns are dropped, also if the work panics.
pub async fn with_role<T>(pool: &PgPool, rights: &str, work: impl AsyncFnOnce(&str) -> T) -> T {
    // While this connection is open, no other role has its number.
    let mut admin = pool.acquire().await.expect("a connection");
    let role = format!("role_{}", backend(&mut admin).await.expect("a number"));
    let create = format!("create role {role} login; {}", rights.replace("@role", &role));
    admin.execute(AssertSqlSafe(create)).await.expect("a role");
    let mut working = pin!(work(&role));
    let worked = poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| working.as_mut().poll(context))) {
        Ok(Poll::Pending) => Poll::Pending,
        Ok(Poll::Ready(done)) => Poll::Ready(Ok(done)),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await;
    let drop = format!("drop owned by {role} cascade; drop role {role}");
    admin.execute(AssertSqlSafe(drop)).await.expect("no other database has something of the role");
    worked.unwrap_or_else(|panic| resume_unwind(panic))
}

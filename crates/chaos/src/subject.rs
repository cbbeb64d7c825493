//! The calls in transaction mode: the crate's, or those of a broken variant.

use pg_idempotency::testing::cancel_after;
use pg_idempotency::{Outcome, Verdict};
use sqlx::{PgConnection, PgPool};

use crate::mutant::Mutant;
use crate::request::{Door, Failure, Request, key};
use crate::service::Service;
use crate::sql_door;

type Called = Result<Outcome<String>, Failure>;

/// Makes the call. `None` means that its future was dropped, as the request says.
pub(crate) async fn call(mutant: Option<Mutant>, service: &Service, request: &Request) -> Option<Called> {
    let pool = &service.pool;
    if request.door == Door::Careless {
        return careless(mutant, pool, request).await;
    }
    let polls = request.polls.unwrap_or(usize::MAX);
    let call = async {
        match mutant {
            Some(mutant) if !mutant.is_a_caller() => mutant.call(pool, request).await,
            _ if request.door == Door::Sql => sql_door::call(mutant, pool, request).await,
            _ if request.door == Door::SqlRun => sql_door::run(pool, request).await,
            _ if matches!(request.door, Door::Layer(_)) => service.transactional(mutant, request).await,
            _ => by_the_crate(pool, request).await,
        }
    };
    cancel_after(polls, call).await
}

/// Makes the call in a transaction that the caller commits or rolls back.
pub(crate) async fn within(mutant: Option<Mutant>, conn: &mut PgConnection, request: &Request) -> Called {
    match mutant {
        Some(mutant) if !mutant.is_a_caller() => mutant.perform(conn, request).await,
        _ => {
            let perform = async |conn: &mut PgConnection| request.effect(conn).await;
            request.options()?.ensure(conn, &key(&request.key), &request.fingerprint(), perform).await
        }
    }
}

/// Commits, whatever the result is.
async fn careless(mutant: Option<Mutant>, pool: &PgPool, request: &Request) -> Option<Called> {
    let both = async {
        let mut tx = pool.begin().await?;
        let called = cancel_after(request.polls.unwrap_or(usize::MAX), within(mutant, &mut tx, request)).await;
        tx.commit().await?;
        Ok::<_, sqlx::Error>(called)
    };
    both.await.unwrap_or_else(|error| Some(Err(error.into())))
}

async fn by_the_crate(pool: &PgPool, request: &Request) -> Called {
    let (options, key, body) = (request.options()?, key(&request.key), request.fingerprint());
    match request.door {
        Door::Run | Door::RunFewest | Door::RunSelectFirst => {
            options.run(pool, &key, &body, async |conn| request.effect(conn).await).await
        }
        Door::RunIsolated => {
            let perform = async |conn: &mut PgConnection| -> Result<_, Failure> {
                Ok(Verdict::Keep(request.effect(conn).await?))
            };
            options.run_isolated(pool, &key, &body, perform).await
        }
        Door::OwnTransaction | Door::Careless | Door::Layer(_) | Door::Sql | Door::SqlRun => {
            let mut tx = pool.begin().await?;
            let called = within(None, &mut tx, request).await;
            match &called {
                Ok(_) => tx.commit().await?,
                Err(_) => drop(tx.rollback().await),
            }
            called
        }
    }
}

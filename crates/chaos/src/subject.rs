//! The calls in transaction mode: the crate's, or those of a broken variant.

use pg_idempotency::Outcome;
use rig::gate::cancel_after;
use sqlx::{Connection as _, PgConnection, PgPool};

use crate::mutant::Mutant;
use crate::request::{Door, Failure, Request, key};
use crate::service::Service;
use crate::sql_door;

type Called = Result<Outcome<String>, Failure>;

/// Makes the call. `None` means that its future was dropped, as the request says.
pub(crate) async fn call(mutant: Option<Mutant>, service: &Service, request: &Request) -> Option<Called> {
    let pool = &service.pool;
    let polls = request.polls.unwrap_or(usize::MAX);
    let call = async {
        match mutant {
            Some(mutant) if !mutant.is_a_caller() => mutant.call(pool, request).await,
            _ if request.door == Door::Sql => sql_door::call(mutant, pool, request).await,
            _ if request.door == Door::SqlRun => sql_door::run(pool, request).await,
            _ if matches!(request.door, Door::Layer | Door::LayerReplayFirst) => {
                service.transactional(mutant, request).await
            }
            _ => by_the_crate(pool, request).await,
        }
    };
    cancel_after(polls, call).await
}

async fn by_the_crate(pool: &PgPool, request: &Request) -> Called {
    let (options, key, body) = (request.options(), key(&request.key), request.fingerprint());
    match request.door {
        Door::Run | Door::RunReplayFirst => {
            options.run(pool, &key, &body, async |conn| request.effect(conn).await).await
        }
        Door::RunNested => {
            let perform = async |conn: &mut PgConnection| -> Result<_, Failure> {
                let mut nested = conn.begin().await?;
                let effect = request.effect(&mut nested).await?;
                nested.commit().await?;
                Ok(effect)
            };
            options.run(pool, &key, &body, perform).await
        }
        Door::OwnTransaction | Door::Layer | Door::LayerReplayFirst | Door::Sql | Door::SqlRun => {
            let mut tx = pool.begin().await?;
            let called = options.ensure(&mut tx, &key, &body, async |conn| request.effect(conn).await).await;
            match &called {
                Ok(_) => tx.commit().await?,
                Err(_) => drop(tx.rollback().await),
            }
            called
        }
    }
}

//! The design with Redis: a lock with a time limit, a key for the result, and a script that releases the lock only for
//! its owner, around the same PostgreSQL transaction.
//!
//! The comparison favours it: Redis writes nothing to disk, and the call does not look for the result again under the
//! lock. It also promises less: if a caller dies between COMMIT and the result, or outlives the lock, the business
//! happens twice.

use anyhow::{Context as _, ensure};

use crate::client::{bare, key, spread};
use crate::way::Way;

pub(crate) const NAME: &str = "Redis around it";

const RELEASE: &str =
    "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) else return 0 end";

pub(crate) fn first_call(response: &'static str) -> Way {
    Way::new(NAME, move |client, call| {
        Box::pin(async move {
            let key = key(call)?;
            let (result, lock, token) =
                (format!("result:{}", key.value()), format!("lock:{}", key.value()), spread(!call));
            let redis = client.redis.as_mut().context("no Redis")?;
            ensure!(redis.command(&["GET", &result]).await?.is_none(), "every key is new");
            let locked = redis.command(&["SET", &lock, &token, "NX", "PX", "30000"]).await?;
            ensure!(locked.is_some(), "every key is new");
            bare(client).await?;
            let redis = client.redis.as_mut().context("no Redis")?;
            redis.command(&["SET", &result, &serde_json::to_string(response)?, "PX", "86400000"]).await?;
            redis.command(&["EVAL", RELEASE, "1", &lock, &token]).await?;
            Ok(())
        })
    })
}

/// All replays ask for one key. The first one stores the result.
pub(crate) fn replay(response: &'static str) -> Way {
    Way::new(NAME, move |client, _| {
        Box::pin(async move {
            let redis = client.redis.as_mut().context("no Redis")?;
            match redis.command(&["GET", "result:hot"]).await? {
                Some(stored) => drop(serde_json::from_str::<String>(&stored)?),
                None => drop(redis.command(&["SET", "result:hot", &serde_json::to_string(response)?]).await?),
            }
            Ok(())
        })
    })
}

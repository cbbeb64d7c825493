//! A table that Citus distributes beside a plain one, on the cluster whose coordinator `CITUS_DATABASE_URL` names.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use pg_idempotency::mark::{Marked, Marking};
use pg_idempotency::{Deployment, Error, Idempotency, Key};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};

use crate::bench::Bench;
use crate::client::{BODY, Client, of_clients, response, spread};
use crate::measure::interleave;
use crate::report::Report;
use crate::setting::Setting;
use crate::way::{Pending, Way};

pub(crate) const ABOUT: &str = "\
*Plain* is a database without Citus on the coordinator's server, and *Citus* a table with that many shards on all workers. Both \
are reached over TCP, with `synchronous_commit` on. Coordinator, workers and clients share the cores. A first call inserts \
one row into a business table with the column `scope`, on Citus next to the key, and stores 300 B of response. The *bare \
insert* is that row alone, in a transaction. Replays ask for one of 1000 keys. A rate of marks counts keys, and a latency is \
that of one call with all its keys.";

pub(crate) const NAME: &str = "citus";
const PLAIN: &str = "idempotency_bench_plain";
/// The first is Citus's default.
const SHARDS: [u32; 3] = [32, 8, 128];
const REPLAYED: u64 = 1000;
const WINDOW: Duration = Duration::from_secs(3600);

const FIRST_CALL: &str = "First call";
const OF_MANY_SCOPES: &str = "100 marks of 100 scopes";

#[derive(Clone, Copy)]
enum Side {
    Plain,
    Citus,
}

struct Operation {
    title: &'static str,
    clients: usize,
    unit: &'static str,
    way: fn(Side) -> Way,
}

/// The first two with every number of shards.
const OPERATIONS: [Operation; 6] = [
    Operation { title: "Bare insert", clients: 8, unit: "inserts", way: bare },
    Operation { title: FIRST_CALL, clients: 8, unit: "calls", way: first_call },
    Operation { title: "Replay", clients: 8, unit: "replays", way: replay },
    Operation { title: "One mark", clients: 8, unit: "keys", way: |side| marks(side, 1, 1) },
    Operation { title: "100 marks of one scope", clients: 1, unit: "keys", way: |side| marks(side, 100, 1) },
    Operation { title: OF_MANY_SCOPES, clients: 1, unit: "keys", way: |side| marks(side, 100, 100) },
];

pub(crate) async fn run(bench: &Bench, report: &mut Report) -> anyhow::Result<()> {
    let server: PgConnectOptions = std::env::var("CITUS_DATABASE_URL").context("CITUS_DATABASE_URL")?.parse()?;
    let setting = Setting::local(&server, None, true);
    let mut conn = setting.connect(None).await?;
    let used: bool =
        sqlx::query_scalar("select to_regnamespace('idempotency') is not null").fetch_one(&mut conn).await?;
    ensure!(!used, "the database on Citus has the schema idempotency, which this case would drop");
    conn.execute(AssertSqlSafe(format!("create database {PLAIN} template template0"))).await?;
    let mut plain = setting.connect(Some(PLAIN)).await?;
    pg_idempotency::migrate(&setting.lazy_pool(Some(PLAIN))).await?;
    plain.execute(PAYMENT).await?;
    use_keys(Side::Plain, &mut plain).await?;

    let mut first_calls = Vec::new();
    for shards in SHARDS {
        distribute(&server, &mut conn, shards).await?;
        let usual = shards == SHARDS[0];
        if usual {
            use_keys(Side::Citus, &mut conn).await?;
        }
        for operation in if usual { &OPERATIONS[..] } else { &OPERATIONS[..2] } {
            let ways = [Side::Plain, Side::Citus].map(operation.way);
            let measured = interleave(bench, &setting, operation.clients, ways.into()).await?;
            let title = format!("{}, {shards} shards, {}", operation.title, of_clients(operation.clients));
            report.speeds(NAME, title.clone(), None, operation.unit, &measured);
            let ratio = measured[1].against(&measured[0]);
            report.figure(NAME, format!("{title}: rate over that of plain"), None, Some(ratio));
            if operation.title == FIRST_CALL {
                first_calls.push((shards, ratio));
            }
            if operation.title == OF_MANY_SCOPES {
                let p50 = Some(measured[1].percentile(0.5));
                report.figure(NAME, format!("{title}: p50, ms"), None, p50);
            }
        }
    }
    let of = |shards| first_calls.iter().find(|(of, _)| *of == shards).map(|(_, ratio)| *ratio);
    let growth = of(8).zip(of(128)).map(|(few, many)| few / many);
    report.figure(NAME, "First call: time with 128 shards over that with 8", None, growth);
    conn.execute(DROP).await?;
    plain.close().await?;
    conn.execute(AssertSqlSafe(format!("drop database {PLAIN} with (force)"))).await?;
    Ok(())
}

/// The business table: its scope is of the type and the collation of the key's.
const PAYMENT: &str = "create table payment (scope text collate \"C\" not null, note text not null)";
const DROP: &str = "drop schema if exists idempotency cascade; drop table if exists payment";

async fn distribute(server: &PgConnectOptions, conn: &mut PgConnection, shards: u32) -> anyhow::Result<()> {
    conn.execute(DROP).await?;
    let shard_count = [("citus.shard_count", shards.to_string())];
    let pool = PgPool::connect_with(server.clone().options(shard_count)).await?;
    pg_idempotency::migrate(&pool).await?;
    pg_idempotency::distribute(&pool).await?;
    pool.close().await;
    conn.execute(PAYMENT).await?;
    conn.execute("select create_distributed_table('payment', 'scope', colocate_with => 'idempotency.record')").await?;
    Ok(())
}

impl Side {
    fn way<F>(self, call: F) -> Way
    where
        F: for<'c> Fn(&'c mut Client, u64) -> Pending<'c> + Send + Sync + 'static,
    {
        match self {
            Self::Plain => Way::new("plain", call).on(PLAIN),
            Self::Citus => Way::new("Citus", call),
        }
    }

    fn deployment(self) -> Deployment {
        Deployment::new().with_distributed(matches!(self, Self::Citus))
    }

    /// Whether it was replayed.
    async fn ensure(self, conn: &mut PgConnection, key: &Key, response: &str) -> Result<bool, Error> {
        let options = Idempotency::new().with_deployment(self.deployment());
        let perform = async |conn: &mut PgConnection| -> Result<String, Error> {
            pay(conn, key.scope()).await?;
            Ok(response.to_owned())
        };
        let mut tx = conn.begin().await?;
        let outcome = options.ensure(&mut tx, key, BODY, perform).await?;
        tx.commit().await?;
        Ok(outcome.is_replayed())
    }
}

async fn pay(conn: &mut PgConnection, scope: &str) -> sqlx::Result<()> {
    let insert = sqlx::query("insert into payment (scope, note) values ($1, '100.00 EUR')").bind(scope);
    insert.execute(conn).await.map(drop)
}

fn account(call: u64) -> String {
    format!("account:{}", call % 5000)
}

async fn use_keys(side: Side, conn: &mut PgConnection) -> anyhow::Result<()> {
    for n in 0..REPLAYED {
        side.ensure(conn, &used_key(n)?, &response(300)).await?;
    }
    Ok(())
}

fn used_key(call: u64) -> anyhow::Result<Key> {
    Ok(Key::new(account(call % REPLAYED), "POST /payments", "used")?)
}

fn bare(side: Side) -> Way {
    side.way(|client, call| {
        Box::pin(async move {
            let mut tx = client.conn.begin().await?;
            pay(&mut tx, &account(call)).await?;
            Ok(tx.commit().await?)
        })
    })
}

fn first_call(side: Side) -> Way {
    let response: Arc<str> = response(300).into();
    side.way(move |client, call| {
        let response = response.clone();
        Box::pin(async move {
            let key = Key::new(account(call), "POST /payments", spread(call))?;
            ensure!(!side.ensure(&mut client.conn, &key, &response).await?, "every key is new");
            Ok(())
        })
    })
}

fn replay(side: Side) -> Way {
    side.way(move |client, call| {
        Box::pin(async move {
            ensure!(side.ensure(&mut client.conn, &used_key(call)?, "").await?, "every key is there");
            Ok(())
        })
    })
}

fn marks(side: Side, keys: u64, scopes: u64) -> Way {
    let marks = side.way(move |client, call| {
        Box::pin(async move {
            let key = |n| Key::new(account(call * scopes + n % scopes), "event", spread(call << 16 | n));
            let keys: Vec<_> = (0..keys).map(key).collect::<Result<_, _>>()?;
            let marking = Marking::new(WINDOW)?.with_deployment(side.deployment());
            let mut tx = client.conn.begin().await?;
            let marked = match &keys[..] {
                [one] => vec![marking.mark(&mut tx, one).await?],
                many => marking.mark_many(&mut tx, many).await?,
            };
            tx.commit().await?;
            ensure!(marked.iter().all(|marked| *marked == Marked::First), "every key is new");
            Ok(())
        })
    });
    marks.of_units(keys as usize)
}

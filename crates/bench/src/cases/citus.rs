//! A table that Citus distributes beside a plain one, on the cluster whose coordinator `CITUS_DATABASE_URL` names.

use anyhow::{Context as _, ensure};
use pg_idempotency::{Deployment, Error, Idempotency, Key};
use sqlx::postgres::PgConnectOptions;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};

use crate::alternatives::library;
use crate::bench::Bench;
use crate::client::{BODY, response, spread};
use crate::measure::compare;
use crate::results::Table;
use crate::setting::Setting;
use crate::way::Way;

pub(crate) const NAME: &str = "citus";

const PLAIN: &str = "idempotency_bench_plain";
/// The default of Citus comes first.
const SHARDS: [u32; 3] = [32, 8, 128];
const REPLAYED: u64 = 1000;

pub(crate) const MAIN: &str = "32 shards";
pub(crate) const FIRST_CALL: &str = "first call, 8 clients";
pub(crate) const REPLAY: &str = "replay, 8 clients";
pub(crate) const ONE_MARK: &str = "one mark, 8 clients";
pub(crate) const OF_MANY_SCOPES: &str = "100 marks of 100 scopes, 1 client";
pub(crate) const ON_PLAIN: &str = "a plain table";
pub(crate) const ON_CITUS: &str = "Citus";

#[derive(Clone, Copy)]
enum Side {
    Plain,
    Citus,
}

/// What is called, the number of clients, and how they call it.
type Operation = (&'static str, usize, fn(Side) -> Way);

/// The first two are measured with every number of shards.
const OPERATIONS: [Operation; 6] = [
    ("bare insert, 8 clients", 8, bare),
    (FIRST_CALL, 8, first_call),
    (REPLAY, 8, replay),
    (ONE_MARK, 8, |side| marks(side, 1, 1)),
    ("100 marks of one scope, 1 client", 1, |side| marks(side, 100, 1)),
    (OF_MANY_SCOPES, 1, |side| marks(side, 100, 100)),
];

pub(crate) async fn run(bench: &Bench) -> anyhow::Result<Vec<Table>> {
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

    let mut tables = Vec::new();
    for shards in SHARDS {
        distribute(&server, &mut conn, shards).await?;
        let usual = shards == SHARDS[0];
        if usual {
            use_keys(Side::Citus, &mut conn).await?;
        }
        for (operation, clients, way) in if usual { &OPERATIONS[..] } else { &OPERATIONS[..2] } {
            let rows = compare(bench, &setting, *clients, &[Side::Plain, Side::Citus].map(way)).await?;
            tables.push(Table::new(title(shards), *operation, "operations", rows));
        }
    }
    conn.execute(DROP).await?;
    plain.close().await?;
    conn.execute(AssertSqlSafe(format!("drop database {PLAIN} with (force)"))).await?;
    Ok(tables)
}

pub(crate) fn title(shards: u32) -> String {
    format!("{shards} shards")
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
    fn way(self, way: Way) -> Way {
        match self {
            Self::Plain => way.named(ON_PLAIN).on(PLAIN),
            Self::Citus => way.named(ON_CITUS),
        }
    }

    fn deployment(self) -> Deployment {
        Deployment::new().distributed(matches!(self, Self::Citus))
    }

    /// Says whether the call was replayed.
    async fn ensure(self, conn: &mut PgConnection, key: &Key, response: &str) -> Result<bool, Error> {
        let options = Idempotency::new().deployment(self.deployment());
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
    let response = response(300);
    for n in 0..REPLAYED {
        side.ensure(conn, &used_key(n)?, response).await?;
    }
    Ok(())
}

fn used_key(call: u64) -> anyhow::Result<Key> {
    Ok(Key::new(account(call % REPLAYED), "POST /payments", "used")?)
}

fn bare(side: Side) -> Way {
    side.way(Way::new("bare", |client, call| {
        Box::pin(async move {
            let mut tx = client.conn.begin().await?;
            pay(&mut tx, &account(call)).await?;
            Ok(tx.commit().await?)
        })
    }))
}

fn first_call(side: Side) -> Way {
    let response = response(300);
    side.way(Way::new("first call", move |client, call| {
        Box::pin(async move {
            let key = Key::new(account(call), "POST /payments", spread(call))?;
            ensure!(!side.ensure(&mut client.conn, &key, response).await?, "every key is new");
            Ok(())
        })
    }))
}

fn replay(side: Side) -> Way {
    side.way(Way::new("replay", move |client, call| {
        Box::pin(async move {
            ensure!(side.ensure(&mut client.conn, &used_key(call)?, "").await?, "every key is there");
            Ok(())
        })
    }))
}

fn marks(side: Side, keys: u64, scopes: u64) -> Way {
    let key = move |call, n| Key::new(account(call * scopes + n % scopes), "event", spread(call << 16 | n));
    side.way(library::marks_of(side.deployment(), keys, key))
}

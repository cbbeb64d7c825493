//! One of the clients that call at the same time, and the call that they make.

use std::sync::atomic::{AtomicU64, Ordering};

use pg_idempotency::{InvalidKey, Key};
use sqlx::{Acquire as _, PgConnection, PgPool};

use crate::redis::Redis;
use crate::setting::Setting;

pub(crate) struct Client {
    pub(crate) conn: PgConnection,
    /// It has two connections, so that no call waits for sqlx's ping of the last call's connection, and it does not
    /// ping a connection before it lends it.
    pub(crate) pool: PgPool,
    pub(crate) redis: Option<Redis>,
}

impl Client {
    pub(crate) async fn connect(setting: &Setting, database: Option<&str>) -> anyhow::Result<Self> {
        let redis = match &setting.redis {
            Some(address) => Some(Redis::connect(address).await?),
            None => None,
        };
        Ok(Self { conn: setting.connect(database).await?, pool: setting.lazy_pool(database), redis })
    }
}

/// No two calls of a run have the same number.
pub(crate) fn next_call() -> u64 {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    CALLS.fetch_add(1, Ordering::Relaxed)
}

/// An ordinary small request.
pub(crate) const BODY: &str = "amount=100.00&currency=EUR&payee=DE02120300000000202051";

pub(crate) type KeyOf = fn(u64) -> Result<Key, InvalidKey>;

/// The key of this call, in a service with thousands of scopes. Keys are spread as random UUIDs are.
pub(crate) fn key(call: u64) -> Result<Key, InvalidKey> {
    Key::new(format!("account:{}", call % 5000), "POST /payments", spread(call))
}

/// The key of this call, in a service that has one scope.
pub(crate) fn key_of_one_scope(call: u64) -> Result<Key, InvalidKey> {
    Key::new("account:1", "POST /payments", spread(call))
}

pub(crate) fn spread(call: u64) -> String {
    // The finalizer of SplitMix64, a permutation.
    let mut mixed = call.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^= mixed >> 31;
    let (high, low) = (mixed >> 32, mixed & 0xffff_ffff);
    format!("{high:08x}-{:04x}-4{:03x}-8000-{:012x}", low >> 16, low & 0xfff, call & 0xffff_ffff_ffff)
}

/// A response whose JSON has this size, and which hardly compresses. It lives as long as the process, like the few
/// others.
pub(crate) fn response(bytes: usize) -> &'static str {
    let mut text: String = (0_u64..).map(spread).take(bytes / 36 + 1).collect();
    text.truncate(bytes - 2);
    text.leak()
}

/// The business of each call, which every alternative has to do.
pub(crate) async fn effect(conn: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar("insert into effect (note) values ($1) returning id").bind("100.00 EUR").fetch_one(conn).await
}

/// The effect alone, in a transaction.
pub(crate) async fn bare(client: &mut Client) -> sqlx::Result<()> {
    let mut tx = client.conn.begin().await?;
    effect(&mut tx).await?;
    tx.commit().await
}

/// For a title or a column.
pub(crate) fn of_clients(clients: usize) -> String {
    if clients == 1 { "1 client".to_owned() } else { format!("{clients} clients") }
}

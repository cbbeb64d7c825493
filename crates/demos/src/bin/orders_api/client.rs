//! The run's passengers, and the story's view of the database.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context as _;
use sqlx::{PgPool, Postgres, Transaction};
use tokio::time::{sleep, timeout};

use crate::phone::Phone;

/// Only a mistake in the server takes this long.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// How often to look whether the server is in the middle.
const GATE_PACE: Duration = Duration::from_millis(5);

pub(crate) struct Client {
    address: SocketAddr,
    http: reqwest::Client,
    pool: PgPool,
    run: String,
}

impl Client {
    pub(crate) fn new(address: SocketAddr, pool: PgPool, run: String) -> anyhow::Result<Self> {
        // A proxy for the outside world has no business between this client and 127.0.0.1.
        let http = reqwest::Client::builder().no_proxy().timeout(ANSWER_LIMIT).build()?;
        Ok(Self { address, http, pool, run })
    }

    /// A new passenger, and a phone with his token in it.
    pub(crate) async fn passenger(&self, name: &str) -> sqlx::Result<Phone> {
        let (name, token) = (format!("{}-{name}", self.run), format!("{}-token-of-{name}", self.run));
        sqlx::query("insert into passenger (name, token, phone) values ($1::text, $2::text, '+12025550117')")
            .bind(&name)
            .bind(&token)
            .execute(&self.pool)
            .await?;
        Ok(Phone { address: self.address, http: self.http.clone(), passenger: name, token })
    }

    pub(crate) async fn revoke(&self, passenger: &str) -> sqlx::Result<()> {
        let sql = "update passenger set revoked = true where name = $1::text";
        sqlx::query(sql).bind(passenger).execute(&self.pool).await.map(drop)
    }

    /// How many orders this passenger has, of all states.
    pub(crate) async fn orders(&self, passenger: &str) -> sqlx::Result<i64> {
        let sql = "select count(*) from taxi_order where passenger = $1::text";
        sqlx::query_scalar(sql).bind(passenger).fetch_one(&self.pool).await
    }

    /// How many keys are taken.
    pub(crate) async fn keys(&self, passenger: &str) -> sqlx::Result<i64> {
        let sql = "select count(*) from idempotency.record where scope = $1::text";
        sqlx::query_scalar(sql).bind(passenger).fetch_one(&self.pool).await
    }

    /// What the counter says.
    pub(crate) async fn completed_rides(&self, passenger: &str) -> sqlx::Result<i64> {
        let sql = "select completed_rides from passenger where name = $1::text";
        sqlx::query_scalar(sql).bind(passenger).fetch_one(&self.pool).await
    }

    /// Moves what the passenger's keys remember into the past.
    pub(crate) async fn pass_hours(&self, passenger: &str, hours: i32) -> sqlx::Result<()> {
        let sql = "
            update idempotency.record
            set claimed_at = claimed_at - make_interval(hours => $2::int4),
                completed_at = completed_at - make_interval(hours => $2::int4),
                expires_at = expires_at - make_interval(hours => $2::int4)
            where scope = $1::text
        ";
        sqlx::query(sql).bind(passenger).bind(hours).execute(&self.pool).await.map(drop)
    }

    /// A gate in the middle of the server's work: until this transaction ends, the key is claimed and the order waits.
    pub(crate) async fn no_inserts(&self) -> sqlx::Result<Transaction<'static, Postgres>> {
        let mut gate = self.pool.begin().await?;
        sqlx::query("lock table taxi_order in share mode").execute(&mut *gate).await?;
        Ok(gate)
    }

    /// Returns when an order waits at the gate.
    pub(crate) async fn in_the_middle(&self) -> anyhow::Result<()> {
        let sql = "
            select exists (
                select
                from pg_stat_activity
                where application_name = current_setting('application_name') and wait_event_type = 'Lock'
            )
        ";
        let looking = async {
            while !sqlx::query_scalar::<_, bool>(sql).fetch_one(&self.pool).await? {
                sleep(GATE_PACE).await;
            }
            anyhow::Ok(())
        };
        timeout(ANSWER_LIMIT, looking).await.context("no order comes to the gate in the middle of the server's work")?
    }
}

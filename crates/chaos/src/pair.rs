//! A primary and its standby, both the suite's own.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use sqlx::{Connection as _, PgConnection};
use tokio::time::sleep;

use crate::cluster::{Cluster, signal};

const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Pair {
    pub(crate) primary: Cluster,
    pub(crate) standby: Cluster,
}

impl Pair {
    /// The standby is a copy of the primary's files, because not every build has `pg_basebackup`.
    pub(crate) async fn start(synchronous: bool) -> anyhow::Result<Self> {
        let pair = Self { primary: Cluster::start(&[]).await?, standby: Cluster::start(&[]).await? };
        let (from, to) = (pair.primary.data(), pair.standby.data());
        pair.primary.stop().await?;
        pair.standby.stop().await?;
        let settings = format!(
            "\nunix_socket_directories = '{}'\nprimary_conninfo = 'host={} user=postgres application_name=standby'\n",
            pair.standby.directory().display(),
            pair.primary.directory().display(),
        );
        let script = r#"set -e
            rm -rf "$2"; cp -a "$1" "$2"; printf '%s' "$3" >>"$2/postgresql.conf"; cp -a "$2/PG_VERSION" "$2/standby.signal""#;
        let copied = Command::new("sh").args(["-c", script, "copy"]).arg(&from).arg(&to).arg(settings).status()?;
        ensure!(copied.success(), "the primary's files could not be copied");
        pair.primary.start_again().await?;
        pair.standby.start_again().await?;
        if synchronous {
            pair.primary.set("synchronous_standby_names = 'standby'").await?;
        }
        pair.wait_for("select count(*) > 0 from pg_stat_replication where state = 'streaming'", &pair.primary).await?;
        Ok(pair)
    }

    /// The network between the two fails: what the primary commits does not arrive.
    pub(crate) async fn separate(&self) -> anyhow::Result<u32> {
        let mut conn = PgConnection::connect_with(&self.standby.options()).await?;
        let receiver: i32 = sqlx::query_scalar("select pid from pg_stat_wal_receiver").fetch_one(&mut conn).await?;
        conn.close().await?;
        let receiver = u32::try_from(receiver)?;
        signal("-STOP", receiver)?;
        Ok(receiver)
    }

    /// The primary is gone, and the standby takes its place.
    pub(crate) async fn promote(&self, receiver: u32) -> anyhow::Result<()> {
        self.primary.kill()?;
        // Its backends notice.
        sleep(Duration::from_millis(200)).await;
        // With it goes what was on the wire; and its server restarts, to a state that it has on disk.
        signal("-KILL", receiver)?;
        sleep(Duration::from_millis(200)).await;
        self.standby.answers().await?;
        let mut conn = PgConnection::connect_with(&self.standby.options()).await?;
        let promoted: bool = sqlx::query_scalar("select pg_promote()").fetch_one(&mut conn).await?;
        ensure!(promoted, "the standby was not promoted");
        Ok(conn.close().await?)
    }

    async fn wait_for(&self, sql: &'static str, server: &Cluster) -> anyhow::Result<()> {
        let mut conn = PgConnection::connect_with(&server.options()).await?;
        let started = Instant::now();
        while !sqlx::query_scalar::<_, bool>(sql).fetch_one(&mut conn).await? {
            ensure!(started.elapsed() < PATIENCE, "the standby does not follow");
            sleep(Duration::from_millis(20)).await;
        }
        Ok(conn.close().await?)
    }
}

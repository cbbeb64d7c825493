//! Through a real PgBouncer in transaction mode, with prepared statements off. `script/test` finds or fetches one;
//! without the variable PGBOUNCER these tests have nothing to run against, and say so.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use pg_idempotency::lease::LeaseOptions;
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::operator::unsettled;
use pg_idempotency::{Error, Idempotency, Janitor, Key, OnDuplicate, Outcome, migrate};
use rig::database::options;
use rig::lease::AT_LEAST_ONCE;
use rig::role::with_role;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{Connection as _, PgConnection, PgPool};

/// Long past any start.
const PATIENCE: Duration = Duration::from_secs(20);

/// A PgBouncer with three server connections per database. Ended and removed with this value.
struct PgBouncer {
    process: Child,
    directory: PathBuf,
    options: PgConnectOptions,
}

impl PgBouncer {
    /// `None`, and a line that says so, where no PgBouncer is given.
    async fn before(server: &PgConnectOptions) -> anyhow::Result<Option<Self>> {
        let Some(binary) = std::env::var_os("PGBOUNCER") else {
            println!("skipped: PGBOUNCER does not name a pgbouncer");
            return Ok(None);
        };
        let directory = std::env::temp_dir().join(format!("pgb-{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&directory)?;
        // PgBouncer refuses to run as root, and the server's socket is its user's only: another user has to write here.
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777))?;
        let host = match server.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => server.get_host().to_owned(),
        };
        let configuration = directory.join("pgbouncer.ini");
        std::fs::write(
            &configuration,
            format!(
                "[databases]\n* = host={host} port={port} user={user}\n\
                 [pgbouncer]\npool_mode = transaction\nauth_type = any\nlisten_port = 6432\nunix_socket_dir = {directory}\n\
                 default_pool_size = 3\nmax_client_conn = 200\nignore_startup_parameters = extra_float_digits\n",
                port = server.get_port(),
                user = server.get_username(),
                directory = directory.display(),
            ),
        )?;
        let mut command = Command::new(binary);
        if let Some(socket) = server.get_socket() {
            // As the owner of the socket, if another user runs the test.
            let owner = Command::new("stat").args(["-c", "%U"]).arg(socket).output()?;
            let me = Command::new("id").arg("-un").output()?;
            if owner.stdout != me.stdout {
                command.arg("-u").arg(String::from_utf8(owner.stdout)?.trim());
            }
        }
        let process = command.arg("-q").arg(&configuration).stdin(Stdio::null()).stdout(Stdio::null()).spawn()?;
        let options = PgConnectOptions::new_without_pgpass()
            .socket(&directory)
            .port(6432)
            .username(server.get_username())
            .database(server.get_database().unwrap_or("postgres"));
        let bouncer = Self { process, directory, options };
        let started = Instant::now();
        while let Err(error) = PgConnection::connect_with(&bouncer.options).await {
            anyhow::ensure!(started.elapsed() < PATIENCE, "pgbouncer does not come up: {error}");
            tokio::task::yield_now().await;
        }
        Ok(Some(bouncer))
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn key(value: &str) -> Key {
    Key::new("tenant", "operation", value).expect("a valid key")
}

#[sqlx::test(migrations = false)]
async fn migrations_and_calls_keep_their_promise_through_transaction_pooling(direct: PgPool) -> anyhow::Result<()> {
    let Some(bouncer) = PgBouncer::before(&direct.connect_options()).await? else { return Ok(()) };
    let pool = PgPoolOptions::new().max_connections(12).connect_with(bouncer.options.clone()).await?;

    let installers: Vec<_> = (0..8)
        .map(|_| {
            let pool = pool.clone();
            tokio::spawn(async move { migrate(&pool).await })
        })
        .collect();
    for installer in installers {
        installer.await??;
    }
    sqlx::raw_sql("create table effect (note text)").execute(&direct).await?;

    let unprepared = Idempotency::new().persistent(false);
    let callers: Vec<_> = (0..12)
        .map(|caller| {
            let pool = pool.clone();
            tokio::spawn(async move {
                let mut performed = 0_i64;
                for n in 0..50 {
                    // Every key is asked for by three callers.
                    let note = format!("{}/{n}", caller / 3);
                    let options =
                        if caller % 3 == 0 { unprepared.on_duplicate(OnDuplicate::Reject) } else { unprepared };
                    let result = options
                        .run(&pool, &key(&note), &note, async |conn| -> Result<String, Error> {
                            sqlx::query("insert into effect values ($1)")
                                .persistent(false)
                                .bind(&note)
                                .execute(conn)
                                .await?;
                            Ok(note.clone())
                        })
                        .await;
                    match result {
                        Ok(outcome) => {
                            performed += i64::from(!outcome.is_replayed());
                            assert_eq!(outcome.into_inner(), note, "nobody else's response");
                        }
                        // Retryable: two came at the same moment, and the one that must not wait met the other's row.
                        Err(Error::InFlight { .. } | Error::Retryable(_)) if caller % 3 == 0 => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                anyhow::Ok(performed)
            })
        })
        .collect();
    let mut performed = 0;
    for caller in callers {
        performed += caller.await??;
    }
    let (effects, distinct, completed): (i64, i64, i64) = sqlx::query_as(
        "select count(*), count(distinct note), (select count(completed_at) from idempotency.record) from effect",
    )
    .fetch_one(&direct)
    .await?;
    assert_eq!((performed, effects, distinct, completed), (200, 200, 200, 200));
    pool.close().await;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn leases_marks_and_the_janitor_work_through_transaction_pooling(direct: PgPool) -> anyhow::Result<()> {
    let Some(bouncer) = PgBouncer::before(&direct.connect_options()).await? else { return Ok(()) };
    let pool = PgPoolOptions::new().max_connections(12).connect_with(bouncer.options.clone()).await?;
    let leasing = LeaseOptions::new(AT_LEAST_ONCE).persistent(false);
    let marking = MarkOptions::new(Duration::from_millis(1)).persistent(false);
    let workers: Vec<_> = (0..12)
        .map(|worker| {
            let pool = pool.clone();
            tokio::spawn(async move {
                for n in 0..20 {
                    let own = format!("{worker}/{n}");
                    let outcome = leasing.run(&pool, &key(&own), &own, async |_| Ok::<_, Error>(own.clone())).await?;
                    assert_eq!(outcome, Outcome::Performed(own.clone()));
                    let mut tx = pool.begin().await?;
                    let marks: Vec<Key> = (0..5).map(|mark| key(&format!("mark {own} {mark}"))).collect();
                    assert_eq!(marking.mark_many(&mut tx, &marks).await?, [Marked::First; 5]);
                    tx.commit().await?;
                    Janitor::new(pool.clone()).grace(Duration::ZERO).pause(Duration::ZERO).sweep_once(50).await?;
                }
                anyhow::Ok(())
            })
        })
        .collect();
    for worker in workers {
        worker.await??;
    }
    Janitor::new(pool.clone()).grace(Duration::ZERO).sweep_once(u64::MAX).await?;
    let (completed, left): (i64, i64) = sqlx::query_as(
        "select count(*) filter (where mode = 'at_least_once' and completed_at is not null), count(*) from idempotency.record",
    )
    .fetch_one(&direct)
    .await?;
    assert_eq!((completed, left), (240, 240), "all results are there, all marks are swept");
    pool.close().await;
    Ok(())
}

/// A setting that stayed on a connection of the server would refuse the queries of the next client.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_janitor_and_an_operator_leave_row_security_as_it_is_on_the_connections_of_a_pooler(
    direct: PgPool,
) -> anyhow::Result<()> {
    let rights =
        "grant usage on schema idempotency to @role; grant select, update, delete on idempotency.record to @role;
        create table orders (owner text not null); insert into orders values ('ann'), ('bob');
        alter table orders enable row level security; grant select on orders to @role;
        create policy own on orders using (owner = 'ann')";
    with_role(&direct, rights, async |role| beside_policies(&direct, &options(&direct).username(role)).await).await
}

async fn beside_policies(direct: &PgPool, as_role: &PgConnectOptions) -> anyhow::Result<()> {
    let Some(bouncer) = PgBouncer::before(as_role).await? else { return Ok(()) };
    let pool = PgPoolOptions::new().max_connections(12).connect_with(bouncer.options.clone()).await?;
    for is_hidden in [false, true] {
        if is_hidden {
            sqlx::raw_sql("alter table idempotency.record enable row level security").execute(direct).await?;
        }
        let workers: Vec<_> = (0..12)
            .map(|_| {
                let pool = pool.clone();
                tokio::spawn(async move {
                    for _ in 0..10 {
                        let swept = Janitor::new(pool.clone()).sweep_once(10).await;
                        let listed = unsettled(&pool, 10, None, None).await;
                        assert_eq!((swept.is_err(), listed.is_err()), (is_hidden, is_hidden), "{swept:?}, {listed:?}");
                        let mut tx = pool.begin().await?;
                        let orders = sqlx::query_scalar::<_, i64>("select count(*) from orders").persistent(false);
                        assert_eq!(orders.fetch_one(&mut *tx).await?, 1);
                        tx.commit().await?;
                    }
                    anyhow::Ok(())
                })
            })
            .collect();
        for worker in workers {
            worker.await??;
        }
    }
    pool.close().await;
    Ok(())
}

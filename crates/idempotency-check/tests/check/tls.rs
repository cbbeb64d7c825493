//! A server that demands TLS and a password.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};

use idempotency_check::{Answer, Check};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

use crate::shop::create;
use crate::support::{EFFECTS, free_port};

const PASSWORD: &str = "p@ss";

/// It goes with this value, and also when the test is killed: it lives as long as this end of its input.
struct Server {
    process: Child,
    port: u16,
    authority: std::path::PathBuf,
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
        let _ = std::fs::remove_file(&self.authority);
    }
}

impl Server {
    async fn start() -> anyhow::Result<Self> {
        let mut command = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../script/postgres"));
        command.arg("serve").env("PG_PASSWORD", PASSWORD).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn()?;
        let mut socket = String::new();
        BufReader::new(process.stdout.take().expect("piped")).read_line(&mut socket)?;
        let (port, authority) = (free_port(), std::env::temp_dir().join(format!("authority-{}.pem", process.id())));
        let mut server = Self { process, port, authority };
        let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()])?;
        std::fs::write(&server.authority, certified.cert.pem())?;
        let mut superuser =
            PgConnection::connect(&socket.trim().replace("postgres@", &format!("postgres:{}@", "p%40ss"))).await?;
        for (file, pem) in [("server.crt", certified.cert.pem()), ("server.key", certified.signing_key.serialize_pem())]
        {
            // The server writes them itself, because the key has to be its own.
            let copy = format!(
                "copy (select * from unnest(string_to_array('{}', e'\\n'))) to program 'umask 077; cat > {file}'",
                pem.trim()
            );
            sqlx::raw_sql(AssertSqlSafe(copy)).execute(&mut superuser).await?;
        }
        for setting in [format!("port = {port}"), "listen_addresses = 'localhost'".to_owned(), "ssl = on".to_owned()] {
            let set = format!("alter system set {setting}");
            sqlx::raw_sql(AssertSqlSafe(set)).execute(&mut superuser).await?;
        }
        let stop = "copy (select 1) to program 'kill -INT $(head -n 1 postmaster.pid)'";
        // The server may end before it answers.
        let _ = sqlx::raw_sql(stop).execute(&mut superuser).await;
        writeln!(server.process.stdin.as_mut().expect("piped"), "start")?;
        // It takes as long as it takes to start; a server that cannot start would fail the test by its time.
        for _ in 0..600 {
            if PgConnection::connect(&server.url("sslmode=require")).await.is_ok() {
                return Ok(server);
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        anyhow::bail!("the server with TLS does not start")
    }

    fn url(&self, parameters: &str) -> String {
        format!("postgres://postgres:p%40ss@localhost:{}/postgres?{parameters}", self.port)
    }
}

async fn pay(database: &str, key: &str) -> anyhow::Result<Answer> {
    let mut connection = PgConnection::connect(database).await?;
    let own = "select ssl from pg_stat_ssl where pid = pg_backend_pid()";
    anyhow::ensure!(sqlx::query_scalar::<_, bool>(own).fetch_one(&mut connection).await?, "it is not encrypted");
    let mut tx = connection.begin().await?;
    let claim = sqlx::query("insert into keys (key, request) values ($1, '') on conflict do nothing").bind(key);
    if claim.execute(&mut *tx).await?.rows_affected() == 1 {
        sqlx::query("insert into payments (amount) values (100)").execute(&mut *tx).await?;
    }
    tx.commit().await?;
    Ok(Answer::new(200, "paid"))
}

#[tokio::test]
async fn the_proxy_speaks_tls_as_the_url_demands() -> anyhow::Result<()> {
    let server = Server::start().await?;
    create(&sqlx::PgPool::connect(&server.url("sslmode=require")).await?).await?;
    let authority = server.authority.display();
    for parameters in ["sslmode=require".to_owned(), format!("sslmode=verify-full&sslrootcert={authority}")] {
        let check = Check::new(server.url(&parameters)).effects(EFFECTS);
        let report = check.call(async |database: String, key: String| pay(&database, &key).await).run().await?;
        assert!(report.findings.is_empty(), "{report}");
        assert_eq!(report.messages.len(), 8, "{report}");
    }
    let distrusting = Check::new(server.url("sslmode=verify-full")).effects(EFFECTS);
    let refused = distrusting.call(async |database: String, key: String| pay(&database, &key).await).run().await;
    let error = refused.expect_err("nobody knows this authority").in_one_line();
    assert!(error.contains("certificate"), "{error}");
    Ok(())
}

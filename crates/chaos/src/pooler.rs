//! A PgBouncer in transaction mode. It is gone when this process is, however that ends.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection as _, PgConnection};

use crate::cluster::root;

const PATIENCE: Duration = Duration::from_secs(20);
/// Ends and removes it at EOF. Signals of a terminal are for the suite.
const KEEPER: &str = r#"
    trap '' HUP INT QUIT PIPE TERM
    "$@" </dev/null >/dev/null 2>&1 &
    read -r _
    kill -INT $!
    wait
    rm -rf "$DIRECTORY"
"#;

pub(crate) struct Pooler {
    keeper: Child,
    pub(crate) options: PgConnectOptions,
}

/// The path of a pgbouncer, where one can be had.
pub(crate) fn binary() -> Option<String> {
    if let Ok(path) = std::env::var("PGBOUNCER") {
        return Some(path);
    }
    let found = Command::new(root().join("script/find-server")).arg("pgbouncer").stderr(Stdio::null()).output().ok()?;
    found.status.success().then(|| String::from_utf8_lossy(&found.stdout).trim().to_owned())
}

impl Pooler {
    pub(crate) async fn before(server: &PgConnectOptions, binary: &str) -> anyhow::Result<Self> {
        let socket = server.get_socket().context("a server on a Unix socket")?;
        let directory = PathBuf::from(format!("/tmp/pgi-pooler.{}", std::process::id()));
        std::fs::create_dir_all(&directory)?;
        // It refuses to run as root, and the user that it takes has to write here.
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777))?;
        let (host, configuration) = (socket.display(), directory.join("pgbouncer.ini"));
        let settings = format!(
            "[databases]\n* = host={host} port=5432 user=postgres\n\
             [pgbouncer]\npool_mode = transaction\nauth_type = any\nlisten_port = 6432\nunix_socket_dir = {directory}\n\
             default_pool_size = 3\nmax_client_conn = 200\nignore_startup_parameters = extra_float_digits\n",
            directory = directory.display(),
        );
        std::fs::write(&configuration, settings)?;
        let owner = Command::new("stat").args(["-c", "%U"]).arg(socket).output()?;
        let me = Command::new("id").arg("-un").output()?;
        let mut command = Command::new("sh");
        command.args(["-c", KEEPER, "keeper", binary]);
        if owner.stdout != me.stdout {
            command.arg("-u").arg(String::from_utf8(owner.stdout)?.trim());
        }
        let keeper = command
            .arg("-q")
            .arg(&configuration)
            .env("DIRECTORY", &directory)
            .stdin(Stdio::piped())
            .process_group(0)
            .spawn()?;
        let options = PgConnectOptions::new_without_pgpass()
            .socket(&directory)
            .port(6432)
            .username("postgres")
            .database(server.get_database().unwrap_or("postgres"));
        let pooler = Self { keeper, options };
        let started = Instant::now();
        while let Err(error) = PgConnection::connect_with(&pooler.options).await {
            ensure!(started.elapsed() < PATIENCE, "pgbouncer does not come up: {error}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(pooler)
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

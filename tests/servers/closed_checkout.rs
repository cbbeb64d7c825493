//! The scripts in a checkout that other users cannot enter, and whose path has a space in it. PostgreSQL refuses to run
//! as root, so a server that root starts is another user's, and has to find all that it reads elsewhere.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rig::child::Kept;
use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection as _, PgConnection};

/// A directory of this user's only, removed with this value.
struct Closed(PathBuf);

impl Closed {
    fn create() -> std::io::Result<Self> {
        let closed = std::env::temp_dir().join(format!("pgi-closed.{}", uuid::Uuid::new_v4().simple()));
        std::fs::create_dir(&closed)?;
        std::fs::set_permissions(&closed, std::fs::Permissions::from_mode(0o700))?;
        Ok(Self(closed))
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    let copied = Command::new("cp").arg("-RL").arg(from).arg(to).status()?;
    anyhow::ensure!(copied.success(), "cp {from:?} {to:?}: {copied}");
    Ok(())
}

/// Some library that this process has loaded, and so any other can. A second copy of this one does no harm.
fn library() -> anyhow::Result<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut paths = maps.lines().filter_map(|line| Some(Path::new(&line[line.find('/')?..])));
    let found = paths.find(|path| path.to_string_lossy().contains("/libgcc_s.so"));
    Ok(found.ok_or_else(|| anyhow::anyhow!("no libgcc_s in\n{maps}"))?.to_owned())
}

#[tokio::test]
async fn a_server_of_a_checkout_that_its_user_cannot_enter_starts() -> anyhow::Result<()> {
    let closed = Closed::create()?;
    let checkout = closed.0.join("a checkout");
    std::fs::create_dir(&checkout)?;
    copy(&Path::new(env!("CARGO_MANIFEST_DIR")).join("script"), &checkout.join("script"))?;
    let preload = checkout.join("preloaded library.so");
    copy(&library()?, &preload)?;

    // The server that this checkout has found or fetched: another would have to be fetched once more.
    let found = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("script/postgres")).arg("bindir").output()?;
    let bindir = String::from_utf8(found.stdout)?;
    let mut serving = Command::new(checkout.join("script/postgres"));
    serving.arg("serve").env("PG_BINDIR", bindir.trim_end_matches('\n'));
    serving.env("PG_PRELOAD", &preload).env("PG_FSYNC", "off");
    let server = Kept::start(&mut serving)?;
    let options: PgConnectOptions = server.said.parse()?;
    let directory = options.get_socket().expect("a server on a Unix socket").clone();

    let mut conn = PgConnection::connect_with(&options).await?;
    let answer: i32 = sqlx::query_scalar("select 1").fetch_one(&mut conn).await?;
    assert_eq!(answer, 1);
    let postmaster = std::fs::read_to_string(directory.join("data/postmaster.pid"))?;
    let postmaster = postmaster.lines().next().expect("a number").to_owned();
    let maps = std::fs::read_to_string(format!("/proc/{postmaster}/maps"))?;
    let beside_the_data = directory.join("preload.so");
    assert!(maps.contains(&beside_the_data.display().to_string()), "the library is loaded\n{maps}");
    conn.close().await?;

    drop(server);
    assert!(!directory.exists(), "nothing is left");
    Ok(())
}

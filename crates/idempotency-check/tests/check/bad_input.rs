//! What cannot be checked is said in one sentence.

use sqlx::PgPool;

use crate::shop::create;
use crate::support::{EFFECTS, assert_cannot_run, command, command_on, free_port, url};

const NOWHERE: &str = "http://127.0.0.1:9/payments";

#[test]
fn an_unreachable_database_and_another_kind_of_url_are_refused() -> anyhow::Result<()> {
    let port = free_port();
    for (database, says) in [
        (format!("postgres://a@127.0.0.1:{port}/a"), "the database does not answer: "),
        ("mysql://127.0.0.1/a".to_owned(), "the database has to be a URL of PostgreSQL"),
    ] {
        let output = command().args(["--database", &database, "--effects", "select 1", NOWHERE]).output()?;
        assert_cannot_run(&output, says);
    }
    Ok(())
}

#[sqlx::test]
async fn effects_that_fail_or_never_rest_are_refused(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    for (query, says) in [
        ("select * from nothing", "the effects cannot be read: "),
        ("select random()", "they differ from reading to reading, without a request"),
    ] {
        let port = free_port();
        let mut command = command();
        command.args(["--database", &url(&options), "--effects", query, &format!("http://127.0.0.1:{port}/")]);
        let output = command.args(["--", "sleep", "60"]).output()?;
        assert_cannot_run(&output, says);
    }
    Ok(())
}

#[sqlx::test]
async fn a_service_that_ends_says_why(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    create(&pool).await?;
    let mut command = command();
    command.args(["--database", &url(&options), "--effects", EFFECTS, &format!("http://127.0.0.1:{}/", free_port())]);
    let output = command.args(["--", "sh", "-c", "echo no licence >&2; exit 3"]).output()?;
    assert_cannot_run(&output, "the service ended with exit status: 3, and wrote last: no licence");
    Ok(())
}

#[sqlx::test]
async fn a_service_that_does_not_use_the_proxy_is_named(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    create(&pool).await?;
    let mut command = command_on(&options, free_port(), &["--env", "SHOP_DATABASE"], "right");
    let output = command.env("DATABASE_URL", url(&options)).output()?;
    assert_cannot_run(&output, "the service answered, but it does not use the proxy");
    Ok(())
}

#[sqlx::test]
async fn a_port_that_is_taken_is_named(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    create(&pool).await?;
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let output = command_on(&options, listener.local_addr()?.port(), &[], "right").output()?;
    assert_cannot_run(&output, "another process already listens on 127.0.0.1:");
    Ok(())
}

#[sqlx::test]
async fn a_request_that_fails_or_changes_nothing_is_not_checked(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    create(&pool).await?;
    let missing = ["-X", "GET"];
    let output = command_on(&options, free_port(), &missing, "right").output()?;
    assert_cannot_run(&output, "the undisturbed request fails: answer to the first request: 405");
    let port = free_port();
    let mut command = command();
    command.args(["--database", &url(&options), "--effects", "select count(*) from keys where key = 'none'"]);
    command.args(["--json", "1", &format!("http://127.0.0.1:{port}/payments"), "--"]);
    let output = command.args(crate::support::as_a_process(port, "right")).output()?;
    assert_cannot_run(&output, "the undisturbed request changes nothing that the effects show");
    Ok(())
}

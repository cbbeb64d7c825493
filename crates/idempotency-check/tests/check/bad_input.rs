//! What cannot be checked is said in one sentence.

use sqlx::PgPool;

use crate::shop::create;
use crate::support::{EFFECTS, assert_cannot_run, command, command_on, free_port, text, url};

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

/// The check itself has run, so its report must not be lost without a word.
#[sqlx::test]
async fn a_full_disk_says_where_the_report_is(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    create(&pool).await?;
    let only = ["--only", "5:lost-before"];
    let full = || std::fs::File::create("/dev/full");
    let to_full = [&only[..], &["--report", "/dev/full"]].concat();
    let output = command_on(&options, free_port(), &to_full, "right").output()?;
    let last = text(&output.stderr).lines().last().unwrap_or_default().to_owned();
    assert!(last.starts_with("idempotency-check: /dev/full cannot be written, so the report is on standard"), "{last}");
    assert_eq!(output.status.code(), Some(2), "{last}");
    assert!(text(&output.stdout).contains("1 interruptions tried, 0 findings."), "{output:?}");

    for (more, says) in [(&only[..], "so the report is lost: "), (&to_full, "so the report is lost: ")] {
        let output = command_on(&options, free_port(), more, "right").stdout(full()?).output()?;
        let last = text(&output.stderr).lines().last().unwrap_or_default().to_owned();
        assert!(output.status.code() == Some(2) && last.contains(says), "{last}");
    }
    Ok(())
}

#[sqlx::test]
async fn a_pipe_without_a_reader_changes_no_exit_code(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    create(&pool).await?;
    for (only, memory, code) in [("5:lost-before", "right", 0), ("4:killed", "late", 1)] {
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let mut command = command_on(&options, free_port(), &["--only", only], memory);
        let output = command.stdout(writer).stderr(std::process::Stdio::piped()).output()?;
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(!text(&output.stderr).contains("panicked"), "{output:?}");
    }
    Ok(())
}

/// `script` of util-linux makes the terminal, of 40 columns.
#[sqlx::test]
async fn a_terminal_shows_a_bar_and_a_log_has_a_line_for_each_try(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    create(&pool).await?;
    let command = command_on(&options, free_port(), &["--only", "5:lost-before"], "right");
    let quoted = |part: &std::ffi::OsStr| format!("'{}'", part.to_string_lossy().replace('\'', r"'\''"));
    let typed: Vec<_> = [command.get_program()].into_iter().chain(command.get_args()).map(quoted).collect();
    let typed = format!("stty rows 24 cols 40 && exec {}", typed.join(" "));
    let mut script = std::process::Command::new("script");
    script
        .args(["-qec", &typed, "/dev/null"])
        .env("TERM", "xterm")
        .env("LC_ALL", "C")
        .stdin(std::process::Stdio::null());
    let Ok(output) = script.output() else {
        println!("skipped: script (of util-linux or bsdutils) is missing");
        return Ok(());
    };
    let shown = text(&output.stdout);
    assert!(output.status.success() && shown.contains("1/1 tries") && shown.contains("0 findings."), "{shown}");
    assert!(
        !shown.contains("5:lost-before one effect") && shown.is_ascii() && !shown.contains("\u{1b}[3"),
        "{shown:?}"
    );

    let mut command = command_on(&options, free_port(), &["--only", "5:lost-before"], "right");
    let log = text(&command.output()?.stderr);
    assert!(log.contains("5:lost-before one effect (COMMIT)\n") && !log.contains("1/1 tries"), "{log}");
    Ok(())
}

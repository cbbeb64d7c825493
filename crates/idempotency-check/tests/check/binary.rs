//! The binary, with a service that it starts.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Command, Stdio};
use std::time::Duration;

use idempotency_check::Interruption;
use sqlx::PgPool;

use crate::shop::create;
use crate::support::{EFFECTS, as_a_process, command, command_on, free_port, is_open, text, url};

#[sqlx::test]
async fn a_right_service_survives_every_interruption_and_is_stopped(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    create(&pool).await?;
    let port = free_port();
    let file = std::env::temp_dir().join(format!("idempotency-check-{port}.json"));
    let path = file.to_string_lossy().into_owned();
    let output = command_on(&options, port, &["--report", &path], "right").output()?;
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    assert!(said.contains("25 interruptions tried, 0 findings."), "{said}");
    assert!(text(&output.stderr).contains("5 messages, 25 tries, about "), "{}", text(&output.stderr));
    assert!(!is_open(port), "the service still listens");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&file)?)?;
    std::fs::remove_file(file)?;
    assert_eq!(report["service"]["killed"], true);
    assert_eq!(report["messages"][4], serde_json::json!({"number": 5, "sql": "COMMIT"}));
    let tries = report["tries"].as_array().expect("tries");
    assert!(tries.iter().all(|it| it["verdict"] == "one_effect"));
    let first = |interruption: &str| -> Vec<_> {
        tries.iter().filter(|it| it["interruption"] == interruption).map(|it| it["answers"][0].clone()).collect()
    };
    // A service that survives tells its client that something has failed. A killed one tells nothing.
    assert_eq!(first("lost-after").iter().filter(|it| it["status"] == 500).count(), 5);
    assert_eq!(first("killed").iter().filter(|it| it["status"].is_null() && it["request"] == "first").count(), 5);
    // A client that has hung up hears nothing either, and asks again.
    assert_eq!(first("hang-up").iter().filter(|it| it["request"] == "retry").count(), 5);
    let refused = report["undisturbed"].as_array().expect("checks").iter().find(|it| it["check"] == "another_body");
    assert_eq!(refused.expect("another body")["answers"][1]["status"], 422);
    Ok(())
}

#[sqlx::test]
async fn a_finding_is_told_and_ends_with_1(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    create(&pool).await?;
    let port = free_port();
    let only = format!("4:{}", Interruption::Killed.name());
    let output = command_on(&options, port, &["--only", &only], "late").output()?;
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}{}", text(&output.stderr));
    assert!(said.contains("TWO EFFECTS, at 4:killed: the effect is +2 +200 instead of +1 +100"), "{said}");
    assert!(said.contains("the process is killed; the server executes the message all the same"), "{said}");
    Ok(())
}

#[sqlx::test]
async fn a_signal_stops_the_service_too(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    create(&pool).await?;
    let port = free_port();
    let mut check = command_on(&options, port, &[], "right").spawn()?;
    while !is_open(port) {
        anyhow::ensure!(check.try_wait()?.is_none(), "the check has ended");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let id = rustix::process::Pid::from_raw(check.id().cast_signed()).expect("a process");
    rustix::process::kill_process(id, rustix::process::Signal::TERM)?;
    assert_eq!(check.wait()?.code(), Some(143));
    assert!(!is_open(port), "the service still listens");
    Ok(())
}

#[sqlx::test]
async fn a_process_that_ends_by_itself_is_started_again(pool: PgPool) -> anyhow::Result<()> {
    let options = pool.connect_options();
    create(&pool).await?;
    let mut command = command_on(&options, free_port(), &["--only", "5:lost-before"], "right");
    let output = command.env("SHOP_IS_FRAGILE", "1").output()?;
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    assert!(said.contains("the process ended by itself 1 times, and was started again each time"), "{said}");
    Ok(())
}

#[sqlx::test]
async fn a_service_that_is_started_elsewhere_is_not_killed(pool: PgPool) -> anyhow::Result<()> {
    create(&pool).await?;
    let port = free_port();
    let mut check = command();
    check.args(["--database", &url(&pool.connect_options()), "--effects", EFFECTS, "--json", "{\"amount\":100}"]);
    check.arg(format!("http://127.0.0.1:{port}/payments")).stderr(Stdio::piped()).stdout(Stdio::null());
    let mut check = check.spawn()?;
    let mut errors = BufReader::new(check.stderr.take().expect("piped"));
    let mut line = String::new();
    errors.read_line(&mut line)?;
    let through = line.trim().strip_prefix("waiting for a service with DATABASE_URL=").expect("the URL").to_owned();
    let mut service =
        Command::new("env").args(&as_a_process(port, "right")[1..]).env("DATABASE_URL", through).spawn()?;
    let mut rest = String::new();
    errors.read_to_string(&mut rest)?;
    let code = check.wait()?.code();
    let still_runs = service.try_wait()?.is_none();
    service.kill()?;
    service.wait()?;
    assert_eq!(code, Some(0), "{rest}");
    assert!(still_runs, "{rest}");
    assert!(rest.contains("5 messages, 20 tries") && rest.contains("it is not killed"), "{rest}");
    Ok(())
}

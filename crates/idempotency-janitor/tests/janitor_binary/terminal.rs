//! The binary in a shell and on a terminal: the first steps, completions, manual pages, progress and colour.

use std::fs;
use std::process::{Command, Output, Stdio};

use sqlx::PgPool;

use crate::support::{assert_fails, command_on, committed_after_an_error, expired, janitor, janitor_on, text};

#[test]
fn without_a_command_a_person_reads_the_first_steps() {
    let output = janitor(&[]);
    assert_eq!(output.status.code(), Some(2), "a crontab without a command must not look done");
    for part in ["DATABASE_URL", "health", "unsettled", "--help"] {
        assert!(text(&output.stderr).contains(part), "{output:?}");
    }
    assert!(output.stdout.is_empty());
}

#[test]
fn each_shell_gets_completions_that_it_can_read() {
    for shell in ["bash", "zsh", "fish"] {
        let output = janitor(&["completions", shell]);
        assert!(output.status.success() && text(&output.stdout).contains("abandoned-for"), "{shell}");
        let reader = Command::new(shell).arg("-n").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        // Only bash is on every machine with these tests.
        let Ok(mut reader) = reader else {
            assert_ne!(shell, "bash");
            continue;
        };
        std::io::Write::write_all(&mut reader.stdin.take().expect("piped"), &output.stdout).expect("the shell reads");
        assert!(reader.wait().expect("the shell ends").success(), "{shell} cannot read the completions");
    }
}

#[test]
fn each_command_gets_a_manual_page() -> anyhow::Result<()> {
    let directory = std::env::temp_dir().join(format!("pgi-manual-{}", std::process::id()));
    let path = directory.to_str().expect("UTF-8");
    assert_fails(&janitor(&["manual", path]), 1, "give a directory that exists");
    fs::create_dir(&directory)?;
    let output = janitor(&["manual", path]);
    let pages: Vec<_> = fs::read_dir(&directory)?.map(|page| page.expect("a page").file_name()).collect();
    let page = fs::read_to_string(directory.join("idempotency-janitor-sweep.1"));
    fs::remove_dir_all(&directory)?;
    assert!(output.status.success() && pages.len() > 14, "{pages:?}: {output:?}");
    assert!(page?.contains("IDEMPOTENCY_MAX_DURATION"));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_duration_is_written_as_people_write_it(pool: PgPool) {
    let sweep = |most| janitor_on(&pool, &["sweep", "--max-duration", most]);
    for most in ["90s", "1h 30m", "1h30m", "7d", "500ms"] {
        assert_eq!(sweep(most).status.code(), Some(0), "{most}");
    }
    for most in ["", "5", "m", "5 fortnights", "99999999999999999999s"] {
        let output = sweep(most);
        assert_eq!(output.status.code(), Some(2), "{most}");
        assert!(text(&output.stderr).contains("is not a duration"), "{most}: {output:?}");
    }
}

/// Runs the binary on a terminal of 40 columns. The output is what the terminal shows. `None` if the program `script` is
/// missing, which makes the terminal.
fn on_a_terminal(pool: &PgPool, arguments: &str, no_colour: bool) -> Option<Output> {
    let mut script = Command::new("script");
    let janitor = format!("stty cols 40 && exec '{}' {arguments}", env!("CARGO_BIN_EXE_idempotency-janitor"));
    for (name, value) in command_on(pool).get_envs() {
        value.map(|value| script.env(name, value));
    }
    script.env_remove("RUST_LOG").env("TERM", "xterm").env_remove("NO_COLOR");
    if no_colour {
        script.env("NO_COLOR", "1");
    }
    let output = script.args(["-qec", &janitor, "/dev/null"]).stdin(Stdio::null()).output().ok();
    if output.is_none() {
        println!("skipped: script (of util-linux or bsdutils) is missing");
    }
    output
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_terminal_shows_progress_and_colour_and_a_log_has_neither(pool: PgPool) -> anyhow::Result<()> {
    let key = pg_idempotency::Key::new("scope", "operation", "unsettled")?;
    let unsettled = async || -> anyhow::Result<()> {
        committed_after_an_error(&pool, &key).await?;
        expired(&pool, 3).await?;
        sqlx::query("update idempotency.record set expires_at = now() - interval '2 d'").execute(&pool).await?;
        Ok(())
    };
    unsettled().await?;
    let output = janitor_on(&pool, &["sweep"]);
    assert!(text(&output.stderr).contains("WARN") && !text(&output.stderr).contains('\u{1b}'), "{output:?}");
    assert!(!text(&output.stderr).contains("deleting"), "{output:?}");

    for no_colour in [false, true] {
        unsettled().await?;
        let Some(output) = on_a_terminal(&pool, "sweep", no_colour) else { return Ok(()) };
        let shown = text(&output.stdout);
        assert!(output.status.success() && shown.contains("deleting"), "{shown}");
        assert!(shown.contains("4 records deleted"), "{shown}");
        // The colour of WARN.
        assert_eq!(shown.contains("\u{1b}[33m"), !no_colour, "{shown:?}");
    }
    Ok(())
}

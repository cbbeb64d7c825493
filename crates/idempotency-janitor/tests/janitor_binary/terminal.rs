//! The binary in a shell and on a terminal: the first steps, completions, manual pages, progress and colour.

use std::fs;
use std::process::{Command, Output, Stdio};

use sqlx::PgPool;

use crate::support::{
    AT_MOST_ONCE, assert_fails, command_on, committed_after_an_error, expired, janitor, janitor_on, lapsed, seen_on,
    text,
};

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

/// Runs the binary on a terminal of 40 columns. The output is what the terminal shows. `None` if the program `script`
/// is missing, which makes the terminal.
fn on_a_terminal(pool: &PgPool, arguments: &str, environment: &[(&str, &str)]) -> Option<Output> {
    let mut script = Command::new("script");
    let janitor = format!("stty rows 24 cols 40 && exec '{}' {arguments}", env!("CARGO_BIN_EXE_idempotency-janitor"));
    for (name, value) in command_on(pool).get_envs() {
        value.map(|value| script.env(name, value));
    }
    script.env_remove("RUST_LOG").env("TERM", "xterm").env_remove("NO_COLOR");
    script.envs(environment.iter().copied());
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
        let Some(output) = on_a_terminal(&pool, "sweep", if no_colour { &[("NO_COLOR", "1")] } else { &[] }) else {
            return Ok(());
        };
        let shown = text(&output.stdout);
        assert!(output.status.success() && shown.contains("deleting"), "{shown}");
        assert!(shown.contains("4 records deleted"), "{shown}");
        // The colour of WARN.
        assert_eq!(shown.contains("\u{1b}[33m"), !no_colour, "{shown:?}");
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_terminal_of_40_columns_breaks_no_word(pool: PgPool) -> anyhow::Result<()> {
    for help in ["--help", "sweep --help", "resolve --help"] {
        let Some(output) = on_a_terminal(&pool, help, &[("NO_COLOR", "1")]) else { return Ok(()) };
        let shown = text(&output.stdout);
        // clap does not wrap the names of flags.
        let is_prose = |line: &&str| !["Usage:", "-", "<", "["].iter().any(|name| line.trim().starts_with(name));
        let broken: Vec<_> = shown.lines().filter(|line| line.trim_end().len() > 40).filter(is_prose).collect();
        assert!(output.status.success() && broken.is_empty(), "{help}: {broken:#?}");
    }
    let key = pg_idempotency::Key::new("tenant:17", "POST /texts", "0b7f7a52")?;
    lapsed(&pool, &key, AT_MOST_ONCE).await?;
    for command in ["unsettled", "show tenant:17 'POST /texts' 0b7f7a52"] {
        let output = on_a_terminal(&pool, command, &[]).expect("as above");
        let shown = text(&output.stdout);
        let facts =
            shown.lines().filter(|line| ["claimed", "expires"].iter().any(|fact| line.trim().starts_with(fact)));
        assert!(facts.filter(|line| line.trim_end().len() <= 56).count() == 2, "two lines of the screen each: {shown}");
        assert_eq!(shown.contains("tenant:17 'POST /texts' 0b7f7a52\r\n"), command == "unsettled", "{shown}");
    }
    Ok(())
}

/// On such a terminal, a byte of a UTF-8 character may be a control character.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_terminal_without_utf_8_gets_ascii_and_a_pipe_gets_the_text(pool: PgPool) -> anyhow::Result<()> {
    let key = pg_idempotency::Key::new("scope", "operation", "Z\u{fc}rich")?;
    lapsed(&pool, &key, AT_MOST_ONCE).await?;
    // The second byte of this letter is the beginning of a control sequence in ISO 8859.
    sqlx::query("update idempotency.record set last_error = '\u{15b}31mno'").execute(&pool).await?;
    for (locale, is_ascii) in [(&[("LC_ALL", "C")], true), (&[("LC_ALL", "C.UTF-8")], false)] {
        for command in ["unsettled", "show scope operation Z\u{fc}rich", "stats"] {
            let Some(output) = on_a_terminal(&pool, command, locale) else { return Ok(()) };
            let shown = text(&output.stdout);
            assert!(shown.is_ascii() == (is_ascii || command == "stats"), "{locale:?} {command}: {shown}");
            assert!(!is_ascii || command == "stats" || shown.contains(r"\u{15b}31mno"), "{shown}");
        }
    }
    let piped = command_on(&pool).arg("unsettled").env("LC_ALL", "C").output()?;
    assert!(text(&piped.stdout).contains("Z\u{fc}rich"), "{piped:?}");
    Ok(())
}

/// Characters that a client may send, and that JSON itself leaves as they are: the beginning of a control sequence, and
/// marks that change the direction of writing.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn json_controls_no_terminal_and_has_the_same_value(pool: PgPool) -> anyhow::Result<()> {
    const RAW: &str =
        "\u{7f}\u{85}\u{9b}31m\u{90}\u{9c}\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}\u{202a}\u{202e}\u{2066}\u{2069}";
    let key = pg_idempotency::Key::new("scope", "operation", "a\u{202e}\u{2028}b")?;
    lapsed(&pool, &key, AT_MOST_ONCE).await?;
    sqlx::query("update idempotency.record set last_error = $1").bind(RAW).execute(&pool).await?;
    let is_harmless = |said: &str| {
        said.trim_end_matches('\n').chars().all(|found| !found.is_control() && !RAW.contains(found) || found.is_ascii())
    };
    let log = std::env::temp_dir().join(format!("pgi-log-{}", uuid::Uuid::new_v4()));
    let seen = seen_on(&pool, &["scope", "operation", key.value()]);
    for arguments in [
        &["show", "scope", "operation", key.value(), "--json"][..],
        &["unsettled", "--json"],
        &["release", "scope", "operation", key.value(), "--reason", RAW, "--seen", &seen, "--json"],
    ] {
        let said = text(&janitor_on(&pool, arguments).stdout);
        assert!(!said.is_empty() && is_harmless(&said), "{arguments:?}: {said:?}");
        let said: serde_json::Value = serde_json::from_str(&said)?;
        let record = said.get("records").map_or(&said, |records| &records[0]);
        let error = if arguments[0] == "release" { &record["reason"] } else { &record["last_error"] };
        assert_eq!((&record["value"], error), (&key.value().into(), &RAW.into()), "{arguments:?}");
    }
    // The same line in the log of the console.
    lapsed(&pool, &pg_idempotency::Key::new("scope", "operation", "c\u{202e}d")?, AT_MOST_ONCE).await?;
    crate::console::released_in_a_console(&pool, "c\u{202e}d", &log).await?;
    let line = fs::read_to_string(&log)?;
    fs::remove_file(&log)?;
    assert!(is_harmless(&line), "{line:?}");
    assert_eq!(serde_json::from_str::<serde_json::Value>(&line)?["value"], "c\u{202e}d");
    Ok(())
}

/// A reader that closes the pipe early, as `head` does, changes neither the effect nor the exit code.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_pipe_without_a_reader_loses_nothing(pool: PgPool) -> anyhow::Result<()> {
    sqlx::raw_sql("create table orders (id int); create table payments (id int)").execute(&pool).await?;
    let key = pg_idempotency::Key::new("scope", "operation", "value")?;
    lapsed(&pool, &key, AT_MOST_ONCE).await?;
    let seen = seen_on(&pool, &["scope", "operation", "value"]);
    let release = ["release", "scope", "operation", "value", "--reason", "ticket 4711", "--seen", &seen];
    for (arguments, code) in [
        (&["unsettled"][..], 3),
        (&["unsettled", "--json"], 3),
        (&["stats"], 0),
        (&["stats", "--json"], 0),
        (&["show", "scope", "operation", "value"], 0),
        (&["protect", "orders", "payments"], 0),
        (&[&release[..], &["--json"]].concat(), 0),
        (&["sweep"], 0),
        (&["migrate", "--print"], 0),
        (&["completions", "bash"], 0),
        (&["--help"], 0),
    ] {
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let output = command_on(&pool).args(arguments).stdout(writer).stderr(Stdio::piped()).output()?;
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(code), String::new()), "{arguments:?}");
    }
    let health = text(&janitor_on(&pool, &["health"]).stdout);
    assert!(health.contains("protected: public.orders\nprotected: public.payments\n"), "{health}");
    let unsettled = janitor_on(&pool, &["unsettled"]);
    assert_eq!(unsettled.status.code(), Some(0), "released: {unsettled:?}");
    Ok(())
}

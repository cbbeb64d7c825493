//! `resolve` and `release`: an operator decides what became of an operation.

use std::io::Write as _;
use std::process::{Command, Stdio};

use chrono::DateTime;
use pg_idempotency::lease::{Acquired, LeaseOptions};
use pg_idempotency::{Error, Idempotency, Key, Outcome, mark};
use rig::database::recorded;
use rig::fixture::Fixture;
use rig::lease::owner;
use sqlx::{ConnectOptions as _, PgPool};

use crate::support::{
    AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS, assert_fails, command_on, committed_after_an_error, decide_on, in_doubt,
    in_doubt_at, janitor, janitor_on, json, lapsed, seen_on, text,
};

const NAMED: [&str; 3] = ["user:1", "POST /texts", "abc"];

fn key() -> Key {
    Key::new(NAMED[0], NAMED[1], NAMED[2]).expect("a valid key")
}

fn resolve<'a>(response: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["resolve"], &NAMED[..], &["--response", response, "--reason", "ticket 4711"], more].concat()
}

fn release<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&["release"], &NAMED[..], &["--reason", "ticket 4712"], more].concat()
}

async fn stored(pool: &PgPool) -> anyhow::Result<String> {
    Ok(sqlx::query_scalar("select convert_from(response_body, 'UTF8') from idempotency.record").fetch_one(pool).await?)
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn resolve_gives_every_repeat_the_response(pool: PgPool) -> anyhow::Result<()> {
    lapsed(&pool, &key(), AT_MOST_ONCE).await?;

    assert_fails(&janitor_on(&pool, &resolve("7", &[])), 2, "--seen");
    let Err(Error::Indeterminate { .. }) =
        LeaseOptions::new(AT_MOST_ONCE).acquire::<i64, _>(&pool, &key(), "body").await
    else {
        panic!("nobody said yes")
    };

    let shown = json(&janitor_on(&pool, &[&["show", "--json"], &NAMED[..]].concat()));
    // More digits than a number in memory keeps, and members that a map would sort.
    let response = r#"{"z": 12345678901234567890123, "a": "\u00e9"}"#;
    let output = decide_on(&pool, &resolve(response, &[]));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let receipt = text(&output.stdout);
    let time = receipt.split(' ').next().expect("a word");
    assert!(DateTime::parse_from_rfc3339(time).is_ok(), "{receipt}");
    let (token, downstream_key) = (&shown["token"], &shown["downstream_key"]);
    let named = format!(
        "token {}, downstream key {}, which",
        token.as_str().expect("text"),
        downstream_key.as_str().expect("text")
    );
    for part in ["resolved", &named, "which was indeterminate", "because ticket 4711"] {
        assert!(text(&output.stdout).contains(part), "{part}: {}", text(&output.stdout));
    }
    assert_eq!(stored(&pool).await?, response, "to the byte");
    let kept: bool =
        recorded(&pool, "expires_at between now() + interval '1439 min' and now() + interval '1441 min'").await;
    assert!(kept, "for the default retention");
    let Acquired::Replayed(replayed) =
        LeaseOptions::new(AT_MOST_ONCE).acquire::<serde_json::Value, _>(&pool, &key(), "body").await?
    else {
        panic!("not performed")
    };
    assert_eq!(replayed["a"], "\u{e9}");
    assert_fails(&decide_on(&pool, &resolve("8", &[])), 1, "completed");
    Ok(())
}

/// The service's own retention may be longer than ours by default.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn resolve_does_not_shorten_the_protection(pool: PgPool) -> anyhow::Result<()> {
    for (left, kept) in [("30 days", "29 days"), ("1 minute", "23 hours")] {
        lapsed(&pool, &key(), AT_MOST_ONCE).await?;
        sqlx::query("update idempotency.record set expires_at = now() + $1::text::interval")
            .bind(left)
            .execute(&pool)
            .await?;
        let output = decide_on(&pool, &resolve("7", &[]));
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let longer: bool = sqlx::query_scalar("select expires_at > now() + $1::text::interval from idempotency.record")
            .bind(kept)
            .fetch_one(&pool)
            .await?;
        assert!(longer, "{left}");
        sqlx::query("delete from idempotency.record").execute(&pool).await?;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn resolve_reads_the_response_from_a_file(pool: PgPool) -> anyhow::Result<()> {
    lapsed(&pool, &key(), AT_MOST_ONCE).await?;
    let file = std::env::temp_dir().join(format!("response-{}", uuid::Uuid::new_v4()));
    std::fs::write(&file, "{\"receipt\": \"r-1\"}\n")?;
    let path = file.display().to_string();
    let arguments = [&["resolve"], &NAMED[..], &["--response-file", &path, "--reason", "a test"]].concat();
    let output = decide_on(&pool, &arguments);
    std::fs::remove_file(&file)?;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(stored(&pool).await?, r#"{"receipt": "r-1"}"#);
    assert_fails(&janitor_on(&pool, &arguments), 2, "cannot read the response");
    Ok(())
}

/// Nothing listens at this address: what is typed wrong is found before.
#[test]
fn wrong_usage_is_said_before_anything_is_connected_to() {
    let nowhere = ["--database-url", "postgres://me@127.0.0.1:1/db"];
    let says = |arguments: &[&str], says: &str| assert_fails(&janitor(arguments), 2, says);
    for broken in ["{receipt: 1}", "", "NaN", "1 2", "{\"a\": 1"] {
        says(&resolve(broken, &nowhere), "the response is not valid JSON");
    }
    says(&[&["resolve", "", "b", "c", "--response", "1", "--reason", "x"], &nowhere[..]].concat(), "scope");
    says(&[&["release", "a", "b", "new\nline", "--reason", "x"], &nowhere[..]].concat(), "control");
    for unusable in [
        [&["resolve"], &NAMED[..], &["--reason", "x"]].concat(),
        [&["resolve"], &NAMED[..], &["--response", "1"]].concat(),
        resolve("1", &["--response-file", "/dev/null"]),
        [&["release"], &NAMED[..]].concat(),
        [&["release"], &NAMED[..], &["--reason", ""]].concat(),
    ] {
        let output = janitor(&[&unusable[..], &nowhere[..]].concat());
        assert_eq!(output.status.code(), Some(2), "{unusable:?}: {}", text(&output.stderr));
    }
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_step_in_doubt_is_resolved_or_released(pool: PgPool) -> anyhow::Result<()> {
    let step = |name: &'static str, result: &'static str| resolve(result, &["--step", name]);
    // Digits that a number in memory would lose.
    for (command, said, becomes) in [
        (step("text", "12345678901234567890123"), "which is released", "12345678901234567890123"),
        (release(&[]), "which was indeterminate", "8"),
    ] {
        in_doubt(&pool, &key()).await?;
        assert_fails(&decide_on(&pool, &resolve("7", &[])), 1, "is the step \"text\"");
        assert_fails(&decide_on(&pool, &step("ride", "2")), 1, "its result is stored");
        assert_fails(&decide_on(&pool, &step("none", "2")), 1, "no step of this name");
        assert_fails(&janitor_on(&pool, &resolve("2", &["--step", "text"])), 2, "--seen");
        let output = decide_on(&pool, &command);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert!(text(&output.stdout).contains(said), "{}", text(&output.stdout));
        let lease = owner(&pool, LeaseOptions::new(IN_STEPS), &key()).await;
        let ride: i64 = lease.step_at_least_once("ride", async |_| anyhow::bail!("finished")).await?;
        let number = |text: &str| serde_json::value::RawValue::from_string(text.to_owned());
        let text = lease.step_at_most_once("text", async |_| anyhow::Ok(number("8")?)).await?;
        assert_eq!((lease.attempt(), ride, text.get()), (2, 1, becomes));
        sqlx::query("delete from idempotency.record").execute(&pool).await?;
    }

    in_doubt(&pool, &key()).await?;
    sqlx::query("update idempotency.record set expires_at = now() - interval '1 s'").execute(&pool).await?;
    assert_fails(&decide_on(&pool, &step("text", "1")), 1, "key is new again");
    sqlx::query("delete from idempotency.record").execute(&pool).await?;
    lapsed(&pool, &key(), AT_MOST_ONCE).await?;
    assert_fails(&decide_on(&pool, &step("text", "1")), 1, "no step of this name");
    Ok(())
}

/// The owner died in two steps. The email was not sent and the text was, and nothing decides about both at once.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_of_several_steps_in_doubt_is_settled_by_its_name(pool: PgPool) -> anyhow::Result<()> {
    in_doubt_at(&pool, &key(), &["text", "email"]).await?;
    let both = r#"the steps ["email", "text"]"#;
    assert_fails(&decide_on(&pool, &release(&[])), 1, both);
    assert_fails(&decide_on(&pool, &resolve("7", &[])), 1, both);
    let listed = text(&janitor_on(&pool, &["unsettled"]).stdout);
    assert!(listed.contains("email text"), "{listed}");
    let report = json(&janitor_on(&pool, &["unsettled", "--json"]));
    let steps = report["records"][0]["steps"].as_array().expect("steps").iter();
    let in_doubt: Vec<_> = steps.filter(|step| step["state"] == "in_doubt").collect();
    assert_eq!(in_doubt.len(), 2, "{report}");

    assert_fails(&decide_on(&pool, &release(&["--step", "ride"])), 1, "its result is stored");
    assert_fails(&decide_on(&pool, &release(&["--step", "none"])), 1, "no step of this name");
    assert_fails(&janitor_on(&pool, &release(&["--step", "email"])), 2, "--seen");
    for (command, said) in [
        (release(&["--step", "email"]), r#"released: the step "email" with downstream key "#),
        (resolve("7", &["--step", "text"]), "which is released"),
    ] {
        let output = decide_on(&pool, &command);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert!(text(&output.stdout).contains(said), "{}", text(&output.stdout));
        let waits = text(&output.stdout).contains(r#"which still waits for ["text"]"#);
        assert_eq!(waits, command[0] == "release", "{}", text(&output.stdout));
        let again = decide_on(&pool, &release(&["--step", "email"]));
        assert_fails(&again, 1, "no step of this name");
    }
    let lease = owner(&pool, LeaseOptions::new(IN_STEPS), &key()).await;
    for (step, result) in [("email", 8), ("text", 7)] {
        assert_eq!(lease.step_at_most_once(step, async |_| anyhow::Ok(8)).await?, result, "{step}");
    }
    Ok(())
}

/// A full disk takes the line that says what was done. It is done.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_decision_that_was_made_is_no_failure(pool: PgPool) -> anyhow::Result<()> {
    lapsed(&pool, &key(), AT_MOST_ONCE).await?;
    let full = std::fs::File::create("/dev/full")?;
    let seen = seen_on(&pool, &NAMED);
    let output = command_on(&pool).args(release(&["--seen", &seen])).stdout(full).output()?;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let receipt = text(&output.stderr);
    let (time, done) = receipt.split_once(' ').expect("the time, and what was done");
    assert!(DateTime::parse_from_rfc3339(time).is_ok() && done.starts_with("released: scope"), "{receipt}");
    Ok(())
}

/// The advice to check the URL would hide that the decision may be made.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_connection_that_is_lost_at_the_commit_leaves_the_decision_open(pool: PgPool) -> anyhow::Result<()> {
    lapsed(&pool, &key(), AT_MOST_ONCE).await?;
    let cut = "create function cut() returns trigger language plpgsql as
                   $$ begin perform pg_terminate_backend(pg_backend_pid()); return null; end $$;
               create constraint trigger cut after update on idempotency.record initially deferred
                   for each row execute function cut()";
    sqlx::raw_sql(cut).execute(&pool).await?;
    assert_fails(&decide_on(&pool, &release(&[])), 1, "may have taken effect; look at the key with `show`");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn release_lets_the_next_call_perform(pool: PgPool) -> anyhow::Result<()> {
    lapsed(&pool, &key(), AT_MOST_ONCE).await?;
    assert_fails(&janitor_on(&pool, &release(&[])), 2, "--seen");
    let output = decide_on(&pool, &release(&[]));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("released"), "{}", text(&output.stdout));
    let kept: String = recorded(&pool, "last_error").await;
    assert_eq!(kept, "ticket 4712");
    assert_fails(&decide_on(&pool, &release(&[])), 1, "released");
    let lease = owner(&pool, LeaseOptions::new(AT_MOST_ONCE), &key()).await;
    assert_eq!(lease.attempt(), 2);
    Ok(())
}

/// A poison message; to release it would change nothing, so it is resolved.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_exhausted_operation_can_be_resolved(pool: PgPool) -> anyhow::Result<()> {
    for command in [resolve("7", &[]), release(&[])] {
        lapsed(&pool, &key(), AT_LEAST_ONCE).await?;
        let output = decide_on(&pool, &command);
        assert_eq!(output.status.code(), Some(0), "lapsed: {}", text(&output.stderr));
        sqlx::query("delete from idempotency.record").execute(&pool).await?;
    }
    let lease = owner(&pool, LeaseOptions::new(AT_LEAST_ONCE), &key()).await;
    lease.release("the gateway said no").await?;
    let once = LeaseOptions::new(AT_LEAST_ONCE).max_attempts(std::num::NonZeroU32::MIN);
    let Err(Error::Exhausted { .. }) = once.acquire::<i64, _>(&pool, &key(), "body").await else { panic!("exhausted") };
    let output = decide_on(&pool, &resolve("7", &[]));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let Acquired::Replayed(7) = once.acquire::<i64, _>(&pool, &key(), "body").await? else { panic!("resolved") };
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn an_indeterminate_transaction_is_settled_too(pool: PgPool) -> anyhow::Result<()> {
    let call = async || Idempotency::new().run(&pool, &key(), "body", async |_| -> anyhow::Result<i64> { Ok(8) }).await;
    for (command, becomes) in [(resolve("7", &[]), Outcome::Replayed(7)), (release(&[]), Outcome::Performed(8))] {
        committed_after_an_error(&pool, &key()).await?;
        call().await.expect_err("indeterminate");
        let output = decide_on(&pool, &command);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        assert_eq!(call().await?, becomes);
        sqlx::query("delete from idempotency.record").execute(&pool).await?;
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_record_that_does_not_wait_for_an_operator_is_refused(pool: PgPool) -> anyhow::Result<()> {
    let both_fail = |says: &str| {
        for command in [resolve("7", &[]), release(&[])] {
            assert_fails(&decide_on(&pool, &command), 1, says);
        }
    };
    both_fail("no record");

    Fixture::completed(&key(), "body", "kept")?.write(&pool).await?;
    both_fail("completed");
    assert_eq!(stored(&pool).await?, "\"kept\"");
    Fixture::completed(&key(), "body", "kept")?.expired().write(&pool).await?;
    both_fail("done");
    sqlx::query("delete from idempotency.record").execute(&pool).await?;

    let mut tx = pool.begin().await?;
    let _ = mark::mark(&mut tx, &key(), std::time::Duration::from_secs(60)).await?;
    tx.commit().await?;
    both_fail("state is mark");
    sqlx::query("delete from idempotency.record").execute(&pool).await?;

    for policy in [AT_LEAST_ONCE, AT_MOST_ONCE] {
        let lease = owner(&pool, LeaseOptions::new(policy), &key()).await;
        both_fail("live lease");
        lease.complete(&1).await?;
        sqlx::query("delete from idempotency.record").execute(&pool).await?;
    }

    // Past its retention an unfinished one is new again: free for the next call, and late, not wrong, to resolve.
    lapsed(&pool, &key(), AT_MOST_ONCE).await?;
    sqlx::query("update idempotency.record set expires_at = now() - interval '1 s'").execute(&pool).await?;
    assert_fails(&decide_on(&pool, &release(&[])), 1, "key is new again");
    let output = decide_on(&pool, &resolve("7", &[]));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let Acquired::Replayed(7) = LeaseOptions::new(AT_MOST_ONCE).acquire::<i64, _>(&pool, &key(), "body").await? else {
        panic!("resolved")
    };
    Ok(())
}

/// A person looks, asks the gateway, and types the decision later. Meanwhile the owner has sent its request and died,
/// or another operator has released the key and the next attempt has died, too.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_decision_is_refused_if_the_record_is_not_as_it_was_seen(pool: PgPool) -> anyhow::Result<()> {
    let stale = async |seen: &str| {
        for command in [resolve("7", &["--seen", seen]), release(&["--seen", seen])] {
            assert_fails(&janitor_on(&pool, &command), 1, "has changed since it was shown");
        }
        assert_eq!(recorded::<String>(&pool, "mode").await, "at_most_once");
    };
    drop(owner(&pool, LeaseOptions::new(AT_MOST_ONCE), &key()).await);
    sqlx::query("update idempotency.record set lease_until = now() + interval '2 s'").execute(&pool).await?;
    let in_flight = json(&janitor_on(&pool, &[&["show", "--json"], &NAMED[..]].concat()));
    assert_eq!(in_flight["state"], "in_flight");
    while !recorded::<bool>(&pool, "lease_until <= statement_timestamp()").await {}
    stale(in_flight["seen"].as_str().expect("text")).await;

    let first = seen_on(&pool, &NAMED);
    assert_eq!(decide_on(&pool, &release(&[])).status.code(), Some(0));
    lapsed(&pool, &key(), AT_MOST_ONCE).await?;
    stale(&first).await;

    let shown = text(&janitor_on(&pool, &[&["show"], &NAMED[..]].concat()).stdout);
    assert!(shown.contains("lease lapsed   "), "{shown}");
    let seen = shown.lines().find_map(|line| line.strip_prefix("seen           ")).expect("a line");
    let output = janitor_on(&pool, &release(&["--seen", seen]));
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    Ok(())
}

/// While the tool asks a person, another person is faster. `script` of util-linux gives the binary a terminal.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_terminal_is_asked_and_a_changed_record_is_left_alone(pool: PgPool) -> anyhow::Result<()> {
    for (command, means) in [(resolve("7", &[]), "each retry gets this response"), (release(&[]), "performs it")] {
        let quoted: Vec<_> = command.iter().map(|argument| format!("'{argument}'")).collect();
        let typed = format!("'{}' {}", env!("CARGO_BIN_EXE_idempotency-janitor"), quoted.join(" "));
        // The answer comes after another person's statement.
        for (meanwhile, answer, code, says) in [
            ("select 1", "n\n", 2, "was not answered with yes"),
            ("update idempotency.record set token = token + 1", "y\n", 1, "has changed since"),
            (
                // The owner was only suspended, and begins a step under the token that was shown.
                "update idempotency.record set mode = 'in_steps', steps = '{\"text\": {\"begun\": \"2026-01-01\", \"attempt\": 1}}'",
                "y\n",
                1,
                "has changed since",
            ),
            // The owner was only suspended, its heartbeat has revived the lease, and its request may have gone out.
            ("update idempotency.record set lease_until = statement_timestamp()", "y\n", 1, "has changed since"),
            ("select 1", "y\n", 0, "which was indeterminate"),
        ] {
            if meanwhile.contains("in_steps") && command[0] != "release" {
                continue;
            }
            sqlx::query("delete from idempotency.record").execute(&pool).await?;
            lapsed(&pool, &key(), AT_MOST_ONCE).await?;
            let terminal = Command::new("script")
                .args(["--quiet", "--return", "--command", &typed, "/dev/null"])
                .env("DATABASE_URL", pool.connect_options().to_url_lossy().to_string())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn();
            let Ok(mut terminal) = terminal else {
                println!("skipped: there is no `script` here to make a terminal");
                return Ok(());
            };
            let mut screen = String::new();
            let mut output = terminal.stdout.take().expect("piped");
            while !screen.contains("[y/N]") {
                let mut bytes = [0; 4096];
                let read = std::io::Read::read(&mut output, &mut bytes)?;
                assert!(read > 0, "it asks: {screen}");
                screen.push_str(&text(&bytes[..read]));
            }
            for part in [means, "user:1 'POST /texts' abc", "downstream key"] {
                assert!(screen.contains(part), "{part}: {screen}");
            }
            assert_eq!(screen.contains("before that time, look again"), command[0] == "release", "{screen}");
            sqlx::raw_sql(meanwhile).execute(&pool).await?;
            terminal.stdin.as_mut().expect("piped").write_all(answer.as_bytes())?;
            std::io::Read::read_to_string(&mut output, &mut screen)?;
            assert_eq!(terminal.wait()?.code(), Some(code), "{screen}");
            assert!(screen.contains(says), "{says}: {screen}");
        }
    }
    Ok(())
}

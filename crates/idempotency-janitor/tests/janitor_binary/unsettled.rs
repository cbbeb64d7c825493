//! `unsettled`: what waits for an operator.

use pg_idempotency::Key;
use pg_idempotency::lease::LeaseOptions;
use rig::fixture::Fixture;
use rig::lease::owner;
use sqlx::PgPool;

use crate::support::{
    AT_LEAST_ONCE, AT_MOST_ONCE, assert_fails, committed_after_an_error, in_doubt, janitor, janitor_on, json, lapsed,
    text,
};

fn key(value: &str) -> Key {
    Key::new("user:1", "POST /texts", value).expect("a valid key")
}

/// One of each kind, claimed in this order.
/// Gives the downstream key of the step in doubt.
async fn one_of_each(pool: &PgPool) -> anyhow::Result<String> {
    committed_after_an_error(pool, &key("transaction")).await?;
    lapsed(pool, &key("at most once"), AT_MOST_ONCE).await?;
    lapsed(pool, &key("past its retention"), AT_MOST_ONCE).await?;
    sqlx::query("update idempotency.record set expires_at = now() where value = 'past its retention'")
        .execute(pool)
        .await?;
    let sent = in_doubt(pool, &key("in steps")).await?;
    lapsed(pool, &key("lapsed once"), AT_LEAST_ONCE).await?;
    for _ in 0..3 {
        lapsed(pool, &key("lapsed thrice"), AT_LEAST_ONCE).await?;
    }
    for (value, attempts) in [("released once", 1), ("released thrice", 3)] {
        for _ in 0..attempts {
            let lease = owner(pool, LeaseOptions::new(AT_LEAST_ONCE), &key(value)).await;
            lease.release("the gateway\nsaid \x1b[31mno").await?;
        }
    }
    let lease = owner(pool, LeaseOptions::new(AT_MOST_ONCE), &key("live")).await;
    // Its renewals stop, and its lease goes on.
    drop(lease);
    Fixture::completed(&key("completed"), "body", &0)?.write(pool).await?;
    Ok(sent)
}

fn values(report: &serde_json::Value) -> Vec<&str> {
    let records = report["records"].as_array().expect("records");
    records.iter().map(|record| record["value"].as_str().expect("a value")).collect()
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn unsettled_lists_indeterminate_and_exhausted_records(pool: PgPool) -> anyhow::Result<()> {
    let nothing = janitor_on(&pool, &["unsettled"]);
    assert_eq!((nothing.status.code(), text(&nothing.stdout)), (Some(0), "nothing is unsettled\n".to_owned()));
    let sent = one_of_each(&pool).await?;

    let report = json(&janitor_on(&pool, &["unsettled", "--json"]));
    assert_eq!(values(&report), ["transaction", "at most once", "in steps"], "{report}");
    assert_eq!(report["more_left"], false);
    let steps: Vec<_> = report["records"].as_array().expect("records").iter().map(|record| &record["steps"]).collect();
    assert_eq!(steps[..2], [&serde_json::json!([]); 2]);
    assert_eq!(
        (&steps[2][1]["name"], &steps[2][1]["state"], &steps[2][1]["downstream_key"]),
        (&"text".into(), &"in_doubt".into(), &sent.into())
    );
    assert_eq!(report["records"][2]["state"], "indeterminate");
    let record = &report["records"][1];
    let token: i64 = sqlx::query_scalar("select token from idempotency.record where value = 'at most once'")
        .fetch_one(&pool)
        .await?;
    assert_eq!((&record["mode"], &record["state"]), (&"at_most_once".into(), &"indeterminate".into()));
    assert_eq!((&record["scope"], &record["operation"]), (&"user:1".into(), &"POST /texts".into()));
    assert_eq!((&record["token"], &record["attempt"]), (&token.to_string().into(), &1.into()));
    assert!(record["claimed_at"].is_string() && record["expires_at"].is_string(), "{record}");
    assert!(record["last_error"].is_null(), "{record}");

    let report = json(&janitor_on(&pool, &["unsettled", "--json", "--max-attempts", "3"]));
    let expected = ["transaction", "at most once", "in steps", "lapsed thrice", "released thrice"];
    assert_eq!(values(&report), expected, "{report}");
    assert_eq!((&report["records"][3]["state"], &report["records"][3]["attempt"]), (&"lapsed".into(), &3.into()));
    assert_eq!(report["records"][4]["state"], "released");
    assert_eq!(report["records"][4]["last_error"], "the gateway\nsaid \u{1b}[31mno");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn unsettled_lists_the_oldest_claim_first_and_no_more_than_asked(pool: PgPool) -> anyhow::Result<()> {
    for (value, age) in [("b", 2), ("c", 3), ("a", 1)] {
        committed_after_an_error(&pool, &key(value)).await?;
        sqlx::query("update idempotency.record set claimed_at = now() - $1::float8 * interval '1 h' where value = $2")
            .bind(age)
            .bind(value)
            .execute(&pool)
            .await?;
    }
    for (limit, listed, more_left) in
        [("1", &["c"][..], true), ("2", &["c", "b"], true), ("3", &["c", "b", "a"], false)]
    {
        let report = json(&janitor_on(&pool, &["unsettled", "--json", "--limit", limit]));
        assert_eq!((values(&report), &report["more_left"]), (listed.to_vec(), &more_left.into()));
    }
    let said = text(&janitor_on(&pool, &["unsettled", "--limit", "1"]).stdout);
    assert!(said.contains("\nof these, the first to expire is ") && said.contains("there are more"), "{said}");
    assert_eq!(janitor(&["unsettled", "--limit", "0"]).status.code(), Some(2));
    Ok(())
}

/// A person copies the key from the text into a shell, and a part of the text comes from a client.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn each_key_has_a_line_and_is_quoted(pool: PgPool) -> anyhow::Result<()> {
    one_of_each(&pool).await?;
    let hostile = "it's $(date); `date`";
    committed_after_an_error(&pool, &key(hostile)).await?;
    let output = janitor_on(&pool, &["unsettled", "--max-attempts", "3"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    let keys: Vec<_> = said.lines().filter(|line| line.starts_with("user:1 ")).collect();
    assert_eq!(keys.len(), 6, "{said}");
    assert!(
        said.contains("  indeterminate, in_steps, attempt 1, ") && said.contains("steps in doubt: text\n"),
        "{said}"
    );
    assert!(said.contains("user:1 'POST /texts' 'at most once'"), "{said}");
    assert!(said.contains(r"the gateway said \u{1b}[31mno"), "{said}");

    // The row of the table, and the last line.
    sqlx::query("update idempotency.record set expires_at = now() + interval '1 min' where value = 'at most once'")
        .execute(&pool)
        .await?;
    let said_later = text(&janitor_on(&pool, &["unsettled", "--max-attempts", "3"]).stdout);
    let first = "the first to expire is user:1 'POST /texts' 'at most once', at 20";
    assert!(said_later.lines().last().is_some_and(|last| last.starts_with(first)), "{said_later}");

    let copied = said.lines().find(|line| line.contains("date")).expect("listed");
    let echoed = std::process::Command::new("sh").args(["-c", &format!("printf '%s|' {copied}")]).output()?;
    assert_eq!(text(&echoed.stdout), format!("user:1|POST /texts|{hostile}|"));
    Ok(())
}

#[sqlx::test(migrations = false)]
async fn a_missing_table_is_said(pool: PgPool) {
    assert_fails(&janitor_on(&pool, &["unsettled"]), 1, "idempotency-janitor migrate");
}

/// A scope that turns the direction of writing round would show another key than the one that is settled.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn invisible_characters_are_escaped_and_the_copied_command_names_the_same_key(
    pool: PgPool,
) -> anyhow::Result<()> {
    let hidden = ["acct-1\u{202e}22", "a\u{200b}b", "c\u{2028}d'e\\f", "\u{feff}g", "Z\u{fc}rich \"h\""];
    for value in hidden {
        lapsed(&pool, &key(value), AT_MOST_ONCE).await?;
    }
    sqlx::query("update idempotency.record set last_error = 'no\u{202e}\u{200b}'").execute(&pool).await?;
    let listed = text(&janitor_on(&pool, &["unsettled"]).stdout);
    for unseen in ['\u{202e}', '\u{200b}', '\u{2028}', '\u{feff}'] {
        assert!(!listed.contains(unseen), "{listed:?}");
    }
    for value in hidden {
        let arguments = listed.lines().filter_map(|line| line.split_once("'POST /texts' "));
        let found = arguments.filter(|(_, rest)| {
            let script = format!("set -- {}; printf %s \"$1\"", rest);
            let read = std::process::Command::new("bash").env("LC_ALL", "C").args(["-c", &script]).output();
            read.is_ok_and(|read| read.stdout == value.as_bytes())
        });
        assert!(found.count() >= 1, "{value:?}: {listed}");
    }
    Ok(())
}

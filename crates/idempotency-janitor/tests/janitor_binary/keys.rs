//! `show` and `forget`.

use pg_idempotency::Key;
use pg_idempotency::lease::{Finding, InDoubt, LeaseOptions, Reconciler, Visit};
use rig::fixture::Fixture;
use rig::lease::owner;
use sqlx::PgPool;

use crate::console::{Console, Visitor};
use crate::support::{AT_LEAST_ONCE, AT_MOST_ONCE, assert_fails, decide_on, in_doubt, janitor_on, json, lapsed, text};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn show_and_forget_one_key(pool: PgPool) -> anyhow::Result<()> {
    let key = Key::new("user:1", "POST /orders", "abc")?;
    let named = ["user:1", "POST /orders", "abc"];
    assert_fails(&janitor_on(&pool, &[&["show"], &named[..]].concat()), 1, "no record");
    Fixture::completed(&key, "body", "secret response")?.write(&pool).await?;
    let output = janitor_on(&pool, &[&["show"], &named[..]].concat());
    assert!(text(&output.stdout).contains("completed") && !text(&output.stdout).contains("secret"), "{output:?}");
    let shown = json(&janitor_on(&pool, &[&["show", "--json"], &named[..]].concat()));
    assert_eq!((&shown["mode"], &shown["state"]), (&"transaction".into(), &"completed".into()));

    let forget = [&["forget"], &named[..], &["--reason", "a test"]].concat();
    assert_fails(&janitor_on(&pool, &forget), 2, "--seen");
    let output = decide_on(&pool, &forget);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("because a test"), "{}", text(&output.stdout));
    assert_fails(&janitor_on(&pool, &[&["show"], &named[..]].concat()), 1, "no record");

    let _lease = owner(&pool, LeaseOptions::new(AT_MOST_ONCE), &key).await;
    assert_fails(&decide_on(&pool, &forget), 1, "live lease");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_time_is_in_utc_and_relative_in_at_most_two_units(pool: PgPool) -> anyhow::Result<()> {
    lapsed(&pool, &Key::new("user:1", "POST /texts", "a")?, AT_MOST_ONCE).await?;
    for (claimed, said) in [
        ("1 s", "s ago\n"),
        ("30 min 5 s", " UTC, 30m "),
        ("2 h 5 min 1 s", " UTC, 2h 5m ago\n"),
        ("3 d 1 h 5 min", " UTC, 3 days 1h ago\n"),
        ("40 d", " UTC, 1 month 9 days ago\n"),
    ] {
        let age = "update idempotency.record set claimed_at = now() - $1::text::interval,
                       expires_at = now() + interval '5 h 10 min'";
        sqlx::query(age).bind(claimed).execute(&pool).await?;
        let expires_at: String = sqlx::query_scalar(
            "select to_char(expires_at at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS') from idempotency.record",
        )
        .fetch_one(&pool)
        .await?;
        let in_utc = format!("{expires_at} UTC, in 5h 9m");
        for command in [&["unsettled"][..], &["show", "user:1", "POST /texts", "a"], &["stats"]] {
            let shown = text(&janitor_on(&pool, command).stdout);
            let said = if command == ["stats"] { said.trim_end() } else { said };
            assert!(shown.contains(said), "{claimed}: {shown}");
            assert!(shown.contains(&in_utc) || command == ["stats"], "{in_utc}: {shown}");
        }
    }
    Ok(())
}

/// A request of the HTTP layer: a version, the length of the head, the head, and the body.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn show_prints_a_stored_request_without_its_body(pool: PgPool) -> anyhow::Result<()> {
    Fixture::lapsed(&Key::new("user:1", "POST /orders", "a")?, "body", AT_LEAST_ONCE)?.write(&pool).await?;
    let head = r#"["POST","/orders?a=\u001b[31m",[["content-type","text/plain"]]]"#;
    let length = u16::try_from(head.len())?.to_be_bytes();
    let stored = [&[1], &length[..], head.as_bytes(), b"secret"].concat();
    sqlx::query("update idempotency.record set request = $1").bind(stored).execute(&pool).await?;
    let named = ["user:1", "POST /orders", "a"];
    let shown = text(&janitor_on(&pool, &[&["show"], &named[..]].concat()).stdout);
    assert!(shown.contains("POST /orders?a=") && shown.contains("content-type: text/plain\n"), "{shown}");
    assert!(!shown.contains("secret") && !shown.contains('\u{1b}'), "{shown}");
    let request = json(&janitor_on(&pool, &[&["show", "--json"], &named[..]].concat()))["request"].clone();
    assert_eq!((&request["method"], &request["headers"][0][1]), (&"POST".into(), &"text/plain".into()));
    assert!(!request.to_string().contains("secret"), "{request}");
    Ok(())
}

/// The step in doubt is looked up at the gateway by its own downstream key.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn show_lists_the_steps_without_their_results(pool: PgPool) -> anyhow::Result<()> {
    let sent = in_doubt(&pool, &Key::new("user:1", "POST /rides", "a")?).await?;
    let shown = json(&janitor_on(&pool, &["show", "--json", "user:1", "POST /rides", "a"]));
    assert_eq!((&shown["state"], &shown["resumable"]), (&"indeterminate".into(), &true.into()));
    let [ride, text_step] = shown["steps"].as_array().expect("steps").as_slice() else { panic!("{shown}") };
    assert_eq!((&ride["name"], &ride["state"]), (&"ride".into(), &"finished".into()));
    assert_eq!((&ride["attempt"], &ride["result_bytes"]), (&1.into(), &1.into()));
    assert_eq!((&text_step["name"], &text_step["state"]), (&"text".into(), &"in_doubt".into()));
    assert_eq!((&text_step["result_bytes"], &text_step["downstream_key"]), (&().into(), &sent.as_str().into()));
    assert!(ride["at"].is_string() && text_step["at"].is_string() && ride["downstream_key"] != sent.as_str());
    let said = text(&janitor_on(&pool, &["show", "user:1", "POST /rides", "a"]).stdout);
    let steps: Vec<_> = said.lines().filter(|line| line.starts_with("step ")).collect();
    assert!(steps[0].contains("ride finished, attempt 1, ") && steps[0].contains(", 1 bytes, "), "{said}");
    assert!(steps[1].contains("text in_doubt, attempt 1, ") && steps[1].ends_with(&sent), "{said}");
    assert!(said.contains("a resumer may finish"), "{said}");
    Ok(())
}

/// By it an operator finds the operation at the gateway. There is none where nothing goes out.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn show_tells_the_downstream_key_of_a_lease(pool: PgPool) -> anyhow::Result<()> {
    for (value, policy) in [("a", AT_MOST_ONCE), ("b", AT_LEAST_ONCE)] {
        let sent = lapsed(&pool, &Key::new("user:1", "POST /texts", value)?, policy).await?;
        let named = ["user:1", "POST /texts", value];
        let shown = json(&janitor_on(&pool, &[&["show", "--json"], &named[..]].concat()));
        assert_eq!(shown["downstream_key"], sent.as_str());
        let said = text(&janitor_on(&pool, &[&["show"], &named[..]].concat()).stdout);
        assert!(said.lines().any(|line| line.starts_with("downstream key") && line.ends_with(&sent)), "{said}");
    }
    Fixture::completed(&Key::new("user:1", "POST /orders", "c")?, "body", &0)?.write(&pool).await?;
    let shown = json(&janitor_on(&pool, &["show", "--json", "user:1", "POST /orders", "c"]));
    assert!(shown["downstream_key"].is_null(), "{shown}");
    Ok(())
}

/// A person who settles the key of a reconciler that gave up sees what the other service said.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_probes_of_a_reconciler_are_shown(pool: PgPool) -> anyhow::Result<()> {
    let key = Key::new("user:1", "POST /texts", "a")?;
    Fixture::lapsed(&key, "body", AT_MOST_ONCE)?.with_stored_request("body").write(&pool).await?;
    let leasing = LeaseOptions::new(AT_MOST_ONCE).store_request(true);
    let reconciler = Reconciler::new(leasing, "POST /texts", std::time::Duration::from_millis(1))?.probes(2, 2);
    let show = || text(&janitor_on(&pool, &["show", "user:1", "POST /texts", "a"]).stdout);
    assert!(!show().contains("reconciler"), "{}", show());
    for visit in [Visit::Noted, Visit::Undecided, Visit::GivenUp] {
        let failing = async |_: &InDoubt| -> anyhow::Result<Finding> { anyhow::bail!("no \u{1b}[1mroute") };
        assert_eq!(reconciler.visit_one(&pool, failing).await?, visit);
        if visit != Visit::GivenUp {
            let due = "update idempotency.record set probes = jsonb_set(probes, '{of,0,next}', '1')";
            sqlx::query(due).execute(&pool).await?;
        }
        if visit == Visit::Undecided {
            let shown = json(&janitor_on(&pool, &["show", "--json", "user:1", "POST /texts", "a"]));
            let probes = &shown["probes"][0];
            assert_eq!(
                (&probes["probes"], &probes["no_trace"], &probes["finding"]),
                (&1.into(), &0.into(), &"failed".into())
            );
            assert_eq!(probes["error"], "no \u{1b}[1mroute");
            assert!(probes["at"].is_string() && probes["next"].is_string() && probes["step"].is_null(), "{probes}");
            assert!(
                show().contains("reconciler     1 probe, 0 without a trace, the last one failed at "),
                "{}",
                show()
            );
        }
    }
    let listed = text(&janitor_on(&pool, &["unsettled"]).stdout);
    let console = Console::start(&pool, &["--read-only"]);
    let (_, (_, page)) = Visitor::of(&console.url)?.look_up(&key).await?;
    for said in [show(), listed, page] {
        assert!(said.contains("no ") && said.contains("route; left to a person") && !said.contains('\u{1b}'), "{said}");
    }
    Ok(())
}

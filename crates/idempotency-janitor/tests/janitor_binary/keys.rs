//! `show` and `forget`.

use pg_idempotency::{Key, testing};
use sqlx::PgPool;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

use crate::support::{AT_LEAST_ONCE, AT_MOST_ONCE, assert_fails, janitor_on, json, lapsed, text};

#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn show_and_forget_one_key(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    let key = Key::new("user:1", "POST /orders", "abc")?;
    let named = ["user:1", "POST /orders", "abc"];
    assert_fails(&janitor_on(&options, &[&["show"], &named[..]].concat()), 1, "no record");
    testing::completed(&mut *pool.acquire().await?, &key, "body", "secret response").await?;
    let output = janitor_on(&options, &[&["show"], &named[..]].concat());
    assert!(text(&output.stdout).contains("completed") && !text(&output.stdout).contains("secret"), "{output:?}");
    let shown = json(&janitor_on(&options, &[&["show", "--json"], &named[..]].concat()));
    assert_eq!((&shown["mode"], &shown["state"]), (&"transaction".into(), &"completed".into()));

    let forget = [&["forget", "--reason", "a test"], &named[..]].concat();
    assert_fails(&janitor_on(&options, &forget), 2, "--yes");
    let output = janitor_on(&options, &[&forget[..], &["--yes"]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("because a test"), "{}", text(&output.stdout));
    assert_fails(&janitor_on(&options, &[&["show"], &named[..]].concat()), 1, "no record");

    use pg_idempotency::lease::{Acquired, Leasing, Policy};
    let policy = Policy::AtMostOnce { lease: std::time::Duration::from_secs(40) };
    let Acquired::Lease(_lease) = Leasing::new(policy)?.acquire::<i64, _>(&pool, &key, "body").await? else { panic!() };
    assert_fails(&janitor_on(&options, &[&forget[..], &["--yes"]].concat()), 1, "live lease");
    Ok(())
}

/// By it an operator finds the operation at the gateway. There is none where nothing goes out.
#[sqlx::test(migrator = "crate::strict::MIGRATOR")]
async fn show_tells_the_downstream_key_of_a_lease(_: PgPoolOptions, options: PgConnectOptions) -> anyhow::Result<()> {
    let pool = PgPool::connect_with(options.clone()).await?;
    for (value, policy) in [("a", AT_MOST_ONCE), ("b", AT_LEAST_ONCE)] {
        let sent = lapsed(&pool, &Key::new("user:1", "POST /texts", value)?, policy).await?;
        let named = ["user:1", "POST /texts", value];
        let shown = json(&janitor_on(&options, &[&["show", "--json"], &named[..]].concat()));
        assert_eq!(shown["downstream_key"], sent.as_str());
        let said = text(&janitor_on(&options, &[&["show"], &named[..]].concat()).stdout);
        assert!(said.lines().any(|line| line.starts_with("downstream key") && line.ends_with(&sent)), "{said}");
    }
    testing::completed(&mut *pool.acquire().await?, &Key::new("user:1", "POST /orders", "c")?, "body", &0).await?;
    let shown = json(&janitor_on(&options, &["show", "--json", "user:1", "POST /orders", "c"]));
    assert!(shown["downstream_key"].is_null(), "{shown}");
    Ok(())
}

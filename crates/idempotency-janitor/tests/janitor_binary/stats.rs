//! `stats`.

use pg_idempotency::Key;
use rig::fixture::Fixture;
use sqlx::PgPool;

use crate::support::{IN_STEPS, expired, in_doubt, janitor_on, json, lapsed, text};

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn stats_tell_what_is_in_the_table(pool: PgPool) -> anyhow::Result<()> {
    expired(&pool, 3).await?;
    let key = Key::new("scope", "POST /orders", "kept")?;
    Fixture::completed(&key, "body", &0)?.write(&pool).await?;

    in_doubt(&pool, &Key::new("scope", "POST /rides", "in doubt")?).await?;
    lapsed(&pool, &Key::new("scope", "POST /rides", "lapsed")?, IN_STEPS).await?;
    let output = janitor_on(&pool, &["stats"]);
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    for part in ["POST /orders", "expired", "6 records", "oldest expired record"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    let report = json(&janitor_on(&pool, &["stats", "--json"]));
    assert_eq!((&report["exact"], &report["records"]), (&true.into(), &6.into()));
    let groups = report["groups"].as_array().expect("groups");
    for (operation, state) in
        [("POST /orders", "completed"), ("POST /rides", "indeterminate"), ("POST /rides", "lapsed")]
    {
        let found = groups.iter().find(|group| group["operation"] == operation && group["state"] == state);
        assert_eq!(found.expect(state)["records"], 1, "{report}");
    }
    Ok(())
}

/// From a sample: marked as an estimate, and near the truth.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn stats_of_a_large_table_are_estimates(pool: PgPool) -> anyhow::Result<()> {
    sqlx::raw_sql(
        "insert into idempotency.record (mode, scope, operation, value, token, completed_at, expires_at)
         select 'mark', 's', 'o', n::text, n, now(), now() + interval '1 h' from generate_series(1, 200000) as n;
         analyze idempotency.record",
    )
    .execute(&pool)
    .await?;
    let report = json(&janitor_on(&pool, &["stats", "--json"]));
    let records = report["records"].as_f64().expect("a number");
    assert_eq!(report["exact"], false);
    assert!((150_000.0..250_000.0).contains(&records), "{records}");
    assert!(text(&janitor_on(&pool, &["stats"]).stdout).contains('~'));
    Ok(())
}

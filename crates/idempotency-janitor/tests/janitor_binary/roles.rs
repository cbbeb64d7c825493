//! Least rights: what src/guide/production.md grants is enough, and a missing right is said.

use pg_idempotency::Key;
use rig::role::with_role;
use sqlx::{AssertSqlSafe, PgPool};

use crate::support::{AT_MOST_ONCE, assert_fails, expired, granted_to, janitor_as, lapsed, seen_on, text};

/// The least that a janitor's role needs, and the clear word where it lacks it.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_role_without_rights_is_told_so(pool: PgPool) -> anyhow::Result<()> {
    expired(&pool, 3).await?;
    with_role(&pool, "grant usage on schema idempotency to @role", async |role| {
        assert_fails(&janitor_as(&pool, role, &["sweep"]), 1, "refused the role");
        let grant = format!("grant select, delete, update (last_error) on idempotency.record to {role}");
        sqlx::raw_sql(AssertSqlSafe(grant)).execute(&pool).await?;
        let swept = janitor_as(&pool, role, &["sweep"]);
        assert_eq!(swept.status.code(), Some(0), "{}", text(&swept.stderr));
        assert!(text(&swept.stdout).starts_with("3 records deleted"), "{}", text(&swept.stdout));
        anyhow::Ok(())
    })
    .await
}

/// Runs these as a role with no rights but the ones that `src/guide/production.md` grants to `shop_…`, and compares
/// their exit codes.
async fn assert_codes_as(whose: &str, pool: &PgPool, commands: &[(&[&str], i32)]) {
    let grants = granted_to(whose);
    assert!(grants.contains("usage on schema"), "{grants}");
    let mut wrong = Vec::new();
    with_role(pool, &grants, async |role| {
        for (arguments, code) in commands {
            let output = janitor_as(pool, role, arguments);
            if output.status.code() != Some(*code) || text(&output.stderr).contains("refused") {
                wrong.push(format!("{arguments:?}: {output:?}"));
            }
        }
    })
    .await;
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_janitors_grants_are_enough_for_what_it_runs(pool: PgPool) -> anyhow::Result<()> {
    expired(&pool, 3).await?;
    lapsed(&pool, &Key::new("scope", "operation", "a")?, AT_MOST_ONCE).await?;
    let commands: [(&[&str], i32); 5] = [
        (&["sweep"], 0),
        (&["stats"], 0),
        (&["unsettled", "--max-attempts", "3"], 3),
        (&["show", "scope", "operation", "a"], 0),
        // It warns of the throw-away server's fsync.
        (&["health"], 1),
    ];
    assert_codes_as("shop_janitor", &pool, &commands).await;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_operators_grants_are_enough_to_settle(pool: PgPool) -> anyhow::Result<()> {
    for value in ["a", "b", "c"] {
        lapsed(&pool, &Key::new("scope", "operation", value)?, AT_MOST_ONCE).await?;
    }
    let seen = |value| seen_on(&pool, &["scope", "operation", value]);
    let seen = ["a", "b", "c"].map(seen);
    let decided = |of: usize| ["--reason", "a test", "--seen", &seen[of]];
    let commands = [
        (&["unsettled"][..], 3),
        (&["show", "scope", "operation", "a"], 0),
        (&[&["resolve", "scope", "operation", "a", "--response", "1"], &decided(0)[..]].concat(), 0),
        (&[&["release", "scope", "operation", "b"], &decided(1)[..]].concat(), 0),
        (&[&["forget", "scope", "operation", "c"], &decided(2)[..]].concat(), 0),
    ];
    assert_codes_as("shop_operator", &pool, &commands).await;
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_role_that_may_not_settle_is_told_what_is_missing(pool: PgPool) -> anyhow::Result<()> {
    lapsed(&pool, &Key::new("scope", "operation", "a")?, AT_MOST_ONCE).await?;
    let reads = "grant usage on schema idempotency to @role; grant select on idempotency.record to @role";
    with_role(&pool, reads, async |role| {
        let seen = seen_on(&pool, &["scope", "operation", "a"]);
        let named = ["scope", "operation", "a", "--reason", "a test", "--seen", &seen];
        for command in [&["release"][..], &["resolve", "--response", "1"]] {
            let refused = janitor_as(&pool, role, &[command, &named].concat());
            assert_fails(&refused, 1, "a role that settles needs select, update and delete");
        }
    })
    .await;
    Ok(())
}

/// The owner of a business table, whose rights are not those of a janitor.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_role_that_may_not_protect_is_told_what_is_missing(pool: PgPool) -> anyhow::Result<()> {
    let owns = "create schema business authorization @role;
        set role @role; create table business.orders (id int); reset role";
    with_role(&pool, owns, async |role| {
        for command in ["protect", "unprotect"] {
            let refused = janitor_as(&pool, role, &[command, "business.orders"]);
            assert_fails(&refused, 1, "a role that protects has to own the table");
            assert!(!text(&refused.stderr).contains("janitor's"), "{}", text(&refused.stderr));
        }
        let grant = format!(
            "grant usage on schema idempotency to {role}; grant select on idempotency._sqlx_migrations to {role}"
        );
        sqlx::raw_sql(AssertSqlSafe(grant)).execute(&pool).await?;
        for command in ["protect", "unprotect"] {
            let allowed = janitor_as(&pool, role, &[command, "business.orders"]);
            assert_eq!(allowed.status.code(), Some(0), "{}", text(&allowed.stderr));
        }
        anyhow::Ok(())
    })
    .await
}

/// Otherwise an operator reads that nothing is unsettled, while a key in doubt expires.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn row_level_security_is_an_error_and_no_empty_list(pool: PgPool) -> anyhow::Result<()> {
    lapsed(&pool, &Key::new("scope", "operation", "a")?, AT_MOST_ONCE).await?;
    let rights = "grant usage on schema idempotency to @role;
        grant select, update, delete on idempotency.record to @role;
        grant select on idempotency._sqlx_migrations to @role;
        alter table idempotency.record enable row level security";
    with_role(&pool, rights, async |role| {
        for arguments in [&["unsettled"][..], &["show", "scope", "operation", "a"], &["sweep"], &["stats"]] {
            assert_fails(&janitor_as(&pool, role, arguments), 1, "needs bypassrls");
        }
        let health = janitor_as(&pool, role, &["health", "--json"]);
        assert!(text(&health.stdout).contains("\"row_security\""), "{}", text(&health.stdout));
        assert_eq!(health.status.code(), Some(1));
    })
    .await;
    Ok(())
}

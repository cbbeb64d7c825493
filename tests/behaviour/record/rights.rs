//! The rights of the role that asks `health`, beside those of the roles in the guide.

use std::time::Duration;

use pg_idempotency::operator::{self, Warning};
use rig::role::with_role;
use sqlx::PgPool;

use crate::support::{options, pool_of};

const HOUR: Duration = Duration::from_secs(3600);

/// The grants of the guide for this role, as grants to `@role`.
fn granted_to(role: &str) -> String {
    let lines = include_str!("../../../src/guide/production.md").lines();
    let grants = lines.filter(|line| line.starts_with("grant ") && line.contains(role));
    grants.map(|line| format!("{} to @role;", line.split(" to ").next().unwrap_or_default())).collect()
}

/// What `health` says about the rights of a role with these grants.
async fn missing(pool: &PgPool, grants: &str) -> Option<String> {
    with_role(pool, grants, async |role| {
        let of_role = pool_of(1, &options(pool).username(role)).await;
        let warnings = operator::health(&of_role, HOUR).await.expect("checked");
        of_role.close().await;
        warnings.into_iter().find_map(|warning| match warning {
            Warning::MissingRights { missing } => Some(missing),
            _ => None,
        })
    })
    .await
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn health_asks_for_the_rights_of_one_role_of_the_guide(pool: PgPool) {
    let reads = "grant usage on schema idempotency to @role;
        grant select on all tables in schema idempotency to @role;";
    for role in ["shop_app", "shop_janitor", "shop_operator"] {
        let grants = granted_to(role);
        assert!(grants.contains("on idempotency.record to @role"), "{grants}");
        assert_eq!(missing(&pool, &grants).await, None, "{role}");
    }
    assert_eq!(missing(&pool, reads).await, None, "each call fails before its effect");
    for (grant, lacks) in [
        ("insert", "it lacks UPDATE for a service"),
        // The claim needs no update, so the call fails only after its effect.
        ("insert, update (last_error)", "it lacks UPDATE for a service"),
        ("update", "it lacks INSERT for a service, it lacks DELETE for a janitor, it lacks DELETE for an operator"),
        ("delete", "it lacks UPDATE (last_error) for a janitor, it lacks UPDATE for an operator"),
    ] {
        let said = missing(&pool, &format!("{reads} grant {grant} on idempotency.record to @role")).await;
        assert!(said.as_ref().is_some_and(|said| said.contains(lacks)), "{grant}: {said:?}");
    }
    let columns = "select string_agg(attname, ', ') from pg_attribute
        where attrelid = 'idempotency.record'::regclass::oid and attnum > 0";
    let columns: String = sqlx::query_scalar(columns).fetch_one(&pool).await.expect("columns");
    let grant = format!("{reads} grant insert ({columns}), update ({columns}) on idempotency.record to @role");
    assert_eq!(missing(&pool, &grant).await, None, "each column by itself");
}

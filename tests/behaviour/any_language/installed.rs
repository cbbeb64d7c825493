//! The SQL functions exist only after `migrate_any_language`. Then each migration keeps them up to date.

use std::time::Duration;

use pg_idempotency::testing::ANY_LANGUAGE_MIGRATOR;
use pg_idempotency::{
    Error, MIGRATOR, OnEscape, SetupError, any_language_sql, migrate, migrate_any_language, operator, protect,
};
use rig::functions::{complete, ensure};
use rig::role::with_role;
use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use crate::support::key;

const NAMES: [&str; 5] = ["complete", "ensure", "fingerprint", "run", "version"];

/// What an earlier release would have created, under the number 0. The body must never run.
const EARLIER: &str = "
    create or replace function idempotency.version() returns int4 language sql security definer as 'select 0';
    create or replace function idempotency.complete(
        scope text, operation text, value text, token int8,
        status int4 default null, headers jsonb default null, body bytea default null
    ) returns void language plpgsql as 'begin raise exception ''of an earlier release''; end'";

async fn installed(pool: &PgPool) -> anyhow::Result<Vec<String>> {
    let names = "select proname::text from pg_proc
        where pronamespace = 'idempotency'::regnamespace::oid and proname::text = any ($1) order by 1";
    Ok(sqlx::query_scalar(names).bind(NAMES.map(str::to_owned)).fetch_all(pool).await?)
}

async fn works(pool: &PgPool, value: &str) -> anyhow::Result<()> {
    let mut tx = pool.begin().await?;
    let fingerprint: Vec<u8> = sqlx::query_scalar("select idempotency.fingerprint('x')").fetch_one(&mut *tx).await?;
    let claimed = ensure(&mut tx, &key(value), &fingerprint, None).await?;
    assert_eq!(claimed.outcome, "claimed");
    complete(&mut tx, &key(value), claimed.token, (Some(201), None, None)).await?;
    tx.commit().await?;
    let number: i32 = sqlx::query_scalar("select idempotency.version()").fetch_one(pool).await?;
    assert!(number >= 1);
    Ok(())
}

async fn warnings(pool: &PgPool) -> Result<Vec<&'static str>, Error> {
    let warnings = operator::health(pool, Duration::from_secs(3600)).await?;
    Ok(warnings.iter().map(operator::Warning::name).collect())
}

#[sqlx::test(migrations = false)]
async fn the_functions_are_installed_only_on_request(pool: PgPool) -> anyhow::Result<()> {
    migrate(&pool).await?;
    MIGRATOR.run(&pool).await?;
    assert_eq!(installed(&pool).await?, [""; 0]);
    for round in ["a", "b"] {
        migrate_any_language(&pool).await?;
        assert_eq!(installed(&pool).await?, NAMES);
        works(&pool, round).await?;
    }
    let usual = warnings(&pool).await?;
    // Each other way leaves the same.
    for way in ["migrate_any_language", "ANY_LANGUAGE_MIGRATOR", "any_language_sql"] {
        pool.execute("drop schema idempotency cascade").await?;
        match way {
            "migrate_any_language" => migrate_any_language(&pool).await?,
            "ANY_LANGUAGE_MIGRATOR" => ANY_LANGUAGE_MIGRATOR.run(&pool).await?,
            _ => {
                migrate(&pool).await?;
                pool.execute(AssertSqlSafe(any_language_sql())).await?;
            }
        }
        for _ in 0..2 {
            assert_eq!(warnings(&pool).await?, usual, "{way}");
            let versions: Vec<i64> =
                sqlx::query_scalar("select version from idempotency._sqlx_migrations").fetch_all(&pool).await?;
            assert_eq!(versions, [1], "{way}");
            migrate(&pool).await?;
            MIGRATOR.run(&pool).await?;
        }
        works(&pool, way).await?;
    }
    Ok(())
}

/// Otherwise a migration that changes what they call would break them. A role keeps its grants, and PUBLIC gets none.
#[sqlx::test(migrations = false)]
async fn a_plain_migration_replaces_the_functions_of_an_earlier_release(pool: PgPool) -> anyhow::Result<()> {
    pool.execute("create table orders (id int)").await?;
    with_role(&pool, "", async |role| {
        migrate_any_language(&pool).await?;
        let usual = warnings(&pool).await?;
        let grants = "select coalesce(acl.grantee::regrole::text, '') from pg_proc, aclexplode(proacl) as acl
            where pronamespace = 'idempotency'::regnamespace::oid and proname = 'complete' order by 1";
        pool.execute(AssertSqlSafe(format!("grant execute on function idempotency.complete to {role}"))).await?;
        let granted: Vec<String> = sqlx::query_scalar(grants).fetch_all(&pool).await?;
        for any_language in [false, true] {
            pool.execute(EARLIER).await?;
            pool.execute("grant execute on function idempotency.complete to public").await?;
            let refused = [
                warnings(&pool).await.map(drop).map_err(SetupError::Other),
                protect(&pool, "orders", OnEscape::Refuse).await,
            ];
            for refused in refused {
                assert!(matches!(refused, Err(SetupError::Other(Error::SchemaMissing { .. }))), "{refused:?}");
            }
            if any_language {
                migrate_any_language(&pool).await?;
            } else {
                migrate(&pool).await?;
            }
            assert_eq!(warnings(&pool).await?, usual);
            assert_eq!(sqlx::query_scalar::<_, String>(grants).fetch_all(&pool).await?, granted);
            works(&pool, &any_language.to_string()).await?;
        }
        anyhow::Ok(())
    })
    .await
}

/// During a roll-out, and after a roll-back, an old process starts. The number may have another form in a newer
/// release.
#[sqlx::test(migrations = false)]
async fn the_functions_of_a_newer_release_remain(pool: PgPool) -> anyhow::Result<()> {
    migrate_any_language(&pool).await?;
    let usual = warnings(&pool).await?;
    for number in ["select 999", "select 1000 - 1"] {
        pool.execute(AssertSqlSafe(EARLIER.replace("select 0", number))).await?;
        for migrated in [migrate(&pool).await, migrate_any_language(&pool).await] {
            migrated?;
            let number: i32 = sqlx::query_scalar("select idempotency.version()").fetch_one(&pool).await?;
            assert_eq!(number, 999);
            assert_eq!(warnings(&pool).await?, usual);
        }
    }
    Ok(())
}

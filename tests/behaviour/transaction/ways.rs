//! The options that save round trips when the crate owns the transaction. Other tests run with all
//! [`WAYS`](crate::support::WAYS) and check that each gives the same answers; these tests are about the options alone.

use std::time::Duration;

use pg_idempotency::{Error, Idempotency, Key, Outcome, RoundTrips, ensure_idempotent};
use rig::database::backend;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgPool};

use crate::support::{WAYS, connect, create_effects, effects, key, leave_effect, once, options, pool_of};

const FEWEST: Idempotency = Idempotency::new().round_trips(RoundTrips::Fewest);

/// The longest string that is completed in a text: 16 KiB as JSON, with its two quotes.
const INLINE: usize = 16 * 1024 - 2;

fn squeezed(sql: &str) -> String {
    sql.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Compares the functions with the statements that the crate prepares.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "the option is off there")]
async fn the_functions_of_the_schema_contain_the_crates_own_statements(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    for (function, name) in
        [("try_claim", " /* pg_idempotency: claim */"), ("store_response", " /* pg_idempotency: complete */")]
    {
        conn.clear_cached_statements().await?;
        let mut tx = conn.begin().await?;
        let _ = ensure_idempotent(&mut tx, &key(function), "body", async |_| Ok::<_, Error>(1)).await?;
        tx.commit().await?;
        let prepared: String =
            sqlx::query_scalar("select statement from pg_prepared_statements where strpos(statement, $1) > 0")
                .bind(name)
                .fetch_one(&mut conn)
                .await?;
        // The functions judge the age of the transaction themselves, and the retention as of this moment.
        let prepared = squeezed(&prepared)
            .replace(name, "")
            .replace(", pg_catalog.clock_timestamp() - pg_catalog.now() as age", "")
            .replace("expires_at > pg_catalog.statement_timestamp()", "expires_at > pg_catalog.clock_timestamp()");
        let source: String = sqlx::query_scalar(
            "select prosrc from pg_proc where proname = $1 and pronamespace = 'idempotency'::regnamespace::oid",
        )
        .bind(function)
        .fetch_one(&mut conn)
        .await?;
        assert!(squeezed(&source).contains(prepared.trim()), "{function} is not the crate's:\n{source}\n{prepared}");
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn bodies_of_any_size_come_back_to_the_byte(pool: PgPool) -> anyhow::Result<()> {
    let bodies = [0, 1, INLINE - 1, INLINE, INLINE + 1, 256 * 1024].map(|bytes| "x".repeat(bytes));
    for way in WAYS {
        for body in bodies.iter().map(String::as_str).chain(["'\\é\u{0}$1%"]) {
            sqlx::query("delete from idempotency.record").execute(&pool).await?;
            let answer = async || {
                way.run(&pool, &key("a"), "body", async |_| -> Result<String, Error> { Ok(body.to_owned()) }).await
            };
            let (first, second) = (answer().await?, answer().await?);
            assert_eq!((first.is_replayed(), second.is_replayed()), (false, true));
            assert_eq!((first.into_inner().as_str(), second.into_inner().as_str()), (body, body));
        }
    }
    Ok(())
}

/// With each setting that changes what a backslash means in a literal.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn any_key_is_claimed_as_it_is(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    // Citus writes other bytes to its workers if it is off (src/guide/larger.md).
    let settings: &[_] = if cfg!(idempotency_distributed) { &["on"] } else { &["on", "off"] };
    for standard in settings {
        let session = [("standard_conforming_strings", standard), ("backslash_quote", standard)];
        claim_any_keys(&pool_of(5, &options(&pool).options(session)).await).await?;
    }
    Ok(())
}

/// PostgreSQL refuses escapes of characters beyond ASCII there.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "the option is off there")]
async fn any_key_is_claimed_as_it_is_in_sql_ascii(pool: PgPool) -> anyhow::Result<()> {
    let database = format!("ascii_{}", backend(&mut *pool.acquire().await?).await?);
    let create =
        format!("create database {database} encoding 'SQL_ASCII' template template0 lc_collate 'C' lc_ctype 'C'");
    sqlx::raw_sql(AssertSqlSafe(create)).execute(&pool).await?;
    let ascii = pool_of(5, &options(&pool).database(&database)).await;
    pg_idempotency::migrate(&ascii).await?;
    create_effects(&ascii).await;
    let claimed = claim_any_keys(&ascii).await;
    ascii.close().await;
    sqlx::raw_sql(AssertSqlSafe(format!("drop database {database}"))).execute(&pool).await?;
    claimed
}

async fn claim_any_keys(pool: &PgPool) -> anyhow::Result<()> {
    let long = "é".repeat(127);
    let quotes = "\\' '' \\\\' \\\\\\' \\u0027 \\x27";
    for part in ["'; drop schema idempotency cascade; --", "\\x27", "$1", "$$", "%s {}", quotes, "日本語' \\", &long]
    {
        let key = Key::new(part, part, part)?;
        for way in WAYS {
            sqlx::query("delete from idempotency.record").execute(pool).await?;
            assert!(!way.run(pool, &key, part, async |conn| leave_effect(conn, "effect").await).await?.is_replayed());
            assert!(once(pool, &key, part).await?.is_replayed(), "the plain way finds it: {part}");
            assert!(way.run(pool, &key, part, async |conn| leave_effect(conn, "no").await).await?.is_replayed());
        }
    }
    Ok(())
}

/// PostgreSQL 13 and 14 read fewer intervals than later ones.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn any_retention_is_kept_to_the_microsecond(pool: PgPool) -> anyhow::Result<()> {
    const SHORTEST: Duration = Duration::from_millis(1);
    for retention in [SHORTEST, Duration::from_micros(1_500_001), Duration::from_secs(10 * 366 * 86_400)] {
        for way in WAYS.map(|way| way.retention(retention)) {
            sqlx::query("delete from idempotency.record").execute(&pool).await?;
            let _ = way.run(&pool, &key("a"), "body", async |_| Ok::<_, Error>(1)).await;
            let kept: Option<f64> = sqlx::query_scalar(
                "select extract(epoch from expires_at - claimed_at)::float8 from idempotency.record",
            )
            .fetch_optional(&pool)
            .await?;
            match kept {
                // The claim runs some time after the BEGIN.
                Some(kept) => assert!((-1e-6..5.0).contains(&(kept - retention.as_secs_f64())), "{way:?}: {kept}"),
                None => assert_eq!(retention, SHORTEST, "{way:?}: only that one may be over before the completion"),
            }
        }
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
#[cfg_attr(idempotency_distributed, ignore = "the option is off there")]
async fn without_a_function_nothing_is_performed_or_nothing_kept(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    sqlx::raw_sql("alter function idempotency.await_key rename to gone").execute(&pool).await?;
    let mut owner = pool.begin().await?;
    let _ = ensure_idempotent(&mut owner, &key("a"), "body", async |_| Ok::<_, Error>(1)).await?;
    let error = once(&pool, &key("a"), "body").await.expect_err("a call that waits needs the function");
    assert!(matches!(error, Error::SchemaMissing { .. }), "{error:?}");
    owner.rollback().await?;
    sqlx::raw_sql("alter function idempotency.store_response rename to gone").execute(&pool).await?;
    let error = FEWEST
        .run(&pool, &key("a"), "body", async |conn| leave_effect(conn, "undone").await)
        .await
        .expect_err("no function");
    assert!(error.to_string().contains("database failed"), "{error}");
    assert_eq!(effects(&pool).await, 0);
    sqlx::raw_sql("alter function idempotency.claim_at_begin rename to gone_too").execute(&pool).await?;
    let error = FEWEST
        .run(&pool, &key("a"), "body", async |_| -> Result<i64, Error> { panic!("performed") })
        .await
        .expect_err("no function");
    assert!(matches!(error, Error::SchemaMissing { .. }), "{error:?}");
    assert!(!once(&pool, &key("a"), "body").await?.is_replayed(), "the plain way needs none");
    Ok(())
}

/// Above READ COMMITTED the first claim fails because the owner has committed meanwhile. The second finds its record.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_taken_key_is_replayed_after_a_serialization_failure(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let queued = |mode: &str| {
        let sql = "select exists (
            select from pg_locks where relation = 'idempotency.record'::regclass::oid and not granted
                and (mode = 'AccessExclusiveLock') = ";
        sqlx::AssertSqlSafe(format!("{sql}{mode})"))
    };
    let is_queued = async |mode: &str| {
        while !sqlx::query_scalar::<_, bool>(queued(mode)).fetch_one(&pool).await.expect("an answer") {}
    };
    let key = key("a");
    let strict = pool_of(3, &options(&pool).options([("default_transaction_isolation", "repeatable read")])).await;
    let mut owner = connect(&pool).await;
    let mut tx = owner.begin().await?;
    let _ = ensure_idempotent(&mut tx, &key, "body", async |conn| leave_effect(conn, "a").await).await?;
    // A migration waits for the table, and the duplicate's claim waits behind it, with a snapshot from before the
    // commit.
    let mut ddl = connect(&pool).await;
    let ddl = tokio::spawn(async move {
        let mut tx = ddl.begin().await?;
        tx.execute("lock table idempotency.record in access exclusive mode").await?;
        tx.rollback().await
    });
    is_queued("true").await;
    let duplicate = tokio::spawn({
        let (strict, key) = (strict.clone(), key.clone());
        async move { FEWEST.run(&strict, &key, "body", async |conn| leave_effect(conn, "b").await).await }
    });
    is_queued("false").await;
    tx.commit().await?;
    ddl.await??;
    let answer = duplicate.await?;
    assert!(matches!(answer, Ok(Outcome::Replayed(_))), "{answer:?}");
    assert_eq!(effects(&pool).await, 1);
    Ok(())
}

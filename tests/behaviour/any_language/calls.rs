//! The SQL functions beside the Rust functions, on the same keys.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use pg_idempotency::{Fingerprint, Idempotency, OnDuplicate, Outcome, ensure_idempotent};
use rig::functions::{complete, ensure};
use serde_json::Value;
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};

use crate::support::{connect, create_effects, effects, key, leave_effect, records, setting};

fn fingerprint() -> &'static Fingerprint {
    static ONE: LazyLock<Fingerprint> = LazyLock::new(|| Fingerprint::of_bytes(b"body"));
    &ONE
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn the_library_and_the_sql_functions_replay_each_others_responses_to_the_byte(
    pool: PgPool,
) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let json = r#"{"id":1,"note":"é\u0000"}"#;
    let mut conn = connect(&pool).await;

    let mut tx = conn.begin().await?;
    let claimed = ensure(&mut tx, &key("sql"), fingerprint().as_bytes(), None).await?;
    // The table of effects is protected: the claim permits the write.
    leave_effect(&mut tx, "from SQL").await?;
    complete(&mut tx, &key("sql"), claimed.token, (None, None, Some(json.as_bytes()))).await?;
    tx.commit().await?;
    let mut tx = conn.begin().await?;
    let replayed = ensure_idempotent(&mut tx, &key("sql"), fingerprint(), async |_| -> anyhow::Result<Value> {
        anyhow::bail!("performed")
    })
    .await?;
    assert_eq!(replayed, Outcome::Replayed(serde_json::from_str(json)?));
    tx.commit().await?;

    let mut tx = conn.begin().await?;
    let perform = async |conn: &mut PgConnection| leave_effect(conn, "from Rust").await;
    let id = ensure_idempotent(&mut tx, &key("rust"), fingerprint(), perform).await?.into_inner();
    tx.commit().await?;
    let mut tx = conn.begin().await?;
    let replayed = ensure(&mut tx, &key("rust"), fingerprint().as_bytes(), None).await?;
    assert_eq!((&*replayed.outcome, replayed.token, replayed.status), ("replayed", None, None));
    assert_eq!(replayed.body, Some(id.to_string().into_bytes()));
    tx.commit().await?;
    assert_eq!(effects(&pool).await, 2);
    Ok(())
}

/// `statement_timestamp()` stands still in a CALL, also across its commits. A record that counted from there would be
/// born expired, and a retry would perform.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn the_retention_counts_from_the_call_also_in_a_long_statement(pool: PgPool) -> anyhow::Result<()> {
    let worker = "create procedure worker(longer interval) language plpgsql as $$
        declare claimed record;
        begin
            while pg_catalog.clock_timestamp() < pg_catalog.statement_timestamp() + longer loop
                perform pg_catalog.pg_sleep(0.01);
            end loop;
            select * into claimed from idempotency.ensure('scope', 'operation', 'a', idempotency.fingerprint('x'), '1 hour');
            perform idempotency.complete('scope', 'operation', 'a', claimed.token);
            commit;
        end
        $$";
    sqlx::raw_sql(worker).execute(&pool).await?;
    sqlx::raw_sql("call worker('300 ms')").execute(&pool).await?;
    let claimed = "select extract(epoch from expires_at - claimed_at)::float8 from idempotency.record";
    let remembered: f64 = sqlx::query_scalar(claimed).fetch_one(&pool).await?;
    // The transaction began with the CALL.
    assert!(remembered >= 3600.3, "{remembered}");

    // The retention ends inside one statement.
    let late = "do $$
        declare claimed record;
        begin
            select * into claimed from idempotency.ensure('scope', 'operation', 'b', idempotency.fingerprint('x'), '20 ms', '1 ms');
            perform pg_catalog.pg_sleep(0.03);
            perform idempotency.complete('scope', 'operation', 'b', claimed.token);
        end
        $$";
    let refused = sqlx::raw_sql(late).execute(&pool).await.expect_err("its retention has ended");
    assert_eq!(refused.as_database_error().and_then(|error| error.code()).as_deref(), Some("IK003"), "{refused:?}");

    // A retention that ended inside one statement, after a COMMIT: the key is new.
    let twice = "do $$
        declare one record; other record;
        begin
            select * into one from idempotency.ensure('scope', 'operation', 'c', idempotency.fingerprint('x'), '50 ms', '1 ms');
            perform idempotency.complete('scope', 'operation', 'c', one.token);
            commit;
            perform pg_catalog.pg_sleep(0.06);
            select * into other from idempotency.ensure('scope', 'operation', 'c', idempotency.fingerprint('y'), '1 hour');
            perform idempotency.complete('scope', 'operation', 'c', other.token);
        end
        $$";
    sqlx::raw_sql(twice).execute(&pool).await?;
    Ok(())
}

/// Both doors try the same advisory lock.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn an_open_call_of_one_door_is_in_flight_for_the_other(pool: PgPool) -> anyhow::Result<()> {
    // If the doors tried two locks, the second call would wait for the row of the first one.
    const BOUNDED: &str = "set local lock_timeout = '5s'";
    // `ensure` has a faster way for keys whose parts have up to 127 ASCII characters.
    let long = [127, 128, 255].map(|bytes| "x".repeat(bytes));
    let mut keys = vec![["a", "POST /u", "a"], ["é", "POST /u", "a"], ["漢字", "POST /ü", "漢字"]];
    for long in &long {
        keys.extend([[long, "POST /u", "a"], ["a", long, "a"], ["a", "POST /u", long]]);
    }
    for (at, [scope, operation, value]) in keys.into_iter().enumerate() {
        let key = pg_idempotency::Key::new(scope, operation, value)?;
        let mut owner = pool.begin().await?;
        let owned = ensure(&mut owner, &key, fingerprint().as_bytes(), None).await?;
        assert_eq!(owned.outcome, "claimed");
        let reject = Idempotency::new().on_duplicate(OnDuplicate::Reject);
        let mut tx = pool.begin().await?;
        tx.execute(BOUNDED).await?;
        let refused = reject.ensure(&mut tx, &key, fingerprint(), async |_| Ok::<_, pg_idempotency::Error>(1)).await;
        assert!(matches!(refused, Err(pg_idempotency::Error::InFlight { .. })), "{refused:?}");
        tx.rollback().await?;
        complete(&mut owner, &key, owned.token, (None, None, Some(b"1"))).await?;
        owner.rollback().await?;
        let mut owner = pool.begin().await?;
        let _ = reject.ensure(&mut owner, &key, fingerprint(), async |_| Ok::<_, pg_idempotency::Error>(1)).await?;
        let mut tx = pool.begin().await?;
        tx.execute(BOUNDED).await?;
        let refused = ensure(&mut tx, &key, fingerprint().as_bytes(), Some("0")).await?;
        assert_eq!(
            (&*refused.outcome, refused.retry_after.map(|after| after.microseconds)),
            ("in_flight", Some(1_000_000))
        );
        // An answer aborts nothing.
        tx.commit().await?;
        owner.commit().await?;
        assert_eq!(records(&pool).await, i64::try_from(at)? + 1);
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn a_wait_ends_at_its_limit_and_leaves_the_callers_lock_timeout(pool: PgPool) -> anyhow::Result<()> {
    let mut owner = pool.begin().await?;
    ensure(&mut owner, &key("a"), fingerprint().as_bytes(), None).await?;
    let mut tx = pool.begin().await?;
    sqlx::raw_sql("set local lock_timeout = '7 s'").execute(&mut *tx).await?;
    let started = Instant::now();
    let answer = ensure(&mut tx, &key("a"), fingerprint().as_bytes(), Some("50 ms")).await?;
    assert_eq!(answer.outcome, "in_flight");
    assert!(started.elapsed() >= Duration::from_millis(50), "{:?}", started.elapsed());
    assert_eq!(setting(&mut tx, "lock_timeout").await, "7s");
    tx.commit().await?;
    Ok(())
}

/// After a savepoint has undone a claim, the transaction may not write.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn a_savepoint_undoes_a_claim(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    let mut tx = pool.begin().await?;
    let mut savepoint = tx.begin().await?;
    let undone = ensure(&mut savepoint, &key("a"), fingerprint().as_bytes(), None).await?;
    savepoint.rollback().await?;
    let mut savepoint = tx.begin().await?;
    let ended = complete(&mut savepoint, &key("a"), undone.token, (None, None, None)).await.expect_err("no claim");
    assert_eq!(ended.as_database_error().and_then(|error| error.code()).as_deref(), Some("IK002"));
    savepoint.rollback().await?;
    let mut savepoint = tx.begin().await?;
    let escaped = leave_effect(&mut savepoint, "outside").await.expect_err("the table is protected");
    assert!(matches!(&escaped, pg_idempotency::Error::Database(_)), "{escaped:?}");
    savepoint.rollback().await?;
    // The transaction can claim anew.
    let claimed = ensure(&mut tx, &key("a"), fingerprint().as_bytes(), None).await?;
    leave_effect(&mut tx, "inside").await?;
    complete(&mut tx, &key("a"), claimed.token, (None, None, None)).await?;
    tx.commit().await?;
    assert_eq!(effects(&pool).await, 1);
    Ok(())
}

/// The vectors are those that the callers in other languages read, too.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn every_vector_of_the_fingerprint_of_bytes_is_computed_alike(pool: PgPool) -> anyhow::Result<()> {
    let vectors: Vec<Value> = serde_json::from_str(include_str!("../../vectors/fingerprints.json"))?;
    for vector in &vectors {
        let text = |name: &str| vector[name].as_str().unwrap_or_default();
        let request = hex::decode(text("request"))?;
        let asked: Vec<u8> =
            sqlx::query_scalar("select idempotency.fingerprint($1)").bind(&request).fetch_one(&pool).await?;
        assert_eq!(hex::encode(&asked), text("fingerprint"), "{vector}");
        assert_eq!(Fingerprint::of_bytes(&request).as_bytes(), asked);
    }
    assert!(vectors.len() > 5, "{vectors:?}");
    Ok(())
}

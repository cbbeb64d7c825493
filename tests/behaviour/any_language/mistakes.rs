//! Mistakes of callers of the SQL functions: nothing happens twice, and an error says what to do.

use std::time::Duration;

use pg_idempotency::Fingerprint;
use rig::functions::{complete, ensure};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};

use crate::support::{connect, create_open_effects, expire_in, key, leave_effect, records};

const NOTHING: (Option<i32>, Option<&str>, Option<&[u8]>) = (None, None, None);

fn fingerprint() -> Vec<u8> {
    Fingerprint::of_bytes(b"body").as_bytes().to_vec()
}

/// The SQLSTATE, and the hint. Every error of ours has one.
fn refusal<T: std::fmt::Debug>(result: sqlx::Result<T>) -> (String, String) {
    let error = result.expect_err("refused");
    let error = error.as_database_error().expect("by the server");
    let error = error.downcast_ref::<sqlx::postgres::PgDatabaseError>();
    (error.code().to_owned(), error.hint().unwrap_or_default().to_owned())
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn arguments_out_of_range_are_refused_with_a_hint_and_do_nothing(pool: PgPool) -> anyhow::Result<()> {
    let good = [
        ("scope", "'s'"),
        ("operation", "'o'"),
        ("value", "'v'"),
        ("fingerprint", "idempotency.fingerprint('x')"),
        ("retention", "'24 hours'"),
        ("wait", "null"),
    ];
    let with = |name: &str, wrong: &str| {
        let argument = |(one, good): &(&str, &str)| format!("{one} => {}", if *one == name { wrong } else { good });
        let arguments = good.iter().map(argument).collect::<Vec<_>>().join(", ");
        format!("select idempotency.ensure({arguments})")
    };
    for (name, wrong, hint) in [
        ("scope", "null", "1 to 255 bytes"),
        ("scope", "''", "1 to 255 bytes"),
        ("operation", "repeat('x', 256)", "1 to 255 bytes"),
        ("operation", "repeat('é', 128)", "1 to 255 bytes"),
        ("value", r"E'a\u0007'", "control"),
        ("value", r"E'a\u0085'", "control"),
        ("value", r"E'\u007f'", "control"),
        ("value", "'  '", "can be seen"),
        ("scope", r"E'\u200b'", "can be seen"),
        ("fingerprint", "null", "33 bytes"),
        ("fingerprint", "''", "33 bytes"),
        ("fingerprint", "sha256('x')", "33 bytes"),
        ("retention", "null", "retention"),
        ("retention", "'0'", "retention"),
        ("retention", "'-1 s'", "retention"),
        ("retention", "'10000 years'", "retention"),
        // A comparison would take them for a day, and for ten years less a day.
        ("retention", "'-1 year 361 days'", "retention"),
        ("retention", "'100 years -32401 days'", "retention"),
        ("wait", "'-1 s'", "wait"),
        ("wait", "'2 hours'", "wait"),
        ("wait", "'290000 years'", "wait"),
        ("wait", "'300000 years'", "wait"),
        ("wait", "'1 microsecond'", "wait"),
        // A comparison would take it for zero.
        ("wait", "'1 year -360 days'", "wait"),
    ] {
        let (code, told) = refusal(pool.execute(AssertSqlSafe(with(name, wrong))).await);
        assert!(code == "IK008" && told.contains(hint), "{name} => {wrong}: {code} {told}");
    }
    let longer =
        "select idempotency.ensure('s', 'o', 'v', idempotency.fingerprint('x'), retention => '3 s', wait => '3 s')";
    assert_eq!(refusal(pool.execute(longer).await).0, "IK008");
    assert_eq!(records(&pool).await, 0);
    // What is just in range. A retention shorter than ten seconds shortens the default wait.
    let mut tx = pool.begin().await?;
    for arguments in [
        "repeat('é', 127) || 'x', 'o', 'v', idempotency.fingerprint('')",
        "'s', 'o', 'a b', idempotency.fingerprint('x'), '1 ms'",
        "'s', 'o', 'c', idempotency.fingerprint('x'), retention => '10 years', wait => '1 hour'",
        // Five days and six hours, which a comparison would take for less than the wait.
        "'s', 'o', 'd', idempotency.fingerprint('x'), retention => '1 year -360 days', wait => '1 hour'",
    ] {
        let sql = format!("select outcome from idempotency.ensure({arguments})");
        let outcome: String = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut *tx).await?;
        assert_eq!(outcome, "claimed", "{arguments}");
    }
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn a_response_of_another_shape_is_refused_and_the_claim_remains(pool: PgPool) -> anyhow::Result<()> {
    let mut tx = pool.begin().await?;
    let claimed = ensure(&mut tx, &key("a"), &fingerprint(), None).await?;
    for (status, headers) in [
        (Some(199), None),
        (Some(600), None),
        (None, Some("[]")),
        (Some(200), Some("{}")),
        (Some(200), Some(r#""etag""#)),
        (Some(200), Some(r#"["etag"]"#)),
        (Some(200), Some(r#"[["etag"]]"#)),
        (Some(200), Some(r#"[["etag", 1]]"#)),
        (Some(200), Some(r#"[["etag", "a", "b"]]"#)),
        (Some(200), Some(r#"[["etag", "a"], ["a b", "c"]]"#)),
        (Some(200), Some(r#"[["", "c"]]"#)),
        (Some(200), Some(r#"[["etag", "a\r\nset-cookie: b"]]"#)),
        (Some(200), Some(r#"[["etag", "\u0100"]]"#)),
    ] {
        let mut savepoint = tx.begin().await?;
        let refused = complete(&mut savepoint, &key("a"), claimed.token, (status, headers, Some(b"x"))).await;
        let (code, hint) = refusal(refused);
        assert!(code == "IK008" && !hint.is_empty(), "{status:?} {headers:?}: {code} {hint}");
        savepoint.rollback().await?;
    }
    let mut savepoint = tx.begin().await?;
    let (code, hint) = refusal(complete(&mut savepoint, &key("a"), None, NOTHING).await);
    assert!(code == "IK008" && hint.contains("claimed"), "{code} {hint}");
    savepoint.rollback().await?;
    let headers = r#"[["etag", "\u00ff \"x\""], ["X-A_b", ""]]"#;
    complete(&mut tx, &key("a"), claimed.token, (Some(201), Some(headers), None)).await?;
    let replayed = ensure(&mut tx, &key("a"), &fingerprint(), None).await?;
    assert_eq!((replayed.status, replayed.body.as_deref()), (Some(201), Some(&b""[..])));
    assert_eq!(replayed.headers.as_deref(), Some("[[\"etag\", \"ÿ \\\"x\\\"\"], [\"X-A_b\", \"\"]]"));
    Ok(())
}

/// Autocommit is the default of most drivers. The claim commits alone, so the completion fails, and no retry performs.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn in_autocommit_nothing_is_performed_twice(pool: PgPool) -> anyhow::Result<()> {
    create_open_effects(&pool).await;
    let mut conn = connect(&pool).await;
    let claimed = ensure(&mut conn, &key("a"), &fingerprint(), None).await?;
    assert_eq!(claimed.outcome, "claimed");
    leave_effect(&mut conn, "a").await?;
    let (code, hint) = refusal(complete(&mut conn, &key("a"), claimed.token, NOTHING).await);
    assert!(code == "IK002" && hint.contains("autocommit"), "{code} {hint}");
    for retry in 1..=2 {
        let answer = ensure(&mut conn, &key("a"), &fingerprint(), None).await?;
        assert_eq!((&*answer.outcome, answer.token), ("indeterminate", None), "{retry}");
    }
    // A crash between the claim and the effect: the redelivery must not be answered as a duplicate.
    let claimed = ensure(&mut conn, &key("event"), &fingerprint(), None).await?;
    assert_eq!(claimed.outcome, "claimed");
    assert_eq!(ensure(&mut conn, &key("event"), &fingerprint(), None).await?.outcome, "indeterminate");
    Ok(())
}

/// The hint of an indeterminate key, in the warning beside the answer.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn an_indeterminate_key_has_a_warning_that_names_the_usual_cause(pool: PgPool) -> anyhow::Result<()> {
    let mut conn = connect(&pool).await;
    ensure(&mut conn, &key("a"), &fingerprint(), None).await?;
    let token: i64 = sqlx::query_scalar("select token from idempotency.record").fetch_one(&mut conn).await?;
    // The driver drops warnings, so this function raises it as an error.
    let definition: String = sqlx::query_scalar(
        "select pg_get_functiondef(oid) from pg_proc
         where proname = 'ensure' and pronamespace = 'idempotency'::regnamespace::oid",
    )
    .fetch_one(&mut conn)
    .await?;
    assert_eq!(definition.matches("raise warning").count(), 1);
    conn.execute(AssertSqlSafe(definition.replace("raise warning", "raise exception"))).await?;
    let raised = ensure(&mut conn, &key("a"), &fingerprint(), None).await;
    let said = raised.as_ref().map_or_else(ToString::to_string, |_| String::new());
    assert!(said.contains(&format!("token {token}")), "{said}");
    let (_, hint) = refusal(raised);
    assert!(hint.contains("autocommit") && hint.contains("idempotency-janitor"), "{hint}");
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn only_the_claim_of_this_transaction_completes_and_only_once(pool: PgPool) -> anyhow::Result<()> {
    let mut owner = pool.begin().await?;
    let claimed = ensure(&mut owner, &key("a"), &fingerprint(), None).await?;
    for (key, token) in [(key("a"), Some(1)), (key("b"), claimed.token)] {
        let mut savepoint = owner.begin().await?;
        assert_eq!(refusal(complete(&mut savepoint, &key, token, NOTHING).await).0, "IK002");
        savepoint.rollback().await?;
    }
    complete(&mut owner, &key("a"), claimed.token, NOTHING).await?;
    let mut savepoint = owner.begin().await?;
    assert_eq!(refusal(complete(&mut savepoint, &key("a"), claimed.token, NOTHING).await).0, "IK002");
    savepoint.rollback().await?;
    owner.commit().await?;
    assert_eq!(refusal(complete(&mut *pool.acquire().await?, &key("a"), claimed.token, NOTHING).await).0, "IK002");

    let mut owner = pool.begin().await?;
    let claimed = ensure(&mut owner, &key("c"), &fingerprint(), None).await?;
    sqlx::raw_sql("update idempotency.record set expires_at = statement_timestamp() where value = 'c'")
        .execute(&mut *owner)
        .await?;
    let (code, hint) = refusal(complete(&mut owner, &key("c"), claimed.token, NOTHING).await);
    assert!(code == "IK003" && hint.contains("retention"), "{code} {hint}");
    Ok(())
}

/// The transactions of one message share `now()`, which is the time of the claim.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn a_claim_does_not_survive_a_commit_inside_one_message(pool: PgPool) -> anyhow::Result<()> {
    let message = "begin;
        select outcome from idempotency.ensure('s', 'o', 'v', idempotency.fingerprint('x'));
        commit;
        begin;
        select idempotency.complete('s', 'o', 'v', (select token from idempotency.record));
        commit";
    let (code, hint) = refusal(sqlx::raw_sql(message).execute(&pool).await);
    assert!(code == "IK002" && hint.contains("one transaction"), "{code} {hint}");
    Ok(())
}

/// As the library: above READ COMMITTED, a record that was committed after the snapshot is a serialization failure.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn above_read_committed_a_call_fails_rather_than_performs_twice(pool: PgPool) -> anyhow::Result<()> {
    let call = async |conn: &mut PgConnection, value: &str| ensure(conn, &key(value), &fingerprint(), Some("0")).await;
    for level in ["repeatable read", "serializable"] {
        let mut late = pool.begin_with(AssertSqlSafe(format!("begin isolation level {level}"))).await?;
        sqlx::raw_sql("select 1 from idempotency.record").execute(&mut *late).await?;
        let mut owner = pool.begin().await?;
        let claimed = call(&mut owner, level).await?;
        complete(&mut owner, &key(level), claimed.token, NOTHING).await?;
        owner.commit().await?;
        let (code, _) = refusal(call(&mut late, level).await);
        assert_eq!(code, "40001");
        late.rollback().await?;
        let mut repeated = pool.begin_with(AssertSqlSafe(format!("begin isolation level {level}"))).await?;
        assert_eq!(call(&mut repeated, level).await?.outcome, "replayed");
        repeated.commit().await?;
        // A record that has expired before the snapshot is taken over.
        expire_in(&pool, &key(level), Duration::ZERO).await?;
        let mut repeated = pool.begin_with(AssertSqlSafe(format!("begin isolation level {level}"))).await?;
        assert_eq!(call(&mut repeated, level).await?.outcome, "claimed");
        repeated.rollback().await?;
    }
    Ok(())
}

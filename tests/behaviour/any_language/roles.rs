//! Who may call the SQL functions, and how a client role calls them through two functions of the service.

use rig::database::backend;
use rig::role::with_role;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool, Row as _};

use crate::support::{connect, records};

/// The SQL of the guide's page, with roles of this test.
fn pattern(api: &str, client: &str) -> String {
    include_str!("../../../src/guide/any_language/postgrest.sql").replace("shop_api", api).replace("web_user", client)
}

async fn refused(conn: &mut PgConnection, sql: &str) -> anyhow::Result<String> {
    conn.execute("savepoint before").await?;
    let error = conn.execute(AssertSqlSafe(sql.to_owned())).await.expect_err(sql);
    conn.execute("rollback to before").await?;
    Ok(error.as_database_error().and_then(|error| error.code()).unwrap_or_default().into_owned())
}

async fn pay(conn: &mut PgConnection, value: &str, payee: &str) -> sqlx::Result<(i32, String)> {
    let row = sqlx::query("select status, convert_from(body, 'UTF8') as body from api.pay($1, $2, 1250)")
        .bind(value)
        .bind(payee)
        .fetch_one(conn)
        .await?;
    Ok((row.try_get("status")?, row.try_get("body")?))
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn a_client_role_reads_and_forges_nothing(pool: PgPool) -> anyhow::Result<()> {
    let mut admin = connect(&pool).await;
    let process = backend(&mut admin).await?;
    let (api, client) = (format!("api_{process}"), format!("web_{process}"));
    admin.execute(AssertSqlSafe(pattern(&api, &client))).await?;
    let attempt = attempts(&pool, &client).await;
    let clean = format!("drop schema api cascade; drop owned by {api}, {client}; drop role {api}, {client}");
    admin.execute(AssertSqlSafe(clean)).await?;
    attempt
}

async fn attempts(pool: &PgPool, client: &str) -> anyhow::Result<()> {
    let mut conn = connect(pool).await;
    // As PostgREST does for each request: the role and the claims of the verified token, until the end of the
    // transaction.
    let begin_as = |who: &str| {
        format!("begin; set local role {client}; set local request.jwt.claims = '{{\"sub\": \"{who}\"}}'; select 1")
    };
    // The effect is there, once, and belongs to the caller.
    for _ in 0..2 {
        conn.execute(AssertSqlSafe(begin_as("ann"))).await?;
        assert_eq!(pay(&mut conn, "key-1", "bob").await?, (201, r#"{"paid" : 1250}"#.to_owned()));
        conn.execute("commit").await?;
    }
    // The same value of another user is another key.
    conn.execute(AssertSqlSafe(begin_as("eve"))).await?;
    assert_eq!(pay(&mut conn, "key-1", "bob").await?.0, 201);
    // Another body is refused.
    assert_eq!(pay(&mut conn, "key-1", "eve").await?.0, 422);
    conn.execute("commit").await?;
    conn.execute(AssertSqlSafe(begin_as("eve"))).await?;
    assert_eq!(
        refused(&mut conn, "select * from idempotency.ensure('ann', 'POST /payments', 'key-1', 'x')").await?,
        "42501"
    );
    assert_eq!(refused(&mut conn, "select idempotency.complete('ann', 'POST /payments', 'key-1', 1)").await?, "42501");
    assert_eq!(refused(&mut conn, "select idempotency.fingerprint('x')").await?, "42501");
    assert_eq!(refused(&mut conn, "select * from idempotency.record").await?, "42501");
    // The functions of the service take no scope.
    assert_eq!(
        refused(&mut conn, "select * from api.claim_payment(scope => 'ann', value => 'key-1', request => 'x')").await?,
        "42883"
    );
    // A foreign token: of a key of this user that this transaction has not claimed.
    assert_eq!(refused(&mut conn, "select api.complete_payment('key-1', 1, 200, 'forged')").await?, "IK002");
    // Row security holds for the effect, and undoes the claim with it.
    assert_eq!(
        refused(&mut conn, "insert into api.payments (payer, payee, cents) values ('ann', 'eve', 1)").await?,
        "42501"
    );
    let seen: i64 = sqlx::query_scalar("select count(*) from api.payments").fetch_one(&mut conn).await?;
    assert_eq!(seen, 1, "eve sees her own");
    conn.execute("rollback").await?;
    // Without a user's token, a call has no scope.
    conn.execute(AssertSqlSafe(begin_as(""))).await?;
    assert_eq!(refused(&mut conn, "select * from api.pay('key-2', 'bob', 1)").await?, "IK008");
    conn.execute("rollback").await?;
    let paid: i64 = sqlx::query_scalar("select count(*) from api.payments").fetch_one(pool).await?;
    assert_eq!((paid, records(pool).await), (2, 2));
    Ok(())
}

/// The grant lines of the page suffice for the role of a service.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn a_service_role_calls_with_the_grants_of_the_page(pool: PgPool) -> anyhow::Result<()> {
    let page = include_str!("../../../src/guide/any_language.md");
    let lines = page.lines().filter(|line| line.starts_with("grant ") && line.contains("shop_worker"));
    let grants: String = lines.map(|line| line.replace("shop_worker", "@role")).collect();
    with_role(&pool, &grants, async |role| {
        let mut tx = pool.begin().await?;
        tx.execute(AssertSqlSafe(format!("set local role {role}"))).await?;
        let outcome: String = sqlx::query_scalar(
            "select (select idempotency.complete('s', 'o', 'v', token))::text || outcome
             from idempotency.ensure('s', 'o', 'v', idempotency.fingerprint('x'))",
        )
        .fetch_one(&mut *tx)
        .await?;
        tx.commit().await?;
        assert_eq!((&*outcome, records(&pool).await), ("claimed", 1));
        anyhow::Ok(())
    })
    .await
}

/// No function of the schema resolves a name by the path of its caller. Those without a path of their own name the
/// schema of everything.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn each_function_for_other_languages_pins_its_search_path_and_is_not_for_everybody(
    pool: PgPool,
) -> anyhow::Result<()> {
    let names: Vec<(String, bool)> = sqlx::query_as(
        "select proname::text, coalesce(array_to_string(proconfig, ' ') = 'search_path=pg_catalog, pg_temp', false)
         from pg_proc
         where pronamespace = 'idempotency'::regnamespace::oid
             and not exists (select from aclexplode(proacl) as acl where acl.grantee = 0::oid)
             and proacl is not null
         order by proname",
    )
    .fetch_all(&pool)
    .await?;
    let names: Vec<_> = names.iter().map(|(name, pins)| (name.as_str(), *pins)).collect();
    assert_eq!(
        names,
        [("complete", true), ("ensure", true), ("fingerprint", false), ("run", false), ("version", true)]
    );
    Ok(())
}

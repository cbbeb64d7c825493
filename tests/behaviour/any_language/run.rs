//! `idempotency.run`: the claim, the effect and the completion in one statement.

use pg_idempotency::Fingerprint;
use rig::role::with_role;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgExecutor, PgPool};

use crate::support::{connect, create_effects, effects, records};

/// The row of `idempotency.run`, with the headers as text.
#[derive(Debug, PartialEq, sqlx::FromRow)]
struct Answer {
    outcome: String,
    status: Option<i32>,
    headers: Option<String>,
    body: Option<Vec<u8>>,
}

impl Answer {
    fn of(outcome: &str, body: &str) -> Self {
        let (headers, body) = (Some("[]".to_owned()), Some(body.as_bytes().to_vec()));
        Self { outcome: outcome.to_owned(), status: Some(201), headers, body }
    }

    fn refused(outcome: &str) -> Self {
        Self { outcome: outcome.to_owned(), status: None, headers: None, body: None }
    }
}

/// The effect answers with the number of the effects, so that a second effect has another answer.
const PAY: &str = "
    create schema api;
    create table api.account (holder text unique deferrable initially deferred);
    create function api.pay(argument jsonb, out status int, out headers jsonb, out body bytea) language plpgsql as $$
    begin
        insert into public.effect (note) values (argument ->> 'note'::text);
        insert into api.account values (argument ->> 'holder'::text);
        if argument ->> 'note'::text = 'raises' then
            raise exception 'no money' using errcode = 'PAY01';
        end if;
        status := 201;
        body := convert_to((select count(*) from public.effect)::text, 'UTF8');
    end
    $$";

async fn prepared(pool: &PgPool) -> anyhow::Result<()> {
    create_effects(pool).await;
    pool.execute(PAY).await?;
    Ok(())
}

async fn pay(executor: impl PgExecutor<'_>, value: &str, note: &str, holder: Option<&str>) -> sqlx::Result<Answer> {
    sqlx::query_as(
        "select outcome, status, headers::text, body
        from idempotency.run(scope => 'tenant', operation => 'pay', value => $1::text,
            fingerprint => idempotency.fingerprint(convert_to($2::text, 'UTF8')), effect => 'api.pay',
            argument => jsonb_build_object('note', $2::text, 'holder', $3::text))",
    )
    .bind(value)
    .bind(note)
    .bind(holder)
    .fetch_one(executor)
    .await
}

fn code<T: std::fmt::Debug>(result: sqlx::Result<T>) -> String {
    let error = result.expect_err("an error");
    error.as_database_error().and_then(|error| error.code()).unwrap_or_default().into_owned()
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn run_performs_once_and_replays_the_same_bytes(pool: PgPool) -> anyhow::Result<()> {
    prepared(&pool).await?;
    assert_eq!(pay(&pool, "a", "one", None).await?, Answer::of("performed", "1"));
    assert_eq!(pay(&pool, "a", "one", None).await?, Answer::of("replayed", "1"));
    assert_eq!(pay(&pool, "a", "other", None).await?, Answer::refused("key_reused"));
    assert_eq!(pay(&pool, "b", "one", None).await?, Answer::of("performed", "2"));
    // Two at once, each in autocommit.
    let (one, other) = tokio::join!(pay(&pool, "c", "one", None), pay(&pool, "c", "one", None));
    let mut both = [one?, other?];
    both.sort_by_key(|answer| answer.outcome.clone());
    assert_eq!(both, [Answer::of("performed", "3"), Answer::of("replayed", "3")]);
    assert_eq!((effects(&pool).await, records(&pool).await), (3, 3));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn an_effect_that_raises_leaves_nothing_and_its_error_comes_back(pool: PgPool) -> anyhow::Result<()> {
    prepared(&pool).await?;
    assert_eq!(code(pay(&pool, "a", "raises", None).await), "PAY01");
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    // In a transaction of the caller, a savepoint is enough.
    let mut tx = pool.begin().await?;
    let mut savepoint = tx.begin().await?;
    assert_eq!(code(pay(&mut *savepoint, "a", "raises", None).await), "PAY01");
    savepoint.rollback().await?;
    assert_eq!(pay(&mut *tx, "a", "one", None).await?, Answer::of("performed", "1"));
    assert_eq!(pay(&mut *tx, "a", "one", None).await?, Answer::of("replayed", "1"));
    tx.commit().await?;
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
    Ok(())
}

/// The server sends the row before it commits, and the error after it.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn a_deferred_constraint_that_fails_at_commit_is_no_success(pool: PgPool) -> anyhow::Result<()> {
    prepared(&pool).await?;
    pool.execute("insert into api.account values ('ada')").await?;
    assert_eq!(code(pay(&pool, "a", "one", Some("ada")).await), "23505");
    assert_eq!((effects(&pool).await, records(&pool).await), (0, 0));
    pool.execute("delete from api.account").await?;
    assert_eq!(pay(&pool, "a", "one", Some("ada")).await?, Answer::of("performed", "1"));
    assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn a_function_that_is_no_effect_leaves_nothing(pool: PgPool) -> anyhow::Result<()> {
    pool.execute(
        "create function answers_nothing(jsonb) returns table (status int, headers jsonb, body bytea) language sql as $$
             select null::int, null::jsonb, null::bytea where false $$",
    )
    .await?;
    let run = async |effect: &str| -> sqlx::Result<Answer> {
        let call = format!(
            "select outcome, status, headers::text, body
            from idempotency.run('s', 'o', 'v', idempotency.fingerprint('x'), {effect}, null)"
        );
        sqlx::query_as(AssertSqlSafe(call)).fetch_one(&pool).await
    };
    for (effect, expected) in [
        ("null", "IK008"),
        ("'no_such_function'", "42883"),
        // It takes no jsonb, or returns none of the columns.
        ("'pg_catalog.pg_sleep'", "42883"),
        ("'pg_catalog.jsonb_typeof'", "42703"),
    ] {
        assert_eq!(code(run(effect).await), expected, "{effect}");
    }
    assert_eq!(records(&pool).await, 0);
    // A consumer of events has no response.
    assert_eq!(run("'answers_nothing'").await?, Answer::refused("performed"));
    assert_eq!(run("'answers_nothing'").await?, Answer::refused("replayed"));
    Ok(())
}

/// It runs under the path of its caller, so that the effect does. Nothing of the caller's path replaces what it uses
/// itself.
#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn the_path_of_the_caller_decides_nothing_but_the_effect(pool: PgPool) -> anyhow::Result<()> {
    prepared(&pool).await?;
    let mut conn = connect(&pool).await;
    conn.execute(
        "create schema evil;
         create function evil.format(text, regproc) returns text language sql as $$
             select 'select 666 as status, null::jsonb, null::bytea'::text $$;
         create function evil.pay(jsonb, out status int, out headers jsonb, out body bytea) language sql as $$
             select 666, null::jsonb, null::bytea $$;
         create function evil.ensure(text, text, text, bytea, interval, interval, text) returns int language sql as 'select 666';
         create function evil.sha256(bytea) returns bytea language sql as $$ select '\\x6666'::bytea $$;
         create function evil.decode(text, text) returns bytea language sql as $$ select '\\x6666'::bytea $$;
         create function evil.joined(bytea, bytea) returns bytea language sql as $$ select '\\x6666'::bytea $$;
         create operator evil.|| (leftarg = bytea, rightarg = bytea, function = evil.joined);
         set search_path = evil, pg_catalog",
    )
    .await?;
    let fingerprint: Vec<u8> = sqlx::query_scalar("select idempotency.fingerprint('x')").fetch_one(&mut conn).await?;
    assert_eq!(fingerprint, Fingerprint::of_bytes(b"x").as_bytes());
    assert_eq!(pay(&mut conn, "a", "one", None).await?, Answer::of("performed", "1"));
    conn.execute("set search_path = api, evil").await?;
    assert_eq!(pay(&mut conn, "b", "one", None).await?, Answer::of("performed", "2"));
    assert_eq!(effects(&pool).await, 2);
    Ok(())
}

#[sqlx::test(migrator = "rig::strict::ANY_LANGUAGE_MIGRATOR")]
async fn run_has_only_the_rights_of_its_caller(pool: PgPool) -> anyhow::Result<()> {
    prepared(&pool).await?;
    with_role(&pool, "", async |role| {
        let mut conn = connect(&pool).await;
        for (step, rights) in [
            "usage on schema idempotency, api",
            "execute on function idempotency.run, idempotency.fingerprint",
            "execute on function idempotency.ensure, idempotency.complete",
            "select, insert, update on idempotency.record",
            "select, insert on api.account, public.effect",
        ]
        .into_iter()
        .enumerate()
        {
            let grant = format!("reset role; grant {rights} to {role}; set role {role}");
            conn.execute(AssertSqlSafe(grant)).await?;
            let answer = pay(&mut conn, "a", "one", None).await;
            if step < 4 {
                assert_eq!(code(answer), "42501", "with {rights}");
            } else {
                assert_eq!(answer?, Answer::of("performed", "1"));
            }
        }
        assert_eq!((effects(&pool).await, records(&pool).await), (1, 1));
        anyhow::Ok(())
    })
    .await
}

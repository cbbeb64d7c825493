//! What an error of the database means at each place where a call can meet it: the table of `error/places.md`. And a
//! connection that has lost its prepared statements.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pg_idempotency::lease::{Lease, LeaseOptions, Policy};
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::{Error, Idempotency, OnDuplicate, Outcome, Verdict, commit};
use rig::cases::each;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS};
use rig::proxy::Proxy;
use sqlx::postgres::PgDatabaseError;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};

use crate::support::{clear, create_effects, effects, key, leave_effect, once, options, pool_of, records};

const HOUR: Duration = Duration::from_secs(3600);
const PLACES: [&str; 5] = ["opening", "before the work", "`perform`", "completion", "COMMIT"];

fn sqlstate(error: &Error) -> Option<String> {
    let (Error::Database(cause) | Error::Retryable(cause)) = error else { return None };
    Some(cause.as_database_error()?.code()?.into_owned())
}

/// The SQLSTATEs of the rows, with what their cells say about each place. A class is one code of it.
fn rows() -> Vec<(String, Vec<&'static str>)> {
    let table = include_str!("../../../src/error/places.md");
    let cells = |line: &'static str| line.trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>();
    assert_eq!(cells(table.lines().next().expect("a head"))[1..], PLACES);
    let mut rows = Vec::new();
    for row in table.lines().skip(2).map(cells) {
        for word in row[0].split([' ', ',', ';', '(', ')']) {
            let code = word.trim_end_matches('…');
            if code.len() >= 2 && code.starts_with(|first: char| first.is_ascii_digit() || first == 'X') {
                rows.push((format!("{code:0<5}"), row[1..].to_vec()));
            }
        }
    }
    rows
}

/// Calls once, meets an error with this SQLSTATE at this place, and returns the error.
async fn meet(proxy: &Proxy, pool: &PgPool, state: &'static str, place: &str, value: &str) -> Error {
    // A claim that was refused because it may be in a transaction of other code is sent again.
    let times = if place == "before the work" && ["25006", "42501"].contains(&state) { 2 } else { 1 };
    let mut pool = pool.clone();
    match place {
        "opening" if state.starts_with("28") || state == "3D000" => {
            proxy.refuse_logins(Some(state));
            pool = pool.options().clone().connect_lazy_with(proxy.options.clone());
        }
        "opening" => proxy.answer("opening before claim", state, times),
        "before the work" => proxy.answer("pg_idempotency: claim", state, times),
        _ => {}
    }
    // Prepared each time, so that the proxy reads the text.
    let perform = async |conn: &mut PgConnection| {
        match place {
            "`perform`" => {
                let raise = format!("do $$ begin raise exception 'on purpose' using errcode = '{state}'; end $$");
                conn.execute(AssertSqlSafe(raise)).await?;
            }
            "completion" => proxy.answer("pg_idempotency: complete", state, times),
            "COMMIT" => proxy.answer("COMMIT", state, times),
            _ => {}
        }
        leave_effect(conn, value).await
    };
    let called = Idempotency::new().persistent(false).run(&pool, &key(value), "body", perform).await;
    let error = called.expect_err(place);
    proxy.refuse_logins(None);
    error
}

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn the_table_of_places_is_what_the_code_does(direct: PgPool) -> anyhow::Result<()> {
    create_effects(&direct).await;
    let proxy = Proxy::before(&direct.connect_options()).await?;
    let pool = pool_of(1, &proxy.options).await;
    let rows = rows();
    assert!(rows.len() > 15, "{rows:?}");
    for (state, cells) in rows {
        for (number, (place, cell)) in PLACES.into_iter().zip(cells).enumerate() {
            let state: &'static str = state.clone().leak();
            // Without the name of the place, which the proxy would find in the parameters.
            let value = format!("{state} {number}");
            let error = meet(&proxy, &pool, state, place, &value).await;
            assert_eq!(sqlstate(&error).as_deref(), Some(state), "{place}: {error:?}");
            let is_transient = match cell.split(' ').next() {
                Some("yes") => true,
                Some("no") => false,
                _ => panic!("{state}, {place}: {cell}"),
            };
            assert_eq!(error.is_transient(), is_transient, "{state}, {place}: {error:?}");
            // Only a COMMIT whose answer came from the pooler took effect.
            let perform = async |conn: &mut PgConnection| leave_effect(conn, "again").await;
            // Not prepared, because the proxy would not see the text of a prepared statement in the next case.
            let again = Idempotency::new().persistent(false).run(&pool, &key(&value), "body", perform).await?;
            assert_eq!(again.is_replayed(), place == "COMMIT", "{state}, {place}");
        }
    }
    Ok(())
}

/// PgCat and PgDog say so of a connection that they have lost, also when the server has executed the COMMIT.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_commit_that_a_pooler_answers_with_58000_took_effect_in_every_mode(direct: PgPool) -> anyhow::Result<()> {
    create_effects(&direct).await;
    let proxy = Proxy::before(&direct.connect_options()).await?;
    let pool = pool_of(2, &proxy.options).await;
    let assert_is_told = |mode: &str, error: Error| {
        assert!(error.is_transient() && sqlstate(&error).as_deref() == Some("58000"), "{mode}: {error:?}");
    };
    for mode in ["run", "ensure", "isolated", "mark", "mark many"] {
        clear(&direct).await;
        for asked in ["first", "again"] {
            let options = Idempotency::new();
            let perform = async |conn: &mut PgConnection| leave_effect(conn, mode).await;
            if mode == "run" {
                proxy.answer("COMMIT", "58000", usize::from(asked == "first"));
                match options.run(&pool, &key("a"), "body", perform).await {
                    Err(error) if asked == "first" => assert_is_told(mode, error),
                    called => assert!(called?.is_replayed(), "{mode}"),
                }
                continue;
            }
            let mut tx = pool.begin().await?;
            let is_replayed = match mode {
                "ensure" => options.ensure(&mut tx, &key("a"), "body", perform).await?.is_replayed(),
                "isolated" => {
                    let perform = async |conn: &mut PgConnection| leave_effect(conn, mode).await.map(Verdict::Keep);
                    options.ensure_isolated(&mut tx, &key("a"), "body", perform).await?.is_replayed()
                }
                mode => {
                    let marks = MarkOptions::new(HOUR);
                    let marked = match mode {
                        "mark" => marks.mark(&mut tx, &key("a")).await?,
                        _ => marks.mark_many(&mut tx, &[key("a")]).await?[0],
                    };
                    if marked == Marked::First {
                        leave_effect(&mut tx, mode).await?;
                    }
                    marked == Marked::Duplicate
                }
            };
            assert_eq!(is_replayed, asked == "again", "{mode}");
            proxy.answer("COMMIT", "58000", usize::from(asked == "first"));
            match commit(tx).await {
                Err(error) if asked == "first" => assert_is_told(mode, error),
                committed => committed?,
            }
        }
        assert_eq!((effects(&direct).await, records(&direct).await), (1, 1), "{mode}");
    }
    Ok(())
}

/// The COMMIT of the claim, of the response and of a step.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_lease_survives_a_commit_that_a_pooler_answers_with_58000(direct: PgPool) -> anyhow::Result<()> {
    create_effects(&direct).await;
    let cases =
        [AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS].into_iter().flat_map(|policy| [(policy, true), (policy, false)]);
    each(cases, async |(policy, of_claim)| {
        clear(&direct).await;
        let proxy = Proxy::before(&direct.connect_options()).await?;
        let pool = pool_of(3, &proxy.options).await;
        let worked = AtomicU32::new(0);
        let in_steps = matches!(policy, Policy::InSteps { .. });
        let run = async || {
            let work = async |lease: &Lease| -> Result<i64, Error> {
                worked.fetch_add(1, Ordering::SeqCst);
                if in_steps {
                    let mut told = 0;
                    while let Err(error) = step(lease, &proxy, told == 0).await {
                        assert!(error.is_transient() && told == 0, "{error:?}");
                        told += 1;
                    }
                    assert_eq!(told, 1, "the step has to be asked for again");
                }
                if !of_claim {
                    proxy.answer("COMMIT", "58000", 1);
                }
                Ok(7)
            };
            let waits = LeaseOptions::new(policy).on_duplicate(OnDuplicate::Wait(Duration::from_secs(30)));
            waits.run(&pool, &key("a"), "body", work).await
        };
        if of_claim {
            proxy.answer("COMMIT", "58000", 1);
            let error = run().await.expect_err("the claim got no answer");
            assert!(error.is_transient() && sqlstate(&error).as_deref() == Some("58000"), "{error:?}");
            assert_eq!(worked.load(Ordering::SeqCst), 0);
        }
        // The crate has released the claim, or does so while this call waits.
        assert_eq!(run().await?, Outcome::Performed(7), "{policy:?}");
        assert_eq!(run().await?, Outcome::Replayed(7), "{policy:?}");
        assert_eq!((worked.load(Ordering::SeqCst), effects(&direct).await), (1, i64::from(in_steps)), "{policy:?}");
        Ok(())
    })
    .await;
    Ok(())
}

async fn step(lease: &Lease, proxy: &Proxy, is_first: bool) -> Result<i64, Error> {
    let performed = lease.step("effect", async |conn| {
        proxy.answer("COMMIT", "58000", usize::from(is_first));
        leave_effect(conn, "step").await
    });
    performed.await
}

/// A consumer keeps its message. The server itself refuses here what the proxy refuses above.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_pool_that_cannot_log_in_is_transient_and_the_same_error_of_perform_is_not(
    pool: PgPool,
) -> anyhow::Result<()> {
    create_effects(&pool).await;
    for (state, refused) in [
        ("28000", options(&pool).username("nobody-has-this-name")),
        ("3D000", options(&pool).database("no-database-has-this-name")),
    ] {
        let refused = pool.options().clone().connect_lazy_with(refused);
        let called = once(&refused, &key("a"), "body").await;
        let work = async |_: &Lease| Ok::<i64, Error>(1);
        let leased = LeaseOptions::new(IN_STEPS).run(&refused, &key("a"), "body", work).await;
        for error in [called.expect_err("refused"), leased.expect_err("refused")] {
            assert_eq!((error.is_transient(), sqlstate(&error).as_deref()), (true, Some(state)), "{error:?}");
            let Error::Database(cause) = &error else { panic!("{error:?}") };
            let cause = cause.as_database_error().expect("an error of the server");
            assert_eq!(cause.downcast_ref::<PgDatabaseError>().code(), state, "the server's error");
        }
        let raise = format!("do $$ begin raise exception 'no' using errcode = '{state}'; end $$");
        let perform = async |conn: &mut PgConnection| -> Result<i64, Error> {
            conn.execute(AssertSqlSafe(raise)).await?;
            Ok(1)
        };
        let called = Idempotency::new().run(&pool, &key("a"), "body", perform).await;
        assert!(!called.expect_err("raised").is_transient());
    }
    Ok(())
}

/// How a connection loses its statements, and what the server then says.
const LOSSES: [(&str, &str); 3] = [
    ("26000", "deallocate all"),
    ("26000", "discard all"),
    // sqlx counts the names of its statements up.
    (
        "42P05",
        "do $$ begin
            for n in 1 .. 200 loop
                if not exists (select from pg_prepared_statements where name = format('sqlx_s_%s', n)) then
                    execute format('prepare sqlx_s_%s as select 1', n);
                end if;
            end loop;
        end $$",
    ),
];

#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_connection_of_the_pool_that_has_lost_its_statements_fails_one_call(other: PgPool) -> anyhow::Result<()> {
    create_effects(&other).await;
    each(LOSSES, async |(state, lose)| {
        for leased in [false, true] {
            clear(&other).await;
            let pool = pool_of(1, &other.connect_options()).await;
            let call = async |value: &str| -> Result<bool, Error> {
                if leased {
                    let work = async |_: &Lease| Ok::<i64, Error>(1);
                    let ran = LeaseOptions::new(AT_LEAST_ONCE).run(&pool, &key(value), "body", work).await?;
                    return Ok(ran.is_replayed());
                }
                let perform = async |conn: &mut PgConnection| leave_effect(conn, value).await;
                Ok(Idempotency::new().run(&pool, &key(value), "body", perform).await?.is_replayed())
            };
            // The statements of the first call are prepared, except for a name that is taken later.
            if state == "26000" {
                assert!(!call("prepares").await?);
            }
            pool.execute(lose).await?;
            let error = call("a").await.expect_err(lose);
            assert_eq!((error.is_transient(), sqlstate(&error).as_deref()), (true, Some(state)), "{lose}: {error:?}");
            assert!(error.to_string().contains("poolers"), "{error}");
            assert!(!call("a").await?, "on another connection");
            assert!(call("a").await?);
        }
        Ok(())
    })
    .await;
    Ok(())
}

/// The crate may not close it. The caller's own statements work again, too.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn a_callers_connection_that_has_lost_its_statements_fails_one_call(pool: PgPool) -> anyhow::Result<()> {
    create_effects(&pool).await;
    each(["ensure", "isolated", "mark", "mark many"], async |door| {
        let mut conn = PgConnection::connect_with(&pool.connect_options()).await?;
        let call = async |conn: &mut PgConnection, value: &str| -> Result<(), Error> {
            let key = key(&format!("{door} {value}"));
            let perform = async |conn: &mut PgConnection| leave_effect(conn, value).await;
            let mut tx = conn.begin().await?;
            match door {
                "ensure" => {
                    let _ = Idempotency::new().ensure(&mut tx, &key, "body", perform).await?;
                }
                "isolated" => {
                    let perform = async |conn: &mut PgConnection| leave_effect(conn, value).await.map(Verdict::Keep);
                    let _ = Idempotency::new().ensure_isolated(&mut tx, &key, "body", perform).await?;
                }
                "mark" => {
                    let _ = MarkOptions::new(HOUR).mark(&mut tx, &key).await?;
                }
                _ => drop(MarkOptions::new(HOUR).mark_many(&mut tx, &[key]).await?),
            }
            commit(tx).await
        };
        let callers = async |conn: &mut PgConnection| sqlx::query_scalar::<_, i32>("select 7").fetch_one(conn).await;
        call(&mut conn, "prepares").await?;
        callers(&mut conn).await?;
        conn.execute("deallocate all").await?;
        let error = call(&mut conn, "a").await.expect_err("it is lost");
        assert_eq!((error.is_transient(), sqlstate(&error).as_deref()), (true, Some("26000")), "{door}: {error:?}");
        assert_eq!(callers(&mut conn).await?, 7, "{door}");
        call(&mut conn, "a").await?;
        Ok(())
    })
    .await;
    Ok(())
}

/// `perform` itself has removed the statements, and would do so again: a retry must not be asked for.
#[sqlx::test(migrator = "rig::strict::MIGRATOR")]
async fn statements_that_are_lost_inside_perform_are_a_mistake(other: PgPool) -> anyhow::Result<()> {
    create_effects(&other).await;
    let pool = pool_of(1, &other.connect_options()).await;
    let call = async |value: &str, loses: bool| {
        let perform = async |conn: &mut PgConnection| -> Result<i64, Error> {
            let id = leave_effect(&mut *conn, value).await?;
            if loses {
                conn.execute("deallocate all").await?;
            }
            Ok(id)
        };
        Idempotency::new().run(&pool, &key(value), "body", perform).await
    };
    let _ = call("prepares", false).await?;
    let error = call("a", true).await.expect_err("the completion is lost");
    assert_eq!((error.is_transient(), sqlstate(&error).as_deref()), (false, Some("26000")), "{error:?}");
    assert!(!call("a", false).await?.is_replayed(), "nothing was stored, and the connection is another one");
    assert_eq!(effects(&other).await, 2);
    Ok(())
}

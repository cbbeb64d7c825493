//! What is numbered, and how it is interrupted, whatever the service sends.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use idempotency_check::{Answer, Check, Interruption, Report, Verdict};
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool, Postgres, Transaction};
use tokio::sync::{OnceCell, watch};

use crate::shop::create;
use crate::support::{EFFECTS, url, with};

fn messages(report: &Report) -> Vec<&str> {
    report.messages.iter().map(|message| &*message.sql).collect()
}

async fn on(pool: &PgPool) -> anyhow::Result<Check> {
    create(pool).await?;
    Ok(Check::new(url(&pool.connect_options())).effects(EFFECTS))
}

#[sqlx::test]
async fn the_data_of_a_copy_may_be_lost(pool: PgPool) -> anyhow::Result<()> {
    let check = on(&pool).await?.call(async |database: String, key: String| {
        let mut connection = PgConnection::connect(&database).await?;
        let mut tx = connection.begin().await?;
        let claim = format!("insert into keys (key, request) values ('{key}', '') on conflict do nothing");
        if sqlx::raw_sql(AssertSqlSafe(claim)).execute(&mut *tx).await?.rows_affected() == 1 {
            let mut copy = tx.copy_in_raw("copy payments (amount) from stdin").await?;
            copy.send(&b"60\n40\n"[..]).await?;
            copy.finish().await?;
        }
        tx.commit().await?;
        anyhow::Ok(Answer::new(201, "paid"))
    });
    let report = check.run().await?;
    assert!(report.findings.is_empty(), "{report}");
    // The key is a literal, and the message is found again with another one.
    let claim = "insert into keys (key, request) values ('{key}', '') on conflict do nothing";
    let copy = ["copy payments (amount) from stdin", "end of the data of COPY"];
    assert_eq!(messages(&report), ["BEGIN", claim, copy[0], copy[1], "COMMIT"]);
    assert!(report.tries.iter().all(|it| it.reached), "{report}");
    Ok(())
}

#[sqlx::test]
async fn a_simple_query_of_several_statements_is_one_message(pool: PgPool) -> anyhow::Result<()> {
    let check = on(&pool).await?.call(async |database: String, _: String| {
        let mut connection = PgConnection::connect(&database).await?;
        let pay = "begin; insert into payments (amount) values (100); commit";
        connection.execute(pay).await?;
        anyhow::Ok(Answer::new(201, "paid"))
    });
    let report = check.run().await?;
    assert_eq!(messages(&report), ["begin; insert into payments (amount) values (100); commit"]);
    // Without a key, each retry is a second payment.
    let lost = with(&report, Verdict::TwoEffects);
    assert!(lost.iter().any(|it| it.check == Some("again")), "{report}");
    Ok(())
}

#[sqlx::test]
async fn work_that_the_idle_service_does_too_is_not_numbered(pool: PgPool) -> anyhow::Result<()> {
    async fn work(pool: PgPool) -> sqlx::Result<()> {
        loop {
            let mut tx = pool.begin().await?;
            sqlx::query("select amount from payments order by id limit 1 for update").fetch_optional(&mut *tx).await?;
            tx.commit().await?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    let service = Arc::new(OnceCell::new());
    let check = on(&pool).await?.call(async move |database: String, key: String| {
        let start = async || {
            let pool = PgPool::connect(&database).await?;
            // Each end of a connection ends the work; a service would begin it again.
            tokio::spawn({
                let pool = pool.clone();
                async move { while work(pool.clone()).await.is_err() {} }
            });
            anyhow::Ok(pool)
        };
        let pool = service.get_or_try_init(start).await?;
        let mut tx: Transaction<'_, Postgres> = pool.begin().await?;
        let claim = sqlx::query("insert into keys (key, request) values ($1, '') on conflict do nothing").bind(key);
        if claim.execute(&mut *tx).await?.rows_affected() == 1 {
            sqlx::query("insert into payments (amount) values (100)").execute(&mut *tx).await?;
        }
        tx.commit().await?;
        anyhow::Ok(Answer::new(201, "paid"))
    });
    let report = check.run().await?;
    assert!(report.findings.is_empty(), "{report}");
    let foreground: Vec<_> = messages(&report).into_iter().filter(|sql| !sql.starts_with("prepare: ")).collect();
    // BEGIN is the job's as well; whose transaction it was, its second statement shows.
    let claim = "insert into keys (key, request) values ($1, '') on conflict do nothing";
    assert_eq!(foreground, [claim, "insert into payments (amount) values (100)", "COMMIT"], "{report}");
    assert!(report.notes.iter().any(|note| note.contains("statements that the idle service sends by itself")));
    Ok(())
}

/// A service that keeps its answers in memory, before they are committed.
#[sqlx::test]
async fn a_duplicate_that_is_answered_before_the_commit_was_promised_too_much(pool: PgPool) -> anyhow::Result<()> {
    let answers = Arc::new(Mutex::new(HashMap::<String, i64>::new()));
    let check = on(&pool).await?.call(async move |database: String, key: String| {
        let known = answers.lock().expect("no panic").get(&key).copied();
        if let Some(id) = known {
            return anyhow::Ok(Answer::new(201, id.to_string()));
        }
        let mut connection = PgConnection::connect(&database).await?;
        let mut tx = connection.begin().await?;
        let payment = sqlx::query_scalar("insert into payments (amount) values (100) returning id");
        let id: i64 = payment.fetch_one(&mut *tx).await?;
        answers.lock().expect("no panic").insert(key, id);
        tx.commit().await?;
        Ok(Answer::new(201, id.to_string()))
    });
    let report = check.run().await?;
    let promised = with(&report, Verdict::NoEffectButSuccess);
    let held = promised.iter().find(|it| it.interruption == Some(Interruption::Duplicate));
    let held = held.unwrap_or_else(|| panic!("{report}"));
    assert_eq!(held.detail, "the duplicate was told of success while nothing was committed");
    // The retry after a lost COMMIT is told of a payment that never was.
    assert!(promised.iter().any(|it| it.interruption == Some(Interruption::LostBefore)), "{report}");
    Ok(())
}

#[sqlx::test]
async fn a_replay_with_other_bytes_is_another_answer(pool: PgPool) -> anyhow::Result<()> {
    let check = on(&pool).await?.call(async |database: String, key: String| {
        let mut connection = PgConnection::connect(&database).await?;
        let mut tx = connection.begin().await?;
        let claim = sqlx::query("insert into keys (key, request) values ($1, '') on conflict do nothing").bind(key);
        let is_first = claim.execute(&mut *tx).await?.rows_affected() == 1;
        if is_first {
            sqlx::query("insert into payments (amount) values (100)").execute(&mut *tx).await?;
        }
        tx.commit().await?;
        anyhow::Ok(Answer::new(201, if is_first { r#"{"b":1,"a":2}"# } else { r#"{"a": 2, "b": 1}"# }))
    });
    let report = check.run().await?;
    let other = with(&report, Verdict::OtherAnswer);
    let again = other.iter().find(|it| it.check == Some("again")).unwrap_or_else(|| panic!("{report}"));
    assert!(again.detail.contains(r#"{"b":1,"a":2}, a later one {"a": 2, "b": 1}"#), "{}", again.detail);
    assert_eq!(with(&report, Verdict::TwoEffects).len(), 0, "{report}");
    Ok(())
}

#[sqlx::test]
async fn a_form_that_varies_without_an_interruption_is_not_compared(pool: PgPool) -> anyhow::Result<()> {
    let check = on(&pool).await?.call(async |database: String, key: String| {
        let mut connection = PgConnection::connect(&database).await?;
        let mut tx = connection.begin().await?;
        let claim = sqlx::query("insert into keys (key, request) values ($1, '') on conflict do nothing").bind(&key);
        if claim.execute(&mut *tx).await?.rows_affected() == 1 {
            sqlx::query("insert into payments (amount) values (100)").execute(&mut *tx).await?;
        }
        tx.commit().await?;
        anyhow::Ok(Answer::new(201, format!("{{\"{key}\":\"paid\"}}")))
    });
    let report = check.only(1, Interruption::LostBefore).run().await?;
    assert!(report.findings.is_empty() && report.tries[0].reached, "{report}");
    let note = "the answers to two undisturbed requests differ in their form, so no form is compared with theirs";
    assert!(report.notes.iter().any(|it| it == note), "{report}");
    Ok(())
}

#[sqlx::test]
async fn an_effect_after_the_answer_is_charged_to_its_own_try(pool: PgPool) -> anyhow::Result<()> {
    let check = on(&pool).await?.call(async |database: String, key: String| {
        let mut connection = PgConnection::connect(&database).await?;
        sqlx::query("insert into payments (amount) values (100)").execute(&mut connection).await?;
        let again = sqlx::query_scalar::<_, i64>("select count(*) from keys where key = $1").bind(&key);
        if again.fetch_one(&mut connection).await? == 0 {
            tokio::spawn(async move {
                let late = "with later as (select pg_sleep(0.2)) insert into payments (amount) select 1 from later";
                let _ = sqlx::query(late).execute(&mut connection).await;
            });
        }
        anyhow::Ok(Answer::new(201, "paid"))
    });
    let report = check.only(1, Interruption::HangUp).run().await?;
    // The request is settled when its last statement has ended, and so its undisturbed effect contains both.
    assert_eq!(report.tries[0].expected, [["+2", "+101"]], "{report}");
    Ok(())
}

/// Another process of the service runs it, when the last try is over.
async fn job(mut is_over: watch::Receiver<bool>, pool: PgPool, sql: &'static str, key: String) -> anyhow::Result<()> {
    is_over.wait_for(|is_over| *is_over).await?;
    sqlx::query(sql).bind(key).execute(&pool).await?;
    Ok(())
}

/// Becomes true when the check waits for late effects.
fn when_over(check: Check) -> (Check, watch::Receiver<bool>) {
    let (tell, is_over) = watch::channel(false);
    let progress = move |line: &str| {
        tell.send_if_modified(|is_over| {
            *is_over |= line == "waiting for late effects";
            *is_over
        });
    };
    (check.progress(progress), is_over)
}

#[sqlx::test]
async fn a_second_effect_after_the_last_try_is_found(pool: PgPool) -> anyhow::Result<()> {
    let jobs = pool.clone();
    let (check, is_over) = when_over(on(&pool).await?);
    let check = check.call(async move |database: String, key: String| {
        let mut connection = PgConnection::connect(&database).await?;
        let mut tx = connection.begin().await?;
        let claim = sqlx::query("insert into keys (key, request) values ($1, '') on conflict do nothing").bind(&key);
        if claim.execute(&mut *tx).await?.rows_affected() == 1 {
            sqlx::query("insert into payments (amount) values (100)").execute(&mut *tx).await?;
        } else {
            let pay = "insert into payments (amount) select 100 from keys where key = $1";
            tokio::spawn(job(is_over.clone(), jobs.clone(), pay, key));
        }
        tx.commit().await?;
        anyhow::Ok(Answer::new(201, "paid"))
    });
    let report = check.only(1, Interruption::HangUp).run().await?;
    assert_eq!(with(&report, Verdict::TwoEffects).len(), 1, "{report}");
    assert_eq!(report.tries[0].effect, [["+2", "+200"]], "{report}");
    Ok(())
}

#[sqlx::test]
async fn a_late_effect_of_every_request_is_no_second_one(pool: PgPool) -> anyhow::Result<()> {
    let (jobs, of_the_key) = (pool.clone(), "select count(*), count(answer) from keys where key = '{key}'");
    let (check, is_over) = when_over(on(&pool).await?);
    let check = check.effects(of_the_key).call(async move |database: String, key: String| {
        let mut connection = PgConnection::connect(&database).await?;
        let claim = sqlx::query("insert into keys (key, request) values ($1, '') on conflict do nothing").bind(&key);
        if claim.execute(&mut connection).await?.rows_affected() == 1 {
            let settle = "update keys set answer = 'settled' where key = $1";
            tokio::spawn(job(is_over.clone(), jobs.clone(), settle, key));
        }
        anyhow::Ok(Answer::new(201, "paid"))
    });
    let report = check.only(1, Interruption::LostBefore).run().await?;
    assert!(report.findings.is_empty(), "{report}");
    let it = &report.tries[0];
    assert!(it.expected == [["+1", "="]] && it.effect == [["+1", "+1"]], "{report}");
    let note = "a late change made the effect of an undisturbed request +1 +1";
    assert!(report.notes.iter().any(|it| it == note), "{report}");
    Ok(())
}

//! The settings that an administrator may choose for a database: under each, every door of the crate answers as usual,
//! or as the table says.
//!
//! Left out are those that sqlx needs as it sets them (`client_encoding`).

use std::cell::Cell;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use pg_idempotency::lease::{Finding, InDoubt, Lease, LeaseOptions, Visit};
use pg_idempotency::mark::{MarkOptions, Marked};
use pg_idempotency::operator::{self, State};
use pg_idempotency::testing::{age, expire, lapse};
use pg_idempotency::{
    Error, Fingerprint, Idempotency, Misuse, OnEscape, Outcome, SettleError, SetupError, Verdict, any_language_sql,
    commit, ensure_idempotent, migrate, migrate_any_language, protect, schema_sql, unprotect,
};
use rig::functions;
use rig::lease::{AT_LEAST_ONCE, AT_MOST_ONCE, IN_STEPS};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, PgPool};

use crate::lease::reconcile::{self, pass_time, reconciler};
use crate::lease::resume::{abandoned, leasing};
use crate::support::{in_turkish, janitor, key, options, outside, pool_of};

const HOUR: Duration = Duration::from_secs(3600);

/// What a setting legitimately changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Usual,
    /// `health` warns of it.
    Warning(&'static str),
    /// No trigger of the protection fires.
    Unprotected,
    /// Nothing is written.
    ReadOnly,
}
use Expected::{ReadOnly, Unprotected, Usual, Warning};

/// Under which setting.
struct Setting {
    name: &'static str,
    value: &'static str,
    expected: Expected,
}

const fn usual(name: &'static str, value: &'static str) -> Setting {
    Setting { name, value, expected: Usual }
}

/// sqlx sends these at the start of a session, so each connection sets them again.
const SENT_BY_SQLX: [&str; 3] = ["DateStyle", "TimeZone", "extra_float_digits"];

const FORMS: &[Setting] = &[
    usual("bytea_output", "escape"),
    usual("standard_conforming_strings", "off"),
    usual("escape_string_warning", "off"),
    usual("backslash_quote", "on"),
    usual("backslash_quote", "off"),
    usual("quote_all_identifiers", "on"),
    usual("transform_null_equals", "on"),
    usual("array_nulls", "off"),
    usual("xmlbinary", "hex"),
    usual("xmloption", "document"),
    usual("restrict_nonsystem_relation_kind", "'view, foreign-table'"),
];

const TIMES: &[Setting] = &[
    usual("DateStyle", "'SQL, DMY'"),
    usual("DateStyle", "'German, YMD'"),
    usual("DateStyle", "'Postgres, MDY'"),
    usual("IntervalStyle", "postgres"),
    usual("IntervalStyle", "postgres_verbose"),
    usual("IntervalStyle", "sql_standard"),
    usual("IntervalStyle", "iso_8601"),
    usual("TimeZone", "'Australia/Lord_Howe'"),
    usual("TimeZone", "'<+1234>-12:34'"),
];

const NUMBERS: &[Setting] = &[
    usual("extra_float_digits", "0"),
    usual("extra_float_digits", "-15"),
    usual("row_security", "off"),
    usual("search_path", "''"),
    usual("search_path", "pg_temp, \"no such schema\", public"),
    usual("check_function_bodies", "off"),
    usual("client_min_messages", "error"),
    usual("client_min_messages", "debug1"),
];

const TRANSACTIONS: &[Setting] = &[
    usual("default_transaction_isolation", "'read uncommitted'"),
    usual("default_transaction_isolation", "'repeatable read'"),
    usual("default_transaction_isolation", "serializable"),
    usual("default_transaction_deferrable", "on"),
    Setting { name: "default_transaction_read_only", value: "on", expected: ReadOnly },
    Setting { name: "session_replication_role", value: "replica", expected: Unprotected },
    usual("session_replication_role", "local"),
    Setting { name: "idempotency.claim", value: "exempt", expected: Unprotected },
    Setting { name: "idempotency.claim", value: "'step 1'", expected: Unprotected },
];

const TIMEOUTS: &[Setting] = &[
    usual("lock_timeout", "'1ms'"),
    usual("lock_timeout", "'3d'"),
    usual("statement_timeout", "'1min'"),
    usual("idle_in_transaction_session_timeout", "'1min'"),
    usual("idle_session_timeout", "'1min'"),
    usual("transaction_timeout", "'1min'"),
    usual("deadlock_timeout", "'1ms'"),
    usual("client_connection_check_interval", "'1ms'"),
    Setting { name: "synchronous_commit", value: "off", expected: Warning("not_durable") },
    usual("synchronous_commit", "local"),
];

const PLANS: &[Setting] = &[
    usual("plan_cache_mode", "force_generic_plan"),
    usual("plan_cache_mode", "force_custom_plan"),
    usual("jit_above_cost", "0"),
    usual("enable_seqscan", "off"),
    usual("enable_indexscan", "off"),
    usual("enable_indexonlyscan", "off"),
    usual("enable_bitmapscan", "off"),
    usual("enable_nestloop", "off"),
    usual("enable_hashjoin", "off"),
    usual("enable_mergejoin", "off"),
    usual("enable_material", "off"),
    usual("enable_memoize", "off"),
    usual("enable_sort", "off"),
    usual("enable_hashagg", "off"),
];

const PARALLEL: &[Setting] = &[
    usual("force_parallel_mode", "on"),
    usual("force_parallel_mode", "regress"),
    usual("debug_parallel_query", "on"),
    usual("debug_parallel_query", "regress"),
    usual("parallel_setup_cost", "0"),
    usual("constraint_exclusion", "on"),
    usual("join_collapse_limit", "1"),
    usual("work_mem", "'64kB'"),
];

const PLPGSQL: &[Setting] = &[
    usual("plpgsql.extra_errors", "'all'"),
    usual("plpgsql.extra_warnings", "'all'"),
    usual("plpgsql.variable_conflict", "use_variable"),
    usual("plpgsql.variable_conflict", "use_column"),
    usual("plpgsql.check_asserts", "off"),
    usual("plpgsql.print_strict_params", "on"),
];

/// The answer of a door with its name, if it is a mistake.
async fn door<T>(name: &str, answer: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    answer.await.with_context(|| format!("at the door {name}"))
}

/// Leaves an effect, whatever `search_path` is.
async fn leave(conn: &mut PgConnection, note: &str) -> Result<i64, Error> {
    let insert = "insert into public.effect (note) values ($1::text) returning id";
    Ok(sqlx::query_scalar(insert).bind(note).fetch_one(conn).await?)
}

/// The same call twice: it performs, and then replays.
async fn once<T, F>(call: impl Fn() -> F) -> anyhow::Result<()>
where
    T: PartialEq + std::fmt::Debug,
    F: Future<Output = Result<Outcome<T>, Error>>,
{
    let (first, second) = (call().await?, call().await?);
    ensure!(!first.is_replayed() && second.is_replayed(), "{first:?}, and then {second:?}");
    ensure!(first.into_inner() == second.into_inner(), "another response is replayed");
    Ok(())
}

/// A database with a setting, as a service sees it, and as this test sees it without the setting.
struct Doors<'a> {
    pool: &'a PgPool,
    plain: &'a PgPool,
    expected: Expected,
}

impl Doors<'_> {
    /// One effect of this note, and then none.
    async fn take_one_effect(&self, note: &str) -> anyhow::Result<()> {
        let notes: Vec<String> = sqlx::query_scalar("select note from effect").fetch_all(self.plain).await?;
        ensure!(notes == [note], "the effects are {notes:?}");
        outside(self.plain, "truncate effect").await;
        Ok(())
    }

    async fn warnings(&self, pool: &PgPool) -> anyhow::Result<Vec<&'static str>> {
        let warnings = operator::health(pool, HOUR).await?;
        Ok(warnings.iter().map(|warning| warning.name()).collect())
    }

    async fn all(&self) -> anyhow::Result<()> {
        door("migrate", self.migrate()).await?;
        door("schema_sql", self.schema_sql()).await?;
        door("protect", self.protect()).await?;
        door("health", self.health()).await?;
        door("run", self.run()).await?;
        door("ensure", self.ensure()).await?;
        door("ensure_isolated", self.ensure_isolated()).await?;
        door("mark", self.mark()).await?;
        door("leases", self.leases()).await?;
        door("steps", self.steps()).await?;
        door("an operator's decisions", self.decisions()).await?;
        door("the reconciler", self.reconciler()).await?;
        door("resume_one", self.resume_one()).await?;
        door("the SQL functions", self.functions()).await?;
        door("stats", self.stats()).await?;
        door("the janitor", self.janitor()).await?;
        door("unprotect", self.unprotect()).await
    }

    async fn migrate(&self) -> anyhow::Result<()> {
        migrate(self.pool).await.context("the first")?;
        migrate(self.pool).await.context("the second")?;
        migrate_any_language(self.pool).await.context("the SQL functions")
    }

    async fn schema_sql(&self) -> anyhow::Result<()> {
        self.plain.execute("drop schema idempotency cascade").await?;
        for printed in [schema_sql(), any_language_sql(), any_language_sql()] {
            self.pool.execute(AssertSqlSafe(printed)).await?;
        }
        migrate_any_language(self.pool).await?;
        self.pool.execute(rig::strict::SQL).await.context("strict.sql")?;
        Ok(())
    }

    async fn protect(&self) -> anyhow::Result<()> {
        let trigger = async || -> anyhow::Result<i64> {
            let trigger = "select oid::int8 from pg_trigger where tgrelid = 'effect'::regclass::oid";
            Ok(sqlx::query_scalar(trigger).fetch_one(self.plain).await?)
        };
        protect(self.pool, "public.effect", OnEscape::Refuse).await?;
        let created = trigger().await?;
        protect(self.pool, "public.effect", OnEscape::Refuse).await?;
        ensure!(trigger().await? == created, "the second created the trigger again");
        let protected = operator::protected(self.pool).await?;
        // The server quotes the names that it gives as its settings say.
        let protected: Vec<_> = protected.iter().map(|(table, how)| (table.replace('"', ""), *how)).collect();
        ensure!(protected == [("public.effect".to_owned(), OnEscape::Refuse)], "it lists {protected:?}");
        let escape = leave(&mut *self.pool.acquire().await?, "escaped").await;
        match escape {
            Ok(_) if self.expected == Unprotected => self.take_one_effect("escaped").await,
            Err(Error::Database(error))
                if self.expected != Unprotected
                    && error.as_database_error().and_then(|error| error.code()).as_deref() == Some("IK006") =>
            {
                Ok(())
            }
            other => anyhow::bail!("a write outside gives {other:?}"),
        }
    }

    async fn health(&self) -> anyhow::Result<()> {
        let (mut usual, found) = (self.warnings(self.plain).await?, self.warnings(self.pool).await?);
        if let Warning(name) = self.expected {
            ensure!(found.contains(&name), "there is no warning {name}");
        } else {
            usual.retain(|name| *name != "not_durable" || found.contains(name));
            ensure!(found == usual, "it warns of {found:?}, and usually of {usual:?}");
        }
        Ok(())
    }

    async fn run(&self) -> anyhow::Result<()> {
        for replay_first in [false, true] {
            let way = Idempotency::new().replay_first(replay_first);
            let key = key(&format!("{way:?}"));
            let call = || way.run(self.pool, &key, "body", async |conn: &mut PgConnection| leave(conn, "run").await);
            once(call).await.with_context(|| format!("{way:?}"))?;
            self.take_one_effect("run").await?;
            expire(self.pool, &key).await.context("expire")?;
            once(call).await.with_context(|| format!("{way:?}, expired"))?;
            self.take_one_effect("run").await?;
            let reused =
                way.run(self.pool, &key, "another", async |_| -> Result<i64, Error> { panic!("reused") }).await;
            ensure!(matches!(reused, Err(Error::KeyReused { .. })), "another body gives {reused:?}");
        }
        Ok(())
    }

    async fn ensure(&self) -> anyhow::Result<()> {
        once(async || {
            let mut tx = self.pool.begin().await?;
            let perform = async |conn: &mut PgConnection| leave(conn, "ensure").await;
            let outcome = ensure_idempotent(&mut tx, &key("ensure"), "body", perform).await?;
            commit(tx).await?;
            Ok(outcome)
        })
        .await?;
        self.take_one_effect("ensure").await
    }

    async fn ensure_isolated(&self) -> anyhow::Result<()> {
        for undone in [false, true] {
            once(async || {
                let mut tx = self.pool.begin().await?;
                let perform = async |conn: &mut PgConnection| -> Result<_, Error> {
                    let id = leave(conn, "isolated").await?;
                    Ok(if undone { Verdict::Undo(id) } else { Verdict::Keep(id) })
                };
                let key = key(&format!("isolated {undone}"));
                let outcome = Idempotency::new().ensure_isolated(&mut tx, &key, "body", perform).await?;
                commit(tx).await?;
                Ok(outcome)
            })
            .await?;
        }
        self.take_one_effect("isolated").await
    }

    async fn mark(&self) -> anyhow::Result<()> {
        let marking = MarkOptions::new(HOUR);
        let keys = ["marked", "other"].map(key);
        let mut tx = self.pool.begin().await?;
        ensure!(marking.mark(&mut tx, &keys[0]).await? == Marked::First, "a new key");
        commit(tx).await?;
        let mut tx = self.pool.begin().await?;
        ensure!(marking.mark(&mut tx, &keys[0]).await? == Marked::Duplicate, "a marked key");
        let many = marking.mark_many(&mut tx, &keys).await?;
        ensure!(many == [Marked::Duplicate, Marked::First], "mark_many gives {many:?}");
        Ok(commit(tx).await?)
    }

    async fn leases(&self) -> anyhow::Result<()> {
        let policies = [AT_LEAST_ONCE, IN_STEPS, AT_MOST_ONCE];
        for policy in policies {
            let (key, performed) = (key(&format!("{policy:?}")), Cell::new(0));
            once(|| async {
                let work = async |lease: &Lease| {
                    performed.set(performed.get() + 1);
                    Ok::<_, Error>((lease.attempt(), lease.downstream_key()))
                };
                LeaseOptions::new(policy).run(self.pool, &key, "body", work).await
            })
            .await
            .with_context(|| format!("{policy:?}"))?;
            ensure!(performed.get() == 1, "{policy:?}: performed {} times", performed.get());
        }
        Ok(())
    }

    /// The first attempt ends after all steps, and the second one finishes.
    async fn steps(&self) -> anyhow::Result<()> {
        let sent = Cell::new(0);
        let count = || {
            sent.set(sent.get() + 1);
            Ok::<_, Error>(sent.get())
        };
        for attempt in [1, 2] {
            let work = async |lease: &Lease| -> Result<_, Error> {
                let row = lease.step("row", async |conn| leave(conn, "step").await).await?;
                let repeated = lease.step_at_least_once("repeated", async |_| count()).await?;
                let text = lease.step_at_most_once("text", async |_| count()).await?;
                if attempt == 1 {
                    Err(Error::Misuse(Misuse::NotInTransaction))
                } else {
                    Ok((row, repeated, text, lease.attempt()))
                }
            };
            let answer = LeaseOptions::new(IN_STEPS).run(self.pool, &key("steps"), "body", work).await;
            match answer {
                Err(Error::Misuse(Misuse::NotInTransaction)) if attempt == 1 => {}
                Ok(Outcome::Performed((_, 1, 2, 2))) if attempt == 2 => {}
                other => anyhow::bail!("attempt {attempt} gives {other:?}"),
            }
        }
        self.take_one_effect("step").await
    }

    async fn decisions(&self) -> anyhow::Result<()> {
        for resolved in [true, false] {
            let key = key(&format!("resolved: {resolved}"));
            reconcile::in_doubt(self.pool, key.value()).await;
            let waiting = operator::unsettled(self.pool, 10, None, Some(HOUR)).await.context("unsettled")?;
            ensure!(waiting.iter().map(|shown| &shown.key).eq([&key]), "unsettled lists {waiting:?}");
            let shown = operator::show(self.pool, &key).await.context("show")?.context("no record")?;
            ensure!(shown.state == State::Indeterminate && waiting[0].token == shown.token, "shown is {shown:?}");
            ensure!(shown.retention_left > Duration::from_secs(23 * 3600), "{shown:?}");
            if resolved {
                shown.resolve(self.pool, &"sent".to_owned(), HOUR).await.context("resolve")?;
            } else {
                // In a transaction of the operator.
                let mut tx = self.pool.begin().await?;
                shown.release(&mut tx, "not sent").await.context("release")?;
                pg_idempotency::commit(tx).await?;
            }
            let work = async |_: &Lease| Ok::<_, Error>("sent".to_owned());
            let outcome = reconcile::leasing().run(self.pool, &key, "body", work).await?;
            ensure!(outcome.is_replayed() == resolved, "after the decision a call gives {outcome:?}");
            let shown = operator::show(self.pool, &key).await?.context("no record")?;
            shown.forget(self.pool).await.context("forget")?;
        }
        Ok(())
    }

    async fn reconciler(&self) -> anyhow::Result<()> {
        reconcile::in_doubt(self.pool, "a").await;
        let visit = async |finding: fn() -> Finding| {
            reconciler().visit_one(self.pool, async |_: &InDoubt| Ok::<_, Error>(finding())).await
        };
        let noted = visit(|| panic!("too early")).await?;
        ensure!(noted == Visit::Noted, "the first visit gives {noted:?}");
        let early = visit(|| panic!("too early")).await?;
        ensure!(early == Visit::Nothing, "a visit before the quiet time gives {early:?}");
        let next = "select (probe -> 'next'::text)::float8 - extract(epoch from now())::float8
            from idempotency.record, jsonb_array_elements(probes -> 'of'::text) as probe";
        let next: f64 = sqlx::query_scalar(next).fetch_one(self.plain).await?;
        ensure!((1.0..=180.0).contains(&next), "the next probe is in {next} s");
        pass_time(self.plain).await;
        let unknown = visit(|| Finding::NoTrace).await?;
        ensure!(unknown == Visit::Undecided, "a probe without a trace gives {unknown:?}");
        pass_time(self.plain).await;
        let found = visit(|| Finding::took_effect(&"sent".to_owned()).expect("a text")).await?;
        ensure!(found == Visit::Resolved, "a probe that finds the effect gives {found:?}");
        let work = async |_: &Lease| -> Result<String, Error> { panic!("it is resolved") };
        let outcome = reconcile::leasing().run(self.pool, &key("a"), "body", work).await;
        ensure!(matches!(&outcome, Ok(Outcome::Replayed(answer)) if answer == "sent"), "a call gives {outcome:?}");
        Ok(())
    }

    async fn resume_one(&self) -> anyhow::Result<()> {
        abandoned(self.pool, "abandoned").await;
        let work = async |lease: &Lease, body: String| -> Result<String, Error> {
            lease.step("effect", async |conn| leave(conn, "resumed").await).await?;
            Ok(body)
        };
        let resumed = leasing().resume_one(self.pool, "operation", work).await?;
        ensure!(resumed.as_deref() == Some("body"), "{resumed:?}");
        let again = leasing().resume_one(self.pool, "operation", work).await?;
        ensure!(again.is_none(), "{again:?}");
        self.take_one_effect("resumed").await
    }

    async fn functions(&self) -> anyhow::Result<()> {
        let (fingerprint, body) = (Fingerprint::of_bytes(b"body"), b"a\\b\0c".as_slice());
        let headers = r#"[["content-type", "a\\b"]]"#;
        let mut conn = self.pool.acquire().await?;
        for outcome in ["performed", "replayed"] {
            let mut tx = conn.begin().await?;
            let answer = functions::ensure(&mut tx, &key("SQL"), fingerprint.as_bytes(), Some("1 second")).await?;
            if outcome == "performed" {
                ensure!(answer.token.is_some(), "a new key gives {answer:?}");
                leave(&mut tx, "SQL").await?;
                let response = (Some(201), Some(headers), Some(body));
                functions::complete(&mut tx, &key("SQL"), answer.token, response).await?;
            } else {
                ensure!(answer.outcome == "replayed" && answer.status == Some(201), "a stored key gives {answer:?}");
                ensure!(answer.body.as_deref() == Some(body), "the body is {:?}", answer.body);
            }
            tx.commit().await?;
        }
        self.take_one_effect("SQL").await
    }

    async fn stats(&self) -> anyhow::Result<()> {
        let (usual, found) = (operator::stats(self.plain).await?, operator::stats(self.pool).await?);
        ensure!(found.records > 0 && found.groups == usual.groups, "{found:?}, and usually {usual:?}");
        Ok(())
    }

    async fn janitor(&self) -> anyhow::Result<()> {
        let _ = Idempotency::new().run(self.pool, &key("old"), "body", async |_| Ok::<_, Error>(1)).await?;
        age(self.pool, &key("old"), Duration::from_secs(25 * 3600)).await.context("age")?;
        let swept = janitor(self.pool).sweep_once(100).await?;
        ensure!(swept.completed == 1 && swept.rows() == 1, "{swept:?}");
        Ok(())
    }

    async fn unprotect(&self) -> anyhow::Result<()> {
        unprotect(self.pool, "public.effect").await?;
        let protected = operator::protected(self.pool).await?;
        ensure!(protected.is_empty(), "it lists {protected:?}");
        leave(&mut *self.pool.acquire().await?, "outside").await?;
        self.take_one_effect("outside").await
    }

    /// The doors that only read are open, and the others write nothing.
    async fn read_only(&self) -> anyhow::Result<()> {
        migrate(self.plain).await?;
        protect(self.plain, "public.effect", OnEscape::Refuse).await?;
        reconcile::in_doubt(self.plain, "a").await;
        abandoned(self.plain, "abandoned").await;
        let shown = operator::show(self.plain, &key("a")).await?.context("no record")?;
        let records = "select jsonb_agg(record order by value)::text from idempotency.record";
        let before: String = sqlx::query_scalar(records).fetch_one(self.plain).await?;

        door("migrate", async { Ok(migrate(self.pool).await?) }).await?;
        door("health", self.health()).await?;
        door("stats", self.stats()).await?;
        door("show", async {
            ensure!(
                operator::show(self.pool, &key("a")).await?.is_some_and(|found| found.version() == shown.version())
            );
            Ok(())
        })
        .await?;
        door("unsettled", async {
            ensure!(operator::unsettled(self.pool, 10, None, None).await?.len() == 1);
            Ok(())
        })
        .await?;

        let perform = async |conn: &mut PgConnection| leave(conn, "read only").await;
        refused("run", Idempotency::new().run(self.pool, &key("new"), "body", perform).await)?;
        let mut tx = self.pool.begin().await?;
        refused("ensure", ensure_idempotent(&mut tx, &key("new"), "body", perform).await)?;
        tx.rollback().await?;
        let mut tx = self.pool.begin().await?;
        refused("mark", MarkOptions::new(HOUR).mark(&mut tx, &key("new")).await)?;
        tx.rollback().await?;
        let mut tx = self.pool.begin().await?;
        refused("mark_many", MarkOptions::new(HOUR).mark_many(&mut tx, &["new", "newer"].map(key)).await)?;
        tx.rollback().await?;
        let work = async |_: &Lease| -> Result<i64, Error> { panic!("it has no lease") };
        for policy in [AT_LEAST_ONCE, IN_STEPS, AT_MOST_ONCE] {
            let leased = LeaseOptions::new(policy).run(self.pool, &key("new"), "body", work).await;
            refused(&format!("{policy:?}"), leased)?;
        }
        let resumed = async |_: &Lease, _: String| -> Result<i64, Error> { panic!("it has no lease") };
        refused("resume_one", leasing().resume_one(self.pool, "operation", resumed).await)?;
        let looks_up = async |_: &InDoubt| -> Result<Finding, Error> { panic!("it is not noted") };
        refused("the reconciler", reconciler().visit_one(self.pool, looks_up).await)?;
        refused("resolve", shown.clone().resolve(self.pool, &1, HOUR).await.map_err(of_call))?;
        refused("release", shown.clone().release(self.pool, "").await.map_err(of_call))?;
        refused("forget", shown.forget(self.pool).await.map_err(of_call))?;
        refused("unprotect", unprotect(self.pool, "public.effect").await)?;
        refused("the janitor", janitor(self.pool).sweep_once(10).await)?;
        refused("lapse", lapse(self.pool, &key("a")).await)?;
        let after: String = sqlx::query_scalar(records).fetch_one(self.plain).await?;
        ensure!(after == before, "the records are {after}, and were {before}");
        Ok(())
    }
}

/// The error of a call behind that of a verb.
fn of_call(error: SettleError) -> Error {
    match error {
        SettleError::Other(error) => error,
        other => panic!("{other:?}"),
    }
}

/// A demoted primary says the same, so it is transient.
fn refused<T: std::fmt::Debug>(door: &str, answer: Result<T, impl Into<SetupError>>) -> anyhow::Result<()> {
    match answer.map_err(Into::into) {
        Err(error) if error.is_transient() && format!("{error:?}").contains("25006") => Ok(()),
        other => anyhow::bail!("at the door {door}: {other:?}"),
    }
}

/// Walks through all doors under each of these settings, which are those of the database meanwhile.
async fn walk(plain: PgPool, settings: &'static [Setting]) -> anyhow::Result<()> {
    plain.execute("create table effect (id bigint generated always as identity, note text not null)").await?;
    let database: String = sqlx::query_scalar("select quote_ident(current_database())").fetch_one(&plain).await?;
    let mut mistakes = Vec::new();
    for Setting { name, value, expected } in settings {
        // A setting of an extension is known once it is loaded.
        let known = "select $1 like '%.%' or exists (select from pg_settings where lower(name) = lower($1))";
        if !sqlx::query_scalar::<_, bool>(known).bind(name).fetch_one(&plain).await? {
            continue; // another major version has it
        }
        let set = format!("alter database {database} set {name} = {value}");
        plain.execute(AssertSqlSafe(set)).await?;
        let pool = PgPoolOptions::new().max_connections(2).after_connect(move |conn, _| {
            Box::pin(async move {
                if SENT_BY_SQLX.contains(name) {
                    conn.execute(AssertSqlSafe(format!("set {name} = {value}"))).await?;
                }
                Ok(())
            })
        });
        let pool = pool.connect_with(options(&plain)).await?;
        let doors = Doors { pool: &pool, plain: &plain, expected: *expected };
        if let Err(mistake) = if *expected == ReadOnly { doors.read_only().await } else { doors.all().await } {
            mistakes.push(format!("under {name} = {value}, {mistake:#}"));
        }
        pool.close().await;
        plain.execute(AssertSqlSafe(format!("alter database {database} reset all"))).await?;
        plain.execute("drop schema if exists idempotency cascade; truncate effect").await?;
    }
    plain.close().await;
    ensure!(mistakes.is_empty(), "{}", mistakes.join("\n"));
    Ok(())
}

/// In Turkish, the lower case of a keyword may be another word.
#[sqlx::test(migrations = false)]
async fn every_door_is_open_in_a_turkish_database(pool: PgPool) -> anyhow::Result<()> {
    let walked = in_turkish(&pool, async |plain| -> anyhow::Result<()> {
        plain.execute("create table effect (id bigint generated always as identity, note text not null)").await?;
        // `migrate` revokes the right to add triggers.
        plain.execute("alter default privileges grant all on tables to public").await?;
        door("migrate", async { Ok(migrate(plain).await?) }).await?;
        plain
            .execute("drop schema idempotency cascade; alter default privileges revoke all on tables from public")
            .await?;
        Doors { pool: plain, plain, expected: Usual }.all().await
    });
    walked.await.unwrap_or(Ok(()))
}

/// One test for each table, so that they run side by side.
macro_rules! tests {
    ($($test:ident: $settings:ident;)*) => {$(
        #[sqlx::test(migrations = false)]
        async fn $test(pool: PgPool) -> anyhow::Result<()> {
            // Not the pool itself, which opens a new connection for each statement: it would have the settings.
            walk(pool_of(2, &pool.connect_options()).await, $settings).await
        }
    )*};
}

tests! {
    every_door_is_open_under_each_form_of_text: FORMS;
    every_door_is_open_under_each_form_of_time: TIMES;
    every_door_is_open_under_each_form_of_numbers_and_each_search_path: NUMBERS;
    every_door_is_open_under_each_kind_of_transaction: TRANSACTIONS;
    every_door_is_open_under_each_time_out: TIMEOUTS;
    every_door_is_open_under_each_plan: PLANS;
    every_door_is_open_under_each_parallel_plan: PARALLEL;
    every_door_is_open_under_each_setting_of_plpgsql: PLPGSQL;
}

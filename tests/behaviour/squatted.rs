//! A role that may CREATE in the database, and was there before us or keeps a hand in the schema, runs nothing as the
//! roles that open a door of the crate. Its functions advance a sequence, which no rollback undoes.

use std::time::Duration;

use pg_idempotency::operator::{self, Shown, Warning};
use pg_idempotency::{
    Error, Incompatible, OnEscape, SettleError, SetupError, migrate, migrate_any_language, protect, schema_sql,
    unprotect,
};
use rig::database::{backend, until_blocked};
use rig::fixture::Fixture;
use sqlx::{AssertSqlSafe, Executor as _, PgConnection, PgPool};

use crate::support::{connect, in_turkish, janitor, key, options, pool_of};

/// The roles of one test. None of them is a superuser.
pub(crate) struct Roles {
    /// Owns the database.
    owner: String,
    service: String,
    /// May create schemas.
    mallory: String,
    /// May create schemas, and mallory has ADMIN OPTION on it.
    group: String,
}

impl Roles {
    async fn create(admin: &mut PgConnection) -> anyhow::Result<Self> {
        let process = backend(admin).await?;
        let name = |role: &str| format!("{role}_{process}");
        let roles =
            Self { owner: name("owner"), service: name("service"), mallory: name("mallory"), group: name("group") };
        let create = "
            create role @owner login; create role @service login; create role @mallory login; create role @group;
            grant @group to @mallory with admin option;
            alter database @database owner to @owner; grant create on database @database to @mallory, @group;
            create table orders (id int); alter table orders owner to @owner;
            set role @mallory;
            create schema lair; grant usage on schema lair to public;
            create sequence lair.bites; grant usage on sequence lair.bites to public;
            create function lair.bite() returns boolean language plpgsql as
                'begin perform pg_catalog.nextval(''lair.bites''); return true; end';
            create function lair.trap() returns trigger language plpgsql as
                'begin perform pg_catalog.nextval(''lair.bites''); return null; end';
            create function lair.trap_for_others() returns trigger language plpgsql as
                'begin
                    if current_user <> ''@mallory'' then perform pg_catalog.nextval(''lair.bites''); end if;
                    return null;
                end';
            reset role";
        roles.run(admin, create).await?;
        Ok(roles)
    }

    /// Runs SQL with the names of the roles for `@owner` and so on.
    async fn run(&self, conn: &mut PgConnection, sql: &str) -> anyhow::Result<()> {
        let database: String =
            sqlx::query_scalar("select quote_ident(current_database())").fetch_one(&mut *conn).await?;
        let sql = sql.replace("@database", &database).replace("@owner", &self.owner).replace("@service", &self.service);
        let sql = sql.replace("@mallory", &self.mallory).replace("@group", &self.group);
        conn.execute(AssertSqlSafe(&*sql))
            .await
            .map_err(|error| anyhow::anyhow!("{error}: ...{}", &sql[sql.len().saturating_sub(500)..]))?;
        Ok(())
    }

    async fn drop(&self, admin: &mut PgConnection) -> anyhow::Result<()> {
        self.run(
            admin,
            "reset role; drop schema if exists idempotency cascade; alter database @database owner to postgres;
             drop owned by @mallory, @group, @service, @owner cascade; drop role @mallory, @group, @service, @owner",
        )
        .await
    }

    /// Of the superuser, of the owner of the database and of the service.
    async fn pools(&self, pool: &PgPool) -> [(&'static str, PgPool); 3] {
        let of = async |role: &str| pool_of(1, &options(pool).username(role)).await;
        [
            ("the superuser", of("postgres").await),
            ("the owner", of(&self.owner).await),
            ("the service", of(&self.service).await),
        ]
    }
}

/// The SQL of a migration, to be run in a transaction of its own or in none.
fn printed() -> String {
    schema_sql().lines().filter(|line| !["begin;", "commit;"].contains(line)).collect::<Vec<_>>().join("\n")
}

const OPEN: &str =
    "grant usage on schema idempotency to public; grant select on all tables in schema idempotency to public";

/// The schema of a stranger: one read of it calls her function.
fn view() -> String {
    let printed = schema_sql();
    let checksum = printed.split("decode('").nth(2).and_then(|rest| rest.split('\'').next()).unwrap_or_default();
    format!(
        "set role @mallory; create schema idempotency;
         create view idempotency._sqlx_migrations as
            select 1::int8 as version, lair.bite() as success, decode('{checksum}', 'hex') as checksum;
         create view idempotency.record as select lair.bite() as mode; {OPEN}"
    )
}

/// Each is what it is, the SQL, and a word of the refusal.
fn squats() -> Vec<(&'static str, String, &'static str)> {
    let printed = printed();
    let bites = "
        create or replace function idempotency.protect(relation regclass, on_escape text default 'refuse')
            returns void language sql as 'select lair.bite()';
        create or replace function idempotency.unprotect(relation regclass)
            returns void language sql as 'select lair.bite()';
        create or replace function idempotency.with_partitions(relation regclass)
            returns setof oid language plpgsql as 'begin perform lair.bite(); end';
        create table lair.bait (id int);
        create trigger bait before insert on lair.bait execute function idempotency.on_escape()";
    let ours = |more: &str| format!("set role @owner; {printed}; {OPEN}; {more}; reset role");
    let given = |right: &str, more: &str| {
        ours(&format!(
            "grant {right} to @mallory; set role @mallory; {more}; set role @owner; revoke {right} from @mallory"
        ))
    };
    vec![
        ("a schema", view(), "owns schema idempotency"),
        (
            "a schema of a group that a stranger has granted",
            format!(
                "grant create on schema lair to @group; set role @group; {printed}; {OPEN}; {bites};
                 set role @mallory; grant @group to postgres, @owner, @service"
            ),
            "owns schema idempotency",
        ),
        (
            "a table",
            ours("reset role; alter table idempotency.record owner to @mallory"),
            "owns table idempotency.record,",
        ),
        (
            "a partition in another schema",
            ours(&format!(
                "{};
                 reset role; alter table idempotency.record_0 set schema lair; alter table lair.record_0 owner to @mallory",
                include_str!("../../migrations/partitions.sql")
            )),
            "owns table lair.record_0,",
        ),
        (
            "a function",
            given(
                "create on schema idempotency",
                "create function idempotency.\"`drop table orders`\"() returns int language sql as 'select 1'",
            ),
            "owns function idempotency.\"'drop table orders'\"(),",
        ),
        (
            "functions of an earlier release",
            given(
                "create on schema idempotency",
                "create function idempotency.version() returns int4 language sql as 'select 0';
                 create function idempotency.ensure(text) returns bool language sql as 'select lair.bite()'",
            ),
            "owns function idempotency.ensure(",
        ),
        ("the right to add functions", ours("grant create on schema idempotency to public"), "revoke create on schema"),
        (
            "the right to add triggers",
            ours("grant trigger on idempotency.record to @mallory"),
            "revoke TRIGGER on idempotency.record from mallory",
        ),
        (
            "the right to add foreign keys to the columns of the key",
            ours("grant references (scope, operation, value) on idempotency.record to public"),
            "revoke REFERENCES on idempotency.record from public",
        ),
        (
            "a foreign key",
            given(
                "references on idempotency.record",
                "create table lair.child (scope text, operation text, value text, foreign key (scope, operation, value)
                    references idempotency.record (scope, operation, value) on delete cascade);
                 create trigger trap after delete on lair.child for each row execute function lair.trap_for_others();
                 reset role;
                 insert into idempotency.record (mode, scope, operation, value, token, completed_at, expires_at)
                    values ('mark', 'hers', 'o', 'v', 1, now(), '2020-01-01');
                 insert into lair.child values ('hers', 'o', 'v')",
            ),
            "owns table lair.child,",
        ),
        (
            "a trigger",
            given(
                "trigger on idempotency.record",
                "create trigger bite before delete on idempotency.record execute function lair.trap()",
            ),
            "owns function lair.trap(),",
        ),
        (
            "a condition of a trigger",
            given(
                "trigger on idempotency.record",
                "create trigger bite before delete on idempotency.record when (lair.bite())
                    execute function suppress_redundant_updates_trigger()",
            ),
            "owns function lair.bite(),",
        ),
        (
            "a rule",
            ours("create rule bite as on delete to idempotency.record do also select lair.bite()"),
            "owns function lair.bite(),",
        ),
        (
            "a table that inherits",
            ours("reset role; create table lair.child () inherits (idempotency.record);
                  alter table lair.child owner to @mallory;
                  create trigger bite before delete on lair.child for each row execute function lair.trap()"),
            "owns table lair.child,",
        ),
    ]
}

const DOORS: [&str; 12] = [
    "migrate",
    "migrate_any_language",
    "protect",
    "unprotect",
    "health",
    "protected",
    "unsettled",
    "search",
    "show",
    "stats",
    "release",
    "sweep",
];

/// The same error as of a door that is a call.
fn in_a_call(error: SetupError) -> Error {
    match error {
        SetupError::Other(error) => error,
        error => Error::Database(sqlx::Error::Protocol(error.to_string())),
    }
}

async fn open(door: &str, pool: &PgPool) -> Result<Vec<Warning>, Error> {
    let key = key("a");
    match door {
        "migrate" => migrate(pool).await.map_err(in_a_call)?,
        "migrate_any_language" => migrate_any_language(pool).await.map_err(in_a_call)?,
        "protect" => protect(pool, "orders", OnEscape::Refuse).await.map_err(in_a_call)?,
        "unprotect" => unprotect(pool, "orders").await.map_err(in_a_call)?,
        "health" => return operator::health(pool, Duration::from_secs(3600)).await,
        "protected" => drop(operator::protected(pool).await?),
        "unsettled" => drop(operator::unsettled(pool, 10, None, None).await?),
        "search" => drop(operator::search(pool, None, None, "", 10, Duration::from_secs(60)).await?),
        "show" => drop(operator::show(pool, &key).await?),
        "stats" => drop(operator::stats(pool).await?),
        _ => drop(janitor(pool).sweep_once(10).await?),
    }
    Ok(Vec::new())
}

/// A record as it was shown before the schema was dropped.
async fn shown_before(pool: &PgPool) -> anyhow::Result<Shown> {
    migrate(pool).await?;
    Fixture::released(&key("a"), "body")?.write(pool).await?;
    let shown = operator::show(pool, &key("a")).await?.expect("a record");
    pool.execute("drop schema idempotency cascade").await?;
    Ok(shown)
}

/// The door `release`. The record is not there.
async fn release(pool: &PgPool, shown: &Shown) -> Result<Vec<Warning>, Error> {
    match shown.clone().release(pool, "no effect").await {
        Err(SettleError::Other(error)) => Err(error),
        Err(SettleError::Changed) => Ok(Vec::new()),
        other => panic!("{other:?}"),
    }
}

#[sqlx::test(migrations = false)]
async fn no_door_runs_the_code_of_a_stranger(pool: PgPool) -> anyhow::Result<()> {
    let shown = shown_before(&pool).await?;
    let mut admin = connect(&pool).await;
    let roles = Roles::create(&mut admin).await?;
    let pools = roles.pools(&pool).await;
    let mut wrong = Vec::new();
    for (squat, sql, says) in squats() {
        roles.run(&mut admin, &sql).await?;
        admin.execute("reset role").await?;
        for (role, pool) in &pools {
            for door in DOORS {
                let answer = if door == "release" { release(pool, &shown).await } else { open(door, pool).await };
                let said = match &answer {
                    Err(Error::Incompatible(Incompatible::Schema { problem, .. })) if door != "health" => {
                        problem.clone()
                    }
                    Ok(warnings)
                        if !warnings.is_empty()
                            && warnings.iter().all(|warning| warning.name() == "untrusted_schema") =>
                    {
                        warnings.iter().map(ToString::to_string).collect()
                    }
                    _ => String::new(),
                };
                if !said.contains(says) {
                    wrong.push(format!("{squat}, {role}, {door}: {answer:?}"));
                }
                let bites = "select case when is_called then last_value else 0 end from lair.bites";
                let bites: i64 = sqlx::query_scalar(bites).fetch_one(&mut admin).await?;
                if bites > 0 {
                    wrong.push(format!("{squat}, {role}, {door}: her function ran {bites} times"));
                    admin.execute("select setval('lair.bites', 1, false)").await?;
                }
            }
        }
        roles
            .run(
                &mut admin,
                "drop schema idempotency cascade; drop table if exists lair.bait, lair.child cascade;
                 revoke @group from postgres, @owner, @service cascade",
            )
            .await?;
    }
    for (_, pool) in pools {
        pool.close().await;
    }
    roles.drop(&mut admin).await?;
    assert!(wrong.is_empty(), "{}: {:#?}", wrong.len(), wrong);
    Ok(())
}

/// Default privileges give rights on each new schema and table of a role.
#[sqlx::test(migrations = false)]
async fn default_privileges_give_a_stranger_no_right_to_add_code(pool: PgPool) -> anyhow::Result<()> {
    let mut admin = connect(&pool).await;
    let roles = Roles::create(&mut admin).await?;
    let (_, owner) = roles.pools(&pool).await.into_iter().nth(1).expect("the owner");
    let privileges = "
        alter default privileges for role @owner grant all on schemas to @mallory;
        alter default privileges for role @owner grant all on tables to @mallory;
        alter default privileges for role @owner grant references on tables to public";
    roles.run(&mut admin, privileges).await?;
    let mut wrong = Vec::new();
    for round in ["the first", "the second"] {
        migrate(&owner).await?;
        for table in ["record", "_sqlx_migrations"] {
            let rights: Vec<String> = sqlx::query_scalar(
                "select acl.privilege_type from pg_class, aclexplode(relacl) as acl
                 where oid = ('idempotency.' || $1)::regclass::oid and acl.grantee <> relowner
                 union all
                 select acl.privilege_type from pg_namespace, aclexplode(nspacl) as acl
                 where nspname = 'idempotency' and acl.grantee <> nspowner",
            )
            .bind(table)
            .fetch_all(&mut admin)
            .await?;
            let adds_code = |right: &String| ["CREATE", "TRIGGER", "REFERENCES"].contains(&&**right);
            // The other rights are what the database's administrator wanted.
            if rights.iter().any(adds_code) || !rights.contains(&"SELECT".to_owned()) {
                wrong.push(format!("{round}, {table}: {rights:?}"));
            }
        }
    }
    owner.close().await;
    roles.drop(&mut admin).await?;
    assert!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

/// A `grant all` gives five rights to add code.
#[sqlx::test(migrations = false)]
async fn one_role_with_several_rights_is_one_warning_with_one_remedy(pool: PgPool) -> anyhow::Result<()> {
    let mut admin = connect(&pool).await;
    let roles = Roles::create(&mut admin).await?;
    let (_, owner) = roles.pools(&pool).await.into_iter().nth(1).expect("the owner");
    migrate(&owner).await?;
    let grants =
        "grant all on schema idempotency to @mallory; grant all on all tables in schema idempotency to @mallory;
        grant references (scope) on idempotency.record to @mallory; grant create on schema idempotency to @group";
    roles.run(&mut admin, grants).await?;
    let health = async || operator::health(&owner, Duration::from_secs(3600)).await;
    let said: Vec<String> = health().await?.iter().map(ToString::to_string).collect();
    let remedies: Vec<_> = said.iter().filter_map(|said| said.split('`').nth(1)).map(str::to_owned).collect();
    for remedy in &remedies {
        owner.execute(AssertSqlSafe(remedy.clone())).await?;
    }
    let left: Vec<_> = health().await?.iter().map(Warning::name).filter(|name| *name == "untrusted_schema").collect();
    owner.close().await;
    roles.drop(&mut admin).await?;
    assert_eq!((said.len(), remedies.len(), left.len()), (2, 2, 0), "{said:#?}");
    Ok(())
}

/// In Turkish, the lower case of I has no dot, so the lower case of TRIGGER does not name a right.
#[sqlx::test(migrations = false)]
async fn a_turkish_database_revokes_what_default_privileges_give(pool: PgPool) -> anyhow::Result<()> {
    let migrated = in_turkish(&pool, async |turkish| {
        turkish.execute("alter default privileges grant all on tables to public; create table orders (id int)").await?;
        migrate(turkish).await.map_err(in_a_call)?;
        protect(turkish, "orders", OnEscape::Refuse).await.map_err(in_a_call)?;
        Ok::<_, Error>(turkish.execute("insert into orders values (1)").await.map(drop))
    });
    let Some(migrated) = migrated.await else { return Ok(()) };
    let escaped = migrated?.expect_err("outside an operation").to_string();
    assert!(escaped.contains("(INSERT)"), "{escaped}");
    Ok(())
}

/// The SQL of a refusal, which is between backticks.
fn remedy(error: &Error) -> String {
    error.to_string().split('`').nth(1).unwrap_or_else(|| panic!("SQL to copy: {error}")).to_owned()
}

/// The roles that a service trusts if its own role is a member of no other. None of the roles is a superuser.
#[sqlx::test(migrations = false)]
async fn a_membership_counts_by_the_role_that_granted_it(pool: PgPool) -> anyhow::Result<()> {
    let mut admin = connect(&pool).await;
    let version: i32 =
        sqlx::query_scalar("select current_setting('server_version_num')::int / 10000").fetch_one(&mut admin).await?;
    let roles = Roles::create(&mut admin).await?;
    let (_, service) = roles.pools(&pool).await.into_iter().nth(2).expect("the service");
    let printed = printed();
    let mut wrong = Vec::new();
    for (case, sql, versions, trusted) in [
        ("nobody", "", 13..=99, false),
        ("the superuser granted it to the owner of the database", "grant @group to @owner", 13..=99, true),
        ("the superuser granted it to the service", "grant @group to @service", 13..=99, true),
        ("it may act as the owner of the database", "grant @owner to @group", 13..=99, true),
        (
            "the member granted it to itself",
            "alter role @owner createrole; set role @owner; grant @group to @owner",
            13..=15,
            true,
        ),
        (
            "the service granted it to itself",
            "alter role @service createrole; set role @service; grant @group to @service",
            13..=15,
            true,
        ),
        (
            "the owner of the database granted it to the service",
            "alter role @owner createrole; set role @owner; grant @group to @service",
            13..=15,
            true,
        ),
        (
            "a member of a managed group that owns the database granted it to the group",
            "create role admin_@service createrole; grant @owner to admin_@service;
             grant @group to admin_@service with admin option; set role admin_@service; grant @group to @owner",
            13..=99,
            true,
        ),
        ("a stranger granted it", "set role @mallory; grant @group to @owner, @service", 13..=99, false),
        (
            "a stranger with CREATEROLE granted it",
            "alter role @mallory createrole; set role @mallory; grant @group to @owner, @service",
            13..=99,
            false,
        ),
        (
            "a stranger that may not become the owner granted it",
            "grant @owner to @mallory with inherit false, set false; set role @mallory; grant @group to @owner",
            16..=99,
            false,
        ),
        (
            "before PostgreSQL 16 the first grantor is kept",
            "set role @mallory; grant @group to @owner; reset role; grant @group to @owner",
            13..=15,
            false,
        ),
        (
            "since PostgreSQL 16 each grantor counts",
            "set role @mallory; grant @group to @owner; reset role; grant @group to @owner",
            16..=99,
            true,
        ),
        (
            "the grantor is gone",
            "create role gone_@service createrole; set role gone_@service; grant @group to @owner; reset role;
             drop role gone_@service",
            13..=15,
            false,
        ),
        (
            "the owner of the database, by its other name",
            "alter schema idempotency owner to pg_database_owner",
            14..=99,
            false,
        ),
        (
            "a group in a group",
            "create role middle_@service; grant @group to middle_@service; grant middle_@service to @owner",
            13..=99,
            true,
        ),
        (
            "a stranger's group in a group",
            "create role middle_@service; grant middle_@service to @owner;
             set role @mallory; grant @group to middle_@service",
            13..=99,
            false,
        ),
    ] {
        if !versions.contains(&version) {
            continue;
        }
        let create = format!(
            "set role @group; {printed}; grant usage on schema idempotency to @service;
             grant select on idempotency._sqlx_migrations to @service; reset role; {sql}"
        );
        roles.run(&mut admin, &create).await?;
        admin.execute("reset role").await?;
        let mut answer = migrate(&service).await.map_err(in_a_call);
        if let Err(error @ Error::Incompatible(Incompatible::Schema { .. })) = &answer
            && !trusted
        {
            if !error.to_string().contains("as the owner of the database with ADMIN OPTION on that role") {
                wrong.push(format!("{case}: {error}"));
            }
            admin.execute(AssertSqlSafe(remedy(error))).await?;
            answer = migrate(&service).await.map_err(in_a_call);
        } else if !trusted {
            wrong.push(format!("{case}: {answer:?}"));
        }
        if answer.is_err() {
            wrong.push(format!("{case}: {answer:?}"));
        }
        let reset = "drop schema idempotency cascade;
            alter role @owner nocreaterole; alter role @mallory nocreaterole; alter role @service nocreaterole;
            do $$ declare edge record; begin
                for edge in select * from pg_auth_members
                    where roleid in ('@group'::regrole::oid, '@owner'::regrole::oid)
                        and (roleid, member) <> ('@group'::regrole::oid, '@mallory'::regrole::oid)
                loop execute format('revoke %s from %s %s cascade', edge.roleid::regrole, edge.member::regrole,
                    case when current_setting('server_version_num')::int >= 160000
                        then format('granted by %s', edge.grantor::regrole) end); end loop;
            end $$; drop role if exists middle_@service; drop role if exists admin_@service";
        roles.run(&mut admin, reset).await?;
    }
    service.close().await;
    roles.drop(&mut admin).await?;
    assert!(wrong.is_empty(), "{wrong:#?}");
    Ok(())
}

/// Any role can hold the lock of the migrations, and create its schema meanwhile.
#[sqlx::test(migrations = false)]
async fn a_schema_that_a_stranger_creates_while_a_door_waits_is_refused(pool: PgPool) -> anyhow::Result<()> {
    let mut admin = connect(&pool).await;
    let roles = Roles::create(&mut admin).await?;
    let (_, owner) = roles.pools(&pool).await.into_iter().nth(1).expect("the owner");
    let mut mallory = connect(&pool).await;
    let view = view();
    let lock = "begin; select pg_advisory_xact_lock(x'70676964656d706f'::int8)";
    let mut answers = Vec::new();
    // The second one waits for the schema that is not committed yet.
    for (door, level, first) in [
        ("migrate", "read committed", lock),
        ("migrate", "read committed", "begin"),
        ("migrate", "serializable", lock),
        ("migrate", "serializable", "begin"),
        ("migrate", "repeatable read", lock),
    ] {
        let level = format!("alter role @owner set default_transaction_isolation = '{level}'");
        roles.run(&mut admin, &level).await?;
        let owner = pool_of(1, &owner.connect_options()).await;
        mallory.execute(first).await?;
        roles.run(&mut mallory, &view).await?;
        let opening = tokio::spawn({
            let owner = owner.clone();
            async move { open(door, &owner).await }
        });
        until_blocked(&pool, 1).await?;
        mallory.execute("commit; reset role").await?;
        answers.push((door, first, opening.await?.map(drop)));
        owner.close().await;
        admin.execute("drop schema idempotency cascade").await?;
    }
    let bitten: bool = sqlx::query_scalar("select is_called from lair.bites").fetch_one(&mut admin).await?;
    owner.close().await;
    drop(mallory);
    roles.drop(&mut admin).await?;
    for (door, first, answer) in answers {
        let refused = matches!(&answer, Err(Error::Incompatible(Incompatible::Schema { problem, .. })) if problem.contains("owns schema idempotency"));
        assert!(refused, "{door}, {first}: {answer:?}");
    }
    assert!(!bitten);
    Ok(())
}

//! Checks which roles can run code of their own in the statements of this crate. The owner of a table or a function can
//! run such code. A role that may add a trigger, a function or a foreign key can also run such code. A role that may
//! create a schema could have created the schema `idempotency` before the crate did.
//!
//! This file also protects tables of the service, which may be written only inside idempotent operations. The function
//! `idempotency.protect` creates a trigger on each of these tables. The crate finds the protected tables by this
//! trigger in the catalogs.

use std::collections::BTreeMap;

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use crate::error::sqlstate;
use crate::{Error, SetupError};

/// A reason not to read, call or look up anything in the schema.
#[derive(Clone, Debug)]
pub(crate) enum Distrust {
    /// A role that is not trusted owns these objects. The remedy is the SQL that makes this role trusted.
    Owner { role: String, objects: String, remedy: String },
    /// A role that is not trusted may add code. The remedy is the SQL that revokes this right.
    Right { role: String, remedy: String },
    /// Functions that this release does not create, or that this release creates with another body or other settings.
    Functions { objects: String },
    /// Rules, views instead of tables, and columns of types that are not PostgreSQL's own.
    Objects { objects: String },
}

/// The functions that the crate creates.
#[derive(Debug)]
pub(crate) struct Known {
    /// Each digest covers the name, the language, the settings and the body of one function. [`schema`] computes the
    /// same digests for the functions in the database.
    pub(crate) digests: Vec<String>,
    /// The names of the functions for callers in other languages.
    pub(crate) any_language: Vec<String>,
    /// The version number of the file that creates the functions for other languages.
    pub(crate) number: i32,
}

/// The schema as the catalogs describe it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Schema {
    pub(crate) distrust: Vec<Distrust>,
    /// Whether the functions for callers in other languages exist.
    pub(crate) has_any_language: bool,
    /// The functions for other languages that come from an older release, and differ from those of this release.
    pub(crate) older: Option<String>,
    /// The functions for other languages that come from a newer release, and differ from those of this release.
    pub(crate) newer: Option<String>,
    /// Whether the table `record` exists.
    pub(crate) has_record: bool,
    /// Whether the table of the applied migrations exists.
    pub(crate) has_applied: bool,
    /// Whether the table of the applied migrations can be read without calling a function of the schema.
    pub(crate) is_applied_plain: bool,
}

/// Reads the schema from `pg_catalog` alone. Returns `None` if the schema does not exist.
///
/// A role is trusted if it may act as the owner of the database. A role is also trusted if one of its members is the
/// database's owner or the current role.
pub(crate) async fn schema(conn: &mut PgConnection, known: &Known) -> Result<Option<Schema>, Error> {
    let rows = sqlx::query(
        "
        with /* pg_idempotency: schema */ recursive
        acts (as_member) as (
            -- Since PostgreSQL 16 a member may lack the right to become the role.
            select case
                when pg_catalog.current_setting('server_version_num')::int4 < 160000 then 'MEMBER'
                else 'USAGE, SET, MEMBER WITH ADMIN OPTION'
            end
        ),
        database (owner) as (
            select datdba from pg_catalog.pg_database where datname = pg_catalog.current_database()
        ),
        -- Not pg_has_role: a superuser, who often owns the database, has every role.
        trusted (role) as (
            select owner from database
            union
            select oid from pg_catalog.pg_roles where rolname in (current_user, 'pg_database_owner')
            union
            select membership.roleid
            from trusted
            join pg_catalog.pg_auth_members as membership on membership.member = trusted.role
            cross join database
            cross join acts
            -- A role with ADMIN OPTION can grant a role to any other role, which need not consent.
            where pg_catalog.pg_has_role(membership.grantor, membership.member, acts.as_member)
                or pg_catalog.pg_has_role(membership.grantor, database.owner, acts.as_member)
        ),
        -- What is in the schema, what belongs to it in another one, such as a partition, and what any of that depends on.
        part (class, id) as (
            select 'pg_catalog.pg_namespace'::regclass::oid, oid from pg_catalog.pg_namespace where nspname = 'idempotency'
            union
            select other.class, other.id
            from part
            cross join lateral (
                select depend.classid, depend.objid
                from pg_catalog.pg_depend as depend
                where depend.refclassid = part.class and depend.refobjid = part.id
                    and (
                        part.class = 'pg_catalog.pg_namespace'::regclass::oid
                        or depend.deptype in ('a', 'i', 'P', 'S')
                        -- A table that inherits.
                        or (part.class = 'pg_catalog.pg_class'::regclass::oid
                            and depend.classid = 'pg_catalog.pg_class'::regclass::oid)
                    )
                union all
                select depend.refclassid, depend.refobjid
                from pg_catalog.pg_depend as depend
                where depend.classid = part.class and depend.objid = part.id
                    and depend.deptype in ('a', 'i', 'n')
                    and depend.refclassid <> 'pg_catalog.pg_namespace'::regclass::oid
                    -- The table of a foreign key is only read, as its owner.
                    and not (part.class = 'pg_catalog.pg_constraint'::regclass::oid
                        and depend.refclassid = 'pg_catalog.pg_class'::regclass::oid)
                union all
                -- A table whose foreign key refers to it. If a deletion cascades, the triggers of that table run as the
                -- role that deletes, before PostgreSQL 18.
                -- `confrelid` has no index. So the key is found by its dependency on the table: the estimated costs stay
                -- below `jit_above_cost`, above which the server would compile the statement for seconds.
                select 'pg_catalog.pg_class'::regclass::oid, foreign_key.conrelid
                from pg_catalog.pg_depend as depend
                join pg_catalog.pg_constraint as foreign_key on foreign_key.oid = depend.objid
                where part.class = 'pg_catalog.pg_class'::regclass::oid
                    and depend.refclassid = part.class and depend.refobjid = part.id
                    and depend.classid = 'pg_catalog.pg_constraint'::regclass::oid
                    and foreign_key.confrelid = part.id
            ) as other (class, id)
        ),
        owned (class, id, owner) as (
            select part.class, part.id, object.owner
            from part
            cross join lateral (
                select nspowner from pg_catalog.pg_namespace
                where part.class = 'pg_catalog.pg_namespace'::regclass::oid and oid = part.id
                union all
                -- An index, a row type and an array have the owner of their table or type.
                select relowner from pg_catalog.pg_class
                where part.class = 'pg_catalog.pg_class'::regclass::oid and oid = part.id
                    and relkind in ('r', 'p', 'v', 'm', 'f', 'S', 'c')
                union all
                select proowner from pg_catalog.pg_proc
                where part.class = 'pg_catalog.pg_proc'::regclass::oid and oid = part.id
                union all
                select typowner from pg_catalog.pg_type
                where part.class = 'pg_catalog.pg_type'::regclass::oid and oid = part.id and typtype in ('d', 'e', 'r')
                union all
                select oprowner from pg_catalog.pg_operator
                where part.class = 'pg_catalog.pg_operator'::regclass::oid and oid = part.id
            ) as object (owner)
        ),
        -- 0 is PUBLIC.
        allowed (role, remedy) as (
            select acl.grantee, 'revoke create on schema idempotency from '
            from pg_catalog.pg_namespace, pg_catalog.aclexplode(nspacl) as acl
            where nspname = 'idempotency' and acl.privilege_type = 'CREATE' and acl.grantee <> nspowner
            union
            select acl.grantee, pg_catalog.format(
                'revoke %s on %I.%I from ', pg_catalog.lower(acl.privilege_type), space.nspname, class.relname
            )
            from part
            join pg_catalog.pg_class as class on class.oid = part.id
            join pg_catalog.pg_namespace as space on space.oid = class.relnamespace
            cross join lateral (
                select * from pg_catalog.aclexplode(class.relacl)
                union all
                -- A foreign key needs the right on the columns of the key only. A REVOKE on the table includes them.
                select granted.*
                from pg_catalog.pg_attribute as attribute
                cross join lateral pg_catalog.aclexplode(attribute.attacl) as granted
                where attribute.attrelid = class.oid
            ) as acl
            where part.class = 'pg_catalog.pg_class'::regclass::oid and acl.privilege_type in ('TRIGGER', 'REFERENCES')
                and acl.grantee <> class.relowner
        ),
        doubted (role) as (
            select candidate.role
            from (select owner from owned union select role from allowed) as candidate (role)
            cross join database
            cross join acts
            where candidate.role not in (select role from trusted)
                and not pg_catalog.pg_has_role(candidate.role, database.owner, acts.as_member)
        ),
        -- The functions of any-language.sql are of the release whose number is the body of `version`.
        any_language (number) as (
            select pg_catalog.substring(function.prosrc, '^select ([0-9]{1,9})$')::int4
            from pg_catalog.pg_proc as function
            join pg_catalog.pg_namespace as space on space.oid = function.pronamespace
            where space.nspname = 'idempotency' and function.proname = 'version' and function.pronargs = 0
        ),
        unknown (kind, object) as (
            select
                case
                    when function.proname::text <> all ($2::text[]) then 'functions'
                    when any_language.number < $3::int4 then 'older functions'
                    when any_language.number > $3::int4 then 'newer functions'
                    else 'functions'
                end,
                'function ' || function.oid::regprocedure::text
            from pg_catalog.pg_proc as function
            join pg_catalog.pg_namespace as space on space.oid = function.pronamespace
            join pg_catalog.pg_language as language on language.oid = function.prolang
            left join any_language on true
            where space.nspname = 'idempotency'
                -- A file of the printed SQL may have got line ends of another system.
                and pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(
                    pg_catalog.concat_ws(
                        pg_catalog.chr(10), function.proname::text, language.lanname::text, function.prosecdef::text,
                        -- With quotes if the role that created it had set quote_all_identifiers.
                        coalesce(pg_catalog.replace(
                            pg_catalog.array_to_string(function.proconfig, ', '),
                            '\"pg_catalog\", \"pg_temp\"', 'pg_catalog, pg_temp'
                        ), ''),
                        pg_catalog.replace(function.prosrc, pg_catalog.chr(13), '')
                    ),
                    pg_catalog.getdatabaseencoding()
                )), 'hex') <> all ($1::text[])
            union
            select 'objects', pg_catalog.format('relation %I.%I, which is no table', space.nspname, class.relname)
            from pg_catalog.pg_class as class
            join pg_catalog.pg_namespace as space on space.oid = class.relnamespace
            where space.nspname = 'idempotency' and class.relname in ('record', '_sqlx_migrations')
                and class.relkind not in ('r', 'p')
            union
            -- An operator or a cast of another type could be anybody's.
            select 'objects', pg_catalog.format('column %I of %I.%I', attname, space.nspname, class.relname)
            from pg_catalog.pg_attribute
            join pg_catalog.pg_type as type on type.oid = atttypid
            join pg_catalog.pg_class as class on class.oid = attrelid
            join pg_catalog.pg_namespace as space on space.oid = class.relnamespace
            where space.nspname = 'idempotency' and class.relname in ('record', '_sqlx_migrations')
                and attnum > 0 and type.typnamespace <> 'pg_catalog'::regnamespace::oid
            union
            select 'objects', pg_catalog.format('rule %I on %s', rule.rulename, class.oid::regclass::text)
            from part
            join pg_catalog.pg_class as class on class.oid = part.id
            join pg_catalog.pg_rewrite as rule on rule.ev_class = class.oid
            where part.class = 'pg_catalog.pg_class'::regclass::oid and class.relkind in ('r', 'p')
        )
        select 'schema' as kind, null as role, null as objects, null as remedy
        from pg_catalog.pg_namespace where nspname = 'idempotency'
        union all
        select case when class.relname = 'record' then 'record'
            when class.relkind <> 'r' or class.relrowsecurity or class.relhassubclass
                or exists (select from pg_catalog.pg_rewrite where ev_class = class.oid) then 'applied'
            else 'applied, plain'
        end, null, null, null
        from pg_catalog.pg_class as class
        join pg_catalog.pg_namespace as space on space.oid = class.relnamespace
        where space.nspname = 'idempotency' and class.relname in ('record', '_sqlx_migrations')
        union all
        select 'owner', pg_catalog.pg_get_userbyid(object.owner)::text,
            pg_catalog.string_agg(object.name, ', ' order by object.place) filter (where object.place <= 5)
                || case when pg_catalog.count(*) > 5 then pg_catalog.format(' and %s more', pg_catalog.count(*) - 5) else '' end,
            pg_catalog.format('revoke %1$I from %2$I; grant %1$I to %2$I',
                pg_catalog.pg_get_userbyid(object.owner), pg_catalog.pg_get_userbyid(database.owner))
        from (
            select owned.owner, named.type || ' ' || named.identity, pg_catalog.row_number() over (
                partition by owned.owner order by named.type <> 'schema', named.type not in ('table', 'view'), named.identity
            )
            from owned
            join doubted on doubted.role = owned.owner
            cross join lateral pg_catalog.pg_identify_object(owned.class, owned.id, 0) as named
        ) as object (owner, name, place)
        cross join database
        group by object.owner, database.owner
        union all
        select 'right', grantee.name, null, allowed.remedy || grantee.name
        from allowed
        join doubted on doubted.role = allowed.role
        cross join lateral (
            select case when allowed.role = 0::oid then 'public'
                else pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(allowed.role)::text) end
        ) as grantee (name)
        union all
        select 'any language', null, null, null from any_language
        union all
        select kind, null, pg_catalog.string_agg(object, ', ' order by object), null
        from unknown
        group by kind
        order by 1, 2, 4
        ",
    )
    .bind(&known.digests) // $1
    .bind(&known.any_language) // $2
    .bind(known.number) // $3
    .persistent(false)
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    Schema::of(&rows).map_err(Error::of_statement)
}

impl Schema {
    fn of(rows: &[PgRow]) -> sqlx::Result<Option<Self>> {
        let mut exists = false;
        let mut schema = Self::default();
        for row in rows {
            match row.try_get("kind")? {
                "schema" => exists = true,
                "record" => schema.has_record = true,
                "applied" => schema.has_applied = true,
                "applied, plain" => (schema.has_applied, schema.is_applied_plain) = (true, true),
                "owner" => schema.distrust.push(Distrust::Owner {
                    role: row.try_get("role")?,
                    objects: row.try_get("objects")?,
                    remedy: row.try_get("remedy")?,
                }),
                "right" => {
                    schema.distrust.push(Distrust::Right { role: row.try_get("role")?, remedy: row.try_get("remedy")? })
                }
                "any language" => schema.has_any_language = true,
                "older functions" => schema.older = row.try_get("objects")?,
                "newer functions" => schema.newer = row.try_get("objects")?,
                "functions" => schema.distrust.push(Distrust::Functions { objects: row.try_get("objects")? }),
                _ => schema.distrust.push(Distrust::Objects { objects: row.try_get("objects")? }),
            }
        }
        Ok(exists.then_some(schema))
    }
}

/// What the database does if a statement outside an idempotent operation writes to a protected table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnEscape {
    /// The statement fails with the SQLSTATE `IK006`, and writes nothing.
    Refuse,
    /// The statement succeeds with a WARNING `IK006`. Use this setting while you search your code for such writes. sqlx
    /// logs the warning under the target `sqlx::postgres::notice`, and the server writes the warning to its own log.
    Warn,
}

pub(crate) async fn protect(conn: &mut PgConnection, table: &str, on_escape: OnEscape) -> Result<(), SetupError> {
    let word = match on_escape {
        OnEscape::Refuse => "refuse",
        OnEscape::Warn => "warn",
    };
    let call = sqlx::query("select /* pg_idempotency: protect */ idempotency.protect($1::text::regclass, $2::text)")
        .bind(table)
        .bind(word);
    call.persistent(false).execute(conn).await.map(drop).map_err(|error| refused(table, error))
}

pub(crate) async fn unprotect(conn: &mut PgConnection, table: &str) -> Result<(), SetupError> {
    let call =
        sqlx::query("select /* pg_idempotency: unprotect */ idempotency.unprotect($1::text::regclass)").bind(table);
    call.persistent(false).execute(conn).await.map(drop).map_err(|error| refused(table, error))
}

/// Translates an error of the server. The schema of the crate is current here, so a missing relation is the table that
/// the caller has named.
fn refused(table: &str, error: sqlx::Error) -> SetupError {
    let problem = match (sqlstate(&error).as_deref(), error.as_database_error()) {
        (Some(sqlstate::NOT_PROTECTED), Some(refusal)) => refusal.message().to_owned(),
        (
            Some(
                sqlstate::UNDEFINED_TABLE
                | sqlstate::INVALID_SCHEMA_NAME
                | sqlstate::INVALID_NAME
                | sqlstate::SYNTAX_ERROR
                | sqlstate::FEATURE_NOT_SUPPORTED,
            ),
            _,
        ) => format!(
            "there is no table {table:?} to protect; name it as SQL does, with its schema and its quotes, such as public.\"Orders\""
        ),
        (Some(sqlstate::INSUFFICIENT_PRIVILEGE), _) => format!(
            "the role may not protect the table {table:?}; do it as the owner of the table, with usage on its schema and on the \
             schema idempotency"
        ),
        _ => return Error::of_statement(error).into(),
    };
    SetupError::Refused { problem, source: Some(error) }
}

/// The condition under which the trigger `guard` lets no write escape. Such a trigger fires before each statement, for
/// all four kinds of writes and for all columns. Such a trigger also has an argument that the migration defines, and no
/// condition (`WHEN`). A trigger that was created manually may miss some writes. `idempotency.is_protected` repeats the
/// condition of this fragment.
macro_rules! is_whole {
    () => {
        "(guard.tgtype = 62::int2
            and guard.tgattr::text = ''
            and guard.tgargs in (pg_catalog.decode('7761726e00', 'hex'), ''::bytea)
            and guard.tgqual is null)"
    };
}

/// The protected tables by name. A partition counts as a part of its table.
pub(crate) async fn protected(conn: &mut PgConnection) -> Result<BTreeMap<String, OnEscape>, Error> {
    let tables = sqlx::query(concat! {
        "
        select /* pg_idempotency: protected */
            pg_catalog.format('%I.%I', space.nspname, class.relname) as table, guard.tgnargs = 1 as warns
        from pg_catalog.pg_trigger as guard
        join pg_catalog.pg_class as class on class.oid = guard.tgrelid
        join pg_catalog.pg_namespace as space on space.oid = class.relnamespace
        where guard.tgfoid = 'idempotency.on_escape'::regproc::oid
            and ", is_whole!(), "
            and not exists (
                select
                from pg_catalog.pg_inherits
                join pg_catalog.pg_trigger as above on above.tgrelid = inhparent and above.tgfoid = guard.tgfoid
                where inhrelid = guard.tgrelid
            )
        ",
    })
    .persistent(false)
    .try_map(|row: PgRow| {
        let warns: bool = row.try_get("warns")?;
        Ok((row.try_get("table")?, if warns { OnEscape::Warn } else { OnEscape::Refuse }))
    })
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)?;
    Ok(tables.into_iter().collect())
}

/// The protected tables and partitions whose trigger is disabled, is not [whole](is_whole), or is missing. Only a
/// partition can lack the trigger.
pub(crate) async fn gaps(conn: &mut PgConnection) -> Result<Vec<String>, Error> {
    sqlx::query_scalar(concat! {
        "
        with /* pg_idempotency: gaps */ guard as (
            -- 'R' fires for a replication only.
            select guard.tgrelid, pg_catalog.bool_or(guard.tgenabled in ('O', 'A') and ", is_whole!(), ") as works
            from pg_catalog.pg_trigger as guard
            where guard.tgfoid = 'idempotency.on_escape'::regproc::oid
            group by guard.tgrelid
        ),
        covered (oid) as (
            select distinct part from guard cross join lateral idempotency.with_partitions(guard.tgrelid) as part
        )
        select pg_catalog.format('%I.%I', space.nspname, class.relname)
        from covered
        left join guard on guard.tgrelid = covered.oid
        join pg_catalog.pg_class as class on class.oid = covered.oid
        join pg_catalog.pg_namespace as space on space.oid = class.relnamespace
        where guard.tgrelid is null or not guard.works
        order by 1
        ",
    })
    .persistent(false)
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)
}

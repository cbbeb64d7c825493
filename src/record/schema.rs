//! Finds the roles that could run code of their own in the statements of this crate. The owner of a table or a function
//! can run such code. A role that may add a function, a trigger or a foreign key can also run such code. A role that
//! may create a schema could have created the schema `idempotency` before the crate did.
//!
//! This file also protects tables of the service, which may be written only inside idempotent operations. The function
//! `idempotency.protect` creates a trigger on each of these tables. The crate finds the protected tables by this
//! trigger in the catalogs.

use std::collections::BTreeMap;

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use super::statement::table_or_leaf;
use crate::error::sqlstate;
use crate::{Error, SetupError};

/// A reason not to read, call or look up anything in the schema.
#[derive(Clone, Debug)]
pub(crate) enum Distrust {
    /// A role that is not trusted owns these objects. The remedy is the SQL that makes this role trusted.
    Owner { role: String, objects: String, remedy: String },
    /// A role that is not trusted may add code. The remedy is the SQL that revokes all rights of this role to do so.
    Right { role: String, remedy: String },
}

/// The schema as the catalogs describe it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Schema {
    pub(crate) distrust: Vec<Distrust>,
    /// The body of `idempotency.version`, which exists only beside the functions for callers in other languages.
    pub(crate) version: Option<String>,
    /// Whether the table `record` exists.
    pub(crate) has_record: bool,
    /// Whether the table of the applied migrations exists.
    pub(crate) has_applied: bool,
    /// Whether the `search_path` of the current role contains the schema, as the path `"$user"` does for a role named
    /// `idempotency`.
    pub(crate) in_search_path: bool,
}

/// Reads the schema from `pg_catalog` alone. Returns `None` if the schema does not exist.
///
/// A role is trusted if it may act as the owner of the database. A role is also trusted if one of its members is the
/// database's owner or the current role.
pub(crate) async fn schema(conn: &mut PgConnection) -> Result<Option<Schema>, Error> {
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
        schema (oid, owner, acl) as (
            select oid, nspowner, nspacl from pg_catalog.pg_namespace where nspname = 'idempotency'
        ),
        relation (oid) as (
            -- An index has the owner of its table.
            select class.oid
            from schema
            join pg_catalog.pg_class as class on class.relnamespace = schema.oid
            where class.relkind not in ('i', 'I')
            union
            -- A partition or another child, in any schema. Not pg_partition_tree, which waits for a lock of each partition.
            select inhrelid from relation join pg_catalog.pg_inherits on inhparent = relation.oid
        ),
        owned (class, id, owner) as (
            select 'pg_catalog.pg_namespace'::regclass::oid, oid, owner from schema
            union
            select 'pg_catalog.pg_class'::regclass::oid, class.oid, class.relowner
            from relation join pg_catalog.pg_class as class on class.oid = relation.oid
            union
            -- A table whose foreign key refers to the record. If a deletion cascades, the triggers of that table run as
            -- the role that deletes, before PostgreSQL 18.
            select 'pg_catalog.pg_class'::regclass::oid, class.oid, class.relowner
            from relation
            join pg_catalog.pg_constraint as foreign_key on foreign_key.confrelid = relation.oid
            join pg_catalog.pg_class as class on class.oid = foreign_key.conrelid
            union
            select 'pg_catalog.pg_proc'::regclass::oid, function.oid, function.proowner
            from schema join pg_catalog.pg_proc as function on function.pronamespace = schema.oid
            union
            -- A function that a trigger or a rule calls.
            select 'pg_catalog.pg_proc'::regclass::oid, function.oid, function.proowner
            from relation
            cross join lateral (
                select 'pg_catalog.pg_trigger'::regclass::oid, oid from pg_catalog.pg_trigger where tgrelid = relation.oid
                union all
                select 'pg_catalog.pg_rewrite'::regclass::oid, oid from pg_catalog.pg_rewrite where ev_class = relation.oid
            ) as caller (class, id)
            join pg_catalog.pg_depend as depend
                on depend.classid = caller.class and depend.objid = caller.id
                    and depend.refclassid = 'pg_catalog.pg_proc'::regclass::oid
            join pg_catalog.pg_proc as function on function.oid = depend.refobjid
        ),
        -- 0 is PUBLIC. The target is null for the schema.
        allowed (role, privilege, target) as (
            select acl.grantee, acl.privilege_type, null
            from schema cross join lateral pg_catalog.aclexplode(schema.acl) as acl
            where acl.privilege_type = 'CREATE' and acl.grantee <> schema.owner
            union
            -- The word stays in capitals, because `lower` makes another word of TRIGGER in Turkish.
            select acl.grantee, acl.privilege_type, pg_catalog.format('%I.%I', space.nspname, class.relname)
            from relation
            join pg_catalog.pg_class as class on class.oid = relation.oid
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
            where acl.privilege_type in ('TRIGGER', 'REFERENCES') and acl.grantee <> class.relowner
        ),
        doubted (role) as (
            select candidate.role
            from (select owner from owned union select role from allowed) as candidate (role)
            cross join database
            cross join acts
            where candidate.role not in (select role from trusted)
                and not pg_catalog.pg_has_role(candidate.role, database.owner, acts.as_member)
        )
        select 'schema' as kind, null as role, null as objects, null as remedy from schema
        union all
        select class.relname::text, null, null, null
        from schema
        join pg_catalog.pg_class as class on class.relnamespace = schema.oid
        where class.relname in ('record', '_sqlx_migrations')
        union all
        select 'version', null, function.prosrc, null
        from schema
        join pg_catalog.pg_proc as function on function.pronamespace = schema.oid
        where function.proname = 'version' and function.pronargs = 0
        union all
        select 'path', null, null, null
        from schema
        where 'idempotency'::name = any (pg_catalog.current_schemas(false))
        union all
        select 'owner', pg_catalog.pg_get_userbyid(owned.owner)::text,
            pg_catalog.format('%s%s',
                pg_catalog.array_to_string((pg_catalog.array_agg(
                    named.type || ' ' || named.identity order by named.type <> 'schema', named.type <> 'table', named.identity
                ))[1:5], ', '),
                case when pg_catalog.count(*) > 5 then ' and others' end
            ),
            pg_catalog.format('revoke %1$I from %2$I; grant %1$I to %2$I',
                pg_catalog.pg_get_userbyid(owned.owner), pg_catalog.pg_get_userbyid(database.owner))
        from owned
        join doubted on doubted.role = owned.owner
        cross join database
        cross join lateral pg_catalog.pg_identify_object(owned.class, owned.id, 0) as named
        group by owned.owner, database.owner
        union all
        -- One row for each role, because one `grant all` may have given all of its rights. A right that a table does
        -- not give is revoked in vain.
        select 'right', grantee.name, null, pg_catalog.concat_ws('; ',
            case when pg_catalog.bool_or(allowed.target is null)
                then 'revoke create on schema idempotency from ' || grantee.name end,
            case when pg_catalog.bool_or(allowed.target is not null)
                then pg_catalog.format('revoke %s on %s from %s',
                    pg_catalog.string_agg(distinct allowed.privilege, ', ') filter (where allowed.target is not null),
                    pg_catalog.string_agg(distinct allowed.target, ', '), grantee.name) end
        )
        from allowed
        join doubted on doubted.role = allowed.role
        cross join lateral (
            select case when allowed.role = 0::oid then 'public'
                else pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(allowed.role)::text) end
        ) as grantee (name)
        group by grantee.name
        order by 1, 2, 4
        ",
    )
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
                "_sqlx_migrations" => schema.has_applied = true,
                "version" => schema.version = Some(row.try_get("objects")?),
                "path" => schema.in_search_path = true,
                "owner" => schema.distrust.push(Distrust::Owner {
                    role: row.try_get("role")?,
                    objects: row.try_get("objects")?,
                    remedy: row.try_get("remedy")?,
                }),
                _ => {
                    schema.distrust.push(Distrust::Right { role: row.try_get("role")?, remedy: row.try_get("remedy")? })
                }
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

/// The objects that may swallow the records of the table, or hide them. A row trigger of a partitioned table has a copy
/// on each partition, which is left out.
pub(crate) async fn swallowers(conn: &mut PgConnection) -> Result<Vec<String>, Error> {
    sqlx::query_scalar(concat! {
        "
        with /* pg_idempotency: swallowers */ found (kind, name, relation) as (
            select 'the trigger', tgname, tgrelid
            from pg_catalog.pg_trigger
            -- 1 is FOR EACH ROW, and 2 is BEFORE.
            where tgtype & 3::int2 = 3::int2 and tgenabled in ('O', 'A') and not tgisinternal and tgparentid = 0::oid
            union all
            select 'the rule', rulename, ev_class from pg_catalog.pg_rewrite where ev_enabled in ('O', 'A')
            union all
            select 'the policy', polname, polrelid from pg_catalog.pg_policy
            union all
            -- Without a policy, no row is visible.
            select 'row level security', null, oid
            from pg_catalog.pg_class as class
            where not exists (select from pg_catalog.pg_policy where polrelid = class.oid)
        )
        select pg_catalog.format('%s on %I.%I',
            pg_catalog.concat_ws(' ', found.kind, pg_catalog.quote_ident(found.name::text)), space.nspname, class.relname)
        from found
        join pg_catalog.pg_class as class on class.oid = found.relation
        join pg_catalog.pg_namespace as space on space.oid = class.relnamespace
        where ", table_or_leaf!(), "
            and (class.relrowsecurity or found.kind in ('the trigger', 'the rule'))
        order by 1
        ",
    })
    .persistent(false)
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)
}

//! The owners of the schema and of what is in it. Whoever owns a table or a function decides what runs in the
//! transactions of its callers, with their rights.

use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use crate::Error;

/// A role that owns a part of the schema, and has no reason to.
#[derive(Clone, Debug)]
pub(crate) struct Stranger {
    pub(crate) role: String,
    /// What it owns, as the server quotes the names.
    pub(crate) objects: String,
}

/// The owners of the schema, its tables and functions, and the functions of the table's triggers, who are neither a
/// superuser, nor the owner of the database, nor a member of that role, nor a role that this owner or the asking role is a
/// member of. Empty without a schema.
pub(crate) async fn strangers(conn: &mut PgConnection) -> Result<Vec<Stranger>, Error> {
    sqlx::query(
        "
        with recursive database as (
            select datdba as owner from pg_catalog.pg_database where datname = pg_catalog.current_database()
        ),
        -- Not pg_has_role: a superuser, who often owns the database, has every role.
        trusted (role) as (
            select owner from database
            union
            select oid from pg_catalog.pg_roles where rolname = current_user
            union
            select membership.roleid
            from trusted
            join pg_catalog.pg_auth_members as membership on membership.member = trusted.role
            -- Before PostgreSQL 16 a role could grant itself to anybody.
            where membership.grantor <> membership.roleid
        ),
        object (name, owner) as (
            select pg_catalog.format('schema %I', nspname), nspowner
            from pg_catalog.pg_namespace
            where nspname = 'idempotency'
            union
            select pg_catalog.format('table %I.%I', namespace.nspname, class.relname), class.relowner
            from pg_catalog.pg_class as class
            join pg_catalog.pg_namespace as namespace on namespace.oid = class.relnamespace
            where class.relkind in ('r', 'p', 'v', 'm', 'f')
                and (namespace.nspname = 'idempotency'
                    or class.oid in (
                        select tree.relid::oid
                        from pg_catalog.pg_partition_tree(pg_catalog.to_regclass('idempotency.record')) as tree
                    ))
            union
            select pg_catalog.format('function %s', function.oid::regprocedure), function.proowner
            from pg_catalog.pg_proc as function
            left join pg_catalog.pg_namespace as namespace on namespace.oid = function.pronamespace
            where namespace.nspname = 'idempotency'
                or function.oid in (
                    select tgfoid
                    from pg_catalog.pg_trigger
                    where tgrelid = pg_catalog.to_regclass('idempotency.record')::oid and not tgisinternal
                )
        )
        select
            pg_catalog.pg_get_userbyid(object.owner)::text as role,
            pg_catalog.string_agg(object.name, ', ' order by object.name) as objects
        from object, database
        where not pg_catalog.pg_has_role(object.owner, database.owner, 'member')
            and object.owner not in (select role from trusted)
        group by 1
        order by 1
        ",
    )
    .persistent(false)
    .try_map(|row: PgRow| Ok(Stranger { role: row.try_get("role")?, objects: row.try_get("objects")? }))
    .fetch_all(conn)
    .await
    .map_err(Error::of_statement)
}

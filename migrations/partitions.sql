-- Turns idempotency.record into a table with 16 hash partitions by scope, with its records, constraints and privileges.
-- The file refuses a table with anything that would be lost, such as a policy, a trigger or an index of your own. The
-- error names the reason. `migrate` does not apply this file (src/guide/larger.md). The file locks the table while it
-- copies the records, so set a lock_timeout. Run the file in one transaction, as the owner of the table, and analyze
-- the table afterwards.
do $$
declare
    partitions constant int := 16;
    plain constant pg_catalog.oid := 'idempotency.record'::pg_catalog.regclass::pg_catalog.oid;
    lost text;
    options text;
    privilege record;
begin
    if (select relkind = 'p' from pg_catalog.pg_class where oid = plain) then
        raise exception 'idempotency.record is partitioned already';
    end if;
    -- Before anything is read that must not change until the end.
    lock table idempotency.record in access exclusive mode;
    select pg_catalog.concat_ws(', ',
        case when pg_catalog.pg_get_userbyid(relowner) <> current_user then 'another owner than the role that runs this' end,
        case when exists (select from pg_catalog.pg_policy where polrelid = plain) then 'policies' end,
        case when relrowsecurity or relforcerowsecurity then 'row level security' end,
        case when exists (select from pg_catalog.pg_trigger where tgrelid = plain and not tgisinternal) then 'triggers' end,
        case when exists (
            select from pg_catalog.pg_constraint where conrelid = plain and contype = 'f'
        ) then 'a foreign key' end,
        case when exists (select from pg_catalog.pg_rewrite where ev_class = plain) then 'rules' end,
        case when exists (select from pg_catalog.pg_publication_rel where prrelid = plain) then 'a place in a publication' end,
        case when relreplident <> 'd' then 'a replica identity of its own' end,
        case when exists (
            select from pg_catalog.pg_index join pg_catalog.pg_class as index on index.oid = indexrelid
            where indrelid = plain and index.relname not in ('record_pkey', 'record_expires_at', 'record_to_resume')
        ) then 'an index of your own' end,
        case when exists (
            select from pg_catalog.pg_index join pg_catalog.pg_class as index on index.oid = indexrelid
            where indrelid = plain and index.reloptions is not null
        ) then 'settings of an index' end,
        case when exists (
            select from pg_catalog.pg_attribute
            where attrelid = plain and attnum > 0 and not attisdropped
                -- Null for the default since PostgreSQL 17, and -1 before.
                and (coalesce(attstattarget::int4, -1) <> -1 or attoptions is not null)
        ) then 'statistics targets or options of a column' end,
        case when exists (
            select from pg_catalog.pg_class as toast where toast.oid = class.reltoastrelid and toast.reloptions is not null
        ) then 'settings of its toast table' end,
        -- 0 is the tablespace of the database.
        case when reltablespace <> 0::pg_catalog.oid or exists (
            select from pg_catalog.pg_index join pg_catalog.pg_class as index on index.oid = indexrelid
            where indrelid = plain and index.reltablespace <> 0::pg_catalog.oid
        ) then 'a tablespace of its own' end
    ) into lost
    from pg_catalog.pg_class as class where class.oid = plain;
    if lost <> '' then
        raise exception 'idempotency.record has %, which the partitioned table would not have', lost
            using hint = 'Remove it first, and create it again on the partitioned table. Run this as the owner of the table.';
    end if;
    -- Only leaves take storage parameters.
    select 'with (' || pg_catalog.array_to_string(reloptions, ', ') || ')' into options
    from pg_catalog.pg_class where oid = plain;
    alter table idempotency.record rename to plain_record;
    alter table idempotency.plain_record rename constraint record_pkey to plain_record_pkey;
    alter index idempotency.record_expires_at rename to plain_record_expires_at;
    alter index idempotency.record_to_resume rename to plain_record_to_resume;
    create table idempotency.record (like idempotency.plain_record including all excluding indexes)
        partition by hash (scope);
    alter table idempotency.record add constraint record_pkey primary key (value, scope, operation);
    create index record_expires_at on idempotency.record (expires_at);
    create index record_to_resume on idempotency.record (operation, claimed_at) where request is not null;
    comment on table idempotency.record is 'pg-idempotency: one row per idempotency key; delete none by hand that is not past expires_at';
    for n in 0 .. partitions - 1 loop
        execute pg_catalog.format(
            'create table idempotency.record_%s partition of idempotency.record for values with (modulus %s, remainder %s) %s',
            n, partitions, n, options
        );
    end loop;
    -- Default privileges may have given the new tables more rights than the plain table has.
    for privilege in
        select distinct acl.grantee, tree.relid::pg_catalog.regclass::text as target
        from pg_catalog.pg_partition_tree('idempotency.record') as tree
        join pg_catalog.pg_class as class on class.oid = tree.relid::pg_catalog.oid
        cross join lateral pg_catalog.aclexplode(class.relacl) as acl
        where acl.grantee <> class.relowner
    loop
        execute pg_catalog.format(
            'revoke all on %s from %s', privilege.target,
            case when privilege.grantee = 0::pg_catalog.oid then 'public'
                else pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(privilege.grantee)::text) end
        );
    end loop;
    -- The partitions too, because the sweep deletes from each of them by name.
    for privilege in
        select acl.*, tree.relid::pg_catalog.regclass::text as target
        from (
            select acl.grantee, acl.privilege_type, acl.is_grantable, '' as columns
            from pg_catalog.pg_class as class, pg_catalog.aclexplode(class.relacl) as acl
            where class.oid = plain and acl.grantee <> class.relowner
            union all
            select acl.grantee, acl.privilege_type, acl.is_grantable, pg_catalog.format('(%I)', attname)
            from pg_catalog.pg_attribute, pg_catalog.aclexplode(attacl) as acl
            where attrelid = plain and not attisdropped
        ) as acl,
        pg_catalog.pg_partition_tree('idempotency.record') as tree
    loop
        execute pg_catalog.format(
            'grant %s %s on %s to %s %s',
            privilege.privilege_type, privilege.columns, privilege.target,
            case when privilege.grantee = 0::pg_catalog.oid then 'public'
                else pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(privilege.grantee)::text) end,
            case when privilege.is_grantable then 'with grant option' end
        );
    end loop;
    insert into idempotency.record select * from idempotency.plain_record;
    drop table idempotency.plain_record;
end
$$;

-- A hostile role may only CREATE in the database, and was there first: it owns everything except the schema
-- `idempotency`. script/postgres runs this file in template1 of its temporary servers, so each test runs beside these
-- objects. Each of them fails when it is called.
--
-- First the lookalikes: relations and functions with names of the crate, and types with names of PostgreSQL, to which
-- the server casts values by itself.
create role stranger;

alter schema public owner to stranger;

-- The superuser is a member of this group only because the hostile role has granted it.
create role strangers_group;

grant strangers_group to stranger with admin option;

set role stranger;

grant strangers_group to postgres;

do $$
declare
    place text;
    name text;
begin
    -- The superuser creates this schema, so that the hostile role needs no CREATE on template1.
    set local role none;
    create schema strangers authorization stranger;
    set local role stranger;
    create function public.called() returns boolean language plpgsql as
        'begin raise exception ''code of a stranger was called''; end';
    foreach place in array array['public', 'strangers'] loop
        execute format('create view %I.record as select public.called() as mode', place);
        foreach name in array array[
            'is_plain()', 'await_key(text, text, text, int8, int8, timestamptz, text)', 'on_escape()', 'version()',
            'try_claim(text, text, text, int8, bytea, interval, int8)', 'fingerprint(bytea)',
            'unprotect(regclass)',
            'store_response(text, text, text, int8, bytea, int2, text)', 'with_partitions(regclass)', 'protect(regclass, text)',
            'ensure(text, text, text, bytea, interval, interval)', 'run(text, text, text, bytea, regproc, jsonb)',
            'complete(text, text, text, int8, int4, jsonb, bytea)'
        ] loop
            execute format('create function %I.%s returns boolean language sql as ''select public.called()''', place, name);
        end loop;
        foreach name in array array[
            'bool', 'bytea', 'int2', 'int4', 'int8', 'interval', 'jsonb', 'name', 'oid', 'regclass', 'text', 'timestamptz'
        ] loop
            execute format('create domain %I.%I as pg_catalog.%2$I check (public.called())', place, name);
        end loop;
        execute format('create type %I.bait as enum (''bait'')', place);
        foreach name in array array['bool', 'bytea', 'int4', 'int8', 'interval', 'jsonb', 'oid', 'text', 'timestamptz'] loop
            execute format(
                'create function %1$I.bait_of(pg_catalog.%2$I) returns %1$I.bait language plpgsql as '
                    '''begin perform public.called(); return null; end'';'
                'create function %1$I.%3$I(%1$I.bait) returns pg_catalog.%2$I language plpgsql as '
                    '''begin perform public.called(); return null; end'';'
                'create cast (pg_catalog.%2$I as %1$I.bait) with function %1$I.bait_of(pg_catalog.%2$I) as implicit;'
                'create cast (%1$I.bait as pg_catalog.%2$I) with function %1$I.%3$I(%1$I.bait) as implicit',
                place, name, name || '_of'
            );
        end loop;
        execute format('create collation %I."C" from pg_catalog."POSIX"', place);
    end loop;
    -- In public, the application's own migrator would read this view as its table.
    create view strangers._sqlx_migrations as select 1::int8 as version, public.called() as success, ''::bytea as checksum;
end
$$;

-- Then an operator for every pair of types that PostgreSQL's own operators take after an implicit cast only. PostgreSQL
-- prefers such an exact operator of any schema of the search_path, even one behind pg_catalog. So a statement that
-- needs an exact operator, and has none in pg_catalog, fails in every test that sends it. An operator for types that no
-- statement can combine would never be called, so there is none.
do $$
declare
    pair record;
begin
    -- The operators of public that exist already must not be found here.
    set local search_path = pg_catalog;
    for pair in
        with type (oid, is_array) as (
            select oid, typcategory = 'A' from pg_type
            where typnamespace = 'pg_catalog'::regnamespace::oid and typtype = 'b'
        ),
        -- The types of a parameter that accepts a value of this type.
        fits (type, parameter) as (
            select oid, oid from type
            union all
            select castsource, casttarget from pg_cast
            join type on type.oid = castsource join type as target on target.oid = casttarget
            where castcontext = 'i'
            union all
            select oid, case when is_array then 'anyarray'::regtype::oid else 'anynonarray'::regtype::oid end from type
        ),
        wanted (name, l, r) as (
            select oprname, l.type, r.type
            from pg_operator
            join fits as l on l.parameter = oprleft
            join fits as r on r.parameter = oprright
            -- No operator takes arrays of two kinds.
            where oprleft <> 'anyarray'::regtype::oid or oprright <> 'anyarray'::regtype::oid or l.type = r.type
            union
            -- A literal without a type first counts as one of the type on the other side.
            select oprname, type, type from pg_operator join fits on parameter in (oprleft, oprright)
        )
        select l::regtype::text as l, r::regtype::text as r, array_agg(name::text) as names
        from wanted
        where not exists (select from pg_operator where oprname = name and oprleft = l and oprright = r)
        group by 1, 2
    loop
        execute format(
            'create function public.hostile(%s, %s) returns boolean language plpgsql as %L', pair.l, pair.r,
            format('begin raise exception ''an operator of public was called for %s and %s: cast both to one type''; end', pair.l, pair.r)
        );
        for n in 1 .. cardinality(pair.names) loop
            execute format(
                'create operator public.%s (leftarg = %s, rightarg = %s, function = public.hostile)', pair.names[n], pair.l, pair.r
            );
        end loop;
    end loop;
end
$$;

reset role;

-- initdb has created this database before the hostile objects existed.
drop database postgres;

create database postgres;


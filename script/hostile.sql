-- What an attacker could do who may only CREATE in `public`: an operator for every pair of types that PostgreSQL's own operators
-- take after an implicit cast only. PostgreSQL prefers such an exact operator of any schema of the search_path, even one behind
-- pg_catalog. Each of these fails when it is called. script/postgres runs this file in template1 of its temporary servers, so
-- a statement that needs an exact operator, and has none in pg_catalog, fails in every test that sends it. An operator for types
-- that no statement can combine would never be called, so there is none.
do $$
declare
    pair record;
begin
    -- Without this the operators that exist already would answer here.
    set local search_path = pg_catalog;
    for pair in
        with type (oid, is_array) as (
            select oid, typcategory = 'A' from pg_type
            where typnamespace = 'pg_catalog'::regnamespace::oid and typtype = 'b'
        ),
        -- Which type a parameter may have that takes a value of the type.
        fits (type, parameter) as (
            select oid, oid from type
            union all
            select castsource, casttarget from pg_cast join type on type.oid = castsource where castcontext = 'i'
            union all
            select oid, case when is_array then 'anyarray'::regtype::oid else 'anynonarray'::regtype::oid end from type
        ),
        wanted (name, l, r) as (
            select oprname, l.type, r.type
            from pg_operator
            join fits as l on l.parameter = oprleft
            join fits as r on r.parameter = oprright
            -- Arrays of two kinds fit no operator.
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

-- initdb made it before the operators.
drop database postgres;

create database postgres;


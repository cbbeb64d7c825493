-- The only table of pg-idempotency. Each row is called a record, and belongs to one key.
--
-- any-language.sql adds functions for callers in other languages. A database without such callers does not need these functions.
--
-- `completed_at` shows whether the operation is complete, and `expires_at` shows how long the key is remembered. The table has no
-- CHECK constraints, because PostgreSQL parses each CHECK again for every statement, which makes a first call much slower.

create table idempotency.record (
    -- 'transaction', 'at_least_once', 'in_steps', 'at_most_once' or 'mark'. A key belongs to one mode.
    mode             text not null,
    -- The key: the owner, the operation and the client's value. Collation "C" compares bytes. So no locale makes two keys equal,
    -- and no upgrade of the system's collations breaks the index.
    scope            text collate "C" not null,
    operation        text collate "C" not null,
    value            text collate "C" not null,
    -- A version byte and a SHA-256 of everything that makes two requests the same. Null for a mark.
    fingerprint      bytea,
    -- The fencing token of the claim. The token is random, because a counter would restart after a purge, and a stale owner would
    -- match.
    token            bigint not null,
    -- 1 for the first claim, and one more for each take-over of an unfinished operation with the same body. 0 if the first claim
    -- has ended before its work began.
    attempt          integer not null default 1,
    -- An operator permits attempts up to this number, however small the service's limit is.
    granted_attempt  integer,
    -- The start of the claiming transaction. A completion requires that now() is still the same. This check detects every COMMIT
    -- after the claim, unless both are in the same message, which only a caller of the SQL functions can send. So the function
    -- idempotency.complete also checks whether the setting idempotency.claim still has the token.
    claimed_at       timestamptz not null default now(),
    -- The deadline of a lease. Null if the transaction itself is the lease, and -infinity after the claim is released.
    lease_until      timestamptz,
    -- From this moment on, the key is new unless a lease is live, even if no sweep has deleted the record.
    expires_at       timestamptz not null,
    -- A completion in transaction mode sets this column and the columns of the response. The columns come after those
    -- that the claim has set, because the WAL of a heap-only update does not repeat the unchanged beginning of a row.
    completed_at     timestamptz,
    -- The first response. The body is bytea, because a replay repeats every byte. jsonb rewrites numbers, and refuses \u0000.
    response_status  smallint,
    response_headers jsonb,
    response_body    bytea,
    -- The reason why the last attempt was released.
    last_error       text,
    -- In mode 'in_steps': {"<name>": {"result": "<JSON text>", "attempt": n, "at": time}}, or {"begun": time, "attempt": n} while
    -- it is unknown whether the step took effect. The latter also has "in_database": true if no other service has seen the step. The
    -- result is a string, because jsonb refuses \u0000 and loses -0.0.
    steps            jsonb,
    -- The request, so that a resumer can do the work if no caller comes back. It is JSON, or a request of the HTTP layer. The first
    -- byte of the latter is the version of its form. JSON never begins with a byte below 9.
    request          bytea,
    -- The findings of a reconciler about an operation in doubt. src/record/probes.rs describes them.
    probes           jsonb,

    -- The value comes first, because it distinguishes most keys. In a service with one scope, a comparison of two index entries would
    -- otherwise pass two equal texts first.
    constraint record_pkey primary key (value, scope, operation)
) with (
    -- Completion in transaction mode is a heap-only update without spare room, because it follows the claim on the same page.
    -- Room in every page would save 4 % of the WAL and cost two thirds more heap.
    fillfactor = 100,
    -- Rows are deleted as fast as they are inserted, so vacuum starts at a hundredth of the table. The server's default is a fifth.
    -- The setting is a share of the table, because each vacuum reads all indexes completely. The absolute thresholds spare a small
    -- table.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_insert_threshold = 100000,
    -- Sessions keep the plans that they made while the table was empty. These plans scan the whole table. The next analyze replaces
    -- the plans, so it comes early.
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 1000,
    -- Vacuum keeps the pages of an emptied table. Otherwise plans that are made at this moment would scan the whole table, and
    -- sessions would keep these plans while the table fills again.
    vacuum_truncate = false
);

-- The index of the sweep. An index on a column that completions or heartbeats change would end their heap-only updates. (In
-- transaction mode, nothing changes expires_at after the claim. A heartbeat changes expires_at only when less than two leases are
-- left.)
create index record_expires_at on idempotency.record (expires_at);

-- The index of resumers. A completion in transaction mode changes none of these columns, so the completion stays a heap-only
-- update.
create index record_to_resume on idempotency.record (operation, claimed_at) where request is not null;

comment on table idempotency.record is 'pg-idempotency: one row per idempotency key; delete none by hand that is not past expires_at';

-- lz4 compresses a response of 256 KB three times as fast as the default. It needs PostgreSQL 14 or later, built with lz4.
do $$ begin
    if exists (select from pg_catalog.pg_settings where name = 'default_toast_compression' and 'lz4' = any (enumvals)) then
        -- A text, because PostgreSQL 13 cannot parse the statement.
        execute 'alter table idempotency.record alter column response_body set compression lz4';
    end if;
end $$;

-- Returns true, or fails with 0A000 if Citus keeps the table, or executes this statement, on another node than the coordinator. There,
-- a lock or a setting is not that of the other callers. A Citus local table is on the coordinator. The statements that begin a call
-- contain this function. The function is declared immutable, so the server calls it when it plans such a statement, and the stored
-- plan does not contain the call. A change of the table's kind invalidates the plan.
create function idempotency.is_plain()
returns boolean language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
    on_citus boolean;
begin
    if to_regclass('pg_catalog.pg_dist_partition') is not null then
        -- Statements of their own, because a server without Citus has no such catalogs.
        select partmethod = 'n' and repmodel = 's' and colocationid = 0 into on_citus
        from pg_dist_partition where logicalrelid = 'idempotency.record'::regclass;
        if not on_citus then
            raise exception 'Citus distributes idempotency.record' using errcode = '0A000',
                hint = 'The table must stay on the coordinator: run undistribute_table, and then citus_add_local_table_to_metadata.';
        elsif on_citus and exists (select from pg_dist_local_group where groupid <> 0) then
            raise exception 'idempotency.record was used through a worker of Citus' using errcode = '0A000',
                hint = 'Connect to the coordinator.';
        elsif on_citus is null and exists (
            select from pg_dist_partition where not (partmethod = 'n' and repmodel = 's' and colocationid = 0)
        ) then
            raise warning 'idempotency.record does not commit together with the distributed tables of this database'
                using hint = 'Run on the coordinator: select citus_add_local_table_to_metadata(''idempotency.record'')';
        end if;
    end if;
    return true;
end
$$;

-- Waits until no open transaction holds the key whose advisory lock is $4, for at most $5 milliseconds. The function is volatile, so
-- that the read after the lock has a new snapshot. The function returns
--   'claim'    no record is there. The lock is kept, so that exactly one of the waiting calls claims the key;
--   'look'     a record is there. The lock is kept if the record can be taken over, so that exactly one call takes it over. (Such a
--              record had expired at $6, or is of the caller's mode $7 and is released or has lapsed.) Otherwise the lock is not
--              kept, so that replays do not queue, and no call holds the lock of a key that belongs to another mode;
--   'timeout'  the wait took too long. The lock is not kept.
-- The caller's transaction remains usable and gets its lock_timeout back, because the exception block undoes the settings
-- and locks.
create function idempotency.await_key(text, text, text, int8, int8, timestamptz, text)
returns text language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    callers text := current_setting('lock_timeout');
    callers_ms numeric := extract(epoch from callers::interval) * 1000;
    -- The columns of the record, under their own names: the condition below is that of `take_over` in src/record.
    mode text;
    lease_until timestamptz;
    completed_at timestamptz;
    expires_at timestamptz;
    steps jsonb;
    answer text;
begin
    -- PostgreSQL takes 0 for no limit.
    perform set_config('lock_timeout', case when callers_ms between 1 and $5 then callers else greatest($5, 1)::text end, true);
    perform pg_advisory_xact_lock($4);
    select record.mode, record.lease_until, record.completed_at, record.expires_at, record.steps
    into mode, lease_until, completed_at, expires_at, steps
    from idempotency.record as record
    where record.scope = $1 and record.operation = $2 and record.value = $3;
    answer := case when found then 'look' else 'claim' end;
    if found and (
        (expires_at <= least($6::timestamptz, pg_catalog.statement_timestamp())
            and (lease_until is null or lease_until <= pg_catalog.statement_timestamp()))
        or (mode = $7::text
            and (completed_at is null
                and (lease_until = '-infinity'
                    or (lease_until <= pg_catalog.statement_timestamp() and mode in ('at_least_once', 'in_steps')))
                and pg_catalog.jsonb_path_exists(steps, '$.*.begun') is not true))
    ) is not true then
        raise exception 'a record is there' using errcode = 'IK004';
    end if;
    perform set_config('lock_timeout', callers, true);
    return answer;
exception
    when sqlstate 'IK004' then return 'look';
    when lock_not_available then return 'timeout';
end
$$;

-- Takes the advisory locks of the keys of a batch, one after another, and locks the rows of those that have expired. Stops at the first
-- key with an obstacle, and returns its number and the reason: 'held' if an open transaction holds the key, 'locked' if a sweep or an
-- operator has locked the row. Both are null if there is no obstacle. The function waits for nothing.
create function idempotency.lock_in_order(
    scopes text[], operations text[], key_values text[], locks int8[], expired boolean[], out step int4, out state text
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    -- Null if no key is new or expired.
    for n in 1 .. coalesce(cardinality(locks), 0) loop
        if not pg_try_advisory_xact_lock(locks[n]) then
            state := 'held';
        elsif expired[n] then
            perform from idempotency.record as record
            where record.scope = scopes[n] and record.operation = operations[n] and record.value = key_values[n]
            for update skip locked;
            state := case when not found then 'locked' end;
        end if;
        if state is not null then
            step := n;
            return;
        end if;
    end loop;
end
$$;

-- The functions for tables of the service that may be written only inside idempotent operations. A statement trigger checks whether
-- the setting idempotency.claim has the token of a claim. The setting ends with the transaction. The check finds mistakes, and does
-- not stop attackers, because every role may change the setting.

-- Returns a table and its partitions of every depth, because a statement trigger fires only for the table that the statement names.
create function idempotency.with_partitions(relation regclass)
returns setof oid language sql stable set search_path = pg_catalog, pg_temp as $$
    with recursive tree (oid) as (
        select relation::oid
        union
        select inhrelid from pg_inherits join tree on inhparent = tree.oid
    )
    select oid from tree
$$;

-- The function of the trigger. The check is not a condition of the trigger (WHEN), because the server reads a condition
-- from its text for every statement, which costs twice as much as this call. The function has no search_path, because
-- every call would set and reset it. So the function names the schema of every function and type that it uses. It uses no
-- operator, because the server finds an operator by the search_path of the caller.
create function idempotency.on_escape()
returns trigger language plpgsql as $$
declare
    message pg_catalog.text;
begin
    if pg_catalog.texteq(coalesce(pg_catalog.current_setting('idempotency.claim', true), ''), '') then
        message := pg_catalog.format('%I.%I was written outside an idempotent operation (%s); write through the transaction of the '
            'call: IdempotentTx, the closure''s connection, or a step; a transaction that may write outside, such as a migration, '
            'begins with: set local idempotency.claim = ''exempt''', tg_table_schema, tg_table_name, tg_op);
        if pg_catalog.texteq(tg_argv[0], 'warn') then
            raise warning using message = message, errcode = 'IK006';
        else
            raise exception using message = message, errcode = 'IK006';
        end if;
    end if;
    return null;
end
$$;

-- Whether exactly this trigger guards the table. A trigger that a person has created may let some writes escape.
create function idempotency.is_protected(relation oid, warns boolean)
returns boolean language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    -- As `is_whole` of src/record.
    return coalesce(bool_and(
        tgenabled in ('O', 'A') and tgtype = 62 and tgattr::text = ''
        and tgargs = case when warns then decode('7761726e00', 'hex') else '' end and tgqual is null
    ), false) from pg_trigger where tgrelid = relation and tgfoid = 'idempotency.on_escape'::regproc;
end
$$;

-- Drops the triggers of a table. The caller holds the advisory lock of the table.
create function idempotency.drop_guards(relation oid)
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    name text;
begin
    for name in
        select tgname from pg_trigger where tgrelid = relation and tgfoid = 'idempotency.on_escape'::regproc
    loop
        execute format('lock table only %s in access exclusive mode', relation::regclass);
        execute format('drop trigger if exists %I on %s', name, relation::regclass);
    end loop;
end
$$;

-- Lets each write to this table outside an idempotent operation fail with IK006, or give a warning under 'warn'. If the table is
-- already protected in this way, the function locks nothing. A partition that is attached later needs another call.
create function idempotency.protect(relation regclass, on_escape text default 'refuse')
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    -- A word that is neither of the two gives null, and the condition below an error.
    warns constant boolean := case on_escape when 'warn' then true when 'refuse' then false end;
    target oid;
    reason text;
    guard record;
    others boolean;
begin
    for target in select idempotency.with_partitions(relation) order by 1 loop
        select case
            when warns is null then format('%L is neither ''refuse'' nor ''warn''', on_escape)
            when relnamespace = 'idempotency'::regnamespace then 'it is a table of pg-idempotency itself'
            when relkind in ('v', 'm') then 'it is a view; protect the tables behind it'
            when relkind = 'f' then 'it is a foreign table, whose writes commit in another database'
            when relkind not in ('r', 'p') then 'it is not a table'
            -- Its trigger would not fire for a write that names the parent.
            when target = relation and exists (select from pg_inherits where inhrelid = target)
                then 'it is a partition or a child of another table; protect that table'
        end into reason from pg_class where oid = target;
        if not found then
            reason := 'it does not exist';
        elsif reason is null and to_regclass('pg_catalog.pg_dist_partition') is not null then
            -- A statement of its own, because a server without Citus has no such catalog.
            if exists (select from pg_dist_partition where logicalrelid = target) then
                reason := 'Citus distributes it, and a worker that writes its shards does not see the claim';
            end if;
        end if;
        if reason is not null then
            raise exception '% cannot be protected: %', target::regclass, reason using errcode = 'IK007';
        end if;
        -- If it is protected so already, this locks nothing. Otherwise it looks again under a lock of its own, so that calls side
        -- by side see each other's triggers: DROP TRIGGER begins with a weak lock of the table, and two of them would deadlock.
        continue when idempotency.is_protected(target, warns);
        perform pg_advisory_xact_lock(hashtextextended('idempotency.protect', target::int8));
        continue when idempotency.is_protected(target, warns);
        perform idempotency.drop_guards(target);
        begin
            execute format(
                'create trigger idempotency_protect before insert or update or delete or truncate on %s for each statement '
                'execute function idempotency.on_escape(%s)',
                target::regclass, case when warns then '''warn''' end
            );
        exception when duplicate_object then
            -- A transaction above READ COMMITTED does not see that another one has protected the table.
            if not exists (select from pg_trigger where tgrelid = target and tgfoid = 'idempotency.on_escape'::regproc) then
                raise;
            end if;
        end;
    end loop;
end
$$;

create function idempotency.unprotect(relation regclass)
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    target oid;
begin
    for target in
        select tgrelid from pg_trigger
        where tgrelid in (select idempotency.with_partitions(relation)) and tgfoid = 'idempotency.on_escape'::regproc
        group by 1
        order by 1
    loop
        perform pg_advisory_xact_lock(hashtextextended('idempotency.protect', target::int8));
        perform idempotency.drop_guards(target);
    end loop;
end
$$;

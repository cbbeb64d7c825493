-- The only table of pg-idempotency. Each row is called a record and belongs to one key.
--
-- `completed_at` says whether the operation is complete, and `expires_at` says how long the key is remembered. strict.sql adds
-- the rules that every record keeps as CHECK constraints. They are not here because PostgreSQL parses each CHECK again for
-- every statement, which makes a first call much slower.

create table idempotency.record (
    -- 'transaction', 'at_least_once', 'in_steps', 'at_most_once' or 'mark'. A key belongs to one mode.
    mode             text not null,
    -- The key: the owner, the operation and the client's value. Collation "C" compares bytes: no locale makes two keys equal,
    -- and no upgrade of the system's collations breaks the index.
    scope            text collate "C" not null,
    operation        text collate "C" not null,
    value            text collate "C" not null,
    -- A version byte and a SHA-256 of what makes two requests the same; null for a mark.
    fingerprint      bytea,
    -- The fencing token of the claim. It is random: a counter would restart after a purge, and a stale owner would match.
    token            bigint not null,
    -- 1 for the first claim, and one more for each take-over of an unfinished operation with the same body. 0 once a first claim
    -- has ended before its work began.
    attempt          integer not null default 1,
    -- An operator permits attempts up to this number, however small the service's limit is.
    granted_attempt  integer,
    -- The start of the claiming transaction. Completion requires that now() is still the same. No COMMIT survives this, unless the
    -- claim is in the same message: so `complete` also asks whether the setting idempotency.claim still has the token.
    claimed_at       timestamptz not null default now(),
    -- The deadline of a lease: null where the transaction itself is the lease, -infinity once the claim is released.
    lease_until      timestamptz,
    completed_at     timestamptz,
    -- From this moment on the key is new, even if no sweep has deleted the record, unless a lease is live.
    expires_at       timestamptz not null,
    -- The first response. The body is bytea because a replay repeats every byte; jsonb rewrites numbers and refuses \u0000.
    response_status  smallint,
    response_headers jsonb,
    response_body    bytea,
    -- Why the last attempt was released.
    last_error       text,
    -- In mode 'in_steps': {"<name>": {"result": "<JSON text>", "attempt": n, "at": time}}, or {"begun": time, "attempt": n} while
    -- nobody knows whether the step took effect. The result is a string, because jsonb refuses \u0000 and loses -0.0.
    steps            jsonb,
    -- The request, so that a resumer can do the work if no caller comes back: JSON, or one of the HTTP layer, whose first byte
    -- is the version of its form. JSON never begins with a byte below 9.
    request          bytea,
    -- How often a resumer has sent the request to a service that knows it under another key, up to 20. This costs no attempt, and
    -- lengthens the distance to the next one as an attempt would. Null, and so without a byte, if it has never happened.
    misdirected      integer,
    -- What a reconciler has found out about an operation in doubt: see src/record/looks.rs.
    looks            jsonb,
    -- The traceparent of the last claim: 55 characters, or null.
    trace            text,

    constraint record_pkey primary key (scope, operation, value)
) with (
    -- Completion in transaction mode is a heap-only update without spare room, because it follows the claim on the same page.
    -- Room in every page would save 4 % of the WAL and cost two thirds more heap.
    fillfactor = 100,
    -- Rows are deleted as fast as they are inserted, so vacuum starts at a hundredth of the table; the server's default is a
    -- fifth. It is a share because each vacuum reads all indexes whole. The thresholds spare a small table.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_insert_threshold = 100000,
    -- Sessions keep the plans that they made while the table was empty, which scan all of it. The next analyze replaces these
    -- plans, so it comes early.
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 1000
);

-- For the sweep. An index on a column that completions or heartbeats change would end their heap-only updates. (In transaction
-- mode nothing changes expires_at after the claim. A heartbeat changes it only when less than two leases are left.)
create index record_expires_at on idempotency.record (expires_at);

-- For resumers. Completion in transaction mode changes none of these columns, so it stays a heap-only update.
create index record_to_resume on idempotency.record (operation, claimed_at) where request is not null;

comment on table idempotency.record is 'pg-idempotency: one row per idempotency key; delete none by hand that is not past expires_at';

-- lz4 compresses a response of 256 KB three times as fast as the default. It needs PostgreSQL 14 or later, built with lz4.
do $$ begin
    if exists (select from pg_catalog.pg_settings where name = 'default_toast_compression' and 'lz4' = any (enumvals)) then
        -- A text, because PostgreSQL 13 cannot parse the statement.
        execute 'alter table idempotency.record alter column response_body set compression lz4';
    end if;
end $$;

-- True, or the error 0A000 if Citus distributes the table: the usual statements would take the key's lock on a worker, where other
-- callers do not see it. Citus itself refuses only some of them. Those that begin a call contain this function. It is declared
-- immutable, so the server calls it when it plans such a statement, and the plan that it keeps does not contain it. A table that
-- is distributed later invalidates the plan.
create function idempotency.is_plain()
returns boolean language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
    if to_regclass('pg_catalog.pg_dist_partition') is not null then
        -- A statement of its own, because a server without Citus has no such catalog.
        if exists (select from pg_dist_partition where logicalrelid = 'idempotency.record'::regclass and partmethod = 'h') then
            raise exception 'Citus distributes idempotency.record' using errcode = '0A000',
                hint = 'The Rust library supports this with Deployment::with_distributed(true); the SQL functions do not.';
        end if;
    end if;
    return true;
end
$$;

-- Waits until no open transaction holds the key whose advisory lock is $4, for at most $5 milliseconds. Returns
--   'claim'    no record is there. The lock is kept, so that exactly one of the waiting calls claims the key;
--   'look'     a record is there. The lock is kept if the record can be taken over (it had expired at $6, or is of the caller's
--              mode $7 and is released or has lapsed), so that exactly one call takes it over. Otherwise the lock is not kept, so
--              that replays do not queue, and no call holds the lock of a key that belongs to another mode;
--   'timeout'  the wait took too long. The lock is not kept.
-- The caller's transaction remains usable and gets its lock_timeout back: the exception block undoes its settings and locks.
create function idempotency.await_key(text, text, text, int8, int8, timestamptz, text)
returns text language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    callers text := current_setting('lock_timeout');
    callers_ms numeric := extract(epoch from callers::interval) * 1000;
    -- The columns of the record, under their own names: the condition below is that of src/record/fragment.rs, word for word.
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

-- The option "fewest round trips" calls `claim_at_begin` and `store_response` in the messages that also begin and commit, where
-- nothing is prepared. The server keeps the plans of a function; planning anew costs more than a round trip on a Unix socket. The
-- statements are those of src/record/claim.rs and src/record/complete.rs, word for word, but for the age that the former returns and
-- the clock by which the latter judges the retention. They name the schema of every function and table, so there is no search_path,
-- which every call would set and reset.

-- True if this call has won the claim.
create function idempotency.try_claim(text, text, text, int8, bytea, interval, interval, text, int8, text)
returns boolean language plpgsql as $$
declare
    claims text;
begin
    insert into idempotency.record
        (mode, scope, operation, value, fingerprint, token, expires_at, lease_until, completed_at, trace)
    select
        $8::text, $1::text, $2::text, $3::text, $5::bytea, $4::int8,
        pg_catalog.statement_timestamp() + $6::interval,
        pg_catalog.statement_timestamp() + $7::interval,
        case when $8::text = 'mark' then pg_catalog.statement_timestamp() end,
        $10::text
    where case
        -- A replay takes no lock, and no claim waits in the insert for an update or delete of the record.
        when exists (
            select from idempotency.record where scope = $1::text and operation = $2::text and value = $3::text
        ) then false
        when idempotency.is_plain() then pg_catalog.pg_try_advisory_xact_lock($9::int8)
    end
    on conflict (scope, operation, value) do nothing
    returning pg_catalog.set_config('idempotency.claim', coalesce(pg_catalog.current_setting('idempotency.claim', true), '') || ' ' || $4::int8::text, true)
    into claims;
    return found;
end
$$;

-- The claim in the message that begins.
create function idempotency.claim_at_begin(text, text, text, int8, bytea, interval, interval, text, int8, text)
returns void language plpgsql as $$
begin
    -- The message that calls this function begins the transaction. If now() is older than the message, somebody else has begun
    -- one, and the crate must not commit it.
    if pg_catalog.now() <> pg_catalog.statement_timestamp() then
        raise exception 'the connection was already in a transaction' using errcode = 'IK005';
    end if;
    if not idempotency.try_claim($1, $2, $3, $4, $5, $6, $7, $8, $9, $10) then
        raise exception 'the idempotency key is taken' using errcode = 'IK001';
    end if;
end
$$;

create function idempotency.store_response(text, text, text, int8, bytea, int2, text)
returns void language plpgsql as $$
begin
    -- clock_timestamp(), because the retention may end within the statement that claims, performs and completes. On a distributed
    -- table Citus refuses it, so src/record/complete.rs asks as of the beginning of its statement.
    update idempotency.record
    set completed_at = pg_catalog.statement_timestamp(),
        response_body = $5::bytea, response_status = $6::int2, response_headers = $7::text::jsonb
    where scope = $1::text and operation = $2::text and value = $3::text
        and token = $4::int8 and completed_at is null and claimed_at = pg_catalog.now()
        and expires_at > pg_catalog.clock_timestamp();
    if not found then
        update idempotency.record set token = token
        where scope = $1::text and operation = $2::text and value = $3::text
            and token = $4::int8 and completed_at is null and claimed_at = pg_catalog.now();
        raise exception 'the claim of the idempotency key has ended, or its retention' using
            errcode = case when found then 'IK003' else 'IK002' end,
            hint = case when found then 'Roll back. The retention must be longer than the transaction.'
                else 'Roll back. Claim, perform and complete in one transaction (autocommit makes three), by the token of its claim.' end;
    end if;
end
$$;

-- The protocol of transaction mode for callers in any language, in a transaction of theirs (src/guide/any_language.md). No leases: their
-- owner needs a clock and a task that renews them. No marks: in autocommit, which a function cannot detect, a mark would commit without
-- its effect. The functions run with their caller's rights, so a role that may call them may read every response: PUBLIC may not.

-- The number of the last migration that changed these functions.
create function idempotency.version()
returns int4 language sql immutable parallel safe set search_path = pg_catalog, pg_temp as 'select 1';

-- Version 3 of the fingerprint: SHA-256 of the bytes as they are, which every language computes alike. With a search_path of its
-- own, PostgreSQL would not inline it, and each call would take ten microseconds more. So it names the schema of everything.
create function idempotency.fingerprint(request bytea)
returns bytea language sql immutable strict parallel safe as $$
    select pg_catalog.decode('03', 'hex') operator(pg_catalog.||) pg_catalog.sha256(request)
$$;

-- Claims the key, or finds the answer that src/claim/answer.rs gives; then nothing was done, and the transaction is usable. A null
-- wait is 5 seconds, or half the retention if that is shorter. statement_timestamp() stands still in a function and in a statement
-- that calls it, such as the CALL of a worker's loop, which may be hours old. So clock_timestamp() decides what has expired, from
-- when the retention counts, and what is left of the wait. Leases are judged as of the beginning of the statement, which is safe.
create function idempotency.ensure(
    scope text, operation text, value text, fingerprint bytea,
    retention interval default '24 hours', wait interval default null, trace text default null,
    out outcome text, out token int8, out status int4, out headers jsonb, out body bytea, out retry_after interval, out first_trace text
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    part text; bytes bytea;
    keyed bytea := '';
    refusal text;
    patience interval := coalesce($6, least(interval '5 s', greatest($5 / 2::float8, interval '1 ms')));
    -- A clock that has jumped back must not give an expired record another answer than its state.
    asked constant timestamptz := greatest(clock_timestamp(), statement_timestamp());
    waits_until timestamptz;
    milliseconds int8; lock_id int8;
    -- 62 of its bits are random. random() is not used, because its seed is a setting.
    drawn constant int8 := ('x'::text || encode(substr(uuid_send(gen_random_uuid()), 9), 'hex'))::bit(64)::int8;
    remembered interval;
    next_attempt int4;
    may_claim boolean := true;
    looks int4 := 0;
    seen record;
begin
    foreach part in array array[$1, $2, $3] loop
        bytes := convert_to(part, 'UTF8');
        if octet_length(bytes) between 1 and 255 and encode(bytes, 'hex') !~ '^(..)*([01].|7f|c2[89].)'
            -- Not only white space and invisible characters, in UTF-8: the list of src/key.rs.
            and encode(bytes, 'hex') !~ '^(20|c2a[0d]|cd8f|d89c|e185(9f|a0)|e19a80|e19eb[45]|e1a08[b-f]|e280(8.|a[89a-f])|e281(9f|a.)|'
                'e38080|e385a4|efb88.|efbbbf|efbea0|efbfb[0-8]|f09bb2a[0-3]|f09d85b[3-9a]|f3a0....)+$'
        then
            keyed := keyed || set_byte(decode('00', 'hex'), 0, octet_length(bytes)) || bytes;
        else
            refusal := 'scope, operation and value have 1 to 255 bytes each, no control characters, and a character that can be seen';
        end if;
    end loop;
    refusal := case
        when refusal is not null then refusal
        when (octet_length($4) = 33) is not true then 'a fingerprint has 33 bytes, as idempotency.fingerprint returns them'
        when ($5 between interval '1 ms' and interval '3660 days') is not true then 'a retention lasts from a millisecond to ten years'
        when not (patience = interval '0' or patience between interval '1 ms' and interval '1 hour') or $6 >= $5
            then 'a wait is 0, or lasts from a millisecond to an hour, and is shorter than the retention'
    end;
    if refusal is not null then
        raise exception 'idempotency.ensure does not take these arguments' using errcode = 'IK008', hint = refusal;
    end if;
    waits_until := clock_timestamp() + patience;
    -- The statements add it to the beginning of the statement. Without days, whose length would depend on the session's time zone.
    remembered := make_interval(secs => extract(epoch from $5)::float8 + extract(epoch from asked - statement_timestamp())::float8);
    -- As src/key.rs and src/trace.rs. What is no traceparent counts as none.
    lock_id := ('x'::text || encode(substr(sha256(keyed), 1, 8), 'hex'))::bit(64)::int8;
    trace := case
        when trace ~ '^(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}($|-)'
            and (length(trace) = 55 or trace not like '00%') then left(trace, 55)
    end;
    -- As src/claim/contend.rs.
    loop
        if may_claim and idempotency.try_claim($1, $2, $3, drawn, $4, remembered, null, 'transaction', lock_id, $7) then
            select 'claimed', drawn into outcome, token;
            return;
        end if;
        exit when looks = 10;
        looks := looks + 1;
        select
            record.*, case when record.token is null then pg_try_advisory_xact_lock(lock_id) end as mine,
            -- As src/record/fragment.rs, word for word.
            case
                when (expires_at <= pg_catalog.statement_timestamp() and
                    (lease_until is null or lease_until <= pg_catalog.statement_timestamp())) then 'expired'
                when completed_at is not null then case mode when 'mark' then 'mark' else 'completed' end
                when lease_until > pg_catalog.statement_timestamp() then 'in_flight'
                when (completed_at is null and (lease_until = '-infinity'
                    or (lease_until <= pg_catalog.statement_timestamp() and mode in ('at_least_once', 'in_steps')))
                    and pg_catalog.jsonb_path_exists(steps, '$.*.begun') is not true)
                    then case lease_until when '-infinity' then 'released' else 'lapsed' end
                else 'indeterminate'
            end as state,
            -- As src/fingerprint.rs. Two choices of version 2 cannot be compared.
            case
                when fingerprint = $4 then 'same'
                when substr(fingerprint, 1, case substr($4, 1, 1) when decode('02', 'hex') then 9 else 1 end)
                    <> substr($4, 1, case substr($4, 1, 1) when decode('02', 'hex') then 9 else 1 end) then 'unknown_fingerprint'
                else 'key_reused'
            end as compared,
            record.token::text = any (string_to_array(current_setting('idempotency.claim', true), ' ')) as own
        from (select) as one
        left join idempotency.record as record on record.scope = $1 and record.operation = $2 and record.value = $3
        into seen;
        may_claim := coalesce(seen.mine, false);
        continue when may_claim;
        if seen.token is null then
            outcome := 'held';
        else
            -- As src/claim/answer.rs.
            next_attempt := 1;
            outcome := case
                when seen.expires_at <= asked and (seen.lease_until is null or seen.lease_until <= statement_timestamp())
                    then 'take over'
                when seen.mode not in ('transaction', 'at_least_once', 'at_most_once', 'in_steps', 'mark') then 'unknown_mode'
                when seen.mode <> 'transaction' then 'other_mode'
                when seen.state = 'released' and (seen.attempt = 0 or seen.compared <> 'same') then 'take over'
                when seen.state = 'indeterminate' and seen.own then 'already_in_transaction'
                when seen.compared <> 'same' then seen.compared
                when seen.state = 'completed' then 'replayed'
                else seen.state
            end;
            if outcome = 'replayed' then
                select seen.response_status, seen.response_headers, seen.response_body, seen.trace into status, headers, body, first_trace;
            elsif outcome = 'in_flight' then
                retry_after := least(seen.lease_until, '9999-12-31 00:00:00+00') - statement_timestamp();
            elsif outcome = 'released' then
                select 'take over', least(seen.attempt, 2147483646) + 1 into outcome, next_attempt;
            elsif outcome = 'indeterminate' then
                raise warning 'the operation was claimed at % (attempt %, token %) and never completed',
                    seen.claimed_at, seen.attempt, seen.token
                    using hint = 'Find out whether it took effect, and settle it: idempotency-janitor resolve, or release. The usual '
                        'cause is autocommit: idempotency.ensure, the effect and idempotency.complete belong in one transaction.';
            end if;
            if outcome <> 'take over' then
                return;
            end if;
            -- As src/record/take_over.rs. No lock if another call has changed the record: then this call replays.
            perform from idempotency.record as record
            where record.scope = $1 and record.operation = $2 and record.value = $3 and record.token = seen.token;
            continue when not found;
            if not pg_try_advisory_xact_lock(lock_id) then
                outcome := 'held';
            else
                perform from idempotency.record as record
                where record.scope = $1 and record.operation = $2 and record.value = $3 for update skip locked;
                outcome := case when found then 'overtaken' else 'locked' end;
                update idempotency.record as record
                set mode = 'transaction', fingerprint = $4, token = drawn, attempt = next_attempt, granted_attempt = null,
                    claimed_at = now(), lease_until = null, completed_at = null, expires_at = statement_timestamp() + remembered,
                    response_status = null, response_headers = null, response_body = null,
                    last_error = case when next_attempt > 1 then last_error end, steps = null, request = null, looks = null,
                    misdirected = null, trace = $7
                where outcome = 'overtaken' and record.scope = $1 and record.operation = $2 and record.value = $3
                    and record.token = seen.token
                    and ((expires_at <= asked and (lease_until is null or lease_until <= statement_timestamp()))
                        or (mode = 'transaction' and completed_at is null and lease_until = '-infinity'));
                if found then
                    perform set_config('idempotency.claim', concat(current_setting('idempotency.claim', true), ' ', drawn), true);
                    select 'claimed', drawn into outcome, token;
                    return;
                end if;
            end if;
        end if;
        milliseconds := ceil(extract(epoch from least(waits_until - clock_timestamp(), patience)) * 1000);
        if outcome = 'held' then
            exit when milliseconds <= 0;
            outcome := idempotency.await_key($1, $2, $3, lock_id, milliseconds, asked, 'transaction');
            may_claim := outcome = 'claim';
            -- One more look, because the owner may have ended at this moment.
            patience := case outcome when 'timeout' then '0' else patience end;
            looks := 0;
        elsif outcome = 'locked' and milliseconds > 0 then
            perform pg_sleep(0.01);
            looks := 0;
        end if;
    end loop;
    select 'in_flight', interval '1 s' into outcome, retry_after;
end
$$;

-- Stores the response with the claim of this transaction. If it fails, nothing may be acknowledged. To the HTTP layer of the
-- library, a response with a status and no body is one that was not stored, so a status alone stores an empty body.
create function idempotency.complete(
    scope text, operation text, value text, token int8, status int4 default null, headers jsonb default null, body bytea default null
)
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    -- As src/http/replay.rs.
    never_replayed constant text[] := array[
        'authentication-info', 'authorization', 'connection', 'content-length', 'date', 'idempotency-key', 'idempotent-replayed',
        'keep-alive', 'proxy-authenticate', 'proxy-authorization', 'set-cookie', 'te', 'trailer', 'transfer-encoding', 'upgrade',
        'www-authenticate'
    ];
    refusal constant text := case
        when token is null then 'ensure returns a token with the outcome claimed; otherwise there is nothing to complete'
        when status not between 200 and 599 then 'a status is between 200 and 599, because a response with a lower one is not the last'
        when headers is not null and (status is null or jsonb_typeof(headers) <> 'array' or exists (
            select from jsonb_array_elements(case jsonb_typeof(headers) when 'array' then headers end) as header
            where case
                when jsonb_typeof(header) <> 'array' then true
                when jsonb_array_length(header) <> 2 then true
                else jsonb_typeof(header -> 0) <> 'string' or jsonb_typeof(header -> 1) <> 'string'
                    or (header ->> 0) !~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$'
                    or lower((header ->> 0) collate "C") = any (never_replayed)
                    -- Each character of a value stands for one byte (src/http/replay.rs), and none for a control character.
                    or encode(convert_to(header ->> 1, 'UTF8'), 'hex') ~ '^(..)*(0[0-8a-f]|1.|7f|c[4-9a-f]|[def].)'
            end
        )) then 'headers come with a status, and are [["name", "value"], ...], as HTTP permits them; no replay may repeat '
            || array_to_string(never_replayed, ', ')
    end;
begin
    if refusal is not null then
        raise exception 'idempotency.complete does not take these arguments' using errcode = 'IK008', hint = refusal;
    end if;
    -- Transactions in one message share now(), the time of the claim. So that time does not show that the transaction of the claim
    -- has ended; the setting does, which ends with the transaction. Without a token, store_response finds no claim.
    perform idempotency.store_response($1, $2, $3,
        case when $4::text = any (string_to_array(current_setting('idempotency.claim', true), ' ')) then $4 end,
        case when status is null then body else coalesce(body, '') end, status::int2,
        case when status is not null then coalesce(headers, '[]')::text end);
end
$$;

-- Both in one round trip: claims the key, calls the effect with the argument, and completes. In autocommit the statement commits
-- by itself; otherwise the transaction of the caller does. The outcome of a call that has claimed is 'performed'. The effect is a
-- function of one jsonb with the columns status int, headers jsonb and body bytea. It runs under the caller's search_path, so this
-- function has none of its own, and names the schema of everything. What the effect raises reaches the caller.
create function idempotency.run(
    scope text, operation text, value text, fingerprint bytea, effect regproc, argument jsonb,
    retention interval default '24 hours', wait interval default null, trace text default null,
    out outcome text, out status int4, out headers jsonb, out body bytea, out retry_after interval, out first_trace text
)
language plpgsql as $$
declare
    won int8;
begin
    select ensured.outcome, ensured.token, ensured.status, ensured.headers, ensured.body, ensured.retry_after, ensured.first_trace
    into outcome, won, status, headers, body, retry_after, first_trace
    from idempotency.ensure($1, $2, $3, $4, $7, $8, $9) as ensured;
    if won is not null then
        if $5 is null then
            raise exception 'idempotency.run does not take these arguments' using errcode = 'IK008', hint = 'an effect is a function';
        end if;
        -- regproc is written with its schema, unless the path finds this function and no other one of its name. The answer is that
        -- of a replay, to the byte.
        execute pg_catalog.format(
            'select answer.status, case when answer.status is null then answer.headers else coalesce(answer.headers, ''[]'') end, '
            'case when answer.status is null then answer.body else coalesce(answer.body, '''') end from %s($1) as answer', $5
        ) into status, headers, body using $6;
        perform idempotency.complete($1, $2, $3, won, status, headers, body);
        outcome := 'performed';
    end if;
end
$$;

revoke all on function idempotency.version, idempotency.fingerprint, idempotency.ensure, idempotency.complete, idempotency.run
    from public;

-- The tables of the service that are written inside idempotent operations only. A statement trigger asks whether the setting
-- idempotency.claim has the token of a claim; it ends with the transaction. This is against mistakes, not against attackers: every
-- role may set the setting.

-- A table and its partitions of every depth: a statement trigger fires for the table that the statement names, and no other.
create function idempotency.with_partitions(relation regclass)
returns setof oid language sql stable set search_path = pg_catalog, pg_temp as $$
    with recursive tree (oid) as (
        select relation::oid
        union
        select inhrelid from pg_inherits join tree on inhparent = tree.oid
    )
    select oid from tree
$$;

-- The trigger's condition has found no token.
create function idempotency.on_escape()
returns trigger language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    message constant text := format('%s was written outside an idempotent operation (%s); write through the transaction of the '
        'call: IdempotentTx, the closure''s connection, or a step; a transaction that may write outside, such as a migration, '
        'begins with: set local idempotency.claim = ''exempt''', tg_relid::regclass, lower(tg_op));
begin
    if tg_argv[0] = 'warn' then
        raise warning using message = message, errcode = 'IK006';
    else
        raise exception using message = message, errcode = 'IK006';
    end if;
    return null;
end
$$;

-- Whether exactly this trigger guards the table: one that somebody made by hand may let some writes escape.
create function idempotency.is_protected(relation oid, warns boolean)
returns boolean language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    -- As src/record/protect.rs.
    return coalesce(bool_and(
        tgenabled in ('O', 'A') and tgtype = 62 and tgattr::text = ''
        and tgargs = case when warns then decode('7761726e00', 'hex') else '' end
        -- Without the quotes of quote_all_identifiers.
        and replace(pg_get_expr(tgqual, tgrelid), '"', '') is not distinct from
            '(COALESCE(current_setting(''idempotency.claim''::text, true), ''''::text) = ''''::text)'
    ), false) from pg_trigger where tgrelid = relation and tgfoid = 'idempotency.on_escape'::regproc;
end
$$;

-- Under the advisory lock of the table.
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

-- From now on a write to this table outside an idempotent operation fails with IK006, or gives a warning under 'warn'. If it is
-- protected so already, this locks nothing. A partition that is attached later needs another call.
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
            when relkind not in ('r', 'p') then 'it is no table'
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
                'when (coalesce(current_setting(''idempotency.claim'', true), '''') = '''') '
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

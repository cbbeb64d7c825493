-- The one table of pg-idempotency: a row, called a record, for every key that is remembered.
-- An operator who looks first at `completed_at` and `expires_at` knows what a row is: done, or not; alive, or due for the sweep.

create table idempotency.record (
    -- Which promise the row is part of. A key belongs to one mode.
    mode             text not null,

    -- The key: whose, what, and the client's value. Collation "C" compares bytes: no locale makes two keys one, and no
    -- upgrade of the system's collations breaks the index.
    scope            text collate "C" not null,
    operation        text collate "C" not null,
    key              text collate "C" not null,

    -- A version byte and a SHA-256 of what makes two requests the same; a mark has none.
    fingerprint      bytea,

    -- The fencing token of the claim. Random, not counted: a count starts again after a purge, and a stale owner would match.
    token            bigint not null,
    attempt          integer not null default 1,

    -- The start of the claiming transaction. Completion demands that it is still now(), which no COMMIT inside it survives.
    claimed_at       timestamptz not null default now(),

    -- The deadline of a lease; null where the transaction itself is the lease; -infinity once the claim was released.
    lease_until      timestamptz,
    completed_at     timestamptz,

    -- How long the key is remembered. Past it the key is new, whether or not the row was swept.
    expires_at       timestamptz not null,

    -- The first answer. bytea, because a replay is byte for byte and jsonb rewrites numbers and refuses \u0000.
    response_status  smallint,
    response_headers jsonb,
    response_body    bytea,

    -- Why the last attempt was released, for whoever has to decide about it.
    last_error       text,

    constraint record_pkey primary key (scope, operation, key),
    constraint known_mode check (mode in ('transaction', 'at_least_once', 'at_most_once', 'mark')),
    constraint key_length check (
        octet_length(scope) between 1 and 255
        and octet_length(operation) between 1 and 255
        and octet_length(key) between 1 and 255
    ),
    constraint fingerprint_unless_mark check ((mode = 'mark') = (fingerprint is null)),
    constraint fingerprint_is_versioned check (octet_length(fingerprint) between 2 and 255),
    constraint attempts_count_from_one check (attempt >= 1),
    constraint mark_is_complete check (mode <> 'mark' or completed_at is not null),
    constraint completed_has_no_lease check (completed_at is null or lease_until is null),
    constraint deadline_only_for_leases check (
        lease_until is null
        or mode in ('at_least_once', 'at_most_once')
        or (mode = 'transaction' and lease_until = '-infinity')
    ),
    constraint unfinished_lease_has_a_deadline check (
        mode not in ('at_least_once', 'at_most_once') or completed_at is not null or lease_until is not null
    ),
    constraint response_only_when_completed check (
        completed_at is not null
        or (response_status is null and response_headers is null and response_body is null)
    )
) with (
    -- Completion in transaction mode is a heap-only update because it meets the page that the claim has just filled; spare
    -- room in every page would cost two thirds more heap for four per cent less WAL.
    fillfactor = 100,
    -- A hundredth, where the server's own default is a fifth, a backlog of hours. Not by count alone: a vacuum that clears the
    -- indexes reads both whole, so its work should be in proportion to the table. The counts keep a small one from being
    -- vacuumed every minute.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_vacuum_insert_threshold = 100000,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 50000
);

-- For the sweep. A lease's retention starts anew when it completes, which is no heap-only update then. No other index: one on a
-- column that every completion or heartbeat changes would end theirs too.
create index record_expires_at on idempotency.record (expires_at);

comment on table idempotency.record is 'pg-idempotency: one row per idempotency key; delete none by hand that is not past expires_at';

-- The claims and the completion of src/record once more, word for word, for the messages that also begin or commit. Such a
-- message is a text, in which nothing is prepared. In functions, because the server keeps their plans: planned anew for
-- each message, either statement costs more than a round trip on a Unix socket.

create function idempotency.claim_waiting(text, text, text, bytea, int8, interval, int8, text, text, interval)
returns void language plpgsql as $$
declare
    restored text;
    locked   bool;
begin
    insert into idempotency.record
        (mode, scope, operation, key, fingerprint, token, expires_at, lease_until, completed_at)
    values (
        $9::text, $1::text, $2::text, $3::text, $4::bytea,
        case when set_config('idempotency.lock_timeout', current_setting('lock_timeout'), true) is not null
        then
            case when set_config(
                'lock_timeout',
                case when current_setting('lock_timeout')::interval between '1 ms' and $8::text::interval
                    then current_setting('lock_timeout')
                    else $8::text
                end,
                true
            ) is not null
            then
                case when pg_try_advisory_xact_lock($7::int8) is not null then $5::int8 end
            end
        end,
        statement_timestamp() + $6::interval,
        statement_timestamp() + $10::interval,
        case when $9::text = 'mark' then statement_timestamp() end
    )
    on conflict (scope, operation, key) do nothing
    returning
        set_config('lock_timeout', current_setting('idempotency.lock_timeout'), true),
        pg_try_advisory_xact_lock($7::int8) as locked
    into restored, locked;
    if not found then
        raise exception 'the idempotency key is taken' using errcode = 'IK001';
    end if;
    if not locked then
        perform pg_try_advisory_xact_lock($7::int8);
    end if;
end
$$;

create function idempotency.claim_rejecting(text, text, text, bytea, int8, interval, int8, text, text, interval)
returns void language plpgsql as $$
declare
    restored text;
    locked   bool;
begin
    insert into idempotency.record
        (mode, scope, operation, key, fingerprint, token, expires_at, lease_until, completed_at)
    select
        $9::text, $1::text, $2::text, $3::text, $4::bytea, $5::int8,
        statement_timestamp() + $6::interval,
        statement_timestamp() + $10::interval,
        case when $9::text = 'mark' then statement_timestamp() end
    where
        case when set_config('idempotency.lock_timeout', current_setting('lock_timeout'), true) is not null
        then
            case when set_config('lock_timeout', $8::text, true) is not null
            then pg_try_advisory_xact_lock($7::int8)
            end
        end
    on conflict (scope, operation, key) do nothing
    returning
        set_config('lock_timeout', current_setting('idempotency.lock_timeout'), true),
        true as locked
    into restored, locked;
    if not found then
        raise exception 'the idempotency key is taken' using errcode = 'IK001';
    end if;
end
$$;

create function idempotency.complete(text, text, text, int8, bytea, int2, text)
returns void language plpgsql as $$
begin
    update idempotency.record
    set completed_at = statement_timestamp(),
        response_body = $5::bytea, response_status = $6::int2, response_headers = $7::text::jsonb
    where scope = $1::text and operation = $2::text and key = $3::text
        and token = $4::int8
        and completed_at is null
        and claimed_at = now()
        and expires_at > statement_timestamp();
    if found then
        return;
    end if;
    perform
    from idempotency.record
    where scope = $1::text and operation = $2::text and key = $3::text
        and token = $4::int8
        and completed_at is null
        and claimed_at = now();
    if found then
        raise exception 'the idempotency key has outlived its retention' using errcode = 'IK003';
    end if;
    raise exception 'the transaction of the idempotency key''s claim has ended' using errcode = 'IK002';
end
$$;

comment on function idempotency.claim_waiting is 'pg-idempotency: claims a key, or fails with IK001';
comment on function idempotency.claim_rejecting is 'pg-idempotency: claims a key without waiting, or fails with IK001';
comment on function idempotency.complete is 'pg-idempotency: stores the response of a claim, or fails with IK002 or IK003';

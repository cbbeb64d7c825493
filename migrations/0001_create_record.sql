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
    -- Completion is a heap-only update because it meets the page that the claim has just filled; spare room in every page
    -- would cost two thirds more heap for four per cent less WAL.
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

-- For the sweep. No other index: one on a column that completion or a heartbeat changes would end their heap-only updates.
create index record_expires_at on idempotency.record (expires_at);

comment on table idempotency.record is 'pg-idempotency: one row per idempotency key; delete none by hand that is not past expires_at';

-- The protocol of transaction mode as SQL functions, for callers in any language (src/guide/any_language.md). The callers begin and
-- commit the transaction. There is no function for a lease, because an owner needs a clock and a task that renews the lease. There is
-- no function for a mark: a function cannot detect autocommit, in which a mark would commit without its effect. The functions run with
-- the rights of their caller. A role that may call `ensure`, `complete` or `run` may read every response, so PUBLIC may not.
--
-- The Rust library does not need these functions. `migrate --any-language` creates the functions. After that, each `migrate` of a later
-- release replaces them. This file can be run again. Then only the grants of PUBLIC are lost.

-- Each release with a changed file raises this number. `migrate` reads the number of the existing functions in the catalog. It replaces
-- functions with a lower number, and keeps functions with a higher number. The names and the arguments stay, because processes of other
-- releases call the functions by them. Only a migration adds or removes a function.
create or replace function idempotency.version()
returns int4 language sql immutable parallel safe set search_path = pg_catalog, pg_temp as 'select 1';

-- Version 3 of the fingerprint: the SHA-256 of the unchanged bytes, which every language computes in the same way. The function has no
-- search_path of its own, because PostgreSQL inlines only a function without one. So the function names the schema of everything.
create or replace function idempotency.fingerprint(request bytea)
returns bytea language sql immutable strict parallel safe as $$
    select pg_catalog.decode('03', 'hex') operator(pg_catalog.||) pg_catalog.sha256(request)
$$;

-- The claim and the completion repeat the statements `claim` and `complete` of src/record. Each call would set and reset a search_path, so
-- both functions name the schema of everything instead.

-- Returns true if this call has won the claim.
create or replace function idempotency.try_claim(text, text, text, int8, bytea, interval, int8)
returns boolean language plpgsql as $$
declare
    claims text;
begin
    insert into idempotency.record (mode, scope, operation, value, fingerprint, token, expires_at)
    select 'transaction', $1::text, $2::text, $3::text, $5::bytea, $4::int8, pg_catalog.statement_timestamp() + $6::interval
    where case
        -- A replay takes no lock. No claim waits in the insert for an update or delete of a record that it sees.
        when exists (
            select from idempotency.record where scope = $1::text and operation = $2::text and value = $3::text
        ) then false
        when idempotency.is_plain() then pg_catalog.pg_try_advisory_xact_lock($7::int8)
    end
    on conflict (scope, operation, value) do nothing
    -- The token comes from the column, because Citus refuses a parameter here.
    returning pg_catalog.set_config('idempotency.claim',
        coalesce(pg_catalog.current_setting('idempotency.claim', true), '') || ' ' || record.token::text, true)
    into claims;
    return found;
end
$$;

create or replace function idempotency.store_response(text, text, text, int8, bytea, int2, text)
returns void language plpgsql as $$
declare
    -- One statement may claim, perform and complete. The retention may end within this statement, so clock_timestamp() decides. The
    -- time is a variable, because Citus refuses a volatile function in the condition of an update.
    this_moment constant timestamptz := pg_catalog.clock_timestamp();
begin
    update idempotency.record
    set completed_at = pg_catalog.statement_timestamp(),
        response_body = $5::bytea, response_status = $6::int2, response_headers = $7::text::jsonb
    where scope = $1::text and operation = $2::text and value = $3::text
        and token = $4::int8 and completed_at is null and claimed_at = pg_catalog.now()
        and (expires_at > this_moment) is true;
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

-- Claims the key, or finds the answer that src/claim/answer.rs gives. With any outcome but 'claimed', nothing was done, and the
-- transaction is usable. A null wait means 5 seconds, or half the retention if that is shorter.
--
-- statement_timestamp() does not change within a function, or within the statement that calls the function. Such a statement, for
-- example the CALL of a worker's loop, may have begun hours ago. So clock_timestamp() decides whether a record has expired, when the
-- retention begins, and how much of the wait is left. For leases, the beginning of the statement decides. A lease then seems to live
-- longer than it does, which is safe.
create or replace function idempotency.ensure(
    scope text, operation text, value text, fingerprint bytea,
    retention interval default '24 hours', wait interval default null,
    out outcome text, out token int8, out status int4, out headers jsonb, out body bytea, out retry_after interval
)
language plpgsql set search_path = pg_catalog, pg_temp as $$
#variable_conflict use_column
declare
    part text; bytes bytea;
    keyed bytea := '';
    refusal text;
    patience interval;
    -- If the clock has jumped back, the later time counts, so that the answer agrees with `state` below.
    asked constant timestamptz := greatest(clock_timestamp(), statement_timestamp());
    milliseconds int8; lock_id int8;
    -- A hash of 122 random bits. random() would not do, because a setting can fix its seed.
    drawn constant int8 := uuid_hash_extended(gen_random_uuid(), 0);
    remembered interval;
    next_attempt int4;
    may_claim boolean := true;
    looks int4 := 0;
    -- As in src/claim/swallowed.rs: what the last looks have found free, which is a token or 'nothing', and the number of these looks.
    found_free text;
    times_free int4 := 0;
    seen record;
begin
    -- A faster way for the usual keys, which have up to 127 ASCII characters in each part.
    if greatest(length($1), length($2), length($3)) < 128
        and $1 || chr(10) || $2 || chr(10) || $3 ~ '^[ -~]*[!-~][^ -~][ -~]*[!-~][^ -~][ -~]*[!-~]$'
    then
        keyed := convert_to(chr(length($1)) || $1 || chr(length($2)) || $2 || chr(length($3)) || $3, 'UTF8');
    else
        foreach part in array array[$1, $2, $3] loop
            bytes := convert_to(part, 'UTF8');
            if octet_length(bytes) between 1 and 255 and encode(bytes, 'hex') !~ '^(..)*([01].|7f|c2[89].)'
                -- At least one character can be seen. The list of invisible characters, in UTF-8, is that of src/key.rs.
                and encode(bytes, 'hex') !~ '^(20|c2a[0d]|cd8f|d89c|e185(9f|a0)|e19a80|e19eb[45]|e1a08[b-f]|e280(8.|a[89a-f])|'
                    'e281(9f|a.)|e38080|e385a4|efb88.|efbbbf|efbea0|efbfb[0-8]|f09bb2a[0-3]|f09d85b[3-9a]|f3a0....)+$'
            then
                keyed := keyed || set_byte(decode('00', 'hex'), 0, octet_length(bytes)) || bytes;
            else
                refusal := 'scope, operation and value have 1 to 255 bytes each, no control characters, and a character that can be seen';
            end if;
        end loop;
    end if;
    -- In each transaction, PL/pgSQL prepares each expression that it evaluates, with all branches of the expression. So the reasons
    -- of a refusal are an expression of their own, which most calls do not evaluate. The seconds of an interval are compared, because
    -- they are used below. A comparison of intervals counts a year as 360 days.
    if (refusal is null and octet_length($4) = 33 and $6 is null
        and date_part('epoch', $5) between 0.001::float8 and 316224000::float8) is not true
    then
        refusal := case
            when refusal is not null then refusal
            when (octet_length($4) = 33) is not true then 'a fingerprint has 33 bytes, as idempotency.fingerprint returns them'
            when (date_part('epoch', $5) between 0.001::float8 and 316224000::float8) is not true
                then 'a retention lasts from a millisecond to ten years'
            when not (date_part('epoch', $6) = 0::float8 or date_part('epoch', $6) between 0.001::float8 and 3600::float8)
                or date_part('epoch', $6) >= date_part('epoch', $5)
                then 'a wait is 0, or lasts from a millisecond to an hour, and is shorter than the retention'
        end;
        if refusal is not null then
            raise exception 'idempotency.ensure does not take these arguments' using errcode = 'IK008', hint = refusal;
        end if;
    end if;
    -- The retention from the beginning of the statement, without days, whose length would depend on the session's time zone.
    remembered := make_interval(secs => date_part('epoch', $5 + (asked - statement_timestamp())));
    -- As in src/key.rs.
    lock_id := ('x'::text || encode(substr(sha256(keyed), 1, 8), 'hex'))::bit(64)::int8;
    -- As in src/claim.rs. Within the loop, `outcome` also has the values 'held', 'locked', 'overtaken' and 'take over', and those of
    -- await_key. No caller gets these values.
    loop
        if may_claim and idempotency.try_claim($1, $2, $3, drawn, $4, remembered, lock_id) then
            outcome := 'claimed';
            token := drawn;
            return;
        end if;
        exit when looks = 10;
        looks := looks + 1;
        select
            record.*, case when record.token is null then pg_try_advisory_xact_lock(lock_id) end as mine,
            -- The text is that of `state` of src/record.
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
            -- As in src/fingerprint.rs. Two fingerprints of version 2 with different choices of fields cannot be compared.
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
        if may_claim then
            select case found_free when 'nothing' then times_free + 1 else 1 end, 'nothing' into times_free, found_free;
            exit when times_free > 2;
            continue;
        end if;
        if seen.token is null then
            outcome := 'held';
        else
            -- As in src/claim/answer.rs.
            next_attempt := 1;
            outcome := case
                when seen.mode = 'transaction' and seen.completed_at is null and seen.lease_until is null and seen.own
                    then 'already_in_transaction'
                when seen.expires_at <= asked and (seen.lease_until is null or seen.lease_until <= statement_timestamp())
                    then 'take over'
                when seen.mode not in ('transaction', 'at_least_once', 'at_most_once', 'in_steps', 'mark') then 'unknown_mode'
                when seen.mode <> 'transaction' then 'other_mode'
                when seen.state = 'released' and (seen.attempt = 0 or seen.compared <> 'same') then 'take over'
                when seen.compared <> 'same' then seen.compared
                when seen.state = 'completed' then 'replayed'
                else seen.state
            end;
            if outcome = 'replayed' then
                select seen.response_status, seen.response_headers, seen.response_body into status, headers, body;
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
            select case found_free when seen.token::text then times_free + 1 else 1 end, seen.token into times_free, found_free;
            exit when times_free > 2;
            -- As in `take_over` of src/record. If another call has changed the record, this call takes no lock, because it will replay.
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
                    last_error = case when next_attempt > 1 then last_error end, steps = null, request = null, probes = null
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
        patience := coalesce(patience, make_interval(secs =>
            coalesce(date_part('epoch', $6), least(5::float8, greatest(date_part('epoch', $5) / 2::float8, 0.001::float8)))));
        milliseconds := ceil(extract(epoch from least(asked + patience - clock_timestamp(), patience)) * 1000);
        times_free := case outcome when 'overtaken' then times_free else 0 end;
        if outcome = 'held' then
            exit when milliseconds <= 0;
            outcome := idempotency.await_key($1, $2, $3, lock_id, milliseconds, asked, 'transaction');
            may_claim := outcome = 'claim';
            -- After the wait, the call looks once more, because the owner may have ended at this moment.
            patience := case outcome when 'timeout' then '0' else patience end;
            looks := 0;
        elsif outcome = 'locked' and milliseconds > 0 then
            perform pg_sleep(0.01);
            looks := 0;
        end if;
    end loop;
    if times_free > 2 then
        raise exception 'the idempotency key is free, but the database stores no record for it, or hides its record' using
            errcode = 'IK009',
            hint = 'Look for a BEFORE trigger that returns null, or a policy of row level security, on idempotency.record, which '
                'idempotency-janitor health names.';
    end if;
    select 'in_flight', interval '1 s' into outcome, retry_after;
end
$$;

-- Stores the response under the claim of this transaction. If the function fails, nothing may be acknowledged. A status without a body
-- stores an empty body, because the HTTP layer of the library reads a missing body as a response that was not stored.
create or replace function idempotency.complete(
    scope text, operation text, value text, token int8, status int4 default null, headers jsonb default null, body bytea default null
)
returns void language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    -- NEVER_REPLAYED of src/http/replay.rs.
    never_replayed constant text := 'authentication-info, authorization, connection, content-length, date, idempotency-key, '
        'idempotent-replayed, keep-alive, proxy-authenticate, proxy-authorization, proxy-connection, set-cookie, te, trailer, '
        'transfer-encoding, upgrade, www-authenticate';
    refusal text;
begin
    if token is null then
        refusal := 'ensure returns a token with the outcome claimed; otherwise there is nothing to complete';
    elsif status not between 200 and 599 then
        refusal := 'a status is between 200 and 599, because a response with a lower one is not the last';
    elsif headers is not null then
        -- The query is in a statement of its own, so that calls without headers do not pay for it.
        if status is null or jsonb_typeof(headers) <> 'array' or exists (
            select from jsonb_array_elements(case jsonb_typeof(headers) when 'array' then headers end) as header
            where case
                when jsonb_typeof(header) <> 'array' then true
                when jsonb_array_length(header) <> 2 then true
                else jsonb_typeof(header -> 0) <> 'string' or jsonb_typeof(header -> 1) <> 'string'
                    or (header ->> 0) !~ '^[!#$%&''*+.^_`|~0-9A-Za-z-]+$'
                    or lower((header ->> 0) collate "C") = any (string_to_array(never_replayed, ', '))
                    -- Each character of a value stands for one byte (src/http/request.rs). Control characters are refused.
                    or encode(convert_to(header ->> 1, 'UTF8'), 'hex') ~ '^(..)*(0[0-8a-f]|1.|7f|c[4-9a-f]|[def].)'
            end
        ) then
            refusal := 'headers come with a status, and are [["name", "value"], ...], as HTTP permits them; no replay may repeat '
                || never_replayed;
        end if;
    end if;
    if refusal is not null then
        raise exception 'idempotency.complete does not take these arguments' using errcode = 'IK008', hint = refusal;
    end if;
    -- Two transactions in one message have the same now(), which is the time of the claim. So now() does not show that the transaction
    -- of the claim has ended. The setting shows it, because the setting ends with the transaction. Without a token, store_response
    -- finds no claim.
    perform idempotency.store_response($1, $2, $3,
        case when $4::text = any (string_to_array(current_setting('idempotency.claim', true), ' ')) then $4 end,
        case when status is null then body else coalesce(body, '') end, status::int2,
        case when status is not null then coalesce(headers, '[]')::text end);
end
$$;

-- Claims the key, calls the effect with the argument, and stores the response, all in one round trip. In autocommit, the statement
-- commits by itself. The outcome of a call that has claimed is 'performed'. The effect is a function of one jsonb that returns the
-- columns status int, headers jsonb and body bytea. The effect runs under the caller's search_path. So this function has no search_path
-- of its own, and names the schema of everything. The caller gets the errors of the effect.
create or replace function idempotency.run(
    scope text, operation text, value text, fingerprint bytea, effect regproc, argument jsonb,
    retention interval default '24 hours', wait interval default null,
    out outcome text, out status int4, out headers jsonb, out body bytea, out retry_after interval
)
language plpgsql as $$
declare
    won int8;
begin
    select ensured.outcome, ensured.token, ensured.status, ensured.headers, ensured.body, ensured.retry_after
    into outcome, won, status, headers, body, retry_after
    from idempotency.ensure($1, $2, $3, $4, $7, $8) as ensured;
    if won is not null then
        if $5 is null then
            raise exception 'idempotency.run does not take these arguments' using errcode = 'IK008', hint = 'an effect is a function';
        end if;
        -- A regproc prints its schema, unless the search_path leads to this function alone. The first answer has the bytes of a
        -- replay.
        execute pg_catalog.format(
            'select answer.status, case when answer.status is null then answer.headers else coalesce(answer.headers, ''[]'') end, '
            'case when answer.status is null then answer.body else coalesce(answer.body, '''') end from %s($1) as answer', $5
        ) into status, headers, body using $6;
        perform idempotency.complete($1, $2, $3, won, status, headers, body);
        outcome := 'performed';
    end if;
end
$$;

-- try_claim and store_response keep their grant to PUBLIC, because a role without rights on the table can do nothing with them.
revoke all on function idempotency.version, idempotency.fingerprint, idempotency.ensure, idempotency.complete, idempotency.run
    from public;

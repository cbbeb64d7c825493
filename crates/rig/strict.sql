-- The rules that every record keeps, as CHECK constraints. The tests run with these constraints, so every statement that
-- the crate sends keeps the rules. The migrations do not contain them, because PostgreSQL parses each CHECK again for
-- every statement, so a first call costs the server much more time. A second application changes nothing.

alter table idempotency.record
    drop constraint if exists known_mode,
    drop constraint if exists key_length,
    drop constraint if exists key_without_control_characters,
    drop constraint if exists fingerprint_unless_mark,
    drop constraint if exists fingerprint_is_versioned,
    drop constraint if exists attempts_count_from_one,
    drop constraint if exists grant_only_to_repeat,
    drop constraint if exists mark_is_complete,
    drop constraint if exists completed_has_no_lease,
    drop constraint if exists deadline_only_for_leases,
    drop constraint if exists unfinished_lease_has_a_deadline,
    drop constraint if exists response_only_when_completed,
    drop constraint if exists steps_only_in_steps,
    drop constraint if exists request_only_to_resume,
    drop constraint if exists probes_only_in_doubt,
    add constraint known_mode check (mode in ('transaction', 'at_least_once', 'in_steps', 'at_most_once', 'mark')),
    -- An entry of the index has at most 2704 bytes.
    add constraint key_length check (
        octet_length(scope) between 1 and 255
        and octet_length(operation) between 1 and 255
        and octet_length(value) between 1 and 255
    ),
    -- No caller can have such a key, so no caller would come back for the record.
    add constraint key_without_control_characters check (
        scope::text !~ '[\u0001-\u001f\u007f-\u009f]'::text
        and operation::text !~ '[\u0001-\u001f\u007f-\u009f]'::text
        and value::text !~ '[\u0001-\u001f\u007f-\u009f]'::text
    ),
    -- All marks of a key are alike.
    add constraint fingerprint_unless_mark check ((mode = 'mark') = (fingerprint is null)),
    add constraint fingerprint_is_versioned check (octet_length(fingerprint) between 2 and 255),
    -- A claim that never began does not count, and leaves nothing of its own.
    add constraint attempts_count_from_one check (
        attempt >= 1
        or (
            attempt = 0
            and mode in ('at_least_once', 'in_steps', 'at_most_once')
            and completed_at is null
            and lease_until = '-infinity'
            and steps is null
            and request is null
        )
    ),
    -- An operator permits the attempt after the attempt that the operator saw. The permitted attempt keeps the number.
    add constraint grant_only_to_repeat check (
        granted_attempt is null
        or (
            granted_attempt between 2 and attempt + 1
            and completed_at is null
            and mode in ('at_least_once', 'in_steps', 'at_most_once')
        )
    ),
    add constraint mark_is_complete check (mode <> 'mark' or completed_at is not null),
    add constraint completed_has_no_lease check (completed_at is null or lease_until is null),
    -- In transaction mode the transaction itself is the lease. A claim of any mode can be released.
    add constraint deadline_only_for_leases check (
        lease_until is null
        or mode in ('at_least_once', 'in_steps', 'at_most_once')
        or (mode = 'transaction' and lease_until = '-infinity')
    ),
    add constraint unfinished_lease_has_a_deadline check (
        mode not in ('at_least_once', 'in_steps', 'at_most_once') or completed_at is not null or lease_until is not null
    ),
    add constraint response_only_when_completed check (
        completed_at is not null
        or (response_status is null and response_headers is null and response_body is null)
    ),
    add constraint steps_only_in_steps check (steps is null or (mode = 'in_steps' and completed_at is null and jsonb_typeof(steps) = 'object')),
    add constraint request_only_to_resume check (
        request is null or (mode in ('at_least_once', 'in_steps', 'at_most_once') and completed_at is null)
    ),
    -- An attempt or a decision removes earlier findings.
    add constraint probes_only_in_doubt check (
        probes is null
        or (
            mode in ('in_steps', 'at_most_once')
            and completed_at is null
            and request is not null
            and jsonb_typeof(probes) = 'object'
        )
    );
